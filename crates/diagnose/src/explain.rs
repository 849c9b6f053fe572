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
    "acs-redirect", "ACS on a bridge redirects peer-to-peer packets to the processor",
    "PCIe access control services (ACS) let a switch block peer-to-peer traffic between the devices below it. With Request Redirect, Completion Redirect or Upstream Forwarding set on a port between GPU and adapter, every packet goes through the root complex, although both are below one switch. That halves the bandwidth; with IOMMU translation, transfers may fail.\nManual check: sudo lspci -vvv | grep -E '^[0-9a-f]|ACSCtl', and look for ReqRedir+ CmpltRedir+ UpstreamFwd+ on the ports between them. Ports that lead to the processor anyway do not matter.\nFix: clear the bits with setpci after every boot, or disable ACS in the firmware setup. Keep it on hosts of virtual machines, where it isolates guests: use ATS with Direct Translated there.";
    "acs-unread", "ACS could not be read",
    "The ACS bits are beyond the first 64 bytes of the configuration space, which only root may read. Without them the path of the packets is unknown. Run sudo nobounce doctor, or ask the operator for the output of sudo lspci -vvv.";
    "ats-off", "ATS is off on an adapter in a virtual machine",
    "In a guest the host's IOMMU translates every device address. With address translation services (ATS) the adapter caches translations and sends packets with translated addresses. Switches with ACS Direct Translated route those directly to the GPU. Without ATS each packet goes through the processor.\nFix, on the host: mlxconfig -d DEVICE set ATS_ENABLED=1, reset the adapter, give the guest ats=on.";
    "bar1-full", "BAR1 of a GPU is nearly full",
    "BAR1 is the window through which other devices access GPU memory. Each registration uses as much of it as its size. When it is full, the next registration fails with ENOMEM. Look for leaking registration caches and for memory mapped twice (GDRCopy and dma-buf).\nManual check: nvidia-smi -q -d MEMORY.";
    "bar1-small", "BAR1 is much smaller than the GPU's memory",
    "Desktop cards and some inference cards (T4) have a BAR1 of 256 MiB. About 220 MiB of it can be registered with adapters at one time, by all processes together. Larger registrations fail with ENOMEM; libraries that register whole pools crash.\nIf card and board support resizable BAR, BAR1 can be as large as the memory: enable it in the firmware setup. Otherwise register a window at a time, or stage.";
    "bar1-unassigned", "The firmware assigned no BAR1 to a GPU",
    "The firmware could not place the GPU's memory regions, usually because they do not fit below 4 GiB. Enable 'Above 4G decoding', or boot with pci=realloc.";
    "bar1-uncached", "The driver maps BAR1 uncached",
    "With RmForceDisableIomapWC=1 in NVreg_RegistryDwords the driver maps BAR1 without write combining. GPUDirect Storage by P2PDMA requires it on x86. The CPU's window onto GPU memory, which nobounce's software NIC and GDRCopy use, then becomes many times slower. DMA of adapters and drives is not concerned.";
    "closed-module", "NVIDIA's closed kernel module does not export dma-bufs",
    "dma-buf is the kernel's method to share memory of one device with another, and needs no peer-memory module. Only the open kernel module exports dma-bufs (515 and newer, Turing and newer). If it is loaded, /proc/driver/nvidia/version contains 'Open Kernel Module'.\nFix: install the open variant of the same driver version and reboot, or use nvidia_peermem.";
    "confidential", "Confidential computing is on",
    "In this mode other devices cannot access the GPU's memory. Data goes through encrypted bounce buffers in host memory. GPUDirect RDMA does not work while it is on.";
    "container-namespaces", "The container has IPC or PID namespaces of its own",
    "CUDA IPC and shared memory work between processes of one IPC namespace that see each other's process numbers. Within one container they do. A job with several containers on a machine loses NVLink and shared memory between them: NCCL uses the network. Start such containers with --ipc=host --pid=host.";
    "cpu-binding", "The process is bound to CPUs far from its GPUs",
    "A cpuset of the container, Slurm or numactl binds the process to CPUs of a socket without GPUs. Threads that post and poll then cross the sockets for each message. Bind to the memory node of the GPU.";
    "dev-permission", "No permission to open the adapters' device files",
    "/dev/infiniband/uverbs* exist, but the user may not open them for reading and writing. rdma-core's udev rules set mode 0666; some images and old systems leave 0600.";
    "dev-unread", "Access to an adapter's device file is unknown",
    "/dev could not be read, or the name of the adapter's device file is unknown.";
    "device-cgroup", "The container's device cgroup denies the adapter",
    "The file exists (bind-mounted) and its mode allows access, but open fails with 'Operation not permitted': the container's device cgroup does not list it. --device adds both the file and the rule; -v adds only the file.";
    "dmabuf-export", "The GPU's memory cannot be exported as a dma-buf",
    "cuMemGetHandleForAddressRange failed, or attribute 124 (DMA_BUF_SUPPORTED) is 0, and the facts show no cause. Known causes: a closed kernel module, a driver before 515, a CUDA library before 11.7, a virtual GPU without host support, GeForce cards.";
    "dmabuf-nic", "The adapter does not support dma-buf",
    "ibv_reg_dmabuf_mr with descriptor -1 must fail with EBADF. EOPNOTSUPP (95) or EPROTONOSUPPORT (93) means that the kernel driver of this adapter does not implement it. mlx5 does since kernel 5.12 or MLNX_OFED 5.6; bnxt_re, irdma and efa since later versions; rxe and siw do not.";
    "dmabuf-register", "The adapter refused exported GPU memory",
    "The GPU's driver exported memory as a dma-buf, and ibv_reg_dmabuf_mr of that dma-buf failed. The GPU side is fine. Known causes: a driver of the adapter that implements the call only in part, old firmware, a size that exceeds BAR1 (ENOMEM), an adapter behind another root complex. The kernel log has the reason.\nManual check: sudo dmesg | tail; ib_write_bw --use_cuda=0 --use_cuda_dmabuf.";
    "driver-mismatch", "Driver library and kernel module have different versions",
    "NVML reports 'Driver/library version mismatch'. The package was upgraded while the old module was loaded, or a container has its own library. Reload the modules, or reboot; in containers use the NVIDIA container toolkit, which mounts the host's libraries.";
    "driver-too-old", "The driver is too old for dma-buf",
    "dma-bufs came with driver 515 and its open kernel module. Older drivers can only use nvidia_peermem (470 and newer) or nv_peer_mem.";
    "efa-instance", "An Amazon instance with EFA, but without GPUDirect RDMA",
    "The adapters of these instance types (g4dn, g5, g6, g6e, p3dn) cannot access GPU memory, even if GPU and driver support it: GPUDirect RDMA needs the P series, p4d or newer. NCCL and UCX stage through host memory.\nManual check: cat /sys/class/dmi/id/product_name shows the type.";
    "env-off", "A variable disables GPUDirect or RDMA",
    "Profiles, container images and job scripts often keep debugging settings for years. This variable disables the fast path of its library. Unset it and measure again.";
    "expandable-segments", "PyTorch's expandable segments",
    "With expandable_segments:True tensors are in VMM memory that grows by segments. cuMemGetAddressRange returns one segment only, so engines that register 'the allocation of this pointer' cover only a part: EINVAL, or errors beyond the first segment. NCCL handles this; check transfer engines. If attribute 110 is 0, such memory cannot be registered at all.";
    "fabric-manager", "CUDA does not start: NVSwitches are not set up",
    "On machines with NVSwitch, cuInit fails with CUDA_ERROR_SYSTEM_NOT_READY (802) until the fabric manager has configured the switches. It must run and match the driver's version: systemctl status nvidia-fabricmanager. For a virtual machine it may run on the host.";
    "far-nic", "The nearest adapter is on another socket",
    "Packets between GPU and adapter cross the link between sockets, which all traffic shares and which carries device traffic in small packets. Half of the bandwidth is typical. NCCL uses GPUDirect at this distance only with NCCL_NET_GDR_LEVEL=SYS; UCX assumes a slow path and stages long messages.";
    "gdrdrv-flavour", "gdrdrv was built for the other flavour of NVIDIA's module",
    "gdrdrv is built either for the open or for the proprietary kernel module of NVIDIA. Built for the open one it uses functions of the kernel that are exported to GPL modules only, and does not load beside the proprietary one on kernels from 5.9 on. Built for the proprietary one it works beside the open one, but maps memory of coherent GPUs (Grace) uncached. The build takes the flavour from the sources in /usr/src/nvidia-*, where a stale version misleads it.\nManual check: cat /proc/driver/gdrdrv/params (2.5 and newer), or dmesg | grep gdrdrv.";
    "gdrdrv-node", "gdrdrv is loaded, but not accessible to this process",
    "GDRCopy maps GPU memory for the CPU through /dev/gdrdrv. The module is loaded on the host, but the file is missing in the container or not accessible. nobounce does not need it; UCX's gdr_copy and NVSHMEM do.";
    "gdrdrv-version", "libgdrapi and gdrdrv have different versions",
    "The library and the module of GDRCopy check each other when the device is opened: both must be 2.0 or newer. Calls of a newer library that an older module does not know are left out: gdr_get_info_v2 (2.4), gdr_pin_buffer_v2 and mapping types (2.5). Images bring their own libgdrapi; the module belongs to the host.";
    "gid-holes", "GID table entries of other namespaces",
    "With macvlan or SR-IOV, pods see the whole table in /sys, but may read only the types of their own entries: EINVAL for the others. NCCL before 2.24 reads the files and aborts or crashes. Set the entry with NCCL_IB_GID_INDEX, or use a current version, which queries the kernel instead.";
    "gid-index", "A fixed GID index does not fit",
    "Indexes differ between machines, adapters and pods: index 3 of one host may be RoCE v1, link-local or empty on another. Connections then fail with status 12. Manual check: show_gids. Current NCCL and UCX select RoCE v2 with a routed address on their own: unset the variable.";
    "gid-no-ip", "RoCE has link-local addresses only",
    "Each IP address of the interface gives an entry of the GID table. Without one there is only fe80::, which is not routed; NCCL uses it and fails with status 12. Containers with their own network namespace have no address on the host's RDMA interface: use the host's network, or give the pod an address on that network.";
    "gid-no-ipv4", "RoCE v2 has no IPv4 address",
    "NCCL selects RoCE v2 entries by address family, IPv4 unless NCCL_IB_ADDR_FAMILY=AF_INET6. If the interface has IPv6 addresses only, set that variable, or add an IPv4 address.";
    "gid-none", "No usable RoCE address",
    "The GID table is empty, or contains only entries of other namespaces. The interface is down, has no address here, or the device is shared with another namespace.";
    "gid-unread", "The GID table could not be read",
    "/sys/class/infiniband/*/ports/*/gids could not be read, so the RoCE address is unknown.";
    "gid-v1-only", "Only RoCE v1",
    "RoCE v1 has its own Ethertype and stays within one subnet; RoCE v2 uses UDP and is routed. Peers must use the same version. The adapter offers v2 once the interface has an IP address, unless it is configured for v1.";
    "gpu-class", "The driver does not support GPUDirect RDMA for this GPU",
    "Attribute 116 (GPU_DIRECT_RDMA_SUPPORTED) is 0. NVIDIA supports it for data-centre and professional cards, not for GeForce and TITAN; some virtual GPUs lack it too. Registering memory fails with EFAULT, with or without peermem. The only fix is another card; otherwise use staging.";
    "gpu-link-idle", "An idle GPU lowered its link speed",
    "To save power, idle GPUs lower the PCIe speed (performance states above P2) and restore it under load. Check again while a program uses the GPU: if the speed stays low, the link is degraded.";
    "gpu-passed-through", "The GPU is passed through to a virtual machine",
    "vfio-pci is bound to it: a guest uses it. Programs on the host do not see it.";
    "gpu-peers", "GPUs without peer access to each other",
    "NVML tells for each pair of GPUs whether they read and write each other's memory over NVLink or PCIe. Without it NCCL uses shared host memory between them, and CUDA IPC copies through the host. GeForce cards since the 40 series have none. Elsewhere the chipset, different I/O hubs, a hypervisor or a key of the driver is the reason. Facts without an answer leave it unknown.\nManual check: nvidia-smi topo -p2p rw.";
    "gpu-too-old", "The GPU is older than Turing",
    "Only the open kernel module exports dma-bufs, and it supports Turing (compute capability 7.5) and newer. Pascal and Volta need nvidia_peermem with the closed module.";
    "gpu-unread", "The GPU's CUDA attributes could not be read",
    "The PCI tree shows the GPU with its driver, but libcuda is missing, failed, or did not show it (CUDA_VISIBLE_DEVICES). Support for GPUDirect RDMA and dma-buf is then unknown.";
    "ibgda-parameter", "GPU-initiated operations need a driver parameter",
    "With IBGDA the GPU rings the adapter's doorbell, which the driver must map for it: NVreg_RegistryDwords=\"PeerMappingOverride=1;\". Without it NVSHMEM and DeepEP cannot start the transport. NVSHMEM 3.4 and newer have a CPU-assisted mode (NVSHMEM_IBGDA_NIC_HANDLER=cpu).";
    "iommu-faults", "The IOMMU blocked accesses",
    "The kernel log has DMAR, AMD-Vi or SMMU faults: a device used an address that is not mapped for it. Between GPU and adapter this appears as status 4, syndrome 0x51, or a hang. Use pass-through (iommu=pt), or find the faulty driver.";
    "iommu-grace", "Passthrough of the IOMMU on Grace before kernel 6.11",
    "GPUs of GH200, GB200 and GB300 use page tables of the processor by translations of the IOMMU (SMMU, ATS, SVA). Before 6.11 the kernel's driver cannot bind them while the device passes through (iommu.passthrough=1): CUDA contexts are not created. NVIDIA's own kernels have the change earlier. Newer kernels are faster with passthrough.";
    "iommu-translates", "The IOMMU translates the addresses of GPU or adapter",
    "With translation each peer-to-peer packet goes through the IOMMU in the processor, even below one switch. Bandwidth drops to a fraction. For GPUDirect on bare metal the IOMMU must be off or in pass-through mode: iommu=pt (x86), iommu.passthrough=1 (ARM).\nManual check: cat /sys/kernel/iommu_groups/*/type shows identity for pass-through, DMA or DMA-FQ for translation.";
    "iommu-unread", "The IOMMU mode is unknown",
    "Neither the type of the device's IOMMU group nor the kernel command line or options show whether addresses are translated.";
    "kernel-no-dmabuf", "The kernel has no dma-buf",
    "CONFIG_DMA_SHARED_BUFFER is not set. All distribution kernels have it.";
    "kernel-no-p2pdma", "The kernel lacks options for sharing device memory",
    "amdgpu shares its memory with other devices only with CONFIG_PCI_P2PDMA, CONFIG_DMABUF_MOVE_NOTIFY (always on in newer kernels) and CONFIG_HSA_AMD_P2P. With NVIDIA's driver, this check reports a failed dma-buf export while CONFIG_PCI_P2PDMA is off. Manual check: grep -E 'P2PDMA|MOVE_NOTIFY|HSA_AMD_P2P' /boot/config-$(uname -r).";
    "kernel-too-old", "The kernel is too old for dma-buf in verbs",
    "Verbs support dma-buf since kernel 5.12; OFED and DOCA add it to older kernels.";
    "known-bad", "A combination of versions that is known to fail",
    "Some versions of NCCL, UCX, the NVIDIA driver, nv_peer_mem or the kernel crash, hang or refuse registrations in certain combinations. The finding names the public report, the versions and a way out. The verdict of the library or the path changes, even if every other fact is right.";
    "link-errors", "The link of an adapter fails far more often than others",
    "The port counters link_downed or symbol_error are high for one adapter and low for others of the machine. Then the cable, the transceiver or a port is bad: packets are retransmitted, and operations end with status 12 when the link is down for too long. Manual check: mlxlink -d DEVICE -m -c; perfquery on InfiniBand.";
    "link-layers", "Some adapters are InfiniBand, others Ethernet",
    "Servers often have adapters for storage and management beside those of the compute network. NCCL uses every active adapter unless NCCL_IB_HCA is set, UCX unless UCX_NET_DEVICES is set. If an adapter of the compute network is Ethernet by mistake, mlxconfig -d DEVICE set LINK_TYPE_P1=1 makes it InfiniBand.";
    "log-not-direct", "A log shows connections that are not direct although the facts promise it",
    "A log tells what a library did, and facts only what is possible. NCCL marks direct connections with GDRDMA, UCX by zero-copy protocols over an adapter; libfabric names the provider that it selected. Where such a log of this machine shows staged connections or sockets for a pair that would be direct, the plan of the library in the table becomes that of the log. Usual causes: the job ran with other variables, another version or another container than doctor.";
    "max-payload", "PCIe packets are smaller than they could be",
    "MaxPayload is the minimum over all ports on the path. With 128 bytes, headers take 19 % of the link, with 256 bytes 10 %. The firmware sets it; with pci=pcie_bus_perf the kernel raises it.";
    "max-read-request", "The adapter's read requests are small",
    "To send, the adapter reads memory in requests of MaxReadReq bytes. Small requests leave it waiting for round trips. 4096 is typical for adapters of 100 Gb/s and more; firmware often leaves 512.";
    "memlock", "The limit of locked memory is too low",
    "Memory used by an adapter is locked, and counts against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK in the initial user namespace. Containers start with 64 KiB to 64 MiB. Symptoms: ibv_create_cq or ibv_reg_mr: Cannot allocate memory. In Kubernetes the capability has no effect for non-root users, as there are no ambient capabilities: raise the limit of the runtime.";
    "memlock-unread", "The limit of locked memory is unknown",
    "/proc/self/limits could not be read. Check with ulimit -l.";
    "memlock-userns", "A user namespace hides the real limit of locked memory",
    "In rootless containers ulimit -l may show 'unlimited', while the kernel enforces the limit of the outer user, 64 KiB or 8 MiB. The probe failed to lock memory.";
    "mig", "The GPU is partitioned (MIG)",
    "MIG instances are separate devices: each has a part of memory and of BAR1, and no P2P with the others. GPUDirect RDMA works from an instance. NCCL does not support several ranks on instances of one GPU.";
    "moves-no-data", "A pair registers, but moves no bytes directly",
    "doctor --prove registered memory of the GPU with the adapter, and moving bytes then failed, gave wrong bytes, or staged them although a direct path was promised. A registration alone does not prove a path: ACS, the IOMMU, a wrong address (GID) or a faulty link show only when bytes move. The verdict is therefore not direct.";
    "mtu-differs", "Adapters have different MTUs",
    "Peers agree on the smaller MTU when they connect. A switch port with an even smaller MTU drops large packets, and connections hang.";
    "mtu-small", "RDMA packets are small",
    "RoCE packets must fit into Ethernet frames: with an MTU of 1500 they carry 1024 bytes, with 4200 or more 4096. Small packets cost 5 to 8 % of the bandwidth in headers, and four times the packet rate.";
    "nccl-bond", "NCCL uses one port of a bond",
    "A RoCE adapter in bonding mode (mlx5_bond_0) has two ports behind one device, and assigns each queue pair to one of them. NCCL creates one queue pair per connection unless NCCL_IB_QPS_PER_CONNECTION is larger; data is then split or alternates over them (NCCL_IB_SPLIT_DATA_ON_QPS). perftest with -q 8 reaches the rate of both ports, NCCL half of it.";
    "nccl-c2c", "NCCL's GPUDirect over Grace's NVLink-C2C is disabled",
    "On Grace, adapters of the processor reach the GPU over the coherent link (NVLink-C2C). NCCL 2.27 and newer use GPUDirect there (distance P2C); NCCL_NET_GDR_C2C=0 disables it.";
    "nccl-distance", "NCCL's distance limit causes staging",
    "NCCL uses GPUDirect up to distance PXB (P2C on Grace). Through the processor it stages by default, and reports that only in trace builds. NCCL_NET_GDR_LEVEL=PHB or SYS raises the limit; measure both.";
    "nccl-dmabuf", "NCCL_DMABUF_ENABLE=0",
    "NCCL then registers GPU memory through nvidia_peermem only.";
    "nccl-efa-plugin", "NCCL without its plugin for EFA",
    "NCCL uses Amazon's adapters through libfabric and the plugin aws-ofi-nccl. NCCL_NET_PLUGIN=none prevents it from loading. So does a folder outside of the loader's path: add it to LD_LIBRARY_PATH, with that of libfabric.";
    "nccl-gdr-level", "NCCL_NET_GDR_LEVEL is too strict",
    "The variable sets the largest distance at which NCCL uses GPUDirect: LOC (never), PIX, PXB, PHB, SYS; or 0 to 5 on the old scale. A value below the distance of the nearest adapter disables GPUDirect.";
    "nccl-gdr-read", "NCCL_NET_GDR_READ=0",
    "Receives are direct, sends are copied to the host first. The setting was useful before Ampere.";
    "nccl-hca-blank", "NCCL_IB_HCA has spaces between its names",
    "NCCL splits the list at commas and keeps spaces: of 'mlx5_0, mlx5_1' only the first is found.";
    "nccl-hca-far", "NCCL_IB_HCA excludes near adapters",
    "The list excludes the adapters nearest to some GPUs. Prefixes match (mlx5_1 also matches mlx5_10); '=' requires exact names, '^' excludes.";
    "nccl-hca-none", "NCCL_IB_HCA matches no adapter",
    "Names change with kernels, firmware and naming rules (mlx5_0, rocep1s0, ibp1s0). NCCL then finds no adapter and uses sockets.";
    "nccl-hca-unknown", "NCCL_IB_HCA names adapters that do not exist",
    "A listed rail does not exist on this machine.";
    "nccl-ib-disable", "NCCL_IB_DISABLE is set",
    "NCCL does not look for RDMA adapters at all.";
    "nccl-level-ignored", "NCCL_NET_GDR_LEVEL has an invalid value",
    "NCCL accepts only its own names, and silently ignores other values.";
    "nccl-net-socket", "NCCL_NET=Socket",
    "The setting makes NCCL use TCP sockets.";
    "nccl-plugin", "NCCL uses a network plugin",
    "NCCL_NET, NCCL_NET_PLUGIN or NCCL_PLUGIN_P2P selects a network that is not built into NCCL. Plugins that use verbs as NCCL does (IBext of nccl-rdma-sharp-plugins, gIB) follow the same rules, and UCX's rules are checked here. For other plugins only a log shows the use of RDMA adapters and GPUDirect (NCCL_DEBUG=INFO, doctor --nccl-log).";
    "nccl-pxn", "NCCL_PXN_DISABLE=1",
    "With PXN, NCCL moves a message over NVLink to the GPU that is near the right rail, and sends it there. Without PXN each GPU connects across rails. That needs more connections, and a network that routes between rails. Unset the variable.";
    "nccl-retry", "Timeout or retries of NCCL are too low",
    "NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT say how long a connection waits for the other end before it fails with status 12. Low values end jobs on any congestion. Unset them: the defaults are 20 and 7.";
    "nccl-too-old", "NCCL is too old to detect the available method",
    "NCCL supports dma-buf since 2.13. Before 2.23 it detects nvidia_peermem only by nv_mem (or nv_mem_nc) in /sys/kernel/mm/memory_peers. Newer OFEDs, DOCA and kernels have no such directory although registration works, so NCCL logs 'GPU Direct RDMA Disabled for HCA'. Frameworks bundle their own NCCL: python -c 'import torch; print(torch.cuda.nccl.version())'.\nFix: a current NCCL; or, for 2.13 to 2.22, the open kernel module, whose dma-bufs it detects.";
    "nic-behind-slot", "The adapter's slot is slower than its network",
    "An adapter of 400 Gb/s needs PCIe Gen5 x16, one of 200 Gb/s Gen4 x16. In a narrower slot the PCIe link is the bottleneck.";
    "nic-no-dmabuf", "The adapter's type has no dma-buf",
    "Some drivers do not implement dma-buf registration: Omni-Path (hfi1), True Scale (qib), mlx4, cxgb4, usNIC, VMware's paravirtual RDMA. No kernel and no version of rdma-core adds it. mlx4 and cxgb4 can use peer memory. Omni-Path and True Scale cannot: their way to GPU memory is PSM2 with CUDA, which is no verbs library.";
    "nic-no-rdma", "RDMA-capable adapters have no RDMA device",
    "The PCI tree shows the adapter, but /sys/class/infiniband is empty: the RDMA module of its driver (mlx5_ib, bnxt_re, irdma, efa) or ib_uverbs is not loaded, or the adapter is in a mode without RDMA.";
    "nic-open", "An adapter cannot be opened",
    "libibverbs sees the adapter but cannot open it: the user-space provider is missing or does not match the kernel driver, or the device is in an error state.";
    "nic-other-namespace", "The RDMA devices are in another namespace",
    "In exclusive mode (rdma system show) an RDMA device is visible only in the network namespace of its interface.";
    "no-dev-infiniband", "/dev/infiniband is missing",
    "The container sees the adapters in /sys, but was started without their device files. NCCL logs 'NET/IB : No device found' and uses sockets.";
    "no-dev-nvidia", "/dev/nvidiactl is missing",
    "The container was started without the GPU's device files.";
    "no-libibverbs", "libibverbs is not installed",
    "NCCL, UCX and libfabric load libibverbs.so.1 at startup. Without it, as in many images, they use TCP even if the container has /dev/infiniband. The providers (ibverbs-providers, rdma-core) must be installed, too.";
    "no-nic", "No RDMA adapter",
    "No device in the PCI tree supports RDMA. `nobounce run` gives programs a software NIC.";
    "no-uverbs", "The adapter has no uverbs device",
    "ib_uverbs is not loaded: user-space programs cannot use the adapter.";
    "no-window", "The CPU has no window onto GPU memory",
    "nobounce stores received bytes into GPU memory through BAR1. It tries mmap of a dma-buf, the resource manager's mapping, and gdrdrv; none works here. The copy engine then moves the bytes.";
    "nodes-per-socket", "GPU and adapter are on two memory nodes of one socket",
    "The firmware of AMD processors divides a socket into one, two or four memory nodes (NPS), that of Intel into sub-NUMA clusters (SNC). Devices on two nodes of one socket are near each other, but their memory nodes differ: NCCL counts SYS and stages. NPS1 makes one node of each socket; NCCL_NET_GDR_LEVEL=SYS lifts the limit for all pairs, those across sockets too.\nManual check: lscpu shows the number of sockets and of NUMA nodes.";
    "not-in-tree", "A device is missing in the PCI tree",
    "NVML or verbs report a device that /sys/bus/pci does not show, as in some sandboxes. Distances, ACS and links cannot be checked.";
    "numa-unknown", "The memory node of a device is unknown",
    "numa_node is -1 although the machine has several nodes. Programs then guess the socket of a device.";
    "nvidia-driver", "The NVIDIA driver is not bound to the GPU",
    "nouveau is bound to it, or no driver is.";
    "nvshmem-names", "Adapters are not named as NVSHMEM expects",
    "NVSHMEM takes adapters whose names begin with NVSHMEM_HCA_PREFIX (mlx5 by default). udev rules of rdma-core and administrators rename adapters (roce_rail1, rocep1s0). Set the prefix, or name the adapters in NVSHMEM_HCA_LIST.";
    "old-nv-peer-mem", "The old module nv_peer_mem",
    "nv_peer_mem is Mellanox's module from before the driver included nvidia_peermem (470). It is unmaintained. Loaded together, the two conflict.";
    "pcie-degraded", "A PCIe link is slower or narrower than possible",
    "The device and the port above it support more than the current link. Reseat the card, power-cycle, check risers and bifurcation.\nManual check: sudo lspci -vvv -s ADDRESS | grep -E 'LnkCap|LnkSta' ('downgraded').";
    "pcie-errors", "PCIe errors in the kernel log",
    "AER reports show a faulty link: a bad contact, riser or cable.";
    "pcie-slot", "A device is faster than its slot",
    "Not a fault: the slot is of an older generation or has fewer lanes.";
    "pcie-unread", "PCIe settings of an adapter could not be read",
    "Relaxed ordering, MaxReadReq and ATS are beyond the first 64 bytes of the configuration space, which only root may read.";
    "peer-gid", "The peer has another kind of RoCE address",
    "Both ends of a connection need one kind: RoCE v2 (UDP) or v1, and one address family. Compare show_gids of both machines. Indexes need not agree if NCCL_IB_GID_INDEX is unset.";
    "peer-link-layer", "The peer has another kind of network",
    "One machine has only InfiniBand ports, the other only Ethernet ports. They cannot connect.";
    "peer-mtu", "The peer has another MTU",
    "Two ends agree on the smaller MTU at connection time. What fails is a switch or a router on the path with a smaller MTU than both.";
    "peer-rate", "The peer's links have another speed",
    "The bandwidth of a connection is that of its slower end.";
    "peer-version", "The peer has another version of a library",
    "All ranks of a job need one version of NCCL: the handshake of different versions fails or hangs. UCX connects between versions.";
    "peermem-amd", "amdgpu is not registered with ib_core",
    "amdgpu registers with OFED's peer-memory interface if built against it. Since kernel 6.3 it cannot resolve the symbol: use dma-buf.";
    "peermem-callback", "nvidia_peermem reports freed memory",
    "'detected invalid context, skipping further processing' in the kernel log means that GPU memory was freed while an adapter still had it registered, or that the module's own record of it is gone. Registrations by dma-buf hold the memory themselves and have no such callback.";
    "peermem-nic", "The adapter's driver does not use peer memory",
    "nvidia_peermem registers with ib_core, and mlx5, bnxt_re and some others query it when they register memory. Drivers with their own pinning (hfi1 of Omni-Path, EFA, elastic RDMA of clouds) do not: they need dma-buf, or the vendor's library.";
    "peermem-no-api", "ib_core has no peer-memory interface",
    "The upstream ib_core does not have it; those of OFED and DOCA do. Without it no peer-memory module can register: use dma-buf.";
    "peermem-not-at-boot", "nvidia_peermem is not loaded at boot",
    "Not every system loads nvidia_peermem with the driver. A file in /etc/modules-load.d loads it at boot.";
    "peermem-not-loaded", "nvidia_peermem is not loaded",
    "nvidia_peermem registers GPU memory with OFED's ib_core, so that ibv_reg_mr accepts GPU pointers. It is part of the driver, must be built against the loaded ib_core, and is loaded on the host, not in containers.\nManual check: lsmod | grep peermem.";
    "peermem-not-registered", "nvidia_peermem is loaded but not registered",
    "The module is loaded, but ib_core has no peer-memory interface, or the module was built without it: ibv_reg_mr on a GPU pointer fails with EFAULT ('Bad address'). NCCL and UCX check only the module's file. Reinstall the driver after OFED/DOCA.";
    "peermem-symbols", "nvidia_peermem does not match the loaded ib_core",
    "'Unknown symbol ib_register_peer_memory_client' or 'disagrees about version of symbol': the module was built against another ib_core. Rebuild it.";
    "peermem-version", "nvidia_peermem is of another version than the driver",
    "nvidia_peermem is part of NVIDIA's driver and carries its version. Another version comes from a separate build (DKMS, an operator's container) and was compiled against another nvidia module. Reload it, or reinstall the driver.";
    "port-down", "A port has no link",
    "The cable, the switch or the interface is down. Unused ports are reported as info.";
    "port-events", "The link of an adapter went down, by the kernel log",
    "Drivers log each loss of the link, and what the firmware reports about the cable or transceiver (port module event): too hot, too much power, unplugged, shorted, not admitted. Losses without such an event come from the cable, the switch port or the other end. An event of the module that a plugged-in cable follows is past.\nManual check: sudo dmesg | grep -iE 'port module event|link down'; sudo mlxlink -d ADDRESS -m.";
    "port-init", "A port waits for a subnet manager",
    "On InfiniBand a subnet manager assigns addresses; until then ports stay in INIT.";
    "port-no-sm", "An active InfiniBand port without address or subnet manager",
    "The port was configured once, and its subnet manager is gone (sm_lid 0), or it never got an address (lid 0 or 0xffff). Existing connections may live on; new ones fail. Manual check: ibstat, sminfo.";
    "port-rate", "A port is slower than others of its model",
    "One of several adapters of a model negotiated a lower rate, or lost lanes: a bad cable, or a switch port set to another speed.";
    "port-unread", "State or rate of a port could not be read",
    "/sys/class/infiniband/*/ports/* could not be read. Try ibv_devinfo.";
    "port-width", "An InfiniBand link runs with fewer lanes than its ends support",
    "doctor reads the PortInfo attribute of both ends of the link by management datagrams (/dev/infiniband/umad*, usually as root): widths that are supported, enabled and active. A link that runs with fewer lanes than both ends enable has a bad cable, transceiver or port. An end that supports a width and does not enable it is a setting: ibportstate changes LinkWidthEnabled, and a reset of the port trains the link again. A port of a switch that is split in two supports two lanes only: such a link is complete.\nManual check: sudo ibportstate -D 0 1 query, and for the other end sudo ibportstate -D 0,1 PORT query.";
    "rails-no-route", "Some rails have a route to other subnets, others have none",
    "A queue pair is bound to the interface of its rail. Where rails have subnets of their own, each needs a route to the subnets of its peers by its own gateway: without it the kernel takes distant addresses for neighbours, and ibv_modify_qp times out (110). doctor asks the kernel for the route of each rail's address to a destination that another rail reaches. Rails whose network ends at one switch need none.\nManual check: ip route get DESTINATION from ADDRESS oif INTERFACE.";
    "rails-one-subnet", "Several rails share an IPv4 subnet",
    "With two interfaces in one subnet Linux answers ARP requests on either for both addresses (arp_ignore 0), and sends through the first route. RoCE connections of the second adapter then reach the first one's port, or time out (ibv_modify_qp, 110). A strict reverse-path filter (rp_filter 1) drops requests whose answer would leave by another interface. Give each rail its own subnet, or set arp_ignore and arp_announce, and make a routing table for each interface. The greater of a setting of the interface and of all is in effect.";
    "rccl-peermem", "RCCL does not detect peer memory",
    "RCCL before ROCm 6.3 uses peer memory only if /sys/kernel/mm/memory_peers/amdkfd exists. Kernels and OFEDs since 2024 have the interface without the folder. Use a newer RCCL, or dma-buf (NCCL_DMABUF_ENABLE=1).";
    "rdma-cm", "Connections by address do not work",
    "librdmacm opens /dev/infiniband/rdma_cm, the device file of the module rdma_ucm. Programs that exchange queue pair numbers themselves (NCCL, perftest without -R) do not need it.";
    "registration-pair", "Memory can be registered with some adapters only",
    "The probe registered GPU memory with one adapter, but another adapter refused it. The driver or the platform does not allow this pair: different root complexes, ACS, an IOMMU. Engines that register each buffer with every adapter (Mooncake) fail.";
    "registration-size", "Small registrations work, large ones fail",
    "doctor registers 2 MiB and 64 MiB of each GPU with each adapter. If only the small one works, a limit is too small: BAR1, locked memory, or the adapter's translation tables. Programs that register whole pools fail.";
    "registration-unproven", "Registration of GPU memory was not probed",
    "No fact rules it out, and no probe confirms it. doctor on the machine itself probes both sides; doctor --prove moves bytes.";
    "relaxed-ordering", "Relaxed ordering is off in the device",
    "Bit 4 of the device control register lets the adapter mark packets that may be reordered. Many-core processors forward those much faster.";
    "relaxed-ordering-env", "A variable disables relaxed ordering",
    "Libraries request relaxed ordering when they register memory. The variable disables it.";
    "roce-flow-control", "Neither PFC nor ECN is on",
    "RoCE needs a network without packet loss: priority flow control (PFC) pauses senders, ECN slows them down. With neither, congestion causes loss.";
    "roce-loss", "The network loses RoCE packets",
    "out_of_sequence, packet_seq_err and local_ack_timeout_err count lost packets. Configure PFC and ECN identically on adapters and switches.";
    "security-denied", "SELinux or AppArmor denied an access",
    "The kernel log has a denial for a device file or a mapping of the adapter or the GPU. In containers the label or the profile of the runtime is the cause; on hosts the policy of a service.";
    "shared-nic", "Several GPUs share an adapter",
    "There are more GPUs than adapters near them.";
    "software-nic", "A software RDMA device of the kernel",
    "rxe and siw copy from host memory with the CPU; they do not support GPU memory.";
    "storage-acs", "ACS redirects packets between drive and GPU",
    "With Request Redirect, Completion Redirect or Upstream Forwarding on a port between drive and GPU, packets go up to the root complex although both are below one switch. The kernel then treats P2PDMA as a path through the processor.\nManual check: sudo lspci -vvv | grep ACSCtl.\nFix: clear the bits with setpci after every boot, or disable ACS in the firmware setup. Keep it on hosts of virtual machines.";
    "storage-acs-unread", "ACS between drive and GPU could not be read",
    "The ACS bits are beyond the first 64 bytes of the configuration space, which only root may read. Linux reads them, and may refuse P2PDMA because of them. Run doctor as root.";
    "storage-compat-forced", "cuFile's compat mode is forced",
    "CUFILE_FORCE_COMPAT_MODE=true, or properties.force_compat_mode in cufile.json: cuFile reads every file into host memory and copies it to the GPU. The variable outweighs the file.";
    "storage-cufile-config", "The settings of cuFile cannot be read",
    "cuFile reads the file that CUFILE_ENV_PATH_JSON names, else /etc/cufile.json. It is JSON with // comments. A file that is missing although it is named, not readable, or not valid leaves the route unknown.";
    "storage-denylist", "The settings of cuFile exclude the path",
    "denylist in cufile.json names filesystems, mounts, devices and drivers for which cuFile does not use direct routes.";
    "storage-device-mapper", "LVM, encryption or another mapping is between filesystem and drive",
    "cuFile takes filesystems on NVMe drives, their partitions, and md RAID. For /dev/dm-* it logs 'Unsupported block device' and uses compat mode. dm-crypt needs the CPU for every byte anyway.";
    "storage-driver", "NVIDIA's driver does not offer P2PDMA",
    "P2PDMA needs the open kernel module, release 565 or newer. nvidia-fs works with the closed module and with older releases.\nManual check: cat /proc/driver/nvidia/version.";
    "storage-ext4-mode", "ext4 is not in ordered mode, or does not say so",
    "cuFile supports ext4 with data=ordered. Releases up to 1.7 (CUDA 12.2) were seen to look for that word in the mount table, where the kernel leaves the default out; 1.13 (CUDA 12.8) finds it by itself. The mode cannot be changed by a remount: unmount first.";
    "storage-fabrics", "The drive is remote (NVMe over Fabrics)",
    "P2PDMA serves drives of this machine. nvidia-fs supports NVMe over RDMA with the drivers of MLNX_OFED or DOCA. NVMe over TCP or Fibre Channel passes host memory. With use_pci_p2pdma=true cuFile was seen to fail on NVMe over RDMA (Input/output error): switch it off there.";
    "storage-far", "Drive and GPU are far apart",
    "Packets between them cross the processor. The rate depends on its model; between sockets it is often lower than a read through host memory. cuFile does not compare both.\nManual check: nobounce topo, or gdsio with -x 0 and -x 2.";
    "storage-filesystem", "cuFile has no direct route for the filesystem",
    "Direct routes exist for ext4 and xfs on NVMe, and for NFS over RDMA, Lustre, WekaFS, IBM Spectrum Scale, BeeGFS with their drivers. NVIDIA classifies tmpfs, overlayfs, ZFS and btrfs as compat mode only. In a container, files of the image are on an overlay; files of a volume are not.";
    "storage-gpu", "The GPU does not support direct reads, or is not listed",
    "NVIDIA names A100, A40, L4, L40S, H100, H200, B100, B200 and B300 for P2PDMA, and not Grace. nvidia-fs needs GPUDirect RDMA: data-centre and professional GPUs from Pascal on. On GeForce cards nvidia_p2p_get_pages fails with -22.";
    "storage-host-bridge", "Whether Linux lets P2PDMA through the processor is unknown",
    "Below one PCIe switch P2PDMA always works. Through root ports Linux allows it on AMD Zen and on a list of Intel host bridges (drivers/pci/p2pdma.c). Doctor does not read which bridge this is.";
    "storage-iommu", "The IOMMU is in the wrong mode",
    "On x86 NVIDIA asks for the IOMMU to be off, or in passthrough on some platforms such as DGX. With translation GPUDirect Storage is neither guaranteed to work nor fast. On Grace it must translate.\nManual check: cat /sys/kernel/iommu_groups/*/type.";
    "storage-kernel", "The kernel has no P2PDMA for user memory",
    "O_DIRECT into memory of a PCI device came with Linux 6.2; NVIDIA asks for a newer kernel with CONFIG_PCI_P2PDMA. Red Hat brings the option to older versions; NVIDIA's notes exclude some of them.\nManual check: grep p2pdma_pgmap_ops /proc/kallsyms.";
    "storage-kvikio-compat", "KvikIO's own compatibility mode is on",
    "KVIKIO_COMPAT_MODE=ON makes KvikIO read by POSIX calls, without cuFile. This is not cuFile's compat mode. AUTO tries cuFile first; it falls back where libcufile is missing, /run/udev is not readable, or in WSL. OFF makes failures errors.";
    "storage-multipath", "NVMe multipathing is on",
    "With nvme_core.multipath=Y, drives that can have several controllers appear as a virtual device (/sys/block/nvme0n1 below nvme-subsystem). It does not pass on the drive's P2PDMA, and NVIDIA requires multipath=N.";
    "storage-network-path", "The adapter of a network filesystem is not known",
    "Doctor does not know through which adapter a network filesystem is mounted. Its distance to the GPU and its registration of GPU memory decide. nobounce doctor without --storage checks all adapters.";
    "storage-nfs-tcp", "NFS is mounted without RDMA",
    "cuFile reads NFS directly over RDMA only: mount option proto=rdma, module rpcrdma, with the drivers of MLNX_OFED or DOCA registered with nvidia-fs.";
    "storage-no-direct-io", "The file does not take O_DIRECT",
    "Direct routes bypass the page cache. The kernel reports by statx (STATX_DIOALIGN) whether a file allows that: encrypted, verity and inline files do not.";
    "storage-no-libcufile", "libcufile was not found",
    "libcufile.so.0 is part of CUDA, and of the package nvidia-cufile. Doctor looks in LD_LIBRARY_PATH, the system's folders, /usr/local/cuda, and Python's packages. A program may bring a copy elsewhere.";
    "storage-not-nvme", "The drive is no NVMe drive",
    "GPUDirect Storage needs a drive that reads and writes memory of other devices: NVMe. SATA, SAS and USB disks, virtio disks and loop devices are read through host memory.";
    "storage-nvidia-fs", "nvidia-fs is not loaded",
    "nvidia-fs is the kernel module of GPUDirect Storage before P2PDMA. Without it and without P2PDMA cuFile logs 'running in compatible mode'. It is loaded on the host, not in containers.\nManual check: cat /proc/driver/nvidia-fs/version.";
    "storage-nvidia-fs-client", "The storage driver is not registered with nvidia-fs",
    "nvidia-fs looks up nvme_v1_register_nvfs_dma_ops (newer: nvme_v2_...) of the nvme driver, and likewise for other drivers. The kernel's own driver has no such function. Those of MLNX_OFED and DOCA have; nvidia-fs must be built for the same version of it. Nothing reports a mismatch.\nManual check: cat /proc/driver/nvidia-fs/modules.";
    "storage-nvidia-fs-nodes", "The device files of nvidia-fs are missing or closed",
    "A container sees the module in /proc, but not /dev/nvidia-fs*, unless they are passed. Some releases of libcufile then close file descriptor 0. NVIDIA's container toolkit passes them with NVIDIA_GDS=enabled.";
    "storage-nvidia-fs-version", "This version of nvidia-fs is known to fail",
    "NVIDIA's release notes: 2.25.6 may make cuFile calls fail; use 2.25.7 or newer.";
    "storage-p2pdma-off", "cuFile is not told to use P2PDMA",
    "properties.use_pci_p2pdma in cufile.json is false by default; CUFILE_USE_PCIP2PDMA=true sets it for a process. cufile.log then no longer says 'Config doesn't support PCIP2PDMA'.";
    "storage-raid", "The file is on md RAID",
    "NVIDIA supports md RAID 0 and 1 with nvidia-fs, and no RAID with P2PDMA. RAID 4, 5 and 6 compute parity on the CPU.";
    "storage-registry-keys", "NVIDIA's module lacks the registry keys for P2PDMA",
    "On x86: options nvidia NVreg_RegistryDwords=\"RMForceStaticBar1=1;RmForceDisableIomapWC=1;\". The first gives BAR1 fixed addresses, the second maps it without write-combining. The second makes stores of the CPU to GPU memory slow: GDRCopy and nobounce's window suffer.\nManual check: grep RegistryDwords /proc/driver/nvidia/params.";
    "storage-slow-window", "nobounce's window lost write-combining",
    "RmForceDisableIomapWC=1 maps BAR1 uncached. nobounce stores received bytes and file contents through BAR1. With NOBOUNCE_WINDOW=off the copy engine places them. nobounce bench --gpu compares both.";
    "storage-udev", "/run/udev cannot be read",
    "cuFile asks udev for the drive below a filesystem. In containers without /run/udev it logs 'error creating udev_device', and KvikIO uses POSIX reads.";
    "storage-unread", "A fact about the path could not be read",
    "The route is unknown as long as a link of the chain is. Run doctor on the host, as root, or look by hand with the command given.";
    "through-cpu", "GPU and adapter are connected through the processor",
    "Without a PCIe switch, packets between them cross the processor's root ports. The rate depends on the model: very low on desktop processors, low on old Xeons, high on recent ones with relaxed ordering.";
    "ucx-devices-far", "UCX_NET_DEVICES excludes near adapters",
    "The list excludes the adapters nearest to some GPUs.";
    "ucx-devices-none", "UCX_NET_DEVICES matches no adapter",
    "The list names interfaces (eth0) or adapters that do not exist. UCX expects the port, too: mlx5_0:1.";
    "ucx-devices-port", "UCX_NET_DEVICES names adapters without their port",
    "UCX compares whole names including the port: mlx5_0:1. mlx5_0 alone matches nothing.";
    "ucx-dmabuf", "UCX may not use dma-buf",
    "UCX_CUDA_COPY_DMABUF is off: UCX registers GPU memory through peer memory only.";
    "ucx-gpu-direct", "UCX's GPUDirect is disabled",
    "UCX_IB_GPU_DIRECT_RDMA=n. The default 'try' uses it where possible and is silent otherwise; 'y' makes a failure an error.";
    "ucx-nearest", "UCX does not prefer near adapters",
    "UCX_IB_PREFER_NEAREST_DEVICE=n.";
    "ucx-no-gpu", "UCX was built without GPU transports",
    "Without its cuda or rocm module UCX treats GPU pointers as host memory.";
    "ucx-no-verbs", "UCX was built without verbs",
    "Without its ib module UCX has only TCP and shared memory. ucx_info -d lists the transports.";
    "ucx-relaxed-default", "This UCX does not enable relaxed ordering on this processor",
    "UCX decides by processor model. It enables relaxed ordering on AMD Zen since 1.13, on Emerald Rapids since 1.21.";
    "ucx-rndv-scheme", "A setting makes UCX stage long messages",
    "UCX_RNDV_SCHEME=am and the pipelines (get_ppln, put_ppln) use host buffers. With auto, get_zcopy and put_zcopy the adapter accesses GPU memory.";
    "ucx-tls-no-gpu", "UCX_TLS excludes the GPU transports",
    "A list such as rc,sm must also name cuda (cuda_copy, cuda_ipc, gdr_copy).";
    "ucx-tls-no-ib", "UCX_TLS excludes the adapters",
    "The list has none of rc, dc, ud and ib.";
    "ucx-too-old", "UCX is too old to detect the available method",
    "UCX supports dma-buf since 1.14. Before 1.18 it detects nvidia_peermem only by nv_mem in /sys/kernel/mm/memory_peers, which newer OFEDs, DOCA and kernels do not have. ucx_info -v shows the version; containers and MPI packages bundle their own.";
    "verbs-provider", "libibverbs has no provider for the adapter",
    "/sys shows the adapter and its device file can be opened, but libibverbs does not list it: the user-space provider of its driver (libmlx5, libbnxt_re, libefa, ...) is missing, is of another version, or /etc/libibverbs.d is not there. libibverbs then warns 'no userspace device-specific driver found', and NCCL and UCX use TCP.\nManual check: ibv_devices. Fix: install ibverbs-providers (rdma-core), in the container's image, too.";
    "verbs-too-old", "libibverbs is too old for dma-buf",
    "ibv_reg_dmabuf_mr exists since rdma-core 34. Old container images have older versions.";
    "vm-flat", "A virtual machine with a flat PCI tree",
    "The hypervisor puts all devices on one bus, without switches and memory nodes. Programs inside cannot see which devices are near each other.";
    "wheel-ucx", "A Python package brings a UCX without verbs or CUDA",
    "Some packages bundle UCX. Its modules are those of the build, and the system's UCX does not matter to it: without ib it has TCP and shared memory only, without cuda it does not know GPU memory. Build the package against a UCX that has them, or use another version of it.";
    "wheel-verbs", "A Python package brings a libibverbs without a provider for the adapter",
    "auditwheel copies libibverbs into a package, but not the providers that it loads at run time. The copy looks for providers of its own private version (libmlx5-rdmav34.so): where the system's rdma-core has another one, the package sees no adapter and uses TCP, although ibv_devices lists it. Put the system's libibverbs in the place of the copy, or use a build that links with the system's.\nManual check: strings FILE | grep IBVERBS_PRIVATE, against the names in libibverbs/ beside the system's libraries.";
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
