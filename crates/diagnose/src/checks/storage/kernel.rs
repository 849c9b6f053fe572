//! The kernel and NVIDIA's driver: what P2PDMA needs of them.

use super::{ChainStep, step};
use crate::finding::{Finding, Fix, Severity};
use crate::storage_verdict::State;
use nobounce_topology::facts::{Facts, Storage};
use nobounce_topology::platform::Platform;

/// The first kernel whose O_DIRECT takes memory of PCI devices. NVIDIA asks for a newer one.
const P2PDMA_KERNEL: (u32, u32) = (6, 2);
/// The first driver with P2PDMA for GPUDirect Storage.
const P2PDMA_DRIVER: u32 = 565;
/// Keys of the resource manager, which NVIDIA requires on x86.
const STATIC_BAR1: &str = "RMForceStaticBar1";
const NO_WRITE_COMBINING: &str = "RmForceDisableIomapWC";

pub(super) fn steps(facts: &Facts, storage: &Storage) -> Vec<ChainStep> {
    vec![kernel(facts, storage), driver(facts), keys(facts, storage)]
}

fn kernel(facts: &Facts, storage: &Storage) -> ChainStep {
    const NAME: &str = "kernel";
    let release = &facts.kernel.release;
    if release.to_ascii_lowercase().contains("microsoft") {
        let finding = Finding::new("storage-kernel", Severity::Error, "cuFile does not work in the Windows Subsystem for Linux")
            .why("The guest has neither the drive nor the GPU as PCI devices. KvikIO uses POSIX reads there by itself.")
            .seen("uname -r", release.clone())
            .fix(Fix::container().set("KVIKIO_COMPAT_MODE=ON"));
        return step(NAME, State::Blocks, State::Blocks, format!("{release} (WSL)"))
            .because(finding)
            .for_good();
    }
    let option =
        |name: &str| storage.kernel_options.known()?.get(name).map(|value| value == "y" || value == "m");
    let symbol =
        storage.kernel_symbols.known().map(|symbols| symbols.iter().any(|s| s == "p2pdma_pgmap_ops"));
    let missing: Vec<&str> = ["PCI_P2PDMA", "ZONE_DEVICE", "MEMORY_HOTPLUG"]
        .into_iter()
        .filter(|name| option(name) == Some(false))
        .collect();
    let why = "O_DIRECT into GPU memory by P2PDMA needs a kernel newer than 6.2, built with CONFIG_PCI_P2PDMA, CONFIG_ZONE_DEVICE and CONFIG_MEMORY_HOTPLUG. nvidia-fs does not need them.";
    let fix = "grep -E 'CONFIG_(PCI_P2PDMA|ZONE_DEVICE|MEMORY_HOTPLUG)=' /boot/config-$(uname -r); grep -c p2pdma_pgmap_ops /proc/kallsyms; sudo apt install linux-generic-hwe-24.04";
    let finding = |severity, title: String| {
        let options = storage.kernel_options.known().map_or_else(
            || format!("unread: {}", storage.kernel_options.why_not().unwrap_or_default()),
            |options| {
                options.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
            },
        );
        let symbols = match symbol {
            Some(true) => "p2pdma_pgmap_ops is there".to_owned(),
            Some(false) => "no p2pdma_pgmap_ops".to_owned(),
            None => format!("unread: {}", storage.kernel_symbols.why_not().unwrap_or_default()),
        };
        Finding::new("storage-kernel", severity, title)
            .why(why)
            .seen("uname -r", release.clone())
            .seen("options of the kernel", options)
            .seen("/proc/kallsyms", symbols)
            .fix(Fix::host().run(fix).remark("or another kernel newer than 6.2 with them"))
            .reboot()
    };
    if !missing.is_empty() {
        let text = format!("{release} without CONFIG_{}", missing.join(", CONFIG_"));
        return step(NAME, State::Blocks, State::NotNeeded, text.clone())
            .because(finding(Severity::Error, format!("the kernel has no P2PDMA: {text}")));
    }
    let built = option("PCI_P2PDMA") == Some(true) || symbol == Some(true);
    // Vendors bring features to old kernels: there only what is built in counts.
    let vendor = [".el8", ".el9", ".el10"].iter().any(|part| release.contains(part));
    let state = match (facts.kernel.version(), built) {
        (Some(version), true) if version > P2PDMA_KERNEL => State::Ok,
        (Some(version), _) if version < P2PDMA_KERNEL && !vendor => State::Blocks,
        _ => State::Unknown,
    };
    match state {
        State::Ok => step(NAME, State::Ok, State::NotNeeded, format!("{release} with PCI_P2PDMA")),
        State::Blocks => step(NAME, State::Blocks, State::NotNeeded, format!("{release} is older than 6.2"))
            .because(finding(Severity::Error, format!("kernel {release} is too old for P2PDMA"))),
        _ => {
            let text = if built {
                format!("{release}: NVIDIA asks for one newer than 6.2")
            } else {
                format!("{release}: whether it has PCI_P2PDMA is unknown")
            };
            step(NAME, State::Unknown, State::NotNeeded, text.clone())
                .because(finding(Severity::Unknown, format!("the kernel's P2PDMA is not certain: {text}")))
        }
    }
}

