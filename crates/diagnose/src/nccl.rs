//! What NCCL will do with a pair: its distance rule and its variables.
//!
//! As read in NCCL 2.4 to 2.30: GPUDirect needs support by adapter and GPU (peer-memory module by
//! file, dma-buf by probe). Their distance must not exceed `NCCL_NET_GDR_LEVEL`, PXB by default. An
//! unknown version counts as a current one.

use crate::names::{Filter, left_out};
use crate::verdict::Use;
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{Facts, GpuVendor, Nic, Variable, version_pair};
use nobounce_topology::methods::Answer;
use nobounce_topology::tree::Distance;
use nobounce_topology::usable;

/// NCCL's scale of distances, as far as it matters for adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Loc,
    Nvl,
    Nvb,
    C2c,
    Pix,
    Pxb,
    /// Over the coherent link to the processor, then PCIe (Grace).
    P2c,
    Pxn,
    Phb,
    Sys,
}

impl Level {
    const NAMES: [(&str, Self); 10] = [
        ("LOC", Self::Loc),
        ("NVL", Self::Nvl),
        ("NVB", Self::Nvb),
        ("C2C", Self::C2c),
        ("PIX", Self::Pix),
        ("PXB", Self::Pxb),
        ("P2C", Self::P2c),
        ("PXN", Self::Pxn),
        ("PHB", Self::Phb),
        ("SYS", Self::Sys),
    ];

    pub(crate) fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, level)| *level == self).map_or("?", |(name, _)| name)
    }

    /// As NCCL reads it: exact names, or a number of the old scale. Anything else is ignored.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if let Some((_, level)) = Self::NAMES.iter().find(|(name, _)| *name == text) {
            return Some(*level);
        }
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        let old = [Self::Loc, Self::Pix, Self::Pxb, Self::Phb, Self::Sys];
        let number: usize = digits.parse().ok()?;
        Some(*old.get(number).unwrap_or(&Self::Sys))
    }
}

/// The level that is set, if NCCL understands it.
pub(crate) fn level(facts: &Facts) -> Option<Level> {
    named_level(facts).map(|(_, level)| level)
}

/// The same with its variable: the new name, else the old one.
fn named_level(facts: &Facts) -> Option<(&'static str, Level)> {
    ["NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL"]
        .into_iter()
        .find_map(|name| Some((name, Level::parse(facts.variable(name)?.value)?)))
}

/// The version that a program would load, if it is known.
pub(crate) fn version(facts: &Facts) -> Option<(u32, u32)> {
    version_pair(facts.libraries.nccl.known()?.as_ref()?.version.as_deref()?)
}

/// Whether the version is known to be older than this one.
pub(crate) fn is_before(facts: &Facts, wanted: (u32, u32)) -> bool {
    version(facts).is_some_and(|version| version < wanted)
}

/// Why this version misses a registration method that works for the pair; `None` if it finds one,
/// or if none works.
pub(crate) fn misses(facts: &Facts, pair: &Pair<'_>) -> Option<&'static str> {
    // RCCL has the same version scheme, but its own rules.
    if pair.gpu.vendor != GpuVendor::Nvidia {
        return None;
    }
    let (no_dma_buf, no_module) = (knows_no_dma_buf(facts), misses_module(facts));
    let open = pair.dma_buf() || pair.peermem.is_yes();
    let found = (pair.dma_buf() && !no_dma_buf) || (pair.peermem.is_yes() && !no_module);
    match (open && !found, pair.peermem.is_yes()) {
        (false, _) => None,
        (true, true) => Some(
            "does not detect nvidia_peermem: before 2.23 it checks only /sys/kernel/mm/memory_peers/nv_mem",
        ),
        (true, false) => Some("does not support dma-buf (2.13 does)"),
    }
}

fn knows_no_dma_buf(facts: &Facts) -> bool {
    is_before(facts, (2, 13))
}

/// Before 2.23 NCCL did not look for the module itself, only for its folder among the clients of
/// ib_core.
fn misses_module(facts: &Facts) -> bool {
    is_before(facts, (2, 23)) && facts.kernel.shows_nvidia_client() == Some(false)
}

/// Distance of the pair on NCCL's scale. NCCL counts two host bridges of one node as one CPU.
pub(crate) fn distance(facts: &Facts, pair: &Pair<'_>) -> Level {
    match pair.distance {
        Some(Distance::Pix) => Level::Pix,
        Some(Distance::Pxb) => Level::Pxb,
        Some(Distance::Phb | Distance::Node) if pair.gpu.coherent_link.get() == Some(true) => coherent(facts),
        Some(Distance::Phb | Distance::Node) => Level::Phb,
        // A machine without memory nodes is one processor.
        Some(Distance::Sys) if facts.machine.numa.len() <= 1 => Level::Phb,
        Some(Distance::Sys) => Level::Sys,
        // An adapter without a PCI address is attached to the first CPU.
        None => Level::Phb,
    }
}

/// Distance of a CPU-attached adapter from a GPU with a coherent link (Grace). 2.26 can use it,
/// 2.27 does so by default, and 2.30 has a level for it.
fn coherent(facts: &Facts) -> Level {
    let wanted = is_on(facts, "NCCL_NET_GDR_C2C");
    match version(facts) {
        Some(version) if version < (2, 26) => Level::Phb,
        Some((2, 26)) => match wanted {
            Some(true) => Level::C2c,
            _ => Level::Phb,
        },
        Some(version) if version < (2, 30) && wanted != Some(false) => Level::C2c,
        _ => Level::P2c,
    }
}

/// A variable that NCCL takes as a number, not 0.
pub(crate) fn is_on(facts: &Facts, name: &str) -> Option<bool> {
    let text = facts.variable(name)?.value.trim();
    let digits = text.trim_start_matches("0x");
    Some(
        i64::from_str_radix(digits, if text.starts_with("0x") { 16 } else { 10 })
            .is_ok_and(|value| value != 0),
    )
}

/// The network that NCCL's variables choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    /// The adapters, by NCCL itself or by a plugin with the same rules.
    Adapters,
    /// TCP, and the variable that says so.
    Sockets(String),
    /// UCX, by a plugin.
    Ucx(String),
    /// A plugin whose rules are not known here.
    Plugin(String),
}

