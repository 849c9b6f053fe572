//! Rows of a report: connections that are not direct, by host, GPU and adapter.

use std::collections::BTreeMap;

use serde::Serialize;

use super::nccl::RankLink;
use super::{NcclLog, Transport, UcxLog};
use crate::diagnosis::Diagnosis;
use crate::verdict::{PathKind, UseKind};
use nobounce_topology::facts::{Facts, Gpu};

/// Connections that are not direct.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LogRow {
    /// The host, if the log names it.
    pub host: String,
    /// The rank, for NCCL.
    pub rank: Option<u32>,
    /// PCI address of the GPU, if it is known.
    pub gpu: Option<String>,
    /// The adapter, if it is known.
    pub adapter: Option<String>,
    /// `NET/IB`, `NET/Socket`, or UCX's lane.
    pub way: String,
    /// How many.
    pub count: u64,
    /// Why, as far as this machine's facts tell.
    pub why: Vec<String>,
    /// The GPU's name in the tables, if it is this machine's.
    #[serde(skip)]
    pub(super) label: Option<String>,
    /// Whether the row may replace plans: the facts are of its host, and it is about long messages.
    #[serde(skip)]
    pub(super) outweighs: bool,
    /// Whether other connections of the same rank or log are direct.
    #[serde(skip)]
    pub(super) mixed: bool,
    /// Whether sockets are used instead of an adapter.
    #[serde(skip)]
    pub(super) sockets: bool,
}

/// The name of a GPU of this machine.
pub(super) fn label(facts: &Facts, address: &str) -> Option<String> {
    facts.gpus.iter().find(|gpu| gpu.address == address).map(Gpu::label)
}

/// Host, rank, adapter and transport identify a row of connections that are not direct.
pub(super) type RowKey = (String, u32, Option<String>, String);

/// Each link adds to the total of its kind; links that are not direct add to their row as well.
pub(super) fn count_links(log: &NcclLog, totals: &mut BTreeMap<&'static str, u64>) -> BTreeMap<RowKey, u64> {
    let mut rows: BTreeMap<RowKey, u64> = BTreeMap::new();
    for (link, &count) in &log.links {
        let transport = &link.transport;
        let kind = if !transport.is_network() {
            "local"
        } else if !transport.is_rdma() {
            "sockets"
        } else if transport.gdrdma {
            "direct"
        } else {
            "staged"
        };
        *totals.entry(kind).or_default() += count;
        if matches!(kind, "sockets" | "staged") {
            let adapter = link
                .device
                .and_then(|device| log.adapters.get(&link.host)?.get(usize::try_from(device).ok()?))
                .cloned();
            let adapter = if kind == "sockets" { None } else { adapter };
            *rows.entry((link.host.clone(), link.rank, adapter, transport.name.clone())).or_default() +=
                count;
        }
    }
    rows
}

/// The log and the verdicts of this machine explain one row.
pub(super) fn nccl_row(
    log: &NcclLog,
    (host, rank, adapter, way): RowKey,
    count: u64,
    ours: &dyn Fn(&str) -> bool,
    facts: &Facts,
    diagnosis: &Diagnosis,
) -> LogRow {
    let gpu = log.ranks.get(&(host.clone(), rank)).and_then(|rank| rank.gpu.clone());
    let is_peer = |link: &RankLink| link.host == host && (gpu.is_none() || link.rank == rank);
    let is_direct = |link: &RankLink| link.transport.is_rdma() && link.transport.gdrdma;
    let mixed = log.links.keys().any(|link| is_peer(link) && is_direct(link));
    let mut why = Vec::new();
    let off = |name: &Option<String>| {
        name.as_ref().and_then(|name| log.gpu_direct.get(&(host.clone(), name.clone())))
    };
    if off(&adapter) == Some(&false) {
        why.push("NCCL log: GPU Direct RDMA Disabled for this adapter".to_owned());
    }
    let here = ours(&host);
    if here {
        why.extend(reasons_of_verdict(diagnosis, gpu.as_deref(), adapter.as_deref()));
    }
    let label = gpu.as_deref().filter(|_| here).and_then(|gpu| label(facts, gpu));
    let sockets = !Transport { name: way.clone(), gdrdma: false }.is_rdma();
    let rank = Some(rank);
    LogRow { host, rank, gpu, adapter, way, count, why, label, outweighs: here, mixed, sockets }
}

/// The verdict of the row's own pair, else of the GPU's best pair, says why it is not direct.
fn reasons_of_verdict(diagnosis: &Diagnosis, gpu: Option<&str>, adapter: Option<&str>) -> Vec<String> {
    let pairs = diagnosis.verdicts.iter().filter(|verdict| gpu.is_none_or(|gpu| gpu == verdict.gpu));
    let pair = pairs
        .clone()
        .find(|verdict| {
            // Merged adapters are `mlx5_0+mlx5_1`.
            adapter.is_some_and(|names| names.split('+').any(|name| name == verdict.nic))
        })
        .or_else(|| pairs.clone().find(|v| v.best));
    match pair {
        Some(verdict) if verdict.path == PathKind::Staged => verdict.reasons.clone(),
        Some(verdict) if verdict.nccl.kind != UseKind::Direct => {
            vec![verdict.nccl.text.clone()]
        }
        _ => Vec::new(),
    }
}

/// The protocols of UCX for GPU memory: each adds to the total of its kind, and what is not direct
/// is a row.
pub(super) fn ucx_rows(
    log: &UcxLog,
    totals: &mut BTreeMap<&'static str, u64>,
    diagnosis: &Diagnosis,
) -> Vec<LogRow> {
    let mut rows = Vec::new();
    for (used, &count) in &log.uses {
        let kind = if used.is_tcp() {
            "sockets"
        } else if used.is_direct() {
            "direct"
        } else if used.is_network() {
            "staged"
        } else {
            "local"
        };
        *totals.entry(kind).or_default() += count;
        // Short messages are always copied; it is the long ones that count.
        let outweighs = used.range.ends_with("inf") || used.is_emulated();
        if kind == "sockets" || (kind == "staged" && outweighs) {
            let adapter = used
                .lane
                .split('/')
                .nth(1)
                .map(|lane| lane.split([':', ' ']).next().unwrap_or_default().to_owned());
            let pair = diagnosis.verdicts.iter().find(|verdict| {
                adapter.as_deref() == Some(&verdict.nic) && verdict.ucx.kind != UseKind::Direct
            });
            rows.push(LogRow {
                adapter,
                way: format!("{}, {}: {} over {}", used.operation, used.range, used.protocol, used.lane),
                count,
                why: pair.map(|verdict| verdict.ucx.text.clone()).into_iter().collect(),
                outweighs: outweighs && log.hosts.len() <= 1,
                sockets: kind == "sockets",
                ..LogRow::default()
            });
        }
    }
    let mixed = totals.get("direct").is_some_and(|count| *count > 0);
    rows.iter_mut().for_each(|row| row.mixed = mixed);
    rows
}