fn driver(facts: &Facts) -> ChainStep {
    const NAME: &str = "NVIDIA driver";
    let module = match facts.kernel.nvidia.known() {
        Some(Some(module)) => module,
        Some(None) => {
            let finding =
                Finding::new("storage-driver", Severity::Error, "NVIDIA's kernel module is not loaded")
                    .why("Without it there is no GPU memory to read into.")
                    .seen("/proc/driver/nvidia/version", "not there")
                    .fix(Fix::host().run("sudo modprobe nvidia && nvidia-smi"))
                    .root();
            return step(NAME, State::Blocks, State::Blocks, "not loaded").because(finding);
        }
        None => {
            let why = facts.kernel.nvidia.why_not().unwrap_or_default();
            let finding = Finding::new(
                "storage-unread",
                Severity::Unknown,
                "the version of NVIDIA's module is unknown",
            )
            .why("P2PDMA needs the open module, 565 or newer.")
            .seen("/proc/driver/nvidia/version", why)
            .fix(Fix::both().run("cat /proc/driver/nvidia/version"));
            return step(NAME, State::Unknown, State::Unknown, why).because(finding);
        }
    };
    let major: Option<u32> = module.version.split('.').next().and_then(|major| major.parse().ok());
    let kind = match module.open {
        Some(true) => "open",
        Some(false) => "closed",
        None => "open or closed",
    };
    let text = format!("{} ({kind})", module.version);
    let old = major.is_some_and(|major| major < P2PDMA_DRIVER);
    let finding = |severity, title: String| {
        Finding::new("storage-driver", severity, title)
            .why("P2PDMA needs NVIDIA's open kernel module, release 565 or newer: only that gives its memory to the kernel as pages. nvidia-fs works with older ones.")
            .seen("/proc/driver/nvidia/version", text.clone())
            .fix(Fix::host().run("sudo apt install nvidia-open && sudo reboot").remark("on Debian and Ubuntu, 565 or newer"))
.fix(Fix::host().run("sudo dnf install nvidia-open && sudo reboot").remark("on RHEL and Fedora"))
            .reboot()
    };
    match (module.open, major) {
        (Some(false), _) => step(NAME, State::Blocks, State::Ok, text.clone()).because(finding(
            Severity::Error,
            "P2PDMA needs the open kernel module; the closed one is loaded".to_owned(),
        )),
        (_, Some(_)) if old => step(NAME, State::Blocks, State::Ok, text.clone()).because(finding(
            Severity::Error,
            format!("driver {} is older than {P2PDMA_DRIVER}, the first with P2PDMA", module.version),
        )),
        (Some(true), Some(_)) => step(NAME, State::Ok, State::Ok, text),
        _ => step(NAME, State::Unknown, State::Ok, text.clone()).because(finding(
            Severity::Unknown,
            "whether the kernel module is the open one, 565 or newer, is unknown".to_owned(),
        )),
    }
}

/// The command that sets both keys, and keeps what else is set.
fn set_keys(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "=_-".contains(c);
    let kept = text
        .split(';')
        .map(str::trim)
        .filter(|entry| !entry.is_empty() && entry.chars().all(plain))
        .filter(|entry| {
            let name = entry.split('=').next().unwrap_or_default();
            ![STATIC_BAR1, NO_WRITE_COMBINING].iter().any(|key| key.eq_ignore_ascii_case(name))
        })
        .map(|entry| format!("{entry};"))
        .collect::<String>();
    format!(
        "echo 'options nvidia NVreg_RegistryDwords=\"{kept}{STATIC_BAR1}=1;{NO_WRITE_COMBINING}=1;\"' | sudo tee /etc/modprobe.d/nvidia-p2pdma.conf && (sudo update-initramfs -u -k all || sudo dracut -f) && sudo reboot"
    )
}

/// What `RegistryDwords` sets a key to: none where it does not name it.
fn key(text: &str, name: &str) -> Option<bool> {
    text.split(';').rev().find_map(|entry| {
        let (key, value) = entry.split_once('=')?;
        let value = value.trim();
        (key.trim() == name).then(|| value != "0" && value != "0x0" && !value.is_empty())
    })
}

