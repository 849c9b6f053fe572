//! Servers.

use super::build::{Build, Card, GIB, Net};
use crate::facts::{Cpu, Facts, GpuVendor, Read};

const A100: Card = Card {
    name: "NVIDIA A100-SXM4-80GB",
    device: 0x20b2,
    capability: 80,
    memory: 80 * GIB,
    bar1: 128 * GIB,
    speed: 16.0,
    nvlinks: 12,
    vendor: GpuVendor::Nvidia,
};
const H100: Card = Card {
    name: "NVIDIA H100 80GB HBM3",
    device: 0x2330,
    capability: 90,
    memory: 80 * GIB,
    bar1: 128 * GIB,
    speed: 32.0,
    nvlinks: 18,
    vendor: GpuVendor::Nvidia,
};

pub(super) fn epyc(model: u32, name: &str) -> Cpu {
    Cpu { vendor: "AuthenticAMD".to_owned(), family: Some(25), model: Some(model), name: name.to_owned() }
}

pub(super) fn xeon(model: u32, name: &str) -> Cpu {
    Cpu { vendor: "GenuineIntel".to_owned(), family: Some(6), model: Some(model), name: name.to_owned() }
}

/// Eight A100 in pairs below four switches, each with two adapters of 200 Gb/s; two sockets of EPYC.
pub(super) fn dgx_a100() -> Facts {
    let mut build =
        Build::new("DGXA100 920-23687-2530-000", epyc(49, "AMD EPYC 7742 64-Core Processor"), 2, 64);
    for (quarter, numa) in [(0_u32, 0), (1, 0), (2, 1), (3, 1)] {
        let bus = 0x10 + quarter * 0x30;
        let root = format!("pci0000:{bus:02x}");
        let top = build.bridge(&format!("0000:{bus:02x}:01.1"), None, &root, numa, 16.0);
        let up = build.bridge(&format!("0000:{:02x}:00.0", bus + 1), Some(&top), &root, numa, 16.0);
        for slot in 0..4_u32 {
            let down =
                build.bridge(&format!("0000:{:02x}:{slot:02x}.0", bus + 2), Some(&up), &root, numa, 16.0);
            let address = format!("0000:{:02x}:00.0", bus + 4 + slot);
            if slot % 2 == 0 {
                build.gpu(&address, Some(&down), &root, numa, A100);
            } else {
                build.nic(&address, Some(&down), &root, numa, 16.0, Net::InfiniBand(200));
            }
        }
    }
    build.facts
}

/// Eight H100, each below a switch of its own with an adapter of 400 Gb/s; two sockets of Sapphire Rapids; NVMe and storage adapters beside.
pub(super) fn dgx_h100() -> Facts {
    h100("DGXH100", Net::InfiniBand(400))
}

/// The same with RoCE.
pub(super) fn hgx_h100_roce() -> Facts {
    h100("HGX H100 server", Net::Roce(400))
}

fn h100(product: &str, net: Net) -> Facts {
    let mut build = Build::new(product, xeon(143, "Intel(R) Xeon(R) Platinum 8480C"), 2, 112);
    for gpu in 0..8_u32 {
        let numa = i32::from(gpu >= 4);
        let bus = 0x10 + gpu * 0x1c;
        let root = format!("pci0000:{bus:02x}");
        let top = build.bridge(&format!("0000:{bus:02x}:01.0"), None, &root, numa, 32.0);
        let up = build.bridge(&format!("0000:{:02x}:00.0", bus + 1), Some(&top), &root, numa, 32.0);
        for slot in 0..3_u32 {
            let down =
                build.bridge(&format!("0000:{:02x}:{slot:02x}.0", bus + 2), Some(&up), &root, numa, 32.0);
            let address = format!("0000:{:02x}:00.0", bus + 4 + slot);
            match slot {
                0 => build.nic(&address, Some(&down), &root, numa, 32.0, net),
                1 => build.gpu(&address, Some(&down), &root, numa, H100),
                _ => build.nvme(&address, Some(&down), &root, numa),
            }
        }
    }
    build.facts
}

