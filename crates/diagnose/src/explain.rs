//! The long text of every check: `doctor --explain ID`.

/// A check in words.
#[derive(Clone, Copy, Debug)]
pub struct Explanation {
    /// Its name.
    pub id: &'static str,
    /// What it looks for, in one line.
    pub summary: &'static str,
    /// What it means, how it is seen by hand, what to do.
    pub text: &'static str,
}

/// The long text of a check.
#[must_use]
pub fn text(id: &str) -> Option<&'static Explanation> {
    ALL.iter().find(|explanation| explanation.id == id)
}

macro_rules! explanations {
    ($($id:literal, $summary:literal, $text:literal;)*) => {
        /// All checks, by their names.
        pub const ALL: &[Explanation] = &[$(Explanation { id: $id, summary: $summary, text: $text },)*];
    };
}

explanations! {
    "acs-redirect", "ACS on a bridge below the processor sends packets between devices up to it",
    "PCIe access control services (ACS) let a switch forbid that devices below it talk to each other directly. With Request Redirect, Completion Redirect or Upstream Forwarding set on a port between GPU and adapter, every packet goes up to the root complex and down again, though both sit below one switch. That halves the bandwidth; with an IOMMU that translates, transfers may fail.\nBy hand: sudo lspci -vvv | grep -E '^[0-9a-f]|ACSCtl', and look for ReqRedir+ CmpltRedir+ UpstreamFwd+ on the ports between them. Ports that lead to the processor anyway do not matter.\nFix: clear the bits with setpci after every boot, or switch ACS off in the firmware setup. Do not on hosts of virtual machines, where it keeps guests apart: there use ATS with Direct Translated.";
    "acs-unread", "ACS could not be read",
    "The ACS bits lie beyond the first 64 bytes of the configuration space, and only root may read those. Without them it is unknown whether packets take the detour. Run sudo nobounce doctor, or ask the operator for the output of sudo lspci -vvv.";
    "ats-off", "ATS is off on an adapter in a virtual machine",
    "In a guest every address that a device uses is translated by the host's IOMMU. With address translation services (ATS) the adapter asks once, remembers, and sends packets with translated addresses, which switches with ACS Direct Translated let pass straight to the GPU. Without ATS each packet goes through the processor.\nFix, on the host: mlxconfig -d DEVICE set ATS_ENABLED=1, reset the adapter, give the guest ats=on.";
    "bar1-full", "BAR1 of a GPU is nearly full",
    "BAR1 is the window through which other devices reach GPU memory. Each registration takes its size of it. When it is full, the next registration fails with ENOMEM. Look for leaking registration caches and for memory that is mapped twice (GDRCopy and dma-buf).\nBy hand: nvidia-smi -q -d MEMORY.";
    "bar1-small", "BAR1 is much smaller than the GPU's memory",
    "Cards for desktops and some inference cards (T4) have a BAR1 of 256 MiB. About 220 MiB of it can be registered with adapters at one time, in all processes together. Larger registrations fail with ENOMEM; libraries that register whole pools crash.\nWhere the card and the board know resizable BAR, it can be as large as the memory: switch it on in the firmware setup. Else register a window at a time, or stage.";
    "bar1-unassigned", "The firmware gave a GPU no BAR1",
    "The firmware could not place the GPU's memory regions, mostly because they do not fit below 4 GiB. Switch on 'Above 4G decoding', or start the kernel with pci=realloc.";
    "closed-module", "NVIDIA's closed kernel module exports no dma-bufs",
    "dma-buf is the way of the kernel to hand memory of one device to another, and needs no module of ib_core's or NVIDIA's beyond the driver. Only the open kernel module exports it (from 515 on, Turing and newer). /proc/driver/nvidia/version says 'Open Kernel Module' where it is loaded.\nFix: install the open variant of the same driver version and reboot; or use nvidia_peermem.";
    "confidential", "Confidential computing is on",
    "In this mode the GPU's memory is closed to other devices by design. Data goes through encrypted bounce buffers in host memory. GPUDirect RDMA cannot work while it is on.";
    "cpu-binding", "The process may not run near its GPUs",
    "A cpuset of the container, Slurm or numactl keeps the process on CPUs of another socket than all GPUs. Threads that post and poll then cross the sockets for each message. Bind to the memory node of the GPU.";
    "dev-permission", "Device files of the adapters may not be opened",
    "/dev/infiniband/uverbs* exist, but the user has no right to open them for reading and writing. rdma-core's udev rules make them 0666; some images and old systems leave 0600.";
    "dev-unread", "Whether an adapter can be opened is not known",
    "/dev could not be read, or the name of the adapter's device file is not known.";
    "device-cgroup", "The container's device cgroup refuses the adapter",
    "The file is there (bind-mounted), its mode allows it, and open still says 'Operation not permitted': the device cgroup of the container does not list it. --device adds both the file and the rule; -v adds only the file.";
    "dmabuf-export", "The GPU's memory cannot be exported as a dma-buf",
    "cuMemGetHandleForAddressRange failed, or attribute 124 (DMA_BUF_SUPPORTED) is 0, with no cause that the facts show. Causes that are known: a closed kernel module, a driver before 515, a CUDA library before 11.7, a virtual GPU whose host does not support it, GeForce cards.";
    "dmabuf-nic", "The adapter takes no dma-bufs",
    "ibv_reg_dmabuf_mr with a descriptor of -1 must end in EBADF. EOPNOTSUPP (95) or EPROTONOSUPPORT (93) mean that the kernel's driver of this adapter does not implement it. mlx5 does from kernel 5.12 or MLNX_OFED 5.6 on; bnxt_re, irdma and efa from later ones; rxe and siw not at all.";
    "driver-mismatch", "Driver library and kernel module are of different versions",
    "NVML says 'Driver/library version mismatch'. The package was upgraded while the old module was still loaded, or a container brings its own library. Reload the modules, or reboot; in containers use the NVIDIA container toolkit, which mounts the host's libraries.";
    "driver-too-old", "The driver is too old for dma-buf",
    "dma-bufs came with driver 515 and its open kernel module. Older drivers can only use nvidia_peermem (470 and newer) or nv_peer_mem.";
    "efa-instance", "An Amazon instance with EFA, but without GPUDirect RDMA",
    "The adapters of these instance types (g4dn, g5, g6, g6e, p3dn) do not reach GPU memory: GPUDirect RDMA came with p4d and belongs to the P series. The GPU and its driver may well offer it. NCCL and UCX stage through host memory.\nBy hand: cat /sys/class/dmi/id/product_name tells the type.";
    "env-off", "A variable switches GPUDirect or RDMA off",
    "Profiles, container images and job scripts carry settings from one day of debugging for years. This one switches the fast way off for the library it belongs to. Unset it and measure again.";
    "expandable-segments", "PyTorch's expandable segments",
    "With expandable_segments:True tensors live in VMM memory that grows by segments. cuMemGetAddressRange gives one segment only, so engines that register 'the allocation of this pointer' cover a part: EINVAL, or errors beyond the first segment. NCCL copes; check transfer engines. Where attribute 110 is 0 such memory cannot be registered at all.";
    "fabric-manager", "CUDA does not start: NVSwitches are not set up",
    "On machines with NVSwitch cuInit ends with CUDA_ERROR_SYSTEM_NOT_READY (802) until the fabric manager has configured the switches. It must run, and be of the driver's version: systemctl status nvidia-fabricmanager. In a virtual machine it may run on the host.";
    "far-nic", "The nearest adapter is on another socket",
    "Packets between GPU and adapter cross the link between sockets, which all traffic shares, and whose packets are small for devices. Half of the bandwidth is usual. NCCL uses GPUDirect at this distance only with NCCL_NET_GDR_LEVEL=SYS; UCX reckons with a slow way and stages long messages.";
    "gdrdrv-node", "gdrdrv is loaded, but not for this process",
    "GDRCopy maps GPU memory for the CPU through /dev/gdrdrv. The module is loaded on the host, but the file is missing in the container or may not be opened. nobounce does not need it; UCX's gdr_copy and NVSHMEM do.";
    "gid-holes", "Entries of the GID table that belong to other namespaces",
    "With macvlan or SR-IOV pods see the whole table in /sys, but may read only the types of their own entries: EINVAL for the others. NCCL before 2.24 read the files and stopped or crashed. Name the entry by NCCL_IB_GID_INDEX, or use a current version, which asks the kernel instead.";
    "gid-index", "A fixed GID index does not fit",
    "Indexes differ between machines, adapters and pods: the entry that was index 3 on one host is RoCE v1, link-local or empty on another. Connections then fail with status 12. By hand: show_gids. Current NCCL and UCX choose RoCE v2 with a routed address by themselves: unset the variable.";
    "gid-no-ip", "RoCE has link-local addresses only",
    "Each IP address of the interface gives an entry of the GID table. With none there is only fe80::, which no router passes; NCCL takes it and fails with status 12. Containers with their own network namespace have no address on the host's RDMA interface: use the host's network, or give the pod an address on that network.";
    "gid-no-ipv4", "RoCE v2 has no IPv4 address",
    "NCCL chooses among RoCE v2 entries by address family, IPv4 unless NCCL_IB_ADDR_FAMILY=AF_INET6. Where the interface has IPv6 addresses only, say so, or add an IPv4 address.";
    "gid-none", "No RoCE address can be used",
    "The GID table is empty, or holds only entries of other namespaces. The interface is down, has no address here, or the device is shared with another namespace.";
    "gid-unread", "The GID table could not be read",
    "/sys/class/infiniband/*/ports/*/gids could not be read, so the RoCE address that will be used is unknown.";
    "gid-v1-only", "Only RoCE v1",
    "RoCE v1 has its own Ethernet type and stays within one subnet; RoCE v2 is UDP and is routed. Peers must use the same. The adapter offers v2 once the interface has an IP address, unless it was configured to v1.";
    "gpu-class", "The driver offers no GPUDirect RDMA for this GPU",
    "Attribute 116 (GPU_DIRECT_RDMA_SUPPORTED) is 0. NVIDIA offers it for data-centre and professional cards, not for GeForce and TITAN; some virtual GPUs lack it too. peermem loaded or not, registering memory fails with EFAULT. There is no fix but another card; stage on purpose.";
    "gpu-link-idle", "An idle GPU slowed its link down",
    "To save power, GPUs lower the PCIe speed while they do nothing (performance states above P2). It comes back under load. Run something on the GPU and look again: if it stays, it is a degraded link.";
    "gpu-passed-through", "The GPU is given to a virtual machine",
    "vfio-pci holds it: a guest uses it. Programs on the host do not see it.";
    "gpu-too-old", "The GPU is older than Turing",
    "The open kernel module, which alone exports dma-bufs, drives Turing (compute capability 7.5) and newer. Pascal and Volta need nvidia_peermem with the closed module.";
    "gpu-unread", "CUDA did not tell what the GPU can",
    "The tree shows the GPU, and its driver holds it, but libcuda was not there, failed, or did not show it (CUDA_VISIBLE_DEVICES). Whether the GPU offers GPUDirect RDMA and dma-buf is then not known.";
    "ibgda-parameter", "GPU-initiated operations need a driver parameter",
    "IBGDA lets the GPU ring the adapter's doorbell, for which the driver must map it: NVreg_RegistryDwords=\"PeerMappingOverride=1;\". Without it NVSHMEM and DeepEP cannot start the transport. NVSHMEM 3.4 and newer have a way that the CPU assists (NVSHMEM_IBGDA_NIC_HANDLER=cpu).";
    "iommu-faults", "The IOMMU refused accesses",
    "The kernel's log has DMAR, AMD-Vi or SMMU faults: a device used an address that is not mapped for it. Between GPU and adapter that shows as status 4 or syndrome 0x51, or as a hang. Pass through (iommu=pt), or find the driver that is wrong.";
    "iommu-translates", "The IOMMU translates the addresses of GPU or adapter",
    "With translation each packet between devices goes up to the IOMMU, in or behind the processor, also below one switch. Bandwidth falls to a fraction. For GPUDirect on bare metal the IOMMU is off or passes through: iommu=pt (x86), iommu.passthrough=1 (ARM).\nBy hand: cat /sys/kernel/iommu_groups/*/type says identity where it passes through, DMA or DMA-FQ where it translates.";
    "iommu-unread", "The mode of the IOMMU is not known",
    "Neither the type of the device's group nor the command line nor the kernel's options say whether addresses are translated.";
    "kernel-no-dmabuf", "The kernel has no dma-buf",
    "CONFIG_DMA_SHARED_BUFFER is not set. Every kernel of a distribution has it.";
    "kernel-no-p2pdma", "The kernel lacks options for memory of one device in another's hands",
    "amdgpu hands out its memory to other devices only with CONFIG_PCI_P2PDMA, CONFIG_DMABUF_MOVE_NOTIFY (always on in newer kernels) and CONFIG_HSA_AMD_P2P. With NVIDIA's driver it is named where the export of a dma-buf failed and CONFIG_PCI_P2PDMA is off. By hand: grep -E 'P2PDMA|MOVE_NOTIFY|HSA_AMD_P2P' /boot/config-$(uname -r).";
    "kernel-too-old", "The kernel is too old for dma-buf in verbs",
    "Verbs take dma-bufs from kernel 5.12 on; OFED and DOCA bring it to older kernels.";
    "link-layers", "Some adapters are InfiniBand, others Ethernet",
    "Servers often have adapters for storage and management beside those of the compute network. NCCL takes every active one unless NCCL_IB_HCA names some, UCX unless UCX_NET_DEVICES does. Where an adapter of the compute network is Ethernet by mistake: mlxconfig -d DEVICE set LINK_TYPE_P1=1 makes it InfiniBand.";
    "max-payload", "PCIe packets are smaller than they could be",
    "MaxPayload is the least that any port of the way allows. With 128 bytes headers take 19 % of the link, with 256 they take 10 %. The firmware sets it; pci=pcie_bus_perf makes the kernel raise it.";
    "max-read-request", "The adapter's read requests are small",
    "To send, the adapter reads memory by requests of MaxReadReq bytes. Small ones leave it waiting for round trips. 4096 is usual for adapters of 100 Gb/s and more; 512 is what firmware often leaves.";
    "memlock", "Too little memory may be locked",
    "What an adapter uses is locked in memory, and counts against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK in the first user namespace. Containers come with 64 KiB to 64 MiB. Symptoms: ibv_create_cq or ibv_reg_mr: Cannot allocate memory. In Kubernetes the capability has no effect for users other than root, as there are no ambient capabilities: raise the limit of the runtime.";
    "memlock-unread", "The limit of locked memory is not known",
    "/proc/self/limits could not be read. ulimit -l tells.";
    "memlock-userns", "A user namespace hides the real limit of locked memory",
    "In rootless containers ulimit -l may say 'unlimited', while the kernel counts against the limit of the user outside, 64 KiB or 8 MiB. The probe locked memory and failed.";
    "mig", "The GPU is divided",
    "Instances of MIG are separate devices: they have a part of memory and of BAR1, and no P2P among each other. GPUDirect RDMA works from an instance. NCCL does not support several ranks on instances of one GPU.";
    "mtu-differs", "Adapters have different packet sizes",
    "Peers agree on the smaller size at connection. A switch port with less than both drops large packets, and connections hang.";
    "mtu-small", "RDMA packets are small",
    "RoCE packets must fit into Ethernet frames: with an MTU of 1500 they carry 1024 bytes, with 4200 and more 4096. Small ones cost 5 to 8 % of the bandwidth in headers, and four times the packet rate.";
    "nccl-bond", "NCCL uses one port of a bond",
    "A RoCE adapter in bonding mode (mlx5_bond_0) has two ports behind one device, and the adapter gives each queue pair one of them. NCCL makes one queue pair for a connection unless NCCL_IB_QPS_PER_CONNECTION says more; data is then split or alternates over them (NCCL_IB_SPLIT_DATA_ON_QPS). perftest with -q 8 shows the rate of both ports, NCCL half of it.";
    "nccl-c2c", "NCCL's GPUDirect over Grace's own link is switched off",
    "On Grace the GPU reaches adapters of its processor over the coherent link (NVLink-C2C). NCCL 2.27 and newer use GPUDirect there (distance P2C); NCCL_NET_GDR_C2C=0 forbids it.";
    "nccl-distance", "NCCL's distance rule stages what could be direct",
    "NCCL uses GPUDirect where GPU and adapter are no further apart than PXB (P2C on Grace). Through the processor it stages by default, and says so only in builds with traces. NCCL_NET_GDR_LEVEL=PHB or SYS allows more; measure both.";
    "nccl-dmabuf", "NCCL_DMABUF_ENABLE=0",
    "NCCL then registers GPU memory by nvidia_peermem only.";
    "nccl-efa-plugin", "NCCL without its plugin for EFA",
    "Amazon's adapters are used through libfabric by the plugin aws-ofi-nccl. NCCL_NET_PLUGIN=none keeps NCCL from loading it.";
    "nccl-gdr-level", "NCCL_NET_GDR_LEVEL is too strict",
    "The variable names the largest distance at which NCCL uses GPUDirect: LOC (never), PIX, PXB, PHB, SYS; or 0 to 5 on the old scale. Set below the distance of the nearest adapter it switches GPUDirect off.";
    "nccl-gdr-read", "NCCL_NET_GDR_READ=0",
    "Receives are direct, sends are copied to the host first. It made sense before Ampere.";
    "nccl-hca-blank", "NCCL_IB_HCA has blanks between its names",
    "NCCL splits the list at commas and keeps blanks: of 'mlx5_0, mlx5_1' only the first is ever found.";
    "nccl-hca-far", "NCCL_IB_HCA leaves out near adapters",
    "The list keeps NCCL from the adapters nearest to some GPUs. Beginnings of names match (mlx5_1 also means mlx5_10), '=' wants whole names, '^' excludes.";
    "nccl-hca-none", "NCCL_IB_HCA matches no adapter",
    "Names change with kernels, firmware and naming rules (mlx5_0, rocep1s0, ibp1s0). NCCL then finds nothing and uses sockets.";
    "nccl-hca-unknown", "NCCL_IB_HCA names adapters that are not there",
    "A rail that is listed does not exist on this machine.";
    "nccl-ib-disable", "NCCL_IB_DISABLE is set",
    "NCCL does not look for RDMA adapters at all.";
    "nccl-level-ignored", "NCCL does not understand NCCL_NET_GDR_LEVEL",
    "NCCL compares with its own names exactly and ignores everything else without a word.";
    "nccl-net-socket", "NCCL_NET=Socket",
    "NCCL is told to use TCP sockets.";
    "nccl-plugin", "NCCL's network is a plugin's",
    "NCCL_NET, NCCL_NET_PLUGIN or NCCL_PLUGIN_P2P name a network that is not NCCL's own. Plugins that use verbs as NCCL does (IBext of nccl-rdma-sharp-plugins, gIB) follow the same rules, and UCX's are judged here; of others nothing is known: whether they use the RDMA adapters, and GPU memory directly, only a log tells (NCCL_DEBUG=INFO, doctor --nccl-log).";
    "nccl-too-old", "NCCL is too old to find the way that is open",
    "NCCL learned dma-buf with 2.13. Before 2.23 it takes nvidia_peermem for loaded only where /sys/kernel/mm/memory_peers shows nv_mem (or nv_mem_nc); newer OFEDs, DOCA and kernels show no such folder although registrations work, so that it says 'GPU Direct RDMA Disabled for HCA'. Frameworks bring their own NCCL: python -c 'import torch; print(torch.cuda.nccl.version())'.\nFix: a current NCCL; or, between 2.13 and 2.22, the open kernel module, whose dma-bufs it finds.";
    "nic-behind-slot", "The adapter's slot is slower than its network",
    "An adapter of 400 Gb/s needs PCIe Gen5 x16, one of 200 Gb/s Gen4 x16. In a narrower slot the PCIe link is the limit.";
    "nic-no-rdma", "Adapters that could do RDMA show no RDMA device",
    "The tree has the adapter, /sys/class/infiniband is empty: the RDMA part of its driver (mlx5_ib, bnxt_re, irdma, efa) or ib_uverbs is not loaded, or the adapter is in a mode without RDMA.";
    "nic-open", "An adapter cannot be opened",
    "libibverbs sees the adapter and cannot open it: the user-space provider is missing or does not match the kernel's driver, or the device is in error.";
    "nic-other-namespace", "The RDMA devices are in another namespace",
    "In exclusive mode (rdma system show) an RDMA device is seen only in the network namespace of its interface.";
    "no-dev-infiniband", "/dev/infiniband is missing",
    "The container sees the adapters in /sys, but was started without their device files. NCCL logs 'NET/IB : No device found' and uses sockets.";
    "no-dev-nvidia", "/dev/nvidiactl is missing",
    "The container was started without the GPU's device files.";
    "no-libibverbs", "libibverbs is not installed",
    "NCCL, UCX and libfabric load libibverbs.so.1 when they start. Where it is not there, which is the case in many images, they use TCP, although /dev/infiniband was given to the container. The providers (ibverbs-providers, rdma-core) must be installed, too.";
    "no-nic", "There is no RDMA adapter",
    "Nothing in the tree does RDMA. `nobounce run` gives programs a software adapter.";
    "no-uverbs", "The kernel made no uverbs device",
    "ib_uverbs is not loaded: programs in user space cannot use the adapter.";
    "no-window", "The CPU has no window onto GPU memory",
    "nobounce stores bytes from the wire into GPU memory through BAR1. It tries mmap of a dma-buf, the resource manager's mapping, and gdrdrv; none worked here. Bytes are then placed by the copy engine.";
    "not-in-tree", "A device is missing in the PCI tree",
    "NVML or verbs name a device that /sys/bus/pci does not show, as in some sandboxes. Distances, ACS and links cannot be judged.";
    "numa-unknown", "The memory node of a device is not known",
    "numa_node is -1 although the machine has several. Programs then guess which socket a device belongs to.";
    "nvidia-driver", "NVIDIA's driver does not hold the GPU",
    "nouveau holds it, or nothing does.";
    "old-nv-peer-mem", "The old module nv_peer_mem",
    "nv_peer_mem came from Mellanox before drivers had their own nvidia_peermem (470). It is no longer kept up. Both together fight for the same memory.";
    "pcie-degraded", "A PCIe link is slower or narrower than it could be",
    "The device and the port above it could do more than the link runs at. Reseat, power-cycle, check risers and bifurcation.\nBy hand: sudo lspci -vvv -s ADDRESS | grep -E 'LnkCap|LnkSta' ('downgraded').";
    "pcie-errors", "PCIe errors in the kernel's log",
    "AER reports tell of a link that errs: a bad contact, riser or cable.";
    "pcie-slot", "A device could do more than its slot",
    "Nothing is wrong; the slot is of an older generation or has fewer lanes.";
    "pcie-unread", "PCIe settings of an adapter could not be read",
    "Relaxed ordering, MaxReadReq and ATS lie beyond the first 64 bytes of the configuration space, which only root may read.";
    "peermem-amd", "amdgpu is not registered with ib_core",
    "amdgpu registers with OFED's peer-memory interface when it is built with it. From kernel 6.3 on it cannot pick up the symbol: use dma-buf.";
    "peermem-nic", "The adapter's driver does not use peer memory",
    "nvidia_peermem registers with ib_core, and mlx5, bnxt_re and some others ask there when memory is registered. Drivers that pin memory in their own way (hfi1 of Omni-Path, EFA, elastic RDMA of clouds) never do: for them there is dma-buf, or a library of the maker's.";
    "peermem-no-api", "ib_core has no peer-memory interface",
    "The kernel's own ib_core does not have it; OFED's and DOCA's do. Without it no peer-memory module can register: dma-buf is the way.";
    "peermem-not-at-boot", "nvidia_peermem is not loaded at boot",
    "The driver does not load nvidia_peermem by itself on every system. A file in /etc/modules-load.d does.";
    "peermem-not-loaded", "nvidia_peermem is not loaded",
    "nvidia_peermem registers GPU memory with OFED's ib_core, so that ibv_reg_mr takes GPU pointers. It comes with the driver, must be built against the same ib_core that is loaded, and is loaded on the host, not in containers.\nBy hand: lsmod | grep peermem.";
    "peermem-not-registered", "nvidia_peermem is loaded and not registered",
    "The module is there, but ib_core has no peer-memory interface or the module was built without it: ibv_reg_mr on a GPU pointer fails with EFAULT ('Bad address'). NCCL and UCX believe the module's file. Reinstall the driver after OFED/DOCA.";
    "peermem-symbols", "nvidia_peermem does not fit the loaded ib_core",
    "'Unknown symbol ib_register_peer_memory_client' or 'disagrees about version of symbol': the module was built against another ib_core. Rebuild it.";
    "port-down", "A port has no link",
    "The cable, the switch or the interface is down. Unused ports are only information.";
    "port-init", "A port waits for a subnet manager",
    "On InfiniBand a subnet manager gives addresses; until then ports stay in INIT.";
    "port-rate", "A port is slower than its like",
    "One of several adapters of a model negotiated a lower rate, or lost lanes: a bad cable, or a switch port set to another speed.";
    "port-unread", "State or rate of a port could not be read",
    "/sys/class/infiniband/*/ports/* could not be read. ibv_devinfo may tell.";
    "rdma-cm", "Connections by address do not work",
    "librdmacm opens /dev/infiniband/rdma_cm, a file of the module rdma_ucm. Programs that exchange queue pair numbers themselves (NCCL, perftest without -R) do not need it.";
    "registration-pair", "Memory can be registered with some adapters only",
    "The probe registered memory of the GPU with one adapter, and another refused it. The driver or the platform does not allow it for this pair: different root complexes, ACS, an IOMMU. Engines that register each buffer with every adapter (Mooncake) stop there.";
    "registration-unproven", "Registration of GPU memory was not tried",
    "Nothing speaks against it, and nothing proves it. doctor on the machine itself probes both sides; doctor --prove moves bytes.";
    "relaxed-ordering", "Relaxed ordering is off in the device",
    "Bit 4 of the device control register lets the adapter mark packets that need not stay in order. Processors of many cores carry those much faster.";
    "relaxed-ordering-env", "Relaxed ordering is switched off by a variable",
    "Libraries ask for relaxed ordering when they register memory. The variable forbids it.";
    "roce-flow-control", "Neither PFC nor ECN is on",
    "RoCE wants a network that does not drop packets: priority flow control (PFC) stops senders, ECN slows them down. With neither, congestion means loss.";
    "roce-loss", "The network loses RoCE packets",
    "out_of_sequence, packet_seq_err and local_ack_timeout_err count packets that went missing. Configure PFC and ECN alike on adapters and switches.";
    "shared-nic", "Several GPUs share an adapter",
    "There are more GPUs than adapters near them.";
    "software-nic", "A software adapter of the kernel's",
    "rxe and siw copy by the processor from host memory; they can take no GPU memory.";
    "through-cpu", "GPU and adapter are joined by the processor",
    "Without a PCIe switch packets between them pass the processor's root ports. How well depends on the model: desktop processors hardly, old Xeons slowly, recent ones well with relaxed ordering.";
    "ucx-devices-far", "UCX_NET_DEVICES leaves out near adapters",
    "The list keeps UCX from the adapters nearest to some GPUs.";
    "ucx-devices-none", "UCX_NET_DEVICES leaves no adapter",
    "The list names interfaces (eth0) or adapters that are not there. UCX wants mlx5_0:1, with the port.";
    "ucx-devices-port", "UCX_NET_DEVICES names adapters without their port",
    "UCX compares whole names, and the port belongs to them: mlx5_0:1. mlx5_0 alone matches nothing.";
    "ucx-dmabuf", "UCX may not use dma-buf",
    "UCX_CUDA_COPY_DMABUF is off: GPU memory is registered by peer memory only.";
    "ucx-gpu-direct", "UCX's GPUDirect is switched off",
    "UCX_IB_GPU_DIRECT_RDMA=n. The default 'try' uses it where it can and says nothing where it cannot; 'y' makes it an error.";
    "ucx-nearest", "UCX does not prefer near adapters",
    "UCX_IB_PREFER_NEAREST_DEVICE=n.";
    "ucx-no-gpu", "UCX was built without the GPU's transports",
    "Without its cuda or rocm module UCX takes GPU pointers for host memory.";
    "ucx-no-verbs", "UCX was built without verbs",
    "Without its ib module UCX has TCP and shared memory only. ucx_info -d lists what there is.";
    "ucx-relaxed-default", "This UCX does not know that the processor wants relaxed ordering",
    "UCX decides by the model of the processor. AMD's Zen counts among those that want it from 1.13 on, Emerald Rapids from 1.21 on.";
    "ucx-rndv-scheme", "UCX is told to stage long messages",
    "UCX_RNDV_SCHEME=am and the pipelines (get_ppln, put_ppln) go through host buffers. auto, get_zcopy and put_zcopy let the adapter reach GPU memory.";
    "ucx-tls-no-gpu", "UCX_TLS leaves out the GPU's transports",
    "A list such as rc,sm must also name cuda (cuda_copy, cuda_ipc, gdr_copy).";
    "ucx-tls-no-ib", "UCX_TLS leaves out the adapters",
    "The list has neither rc, dc, ud nor ib.";
    "ucx-too-old", "UCX is too old to find the way that is open",
    "UCX learned dma-buf with 1.14. Before 1.18 it takes nvidia_peermem for loaded only where /sys/kernel/mm/memory_peers shows nv_mem, which newer OFEDs, DOCA and kernels do not. ucx_info -v tells the version; containers and MPI packages bring their own.";
    "verbs-too-old", "libibverbs is too old for dma-buf",
    "ibv_reg_dmabuf_mr came with rdma-core 34. Old container images bring older ones.";
    "vm-flat", "A virtual machine with a flat tree",
    "The hypervisor puts all devices on one bus, without switches and memory nodes. Nothing inside can know what is near to what.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_single() {
        let ids: Vec<_> = ALL.iter().map(|explanation| explanation.id).collect();
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(ids, sorted);
    }
}
