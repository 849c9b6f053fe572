//! Settings of other programs, and of allocators.

use super::list;
use super::settings::set;
use crate::finding::{Finding, Fix, Severity};
use crate::nccl;
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::Port;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if !analysis.has_hardware_nic() {
        return found;
    }
    switches(analysis, &mut found);
    fabric(analysis, &mut found);
    allocator(analysis, &mut found);
    ibgda(analysis, &mut found);
    names(analysis, &mut found);
    traffic_class(analysis, &mut found);
    found
}

/// A variable, the values that switch GPUDirect or RDMA off, and what then happens.
const SWITCHES: [(&str, &[&str], &str); 11] = [
    (
        "RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING",
        &["1"],
        "RCCL registers its flush buffer without dma-buf, and crashes where there is no peer memory",
    ),
    ("MV2_USE_GPUDIRECT_RDMA", &["0"], "MVAPICH2 stages GPU memory"),
    ("MV2_USE_GDRCOPY", &["0"], "MVAPICH2 uses slow copies for short GPU messages"),
    ("OMPI_MCA_btl_openib_want_cuda_gdr", &["0", "false"], "Open MPI's openib stages GPU memory"),
    ("FI_EFA_USE_DEVICE_RDMA", &["0"], "libfabric's EFA provider emulates RDMA reads and writes"),
    ("FI_HMEM_CUDA_USE_GDRCOPY", &["0"], "libfabric uses slow copies for short GPU messages"),
    ("MOONCAKE_PROTOCOL", &["tcp"], "Mooncake uses TCP"),
    (
        "OMPI_MCA_btl",
        &["tcp", "tcp,self", "self,tcp", "tcp,self,vader", "self,vader,tcp", "vader,self,tcp"],
        "Open MPI uses TCP unless UCX is selected",
    ),
    ("MC_FORCE_TCP", &["1", "true"], "Mooncake uses TCP"),
    ("NVSHMEM_DISABLE_IB", &["1", "true"], "NVSHMEM does not use the adapters"),
    ("NVSHMEM_REMOTE_TRANSPORT", &["none"], "NVSHMEM does not use the adapters"),
];

fn switches(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    for (name, off, effect) in SWITCHES {
        let Some(variable) = analysis.facts.variable(name) else { continue };
        if off.contains(&variable.value.trim().to_ascii_lowercase().as_str()) {
            let finding = Finding::new("env-off", Severity::Error, format!("{variable}: {effect}"))
                .why("The variable disables it explicitly; no other message reports this.");
            found.push(set(finding, variable));
        }
    }
}

/// libfabric's provider: a list that names none for the adapters leaves TCP.
fn fabric(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    const RDMA: [&str; 8] = ["efa", "verbs", "psm", "psm2", "psm3", "opx", "cxi", "shm"];
    let facts = analysis.facts;
    let Some(variable) = facts.variable("FI_PROVIDER") else { return };
    let text = variable.value.trim().to_ascii_lowercase();
    let named = text.split([',', ';', '+']).any(|name| RDMA.contains(&name.trim()));
    // On Amazon's adapters NCCL goes over libfabric as well.
    let efa = facts.nics.iter().any(nccl::is_efa);
    let out = if efa {
        nccl::fabric_without_efa(facts).is_some()
    } else {
        !text.starts_with('^') && !text.is_empty() && !named
    };
    if !out {
        return;
    }
    let effect =
        if efa { "libfabric, and with it NCCL's plugin, does not use EFA" } else { "libfabric uses TCP" };
    let finding = Finding::new("env-off", Severity::Error, format!("{variable}: {effect}"))
        .why("The variable disables it explicitly; no other message reports this.");
    let finding = if efa { finding.of_library("NCCL") } else { finding };
    found.push(set(finding, variable));
}

/// Memory that grows in segments: what is registered must cover all of them.
fn allocator(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    for name in ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"] {
        let Some(variable) = facts.variable(name) else { continue };
        if !variable.value.to_ascii_lowercase().replace(' ', "").contains("expandable_segments:true") {
            continue;
        }
        let refused = facts.gpus.iter().any(|gpu| gpu.gpudirect_rdma_vmm.get() == Some(false));
        let severity = if refused { Severity::Error } else { Severity::Warning };
        let finding = Finding::new("expandable-segments", severity, "PyTorch's memory grows in segments (expandable_segments)")
            .why(if refused {
                "The driver does not support GPUDirect for such memory on this GPU (attribute 110 is 0): registering it fails."
            } else {
                "It is allocated by the virtual memory API, in pieces: engines that register tensors (Mooncake, NIXL, UCCL, DeepEP, Monarch) fail with EFAULT or EINVAL, or with status 10 beyond the first piece. NCCL handles it."
            });
        found.push(set(finding, variable));
    }
}

