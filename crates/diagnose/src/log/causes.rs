//! Causes that several messages and completions have, each with the facts under which it is worth a
//! look.

use super::known::{Cause, Remedy};
use crate::checks::peer_module::PeerModule;
use crate::finding::FixPart::{self, Assignment, Command, EngineOption, Line, Remark};
use crate::finding::Side;
use nobounce_topology::facts::{Facts, Gpu, GpuVendor, Port};

pub(super) const fn always(text: &'static str, fix: Remedy) -> Cause {
    Cause { when: |_, _| true, text, fix }
}

pub(super) const fn when(when: fn(&Facts, &str) -> bool, text: &'static str, fix: Remedy) -> Cause {
    Cause { when, text, fix }
}

pub(super) const fn host(parts: &'static [FixPart<&'static str>]) -> Remedy {
    Remedy::Parts(Side::Host, parts)
}

pub(super) const fn container(parts: &'static [FixPart<&'static str>]) -> Remedy {
    Remedy::Parts(Side::Container, parts)
}

pub(super) const fn both(parts: &'static [FixPart<&'static str>]) -> Remedy {
    Remedy::Parts(Side::Both, parts)
}

/// No peer-memory module is loaded: the one that fits is the fix, or `other`.
pub(super) const fn no_module(
    when: fn(&Facts, &str) -> bool,
    text: &'static str,
    other: &'static str,
) -> Cause {
    Cause { when, text, fix: Remedy::LoadModule(other) }
}

/// Whether a port is RoCE, or may be.
pub(super) fn may_be_ethernet(facts: &Facts) -> bool {
    let mut ports = ports(facts).peekable();
    ports.peek().is_none() || ports.any(|port| port.link_layer.is_empty() || port.is_ethernet())
}

pub(super) fn ports(facts: &Facts) -> impl Iterator<Item = &Port> {
    facts.nics.iter().filter(|nic| !nic.is_software()).flat_map(|nic| &nic.ports)
}

pub(super) fn is_set(facts: &Facts, names: &[&str]) -> bool {
    names.iter().any(|name| facts.variable(name).is_some())
}

/// Whether a line names an address that CUDA's virtual memory API reserves: they begin far below
/// those of `cudaMalloc`, but for old and virtual GPUs.
pub(super) fn is_vmm_address(facts: &Facts, line: &str) -> bool {
    let old = |gpu: &Gpu| gpu.compute_capability.get().is_some_and(|cc| cc < 70);
    if facts.gpus.iter().any(old) || facts.is_virtual() {
        return false;
    }
    const VMM: std::ops::Range<u64> = 0x1_0000_0000..0x1000_0000_0000;
    line.split("0x").skip(1).any(|text| {
        let digits: String = text.chars().take_while(char::is_ascii_hexdigit).collect();
        u64::from_str_radix(&digits, 16).is_ok_and(|address| VMM.contains(&address))
    })
}

/// Whether nothing is known that would serve ibv_reg_mr of NVIDIA's memory.
pub(super) fn lacks_peermem(facts: &Facts) -> bool {
    !has_amd(facts) && !peermem_loaded(facts) && !is_registered(facts, "peermem")
}

/// Whether nothing is known that would serve dma-bufs, either.
fn lacks_both(facts: &Facts) -> bool {
    let exports = |gpu: &Gpu| gpu.export_probe.known().is_some_and(|probe| probe.ok);
    lacks_peermem(facts) && !is_registered(facts, "dma-buf") && !facts.gpus.iter().any(exports)
}

fn is_registered(facts: &Facts, way: &str) -> bool {
    facts.registrations.iter().any(|registration| registration.way == way && registration.probe.ok)
}

/// Whether a peer-memory module is loaded, the driver's own or the old one.
pub(super) fn peermem_loaded(facts: &Facts) -> bool {
    PeerModule(facts).loaded().is_some()
}

pub(super) fn is_locked_without_limit(facts: &Facts) -> bool {
    facts.process.memlock_bytes.known() == Some(&None)
}

/// Whether a line or the facts leave open that the connection is RoCE, with a GID that matters.
fn may_be_roce(facts: &Facts, line: &str) -> bool {
    // `mlx5_0:1/IB` in lines of UCX.
    !line.contains(":1/IB") && (line.contains("/RoCE") || may_be_ethernet(facts))
}

