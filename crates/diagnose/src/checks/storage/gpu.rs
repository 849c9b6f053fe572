//! What concerns one GPU: its model, the IOMMU, and the PCIe path between it and the drives.

use super::{ChainStep, filesystem, shell, step};
use crate::checks::{iommu, list};
use crate::finding::{Finding, Fix, Severity};
use crate::storage_verdict::State;
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Gpu, GpuVendor, PciDevice, Read, Storage};
use nobounce_topology::methods::Answer;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::Distance;
use nobounce_topology::usable;

/// GPUs that NVIDIA names for P2PDMA.
const LISTED: [&str; 9] = ["A100", "A40", "L4", "L40S", "H100", "H200", "B100", "B200", "B300"];
/// Ampere, the first generation with P2PDMA; Pascal, the first that cuFile supports.
const P2PDMA_CC: u32 = 80;
const CUFILE_CC: u32 = 60;

pub(super) fn steps(analysis: &Analysis<'_>, storage: &Storage, gpu: &Gpu) -> Vec<ChainStep> {
    vec![model(analysis, gpu), iommu(analysis, storage, gpu), path(analysis, storage, gpu)]
}

fn model(analysis: &Analysis<'_>, gpu: &Gpu) -> ChainStep {
    const NAME: &str = "GPU";
    let title = gpu.title().to_owned();
    let finding = |severity, what: &str, source: &str, value: String| {
        Finding::new("storage-gpu", severity, format!("{title}: {what}"))
            .why("P2PDMA is supported on A100, A40, L4, L40S, H100, H200, B100, B200 and B300, not on Grace. nvidia-fs needs GPUDirect RDMA, which data-centre and professional GPUs have and GeForce cards have not.")
            .seen(source, value)
            .fix(Fix::both().run("/usr/local/cuda/gds/tools/gdscheck -p").remark("GPU INFO"))
    };
    if gpu.vendor != GpuVendor::Nvidia {
        return step(NAME, State::Blocks, State::Blocks, format!("{title}: cuFile serves NVIDIA's GPUs"))
            .because(finding(
                Severity::Warning,
                "cuFile does not serve it",
                "/sys/bus/pci",
                gpu.address.clone(),
            ))
            .for_good();
    }
    if let Answer::No(_, why) = usable::gpu(analysis.facts, gpu) {
        let finding = Finding::new("storage-gpu", Severity::Error, format!("{title} cannot be used: {why}"))
            .why("Without a GPU that CUDA can use there is no memory to read into.")
            .seen(gpu.address.clone(), why.clone())
            .fix(Fix::both().run("nvidia-smi; nobounce doctor"));
        return step(NAME, State::Blocks, State::Blocks, why).because(finding);
    }
    let cc = gpu.compute_capability.get();
    if gpu.gpudirect_rdma.get() == Some(false) || gpu.confidential.get() == Some(true) {
        let (what, source) = if gpu.confidential.get() == Some(true) {
            ("confidential computing closes its memory to drives", "NVML")
        } else {
            (
                "it has no GPUDirect RDMA, so that no drive can write its memory",
                "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED (116)",
            )
        };
        return step(NAME, State::Blocks, State::Blocks, format!("{title}: no GPUDirect"))
            .because(finding(Severity::Warning, what, source, "0".to_owned()))
            .for_good();
    }
    if let Some(cc) = cc.filter(|cc| *cc < CUFILE_CC) {
        return step(NAME, State::Blocks, State::Blocks, format!("{title}: older than Pascal"))
            .because(finding(
                Severity::Warning,
                "cuFile needs Pascal or newer",
                "compute capability",
                cc.to_string(),
            ))
            .for_good();
    }
    let nvidia_fs = if gpu.gpudirect_rdma.get() == Some(true) { State::Ok } else { State::Unknown };
    let words: Vec<&str> = title.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let listed = LISTED.iter().any(|model| words.contains(model));
    let grace =
        gpu.coherent_link.get() == Some(true) || Platform::of(&analysis.facts.machine.cpu) == Platform::Grace;
    let (p2pdma, what) = if grace {
        (State::Blocks, "P2PDMA is not supported on Grace")
    } else if cc.is_some_and(|cc| cc < P2PDMA_CC) {
        (State::Blocks, "P2PDMA needs Ampere or newer")
    } else if listed {
        (State::Ok, "")
    } else {
        (State::Unknown, "not in NVIDIA's list for P2PDMA")
    };
    let step_of = step(
        NAME,
        p2pdma,
        nvidia_fs,
        if what.is_empty() { title.clone() } else { format!("{title}: {what}") },
    );
    match (p2pdma, nvidia_fs) {
        (State::Ok, State::Ok) => step_of,
        (State::Blocks, _) => {
            let cc = cc.map_or_else(|| "unknown".to_owned(), |cc| cc.to_string());
            step_of.because(finding(Severity::Warning, what, "compute capability", cc)).for_good()
        }
        (State::Unknown, _) => {
            step_of.because(finding(Severity::Unknown, what, "name of the GPU", title.clone()))
        }
        _ => {
            let why = gpu.gpudirect_rdma.why_not().unwrap_or_default().to_owned();
            step_of.because(finding(
                Severity::Unknown,
                "whether it has GPUDirect RDMA is unknown",
                "CUDA",
                why,
            ))
        }
    }
}

