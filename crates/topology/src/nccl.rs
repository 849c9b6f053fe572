//! What NCCL will do with a pair: its distance rule and its variables.
//!
//! As read in NCCL 2.30: GPUDirect is used where the adapter and the GPU can (peer-memory module by file, dma-buf by probe), and where they
//! are no further apart than `NCCL_NET_GDR_LEVEL`, PXB by default.

use crate::analysis::{Analysis, Pair};
use crate::facts::Facts;
use crate::ladder::Answer;
use crate::names::Filter;
use crate::tree::Distance;
use crate::usable;
use crate::verdict::Use;

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

/// How far the pair is on NCCL's scale. Two host bridges of one node are one processor to NCCL.
pub(crate) fn distance(facts: &Facts, pair: &Pair<'_>) -> Level {
    match pair.distance {
        Some(Distance::Pix) => Level::Pix,
        Some(Distance::Pxb) => Level::Pxb,
        Some(Distance::Phb | Distance::Node) if pair.gpu.coherent_link.get() == Some(true) => Level::P2c,
        Some(Distance::Phb | Distance::Node) => Level::Phb,
        // A machine without memory nodes is one processor.
        Some(Distance::Sys) if facts.machine.numa.len() <= 1 => Level::Phb,
        Some(Distance::Sys) => Level::Sys,
        // An adapter without a PCI address hangs on the first processor.
        None => Level::Phb,
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

/// Whether NCCL's own choice of network leaves the adapters out altogether, and why.
pub(crate) fn no_ib(facts: &Facts) -> Option<String> {
    if is_on(facts, "NCCL_IB_DISABLE") == Some(true) {
        return facts.variable("NCCL_IB_DISABLE").map(|variable| variable.to_string());
    }
    facts
        .variable("NCCL_NET")
        .filter(|variable| variable.value.trim().eq_ignore_ascii_case("socket"))
        .map(|variable| variable.to_string())
}

/// What NCCL does with this pair.
pub(crate) fn plan(analysis: &Analysis<'_>, pair: &Pair<'_>) -> Use {
    let facts = analysis.facts;
    if let Some(why) = no_ib(facts) {
        return Use::none(format!("sockets: {why}"));
    }
    if let Some(filter) = facts.variable("NCCL_IB_HCA")
        && !Filter::nccl(filter.value).takes(pair.nic)
    {
        return Use::none(format!("does not use {}: {filter}", pair.nic.name));
    }
    if let Answer::No(_, why) = usable::nic(facts, pair.nic) {
        return Use::none(format!("cannot use {}: {why}", pair.nic.name));
    }
    if pair.nic.ports.iter().all(|port| !port.may_be_active()) {
        return Use::none(format!("does not use {}: no port is active", pair.nic.name));
    }
    let dma_buf_allowed = is_on(facts, "NCCL_DMABUF_ENABLE") != Some(false);
    let by_file =
        ["nvidia_peermem", "nv_peer_mem"].iter().any(|name| facts.kernel.is_loaded(name) == Some(true));
    let can = (dma_buf_allowed && pair.dma_buf()) || pair.peermem.is_yes();
    if !can && by_file && pair.peermem.is_no() && (pair.no_dma_buf() || !dma_buf_allowed) {
        return Use::staged("believes the loaded module, and its registration fails");
    }
    let certainly_not = (pair.no_dma_buf() || !dma_buf_allowed) && pair.peermem.is_no();
    if !can && certainly_not {
        let why = if dma_buf_allowed {
            "no way to register GPU memory"
        } else {
            "NCCL_DMABUF_ENABLE=0, and no peer-memory module"
        };
        return Use::staged(why);
    }
    let far = distance(facts, pair);
    let coherent_allowed = is_on(facts, "NCCL_NET_GDR_C2C") != Some(false);
    let default = if coherent_allowed { Level::P2c } else { Level::Pxb };
    let allowed = level(facts).unwrap_or(default);
    if facts.variable("NCCL_TOPO_FILE").is_some() {
        return Use::unknown("distances come from NCCL_TOPO_FILE");
    }
    if pair.distance.is_none() && pair.nic.address.is_some() && allowed < Level::Sys {
        return Use::unknown("how far they are apart is not known");
    }
    if far > allowed {
        let which = named_level(facts).map_or("the default", |(name, _)| name);
        return Use::staged(format!("distance {} is beyond {} ({which})", far.name(), allowed.name()));
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