/// NVSHMEM takes adapters by the beginning of their names, which udev rules and administrators
/// change.
fn names(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let uses = facts.variables().find(|variable| variable.name.starts_with("NVSHMEM_"));
    let prefix = facts.variable("NVSHMEM_HCA_PREFIX").map_or("mlx5", |variable| variable.value.trim());
    let listed = facts.variable("NVSHMEM_HCA_LIST").is_some();
    let Some(variable) = uses.filter(|_| !listed) else { return };
    let mut own = facts.nics.iter().filter(|nic| nic.driver.as_deref() == Some("mlx5_core")).peekable();
    if own.peek().is_none() || own.clone().any(|nic| nic.name.starts_with(prefix)) {
        return;
    }
    let names: Vec<String> = own.map(|nic| nic.name.clone()).collect();
    let begin = names[0].trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
    found.push(
        Finding::new("nvshmem-names", Severity::Error, format!("NVSHMEM skips {}: their names do not begin with {prefix}", list(&names)))
            .why("NVSHMEM and DeepEP take only adapters of that name ('not enumerated as an mlx5 device') and report that no transport is left. The adapters were renamed.")
            .seen(variable.source, variable.to_string())
            .seen("/sys/class/infiniband", names.join(" "))
            .fix(Fix::container().set(format!("NVSHMEM_HCA_PREFIX={begin}")).remark("IBGDA before NVSHMEM 3.3 needs names with mlx5_: disable the udev rule that renames them"))
            .of_library("NVSHMEM"),
    );
}

/// Traffic classes belong to RoCE: GPU-initiated connections over InfiniBand refuse them.
fn traffic_class(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let Some(variable) = facts.variable("NVSHMEM_IB_TRAFFIC_CLASS") else { return };
    let mut ports = facts.nics.iter().filter(|nic| !nic.is_software()).flat_map(|nic| &nic.ports).peekable();
    let infiniband = |port: &Port| port.link_layer.eq_ignore_ascii_case("infiniband");
    if variable.value.trim() == "0" || ports.peek().is_none() || !ports.all(infiniband) {
        return;
    }
    let finding = Finding::new("env-off", Severity::Warning, format!("{variable}: NVSHMEM may fail to connect over InfiniBand"))
        .why("Traffic classes are of RoCE. With IBGDA the adapter refuses queue pairs that have one on InfiniBand ('Error in mlx5dv_devx_obj_modify for INIT2RTR_QP').");
    found.push(set(finding, variable));
}

/// GPU-initiated operations need a parameter of the driver.
fn ibgda(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let Some(variable) = facts.variable("NVSHMEM_IB_ENABLE_IBGDA") else { return };
    if matches!(variable.value.trim().to_ascii_lowercase().as_str(), "0" | "false" | "n") {
        return;
    }
    let mut nics = facts.nics.iter().filter(|nic| !nic.is_software());
    if nics.clone().all(|nic| nic.driver.as_deref().is_some_and(|driver| driver != "mlx5_core")) {
        let driver = nics.find_map(|nic| nic.driver.clone()).unwrap_or_default();
        let finding = Finding::new("env-off", Severity::Error, format!("{variable}: GPU-initiated operations (IBGDA) support adapters of mlx5 only"))
            .why("NVSHMEM's IBGDA programs the adapter itself, and knows the registers of mlx5 alone: DeepEP's low-latency kernels do not run.")
            .seen("driver", driver);
        found.push(set(finding, variable));
        return;
    }
    let Some(Some(module)) = facts.kernel.nvidia.known() else { return };
    let registry =
        module.parameters.get("RegistryDwords").is_some_and(|words| words.contains("PeerMappingOverride=1"));
    let assisted = facts
        .variable("NVSHMEM_IBGDA_NIC_HANDLER")
        .is_some_and(|variable| variable.value.trim().eq_ignore_ascii_case("cpu"));
    if registry || assisted {
        return;
    }
    found.push(
        Finding::new("ibgda-parameter", Severity::Error, "GPU-initiated operations (IBGDA) are enabled, but the driver does not map the adapter's doorbell for GPUs")
            .why("The transport fails to start, and NVSHMEM or DeepEP aborts ('init failed for transport: IBGDA').")
            .seen(variable.source, format!("{}={}", variable.name, variable.value))
            .seen("/proc/driver/nvidia/params: RegistryDwords", module.parameters.get("RegistryDwords").cloned().unwrap_or_else(|| "empty".to_owned()))
            .fix(Fix::host().run("echo 'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' | sudo tee /etc/modprobe.d/nvidia.conf; sudo update-initramfs -u"))
            .fix(Fix::container().remark("without root").set("NVSHMEM_IBGDA_NIC_HANDLER=cpu").remark("NVSHMEM 3.4 and newer"))
            .reboot(),
    );
}
