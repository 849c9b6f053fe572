//! The peer-memory module that fits the machine: which one its driver ships, and where it is
//! loaded.

use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{Facts, GpuVendor};

/// The first NVIDIA driver that ships nvidia_peermem.
const SHIPPED_SINCE: u32 = 470;
const NEW: &str = "nvidia_peermem";
const OLD: &str = "nv_peer_mem";

/// NVIDIA's module for peer memory on this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerModule<'a>(pub(crate) &'a Facts);

/// What gets the module to work.
struct ModuleStep {
    fix: Fix,
    /// The evidence for it: a source and its value.
    seen: Option<(String, String)>,
    needs_reboot: bool,
}

impl PeerModule<'_> {
    fn is_shipped(self) -> bool {
        self.0.kernel.nvidia_major().is_none_or(|major| major >= SHIPPED_SINCE)
    }

    /// `nvidia_peermem`, or `nv_peer_mem` for drivers that do not ship it.
    pub(crate) fn name(self) -> &'static str {
        if self.is_shipped() { NEW } else { OLD }
    }

    /// The module that is loaded.
    pub(crate) fn loaded(self) -> Option<&'static str> {
        [NEW, OLD].into_iter().find(|name| self.0.kernel.is_loaded(name) == Some(true))
    }

    /// Whether ib_core certainly lacks the interface that the module needs.
    pub(crate) fn has_no_interface(self) -> bool {
        self.0.kernel.peer_memory_api.get() == Some(false)
    }

    fn is_installed(self) -> Option<bool> {
        let installed = self.0.kernel.installed.known()?;
        Some(installed.iter().any(|name| name == self.name()))
    }

    fn step(self) -> ModuleStep {
        let name = self.name();
        let load = format!(
            "sudo modprobe {name} && echo {name} | sudo tee /etc/modules-load.d/{}.conf",
            name.replace('_', "-")
        );
        if self.has_no_interface() {
            return ModuleStep {
                fix: Fix::host().remark("first install DOCA-OFED, whose ib_core has the peer-memory interface, and reinstall the NVIDIA driver").run(load),
                seen: Some(("/proc/kallsyms".to_owned(), "no ib_register_peer_memory_client".to_owned())),
                needs_reboot: true,
            };
        }
        if !self.is_shipped() {
            let version = self.0.kernel.nvidia.known().and_then(Option::as_ref);
            let version = version.map_or("", |module| module.version.as_str());
            return ModuleStep {
                fix: Fix::host()
                    .run(format!("sudo apt install nvidia-peer-memory-dkms && {load}"))
                    .remark("from NVIDIA's network repository"),
                seen: Some((
                    "/proc/driver/nvidia/version".to_owned(),
                    format!("{version}: nvidia_peermem is part of 470 and newer"),
                )),
                needs_reboot: false,
            };
        }
        match self.is_installed() {
            Some(false) if !self.0.is_container() => ModuleStep {
                fix: Fix::host().remark("it is not installed for this kernel: first reinstall the NVIDIA driver after OFED or DOCA, so that it finds the headers of ib_core").run(load),
                seen: Some((format!("/lib/modules/{}", self.0.kernel.release), format!("no {name}"))),
                needs_reboot: false,
            },
            _ => ModuleStep { fix: Fix::host().run(load), seen: None, needs_reboot: false },
        }
    }

    /// What gets the module to work, complete on this machine.
    pub(crate) fn load(self) -> Fix {
        self.step().fix
    }

    /// Adds what gets the module to work, complete on this machine.
    pub(crate) fn fix(self, finding: Finding) -> Finding {
        let ModuleStep { fix, seen, needs_reboot } = self.step();
        let finding = match seen {
            Some((source, value)) => finding.seen(source, value),
            None => finding,
        };
        let finding = finding.fix(fix);
        if needs_reboot { finding.reboot() } else { finding.root() }
    }

    /// Unloads what is loaded without effect, and loads what fits.
    pub(crate) fn reload(self) -> Fix {
        let name = self.name();
        if self.has_no_interface() {
            return self.load();
        }
        let package = if self.is_shipped() { "the NVIDIA driver" } else { "nvidia-peer-memory-dkms" };
        let loaded = self.loaded().unwrap_or(name);
        Fix::host().run(format!("sudo rmmod {loaded}; sudo modprobe {name}; sudo dmesg | tail")).remark(
            format!(
                "then reinstall {package} after OFED/DOCA, so that the module is built against this ib_core"
            ),
        )
    }
}

/// Old and doubled modules, and those that are gone after the next boot.
pub(super) fn modules(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let kernel = &facts.kernel;
    if !facts.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia) {
        return;
    }
    let loaded = |name: &str| kernel.is_loaded(name) == Some(true);
    if loaded("nv_peer_mem") && PeerModule(facts).name() == "nvidia_peermem" {
        let both = loaded("nvidia_peermem");
        // The drivers of Hopper and newer GPUs all ship its successor.
        let replaced = facts.gpus.iter().any(|gpu| gpu.compute_capability.get().is_some_and(|cc| cc >= 90));
        let severity = if both || replaced { Severity::Warning } else { Severity::Info };
        let title = if both {
            "nv_peer_mem and nvidia_peermem are both loaded"
        } else {
            "the old nv_peer_mem is loaded"
        };
        found.push(
            Finding::new("old-nv-peer-mem", severity, title)
                .why("nv_peer_mem is unmaintained and breaks with new drivers and OFEDs. nvidia_peermem, part of the driver since 470, replaces it.")
                .seen("/sys/module/nv_peer_mem", "loaded")
                .fix(Fix::host().run("sudo systemctl disable --now nv_peer_mem; sudo apt remove nvidia-peer-memory; sudo modprobe nvidia_peermem"))
                .root(),
        );
    }
    let needs_it = !analysis.all_have(Pair::dma_buf);
    if loaded("nvidia_peermem")
        && needs_it
        && kernel.at_boot.known().is_some_and(|names| !names.iter().any(|name| name == "nvidia_peermem"))
        && !facts.is_container()
    {
        found.push(
            Finding::new(
                "peermem-not-at-boot",
                Severity::Info,
                "nvidia_peermem is loaded now, but nothing loads it at boot",
            )
            .why("After the next boot GPUDirect is off until the module is loaded manually.")
            .seen("/etc/modules-load.d", "no nvidia_peermem")
            .fix(Fix::host().run("echo nvidia_peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf"))
            .root(),
        );
    }
}
