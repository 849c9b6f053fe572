//! What UCX will do with a pair: transports, devices, and its estimate of distances.
//!
//! As read in UCX 1.8 to 1.22 (a current one where the version is unknown). GPU memory is
//! registered with the adapter if a peer-memory module exists by its file, or if both sides support
//! dma-buf. For long messages the estimated bandwidth of the path then decides between direct and
//! staged.

use crate::names::{Filter, left_out};
use crate::verdict::Use;
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{Facts, GpuVendor, Variable, version_pair};
use nobounce_topology::methods::Answer;
use nobounce_topology::tree::Distance;
use nobounce_topology::usable;

/// The transports that are allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transports {
    pub(crate) ib: bool,
    pub(crate) gpu: bool,
}

/// Transports by `UCX_TLS`.
pub(crate) fn transports(facts: &Facts) -> Transports {
    let Some(variable) = facts.variable("UCX_TLS") else { return Transports { ib: true, gpu: true } };
    let text = variable.value.trim();
    let (exclude, list) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
    let names: Vec<&str> = list.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let is_ib = |name: &str| {
        let name = name.strip_prefix('\\').unwrap_or(name);
        name == "ib"
            || name == "srd"
            || ["rc", "dc", "ud", "gga"]
                .iter()
                .any(|kind| name == *kind || name.starts_with(&format!("{kind}_")))
    };
    let is_gpu = |name: &str| matches!(name, "cuda" | "cuda_copy" | "rocm" | "rocm_copy" | "ze" | "ze_copy");
    if exclude {
        let all_ib = ["ib", "rc", "dc", "ud"];
        // Without rc alone UCX still has dc and ud: only the whole family counts.
        let no_ib = names.contains(&"ib") || all_ib[1..].iter().all(|kind| names.contains(kind));
        return Transports { ib: !no_ib, gpu: !names.iter().any(|name| is_gpu(name)) };
    }
    let all = names.contains(&"all");
    Transports {
        ib: all || names.iter().any(|name| is_ib(name)),
        gpu: all || names.iter().any(|name| is_gpu(name)),
    }
}

/// `n`, `no`, `off`, `0`, `false`.
pub(crate) fn is_off(facts: &Facts, name: &str) -> bool {
    facts.variable(name).is_some_and(|variable| {
        matches!(variable.value.trim().to_ascii_lowercase().as_str(), "n" | "no" | "off" | "0" | "false")
    })
}

/// The version that a program would load, if it is known.
pub(crate) fn version(facts: &Facts) -> Option<(u32, u32)> {
    version_pair(facts.libraries.ucx.known()?.as_ref()?.version.as_deref()?)
}

fn is_before(facts: &Facts, wanted: (u32, u32)) -> bool {
    version(facts).is_some_and(|version| version < wanted)
}

/// Why this version misses a registration method that works for the pair; `None` if it finds one,
/// or if none works.
pub(crate) fn misses(facts: &Facts, pair: &Pair<'_>) -> Option<&'static str> {
    if pair.gpu.vendor != GpuVendor::Nvidia {
        return None;
    }
    let no_module = is_before(facts, (1, 18)) && facts.kernel.shows_nvidia_client() == Some(false);
    let open = pair.dma_buf() || pair.peermem.is_yes();
    let found = (pair.dma_buf() && !is_before(facts, (1, 14))) || (pair.peermem.is_yes() && !no_module);
    match (open && !found, pair.peermem.is_yes()) {
        (false, _) => None,
        (true, true) => Some(
            "does not detect nvidia_peermem: before 1.18 it checks only /sys/kernel/mm/memory_peers/nv_mem",
        ),
        (true, false) => Some("does not support dma-buf (1.14 does)"),
    }
}

/// `UCX_RNDV_SCHEME` if it stages long messages of GPU memory through host buffers.
pub(crate) fn staging_scheme(facts: &Facts) -> Option<Variable<'_>> {
    facts
        .variable("UCX_RNDV_SCHEME")
        .filter(|variable| variable.value.trim() == "am" || variable.value.trim().ends_with("_ppln"))
}

/// What UCX does with this pair.
pub(crate) fn plan(analysis: &Analysis<'_>, pair: &Pair<'_>) -> Use {
    let facts = analysis.facts;
    let allowed = transports(facts);
    let tls = || facts.variable("UCX_TLS").map(|variable| variable.to_string()).unwrap_or_default();
    if !allowed.ib {
        return Use::none(format!("does not use adapters: {}", tls()));
    }
    if let Some(Some(ucx)) = facts.libraries.ucx.known()
        && !ucx.modules.is_empty()
    {
        if !ucx.modules.iter().any(|module| module.starts_with("ib")) {
            return Use::none("does not use adapters: built without verbs");
        }
        let wanted = if pair.gpu.vendor == GpuVendor::Amd { "rocm" } else { "cuda" };
        if !ucx.modules.iter().any(|module| module.starts_with(wanted)) {
            return Use::none(format!("does not recognise GPU memory: built without {wanted}"));
        }
    }
    if !allowed.gpu {
        return Use::none(format!("does not recognise GPU memory: {}", tls()));
    }
    if let Some(variable) = facts.variable("UCX_NET_DEVICES") {
        let filter = Filter::ucx(variable.value);
        if !filter.takes(pair.nic) {
            return Use::none(left_out(analysis, pair, &filter, &variable.to_string()));
        }
    }
    if let Answer::No(_, why) = usable::nic(facts, pair.nic) {
        return Use::none(format!("cannot use {}: {why}", pair.nic.name));
    }
    if pair.nic.ports.iter().all(|port| !port.may_be_active()) {
        return Use::none(format!("does not use {}: no port is active", pair.nic.name));
    }
    if is_off(facts, "UCX_IB_GPU_DIRECT_RDMA") {
        return Use::staged("UCX_IB_GPU_DIRECT_RDMA is off");
    }
    if let Some(why) = misses(facts, pair) {
        return Use::staged(format!("this version {why}"));
    }
    let dma_buf_allowed = !is_off(facts, "UCX_CUDA_COPY_DMABUF") && !is_before(facts, (1, 14));
    let can = (dma_buf_allowed && pair.dma_buf()) || pair.peermem.is_yes();
    if !can && (pair.no_dma_buf() || !dma_buf_allowed) && pair.peermem.is_no() {
        return Use::staged("no method to register GPU memory");
    }
    if let Some(variable) = staging_scheme(facts) {
        return Use::staged(format!("long messages: {variable}"));
    }
    match pair.distance {
        Some(Distance::Sys) => Use::unknown(
            "short messages direct, long ones probably staged: it assumes 0.2 GB/s across memory nodes",
        ),
        Some(Distance::Phb) => Use::unknown(
            "direct if it estimates staging to be slower: it assumes 3.5 GB/s through the host bridge",
        ),
        None if pair.nic.address.is_some() => {
            Use::unknown("direct if it estimates staging to be slower: the distance is unknown")
        }
        _ if can => Use::direct("zero-copy"),
        _ => Use::unknown("zero-copy if registration works, which was not probed"),
    }
}
