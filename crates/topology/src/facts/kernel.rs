//! The kernel: version, options, modules.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Gdrdrv, Read};

/// The kernel and what is loaded into it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// `uname -r`.
    #[serde(default)]
    pub release: String,
    /// The command line it was started with.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub command_line: Read<String>,
    /// Options it was built with that matter here, without `CONFIG_`: `y`, `m` or `n`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub options: Read<BTreeMap<String, String>>,
    /// Loaded modules that matter here.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub modules: Read<BTreeMap<String, Module>>,
    /// Modules that matter here and could be loaded: they are installed for this kernel.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub installed: Read<Vec<String>>,
    /// Modules that are loaded at every boot (`modules-load.d` and the like), as far as they matter
    /// here.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub at_boot: Read<Vec<String>>,
    /// Clients of the peer-memory interface of OFED's ib_core: the folders of
    /// `/sys/kernel/mm/memory_peers`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub peer_memory_clients: Read<Vec<String>>,
    /// Whether ib_core has that interface (`ib_register_peer_memory_client` in `/proc/kallsyms`).
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub peer_memory_api: Read<bool>,
    /// NVIDIA's module; null if it is not loaded.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub nvidia: Read<Option<NvidiaModule>>,
    /// GDRCopy's module; null if it is not loaded.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub gdrdrv: Read<Option<Gdrdrv>>,
    /// The version of OFED or DOCA's network drivers; null if the kernel's own are used.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub ofed: Read<Option<String>>,
    /// Lines of the kernel's log that matter here.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub log: Read<Vec<String>>,
}

/// Why the clients of the peer-memory interface are not known where the kernel shows no folder of
/// them: newer OFEDs show none.
pub const NO_FOLDER: &str = "no such folder";

/// A loaded module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Module {
    /// Its version, if it tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// NVIDIA's kernel module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvidiaModule {
    /// Its version: `580.159.04`.
    pub version: String,
    /// Whether it is the open one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<bool>,
    /// Parameters that matter here (`/proc/driver/nvidia/params`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
}

impl Kernel {
    /// Major and minor version.
    #[must_use]
    pub fn version(&self) -> Option<(u32, u32)> {
        version_pair(&self.release)
    }

    /// The major version of NVIDIA's module: 580 of `580.159.04`.
    #[must_use]
    pub fn nvidia_major(&self) -> Option<u32> {
        self.nvidia.known()?.as_ref()?.version.split('.').next()?.parse().ok()
    }

    /// Whether a module is loaded; unknown where the list could not be read.
    #[must_use]
    pub fn is_loaded(&self, module: &str) -> Option<bool> {
        self.modules.known().map(|modules| modules.contains_key(module))
    }

    /// Whether the peer-memory interface shows NVIDIA's module in its folder, where older libraries
    /// look for it.
    #[must_use]
    pub fn shows_nvidia_client(&self) -> Option<bool> {
        match self.peer_memory_clients.known() {
            Some(clients) => {
                Some(clients.iter().any(|name| name.starts_with("nv_mem") || name == "nvidia-peermem"))
            }
            None => (self.peer_memory_clients.why_not() == Some(NO_FOLDER)).then_some(false),
        }
    }

    /// Whether an option is built in or a module; unknown where the options are.
    #[must_use]
    pub fn has_option(&self, option: &str) -> Option<bool> {
        let options = self.options.known()?;
        Some(options.get(option).is_some_and(|value| value == "y" || value == "m"))
    }

    /// A word of the command line, such as `iommu` for `iommu=pt`: its value, empty if it has none.
    /// The last one counts.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.command_line.known()?.split_whitespace().rev().find_map(|word| {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            (key == name).then_some(value)
        })
    }
}

/// The first two numbers of a version.
pub fn version_pair(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next().and_then(|part| part.parse().ok()).unwrap_or(0)))
}
