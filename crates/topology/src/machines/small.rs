//! Virtual machines, containers, single boards, workstations.

use super::build::{A100, Build, Card, GIB, H100, Net, Slot, epyc, xeon};
use super::servers;
use crate::facts::{Cpu, Facts, Read};

/// A guest with eight GPUs and eight adapters, all on one bus.
pub(super) fn vm_flat() -> Facts {
    let mut build = Build::new("Virtual Machine", epyc(23, 49, "AMD EPYC 7V12"), 1, 96);
    let card =
        Card { name: "NVIDIA A100-SXM4-40GB", device: 0x20b0, memory: 40 * GIB, bar1: 64 * GIB, ..A100 };
    for slot in 0..8_u32 {
        build.gpu(&format!("0000:00:{:02x}.0", 0x04 + slot), None, "pci0000:00", -1, card);
        build.nic(
            &format!("0000:00:{:02x}.0", 0x14 + slot),
            None,
            "pci0000:00",
            -1,
            16.0,
            Net::InfiniBand(200),
        );
    }
    let mut facts = build.facts;
    facts.machine.hypervisor = Read::Yes(Some("KVM".to_owned()));
    for device in &mut facts.pci {
        // A guest has no IOMMU of its own, and sees no ACS.
        device.iommu = Read::Yes(None);
        if let (true, Read::Yes(config)) = (device.is_network(), &mut device.config) {
            config.ats = Some(true);
        }
    }
    facts
}

/// A container on a DGX H100 that was given its GPUs, but not `/dev/infiniband`.
pub(super) fn container() -> Facts {
    let mut facts = servers::dgx_h100();
    facts.process.container = Read::Yes(Some("docker".to_owned()));
    facts.process.uid = Read::Yes(0);
    facts.process.memlock_bytes = Read::Yes(None);
    facts.process.ipc_lock = Read::Yes(true);
    if let Read::Yes(nodes) = &mut facts.devices {
        nodes.retain(|node| !node.path.starts_with("/dev/infiniband"));
    }
    for nic in &mut facts.nics {
        nic.open_probe = Read::default();
        nic.dma_buf_probe = Read::default();
    }
    // Images have no modules of the host's kernel, and no say in what is loaded at boot.
    facts.kernel.installed = Read::no("there is no /lib/modules in the image");
    facts.kernel.at_boot = Read::Yes(Vec::new());
    facts
}

/// One Grace Hopper with one adapter on its processor.
pub(super) fn gh200() -> Facts {
    let cpu = Cpu {
        vendor: "ARM".to_owned(),
        family: None,
        model: Some(0xd4f),
        name: "Neoverse V2 (Grace and others)".to_owned(),
    };
    let mut build = Build::new("GH200 P4975", cpu, 1, 72);
    let card = Card { name: "NVIDIA GH200 480GB", device: 0x2342, memory: 96 * GIB, nvlinks: 0, ..H100 };
    build.on_root_port(9, 0, "00.0", 0, 32.0, Slot::Gpu(card));
    build.on_root_port(2, 0, "00.0", 0, 32.0, Slot::Nic(32.0, Net::InfiniBand(400)));
    let mut facts = build.facts;
    facts.kernel.command_line = Read::Yes("BOOT_IMAGE=/vmlinuz iommu.passthrough=1".to_owned());
    for gpu in &mut facts.gpus {
        gpu.coherent_link = Read::Yes(true);
    }
    facts
}

/// A desk with a professional card whose BAR1 is 256 MiB and cannot grow, and an adapter of 25
/// Gb/s.
pub(super) fn workstation() -> Facts {
    let mut build = Build::new("Precision 7920", xeon(85, "Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz"), 1, 20);
    let card = Card {
        name: "Quadro RTX 4000",
        device: 0x1eb1,
        capability: 75,
        memory: 8 * GIB,
        bar1: 256 << 20,
        speed: 8.0,
        nvlinks: 0,
        ..A100
    };
    let port = build.bridge("0000:17:00.0", None, "pci0000:17", 0, 8.0);
    build.gpu("0000:18:00.0", Some(&port), "pci0000:17", 0, card);
    let port = build.bridge("0000:17:02.0", None, "pci0000:17", 0, 8.0);
    build.nic("0000:19:00.0", Some(&port), "pci0000:17", 0, 8.0, Net::Roce(25));
    let mut facts = build.facts;
    // 25 Gb/s Ethernet has one lane.
    facts.nics[0].ports[0].lanes = Some(1);
    facts
}

/// A cloud machine with Amazon's adapters below the GPUs' switches.
pub(super) fn p5_efa() -> Facts {
    let mut build = Build::new("p5.48xlarge", epyc(25, 1, "AMD EPYC 7R13"), 2, 96);
    let nic = Slot::Nic(16.0, Net::Efa(100));
    servers::eight(&mut build, "01.0", &[nic, nic, nic, nic, Slot::Gpu(H100)]);
    let mut facts = build.facts;
    facts.machine.hypervisor = Read::Yes(Some("Amazon EC2".to_owned()));
    facts.kernel.ofed = Read::Yes(None);
    facts.kernel.peer_memory_api = Read::Yes(false);
    facts.kernel.peer_memory_clients = Read::no("no such folder");
    if let Read::Yes(modules) = &mut facts.kernel.modules {
        modules.retain(|name, _| !name.starts_with("mlx5") && name != "nvidia_peermem");
        modules.insert("efa".to_owned(), crate::facts::Module::default());
    }
    for device in &mut facts.pci {
        device.iommu = Read::Yes(None);
    }
    facts
}