/// The network for an adapter, by `NCCL_NET`, `NCCL_IB_DISABLE` and the variables of plugins.
pub(crate) fn network(facts: &Facts, nic: &Nic) -> Network {
    let text = |name: &str| facts.variable(name).filter(|variable| !variable.value.trim().is_empty());
    let net = text("NCCL_NET");
    if let Some(net) = net
        && net.value.trim().eq_ignore_ascii_case("socket")
    {
        return Network::Sockets(net.to_string());
    }
    // EFA adapters belong to the plugin alone: settings of NCCL's own verbs transport do not apply.
    if is_efa(nic) {
        let own = net.filter(|net| net.value.trim().eq_ignore_ascii_case("ib"));
        let none = text("NCCL_NET_PLUGIN").filter(|plugin| plugin.value.trim().eq_ignore_ascii_case("none"));
        return match own.or(none).or_else(|| fabric_without_efa(facts)) {
            Some(variable) => Network::Sockets(variable.to_string()),
            None if missing_plugin(facts).is_some() => {
                Network::Sockets("its plugin for EFA is not found".to_owned())
            }
            None => Network::Adapters,
        };
    }
    let by_plugin = |variable: Variable<'_>| {
        let name = variable.value.trim().to_ascii_lowercase();
        let like_ib = ["ib", "none", "gib"].contains(&name.as_str())
            || ["ibext", "rdma-sharp", "rdma_sharp", "spcx", "mlnx"].iter().any(|part| name.contains(part));
        match name.as_str() {
            _ if like_ib => None,
            "ucx" => Some(Network::Ucx(variable.to_string())),
            _ => Some(Network::Plugin(variable.to_string())),
        }
    };
    if let Some(network) = net.and_then(by_plugin) {
        return network;
    }
    if is_on(facts, "NCCL_IB_DISABLE") == Some(true)
        && let Some(variable) = facts.variable("NCCL_IB_DISABLE")
    {
        return Network::Sockets(variable.to_string());
    }
    // A named network decides; otherwise the plugin comes first.
    let named = net.is_some();
    ["NCCL_PLUGIN_P2P", "NCCL_NET_PLUGIN"]
        .into_iter()
        .filter(|_| !named)
        .find_map(|name| by_plugin(text(name)?))
        .unwrap_or(Network::Adapters)
}

/// Whether NCCL is here and its plugin for EFA is not: not at all, or (`false`) only where the
/// loader does not look. A plugin that is named may be anywhere.
pub(crate) fn missing_plugin(facts: &Facts) -> Option<Option<bool>> {
    let loads_nccl = matches!(facts.libraries.nccl.known(), Some(Some(_)));
    let named = facts.variable("NCCL_NET_PLUGIN").is_some();
    let found = facts.libraries.ofi_plugin.known().copied()?;
    (loads_nccl && !named && found != Some(true)).then_some(found)
}

/// Amazon's Elastic Fabric Adapter.
pub(crate) fn is_efa(nic: &Nic) -> bool {
    nic.driver.as_deref() == Some("efa")
}

/// Adapters that NCCL reaches only through libfabric.
pub(crate) fn needs_fabric(nic: &Nic) -> bool {
    is_efa(nic) || nic.driver.as_deref().is_some_and(|driver| driver.starts_with("cxi"))
}

