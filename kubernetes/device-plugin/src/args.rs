//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::names::{CdiDeviceName, ResourceName};
use crate::socket;

const EXAMPLES: &str = "\
Examples:
  nobounce-device-plugin                                       limits: nobounce.dev/nic: 1
  nobounce-device-plugin --resource nobounce.dev/nic --resource rdma/hca_shared_devices_a
                                                               also for manifests of hardware NICs";

/// Offer the software NIC to Kubernetes as a resource that pods request.
///
/// Runs on each node, as a DaemonSet, until SIGTERM or SIGINT. A container that requests the
/// resource gets the CDI device, which `nobounce cdi generate` defines.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "nobounce-device-plugin",
    version,
    long_version = env!("LONG_VERSION"),
    after_help = EXAMPLES
)]
pub(crate) struct Args {
    /// Name of the resource in pods; repeat it for several names
    #[arg(long = "resource", value_name = "DOMAIN/NAME", default_value = "nobounce.dev/nic")]
    pub(crate) resources: Vec<ResourceName>,

    /// Devices of each resource: how many containers of this node get one at a time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) count: u32,

    /// CDI device that a container gets
    #[arg(long, value_name = "VENDOR/CLASS=NAME", default_value = "nobounce.dev/nic=nb0")]
    pub(crate) cdi_device: CdiDeviceName,

    /// Directory of the kubelet's device plugin sockets
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins")]
    pub(crate) plugin_dir: PathBuf,

    /// Directory with CDI files; repeat it for several, as in the container runtime's configuration
    #[arg(long = "cdi-dir", value_name = "DIR", default_values = ["/etc/cdi", "/var/run/cdi"])]
    pub(crate) cdi_dirs: Vec<PathBuf>,

    /// Seconds between checks of the CDI files
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) cdi_interval: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ArgsError {
    #[error("--resource {0} is given twice; give it once")]
    Repeated(String),
    #[error("--plugin-dir {0:?} is not valid UTF-8; use another path")]
    NotText(PathBuf),
    #[error(
        "the socket path {path} has {length} bytes, Linux allows {}; use a shorter --plugin-dir",
        socket::MAX_PATH
    )]
    PathLength { path: String, length: usize },
}

impl Args {
    pub(crate) fn cdi_interval(&self) -> Duration {
        Duration::from_secs(self.cdi_interval)
    }

    /// What a single option cannot check.
    pub(crate) fn check(&self) -> Result<(), ArgsError> {
        for (place, resource) in self.resources.iter().enumerate() {
            if self.resources[..place].contains(resource) {
                return Err(ArgsError::Repeated(resource.to_string()));
            }
            let path = self.plugin_dir.join(resource.socket_name());
            let Some(path) = path.to_str() else {
                return Err(ArgsError::NotText(self.plugin_dir.clone()));
            };
            if path.len() > socket::MAX_PATH {
                return Err(ArgsError::PathLength { path: path.to_owned(), length: path.len() });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(options: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from(["nobounce-device-plugin"].iter().chain(options))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn defaults_are_those_of_a_node() {
        let args = parse(&[]).unwrap();
        assert_eq!(args.resources[0].to_string(), "nobounce.dev/nic");
        assert_eq!((args.resources.len(), args.count), (1, 16));
        assert_eq!(args.cdi_dirs, [PathBuf::from("/etc/cdi"), PathBuf::from("/var/run/cdi")]);
        assert_eq!(args.check(), Ok(()));
    }

    #[test]
    fn given_values_replace_the_defaults() {
        let args = parse(&["--resource", "a/b", "--resource", "rdma/hca", "--cdi-dir", "/x"]).unwrap();
        let names: Vec<_> = args.resources.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["a/b", "rdma/hca"]);
        assert_eq!(args.cdi_dirs, [PathBuf::from("/x")]);
    }

    #[test]
    fn wrong_values_are_refused() {
        for options in [
            ["--resource", "nic"],
            ["--count", "0"],
            ["--count", "10001"],
            ["--count", "-1"],
            ["--cdi-device", "nb0"],
            ["--cdi-interval", "0"],
        ] {
            assert!(parse(&options).is_err(), "{options:?}");
        }
        let message = parse(&["--resource", "nic"]).unwrap_err().to_string();
        assert!(message.contains("nobounce.dev/nic"), "{message}");
    }

    #[test]
    fn combinations_are_checked() {
        let args = parse(&["--resource", "a/b", "--resource", "a/b"]).unwrap();
        assert_eq!(args.check(), Err(ArgsError::Repeated("a/b".to_owned())));
        let long = "x".repeat(100);
        let args = parse(&["--plugin-dir", &long]).unwrap();
        assert!(matches!(args.check(), Err(ArgsError::PathLength { length: 131, .. })));
    }
}
