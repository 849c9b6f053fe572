//! Servers.

use super::build::{A100, Build, Card, GIB, H100, Net, Slot, epyc, xeon};
use crate::facts::{Facts, GpuVendor, Read};

/// Eight A100 in pairs below four switches, each with two adapters of 200 Gb/s; two sockets of
/// EPYC.
pub(super) fn dgx_a100() -> Facts {
    let cpu = epyc(23, 49, "AMD EPYC 7742 64-Core Processor");
    let mut build = Build::new("DGXA100 920-23687-2530-000", cpu, 2, 64);
    let nic = Slot::Nic(16.0, Net::InfiniBand(200));
    for (quarter, numa) in [(0_u32, 0), (1, 0), (2, 1), (3, 1)] {
        let slots = [Slot::Gpu(A100), nic, Slot::Gpu(A100), nic];
        build.switch(0x10 + quarter * 0x30, "01.1", numa, 16.0, &slots);
    }
    build.facts
}

/// Eight H100, each with an adapter of 400 Gb/s and a drive below its switch; two sockets of Xeon.
pub(super) fn dgx_h100() -> Facts {
    h100("DGXH100", Net::InfiniBand(400))
}

/// Eight B200 in the same way; two sockets of Emerald Rapids.
pub(super) fn dgx_b200() -> Facts {
    let card = Card {
        name: "NVIDIA B200",
        device: 0x2901,
        capability: 100,
        memory: 180 * GIB,
        bar1: 256 * GIB,
        ..H100
    };
    let mut build = Build::new("DGXB200", xeon(207, "INTEL(R) XEON(R) PLATINUM 8570"), 2, 112);
    eight(&mut build, "01.0", &[Slot::Nic(32.0, Net::InfiniBand(400)), Slot::Gpu(card), Slot::Nvme]);
    build.facts
}

/// A DGX H100 with RoCE in the place of InfiniBand.
pub(super) fn hgx_h100_roce() -> Facts {
    h100("HGX H100 server", Net::Roce(400))
}

fn h100(product: &str, net: Net) -> Facts {
    let mut build = Build::new(product, xeon(143, "Intel(R) Xeon(R) Platinum 8480C"), 2, 112);
    eight(&mut build, "01.0", &[Slot::Nic(32.0, net), Slot::Gpu(H100), Slot::Nvme]);
    build.facts
}

/// Eight switches of PCIe 5, four on each socket, all with the same devices.
pub(super) fn eight(build: &mut Build, port: &str, slots: &[Slot]) {
    for at in 0..8_u32 {
        build.switch(0x10 + at * 0x1c, port, i32::from(at >= 4), 32.0, slots);
    }
}

/// Two sockets of EPYC without switches: on each two GPUs and one adapter, all on root ports.
pub(super) fn dual_socket() -> Facts {
    let mut build = Build::new("R7525", epyc(25, 1, "AMD EPYC 7763 64-Core Processor"), 2, 64);
    let gpu = Slot::Gpu(Card {
        name: "NVIDIA A100-PCIE-40GB",
        device: 0x20f1,
        memory: 40 * GIB,
        bar1: 64 * GIB,
        nvlinks: 0,
        ..A100
    });
    for (numa, base) in [(0, 0x00_u32), (1, 0x80)] {
        for (at, slot) in [(0x20_u32, gpu), (0x40, gpu), (0x60, Slot::Nic(16.0, Net::Roce(200)))] {
            build.on_root_port(0, base + at, "03.1", numa, 16.0, slot);
        }
    }
    build.facts
}

/// Eight MI300X, each with an adapter of 400 Gb/s below its switch; the kernel's own drivers.
pub(super) fn mi300x() -> Facts {
    let mut build = Build::new("MI300X server", epyc(25, 17, "AMD EPYC 9654 96-Core Processor"), 2, 96);
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
    eight(&mut build, "01.1", &[Slot::Gpu(card), Slot::Nic(32.0, Net::Roce(400))]);
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
