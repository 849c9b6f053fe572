//! Bytes that were moved, or not: `doctor --prove`.

use super::list;
use crate::finding::{Finding, Severity};
use nobounce_topology::analysis::Analysis;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let facts = analysis.facts;
    let mut found = Vec::new();
    for gpu in &facts.gpus {
        let failed: Vec<_> = facts
            .transfers
            .iter()
            .filter(|transfer| transfer.gpu == gpu.address && !transfer.probe.ok)
            .collect();
        let Some(first) = failed.first() else { continue };
        let nics: Vec<_> = failed.iter().map(|transfer| transfer.nic.clone()).collect();
        found.push(
            Finding::new("moves-no-data", Severity::Error, format!("{} registers with {}, but moves no bytes directly", gpu.address, list(&nics)))
                .why("A registration alone proves no path: the test of --prove failed on it.")
                .seen(format!("--prove on {}", first.nic), first.probe.detail.clone())
                .fix("`sudo dmesg | tail -n 20`   (IOMMU faults, PCIe errors), then check ACS and the adapter's address")
                .root()
                .blocks()
                .on([gpu.address.clone()]),
        );
    }
    found
}
