//! The IOMMU: passthrough, translating, or off; and ATS (address translation services).

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Facts, PciDevice};
use nobounce_topology::platform::Platform;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if analysis.pairs.is_empty() || !analysis.has_hardware_nic() {
        return found;
    }
    translation(analysis, &mut found);
    grace(analysis, &mut found);
    mappings(analysis, &mut found);
    found
}

/// The first kernel whose IOMMU driver gives a GPU of Grace its address spaces in passthrough.
const GRACE_PASSTHROUGH: (u32, u32) = (6, 11);

/// On older kernels Grace needs its IOMMU to translate: the GPU shares page tables with the
/// processor.
fn grace(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let line = facts.kernel.command_line.known().map_or("", String::as_str);
    let bad = ["iommu.passthrough=1", "iommu.passthrough=y", "iommu.passthrough=on", "iommu=pt"];
    let Some(word) = line.split_whitespace().rfind(|word| bad.contains(word)) else { return };
    let version = facts.kernel.version();
    // NVIDIA's own kernels have the change earlier.
    let is_fixed = facts.kernel.release.contains("nvidia")
        || version.is_some_and(|version| version >= GRACE_PASSTHROUGH);
    // The probe of the export needs a CUDA context: where it was made, CUDA runs.
    let runs = facts.gpus.iter().any(|gpu| gpu.export_probe.known().is_some());
    if Platform::of(&facts.machine.cpu) != Platform::Grace || is_fixed || runs {
        return;
    }
    let severity = if version.is_some() { Severity::Warning } else { Severity::Info };
    found.push(
        Finding::new("iommu-grace", severity, format!("{word}: Grace on a kernel before 6.11 needs its IOMMU to translate"))
            .why("The driver binds the GPU to page tables of the processor (ATS, SVA). Kernels before 6.11 cannot do so in passthrough: CUDA programs fail, and GPUs look busy.")
            .seen("/proc/cmdline", word)
            .seen("uname -r", facts.kernel.release.clone())
            .fix(Fix::host().remark("use kernel 6.11 or newer or NVIDIA's own, or replace the word by iommu.passthrough=0 in the kernel command line and boot again"))
            .reboot(),
    );
}

/// Large registrations that run out of memory below an IOMMU that translates.
fn mappings(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    const ENOMEM: i32 = 12;
    /// Smaller ones need few mappings.
    const LARGE: u64 = 1 << 30;
    let facts = analysis.facts;
    let failed = facts
        .registrations
        .iter()
        .find(|r| !r.probe.ok && r.probe.errno == Some(ENOMEM) && r.bytes >= LARGE && r.way == "dma-buf");
    let words: Vec<&str> =
        facts.kernel.command_line.known().map_or("", String::as_str).split_whitespace().collect();
    let on = ["intel_iommu=on", "amd_iommu=on"].iter().any(|word| words.contains(word));
    let passes = words.iter().any(|word| ["iommu=pt", "iommu.passthrough=1"].contains(word));
    let Some(failed) = failed.filter(|_| on && !passes && found.is_empty()) else { return };
    found.push(
        Finding::new("iommu-translates", Severity::Warning, "the IOMMU translates, and large registrations run out of its mappings")
            .why("Each page of a registration needs a mapping. A dma-buf of many gigabytes exhausts them: ibv_reg_dmabuf_mr fails with ENOMEM although memory is free.")
            .seen("/proc/cmdline", words.join(" "))
            .seen(format!("{} with {}", failed.gpu, failed.nic), failed.probe.detail.clone())
            .fixes(boot_with(passthrough(facts)))
            .reboot(),
    );
}

/// The words of the kernel command line that keep the IOMMU from translating.
pub(super) fn passthrough(facts: &Facts) -> &'static str {
    match (facts.machine.arch.as_str(), facts.machine.cpu.vendor.as_str()) {
        ("aarch64", _) => "iommu.passthrough=1",
        (_, "AuthenticAMD") => "iommu=pt",
        _ => "intel_iommu=on iommu=pt",
    }
}

/// Adds words to the kernel command line behind those that are there, with the tools of both
/// families of distributions. Earlier words about the IOMMU go: a later one would outweigh these.
pub(super) fn boot_with(words: &str) -> [Fix; 2] {
    let grub = "sudo sed -Ei '/^GRUB_CMDLINE_LINUX/s/([ \"])((intel|amd)_)?iommu(\\.passthrough)?=[^ \"]*/\\1/g; s/^(GRUB_CMDLINE_LINUX=\"[^\"]*)/\\1 {words}/' /etc/default/grub && sudo update-grub && sudo reboot";
    let grubby = "sudo grubby --update-kernel=ALL --remove-args='iommu intel_iommu amd_iommu iommu.passthrough' --args='{words}' && sudo reboot";
    let fix = |command: &str| Fix::host().run(command.replace("{words}", words));
    [fix(grub).remark("on Debian and Ubuntu"), fix(grubby).remark("on RHEL and Fedora")]
}

/// Whether an IOMMU translates the addresses of a device; none where that is not known.
pub(super) fn translates(analysis: &Analysis<'_>, device: &PciDevice) -> Option<bool> {
    nobounce_topology::iommu::translates(analysis.facts, device)
}

