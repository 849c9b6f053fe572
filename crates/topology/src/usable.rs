//! Whether the process can use a device at all: driver, device file, permission.

use crate::facts::{Facts, Gpu, GpuVendor, Nic, Probe};
use crate::methods::Answer;

const EPERM: i32 = 1;
const EACCES: i32 = 13;

/// Whether the process can open an adapter.
pub fn nic(facts: &Facts, nic: &Nic) -> Answer {
    if let Some(probe) = nic.open_probe.known()
        && probe.ok
    {
        return Answer::Yes("opened".to_owned());
    }
    // Our own software device needs no file.
    if nic.driver.as_deref() == Some("nobounce") {
        return Answer::Yes("it needs no device file".to_owned());
    }
    if facts.libraries.verbs.known() == Some(&None) {
        return Answer::No("no-libibverbs", "there is no libibverbs.so.1".to_owned());
    }
    let refused = nic.open_probe.known().filter(|probe| !probe.ok);
    let Some(nodes) = facts.devices.known() else {
        return refused.map_or_else(
            || Answer::Unknown("/dev could not be read".to_owned()),
            |probe| not_opened(facts, probe),
        );
    };
    let path = match nic.uverbs.known() {
        Some(Some(name)) => format!("/dev/infiniband/{name}"),
        Some(None) => {
            return Answer::No("no-uverbs", "the kernel made no uverbs device for it (ib_uverbs)".to_owned());
        }
        None if facts.kernel.is_loaded("ib_uverbs") == Some(false) => {
            return Answer::No("no-uverbs", "ib_uverbs is not loaded".to_owned());
        }
        None if !nodes.iter().any(|node| node.path.starts_with("/dev/infiniband/uverbs")) => {
            return Answer::No("no-dev-infiniband", "there is no /dev/infiniband/uverbs*".to_owned());
        }
        None => {
            return refused.map_or_else(
                || Answer::Unknown("its uverbs device is not known".to_owned()),
                |probe| not_opened(facts, probe),
            );
        }
    };
    let Some(node) = nodes.iter().find(|node| node.path == path) else {
        return Answer::No("no-dev-infiniband", format!("there is no {path}"));
    };
    if node.open.ok {
        if nic.listed.get() == Some(false) {
            return Answer::No("verbs-provider", format!("libibverbs does not list {}", nic.name));
        }
        return match nic.open_probe.known() {
            Some(probe) => Answer::No("nic-open", format!("libibverbs cannot open it: {}", probe.detail)),
            None => Answer::Yes(format!("{path} can be opened")),
        };
    }
    match node.open.errno {
        Some(EACCES) => Answer::No("dev-permission", format!("{path}: permission denied")),
        Some(EPERM) => Answer::No("device-cgroup", format!("{path}: the container may not open it")),
        _ => Answer::No("nic-open", format!("{path}: {}", node.open.detail)),
    }
}

/// Why an adapter was not opened, by what libibverbs said alone.
fn not_opened(facts: &Facts, probe: &Probe) -> Answer {
    let why = format!("libibverbs cannot open it: {}", probe.detail);
    let detail = probe.detail.to_ascii_lowercase();
    match probe.errno {
        Some(EACCES) => Answer::No("dev-permission", why),
        Some(EPERM) if facts.is_container() => Answer::No("device-cgroup", why),
        _ if detail.contains("no userspace device-specific driver") => Answer::No("verbs-provider", why),
        _ => Answer::No("nic-open", why),
    }
}

/// Whether the process can use a GPU.
pub fn gpu(facts: &Facts, gpu: &Gpu) -> Answer {
    if gpu.vendor != GpuVendor::Nvidia {
        return Answer::Unknown("only NVIDIA's driver is asked".to_owned());
    }
    let driver = facts.pci_device(&gpu.address).map(|device| device.driver.as_deref());
    match driver {
        Some(Some("nvidia")) => {}
        Some(Some("vfio-pci")) => {
            return Answer::No(
                "gpu-passed-through",
                "it is given to a virtual machine (vfio-pci)".to_owned(),
            );
        }
        Some(Some(other)) => return Answer::No("nvidia-driver", format!("{other} drives it, not nvidia")),
        Some(None) if facts.kernel.nvidia.known() == Some(&None) => {
            return Answer::No("nvidia-driver", "no driver is loaded".to_owned());
        }
        Some(None) => return Answer::No("nvidia-driver", "no driver holds it".to_owned()),
        None => {}
    }
    // Where CUDA answered, whatever it needs is there.
    if gpu.gpudirect_rdma.known().is_none()
        && let Some(nodes) = facts.devices.known()
        && !nodes.iter().any(|node| node.path == "/dev/nvidiactl")
    {
        return Answer::No("no-dev-nvidia", "there is no /dev/nvidiactl".to_owned());
    }
    Answer::Yes("its driver holds it".to_owned())
}
