//! What the GPU itself allows: its class, BAR1, MIG, confidential computing; and the CPU's window
//! onto it.

use super::{bytes, list};
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{ATTRIBUTE_UNKNOWN, Facts, Gpu, GpuVendor};
use nobounce_topology::gpudirect;
use nobounce_topology::methods::Answer;

/// BAR1 below this share of the memory is small: larger registrations than BAR1 fail.
const SMALL: u64 = 4;
/// What the driver keeps of BAR1 for itself.
const RESERVED: u64 = 36 << 20;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    class(analysis, &mut found);
    consumer(analysis, &mut found);
    bar1(analysis, &mut found);
    modes(analysis, &mut found);
    window(analysis, &mut found);
    unread(analysis, &mut found);
    found
}

fn addresses(gpus: &[&Gpu]) -> Vec<String> {
    gpus.iter().map(|gpu| gpu.address.clone()).collect()
}

fn class(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let gpus: Vec<&Gpu> =
        analysis.facts.gpus.iter().filter(|gpu| gpudirect::supported(analysis.facts, gpu).is_no()).collect();
    let Some(first) = gpus.first() else { return };
    let severity = if analysis.has_hardware_nic() { Severity::Warning } else { Severity::Info };
    let virtual_gpu = analysis.facts.is_virtual() && !gpudirect::is_consumer(first.title());
    let fix = if virtual_gpu {
        Fix::both().remark(
            "ask the operator for a GPU passed through as a whole, or a vGPU type with GPUDirect support",
        )
    } else {
        Fix::both()
            .remark("use a data-centre or RTX professional GPU for GPUDirect; on this one NCCL and UCX stage. To use the window, where the driver allows it, put before the program")
            .run("nobounce run --")
    };
    found.push(
        Finding::new("gpu-class", severity, format!("{}: the driver does not support GPUDirect RDMA for it", first.title()))
            .why("The driver excludes GeForce and TITAN cards, GPUs that share memory with the processor (GB10), and some virtual GPUs. Registering their memory fails (EFAULT, 'couldn't allocate MR') with any modules.")
            .seen("CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED (116)", "0")
            .fix(fix)
            .blocks()
            .on(addresses(&gpus)),
    );
}

/// GeForce cards whose driver was not asked: the path stays unknown, the class is not.
fn consumer(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let gpus: Vec<&Gpu> = facts
        .gpus
        .iter()
        .filter(|gpu| gpu.vendor == GpuVendor::Nvidia && gpu.title().contains("GeForce"))
        .filter(|gpu| matches!(gpudirect::supported(facts, gpu), Answer::Unknown(_)))
        .collect();
    let Some(first) = gpus.first() else { return };
    let severity = if analysis.has_hardware_nic() { Severity::Warning } else { Severity::Info };
    found.push(
        Finding::new("gpu-class", severity, format!("{}: NVIDIA offers GPUDirect RDMA for data-centre and professional GPUs only", first.title()))
            .why("Drivers for GeForce cards refuse it, whatever modules are loaded: registering their memory fails (EFAULT, EINVAL), and NCCL and UCX stage. The driver was not asked here: only it or a registration proves it.")
            .seen("name", first.title())
            .fix(Fix::both().remark("use a data-centre or RTX professional GPU for GPUDirect; on this one NCCL and UCX stage"))
            .on(addresses(&gpus)),
    );
}

/// GPUs whose BAR1 covers their memory as they are made.
fn has_full_bar1(name: &str) -> bool {
    ["V100", "A100", "A800", "H100", "H200", "H800", "H20", "B100", "B200", "B300", "GH200", "GB200", "GB300"]
        .iter()
        .any(|model| name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == *model))
}

