//! What is drawn: memory nodes, root buses, bridges and devices, as a tree.

use serde::Serialize;

use super::{Matrix, Peers};
use nobounce_topology::bandwidth;
use nobounce_topology::facts::{Facts, Link, PciDevice, Port};

/// What a branch of the tree is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A socket with one or more memory nodes, or a memory node.
    Node,
    /// A root bus.
    Root,
    /// A root port.
    RootPort,
    /// A PCIe switch: its port upwards.
    Switch,
    /// A port of a switch downwards, or another bridge.
    Port,
    /// A GPU.
    Gpu,
    /// A network adapter.
    Nic,
    /// An NVMe drive.
    Nvme,
}

/// A branch of the tree.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Branch {
    /// What it is.
    pub kind: Kind,
    /// PCI address, or the name of the node or root bus.
    pub address: String,
    /// What to call it.
    pub label: String,
    /// Further words: link, driver, ports.
    pub notes: Vec<String>,
    /// The link upwards, now and as it could be.
    pub link: Option<Link>,
    /// Whether the link runs below what both ends can do.
    pub degraded: bool,
    /// Whether it is an adapter without a port that carries traffic.
    pub down: bool,
    /// What hangs below.
    pub children: Vec<Self>,
}

/// The machine as it is drawn.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Topology {
    /// What the vendor calls it.
    pub product: Option<String>,
    /// Memory nodes with the devices attached to them.
    pub nodes: Vec<Branch>,
    /// GPUs and adapters.
    pub matrix: Matrix,
    /// GPUs among each other; empty where the driver was not asked.
    #[serde(skip_serializing_if = "Peers::is_empty")]
    pub peers: Peers,
}

