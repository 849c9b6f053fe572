//! What the kernel said about it all.

use super::iommu::{boot_with, passthrough};
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    let Some(lines) = analysis.facts.kernel.log.known() else { return found };
    let line_with = |words: &[&str]| {
        lines.iter().find(|line| words.iter().all(|word| line.to_ascii_lowercase().contains(word)))
    };
    peermem(analysis, lines, &mut found);
    if let Some(line) = line_with(&["dmar", "fault"])
        .or_else(|| line_with(&["amd-vi", "io_page_fault"]))
        .or_else(|| line_with(&["arm-smmu", "event"]))
    {
        found.push(
            Finding::new("iommu-faults", Severity::Warning, "the IOMMU blocked accesses of a device")
                .why("Transfers between devices end in errors (status 4, syndrome 0x51) or hang.")
                .seen("kernel log", line.trim())
                .fixes(boot_with(passthrough(analysis.facts)))
                .reboot(),
        );
    }
    let denied = |line: &&String| {
        let line = line.to_ascii_lowercase();
        let about =
            ["infiniband", "uverbs", "rdma", "nvidia", "gdrdrv"].iter().any(|word| line.contains(word));
        about && (line.contains("avc:") && line.contains("denied") || line.contains("apparmor=\"denied\""))
    };
    if let Some(line) = lines.iter().find(denied) {
        let (name, confirm, fix) = if line.to_ascii_lowercase().contains("apparmor") {
            (
                "AppArmor",
                Fix::container().option("--security-opt apparmor=unconfined").remark("to confirm"),
                Fix::host()
                    .run("sudo aa-status")
                    .remark("it lists the profiles: allow the file in that of the program"),
            )
        } else {
            (
                "SELinux",
                Fix::container().option("--security-opt label=disable").remark("to confirm"),
                Fix::host()
                    .remark("allow it by the policy")
                    .run("sudo setsebool -P container_use_devices on"),
            )
        };
        found.push(
            Finding::new(
                "security-denied",
                Severity::Warning,
                format!("{name} denied an access to the adapter or the GPU"),
            )
            .why("Mode and owner of the device file allow it, and opening or mapping it fails all the same.")
            .seen("kernel log", line.trim())
            .fix(confirm)
            .fix(fix)
            .root(),
        );
    }
    if let Some(line) = line_with(&["aer", "error"])
        .filter(|line| line.contains("pcieport") || line.contains("PCIe Bus Error"))
    {
        found.push(
            Finding::new("pcie-errors", Severity::Warning, "the PCIe bus reported errors")
                .why("A faulty link retransmits and slows down, or trains to a lower speed.")
                .seen("kernel log", line.trim())
                .fix(Fix::host().remark("reseat the card or riser").run("sudo lspci -vvv | grep -A3 UESta"))
                .root(),
        );
    }
    if let Some(line) = line_with(&["bar1 is 0m"])
        .or_else(|| line_with(&["this pci i/o region assigned to your nvidia device is invalid"]))
    {
        found.push(
            Finding::new("bar1-unassigned", Severity::Error, "the firmware assigned no BAR1 to a GPU")
                .why("The driver cannot start the GPU.")
                .seen("kernel log", line.trim())
                .fix(
                    Fix::host()
                        .remark("enable 'Above 4G decoding' in the firmware setup, or boot with pci=realloc"),
                )
                .reboot(),
        );
    }
    found
}

/// What the peer-memory module said.
fn peermem(analysis: &Analysis<'_>, lines: &[String], found: &mut Vec<Finding>) {
    let said = |words: &[&str]| {
        lines.iter().find(|line| {
            let line = line.to_ascii_lowercase();
            (line.contains("peermem") || line.contains("nv_peer_mem"))
                && words.iter().any(|word| line.contains(word))
        })
    };
    let works = analysis.pairs.iter().any(|pair| pair.peermem.is_yes());
    if let Some(line) =
        said(&["unknown symbol", "disagrees about version", "invalid argument", "exec format"])
        && !works
    {
        let severity = if analysis.all_have(nobounce_topology::analysis::Pair::dma_buf) {
            Severity::Info
        } else {
            Severity::Error
        };
        let other = if line.contains("nvidia_p2p") { "NVIDIA driver" } else { "ib_core" };
        found.push(
            Finding::new("peermem-symbols", severity, format!("the peer-memory module was built against another {other} than the loaded one"))
                .why("The module fails to load or has no effect: an upgrade of OFED, DOCA, the network operator or the GPU driver replaced the version it was built against.")
                .seen("kernel log", line.trim())
                .fix(Fix::host().remark("reinstall the NVIDIA driver after OFED/DOCA").run("sudo dkms autoinstall --force").remark("or restart the driver container of the GPU operator, then").run("sudo modprobe -r nvidia_peermem; sudo modprobe nvidia_peermem").remark("a module of the old version that stays loaded keeps the new one out"))
                .root(),
        );
    }
    if let Some(line) = said(&["invalid context", "invalid callback"]) {
        found.push(
            Finding::new("peermem-callback", Severity::Warning, "nvidia_peermem reports memory that was freed while registered")
                .why("The program freed GPU memory before it deregistered it, or the module lost its context: registrations may fail or lead nowhere. Registration by dma-buf does not use this callback.")
                .seen("kernel log", line.trim())
                .fix(Fix::host().remark("use dma-buf: the open kernel module and NCCL, UCX or libfabric of a current version"))
                .reboot(),
        );
    }
}