/// The GPU and the drives in the PCI tree.
fn ends<'a>(analysis: &'a Analysis<'_>, storage: &Storage, gpu: &Gpu) -> Vec<&'a PciDevice> {
    std::iter::once(gpu.address.as_str())
        .chain(storage.pci_addresses())
        .filter_map(|address| analysis.facts.pci_device(address))
        .collect()
}

fn iommu(analysis: &Analysis<'_>, storage: &Storage, gpu: &Gpu) -> ChainStep {
    const NAME: &str = "IOMMU";
    let facts = analysis.facts;
    let grace = Platform::of(&facts.machine.cpu) == Platform::Grace;
    let ends = ends(analysis, storage, gpu);
    let known: Vec<Option<bool>> = ends.iter().map(|device| iommu::translates(analysis, device)).collect();
    let kind = |device: &PciDevice| match &device.iommu {
        Read::Yes(Some(group)) => group.kind.clone().unwrap_or_else(|| "type not told".to_owned()),
        Read::Yes(None) => "no IOMMU".to_owned(),
        Read::No(unread) => unread.unread.clone(),
    };
    let seen = |finding: Finding| {
        ends.iter().fold(finding, |finding, device| finding.seen(device.address.clone(), kind(device)))
    };
    let bad = if grace { Some(false) } else { Some(true) };
    if known.contains(&bad) {
        let parameter = match (grace, facts.machine.cpu.vendor.as_str()) {
            (true, _) => "iommu.passthrough=0",
            (false, "AuthenticAMD") => "amd_iommu=off",
            (false, _) => "intel_iommu=off",
        };
        let title = if grace {
            "the IOMMU passes addresses through, which Grace must not"
        } else {
            "the IOMMU translates the addresses of GPU or drive"
        };
        let boot = Fix::host().run(format!("sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&{parameter} /' /etc/default/grub && sudo update-grub && sudo reboot"));
        let finding = Finding::new("storage-iommu", Severity::Warning, title)
            .why("On x86 NVIDIA supports GPUDirect Storage with the IOMMU off, or in passthrough on some platforms: with translation it is neither guaranteed to work nor fast. On Grace it is the other way round.")
            .fix(if grace { boot } else { boot.remark("or iommu=pt, where other devices need it") })
            .reboot();
        return step(NAME, State::Unknown, State::Unknown, title).because(seen(finding));
    }
    if known.is_empty() || known.contains(&None) {
        let finding = Finding::new(
            "storage-unread",
            Severity::Unknown,
            "IOMMU translation for GPU or drive is unknown",
        )
        .why("With translation direct reads are neither guaranteed to work nor fast on x86.")
        .fix(Fix::both().run("cat /sys/kernel/iommu_groups/*/type | sort | uniq -c; cat /proc/cmdline"));
        let finding = if ends.is_empty() {
            finding.seen("/sys/bus/pci/devices", "neither is in the PCI tree")
        } else {
            seen(finding)
        };
        return step(NAME, State::Unknown, State::Unknown, "unknown").because(finding);
    }
    step(
        NAME,
        State::Ok,
        State::Ok,
        if grace { "translates, as Grace needs it" } else { "off or in passthrough" },
    )
}

