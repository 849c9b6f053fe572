//! The machine: processors, sockets, memory nodes.

use serde::{Deserialize, Serialize};

use super::Read;

/// The machine without its devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Architecture as `uname -m` says it: `x86_64`, `aarch64`.
    #[serde(default)]
    pub arch: String,
    /// What the vendor calls it: `DGX H100`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub product: Read<String>,
    /// The processor.
    #[serde(default)]
    pub cpu: Cpu,
    /// How many processors are plugged.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub sockets: Read<u32>,
    /// Memory nodes that have processors.
    #[serde(default)]
    pub numa: Vec<NumaNode>,
    /// The hypervisor, if the machine is a virtual one; null if it is not.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub hypervisor: Read<Option<String>>,
}

/// The processor, as `/proc/cpuinfo` names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    /// `GenuineIntel`, `AuthenticAMD`, `ARM`, ...
    #[serde(default)]
    pub vendor: String,
    /// Family number (x86).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<u32>,
    /// Model number (x86); the part number of ARM's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<u32>,
    /// Its name.
    #[serde(default)]
    pub name: String,
}

/// One memory node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaNode {
    /// Its number.
    pub id: i32,
    /// Its CPUs as the kernel lists them: `0-31,64-95`.
    pub cpus: String,
    /// The socket it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<i32>,
}
