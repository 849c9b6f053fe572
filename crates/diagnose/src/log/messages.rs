//! The messages whose causes are known: one table.

use super::causes::*;
use super::known::{Cause, Message, Remedy};
use crate::checks::peer_module::PeerModule;
use crate::finding::FixPart::{self, Assignment, Command, EngineOption, Line, Remark};

/// The doorbell of an adapter for GPUs, or proxies on the CPU.
const NO_DOORBELL: &[FixPart<&str>] = &[
    Assignment("NVSHMEM_IBGDA_NIC_HANDLER=cpu"),
    Remark("or, on the host, with a reboot"),
    Line {
        file: "/etc/modprobe.d/nvidia.conf",
        text: "options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords=\"PeerMappingOverride=1;\"",
    },
];

/// Specific messages stand before general ones.
pub(super) const MESSAGES: &[Message] = &[
    Message {
        words: &["ibv_reg_dmabuf_mr", "524"],
        meaning: "NVIDIA's driver does not map the exported memory for this adapter (ENOTSUPP)",
        causes: &[always(
            "the memory was exported for the data-direct function (Direct NIC of Grace machines), and another adapter registers it",
            container(&[
                Assignment("UCX_IB_DIRECT_NIC=n"),
                Remark("or a newer UCX; the adapter's data-direct port must be up"),
            ]),
        )],
    },
    Message {
        words: &["ibv_reg_dmabuf_mr", "Invalid argument"],
        meaning: "the adapter refused exported GPU memory (EINVAL)",
        causes: &[
            when(
                |facts, _| {
                    let ucx = facts.libraries.ucx.known().and_then(Option::as_ref);
                    ucx.is_some_and(|ucx| ucx.modules.iter().any(|module| module.starts_with("gdrcopy")))
                },
                "UCX's gdr_copy maps the same memory",
                container(&[Assignment("UCX_TLS=^gdr_copy")]),
            ),
            always(
                "offset or length do not fit the dma-buf: a part of an allocation was registered with the offset of the whole",
                container(&[Remark("upgrade the program, or register whole allocations")]),
            ),
        ],
    },
    Message {
        words: &["ibv_reg_dmabuf_mr", "not supported"],
        meaning: "the adapter's driver does not take dma-bufs",
        causes: &[always(
            "the kernel driver of the adapter is too old, or a software adapter",
            host(&[Remark("upgrade it (DOCA-OFED, kernel 5.12 and newer), or use peer memory")]),
        )],
    },
    Message {
        words: &["ibv_reg_mr", "Bad address"],
        meaning: "memory could not be registered: the kernel finds no pages behind the address (EFAULT)",
        causes: NO_PAGES,
    },
    Message {
        words: &["Unable to register MR", "Bad address"],
        meaning: "libfabric could not register memory (EFAULT)",
        causes: NO_PAGES,
    },
    Message {
        words: &["register memory", "Bad address"],
        meaning: "memory could not be registered (EFAULT)",
        causes: NO_PAGES,
    },
    Message {
        words: &["ibv_reg_mr", "Invalid argument"],
        meaning: "memory could not be registered (EINVAL)",
        causes: BAD_RANGE,
    },
    Message {
        words: &["Failed to register memory", "Invalid argument"],
        meaning: "memory could not be registered (EINVAL)",
        causes: BAD_RANGE,
    },
    Message {
        words: &["without nvidia-peermem"],
        meaning: "the program found neither nvidia_peermem nor dma-buf",
        causes: &[
            no_module(
                |facts, _| !peermem_loaded(facts),
                "nvidia_peermem is not loaded, and the program got no dma-buf",
                "or the open kernel module, and a program that registers by dma-buf",
            ),
            when(
                |facts, _| peermem_loaded(facts),
                "a peer-memory module is loaded that the program does not look for, and it got no dma-buf",
                both(&[Remark(
                    "use the open kernel module, or a version of the program that finds the module",
                )]),
            ),
        ],
    },
    Message {
        words: &["ibv_reg_mr", "Cannot allocate memory"],
        meaning: "memory could not be registered (ENOMEM)",
        causes: LOCKED,
    },
    Message {
        words: &["ibv_create_", "Cannot allocate memory"],
        meaning: "a queue could not be created (ENOMEM)",
        causes: LOCKED,
    },
    Message {
        words: &["ibv_modify_qp", "No such device"],
        meaning: "a connection failed: the adapter has no interface in this network namespace (ENODEV)",
        causes: &[always(
            "the process sees adapters that belong to the host or to other pods, and chose one of them",
            container(&[
                Remark("name the pod's own adapters"),
                Assignment("NCCL_IB_HCA=mlx5_2"),
                Remark("with its real name; or use the host's network"),
                EngineOption("--network host"),
            ]),
        )],
    },
    Message {
        words: &["ibv_modify_qp", "timed out"],
        meaning: "a connection failed: the address of the other end was not resolved",
        causes: UNREACHABLE,
    },
    Message {
        words: &["ibv_modify_qp", "unreachable"],
        meaning: "a connection failed: there is no route to the other end",
        causes: UNREACHABLE,
    },
    Message {
        words: &["ibv_modify_qp", "No route to host"],
        meaning: "a connection failed: there is no route to the other end",
        causes: UNREACHABLE,
    },
    Message {
        words: &["modify QP to RTR", "timed out"],
        meaning: "a connection failed: the address of the other end was not resolved",
        causes: UNREACHABLE,
    },
    Message {
        words: &["modify QP to RTR", "Invalid argument"],
        meaning: "a connection failed: the adapter refused its parameters (EINVAL)",
        causes: BAD_ADDRESS,
    },
    Message {
        words: &["ibv_modify_qp", "Invalid argument"],
        meaning: "a connection failed: the adapter refused its parameters (EINVAL)",
        causes: BAD_ADDRESS,
    },
    Message {
        words: &["ibv_query_gid", "failed"],
        meaning: "an adapter has no address at the GID index",
        causes: NO_GID,
    },
    Message {
        words: &["ailed to query GID"],
        meaning: "an adapter has no address at the GID index",
        causes: NO_GID,
    },
    Message {
        words: &["UD endpoint", "timeout"],
        meaning: "no answer from the other end over datagrams",
        causes: NO_ANSWER,
    },
    Message {
        words: &["no userspace device-specific driver"],
        meaning: "libibverbs has no provider for the adapter",
        causes: &[always(
            "the image or machine lacks the provider library",
            container(&[
                Command("sudo apt install ibverbs-providers"),
                Remark("or the vendor's: libionic, libbnxt_re"),
            ]),
        )],
    },
    Message {
        words: &["does not support the kernel ABI"],
        meaning: "the provider library does not fit the kernel driver of the adapter",
        causes: &[always(
            "the provider of the image is older or newer than the host's driver knows",
            container(&[Remark("install the provider in the version of the host's driver")]),
        )],
    },
    Message {
        words: &["open libibverbs"],
        meaning: "libibverbs is missing",
        causes: &[always(
            "the image or machine has no libibverbs",
            container(&[Command("sudo apt install libibverbs1 ibverbs-providers")]),
        )],
    },
    Message {
        words: &["No eligible providers"],
        meaning: "libfabric found no provider for the adapters: TCP is used",
        causes: &[always(
            "the process has no EFA adapter: the pod or container was started without it",
            container(&[
                EngineOption("--device /dev/infiniband"),
                Remark(
                    "Kubernetes: the EFA device plugin and its resource (vpc.amazonaws.com/efa); set NCCL_SOCKET_IFNAME where TCP is meant",
                ),
            ]),
        )],
    },
    Message {
        words: &["NET/OFI", "register memory", "Invalid argument"],
        meaning: "libfabric's EFA provider refused GPU memory of the virtual memory API (NCCL 2.19 and newer)",
        causes: &[always(
            "libfabric of EFA installers before 1.29.1 sets an attribute that such memory does not have",
            container(&[
                Assignment("FI_EFA_SET_CUDA_SYNC_MEMOPS=0"),
                Remark("or EFA installer 1.29.1 and newer"),
            ]),
        )],
    },
    Message {
        words: &["mlx5dv_reg_dmabuf_mr", "undefined symbol"],
        meaning: "libmlx5 lacks mlx5dv_reg_dmabuf_mr, which NCCL 2.27 and newer use on machines with Direct NIC",
        causes: &[when(
            |facts, _| {
                facts.gpus.iter().any(|gpu| ["GB200", "GB300"].iter().any(|name| gpu.title().contains(name)))
            },
            "rdma-core of the image is too old: operations on GPU memory end with status 4",
            container(&[Remark("install a newer rdma-core than 50 (DOCA-OFED has it)")]),
        )],
    },
    Message {
        words: &["neither nv_peer_mem, or nvidia_peermem detected"],
        meaning: "NVSHMEM detects no peer memory",
        causes: &[
            when(
                |facts, _| PeerModule(facts).loaded() == Some("nvidia_peermem"),
                "nvidia_peermem is loaded: this NVSHMEM looks only for /sys/kernel/mm/memory_peers/nv_mem, which newer drivers and OFEDs do not have",
                container(&[Remark(
                    "upgrade NVSHMEM (3.3 and newer also look for /sys/module/nvidia_peermem)",
                )]),
            ),
            Cause {
                when: |facts, _| PeerModule(facts).loaded() == Some("nv_peer_mem"),
                text: "nv_peer_mem is loaded, but not registered with this ib_core",
                fix: Remedy::ReloadModule("or an NVSHMEM that registers by dma-buf"),
            },
            no_module(
                |facts, _| !peermem_loaded(facts),
                "no peer-memory module is loaded",
                "or an NVSHMEM that registers by dma-buf",
            ),
        ],
    },
    Message {
        words: &["not enumerated as an mlx5 device"],
        meaning: "NVSHMEM skips adapters by their names",
        causes: &[always(
            "the adapters were renamed: NVSHMEM expects names that begin with mlx5",
            container(&[
                Assignment("NVSHMEM_HCA_PREFIX=roce"),
                Remark("with the beginning of their names; or no udev rule that renames mlx5_0"),
            ]),
        )],
    },
    Message {
        words: &["init failed for transport: IBGDA"],
        meaning: "GPU-initiated transfers (IBGDA) do not start",
        causes: &[always("the driver does not map the adapter's doorbell for GPUs", container(NO_DOORBELL))],
    },
    Message {
        words: &["cxil_map"],
        meaning: "Slingshot's library could not map memory",
        causes: &[always(
            "copies of GPU memory by GDRCopy: their buffers cannot be mapped",
            container(&[Assignment("FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD=0")]),
        )],
    },
    Message {
        words: &["No suitable GID found"],
        meaning: "Mooncake found no GID that it takes",
        causes: &[always(
            "no entry of the GID table has an IPv4 address and RoCE v2",
            container(&[
                Command("show_gids"),
                Remark("shows the index of a RoCE v2 entry, if one has an IPv4 address"),
                Assignment("MC_GID_INDEX=1"),
            ]),
        )],
    },
    Message {
        words: &["GID is NULL"],
        meaning: "Mooncake's GID index leads to an empty entry",
        causes: &[always(
            "the automatic choice or MC_GID_INDEX does not fit the adapter's GID table",
            container(&[
                Command("show_gids"),
                Remark("shows the index of the routed RoCE v2 entry"),
                Assignment("MC_GID_INDEX=3"),
            ]),
        )],
    },
    Message {
        words: &["nvidia_p2p_get_pages", "-22"],
        meaning: "NVIDIA's driver refuses GPU memory to other devices (EINVAL)",
        causes: &[always(
            "a GeForce card, memory that is not cudaMalloc's, or a CUDA that does not fit the driver",
            both(&[
                Command("nvidia-smi"),
                Remark("shows whether driver and CUDA fit; or use a data-centre or professional GPU"),
            ]),
        )],
    },
    Message {
        words: &["RLIMIT_MEMLOCK is"],
        meaning: "libibverbs warns of the limit of locked memory",
        causes: &[always(
            "the limit of locked memory is too small for queues and buffers",
            container(MORE_LOCKED),
        )],
    },
    Message {
        words: &["couldn't load driver"],
        meaning: "libibverbs cannot load the provider of an adapter",
        causes: &[when(
            // Libraries of adapters that the machine does not have are missing everywhere.
            |facts, line| {
                let mut drivers =
                    facts.nics.iter().filter_map(|nic| nic.driver.as_deref()?.split('_').next());
                drivers.any(|driver| line.contains(&format!("lib{driver}")))
            },
            "provider and libibverbs are of different versions, or the provider is not installed",
            container(&[
                Remark("install both from one source"),
                Command("sudo apt install --reinstall libibverbs1 ibverbs-providers"),
                Remark("or the OFED of the host"),
            ]),
        )],
    },
    Message {
        words: &["error initializing an OpenFabrics device"],
        meaning: "Open MPI's old openib transport does not know the adapter",
        causes: &[always(
            "openib is obsolete and does not support newer adapters",
            container(&[
                Assignment("OMPI_MCA_pml=ucx OMPI_MCA_btl=^openib"),
                Remark("with an Open MPI that has UCX"),
            ]),
        )],
    },
    Message {
        words: &["cannot allocate buffer on the specified memory type"],
        meaning: "GPU-initiated transfers (IBGDA) cannot map the adapter for the GPU",
        causes: &[always("the driver does not map the adapter's doorbell for GPUs", container(NO_DOORBELL))],
    },
    Message {
        words: &["fi_mr_reg", "Protocol not supported"],
        meaning: "the adapter's kernel driver does not take dma-bufs",
        causes: DRIVER_WITHOUT_DMA_BUF,
    },
    Message {
        words: &["allocate MR", "error=93"],
        meaning: "the adapter's kernel driver does not take dma-bufs",
        causes: DRIVER_WITHOUT_DMA_BUF,
    },
    Message {
        words: &["allocate MR", "error=95"],
        meaning: "the adapter's kernel driver does not take dma-bufs",
        causes: DRIVER_WITHOUT_DMA_BUF,
    },
    Message {
        words: &["Couldn't allocate MR"],
        meaning: "GPU memory could not be registered",
        causes: REFUSED,
    },
    Message {
        words: &["Couldn't register", "MR"],
        meaning: "GPU memory could not be registered",
        causes: REFUSED,
    },
    Message {
        words: &["LID: 0, GID: (GID_Index", "fe:80:00:00"],
        meaning: "Mooncake took a link-local RoCE address",
        causes: &[always(
            "the entry at this GID index is link-local, and other machines are not reached by it",
            container(&[
                Command("show_gids"),
                Remark("shows the index of the routed RoCE v2 entry"),
                Assignment("MC_GID_INDEX=3"),
            ]),
        )],
    },
    Message {
        words: &["GID table change"],
        meaning: "an address of the adapter changed while connections were open",
        causes: &[always(
            "DHCP or a network manager reconfigured the interface",
            both(&[Remark("give the interface a fixed address; keep NetworkManager and netplan off it")]),
        )],
    },
    Message {
        words: &["NET/IB : No device found"],
        meaning: "NCCL found no RDMA adapter: it uses sockets",
        causes: NO_DEVICE,
    },
    Message {
        words: &["No IB devices found"],
        meaning: "the program found no RDMA adapter",
        causes: NO_DEVICE,
    },
    Message {
        words: &["No RDMA devices found"],
        meaning: "the program found no RDMA adapter",
        causes: NO_DEVICE,
    },
    Message {
        words: &["socketPollConnect"],
        meaning: "NCCL's TCP bootstrap does not reach the other machine",
        causes: BOOTSTRAP,
    },
    Message {
        words: &["local access violation work queue error"],
        meaning: "an adapter stopped a queue pair: a message or packet was longer than its buffer allows",
        causes: OTHER_MTU,
    },
    Message {
        words: &["Unable to dlopen libmlx5dv"],
        meaning: "NVSHMEM has no mlx5 library",
        causes: &[when(
            |facts, _| !facts.nics.iter().any(|nic| nic.driver.as_deref() == Some("mlx5_core")),
            "GPU-initiated transfers (IBGDA) support adapters of mlx5 only, and there are none",
            container(&[
                Assignment("NVSHMEM_REMOTE_TRANSPORT=ibrc"),
                Remark(
                    "a transport of the CPU; or adapters of mlx5: DeepEP's low-latency kernels need IBGDA",
                ),
            ]),
        )],
    },
    Message {
        words: &["libnccl-net", "not find"],
        meaning: "NCCL found no network plugin",
        causes: NO_PLUGIN,
    },
    Message {
        words: &["No plugin found (libnccl-net"],
        meaning: "NCCL found no network plugin",
        causes: NO_PLUGIN,
    },
    Message {
        words: &["libnccl-net", "cannot open shared object file"],
        meaning: "NCCL cannot load a network plugin",
        causes: NO_PLUGIN,
    },
    Message {
        words: &["Call to connect returned"],
        meaning: "NCCL's TCP bootstrap does not reach the other machine",
        causes: BOOTSTRAP,
    },
    Message {
        words: &["network device", "is not available"],
        meaning: "UCX_NET_DEVICES names an adapter that UCX does not have",
        causes: &[always(
            "the name or its port is wrong, or the adapter is not in this container",
            container(&[Command("ucx_info -d | grep Device"), Remark("names have a port: mlx5_0:1")]),
        )],
    },
    Message {
        words: &["transport", "not available"],
        meaning: "UCX_TLS names a transport that this UCX does not have",
        causes: &[always(
            "UCX was built without CUDA or verbs, or does not find its modules",
            container(&[
                Command("ucx_info -v"),
                Remark("install its cuda and ib modules, or name their folder in UCX_MODULE_DIR"),
            ]),
        )],
    },
    Message {
        words: &["socketStartConnect"],
        meaning: "NCCL's TCP bootstrap does not reach the other machine",
        causes: BOOTSTRAP,
    },
    Message {
        words: &["Connect to ", " failed"],
        meaning: "NCCL's TCP bootstrap does not reach the other machine",
        causes: BOOTSTRAP,
    },
];