/// The largest distance between the GPU and a drive of the file; none where one is unknown.
pub(super) fn distance(analysis: &Analysis<'_>, storage: &Storage, gpu: &Gpu) -> Option<Distance> {
    let addresses = storage.pci_addresses();
    // Every local drive needs an address, or the distance would be that of the others.
    let local = storage.drives().flat_map(|drive| &drive.controllers);
    if addresses.is_empty() || local.filter(|c| c.pci.is_none()).count() > 0 {
        return None;
    }
    addresses
        .iter()
        .map(|address| analysis.tree.distance(&gpu.address, address))
        .collect::<Option<Vec<_>>>()?
        .into_iter()
        .max()
}

/// ACS of the ports between GPU and drives: those that redirect, and whether one could not be read.
fn acs(analysis: &Analysis<'_>, storage: &Storage, gpu: &Gpu) -> (Vec<String>, bool) {
    let (mut redirect, mut unread) = (Vec::new(), false);
    for address in storage.pci_addresses() {
        for port in analysis.tree.between(&gpu.address, address).ports {
            match port.config.known() {
                Some(config) if config.acs.is_some_and(nobounce_topology::facts::Acs::redirects) => {
                    if !redirect.contains(&port.address) {
                        redirect.push(port.address.clone());
                    }
                }
                Some(_) => {}
                None => unread = true,
            }
        }
    }
    (redirect, unread)
}

fn path(analysis: &Analysis<'_>, storage: &Storage, gpu: &Gpu) -> ChainStep {
    const NAME: &str = "PCIe path";
    let facts = analysis.facts;
    let local = storage.mount.known().is_none_or(|mount| filesystem::is_local(&mount.kind));
    let remote = storage
        .drives()
        .flat_map(|drive| &drive.controllers)
        .any(|controller| controller.transport.known().is_some_and(|transport| transport != "pcie"));
    if !local && storage.mount.known().is_some_and(|mount| filesystem::client(&mount.kind).is_none()) {
        return step(NAME, State::NotNeeded, State::NotNeeded, "no drive is read directly");
    }
    if !local || remote {
        let finding = Finding::new("storage-network-path", Severity::Unknown, "the adapter that carries the file is not known")
            .why("Bytes of a network filesystem or a remote drive reach the GPU through an adapter. The distance between them, and its registration of GPU memory, decide.")
            .seen("/proc/self/mountinfo", storage.mount.known().map(|mount| mount.source.clone()).unwrap_or_default())
            .fix(Fix::both().run("nobounce doctor").remark("GPUs and adapters, without --storage"));
        let text = "through an adapter: see nobounce doctor without --storage";
        return step(NAME, State::NotNeeded, State::Unknown, text).because(finding);
    }
    let distance = distance(analysis, storage, gpu);
    let Some(distance) = distance.filter(|_| !facts.is_virtual()) else {
        let (text, fix) = if facts.is_virtual() {
            (
                "a virtual machine: the host decides on peer-to-peer traffic",
                Fix::both()
                    .run("/usr/local/cuda/gds/tools/gdscheck -p")
                    .remark("and on the host")
                    .run("lspci -tv"),
            )
        } else {
            (
                "drive or GPU is not in the PCI tree",
                Fix::both().run("lspci -tv; readlink -f /sys/class/nvme/*/device"),
            )
        };
        let finding = Finding::new("storage-unread", Severity::Unknown, format!("the PCIe path from the drive to the GPU is unknown: {text}"))
            .why("A drive writes into the GPU through PCIe switches or root ports. Which of them forward such packets depends on the machine.")
            .seen("/sys/bus/pci/devices", format!("{} and {}", gpu.address, list(&storage.pci_addresses())))
            .fix(fix);
        return step(NAME, State::Unknown, State::Unknown, text).because(finding);
    };
    let (redirect, unread) = acs(analysis, storage, gpu);
    let text = format!("{distance}: {}", distance.words());
    // Linux lets P2PDMA through the root ports of all Zen processors; of others by a list of
    // host bridges, which are not among the facts.
    let through_cpu =
        if Platform::of(&facts.machine.cpu) == Platform::Zen { State::Ok } else { State::Unknown };
    if distance.is_below_switch() {
        return below_switch(&storage.path, &text, redirect, unread, through_cpu);
    }
    let severity = if distance == Distance::Sys { Severity::Warning } else { Severity::Info };
    let far = Finding::new("storage-far", severity, format!("drive and GPU are far apart ({})", distance.name()))
        .why("Their packets cross the processor, between sockets at a few GB/s on many machines. NVIDIA tunes GPUDirect Storage for a drive and a GPU below one PCIe switch. A nearer GPU or drive, or compat mode, may be faster: measure.")
        .seen("PCI tree", text.clone())
        .fix(Fix::both().run("nobounce topo").remark("drives and GPUs by switch"))
        .slows();
    let step_of = step(NAME, through_cpu, State::Ok, text.clone()).noting(Some(far));
    match through_cpu {
        State::Ok => step_of,
        _ => step_of.because(host_bridge(&text, "through the processor")),
    }
}