/// `FI_PROVIDER` if it excludes libfabric's EFA provider.
pub(crate) fn fabric_without_efa(facts: &Facts) -> Option<Variable<'_>> {
    let variable = facts.variable("FI_PROVIDER")?;
    let text = variable.value.trim().to_ascii_lowercase();
    let names = |list: &str| list.split([',', ';']).any(|name| name.trim() == "efa");
    let out = match text.strip_prefix('^') {
        Some(list) => names(list),
        None => !text.is_empty() && !names(&text),
    };
    out.then_some(variable)
}

/// Why no method of registration is left.
fn no_method(facts: &Facts) -> String {
    match facts.variable("NCCL_DMABUF_ENABLE") {
        _ if knows_no_dma_buf(facts) => {
            let (major, minor) = version(facts).unwrap_or_default();
            format!("NCCL {major}.{minor} has no dma-buf support (2.13 has), and peer memory does not work")
        }
        Some(variable) if is_on(facts, variable.name) == Some(false) => {
            format!("{variable}, and peer memory does not work")
        }
        _ => "no method to register GPU memory".to_owned(),
    }
}

/// What NCCL does with this pair.
pub(crate) fn plan(analysis: &Analysis<'_>, pair: &Pair<'_>) -> Use {
    let facts = analysis.facts;
    match network(facts, pair.nic) {
        Network::Adapters => {}
        Network::Sockets(why) => return Use::none(format!("sockets: {why}")),
        Network::Ucx(why) => {
            let ucx = crate::ucx::plan(analysis, pair);
            return Use { kind: ucx.kind, text: format!("through UCX ({why}): {}", ucx.text) };
        }
        Network::Plugin(why) => return Use::unknown(format!("decided by its plugin: {why}")),
    }
    if let Some(variable) = facts.variable("NCCL_IB_HCA").filter(|_| !is_efa(pair.nic)) {
        let filter = Filter::nccl(variable.value);
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
    if let Some(why) = misses(facts, pair) {
        return Use::staged(format!("this version {why}"));
    }
    let dma_buf_allowed = is_on(facts, "NCCL_DMABUF_ENABLE") != Some(false) && !knows_no_dma_buf(facts);
    let by_file =
        ["nvidia_peermem", "nv_peer_mem"].iter().any(|name| facts.kernel.is_loaded(name) == Some(true));
    let can = (dma_buf_allowed && pair.dma_buf()) || pair.peermem.is_yes();
    if !can && by_file && pair.peermem.is_no() && (pair.no_dma_buf() || !dma_buf_allowed) {
        return Use::staged("trusts the loaded module, and registration fails");
    }
    let certainly_not = (pair.no_dma_buf() || !dma_buf_allowed) && pair.peermem.is_no();
    if !can && certainly_not {
        return Use::staged(no_method(facts));
    }
    let far = distance(facts, pair);
    let coherent_allowed = is_on(facts, "NCCL_NET_GDR_C2C") != Some(false);
    // Only a coherent link has a level between PXB and PHB.
    let coherent = coherent_allowed && pair.gpu.coherent_link.get() == Some(true);
    let default = if coherent && !is_before(facts, (2, 30)) { Level::P2c } else { Level::Pxb };
    let allowed = level(facts).unwrap_or(default);
    if facts.variable("NCCL_TOPO_FILE").is_some() {
        return Use::unknown("distances come from NCCL_TOPO_FILE");
    }
    if pair.distance.is_none() && pair.nic.address.is_some() && allowed < Level::Sys {
        return Use::unknown("the distance is unknown");
    }
    if far > allowed {
        let which = named_level(facts).map_or("the default", |(name, _)| name);
        // The table has the distance by name; NCCL's scale has fewer.
        let own = pair.distance.map(Distance::name).filter(|own| *own != far.name());
        let counted = own.map_or_else(
            || format!("distance {}", far.name()),
            |own| format!("distance {own}, {} for NCCL,", far.name()),
        );
        return Use::staged(format!("{counted} is beyond {} ({which})", allowed.name()));
    }
    if is_on(facts, "NCCL_NET_GDR_READ") == Some(false) {
        return Use::half("receives directly, sends staged: NCCL_NET_GDR_READ=0");
    }
    if facts.variable("NCCL_NET_GDR_READ").is_none()
        && pair.gpu.compute_capability.get().is_some_and(|cc| cc < 80)
        && facts.gpus.len() > 1
        && pair.gpu.nvlinks.get().unwrap_or(0) == 0
    {
        return Use::half("receives directly, sends staged: a GPU before Ampere without NVLink");
    }
    if can {
        Use::direct("GDRDMA")
    } else {
        Use::unknown("GDRDMA if registration works, which was not probed")
    }
}
