//! Bricks of machines.

use std::collections::BTreeMap;

use crate::facts::{
    Acs, Bar, ConfigSpace, Cpu, DeviceNode, Facts, Gid, Gpu, GpuVendor, Iommu, Kernel, Libraries, Library,
    Link, Machine, Module, Netdev, Nic, NumaNode, NvidiaModule, PciDevice, Port, Probe, Process, Read, Ucx,
};

/// A machine that grows device by device.
#[derive(Debug)]
pub(super) struct Build {
    pub(super) facts: Facts,
    groups: u32,
}

/// A network port.
#[derive(Clone, Copy, Debug)]
pub(super) enum Net {
    InfiniBand(u32),
    Roce(u32),
    /// Amazon's.
    Efa(u32),
}

/// What is plugged into a slot.
#[derive(Clone, Copy, Debug)]
pub(super) enum Slot {
    Gpu(Card),
    /// The speed of its PCIe link, and its port.
    Nic(f64, Net),
    Nvme,
}

/// A kind of GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Card {
    pub(super) name: &'static str,
    pub(super) device: u32,
    pub(super) capability: u32,
    pub(super) memory: u64,
    pub(super) bar1: u64,
    pub(super) speed: f64,
    pub(super) nvlinks: u32,
    pub(super) vendor: GpuVendor,
}

pub(super) const GIB: u64 = 1 << 30;

pub(super) const A100: Card = Card {
    name: "NVIDIA A100-SXM4-80GB",
    device: 0x20b2,
    capability: 80,
    memory: 80 * GIB,
    bar1: 128 * GIB,
    speed: 16.0,
    nvlinks: 12,
    vendor: GpuVendor::Nvidia,
};
pub(super) const H100: Card =
    Card { name: "NVIDIA H100 80GB HBM3", device: 0x2330, capability: 90, speed: 32.0, nvlinks: 18, ..A100 };

pub(super) fn epyc(family: u32, model: u32, name: &str) -> Cpu {
    Cpu { vendor: "AuthenticAMD".to_owned(), family: Some(family), model: Some(model), name: name.to_owned() }
}

pub(super) fn xeon(model: u32, name: &str) -> Cpu {
    Cpu { vendor: "GenuineIntel".to_owned(), family: Some(6), model: Some(model), name: name.to_owned() }
}

impl Build {
    /// A machine without devices.
    pub(super) fn new(product: &str, cpu: Cpu, sockets: i32, cpus_each: u32) -> Self {
        let arch = if cpu.vendor == "ARM" { "aarch64" } else { "x86_64" };
        let numa = (0..sockets)
            .zip(0_u32..)
            .map(|(id, at)| NumaNode {
                id,
                cpus: format!("{}-{}", at * cpus_each, (at + 1) * cpus_each - 1),
                socket: Some(id),
            })
            .collect::<Vec<_>>();
        let last = u32::try_from(numa.len()).unwrap_or(1) * cpus_each - 1;
        let facts = Facts {
            written_by: "nobounce example".to_owned(),
            host: Some("example".to_owned()),
            machine: Machine {
                arch: arch.to_owned(),
                product: Read::Yes(product.to_owned()),
                cpu,
                sockets: u32::try_from(sockets).map_or_else(|_| Read::default(), Read::Yes),
                numa,
                hypervisor: Read::Yes(None),
            },
            kernel: kernel(),
            devices: Read::Yes(vec![
                node("/dev/nvidiactl"),
                node("/dev/nvidia-uvm"),
                node("/dev/infiniband/rdma_cm"),
            ]),
            process: Process {
                uid: Read::Yes(1000),
                memlock_bytes: Read::Yes(None),
                ipc_lock: Read::Yes(false),
                user_namespace: Read::Yes(false),
                container: Read::Yes(None),
                cpus: Read::Yes(format!("0-{last}")),
                mlock_probe: Read::default(),
                ..Process::default()
            },
            libraries: Libraries {
                cuda: Read::Yes(Some(Library { version: Some("13.0".to_owned()), ..Library::default() })),
                nvml: Read::Yes(Some(Library { version: Some(DRIVER.to_owned()), ..Library::default() })),
                verbs: Read::Yes(Some(Library::default())),
                nccl: Read::Yes(Some(Library { version: Some("2.28.9".to_owned()), ..Library::default() })),
                ucx: Read::Yes(Some(Ucx {
                    version: Some("1.20.0".to_owned()),
                    modules: ["cuda", "ib", "ib_mlx5", "rdmacm"].map(str::to_owned).to_vec(),
                })),
                ..Libraries::default()
            },
            ..Facts::default()
        };
        Self { facts, groups: 0 }
    }