fn bar1(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let small: Vec<&Gpu> = facts
        .gpus
        .iter()
        .filter(|gpu| match (gpu.bar1_bytes.get(), gpu.memory_bytes.get()) {
            (Some(bar), Some(memory)) => bar < memory / SMALL,
            (Some(bar), None) => bar <= 256 << 20,
            (None, _) => false,
        })
        .collect();
    if let Some(first) = small.first() {
        let bar = first.bar1_bytes.get().unwrap_or(0);
        let larger = facts
            .pci_device(&first.address)
            .and_then(|device| device.config.known()?.resizable_bar_max)
            .filter(|largest| *largest > bar);
        let hurt = facts.registrations.iter().any(|r| {
            !r.probe.ok
                && r.bytes > bar.saturating_sub(RESERVED)
                && small.iter().any(|gpu| gpu.address == r.gpu)
        });
        // These come with a BAR1 as large as their memory: a small one is the firmware's doing.
        let shrunk = small.iter().any(|gpu| has_full_bar1(gpu.title()));
        let severity = if hurt || ((larger.is_some() || shrunk) && analysis.has_hardware_nic()) {
            Severity::Warning
        } else {
            Severity::Info
        };
        let memory = first
            .memory_bytes
            .get()
            .map_or_else(|| "its memory".to_owned(), |memory| format!("its {} of memory", bytes(memory)));
        let finding = Finding::new("bar1-small", severity, format!("{}: BAR1 is {}, a window onto {memory}", first.title(), bytes(bar)))
            .why(format!(
                "All registrations together must fit: about {}. Larger ones fail (ENOMEM), and UCX or an engine that registers a whole pool crashes.",
                bytes(bar.saturating_sub(RESERVED))
            ))
            .seen("BAR1", bytes(bar));
        let finding =
            match larger {
                Some(largest) => finding
                    .seen("resizable BAR", format!("up to {}", bytes(largest)))
                    .fix(Fix::host().remark(
                        "enable 'Above 4G decoding' and 'Resizable BAR' in the firmware (BIOS) setup",
                    ))
                    .reboot(),
                None => finding.fix(
                    Fix::container()
                        .set("UCX_IB_GPU_DIRECT_RDMA=n NCCL_NET_GDR_LEVEL=LOC")
                        .remark("the libraries then stage; or register smaller buffers, a window at a time"),
                ),
            };
        found.push(finding.on(addresses(&small)));
    }
    let full: Vec<&Gpu> = facts
        .gpus
        .iter()
        .filter(|gpu| matches!((gpu.bar1_bytes.get(), gpu.bar1_used_bytes.get()), (Some(all), Some(used)) if all > 0 && used > all / 20 * 19))
        .collect();
    if let Some(first) = full.first() {
        found.push(
            Finding::new("bar1-full", Severity::Warning, format!("{}: BAR1 is nearly full", first.title()))
                .why("New registrations fail with ENOMEM. Possible holders: another process, a leaking registration cache, or GDRCopy and dma-buf mapping the same memory twice.")
                .seen("BAR1 in use", format!("{} of {}", bytes(first.bar1_used_bytes.get().unwrap_or(0)), bytes(first.bar1_bytes.get().unwrap_or(0))))
                .fix(Fix::both().run("nvidia-smi -q -d MEMORY").remark("end the processes that hold mappings"))
                .slows()
                .on(addresses(&full)),
        );
    }
    unassigned(facts, found);
}

/// GPUs whose BARs the firmware did not place.
fn unassigned(facts: &Facts, found: &mut Vec<Finding>) {
    let none: Vec<&Gpu> = facts
        .gpus
        .iter()
        .filter(|gpu| {
            gpu.bar1_bytes.known().is_none()
                && facts
                    .pci_device(&gpu.address)
                    .is_some_and(|device| device.bars.is_empty() && device.driver.is_none())
        })
        .filter(|gpu| {
            gpu.vendor == GpuVendor::Nvidia && facts.kernel.nvidia.known().is_some_and(Option::is_some)
        })
        .collect();
    if !none.is_empty() {
        found.push(
            Finding::new(
                "bar1-unassigned",
                Severity::Error,
                format!("{}: the firmware assigned no memory regions", list(&addresses(&none))),
            )
            .why("The driver cannot start the GPU ('BAR1 is 0M @ 0x0' in the kernel log).")
            .seen(format!("/sys/bus/pci/devices/{}/resource", none[0].address), "no region")
            .fix(
                Fix::host()
                    .remark("enable 'Above 4G decoding' in the firmware setup, or boot with pci=realloc"),
            )
            .reboot()
            .blocks()
            .on(addresses(&none)),
        );
    }
}

