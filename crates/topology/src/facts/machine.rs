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

impl Machine {
    /// Memory nodes of each socket: NPS of AMD. `None` where a node's socket is not known, or where
    /// sockets have different numbers.
    #[must_use]
    pub fn nodes_per_socket(&self) -> Option<u32> {
        let sockets: Vec<i32> = self.numa.iter().map(|node| node.socket).collect::<Option<_>>()?;
        let count = |socket: i32| sockets.iter().filter(|other| **other == socket).count();
        let first = count(*sockets.first()?);
        let is_even = sockets.iter().all(|socket| count(*socket) == first);
        is_even.then(|| u32::try_from(first).ok()).flatten()
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_nodes_are_counted_by_socket_or_not_at_all() {
        let of = |sockets: &[Option<i32>]| {
            let node =
                |(id, socket): (i32, &Option<i32>)| NumaNode { id, cpus: id.to_string(), socket: *socket };
            Machine { numa: (0..).zip(sockets).map(node).collect(), ..Machine::default() }.nodes_per_socket()
        };
        assert_eq!(of(&[Some(0), Some(1)]), Some(1));
        assert_eq!(of(&[Some(0), Some(0), Some(1), Some(1)]), Some(2));
        assert_eq!((of(&[]), of(&[Some(0), None]), of(&[Some(0), Some(0), Some(1)])), (None, None, None));
    }
}