    /// A bridge: below `parent`, or a root port where there is none.
    pub(super) fn bridge(
        &mut self,
        address: &str,
        parent: Option<&str>,
        root: &str,
        numa: i32,
        speed: f64,
    ) -> String {
        let port = parent.is_some();
        let device = PciDevice {
            class: 0x06_0400,
            vendor: if port { 0x1000 } else { 0x8086 },
            device: if port { 0xc030 } else { 0x352a },
            driver: Some("pcieport".to_owned()),
            link: Some(Link { speed, max_speed: speed, width: 16, max_width: 16 }),
            config: Read::Yes(ConfigSpace { acs: Some(Acs { control: 0 }), ..config() }),
            ..self.device(address, parent, root, numa)
        };
        self.facts.pci.push(device);
        address.to_owned()
    }

    /// A root port, a switch on it, and one device on each of its ports; buses are numbered from
    /// `bus` on.
    pub(super) fn switch(&mut self, bus: u32, port: &str, numa: i32, speed: f64, slots: &[Slot]) {
        let root = format!("pci0000:{bus:02x}");
        let top = self.bridge(&format!("0000:{bus:02x}:{port}"), None, &root, numa, speed);
        let up = self.bridge(&format!("0000:{:02x}:00.0", bus + 1), Some(&top), &root, numa, speed);
        for (at, slot) in (0_u32..).zip(slots) {
            let down =
                self.bridge(&format!("0000:{:02x}:{at:02x}.0", bus + 2), Some(&up), &root, numa, speed);
            let address = format!("0000:{:02x}:00.0", bus + 4 + at);
            match slot {
                Slot::Gpu(card) => self.gpu(&address, Some(&down), &root, numa, *card),
                Slot::Nic(speed, net) => self.nic(&address, Some(&down), &root, numa, *speed, *net),
                Slot::Nvme => self.nvme(&address, Some(&down), &root, numa),
            }
        }
    }

    /// A device on a root port of its own, at the next bus.
    pub(super) fn on_root_port(
        &mut self,
        domain: u32,
        bus: u32,
        port: &str,
        numa: i32,
        speed: f64,
        slot: Slot,
    ) {
        let root = format!("pci{domain:04x}:{bus:02x}");
        let port = self.bridge(&format!("{domain:04x}:{bus:02x}:{port}"), None, &root, numa, speed);
        let address = format!("{domain:04x}:{:02x}:00.0", bus + 1);
        match slot {
            Slot::Gpu(card) => self.gpu(&address, Some(&port), &root, numa, card),
            Slot::Nic(speed, net) => self.nic(&address, Some(&port), &root, numa, speed, net),
            Slot::Nvme => self.nvme(&address, Some(&port), &root, numa),
        }
    }

