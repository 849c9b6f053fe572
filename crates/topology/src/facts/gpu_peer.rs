//! Whether GPUs reach each other's memory.

use serde::{Deserialize, Serialize};

use super::Read;

/// Two GPUs, and what their driver says about peer access between them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuPeer {
    /// PCI address of the one.
    pub one: String,
    /// PCI address of the other.
    pub other: String,
    /// Whether each reads and writes the other's memory.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub access: Read<bool>,
    /// Whether NVLink joins them.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub nvlink: Read<bool>,
    /// Why they have no access, if they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denied: Option<PeerDenied>,
}

/// Why GPUs have no peer access, as NVML words it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerDenied {
    /// The chipset does not forward packets between them.
    Chipset,
    /// The model of the GPUs has no peer access.
    Gpu,
    /// They are below different I/O hubs.
    Topology,
    /// A key of the driver switches it off.
    Disabled,
    /// No reason was given.
    Unsupported,
}