/// Whether the driver maps BAR1 without write-combining; none where that is unknown.
pub(super) fn loses_write_combining(storage: &Storage) -> Option<bool> {
    let value = storage.registry_dwords.known()?;
    Some(value.as_deref().and_then(|text| key(text, NO_WRITE_COMBINING)).unwrap_or(false))
}

fn keys(facts: &Facts, storage: &Storage) -> ChainStep {
    const NAME: &str = "registry keys";
    if facts.machine.arch == "aarch64" || Platform::of(&facts.machine.cpu) == Platform::Grace {
        return step(NAME, State::NotNeeded, State::NotNeeded, "required on x86 only");
    }
    let slow = slow_window(storage);
    let finding = |severity, title: String, value: &str| {
        Finding::new("storage-registry-keys", severity, title)
            .why("On x86 NVIDIA requires both keys for P2PDMA: a static BAR1, whose addresses the drive can use, without write-combining. The second key slows stores of the CPU to GPU memory, and with them nobounce's window.")
            .seen("RegistryDwords in /proc/driver/nvidia/params", value)
            .fix(Fix::host().run(set_keys(storage.registry_dwords.known().and_then(Option::as_deref).unwrap_or_default())))
            .reboot()
    };
    let Some(value) = storage.registry_dwords.known() else {
        let why = storage.registry_dwords.why_not().unwrap_or_default();
        return step(NAME, State::Unknown, State::NotNeeded, why).because(finding(
            Severity::Unknown,
            "the registry keys of NVIDIA's module are unknown".to_owned(),
            why,
        ));
    };
    let text = value.as_deref().unwrap_or_default();
    let missing: Vec<&str> =
        [STATIC_BAR1, NO_WRITE_COMBINING].into_iter().filter(|name| key(text, name) != Some(true)).collect();
    if missing.is_empty() {
        return step(
            NAME,
            State::Ok,
            State::NotNeeded,
            format!("{STATIC_BAR1} and {NO_WRITE_COMBINING} are set"),
        )
        .noting(slow);
    }
    // The module compares names as they are written in its documentation.
    let similar = missing
        .iter()
        .any(|name| text.to_ascii_lowercase().contains(&format!("{}=", name.to_ascii_lowercase())));
    let shown = if text.is_empty() { "empty" } else { text };
    let step = if similar {
        step(
            NAME,
            State::Unknown,
            State::NotNeeded,
            format!("{shown}: spelled in another way than {}", missing.join(", ")),
        )
        .because(finding(
            Severity::Unknown,
            format!("{} is spelled in another way, or 0", missing.join(" and ")),
            shown,
        ))
    } else {
        step(NAME, State::Blocks, State::NotNeeded, format!("{} missing", missing.join(" and "))).because(
            finding(
                Severity::Error,
                format!("NVIDIA's module was loaded without {}", missing.join(" and ")),
                shown,
            ),
        )
    };
    step.noting(slow)
}

fn slow_window(storage: &Storage) -> Option<Finding> {
    (loses_write_combining(storage) == Some(true)).then(|| {
        Finding::new("storage-slow-window", Severity::Warning, "nobounce's window is slow: BAR1 is mapped without write-combining")
            .why("RmForceDisableIomapWC=1 is what P2PDMA needs on x86. The CPU then writes GPU memory in single small packets instead of whole cache lines: nobounce's window gets slow, for files and for RDMA.")
            .seen("RegistryDwords in /proc/driver/nvidia/params", storage.registry_dwords.known().and_then(Option::as_deref).unwrap_or_default())
            .fix(Fix::host().run("sudo sed -i 's/RmForceDisableIomapWC=1;*//' /etc/modprobe.d/*.conf && sudo reboot").remark("only if P2PDMA is not used"))
.fix(Fix::container().set("NOBOUNCE_WINDOW=off").remark("the copy engine then writes"))
            .reboot()
            .slows()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_a_key_counts_and_names_are_exact() {
        assert_eq!(key("RMForceStaticBar1=1;RmForceDisableIomapWC=1;", STATIC_BAR1), Some(true));
        assert_eq!(key("RMForceStaticBar1=1; RMForceStaticBar1=0", STATIC_BAR1), Some(false));
        assert_eq!(key("rmforcestaticbar1=1;x;=;", STATIC_BAR1), None);
        let fix = set_keys("PeerMappingOverride=1;RMForceStaticBar1=0;$(x)=1");
        assert!(
            fix.contains("\"PeerMappingOverride=1;RMForceStaticBar1=1;RmForceDisableIomapWC=1;\""),
            "{fix}"
        );
    }
}
