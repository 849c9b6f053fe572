//! The peer-memory module that fits the machine: which one its driver ships, and where it is loaded.

use crate::finding::Finding;
use nobounce_topology::facts::Facts;

/// The first NVIDIA driver that ships nvidia_peermem.
const SHIPPED_SINCE: u32 = 470;

/// NVIDIA's module for peer memory on this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerModule<'a>(pub(super) &'a Facts);

impl PeerModule<'_> {
    fn is_shipped(self) -> bool {
        self.0.kernel.nvidia_major().is_none_or(|major| major >= SHIPPED_SINCE)
    }

    /// `nvidia_peermem`, or `nv_peer_mem` for drivers that do not ship it.
    pub(super) fn name(self) -> &'static str {
        if self.is_shipped() { "nvidia_peermem" } else { "nv_peer_mem" }
    }

    /// Whether ib_core certainly lacks the interface that the module needs.
    pub(super) fn has_no_interface(self) -> bool {
        self.0.kernel.peer_memory_api.get() == Some(false)
    }

    fn is_installed(self) -> Option<bool> {
        let installed = self.0.kernel.installed.known()?;
        Some(installed.iter().any(|name| name == self.name()))
    }

    /// Adds what gets the module to work, complete on this machine.
    pub(super) fn fix(self, finding: Finding) -> Finding {
        let name = self.name();
        let place = if self.0.is_container() { "on the host, not in the container: " } else { "" };
        let load = format!(
            "`sudo modprobe {name} && echo {name} | sudo tee /etc/modules-load.d/{}.conf`",
            name.replace('_', "-")
        );
        if self.has_no_interface() {
            return finding
                .seen("/proc/kallsyms", "no ib_register_peer_memory_client")
                .fix(format!("{place}install DOCA-OFED, whose ib_core has the peer-memory interface, then reinstall the NVIDIA driver, then {load}"))
                .reboot();
        }
        if !self.is_shipped() {
            let version = self.0.kernel.nvidia.known().and_then(Option::as_ref);
            let version = version.map_or("", |module| module.version.as_str());
            return finding
                .seen("/proc/driver/nvidia/version", format!("{version}: nvidia_peermem is part of 470 and newer"))
                .fix(format!("{place}`sudo apt install nvidia-peer-memory-dkms`   (from NVIDIA's network repository), then {load}"))
                .root();
        }
        match self.is_installed() {
            Some(false) if !self.0.is_container() => finding
                .seen(format!("/lib/modules/{}", self.0.kernel.release), format!("no {name}"))
                .fix(format!("it is not installed for this kernel: reinstall the NVIDIA driver after OFED or DOCA, so that it finds the headers of ib_core; then {load}"))
                .root(),
            _ => finding.fix(format!("{place}{load}")).root(),
        }
    }
}