fn host_bridge(text: &str, how: &str) -> Finding {
    Finding::new("storage-host-bridge", Severity::Unknown, format!("whether Linux lets P2PDMA {how} is unknown"))
        .why("For packets through the processor Linux has a list of host bridges (pci_p2pdma). On others the read fails, and cuFile falls back. AMD Zen is always on it.")
        .seen("PCI tree", text)
        .fix(Fix::both().run("sudo dmesg | grep -i p2pdma; nobounce topo").remark("a drive below the GPU's switch needs no list"))
}

fn below_switch(
    file: &str,
    text: &str,
    redirect: Vec<String>,
    unread: bool,
    through_cpu: State,
) -> ChainStep {
    const NAME: &str = "PCIe path";
    if !redirect.is_empty() {
        let finding = Finding::new("storage-acs", Severity::Warning, format!("ACS redirects packets between drive and GPU to the processor ({})", list(&redirect)))
            .why("Both are below one switch, but every packet goes up to the root complex: half the bandwidth or less, and Linux treats it as a path through the processor.")
            .seen("ACSCtl", format!("redirects at {}", list(&redirect)))
            .fix(Fix::host().run(redirect.iter().map(|port| format!("sudo setpci -s {port} ECAP_ACS+0x6.w=0000")).collect::<Vec<_>>().join("; ")))
            .root()
            .slows();
        let step_of = step(NAME, through_cpu, State::Ok, format!("{text}, but ACS redirects"));
        return if through_cpu == State::Ok {
            step_of.noting(Some(finding))
        } else {
            step_of.because(finding)
        };
    }
    if unread && through_cpu != State::Ok {
        let finding = Finding::new("storage-acs-unread", Severity::Unknown, "ACS of the ports between drive and GPU could not be read")
            .why("With redirection Linux treats the path as one through the processor, and may refuse P2PDMA. Only root may read it. nvidia-fs works, at half the bandwidth.")
            .seen("/sys/bus/pci/devices/*/config", "only the first 64 bytes")
            .fix(Fix::both().run(format!("sudo nobounce doctor --storage {}", shell(file))))
            .root();
        return step(NAME, State::Unknown, State::Ok, format!("{text}; ACS unread")).because(finding);
    }
    step(NAME, State::Ok, State::Ok, text)
}
