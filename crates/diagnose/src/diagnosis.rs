//! Facts in, findings and verdicts out.

use serde::Serialize;

use crate::checks;
use crate::container;
use crate::finding::{Finding, Severity};
use crate::fold;
use crate::lost;
use crate::severity;
use crate::storage_verdict::StorageDiagnosis;
use crate::verdict::{self, Verdict};
use crate::words;
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Facts, SCHEMA};

/// Everything that can be said of a machine.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// Version of this form; that of the facts.
    pub schema: u32,
    /// The name of the machine, if the facts have it.
    pub host: Option<String>,
    /// Findings, the gravest first; those below another (`under`) follow it.
    pub findings: Vec<Finding>,
    /// Every GPU with every adapter.
    pub verdicts: Vec<Verdict>,
    /// Whether a pair that could be direct is not: exit code 1.
    pub direct_is_lost: bool,
    /// The routes of a path, if the facts have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageDiagnosis>,
}

/// Runs all checks.
#[must_use]
pub fn diagnose(facts: &Facts) -> Diagnosis {
    with_findings(facts, Vec::new())
}

/// The same, with what differs from the machine at the other end.
#[must_use]
pub fn diagnose_with_peer(facts: &Facts, peer: &Facts) -> Diagnosis {
    with_findings(facts, checks::peer::compare(facts, peer))
}

fn with_findings(facts: &Facts, more: Vec<Finding>) -> Diagnosis {
    let facts = &facts.clone().in_order();
    let analysis = Analysis::of(facts);
    let mut findings = checks::run(&analysis);
    findings.extend(more);
    // Before causal chains are folded: their ways out are made of these fixes.
    container::name_the_side(facts, &mut findings);
    let mut verdicts = verdict::of(&analysis, &findings);
    severity::settle(&mut findings, &verdicts);
    let mut findings = fold::fold(findings, &verdicts);
    words::name_devices(facts, &mut findings, &mut verdicts);
    let direct_is_lost = facts.gpus.iter().any(|gpu| lost::is_lost(gpu, &verdicts, &findings));
    let mut storage = facts.storage.as_ref().map(|storage| checks::storage::diagnose(&analysis, storage));
    if let Some(storage) = &mut storage {
        container::name_the_side(facts, &mut storage.findings);
    }
    Diagnosis { schema: SCHEMA, host: facts.host.clone(), findings, verdicts, direct_is_lost, storage }
}

impl Diagnosis {
    /// The names of the findings, sorted, each once, with their severity.
    #[must_use]
    pub fn ids(&self) -> Vec<(&'static str, Severity)> {
        let mut ids: Vec<_> = self.findings.iter().map(|finding| (finding.id, finding.severity)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}