fn modes(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let mig: Vec<&Gpu> = facts.gpus.iter().filter(|gpu| gpu.mig.get() == Some(true)).collect();
    if !mig.is_empty() {
        found.push(
            Finding::new("mig", Severity::Info, format!("{}: divided into instances (MIG)", list(&addresses(&mig))))
                .why("GPUDirect RDMA works from an instance, but instances have no P2P: NCCL between two instances of one GPU does not work, and each has a part of BAR1.")
                .seen("MIG mode", "enabled")
                .fix(Fix::host().run("sudo nvidia-smi -mig 0").remark("if MIG is not needed"))
                .root()
                .on(addresses(&mig)),
        );
    }
    let confidential: Vec<&Gpu> =
        facts.gpus.iter().filter(|gpu| gpu.confidential.get() == Some(true)).collect();
    if !confidential.is_empty() {
        found.push(
            Finding::new("confidential", Severity::Warning, format!("{}: confidential computing is on", list(&addresses(&confidential))))
                .why("Its memory is closed to other devices: all data goes through encrypted bounce buffers in host memory.")
                .seen("confidential computing", "on")
                .fix(Fix::host().remark("if not needed, disable it with NVIDIA's gpu-admin-tools").run("nvidia_gpu_tools.py --set-cc-mode=off"))
                .reboot()
                .blocks()
                .on(addresses(&confidential)),
        );
    }
}

fn window(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if !facts.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia) {
        return;
    }
    let loaded = facts.kernel.is_loaded("gdrdrv");
    let node = facts.devices.known().map(|nodes| nodes.iter().find(|node| node.path == "/dev/gdrdrv"));
    if loaded == Some(true)
        && let Some(node) = node
    {
        match node {
            None => found.push(
                Finding::new(
                    "gdrdrv-node",
                    Severity::Warning,
                    "gdrdrv is loaded, but this process has no /dev/gdrdrv",
                )
                .why("GDRCopy fails to open; UCX and NVSHMEM use slow copies for short messages.")
                .seen("/dev/gdrdrv", "not there")
                .fix(
                    Fix::container()
                        .option("--device /dev/gdrdrv")
                        .remark("Kubernetes: mount it, or driver.gdrcopy.enabled of the GPU operator"),
                ),
            ),
            Some(node) if !node.open.ok => found.push(
                Finding::new(
                    "gdrdrv-node",
                    Severity::Warning,
                    format!("/dev/gdrdrv cannot be opened: {}", node.open.detail),
                )
                .why("GDRCopy fails to open; UCX and NVSHMEM use slow copies for short messages.")
                .seen("/dev/gdrdrv", node.open.detail.clone())
                .fix(
                    Fix::host()
                        .run("sudo chmod 0666 /dev/gdrdrv")
                        .remark("and allow it in the container's device cgroup"),
                )
                .root(),
            ),
            Some(_) => {}
        }
    }
    let dwords =
        facts.kernel.nvidia.known().and_then(|module| module.as_ref()?.parameters.get("RegistryDwords"));
    if let Some(dwords) = dwords.filter(|dwords| dwords.replace(' ', "").contains("RmForceDisableIomapWC=1"))
    {
        found.push(
            Finding::new("bar1-uncached", Severity::Warning, "the driver maps BAR1 uncached: the CPU's window onto GPU memory is slow")
                .why("RmForceDisableIomapWC=1 switches write combining off, as GPUDirect Storage by P2PDMA requires on x86. Stores of nobounce's software NIC and of GDRCopy then go word by word; adapters are not concerned.")
                .seen("/proc/driver/nvidia/params: RegistryDwords", dwords.clone())
                .fix(Fix::host().remark("remove RmForceDisableIomapWC from NVreg_RegistryDwords in /etc/modprobe.d unless GPUDirect Storage needs it"))
                .reboot(),
        );
    }
    let blocked: Vec<&Gpu> =
        facts.gpus.iter().filter(|gpu| gpu.window_probe.known().is_some_and(|probe| !probe.ok)).collect();
    if let Some(first) = blocked.first()
        && loaded != Some(true)
    {
        found.push(
            Finding::new(
                "no-window",
                Severity::Info,
                format!("{}: the CPU has no window onto its memory", list(&addresses(&blocked))),
            )
            .why("nobounce then uses the copy engine (staged), and GDRCopy does not work either.")
            .seen(
                "window probe",
                first.window_probe.known().map(|probe| probe.detail.clone()).unwrap_or_default(),
            )
            .fix(Fix::host().run("sudo modprobe gdrdrv").remark("from GDRCopy"))
            .root()
            .on(addresses(&blocked)),
        );
    }
}