    /// A GPU with its device file, in the order of addresses.
    pub(super) fn gpu(&mut self, address: &str, parent: Option<&str>, root: &str, numa: i32, card: Card) {
        let index = u32::try_from(self.facts.gpus.len()).unwrap_or(0);
        let nvidia = card.vendor == GpuVendor::Nvidia;
        let device = PciDevice {
            class: if nvidia { 0x03_0200 } else { 0x12_0000 },
            vendor: if nvidia { 0x10de } else { 0x1002 },
            device: card.device,
            driver: Some(if nvidia { "nvidia" } else { "amdgpu" }.to_owned()),
            link: Some(Link { speed: card.speed, max_speed: card.speed, width: 16, max_width: 16 }),
            bars: vec![
                Bar { index: 0, bytes: 16 << 20, prefetchable: false },
                Bar { index: 2, bytes: card.bar1, prefetchable: true },
            ],
            config: Read::Yes(config()),
            ..self.device(address, parent, root, numa)
        };
        self.facts.pci.push(device);
        let nvidia_only = |value: bool| if nvidia { Read::Yes(value) } else { Read::default() };
        self.facts.gpus.push(Gpu {
            address: address.to_owned(),
            vendor: card.vendor,
            name: Read::Yes(card.name.to_owned()),
            index: Some(index),
            compute_capability: if nvidia { Read::Yes(card.capability) } else { Read::default() },
            memory_bytes: Read::Yes(card.memory),
            bar1_bytes: Read::Yes(card.bar1),
            bar1_used_bytes: Read::Yes(2 << 20),
            gpudirect_rdma: nvidia_only(true),
            gpudirect_rdma_vmm: nvidia_only(true),
            dma_buf: Read::Yes(true),
            mig: nvidia_only(false),
            confidential: nvidia_only(false),
            performance_state: Read::Yes(0),
            coherent_link: nvidia_only(false),
            nvlinks: Read::Yes(card.nvlinks),
            export_probe: if nvidia { Read::Yes(Probe::worked("exported")) } else { Read::default() },
            window_probe: if nvidia { Read::Yes(Probe::worked("resource manager")) } else { Read::default() },
        });
        if nvidia && let Read::Yes(nodes) = &mut self.facts.devices {
            nodes.push(node(&format!("/dev/nvidia{index}")));
        }
    }

    /// An RDMA adapter with its device file.
    pub(super) fn nic(
        &mut self,
        address: &str,
        parent: Option<&str>,
        root: &str,
        numa: i32,
        speed: f64,
        net: Net,
    ) {
        let number = self.facts.nics.len();
        let (rate, class, vendor, model, driver) = match net {
            Net::InfiniBand(rate) => (rate, 0x02_0700, 0x15b3, connectx(rate), "mlx5_core"),
            Net::Roce(rate) => (rate, 0x02_0000, 0x15b3, connectx(rate), "mlx5_core"),
            Net::Efa(rate) => (rate, 0x02_0000, 0x1d0f, 0xefa2, "efa"),
        };
        let device = PciDevice {
            class,
            vendor,
            device: model,
            driver: Some(driver.to_owned()),
            link: Some(Link { speed, max_speed: speed, width: 16, max_width: 16 }),
            config: Read::Yes(ConfigSpace { max_read_request: Some(4096), ..config() }),
            ..self.device(address, parent, root, numa)
        };
        self.facts.pci.push(device);
        let name = if driver == "efa" { format!("rdmap{number}s0") } else { format!("mlx5_{number}") };
        let uverbs = format!("uverbs{number}");
        if let Read::Yes(nodes) = &mut self.facts.devices {
            nodes.push(node(&format!("/dev/infiniband/{uverbs}")));
        }
        self.facts.nics.push(Nic {
            listed: Read::Yes(true),
            name,
            address: Some(address.to_owned()),
            driver: Some(driver.to_owned()),
            firmware: Read::Yes("28.43.1014".to_owned()),
            uverbs: Read::Yes(Some(uverbs)),
            ports: vec![port(net, rate, number)],
            open_probe: Read::Yes(Probe::worked("ibv_open_device")),
            dma_buf_probe: Read::Yes(Probe::worked("EBADF")),
        });
    }

    /// An NVMe drive.
    pub(super) fn nvme(&mut self, address: &str, parent: Option<&str>, root: &str, numa: i32) {
        let device = PciDevice {
            class: 0x01_0802,
            vendor: 0x144d,
            device: 0xa80a,
            driver: Some("nvme".to_owned()),
            link: Some(Link { speed: 16.0, max_speed: 16.0, width: 4, max_width: 4 }),
            ..self.device(address, parent, root, numa)
        };
        self.facts.pci.push(device);
    }

    fn device(&mut self, address: &str, parent: Option<&str>, root: &str, numa: i32) -> PciDevice {
        self.groups += 1;
        PciDevice {
            address: address.to_owned(),
            parent: parent.map(str::to_owned),
            root: root.to_owned(),
            numa_node: Read::Yes(numa),
            iommu: Read::Yes(Some(Iommu { group: self.groups, kind: Some("identity".to_owned()) })),
            ..PciDevice::default()
        }
    }
}

