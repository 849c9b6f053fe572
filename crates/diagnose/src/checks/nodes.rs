//! Sockets that the firmware divides into several memory nodes: NPS of AMD, sub-NUMA clusters of
//! Intel.

use super::list;
use crate::finding::{Finding, Fix, Severity};
use crate::nccl;
use crate::verdict::UseKind;
use nobounce_topology::analysis::Analysis;
use nobounce_topology::tree::Distance;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let facts = analysis.facts;
    let best = analysis.best();
    let hit: Vec<_> = best
        .iter()
        .flatten()
        .filter(|pair| pair.distance == Some(Distance::Sys) && !pair.nic.is_software())
        .filter(|pair| pair.one_socket)
        .collect();
    let Some(first) = hit.first() else { return Vec::new() };
    let stages = hit.iter().any(|pair| {
        let plan = nccl::plan(analysis, pair);
        plan.kind == UseKind::Staged && plan.text.starts_with("distance")
    });
    let severity = if stages { Severity::Warning } else { Severity::Info };
    let count = facts.machine.nodes_per_socket();
    let (setting, how) = match (facts.machine.cpu.vendor.as_str(), count) {
        ("AuthenticAMD", Some(count)) => (format!("NPS{count}"), "set NPS1 ('NUMA nodes per socket')"),
        ("AuthenticAMD", None) => ("NPS above 1".to_owned(), "set NPS1 ('NUMA nodes per socket')"),
        _ => ("sub-NUMA clusters".to_owned(), "switch sub-NUMA clustering (SNC) off"),
    };
    let names: Vec<_> = hit.iter().map(|pair| pair.gpu.address.clone()).collect();
    let told = count.map_or_else(|| "several".to_owned(), |count| count.to_string());
    let finding = Finding::new(
        "nodes-per-socket",
        severity,
        format!("{}: the nearest adapter ({}) is on another memory node of the same socket ({setting})", list(&names), first.nic.name),
    )
    .why("No link between sockets is crossed. NCCL compares memory nodes, counts the distance as SYS, and does not use GPUDirect by default.")
    .seen("memory nodes of a socket", told)
    .seen("distance", format!("{} to {}: SYS, one socket", first.gpu.address, first.nic.name))
    .fix(Fix::host().remark(format!("{how} in the firmware (BIOS) setup")))
    .reboot();
    let finding = if stages {
        finding
            .fix(Fix::container().set("NCCL_NET_GDR_LEVEL=SYS").remark("without a reboot"))
            .of_library("NCCL")
            .stages()
    } else {
        finding
    };
    vec![finding.on(names)]
}
