//! The PCI tree, and the distance between two of its devices.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::facts::{Facts, PciDevice};

/// Distance between two devices, nearest first. The names are those of `nvidia-smi topo` and NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Distance {
    /// One switch at the most.
    Pix,
    /// Several switches, but no host bridge.
    Pxb,
    /// A host bridge: the processor.
    Phb,
    /// Two host bridges of one memory node.
    Node,
    /// Two memory nodes, mostly two sockets.
    Sys,
}

impl Distance {
    /// All, nearest first.
    pub const ALL: [Self; 5] = [Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        }
    }

    /// What it means.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Pix => "below one PCIe switch",
            Self::Pxb => "several PCIe switches, not the processor",
            Self::Phb => "through the processor's host bridge",
            Self::Node => "through two host bridges of one memory node",
            Self::Sys => "across the link between memory nodes or sockets",
        }
    }

    /// Whether packets need not pass the processor.
    #[must_use]
    pub const fn is_below_switch(self) -> bool {
        matches!(self, Self::Pix | Self::Pxb)
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The PCI tree of a machine.
#[derive(Debug)]
pub struct Tree<'a> {
    facts: &'a Facts,
    by_address: BTreeMap<&'a str, &'a PciDevice>,
}

/// Most bridges above a device: bus numbers are one byte, and a broken tree may loop.
const MAX_DEPTH: usize = 64;

impl<'a> Tree<'a> {
    /// The tree of these facts.
    #[must_use]
    pub fn new(facts: &'a Facts) -> Self {
        let by_address = facts.pci.iter().map(|device| (device.address.as_str(), device)).collect();
        Self { facts, by_address }
    }

    /// A device by its address.
    #[must_use]
    pub fn get(&self, address: &str) -> Option<&'a PciDevice> {
        self.by_address.get(address).copied()
    }

    /// The bridges above a device, nearest first.
    #[must_use]
    pub fn bridges_above(&self, address: &str) -> Vec<&'a PciDevice> {
        let mut found: Vec<&PciDevice> = Vec::new();
        let mut at = self.get(address).and_then(|device| device.parent.as_deref());
        while let Some(bridge) = at.and_then(|parent| self.get(parent)) {
            if found.len() >= MAX_DEPTH || found.iter().any(|known| known.address == bridge.address) {
                break;
            }
            found.push(bridge);
            at = bridge.parent.as_deref();
        }
        found
    }

    /// The bridges between two devices, and whether the path turns below the CPU.
    #[must_use]
    pub fn between(&self, a: &str, b: &str) -> Between<'a> {
        let (up, down) = (self.bridges_above(a), self.bridges_above(b));
        let turn = up.iter().position(|bridge| down.iter().any(|other| other.address == bridge.address));
        match turn {
            Some(up_at) => {
                let down_at = down.iter().position(|bridge| bridge.address == up[up_at].address).unwrap_or(0);
                Between {
                    ports: up[..up_at].iter().chain(down[..down_at].iter().rev()).copied().collect(),
                    turn: Some(up[up_at]),
                    up: up_at,
                    down: down_at,
                }
            }
            None => Between {
                up: up.len(),
                down: down.len(),
                ports: up.into_iter().chain(down.into_iter().rev()).collect(),
                turn: None,
            },
        }
    }

    /// Distance between two devices; `None` if one of them is not in the tree.
    #[must_use]
    pub fn distance(&self, a: &str, b: &str) -> Option<Distance> {
        let (one, other) = (self.get(a)?, self.get(b)?);
        let between = self.between(a, b);
        if between.turn.is_some() {
            // A PCIe switch has one upstream port and several downstream ports. Two devices below
            // one switch have one port each before the turn.
            return Some(if between.up <= 1 && between.down <= 1 { Distance::Pix } else { Distance::Pxb });
        }
        if !one.root.is_empty() && one.root == other.root {
            return Some(Distance::Phb);
        }
        let node = |device: &PciDevice| device.numa_node.get().filter(|node| *node >= 0);
        match (node(one), node(other)) {
            (Some(a), Some(b)) if a == b => Some(Distance::Node),
            (Some(_), Some(_)) => Some(Distance::Sys),
            // The firmware does not say. With one NUMA node there is nothing to cross.
            _ if self.facts.machine.numa.len() <= 1 => Some(Distance::Node),
            _ => Some(Distance::Sys),
        }
    }

    /// Whether two devices are known to be on one socket.
    #[must_use]
    pub fn share_a_socket(&self, a: &str, b: &str) -> bool {
        let socket = |address: &str| {
            let node = self.get(address)?.numa_node.get()?;
            self.facts.machine.numa.iter().find(|known| known.id == node)?.socket
        };
        socket(a).is_some_and(|one| socket(b) == Some(one))
    }

    /// Whether the distance is known, or guessed because the facts lack a NUMA node.
    #[must_use]
    pub fn distance_is_sure(&self, a: &str, b: &str) -> bool {
        let (Some(one), Some(other)) = (self.get(a), self.get(b)) else { return false };
        if self.between(a, b).turn.is_some() || (!one.root.is_empty() && one.root == other.root) {
            return true;
        }
        let known = |device: &PciDevice| device.numa_node.get().is_some_and(|node| node >= 0);
        (known(one) && known(other)) || self.facts.machine.numa.len() == 1
    }
}

/// The way between two devices.
#[derive(Debug)]
pub struct Between<'a> {
    /// The ports on the path, without the common upstream bridge.
    pub ports: Vec<&'a PciDevice>,
    /// The common upstream bridge; `None` if the path turns in the CPU.
    pub turn: Option<&'a PciDevice>,
    up: usize,
    down: usize,
}