/// The driver did not tell about a GPU that it holds.
fn unread(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let silent: Vec<&Gpu> = facts
        .gpus
        .iter()
        .filter(|gpu| gpu.vendor == GpuVendor::Nvidia && gpu.gpudirect_rdma.known().is_none())
        .filter(|gpu| !gpudirect::supported(facts, gpu).is_yes())
        .filter(|gpu| {
            facts.pci_device(&gpu.address).is_none_or(|device| device.driver.as_deref() == Some("nvidia"))
        })
        .filter(|_| {
            facts.devices.known().is_none_or(|nodes| nodes.iter().any(|node| node.path == "/dev/nvidiactl"))
        })
        .collect();
    let (waiting, silent): (Vec<&Gpu>, Vec<&Gpu>) =
        silent.into_iter().partition(|gpu| gpudirect::waits_for_fabric(gpu));
    if let Some(first) = waiting.first() {
        found.push(
            Finding::new(
                "fabric-manager",
                Severity::Error,
                "CUDA does not start: the NVSwitch fabric is not set up",
            )
            .why("No program can use these GPUs until the fabric manager runs in the driver's version.")
            .seen("CUDA", first.gpudirect_rdma.why_not().unwrap_or_default())
            .fix(
                Fix::host()
                    .run("sudo systemctl enable --now nvidia-fabricmanager; nvidia-smi -q | grep -A2 Fabric"),
            )
            .root()
            .blocks()
            .on(addresses(&waiting)),
        );
    }
    if let Some(first) = silent.first() {
        let why_not = first.gpudirect_rdma.why_not().unwrap_or_default();
        let finding = Finding::new(
            "gpu-unread",
            Severity::Unknown,
            format!("{}: whether the GPU supports GPUDirect RDMA is unknown", list(&addresses(&silent))),
        )
        .seen("CUDA", why_not);
        let finding = if gpudirect::is_consumer(first.title()) {
            finding.seen("name", first.title()).why("Most GeForce and TITAN cards have no GPUDirect RDMA; only the driver or a registration tells.")
        } else {
            finding.why("Without CUDA's attributes or a registration, support for GPUDirect RDMA and dma-buf is not known.")
        };
        let finding = if why_not.starts_with(ATTRIBUTE_UNKNOWN) {
            finding.fix(Fix::both().run("nobounce doctor").remark("its registration probe decides, or upgrade the driver to 465 or newer, which reports the attribute"))
        } else {
            finding.fix(
                Fix::both()
                    .run("nobounce doctor")
                    .remark("where libcuda.so.1 is installed and the GPU visible (CUDA_VISIBLE_DEVICES)"),
            )
        };
        found.push(finding.on(addresses(&silent)));
    }
}
