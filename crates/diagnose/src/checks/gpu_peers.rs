//! Peer access between GPUs.

use std::collections::BTreeMap;

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{GpuPeer, PeerDenied};

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    let peers = &analysis.facts.gpu_peers;
    if let Some(why) = peers.why_not().filter(|_| !peers.is_not_recorded()) {
        found.push(unknown("between the GPUs", why));
    }
    let Some(pairs) = peers.known() else { return found };
    // What is divided into instances has no peers: the finding `mig` tells it.
    let divided = |address: &String| {
        let gpu = analysis.facts.gpus.iter().find(|gpu| gpu.address == *address);
        gpu.is_some_and(|gpu| gpu.mig.get() == Some(true))
    };
    let pairs: Vec<_> = pairs.iter().filter(|pair| !divided(&pair.one) && !divided(&pair.other)).collect();
    let mut denied: BTreeMap<PeerDenied, Vec<&GpuPeer>> = BTreeMap::new();
    for pair in pairs.iter().copied().filter(|pair| pair.access.get() == Some(false)) {
        denied.entry(pair.denied.unwrap_or(PeerDenied::Unsupported)).or_default().push(pair);
    }
    found.extend(denied.into_iter().map(|(why, pairs)| none(analysis, why, &pairs)));
    let unread: Vec<_> = pairs.iter().copied().filter(|pair| pair.access.known().is_none()).collect();
    if let Some(first) = unread.first() {
        let between = format!("between {}", list(&words(analysis, &unread)));
        let finding = unknown(&between, first.access.why_not().unwrap_or_default());
        found.push(finding.on(addresses(&unread)));
    }
    found
}

/// `GPU 0 and GPU 1`, each pair.
fn words(analysis: &Analysis<'_>, pairs: &[&GpuPeer]) -> Vec<String> {
    let label = |address: &str| {
        let gpu = analysis.facts.gpus.iter().find(|gpu| gpu.address == address);
        gpu.map_or_else(|| format!("GPU {address}"), nobounce_topology::facts::Gpu::label)
    };
    pairs.iter().map(|pair| format!("{}-{}", label(&pair.one), label(&pair.other))).collect()
}

fn addresses(pairs: &[&GpuPeer]) -> Vec<String> {
    let mut found: Vec<String> =
        pairs.iter().flat_map(|pair| [pair.one.clone(), pair.other.clone()]).collect();
    found.sort();
    found.dedup();
    found
}

fn unknown(between: &str, why: &str) -> Finding {
    Finding::new("gpu-peers", Severity::Unknown, format!("whether there is peer access {between} is unknown"))
        .why("Without it NCCL and UCX copy through host memory, inside of the machine too.")
        .seen("nvmlDeviceGetP2PStatus", why)
        .fix(Fix::both().run("nvidia-smi topo -p2p rw"))
}

fn none(analysis: &Analysis<'_>, why: PeerDenied, pairs: &[&GpuPeer]) -> Finding {
    let (severity, told) = match why {
        PeerDenied::Gpu => (Severity::Info, "the GPU's model has none"),
        PeerDenied::Disabled => (Severity::Warning, "a key of the driver switches it off"),
        PeerDenied::Chipset => (Severity::Warning, "the chipset is not supported"),
        PeerDenied::Topology => (Severity::Warning, "they are below different I/O hubs"),
        PeerDenied::Unsupported => (Severity::Warning, "the driver does not support it here"),
    };
    let finding = Finding::new(
        "gpu-peers",
        severity,
        format!("{}: no peer access; {told}", list(&words(analysis, pairs))),
    )
    .why("NCCL and UCX copy through host memory between these GPUs. Their paths to the adapters are not concerned.")
    .seen("nvmlDeviceGetP2PStatus", format!("{} {told}", if pairs.len() == 1 { "one pair:" } else { "these pairs:" }));
    let finding = match why {
        PeerDenied::Gpu => finding,
        PeerDenied::Disabled => finding
            .fix(Fix::host().remark("remove the key (RMForceP2PType and others) from NVreg_RegistryDwords").run("grep -r NVreg /etc/modprobe.d; grep RegistryDwords /proc/driver/nvidia/params"))
            .reboot(),
        PeerDenied::Unsupported if analysis.facts.is_virtual() => {
            finding.fix(Fix::both().remark("operators: pass the GPUs through with their NVSwitches, or put them below one switch of the guest"))
        }
        PeerDenied::Chipset | PeerDenied::Topology | PeerDenied::Unsupported => finding
            .fix(Fix::both().remark("place the GPUs below one PCIe switch, or use pairs that have access").run("nvidia-smi topo -p2p rw")),
    };
    finding.on(addresses(pairs))
}