/// The model of ConnectX for a rate: 4 Lx, 6 or 7.
fn connectx(rate: u32) -> u32 {
    match rate {
        0..=50 => 0x1015,
        51..=200 => 0x101b,
        _ => 0x1021,
    }
}

fn node(path: &str) -> DeviceNode {
    DeviceNode { path: path.to_owned(), open: Probe::worked("") }
}

fn config() -> ConfigSpace {
    ConfigSpace {
        max_payload: Some(256),
        max_payload_supported: Some(512),
        max_read_request: Some(512),
        relaxed_ordering: Some(true),
        ..ConfigSpace::default()
    }
}

pub(super) const DRIVER: &str = "580.95.05";

fn kernel() -> Kernel {
    let module = |version: &str| Module { version: Some(version.to_owned()) };
    let plain = Module::default;
    let modules = [
        ("nvidia", module(DRIVER)),
        ("nvidia_uvm", plain()),
        ("nvidia_peermem", module(DRIVER)),
        ("ib_core", module("24.10-3.2.5")),
        ("ib_uverbs", module("24.10-3.2.5")),
        ("mlx5_core", module("24.10-3.2.5")),
        ("mlx5_ib", module("24.10-3.2.5")),
        ("rdma_ucm", plain()),
    ];
    let options = [
        "DMA_SHARED_BUFFER",
        "PCI_P2PDMA",
        "DMABUF_MOVE_NOTIFY",
        "INFINIBAND_USER_ACCESS",
        "INFINIBAND_USER_MEM",
    ];
    Kernel {
        release: "6.8.0-60-generic".to_owned(),
        command_line: Read::Yes("BOOT_IMAGE=/vmlinuz iommu=pt".to_owned()),
        options: Read::Yes(options.into_iter().map(|name| (name.to_owned(), "y".to_owned())).collect()),
        modules: Read::Yes(modules.into_iter().map(|(name, module)| (name.to_owned(), module)).collect()),
        installed: Read::Yes(vec!["nvidia".to_owned(), "nvidia_peermem".to_owned()]),
        at_boot: Read::Yes(vec!["nvidia_peermem".to_owned()]),
        peer_memory_clients: Read::Yes(vec!["nv_mem".to_owned()]),
        peer_memory_api: Read::Yes(true),
        nvidia: Read::Yes(Some(NvidiaModule {
            version: DRIVER.to_owned(),
            open: Some(true),
            parameters: BTreeMap::new(),
        })),
        gdrdrv: Read::Yes(None),
        ofed: Read::Yes(Some("24.10-3.2.5".to_owned())),
        log: Read::Yes(Vec::new()),
    }
}

fn port(net: Net, rate: u32, number: usize) -> Port {
    let ethernet = matches!(net, Net::Roce(_));
    let name = format!("eth{number}");
    let gid = |index, value: &str, kind: &str| Gid {
        index,
        value: value.to_owned(),
        kind: kind.to_owned(),
        netdev: Some(name.clone()),
    };
    let local = "fe80:0000:0000:0000:0a00:27ff:fe00:0001";
    let ipv4 = "0000:0000:0000:0000:0000:ffff:0a00:0001";
    let gids = match net {
        Net::Roce(_) => vec![
            gid(0, local, "IB/RoCE v1"),
            gid(1, local, "RoCE v2"),
            gid(2, ipv4, "IB/RoCE v1"),
            gid(3, ipv4, "RoCE v2"),
        ],
        _ => vec![gid(0, local, "IB/RoCE v1")],
    };
    Port {
        number: 1,
        state: "ACTIVE".to_owned(),
        physical_state: "LinkUp".to_owned(),
        link_layer: if ethernet { "Ethernet" } else { "InfiniBand" }.to_owned(),
        rate_gbps: Read::Yes(f64::from(rate)),
        lanes: Some(4),
        active_mtu: Read::Yes(4096),
        netdev: ethernet.then(|| Netdev {
            name: name.clone(),
            mtu: Read::Yes(9000),
            up: Read::Yes(true),
            pfc: Read::Yes(true),
            ecn: Read::Yes(true),
            ..Netdev::default()
        }),
        gids: Read::Yes(gids),
        ..Port::default()
    }
}
