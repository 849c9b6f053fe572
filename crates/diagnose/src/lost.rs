//! Whether a GPU lacks a direct path that it could have: the meaning of exit code 1.

use crate::finding::{Effect, Finding, Severity};
use crate::severity::NO_FIX;
use crate::verdict::{PathKind, UseKind, Verdict, concerns_names};
use nobounce_topology::facts::Gpu;

/// A library's own choice, which a measurement may confirm.
const CHOICES: [&str; 1] = ["nccl-distance"];

/// Whether the GPU's best path, or its use by NCCL or UCX, is lost to a fixable problem.
pub(crate) fn is_lost(gpu: &Gpu, verdicts: &[Verdict], findings: &[Finding]) -> bool {
    let Some(best) = verdicts.iter().find(|verdict| verdict.best && verdict.gpu == gpu.address) else {
        // No adapter can be used at all, although the tree shows some.
        return findings
            .iter()
            .any(|finding| finding.effect == Effect::Blocks && finding.severity == Severity::Error);
    };
    let about = |finding: &&Finding| concerns_names(finding, &best.gpu, &best.nic);
    let grave = |finding: &&Finding| finding.severity >= Severity::Warning && about(finding);
    // A class that is only assumed blocks nothing: other faults count.
    let has_no_fix = |finding: &Finding| NO_FIX.contains(&finding.id) && finding.effect == Effect::Blocks;
    if findings.iter().filter(about).any(has_no_fix) {
        return false;
    }
    if best.path == PathKind::Staged {
        return findings
            .iter()
            .filter(grave)
            .any(|finding| finding.effect == Effect::Blocks && finding.library.is_none());
    }
    // A far adapter instead of the best one is slow, not lost.
    let by = |library: &str, kind: UseKind| {
        matches!(kind, UseKind::Staged | UseKind::None)
            && findings
                .iter()
                .filter(grave)
                .filter(|finding| !CHOICES.contains(&finding.id))
                .any(|finding| finding.library == Some(library) && finding.effect != Effect::Slows)
    };
    by("NCCL", best.nccl.kind) || by("UCX", best.ucx.kind)
}