/// Causes of retries exceeded: no answer came, whatever was sent.
pub(super) const NO_ANSWER: &[Cause] = &[
    when(
        |facts, _| {
            let pfc =
                ports(facts).filter_map(|port| port.netdev.as_ref()).any(|net| net.pfc.get() == Some(true));
            pfc && !is_set(facts, &["NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS", "NVSHMEM_IB_TRAFFIC_CLASS"])
        },
        "the packets go in traffic class 0, and the network is lossless (PFC) in another one",
        container(&[
            Assignment("NCCL_IB_TC=106 UCX_IB_TRAFFIC_CLASS=106 NVSHMEM_IB_TRAFFIC_CLASS=106"),
            Remark("or the class of the lossless priority"),
        ]),
    ),
    when(
        |facts, line| {
            let chosen = ["NCCL_IB_GID_INDEX", "UCX_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX", "MC_GID_INDEX"];
            // A line that names an IPv4 address as its GID took a routed entry.
            may_be_roce(facts, line) && !line.contains("::ffff:") && !is_set(facts, &chosen)
        },
        "the GID is link-local, RoCE v1 or of another subnet: the tables of the two machines differ",
        container(&[
            Command("show_gids"),
            Remark("on both; name the routed RoCE v2 entry of each"),
            Assignment("NCCL_IB_GID_INDEX=3 UCX_IB_GID_INDEX=3 MC_GID_INDEX=3"),
        ]),
    ),
    when(
        may_be_roce,
        "the MTU of a switch or of the other end is smaller than this port's: long packets are dropped",
        both(&[Remark("set one MTU on all ports of the path: 9000 on the interfaces, more in the switches")]),
    ),
    when(
        may_be_roce,
        "packets are lost: the RoCE network is neither lossless (PFC) nor has congestion control (ECN)",
        both(&[Remark("PFC and ECN for the traffic class of RDMA, on every port and switch")]),
    ),
    always(
        "packets are lost: the link of an adapter at either end is faulty",
        both(&[Remark("ib_write_bw between each pair of adapters names it; reseat or replace its cable")]),
    ),
    always(
        "the other process ended before",
        both(&[Remark("read the log of the other end: its first error is the cause")]),
    ),
];

/// A connection that cannot reach the address of the other end.
pub(super) const UNREACHABLE: &[Cause] = &[
    always(
        "the port cannot reach the address of the other end: it is link-local, of another subnet or rail, or the cable of this port leads to another machine",
        container(&[
            Command("show_gids"),
            Remark("on both ends; name a routed entry, or in NCCL_IB_HCA the adapters that are connected"),
            Assignment("NCCL_IB_GID_INDEX=3"),
            Remark("where only equal rails are connected"),
            Assignment("NCCL_CROSS_NIC=0"),
            Remark("where cables join pairs of machines, with one subnet for each cable"),
            Assignment("NCCL_IB_SUBNET_AWARE_ROUTING=1"),
        ]),
    ),
    always(
        "ARP or IPv6 neighbours of the other end are not answered on this interface",
        both(&[
            Command("ip neighbour show"),
            Remark("ping the other end from the port's interface; give each rail a subnet of its own"),
        ]),
    ),
];

/// Parameters of a connection that do not fit.
pub(super) const BAD_ADDRESS: &[Cause] = &[always(
    "the GID index is empty on one end, or the ends use different versions of RoCE or address families",
    container(&[
        Command("show_gids"),
        Remark("on both; name a RoCE v2 entry"),
        Assignment("NCCL_IB_GID_INDEX=3"),
        Remark("or"),
        Command("unset NCCL_IB_GID_INDEX"),
    ]),
)];

/// No entry at the GID index.
pub(super) const NO_GID: &[Cause] = &[always(
    "the adapter has no RoCE address here: its interface has no IP address or is in another network namespace",
    container(&[
        Remark("leave the adapter out, by the names of the others"),
        Assignment("NCCL_IB_HCA=mlx5_0 UCX_NET_DEVICES=mlx5_0:1"),
        Remark("or give its interface an IP address"),
    ]),
)];

/// EFAULT: no pages behind an address.
pub(super) const NO_PAGES: &[Cause] = &[
    when(
        |facts, _| facts.nics.iter().any(crate::nccl::is_efa),
        "the program registers GPU memory by ibv_reg_mr, and the adapter takes it by dma-buf only",
        container(&[Remark(
            "upgrade libfabric or the program to a version that registers CUDA memory by dma-buf",
        )]),
    ),
    when(
        |facts, line| is_vmm_address(facts, line) || peermem_loaded(facts),
        "the memory is of CUDA's virtual memory API (expandable segments, vLLM's sleep mode, cuMemCreate) without the flag for GPUDirect RDMA",
        container(&[
            Assignment("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"),
            Remark("and no sleep mode; or allocate with gpuDirectRDMACapable"),
        ]),
    ),
    no_module(
        |facts, _| lacks_peermem(facts),
        "no peer-memory module serves the GPU",
        "or a program that registers by dma-buf",
    ),
    when(|facts, _| has_amd(facts), NO_AMD_PEER, AMD_DMA_BUF),
];

