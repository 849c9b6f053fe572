//! What a log shows outweighs what the facts promise.

use super::LogReport;
use super::rows::LogRow;
use crate::checks::list;
use crate::diagnosis::Diagnosis;
use crate::finding::{Finding, Fix, Severity};
use crate::nccl;
use crate::verdict::{Use, UseKind, Verdict};
use nobounce_topology::facts::Facts;

/// Puts what the logs show into the verdicts that they refute, with one finding about all of them.
pub fn overrule(diagnosis: &mut Diagnosis, facts: &Facts, reports: &[LogReport]) {
    let mut refuting: Vec<&LogReport> = Vec::new();
    let mut gpus: Vec<String> = Vec::new();
    for report in reports {
        let mut refuted = false;
        for row in report.not_direct.iter().filter(|row| row.outweighs) {
            for verdict in diagnosis.verdicts.iter_mut().filter(|verdict| is_about(row, verdict)) {
                if replace(report.program, row, facts, verdict) {
                    refuted = true;
                    gpus.push(verdict.gpu.clone());
                }
            }
        }
        if refuted {
            refuting.push(report);
        }
    }
    if refuting.is_empty() {
        return;
    }
    gpus.sort();
    gpus.dedup();
    // Behind the errors and what is below them.
    let is_next = |finding: &Finding| finding.under.is_none() && finding.severity < Severity::Error;
    let at = diagnosis.findings.iter().position(is_next).unwrap_or(diagnosis.findings.len());
    diagnosis.findings.insert(at, finding(&refuting).on(gpus));
    diagnosis.direct_is_lost = true;
}

/// Whether a row is about a verdict. Without an adapter it is about all of its GPU's, and without a
/// GPU about all, unless other connections of its rank or log use adapters.
fn is_about(row: &LogRow, verdict: &Verdict) -> bool {
    if row.gpu.as_deref().is_some_and(|gpu| gpu != verdict.gpu) {
        return false;
    }
    match row.adapter.as_deref().filter(|_| !row.sockets) {
        // Merged adapters are `mlx5_0+mlx5_1`.
        Some(adapter) => adapter.split('+').any(|name| name == verdict.nic),
        None => !row.mixed,
    }
}

/// Replaces a plan that the row refutes.
fn replace(program: &str, row: &LogRow, facts: &Facts, verdict: &mut Verdict) -> bool {
    let by_fabric = || facts.nics.iter().any(|nic| nic.name == verdict.nic && nccl::needs_fabric(nic));
    let plan = match program {
        "NCCL" => &mut verdict.nccl,
        "libfabric" if by_fabric() => &mut verdict.nccl,
        "UCX" => &mut verdict.ucx,
        _ => return false,
    };
    let is_refuted = match plan.kind {
        UseKind::Direct | UseKind::Unknown => true,
        // One direction was to be staged.
        UseKind::Half => row.sockets || !row.mixed,
        UseKind::Staged | UseKind::None => false,
    };
    if !is_refuted {
        return false;
    }
    *plan = match (program, row.sockets) {
        (_, true) => Use::none(format!("log: {} instead of the adapter", row.way)),
        ("NCCL", false) => Use::staged(format!("log: {} without GDRDMA", row.way)),
        _ => Use::staged(format!("log: {}", row.way)),
    };
    true
}

/// The contradiction, with the counts of each log and what explains it.
fn finding(reports: &[&LogReport]) -> Finding {
    let programs: Vec<&str> = reports.iter().map(|report| report.program).collect();
    let rows = || reports.iter().flat_map(|report| &report.not_direct).filter(|row| row.outweighs);
    let count = |sockets: bool| rows().filter(|row| row.sockets == sockets).map(|row| row.count).sum::<u64>();
    let counts = [(count(false), "staged through host memory"), (count(true), "over sockets")];
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    let counts: Vec<String> = counts.map(|(count, what)| format!("{count} {what}")).collect();
    let title =
        format!("the log of {} shows connections that are not direct: {}", list(&programs), list(&counts));
    let mut why = "It outweighs what the facts of this machine promise, and the plans in the table are those of the log.".to_owned();
    let mut reasons: Vec<&str> = rows().flat_map(|row| &row.why).map(String::as_str).collect();
    reasons.dedup();
    reasons.truncate(2);
    if !reasons.is_empty() {
        why = format!("{why} Reasons: {}.", reasons.join("; "));
    }
    let mut finding = Finding::new("log-not-direct", Severity::Warning, title).why(why);
    for report in reports {
        if let Some(row) = report.not_direct.iter().find(|row| row.outweighs) {
            finding = finding.seen(format!("log of {}", report.program), row.way.clone());
        }
    }
    let explained: Vec<&str> = reports.iter().flat_map(|report| report.findings.iter().copied()).collect();
    let cause = reports.iter().find_map(|report| report.causes.first());
    finding = match cause {
        _ if !explained.is_empty() => finding.fix(Fix::both().remark(format!("fix what explains it here: {}", list(&explained)))),
        Some(cause) => finding.fix(cause.fix.clone().after(format!("if {}", cause.cause))),
        None => finding.fix(Fix::both().remark("compare variables and versions of the job with those of this process; the report of the log below lists the connections")),
    };
    match programs.as_slice() {
        ["NCCL"] => finding.of_library("NCCL").stages(),
        ["UCX"] => finding.of_library("UCX").stages(),
        _ => finding.stages(),
    }
}