fn translation(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let ends: Vec<&PciDevice> = facts
        .gpus
        .iter()
        .map(|gpu| gpu.address.as_str())
        .chain(facts.nics.iter().filter(|nic| !nic.is_software()).filter_map(|nic| nic.address.as_deref()))
        .filter_map(|address| facts.pci_device(address))
        .collect();
    let name = |device: &PciDevice| {
        facts
            .nics
            .iter()
            .find(|nic| nic.address.as_deref() == Some(&device.address))
            .map_or_else(|| device.address.clone(), |nic| nic.name.clone())
    };
    let translated: Vec<&PciDevice> =
        ends.iter().filter(|device| translates(analysis, device) == Some(true)).copied().collect();
    let unread: Vec<&PciDevice> =
        ends.iter().filter(|device| translates(analysis, device).is_none()).copied().collect();
    if let Some(first) = translated.first() {
        let names: Vec<_> = translated.iter().map(|device| name(device)).collect();
        let group = first.iommu.known().and_then(Option::as_ref);
        // Adapters with ATS, below switches that let translated packets pass (Direct Translated
        // P2P), lose nothing.
        let nics: Vec<&&PciDevice> = translated.iter().filter(|device| device.is_network()).collect();
        let ats = !nics.is_empty()
            && nics.iter().all(|device| device.config.known().is_some_and(|config| config.ats == Some(true)));
        let severity = if ats { Severity::Info } else { Severity::Warning };
        let finding = Finding::new("iommu-translates", severity, format!("the IOMMU translates the addresses of {}", list(&names)))
            .why("Peer-to-peer packets go through the IOMMU in the processor, even below one switch. Bandwidth drops, and transfers hang on some machines.")
            .seen(
                group.map_or_else(String::new, |group| format!("/sys/kernel/iommu_groups/{}/type", group.group)),
                group.and_then(|group| group.kind.clone()).unwrap_or_else(|| "unknown; the command line has no iommu=pt".to_owned()),
            )
            .seen("/proc/cmdline", facts.kernel.command_line.known().map_or_else(|| "unread".to_owned(), |line| iommu_words(line)))
            .fixes(boot_with(passthrough(facts)))
            .reboot()
            .on(translated.iter().map(|device| device.address.clone()).chain(names));
        found.push(if ats { finding } else { finding.slows() });
        let off: Vec<String> = nics
            .iter()
            .filter(|device| device.config.known().is_some_and(|config| config.ats == Some(false)))
            .map(|device| name(device))
            .collect();
        if !off.is_empty() && facts.is_virtual() {
            found.push(ats_off(&off));
        }
    } else if facts.is_virtual() {
        let off: Vec<String> = facts
            .nics
            .iter()
            .filter(|nic| {
                let config = nic
                    .address
                    .as_deref()
                    .and_then(|address| facts.pci_device(address))
                    .and_then(|device| device.config.known());
                config.is_some_and(|config| config.ats == Some(false))
            })
            .map(|nic| nic.name.clone())
            .collect();
        if !off.is_empty() {
            found.push(ats_off(&off));
        }
    }
    if let Some(first) = unread.first() {
        let names: Vec<_> = unread.iter().map(|device| name(device)).collect();
        let why = first.iommu.why_not().unwrap_or("the kernel does not report the type of the group");
        found.push(
            Finding::new("iommu-unread", Severity::Unknown, format!("IOMMU translation for {} is unknown", list(&names)))
                .why("With translation, peer-to-peer packets go through the processor, at a fraction of the bandwidth.")
                .seen(format!("/sys/bus/pci/devices/{}/iommu_group", first.address), why)
                .fix(Fix::host().run("sudo dmesg | grep -i iommu; cat /sys/kernel/iommu_groups/*/type"))
                .on(names),
        );
    }
}

fn ats_off(names: &[String]) -> Finding {
    Finding::new("ats-off", Severity::Warning, format!("{}: address translation services (ATS) are off", list(names)))
        .why("In a virtual machine the host's IOMMU translates every peer-to-peer packet. Only ATS routes them directly through the switch.")
        .seen(format!("{} ATSCtl", names[0]), "Enable-")
        .fix(Fix::both().remark("on the virtual machine's host: ATS_ENABLED=1 with mlxconfig, reset the adapter, keep ACS with Direct Translated on the switch; then restart the guest"))
        .reboot()
        .slows()
        .on(names.to_vec())
}

fn iommu_words(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().filter(|word| word.contains("iommu")).collect();
    if words.is_empty() { "no IOMMU option".to_owned() } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    #[test]
    fn the_last_word_about_the_iommu_is_ours() {
        let [fix, other] = super::boot_with("intel_iommu=on iommu=pt").map(|fix| fix.to_string());
        let script = fix.split("sed -Ei '").nth(1).unwrap().split('\'').next().unwrap();
        let before = "GRUB_CMDLINE_LINUX_DEFAULT=\"quiet iommu.passthrough=0\"\nGRUB_CMDLINE_LINUX=\"intel_iommu=off iommu=nopt ro vfio_iommu_type1.x=1\"\nX=iommu=1\n";
        let mut sed = Command::new("sed")
            .args(["-E", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        sed.stdin.take().unwrap().write_all(before.as_bytes()).unwrap();
        let after = String::from_utf8(sed.wait_with_output().unwrap().stdout).unwrap();
        let lines: Vec<String> =
            after.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines,
            [
                "GRUB_CMDLINE_LINUX_DEFAULT=\"quiet \"",
                "GRUB_CMDLINE_LINUX=\" ro vfio_iommu_type1.x=1 intel_iommu=on iommu=pt\"",
                "X=iommu=1"
            ]
        );
        assert!(other.contains("--remove-args='iommu intel_iommu amd_iommu iommu.passthrough'"), "{other}");
    }
}