pub(super) const NO_AMD_PEER: &str =
    "the program registers by ibv_reg_mr, which needs peer memory, and amdgpu has none here";
pub(super) const AMD_DMA_BUF: Remedy = container(&[Remark(
    "a version of the program that registers memory of HIP by dma-buf (Mooncake: build with USE_HIP_DMABUF)",
)]);

/// EINVAL: a range that the driver does not take.
pub(super) const BAD_RANGE: &[Cause] = &[
    when(|facts, _| has_amd(facts), NO_AMD_PEER, AMD_DMA_BUF),
    when(
        |facts, line| !has_amd(facts) && is_vmm_address(facts, line),
        "the memory is of CUDA's virtual memory API (expandable segments): the range spans several allocations",
        container(&[
            Assignment("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"),
            Remark("or upgrade the program"),
        ]),
    ),
    no_module(
        |facts, _| lacks_peermem(facts),
        "no peer-memory module serves the GPU",
        "or a program that registers by dma-buf",
    ),
    always(
        "the range does not fit the allocation: a part of it was registered with the offset of the whole",
        container(&[Remark("upgrade the program, or register whole allocations")]),
    ),
];

pub(super) fn has_amd(facts: &Facts) -> bool {
    facts.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Amd)
}

/// Causes of a local protection error.
pub(super) const PROTECTED: &[Cause] = &[
    when(
        |facts, _| !exports_work(facts),
        "the IOMMU or ACS keeps the adapter from the GPU's memory",
        host(&[
            Command("sudo dmesg | grep -iE 'dmar|amd-vi|smmu'"),
            Remark("shows it; boot with iommu=pt, and no ACS on the path"),
        ]),
    ),
    always(
        "the registration does not cover the buffer: a part of a larger allocation was registered with offset 0 of its dma-buf, or the memory was freed",
        container(&[Remark(
            "upgrade the program (MORI, Mooncake, UCX corrected such offsets in 2026); register whole allocations",
        )]),
    ),
];

/// Causes of a remote access error.
pub(super) const NO_ACCESS: &[Cause] = &[always(
    "the other end registered less than is accessed: memory in several pieces (expandable segments), or freed and allocated again",
    container(&[
        Assignment("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"),
        Remark("on both ends; or upgrade the program"),
    ]),
)];

/// Whether dma-bufs go from GPUs to adapters, by both drivers' word.
pub(super) fn exports_work(facts: &Facts) -> bool {
    facts.gpus.iter().any(|gpu| gpu.dma_buf.get() == Some(true))
        && facts.nics.iter().any(|nic| nic.dma_buf_probe.known().is_some_and(|probe| probe.ok))
}

/// A limit of locked memory that is large enough.
pub(super) const MORE_LOCKED: &[FixPart<&str>] = &[
    Command("ulimit -l unlimited"),
    Remark("in a container"),
    EngineOption("--ulimit memlock=-1:-1"),
    Remark("for services and Slurm, from the next boot"),
    Line { file: "/etc/systemd/system.conf", text: "DefaultLimitMEMLOCK=infinity" },
];

pub(super) const LOCKED: &[Cause] = &[
    when(
        |facts, _| !is_locked_without_limit(facts),
        "the limit of locked memory is too small",
        container(MORE_LOCKED),
    ),
    always(
        "BAR1 of the GPU or a table of the adapter is full",
        host(&[Command("nvidia-smi -q -d MEMORY; sudo dmesg | tail -n 20")]),
    ),
];

pub(super) const BOOTSTRAP: &[Cause] = &[always(
    "it uses an interface that the other machine cannot reach (docker0, a link-local one), or a firewall closes the ports",
    container(&[
        Assignment("NCCL_SOCKET_IFNAME=eth0"),
        Remark("with the interface of the cluster's network; open all TCP ports between the machines"),
    ]),
)];

