//! Drivers: does each device have the right one, and do library and kernel module match?

use super::{list, one_or};
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Facts, GpuVendor, Nic, PciDevice};
use nobounce_topology::methods::Answer;
use nobounce_topology::usable;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    gpus(analysis, &mut found);
    versions(analysis, &mut found);
    adapters(analysis, &mut found);
    instance(analysis, &mut found);
    found
}

/// AWS machines with EFA but without GPUDirect: the product name is the instance type.
fn instance(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    const WITHOUT: [&str; 7] = ["g4dn.", "g5.", "g5g.", "g6.", "g6e.", "gr6.", "p3dn."];
    let facts = analysis.facts;
    let Some(product) = facts.machine.product.known() else { return };
    let names: Vec<_> =
        facts.nics.iter().filter(|nic| crate::nccl::is_efa(nic)).map(|nic| nic.name.clone()).collect();
    if names.is_empty() || facts.gpus.is_empty() || !WITHOUT.iter().any(|begin| product.starts_with(begin)) {
        return;
    }
    found.push(
        Finding::new("efa-instance", Severity::Warning, format!("{product} has EFA, but no GPUDirect RDMA"))
            .why("Its adapters cannot access GPU memory, even if GPU and driver support it: all transfers are staged through host memory.")
            .seen("/sys/class/dmi/id/product_name", product.clone())
            .fix(Fix::both().remark("use an instance of the P series, p4d or newer"))
            .blocks()
            .on(names),
    );
}

fn gpus(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    for id in ["nvidia-driver", "gpu-passed-through", "no-dev-nvidia"] {
        let hit: Vec<_> = facts
            .gpus
            .iter()
            .filter_map(|gpu| match usable::gpu(facts, gpu) {
                Answer::No(found, why) if found == id => Some((gpu, why)),
                _ => None,
            })
            .collect();
        let Some((_, why)) = hit.first() else { continue };
        let addresses: Vec<_> = hit.iter().map(|(gpu, _)| gpu.address.clone()).collect();
        let names = list(&addresses);
        let finding = match id {
            "nvidia-driver" => {
                let nouveau = why.starts_with("nouveau");
                let finding = Finding::new(
                    "nvidia-driver",
                    Severity::Error,
                    format!("the NVIDIA driver is not bound to {names}: {why}"),
                )
                .why("Without it CUDA and GPUDirect do not work on these GPUs.")
                .seen(format!("/sys/bus/pci/devices/{}/driver", addresses[0]), why.clone());
                let finding = if nouveau {
                    finding.fix(Fix::host().run("echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/no-nouveau.conf && sudo update-initramfs -u")).reboot()
                } else {
                    finding.fix(Fix::host().run("sudo modprobe nvidia && nvidia-smi")).root()
                };
                finding.blocks()
            }
            "gpu-passed-through" => {
                Finding::new("gpu-passed-through", Severity::Info, format!("{names}: {why}"))
                    .why("Programs on this machine cannot use them; the virtual machine can.")
                    .seen(format!("/sys/bus/pci/devices/{}/driver", addresses[0]), "vfio-pci")
                    .blocks()
            }
            _ => Finding::new(
                "no-dev-nvidia",
                Severity::Error,
                "the GPUs have a driver, but this process has no /dev/nvidiactl",
            )
            .why("A container without the device files sees no GPU: CUDA fails with 'no device'.")
            .seen("/dev", "no nvidiactl")
            .fix(
                Fix::container()
                    .option("--gpus all")
                    .remark("or, with CDI")
                    .option("--device nvidia.com/gpu=all")
                    .remark("in Kubernetes: request nvidia.com/gpu"),
            )
            .blocks(),
        };
        found.push(finding.on(addresses));
    }
}

fn versions(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if !facts.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia) {
        return;
    }
    let module = facts.kernel.nvidia.known().and_then(Option::as_ref);
    let library = facts.libraries.nvml.known().and_then(Option::as_ref);
    if let (Some(module), Some(library)) = (module, library) {
        let differs = library.version.as_ref().is_some_and(|version| *version != module.version);
        let told =
            library.error.as_deref().is_some_and(|error| error.to_ascii_lowercase().contains("mismatch"));
        if differs || told {
            let version = library.version.as_deref().unwrap_or("another");
            found.push(
                Finding::new(
                    "driver-mismatch",
                    Severity::Error,
                    format!("the driver library ({version}) and the loaded module ({}) do not match", module.version),
                )
                .why("NVML and CUDA fail to start. Typical causes: an upgrade without a reboot, or a library from another image.")
                .seen("/proc/driver/nvidia/version", module.version.clone())
                .seen("libnvidia-ml.so.1", library.error.clone().or(library.version.clone()).unwrap_or_default())
                .fix(Fix::host().run("sudo rmmod nvidia_peermem nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia").remark("or reboot"))
                .reboot()
                .blocks()
                .on(facts.gpus.iter().map(|gpu| gpu.address.clone())),
            );
        }
    }
}