/// Two sockets of EPYC without switches: on each two GPUs and one adapter, all on root ports.
pub(super) fn dual_socket() -> Facts {
    let mut build = Build::new("R7525", epyc(1, "AMD EPYC 7763 64-Core Processor"), 2, 64);
    let card = Card {
        name: "NVIDIA A100-PCIE-40GB",
        device: 0x20f1,
        memory: 40 * GIB,
        bar1: 64 * GIB,
        nvlinks: 0,
        ..A100
    };
    for (numa, base) in [(0, 0x00_u32), (1, 0x80)] {
        for (at, slot) in [(0x20_u32, 0), (0x40, 1), (0x60, 2)] {
            let bus = base + at;
            let root = format!("pci0000:{bus:02x}");
            let port = build.bridge(&format!("0000:{bus:02x}:03.1"), None, &root, numa, 16.0);
            let address = format!("0000:{:02x}:00.0", bus + 1);
            if slot == 2 {
                build.nic(&address, Some(&port), &root, numa, 16.0, Net::Roce(200));
            } else {
                build.gpu(&address, Some(&port), &root, numa, card);
            }
        }
    }
    build.facts
}

/// Eight MI300X, each with an adapter of 400 Gb/s below its switch; the kernel's own drivers.
pub(super) fn mi300x() -> Facts {
    let mut build = Build::new("MI300X server", epyc(17, "AMD EPYC 9654 96-Core Processor"), 2, 96);
    let card = Card {
        name: "AMD Instinct MI300X",
        device: 0x74a1,
        capability: 0,
        memory: 192 * GIB,
        bar1: 256 * GIB,
        speed: 32.0,
        nvlinks: 0,
        vendor: GpuVendor::Amd,
    };
    for gpu in 0..8_u32 {
        let numa = i32::from(gpu >= 4);
        let bus = 0x10 + gpu * 0x1c;
        let root = format!("pci0000:{bus:02x}");
        let top = build.bridge(&format!("0000:{bus:02x}:01.1"), None, &root, numa, 32.0);
        let up = build.bridge(&format!("0000:{:02x}:00.0", bus + 1), Some(&top), &root, numa, 32.0);
        let left = build.bridge(&format!("0000:{:02x}:00.0", bus + 2), Some(&up), &root, numa, 32.0);
        let right = build.bridge(&format!("0000:{:02x}:01.0", bus + 2), Some(&up), &root, numa, 32.0);
        build.gpu(&format!("0000:{:02x}:00.0", bus + 4), Some(&left), &root, numa, card);
        build.nic(&format!("0000:{:02x}:00.0", bus + 5), Some(&right), &root, numa, 32.0, Net::Roce(400));
    }
    let mut facts = build.facts;
    facts.kernel.nvidia = Read::Yes(None);
    facts.libraries.nvml = Read::Yes(None);
    facts.libraries.cuda = Read::Yes(None);
    if let Read::Yes(Some(ucx)) = &mut facts.libraries.ucx {
        ucx.modules = ["ib", "ib_mlx5", "rdmacm", "rocm"].map(str::to_owned).to_vec();
    }
    if let Read::Yes(modules) = &mut facts.kernel.modules {
        modules.retain(|name, _| !name.starts_with("nvidia"));
        modules.insert("amdgpu".to_owned(), crate::facts::Module::default());
    }
    if let Read::Yes(nodes) = &mut facts.devices {
        nodes.retain(|node| !node.path.starts_with("/dev/nvidia"));
    }
    if let Read::Yes(options) = &mut facts.kernel.options {
        options.insert("HSA_AMD_P2P".to_owned(), "y".to_owned());
    }
    facts.kernel.peer_memory_clients = Read::Yes(vec!["amdkfd".to_owned()]);
    facts
}