impl Topology {
    /// The machine of these facts.
    #[must_use]
    pub fn of(facts: &Facts) -> Self {
        let mut ids: Vec<i32> = facts.machine.numa.iter().map(|node| node.id).collect();
        for device in &facts.pci {
            let id = node_of(facts, device);
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids.sort_unstable();
        let nodes = ids
            .into_iter()
            .map(|id| node(facts, id))
            .filter(|node| !node.children.is_empty() || !facts.pci.iter().any(|d| !d.is_bridge()))
            .collect();
        Self {
            product: facts.machine.product.known().cloned(),
            nodes,
            matrix: Matrix::of(facts),
            peers: Peers::of(facts),
        }
    }
}

/// The memory node of a device; -1 where that is not known. With one node there is nothing to know.
fn node_of(facts: &Facts, device: &PciDevice) -> i32 {
    match (device.numa_node.get().filter(|node| *node >= 0), facts.machine.numa.as_slice()) {
        (Some(node), _) => node,
        (None, [only]) => only.id,
        (None, _) => -1,
    }
}

fn node(facts: &Facts, id: i32) -> Branch {
    let known = facts.machine.numa.iter().find(|node| node.id == id);
    let label = match known.and_then(|node| node.socket) {
        _ if id < 0 => "memory node unknown".to_owned(),
        Some(socket) => format!("socket {socket}, memory node {id}"),
        None => format!("memory node {id}"),
    };
    let mut roots: Vec<&str> = facts
        .pci
        .iter()
        .filter(|device| node_of(facts, device) == id && device.parent.is_none())
        .map(|device| device.root.as_str())
        .collect();
    roots.sort_unstable();
    roots.dedup();
    let children = roots.into_iter().map(|root| root_bus(facts, id, root)).collect();
    let notes = known.map(|node| format!("CPUs {}", node.cpus)).into_iter().collect();
    Branch {
        kind: Kind::Node,
        address: format!("node{id}"),
        label,
        notes,
        link: None,
        degraded: false,
        down: false,
        children,
    }
}

fn root_bus(facts: &Facts, id: i32, root: &str) -> Branch {
    let children = facts
        .pci
        .iter()
        .filter(|device| device.parent.is_none() && device.root == root && node_of(facts, device) == id)
        .map(|device| branch(facts, device, 0))
        .collect();
    let label = if root.is_empty() {
        "root bus unknown".to_owned()
    } else {
        format!("root bus {}", root.trim_start_matches("pci"))
    };
    Branch {
        kind: Kind::Root,
        address: root.to_owned(),
        label,
        notes: Vec::new(),
        link: None,
        degraded: false,
        down: false,
        children,
    }
}

/// Deeper than any real tree: a broken one may loop.
const MAX_DEPTH: usize = 64;

fn branch(facts: &Facts, device: &PciDevice, depth: usize) -> Branch {
    let below: Vec<&PciDevice> = if depth < MAX_DEPTH {
        facts
            .pci
            .iter()
            .filter(|other| {
                other.parent.as_deref() == Some(&device.address) && other.address != device.address
            })
            .collect()
    } else {
        Vec::new()
    };
    let parent = device.parent.as_deref().and_then(|parent| facts.pci_device(parent));
    let kind = kind(device, parent, &below);
    let mut notes = Vec::new();
    let nics: Vec<_> =
        facts.nics.iter().filter(|nic| nic.address.as_deref() == Some(&device.address)).collect();
    let gpu = facts.gpus.iter().find(|gpu| gpu.address == device.address);
    let label = match kind {
        Kind::Gpu => gpu.map_or_else(
            || "GPU".to_owned(),
            |gpu| match gpu.name.known() {
                Some(name) => format!("{}: {name}", gpu.label()),
                None => gpu.label(),
            },
        ),
        Kind::Nic if !nics.is_empty() => {
            nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>().join(", ")
        }
        Kind::Nic => format!("network {}", vendor(device)),
        Kind::Nvme => "NVMe".to_owned(),
        Kind::Switch => format!("PCIe switch {}", vendor(device)).trim_end().to_owned(),
        Kind::RootPort => "root port".to_owned(),
        _ => "port".to_owned(),
    };
    if kind == Kind::Nic && nics.is_empty() {
        notes.push("no RDMA device".to_owned());
    }
    for port in nics.iter().flat_map(|nic| &nic.ports) {
        let rate = port.rate_gbps.known().map_or_else(String::new, |rate| format!("{rate} Gb/s "));
        let layer = match nics.first().and_then(|nic| nic.driver.as_deref()) {
            Some("efa") => "EFA",
            _ if port.is_ethernet() => "RoCE",
            _ => "IB",
        };
        let state = if port.is_active() { String::new() } else { format!(" {}", port.state) };
        notes.push(format!("{rate}{layer}{state}"));
    }
    if kind == Kind::Gpu
        && let Some(memory) = gpu.and_then(|gpu| gpu.memory_bytes.get())
    {
        notes.push(crate::checks::bytes(memory));
    }
    let degraded = device.link.is_some_and(|link| {
        let above = parent.and_then(|port| port.link);
        let speed = above.map_or(link.max_speed, |port| port.max_speed.min(link.max_speed));
        let width = above.map_or(link.max_width, |port| port.max_width.min(link.max_width));
        link.speed < speed * 0.99 || link.width < width
    });
    Branch {
        kind,
        address: device.address.clone(),
        label,
        notes,
        link: device.link,
        degraded,
        down: !nics.is_empty() && !nics.iter().flat_map(|nic| &nic.ports).any(Port::may_be_active),
        children: below.into_iter().map(|child| branch(facts, child, depth + 1)).collect(),
    }
}

fn kind(device: &PciDevice, parent: Option<&PciDevice>, below: &[&PciDevice]) -> Kind {
    if device.is_gpu() {
        Kind::Gpu
    } else if device.is_network() {
        Kind::Nic
    } else if device.is_nvme() {
        Kind::Nvme
    } else if parent.is_none() {
        Kind::RootPort
    } else if below.iter().any(|child| child.is_bridge()) {
        Kind::Switch
    } else {
        Kind::Port
    }
}

fn vendor(device: &PciDevice) -> &'static str {
    match device.vendor {
        0x15b3 => "NVIDIA/Mellanox",
        0x10de => "NVIDIA",
        0x1002 => "AMD",
        0x8086 => "Intel",
        0x1000 | 0x10b5 => "Broadcom PEX",
        0x14e4 => "Broadcom",
        0x11f8 => "Microchip",
        0x1d0f => "Amazon",
        0x1af4 => "virtio",
        _ => "",
    }
}

/// `Gen4 x16`, and what it could be where that is more.
#[must_use]
pub(super) fn link_words(branch: &Branch) -> String {
    match branch.link {
        None => String::new(),
        Some(link) => {
            let now = format!("{} x{}", bandwidth::generation(link.speed), link.width);
            let could = format!("{} x{}", bandwidth::generation(link.max_speed), link.max_width);
            if now == could {
                now
            } else if branch.degraded {
                format!("{now} of {could}!")
            } else {
                format!("{now} of {could}")
            }
        }
    }
}
