//! Facts from files: `/sys`, `/proc`, `/dev`, `/etc`, of this machine or of a copy of another
//! one's.
//!
//! Only files are read here. The command adds what needs a library (NVML, CUDA, libibverbs) or an
//! experiment.

mod config_space;
pub mod gzip;
mod infiniband;
mod ip;
mod kernel;
mod machine;
pub mod pci;
mod process;
mod root;
mod settings;
mod storage;
mod wheels;

use std::collections::BTreeMap;

use crate::facts::{Facts, Libraries, Read};

pub use config_fuzz::parse_config_space;
pub use infiniband::umad;
pub use ip::destinations;
pub use root::Root;
pub use settings::{matters, nccl_versions_in};
pub use storage::storage;

/// The facts that come from the environment of a process.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Variables; only those that matter are kept.
    pub environment: BTreeMap<String, String>,
    /// The user's home, for files of settings.
    pub home: Option<String>,
}

/// Versions of all NCCLs that a program may load. Empty: one whose version is not known.
#[must_use]
pub fn nccl_versions(root: &Root, surroundings: &Surroundings) -> Vec<String> {
    settings::nccl_versions(root, surroundings)
}

/// Why there are no facts.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// The root folder has neither `sys` nor `proc`.
    #[error("{0} holds neither sys/bus/pci nor proc: it is no copy of a machine's files")]
    NoMachine(String),
}

/// Reads everything that files tell.
///
/// # Errors
/// There is nothing of the kind below the root. Single files that cannot be read become unknown
/// facts.
pub fn read(root: &Root, surroundings: &Surroundings) -> Result<Facts, SysfsError> {
    if !root.exists("/sys/bus/pci")
        && !root.exists("/proc/sys")
        && !root.exists("/sys/class")
        && !root.exists("/proc/cpuinfo")
    {
        return Err(SysfsError::NoMachine(root.join("/").display().to_string()));
    }
    let pci = pci::devices(root).unwrap_or_default();
    let gpus = pci::gpus(&pci);
    let nics = infiniband::nics(root);
    let has_efa = nics.iter().any(|nic| nic.driver.as_deref() == Some("efa"));
    Ok(Facts {
        host: root.text("/proc/sys/kernel/hostname").ok(),
        machine: machine::machine(root),
        kernel: kernel::kernel(root),
        gpus,
        nics,
        pci,
        devices: process::devices(root),
        process: process::process(root),
        environment: surroundings
            .environment
            .iter()
            .filter(|(name, _)| matters(name))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
        config_files: settings::config_files(root, surroundings.home.as_deref()),
        libraries: Libraries {
            ucx: settings::ucx(root, surroundings),
            nccl: settings::nccl(root, surroundings),
            gdrapi: settings::gdrapi(root),
            providers: wheels::providers(root),
            wheels: wheels::wheels(root, &settings::python_folders(root, surroundings)),
            ofi_plugin: if has_efa { settings::ofi_plugin(root, surroundings) } else { Read::default() },
            ..Libraries::default()
        },
        ..Facts::default()
    })
}

/// The parser of the configuration space by itself, for fuzzing.
mod config_fuzz {
    /// Takes any bytes; ends in facts or in nothing.
    #[must_use]
    pub fn parse_config_space(bytes: &[u8]) -> Option<crate::facts::ConfigSpace> {
        super::config_space::parse(bytes).ok()
    }
}
