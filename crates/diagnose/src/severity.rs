//! How grave a finding is: by its effect on the paths, in one place.

use crate::finding::{Effect, Finding, Severity};
use crate::verdict::{PathKind, UseKind, Verdict, concerns_names};

/// Nothing to fix: the GPU or the adapter lacks the feature, or confidential computing closes the
/// memory on purpose.
pub(crate) const NO_FIX: [&str; 3] = ["gpu-class", "confidential", "efa-instance"];

/// Sets the severity of each finding by what it does to the best adapter of each GPU. A check's own
/// severity counts where the finding changes no path.
pub(crate) fn settle(findings: &mut [Finding], verdicts: &[Verdict]) {
    let best: Vec<&Verdict> = verdicts.iter().filter(|verdict| verdict.best).collect();
    for finding in findings {
        finding.severity = of(finding, &best);
    }
}

fn of(finding: &Finding, best: &[&Verdict]) -> Severity {
    let claim = finding.severity;
    // Verdicts have no plan for other libraries.
    let is_other = finding.library.is_some_and(|library| !["NCCL", "UCX"].contains(&library));
    if claim == Severity::Unknown || best.is_empty() || is_other {
        return claim;
    }
    let hit: Vec<&&Verdict> =
        best.iter().filter(|verdict| concerns_names(finding, &verdict.gpu, &verdict.nic)).collect();
    let changes = match finding.effect {
        Effect::Nothing => return claim,
        Effect::Blocks => hit.iter().any(|verdict| {
            verdict.path == PathKind::Staged
                || finding.library.is_some_and(|library| !verdict.is_used(library))
        }),
        Effect::Slows => hit.iter().any(|verdict| verdict.path == PathKind::Slow),
        Effect::Stages => hit.iter().any(|verdict| {
            ["NCCL", "UCX"]
                .iter()
                .any(|library| finding.library.is_none_or(|own| own == *library) && !verdict.is_used(library))
        }),
    };
    if !changes {
        // It stops or slows what no GPU needs.
        return claim.min(Severity::Warning);
    }
    match finding.effect {
        Effect::Blocks if NO_FIX.contains(&finding.id) => Severity::Warning,
        Effect::Blocks if finding.library.is_none() && claim >= Severity::Warning => Severity::Error,
        _ => claim.max(Severity::Warning),
    }
}

impl Verdict {
    /// Whether a library uses the pair directly, as far as is known.
    fn is_used(&self, library: &str) -> bool {
        let plan = if library == "UCX" { &self.ucx } else { &self.nccl };
        matches!(plan.kind, UseKind::Direct | UseKind::Unknown)
    }
}