/// No adapter that NCCL or another program could use.
pub(super) const NO_DEVICE: &[Cause] = &[
    when(
        |facts, _| facts.variable("NCCL_IB_HCA").is_some(),
        "NCCL_IB_HCA matches no adapter",
        container(&[
            Command("unset NCCL_IB_HCA"),
            Remark("or name adapters that are listed by"),
            Command("ibv_devices"),
        ]),
    ),
    when(
        |facts, _| facts.is_container(),
        "the container was started without the adapters' files or their provider library",
        container(&[
            EngineOption("--device /dev/infiniband"),
            Remark("Kubernetes: an RDMA device plugin and its resource; inside, they must be listed by"),
            Command("ibv_devinfo"),
        ]),
    ),
    always(
        "the RDMA driver is not loaded, or every port is down",
        host(&[Command("ibv_devinfo; sudo modprobe -a mlx5_ib ib_uverbs"), Remark("or the vendor's driver")]),
    ),
];

/// Memory that perftest and others could not register, without a reason.
pub(super) const REFUSED: &[Cause] = &[
    when(
        |facts, _| facts.gpus.iter().any(|gpu| nobounce_topology::gpudirect::is_consumer(gpu.title())),
        "GeForce and TITAN cards have no GPUDirect RDMA",
        both(&[Remark("use a data-centre or professional GPU")]),
    ),
    when(|facts, _| has_amd(facts), NO_AMD_PEER, AMD_DMA_BUF),
    no_module(
        |facts, _| lacks_peermem(facts),
        "no peer-memory module serves the GPU",
        "or perftest's option --use_cuda_dmabuf",
    ),
    Cause {
        when: |facts, _| peermem_loaded(facts),
        text: "the peer-memory module is loaded, but not registered with this ib_core",
        fix: Remedy::ReloadModule("or use dma-buf, with perftest by its option --use_cuda_dmabuf"),
    },
];

/// Registration by dma-buf that the adapter's driver lacks.
pub(super) const DRIVER_WITHOUT_DMA_BUF: &[Cause] = &[always(
    "the adapter's kernel driver is too old for dma-buf (mlx5 since 5.12, efa since 5.16, irdma and bnxt_re since 6.5), or an old OFED replaced it",
    host(&[Remark(
        "upgrade the adapter's driver (DOCA-OFED, the EFA installer, a newer kernel), or use peer memory",
    )]),
)];

/// Packets longer than the other end takes.
pub(super) const OTHER_MTU: &[Cause] = &[
    always(
        "the MTUs of the two ends differ: NCCL from 2.20 on does not adjust them",
        both(&[Command("ibv_devinfo | grep active_mtu"), Remark("on both; set one MTU on all ports")]),
    ),
    always(
        "memory was freed, or its registration removed, while the adapter used it",
        container(&[Assignment("NCCL_CUMEM_ENABLE=0"), Remark("to compare; then upgrade the program")]),
    ),
];

/// NCCL without the plugin that EFA needs.
pub(super) const NO_PLUGIN: &[Cause] = &[when(
    |facts, _| facts.nics.iter().any(crate::nccl::is_efa),
    "NCCL reaches EFA only through aws-ofi-nccl: the plugin or a library that it needs (libfabric, libhwloc) is not in the image or not in LD_LIBRARY_PATH",
    container(&[
        Assignment("LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:$LD_LIBRARY_PATH"),
        Remark("ldd on libnccl-net.so names a missing library"),
    ]),
)];

/// Connections over adapters without GPUDirect, where nothing that is known of the machine explains
/// it.
pub(super) const STAGED: &[Cause] = &[
    when(
        |facts, _| facts.gpus.iter().any(|gpu| nobounce_topology::gpudirect::is_consumer(gpu.title())),
        "GeForce and TITAN cards have no GPUDirect RDMA",
        both(&[Remark("use a data-centre or professional GPU")]),
    ),
    no_module(
        |facts, _| lacks_both(facts),
        "neither peer memory nor dma-buf serves the GPU",
        "or the open kernel module with NCCL 2.13 and newer",
    ),
    when(
        |facts, _| facts.gpus.iter().any(|gpu| gpu.compute_capability.get().is_some_and(|cc| cc < 80)),
        "before Ampere and without NVLink, NCCL reads GPU memory through the host: sends are staged",
        container(&[Assignment("NCCL_NET_GDR_READ=1")]),
    ),
    always(
        "GPU and adapter are farther apart than NCCL_NET_GDR_LEVEL allows (PXB by default)",
        container(&[Assignment("NCCL_NET_GDR_LEVEL=SYS"), Remark("and measure")]),
    ),
];
