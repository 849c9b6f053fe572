//! Arguments of `nobounce cdi`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Give containers the software NIC: Container Device Interface files
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  nobounce cdi generate --out /etc/cdi/nobounce.json
  podman run --device nobounce.dev/nic=nb0 IMAGE ibv_devinfo
  nobounce cdi check --rootfs $(podman image mount IMAGE)")]
pub(crate) struct CdiArgs {
    #[command(subcommand)]
    pub(crate) command: CdiCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CdiCommand {
    Generate(CdiGenerateArgs),
    Check(CheckArgs),
}

/// Write a file that container engines take: devices nb0, nb1, ... and all of kind nobounce.dev/nic
#[derive(Debug, Args)]
pub(crate) struct CdiGenerateArgs {
    /// Interface or address in the container of nb0; a comma-separated list for nb0, nb1, ...
    #[arg(long, value_name = "NAME", default_value = "eth0")]
    pub(crate) addr: String,

    /// File to write, such as /etc/cdi/nobounce.json [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,

    /// Copy the libraries to this directory first, and mount that one
    #[arg(long, value_name = "DIR")]
    pub(crate) install: Option<PathBuf>,

    /// Where the container finds the drop-in libraries
    #[arg(long, value_name = "DIR", default_value = super::spec::IN_CONTAINER)]
    pub(crate) container_path: PathBuf,

    /// Further variables of the container
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
}

/// Check an installed file, and whether an image can load the libraries
///
/// Exit code 1 if a container would not get a working device.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Files to check [default: those of nobounce.dev/nic in /etc/cdi and /var/run/cdi]
    #[arg(value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,

    /// Root file system of an image: its C library must be able to load the libraries
    #[arg(long, value_name = "DIR")]
    pub(crate) rootfs: Option<PathBuf>,
}
