//! A run against what was to be expected of it: its share of the prediction, and why it is far below, if it is.

use nobounce_topology::finding::{Effect, Finding, Severity};
use nobounce_topology::predict::calibration::{Calibration, Series};
use nobounce_topology::predict::model::direct;
use nobounce_topology::predict::parts::{Memory, Op as Operation, Parts, Software, Spec};
use nobounce_topology::predict::soft::Soft;

use super::case::{Kind, Op, Wait};
use super::model::{CaseOutcome, Report, Way};
use super::size::Bytes;
use super::table::figure;

/// Below this share of the prediction something is wrong. Predictions from plain UDP are off by a third at the most on machines we know.
const FAR_BELOW: f64 = 0.6;

/// One figure and what was expected.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Share {
    pub(super) name: String,
    /// Expected against measured time: below 1 where it is slower than expected.
    pub(super) share: f64,
    pub(super) expected: String,
}

/// The figures by which a run is judged, against what is expected of them: by the constants of this machine if somebody kept them, else by
/// what plain UDP does here. Without either there is nothing to expect.
pub(super) fn shares(report: &Report, calibration: Option<&Calibration>) -> Vec<Share> {
    let judged = |one: &&CaseOutcome| {
        // Both predict what UDP does.
        let by_udp = one.link == "udp";
        let headline = matches!((one.kind, one.size), (Kind::Latency, 8) | (Kind::Bandwidth, 1_048_576));
        let plain = one.qps == 1 && one.wait == Wait::Cq && matches!(one.op, Op::Write | Op::Read | Op::Send);
        by_udp && headline && plain && matches!(one.way(), Way::Host | Way::Direct)
    };
    report.results.iter().filter(judged).filter_map(|one| share(report, one, calibration)).collect()
}

fn share(report: &Report, one: &CaseOutcome, calibration: Option<&Calibration>) -> Option<Share> {
    let measured = match one.kind {
        Kind::Latency => one.p50_us?,
        _ => super::model::float(one.size) / one.gbytes_per_s? / 1000.0,
    };
    let fitted = calibration.and_then(|found| found.fit(&series(one))).map(|fit| fit.microseconds(one.size));
    let expected = match fitted {
        Some(time) => time,
        None => from_raw(report, one)?,
    };
    let (name, figure) = match one.kind {
        Kind::Latency => ("latency", format!("{} us", figure(expected))),
        _ => ("bandwidth", format!("{} GB/s", figure(super::model::float(one.size) / expected / 1000.0))),
    };
    let way = if one.way() == Way::Host { "" } else { ", GPU memory" };
    let name = format!("{} {} {name}{way}", one.op, Bytes(one.size));
    Some(Share { name, share: expected / measured, expected: figure })
}

fn series(one: &CaseOutcome) -> Series {
    let memory =
        if one.way() == Way::Host { "host".to_owned() } else { format!("{} {}", one.memory, one.way()) };
    Series {
        op: one.op.to_string(),
        kind: one.kind.to_string(),
        memory,
        qps: one.qps,
        wait: one.wait.to_string(),
    }
}

/// Microseconds of one message, from what plain UDP does here.
fn from_raw(report: &Report, one: &CaseOutcome) -> Option<f64> {
    let raw = report.raw.as_ref().filter(|raw| raw.half_round_trip_us > 0.0 && raw.gbytes_per_s > 0.0)?;
    let spec = Spec {
        link: "loopback:1000".parse().ok(),
        memory: Some(Memory::Host),
        software: Some(Software::Nobounce),
        operation: Some(if one.op == Op::Read { Operation::Read } else { Operation::Write }),
        ..Spec::default()
    };
    let soft = Soft::of_raw(raw.half_round_trip_us, raw.gbytes_per_s);
    let found = direct(&Parts { soft, ..spec.resolve().ok()? }, one.size).ok()?;
    Some(match one.kind {
        Kind::Latency => found.microseconds.expected,
        _ => super::model::float(one.size) / found.gbytes_per_s.expected / 1000.0,
    })
}

/// What is printed; `doctor` is asked only where something is far below.
pub(super) fn lines(shares: &[Share], gpu: bool, doctor: impl FnOnce() -> Vec<Finding>) -> Vec<String> {
    let mut lines: Vec<String> = shares
        .iter()
        .map(|one| format!("{}: {} of the prediction ({})", one.name, figure(one.share), one.expected))
        .collect();
    let far: Vec<&Share> = shares.iter().filter(|one| one.share < FAR_BELOW).collect();
    if far.is_empty() {
        return lines;
    }
    let names: Vec<&str> = far.iter().map(|one| one.name.as_str()).collect();
    let reasons: Vec<String> = doctor()
        .iter()
        .filter(|finding| explains(finding, gpu))
        .map(|finding| format!("{} ({})", finding.title, finding.id))
        .collect();
    lines.push(if reasons.is_empty() {
        format!(
            "far below the prediction: {}; no finding of `nobounce doctor` explains it: is something else running?",
            names.join(", ")
        )
    } else {
        format!("far below the prediction: {}; explained by: {}", names.join(", "), reasons.join("; "))
    });
    lines
}

/// Whether a finding can make the software NIC slow: where it may run, and for GPU memory the window.
fn explains(finding: &Finding, gpu: bool) -> bool {
    let anywhere = ["cpu-binding"];
    let of_gpus = [
        "no-window",
        "bar1-small",
        "bar1-full",
        "bar1-unassigned",
        "gpu-link-idle",
        "pcie-degraded",
        "pcie-slot",
    ];
    let slows = finding.effect != Effect::Nothing && finding.library.is_none();
    let matters = finding.severity >= Severity::Warning;
    anywhere.contains(&finding.id) || (gpu && matters && (slows || of_gpus.contains(&finding.id)))
}

#[cfg(test)]
mod tests {
    use super::super::flow_tests::sample_report;
    use super::*;

    fn finding() -> Finding {
        Finding::new("cpu-binding", Severity::Warning, "one CPU for both ends")
    }

    #[test]
    fn a_run_is_set_against_what_plain_udp_promises() {
        let report = sample_report();
        let shares = shares(&report, None);
        assert!(shares.iter().any(|one| one.name == "write 8 B latency"), "{shares:?}");
        assert!(shares.iter().any(|one| one.name == "write 1 MiB bandwidth"), "{shares:?}");
        assert!(shares.iter().all(|one| one.share.is_finite() && one.share > 0.0));
        let without = Report { raw: None, ..report };
        assert_eq!(super::shares(&without, None), []);
    }

    #[test]
    fn what_is_far_below_is_explained_and_nothing_else_asks() {
        let share =
            |share| Share { name: "write 1 MiB bandwidth".to_owned(), share, expected: "4 GB/s".to_owned() };
        let fine = lines(&[share(0.9)], false, || panic!("nobody needs the doctor"));
        assert_eq!(fine, ["write 1 MiB bandwidth: 0.90 of the prediction (4 GB/s)"]);
        let slow = lines(&[share(0.3)], false, || vec![finding()]);
        assert!(slow[1].contains("explained by: one CPU for both ends (cpu-binding)"), "{slow:?}");
        let riddle = lines(&[share(0.3)], false, Vec::new);
        assert!(riddle[1].contains("something else running"), "{riddle:?}");
    }
}
