//! What a log shows outweighs what the facts promise.

use super::LogReport;
use crate::diagnosis::Diagnosis;
use crate::verdict::{Use, UseKind, Verdict};
use nobounce_topology::facts::Facts;

/// Puts what the logs show into the verdicts of the pairs that they name.
pub fn overrule(diagnosis: &mut Diagnosis, facts: &Facts, reports: &[LogReport]) {
    for report in reports {
        for row in &report.not_direct {
            let ours = row.host.is_empty() || facts.host.as_deref().is_none_or(|host| host == row.host);
            let Some(adapter) = row.adapter.as_deref().filter(|_| ours) else { continue };
            let is_of_row = |verdict: &&mut Verdict| {
                // Merged adapters are `mlx5_0+mlx5_1`.
                adapter.split('+').any(|name| name == verdict.nic)
                    && row.gpu.as_deref().is_none_or(|gpu| gpu == verdict.gpu)
            };
            for verdict in diagnosis.verdicts.iter_mut().filter(is_of_row) {
                match report.program {
                    "NCCL" => replace(&mut verdict.nccl, format!("log: {} without GDRDMA", row.way)),
                    "UCX" => replace(&mut verdict.ucx, format!("log: {}", row.way)),
                    _ => {}
                }
            }
        }
    }
}

/// A plan that the log refutes.
fn replace(plan: &mut Use, shown: String) {
    if matches!(plan.kind, UseKind::Direct | UseKind::Unknown) {
        *plan = Use::staged(shown);
    }
}