/// Adapters that the tree shows and verbs does not.
fn adapters(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let known = |device: &PciDevice| {
        facts.nics.iter().any(|nic: &Nic| nic.address.as_deref() == Some(&device.address))
    };
    let silent: Vec<&PciDevice> = facts
        .pci
        .iter()
        .filter(|device| {
            device.is_network()
                && speaks_rdma(device)
                && !known(device)
                && device.driver.as_deref() != Some("vfio-pci")
        })
        .collect();
    let all_silent = !silent.is_empty() && facts.nics.iter().all(Nic::is_software);
    if all_silent && facts.is_container() && facts.kernel.is_loaded("mlx5_ib") == Some(true) {
        found.push(
            Finding::new("nic-other-namespace", Severity::Error, "the adapters' RDMA devices belong to another network namespace")
                .why("RDMA devices in exclusive mode are visible only in the namespace of their interfaces: this container sees none, and programs fall back to TCP.")
                .seen("/sys/class/infiniband", format!("{}, although mlx5_ib is loaded", present(facts)))
                .fix(Fix::container().option("--network host").remark("or move the device into the container's network namespace with iproute2"))
                .root()
                .blocks(),
        );
    } else if all_silent {
        let names: Vec<_> = silent.iter().map(|device| device.address.clone()).collect();
        let driven = silent.iter().any(|device| device.driver.is_some());
        let mut modules: Vec<&str> = Vec::new();
        for (core, rdma) in silent.iter().filter_map(|device| modules_of(device)) {
            for module in core.iter().filter(|_| !driven).chain(rdma) {
                if !modules.contains(module) {
                    modules.push(module);
                }
            }
        }
        let fix = if modules.is_empty() {
            Fix::host().remark("load the RDMA module of the adapter's vendor, and ib_uverbs")
        } else {
            Fix::host().run(format!("sudo modprobe -a {} ib_uverbs rdma_ucm", modules.join(" ")))
        };
        let why = if driven {
            "their network driver is loaded, its RDMA module is not"
        } else {
            "no driver is bound to them"
        };
        found.push(
            Finding::new(
                "nic-no-rdma",
                Severity::Error,
                format!("{}: RDMA-capable, but {why}", list(&names)),
            )
            .why("NCCL and UCX find no RDMA device and silently use TCP sockets.")
            .seen("/sys/class/infiniband", present(facts))
            .fix(fix)
            .root()
            .blocks()
            .on(names),
        );
    } else if facts.nics.is_empty() {
        found.push(
            Finding::new("no-nic", Severity::Info, "no RDMA adapter in this machine")
                .why("Programs use TCP. The software NIC of nobounce gives them verbs, with access to GPU memory.")
                .seen("/sys/class/infiniband", "no device")
                .fix(Fix::both().remark("put before the program").run("nobounce run --")),
        );
    }
    let software: Vec<_> = facts
        .nics
        .iter()
        .filter(|nic| nic.is_software() && nic.driver.as_deref() != Some("nobounce"))
        .collect();
    if !software.is_empty() && !facts.gpus.is_empty() {
        let names: Vec<_> = software.iter().map(|nic| nic.name.clone()).collect();
        found.push(
            Finding::new("software-nic", Severity::Info, format!("{} {} implemented in software by the kernel: no access to GPU memory", list(&names), one_or(&names, "is", "are")))
                .why("rxe and siw support neither dma-buf nor peer memory, so GPU buffers are staged through host memory.")
                .seen(format!("/sys/class/infiniband/{}", names[0]), software[0].driver.clone().unwrap_or_default())
                .fix(Fix::both().remark("put before the program").run("nobounce run --").remark("a software NIC with access to GPU memory"))
                .on(names),
        );
    }
}

/// The RDMA devices that are there: none, or software ones.
fn present(facts: &Facts) -> String {
    if facts.nics.is_empty() {
        return "no device".to_owned();
    }
    let names: Vec<String> = facts
        .nics
        .iter()
        .map(|nic| format!("{} ({})", nic.name, nic.driver.as_deref().unwrap_or("unknown driver")))
        .collect();
    format!("only {}", list(&names))
}

/// The network driver and the RDMA module of an adapter, by its vendor.
fn modules_of(device: &PciDevice) -> Option<(&'static [&'static str], &'static [&'static str])> {
    /// ConnectX-3 and its virtual functions.
    const OLD_MELLANOX: std::ops::RangeInclusive<u32> = 0x1002..=0x1007;
    Some(match device.vendor {
        0x15b3 if OLD_MELLANOX.contains(&device.device) => (&["mlx4_core"], &["mlx4_ib"]),
        0x15b3 => (&["mlx5_core"], &["mlx5_ib"]),
        0x1d0f => (&[], &["efa"]),
        0x14e4 => (&["bnxt_en"], &["bnxt_re"]),
        0x8086 => (&["ice"], &["irdma"]),
        0x1dd8 => (&["ionic"], &["ionic_rdma"]),
        0x1ded => (&[], &["erdma"]),
        _ => return None,
    })
}

/// Vendors whose network adapters all support RDMA, or the models that do.
fn speaks_rdma(device: &PciDevice) -> bool {
    match device.vendor {
        0x15b3 => true,
        // Elastic Fabric Adapter.
        0x1d0f => matches!(device.device, 0xefa0..=0xefa9),
        _ => device.class >> 8 == 0x0207,
    }
}
