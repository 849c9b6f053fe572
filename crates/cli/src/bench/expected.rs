//! A run against its expectation: its share of the prediction, and the cause if it is far below.

use nobounce_diagnose::finding::{Effect, Finding, Severity};
use nobounce_predict::calibration::{Calibration, Series, is_between_machines};
use nobounce_predict::machine::at_its_best;
use nobounce_predict::model::direct;
use nobounce_predict::parts::{Memory, Op as Operation, Parts, Software, Spec};
use nobounce_predict::soft::Soft;
use nobounce_topology::facts::Facts;

use super::case::{CaseKind, Op, Wait};
use super::model::{BenchReport, CaseOutcome, MemoryPath};
use super::numbers::figure;
use crate::size::Bytes;

/// A lower share of the prediction indicates a fault. Predictions from plain UDP are off by a third
/// at most on known machines.
const FAR_BELOW: f64 = 0.6;

/// One figure and what was expected.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Share {
    pub(super) name: String,
    /// Expected against measured time: below 1 where it is slower than expected.
    pub(super) share: f64,
    pub(super) expected: String,
}

/// What a run was on.
#[derive(Debug)]
pub(super) enum On {
    /// The software NIC.
    Soft,
    /// The system's adapter of this name.
    Adapter {
        /// Without the port.
        name: String,
        /// How many like it work together.
        rails: u32,
        /// Both ends on it.
        looped: bool,
        /// What it is plugged into, as far as it could be read.
        facts: Option<Box<Facts>>,
    },
}

/// The figures that rate a run, each against its expectation. The expectation comes from this
/// machine's calibration if one is stored. Otherwise it comes from plain UDP on this machine, or
/// from the adapter's limits. Without any of these the list is empty.
pub(super) fn shares(report: &BenchReport, calibration: Option<&Calibration>, on: &On) -> Vec<Share> {
    let judged = |one: &&CaseOutcome| {
        let headline =
            matches!((one.kind, one.size), (CaseKind::Latency, 8) | (CaseKind::Bandwidth, 1_048_576));
        let plain = one.qps == 1 && one.wait == Wait::Cq && matches!(one.op, Op::Write | Op::Read | Op::Send);
        headline && plain && matches!(one.memory_path(), MemoryPath::Host | MemoryPath::Direct)
    };
    let judged = report.results.iter().filter(judged);
    judged.filter_map(|one| share(report, one, calibration, on)).collect()
}

fn share(
    report: &BenchReport,
    one: &CaseOutcome,
    calibration: Option<&Calibration>,
    on: &On,
) -> Option<Share> {
    let measured = match one.kind {
        CaseKind::Latency => one.p50_us?,
        _ => super::numbers::float(one.size) / one.gbytes_per_s? / 1000.0,
    };
    let fitted =
        calibration.and_then(|found| found.fit(&series(report, one))).map(|fit| fit.microseconds(one.size));
    let expected = match (fitted, on) {
        (Some(time), _) => time,
        // Plain UDP says nothing of shared memory.
        (None, On::Soft) if one.link == "udp" => by_model(one, &from_raw(report, one)?)?,
        (None, On::Soft) => return None,
        (None, On::Adapter { name, rails, facts, .. }) => {
            let parts = from_facts(facts.as_deref()?, name, one)?;
            by_model(one, &Parts { rails: *rails, ..parts })?
        }
    };
    let (name, figure) = match one.kind {
        CaseKind::Latency => ("latency", format!("{} us", figure(expected))),
        _ => ("bandwidth", format!("{} GB/s", figure(super::numbers::float(one.size) / expected / 1000.0))),
    };
    let path = if one.memory_path() == MemoryPath::Host { "" } else { ", GPU memory" };
    let over = if one.link == "shm" { ", shared memory" } else { "" };
    let name = format!("{} {} {name}{over}{path}", one.op, Bytes(one.size));
    Some(Share { name, share: expected / measured, expected: figure })
}

fn series(report: &BenchReport, one: &CaseOutcome) -> Series {
    let memory = if one.memory_path() == MemoryPath::Host {
        "host".to_owned()
    } else {
        format!("{} {}", one.memory, one.memory_path())
    };
    Series {
        op: one.op.to_string(),
        kind: one.kind.to_string(),
        memory,
        link: one.link.clone(),
        qps: one.qps,
        wait: one.wait.to_string(),
        mtu: one.mtu,
        busy: report.busy.unwrap_or(0),
        between_machines: is_between_machines(&report.command),
    }
}

fn memory(one: &CaseOutcome) -> Memory {
    if one.memory_path() == MemoryPath::Host { Memory::Host } else { Memory::Gpu }
}

fn operation(one: &CaseOutcome) -> Operation {
    if one.op == Op::Read { Operation::Read } else { Operation::Write }
}

/// The software NIC, from what plain UDP does here.
fn from_raw(report: &BenchReport, one: &CaseOutcome) -> Option<Parts> {
    let raw = report.raw.as_ref().filter(|raw| raw.half_round_trip_us > 0.0 && raw.gbytes_per_s > 0.0)?;
    // Of a busy machine, nothing.
    if raw.latency_doubt().or(raw.bandwidth_doubt()).is_some() {
        return None;
    }
    let memory = memory(one);
    let spec = Spec {
        link: "loopback:1000".parse().ok(),
        memory: Some(memory),
        // Nothing passes between a GPU's slot and an adapter's.
        coherent: (memory == Memory::Gpu).then_some(true),
        software: Some(Software::Nobounce),
        operation: Some(operation(one)),
        ..Spec::default()
    };
    let soft = Soft::of_raw(raw.half_round_trip_us, raw.gbytes_per_s);
    Some(Parts { soft, ..spec.resolve().ok()? })
}

/// An adapter, from what it is plugged into.
fn from_facts(facts: &Facts, nic: &str, one: &CaseOutcome) -> Option<Parts> {
    let spec = at_its_best(facts, nic, memory(one))?;
    let queue_pairs = Some(one.qps);
    Spec { queue_pairs, operation: Some(operation(one)), ..spec }.resolve().ok()
}

/// Microseconds of one message, or of its share of a stream.
fn by_model(one: &CaseOutcome, parts: &Parts) -> Option<f64> {
    let found = direct(parts, one.size).ok()?;
    Some(match one.kind {
        CaseKind::Latency => found.microseconds.expected,
        _ => super::numbers::float(one.size) / found.gbytes_per_s.expected / 1000.0,
    })
}

/// The printed lines; `doctor` runs only if a figure is far below.
pub(super) fn lines(
    shares: &[Share],
    on: &On,
    gpu: bool,
    doctor: impl FnOnce() -> Vec<Finding>,
) -> Vec<String> {
    let mut lines: Vec<String> = shares
        .iter()
        .map(|one| format!("{}: {} of the prediction ({})", one.name, figure(one.share), one.expected))
        .collect();
    lines.extend(remark(shares, on));
    let far: Vec<&Share> = shares.iter().filter(|one| one.share < FAR_BELOW).collect();
    if far.is_empty() {
        return lines;
    }
    let names: Vec<&str> = far.iter().map(|one| one.name.as_str()).collect();
    let reasons: Vec<String> = doctor()
        .iter()
        .filter(|finding| explains(finding, on, gpu))
        .map(|finding| format!("{} ({})", finding.title, finding.id))
        .collect();
    lines.push(if reasons.is_empty() {
        format!(
            "far below the prediction: {}; no finding of `nobounce doctor` explains it. Check for other load on the machine",
            names.join(", ")
        )
    } else {
        format!("far below the prediction: {}; explained by: {}", names.join(", "), reasons.join("; "))
    });
    lines
}

/// What is to be known about the prediction of an adapter.
fn remark(shares: &[Share], on: &On) -> Option<String> {
    match on {
        On::Adapter { name, looped: true, .. } if !shares.is_empty() => Some(format!(
            "both ends are on {name}, which carries every byte twice; the prediction assumes two machines"
        )),
        On::Adapter { name, .. } if shares.is_empty() => Some(format!(
            "no prediction for {name}: its hardware is unknown, or it is a software device of the kernel. Fit constants to a run \
             with nobounce predict --calibrate"
        )),
        _ => None,
    }
}

/// Whether a finding can make a run slow.
fn explains(finding: &Finding, on: &On, gpu: bool) -> bool {
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
    anywhere.contains(&finding.id)
        || match on {
            // Where it may run, and for GPU memory the window.
            On::Soft => gpu && matters && (slows || of_gpus.contains(&finding.id)),
            // Findings about this adapter and its path, and about GPUs where they take part.
            On::Adapter { name, facts, .. } => {
                let nic = facts.as_deref().and_then(|facts| facts.nics.iter().find(|nic| &nic.name == name));
                let address = nic.and_then(|nic| nic.address.as_ref());
                let ours = |device: &String| device == name || Some(device) == address;
                let speed = [
                    "pcie-degraded",
                    "pcie-slot",
                    "pcie-errors",
                    "nic-behind-slot",
                    "max-payload",
                    "max-read-request",
                    "mtu-small",
                    "mtu-differs",
                    "port-rate",
                    "roce-loss",
                    "roce-flow-control",
                    "shared-nic",
                ];
                let of_it = finding.devices.iter().any(ours);
                let of_all = finding.devices.is_empty();
                (of_it || of_all) && (speed.contains(&finding.id) || (gpu && matters && slows))
            }
        }
}

#[cfg(test)]
mod tests {
    use nobounce_diagnose::diagnose;
    use nobounce_topology::machines;

    use super::super::flow_tests::sample_report;
    use super::*;

    fn finding() -> Finding {
        Finding::new("cpu-binding", Severity::Warning, "one CPU for both ends")
    }

    #[test]
    fn a_run_is_set_against_what_plain_udp_promises() {
        let report = sample_report();
        let shares = shares(&report, None, &On::Soft);
        assert!(shares.iter().any(|one| one.name == "write 8 B latency"), "{shares:?}");
        assert!(shares.iter().any(|one| one.name == "write 1 MiB bandwidth"), "{shares:?}");
        assert!(shares.iter().all(|one| one.share.is_finite() && one.share > 0.0));
        let mut busy = report.clone();
        busy.raw.as_mut().unwrap().ping_cpu_samples = vec![0.4];
        assert_eq!(super::shares(&busy, None, &On::Soft), [], "plain UDP had no CPU");
        let without = BenchReport { raw: None, ..report };
        assert_eq!(super::shares(&without, None, &On::Soft), []);
    }

    #[test]
    fn what_is_far_below_is_explained_and_nothing_else_asks() {
        let share =
            |share| Share { name: "write 1 MiB bandwidth".to_owned(), share, expected: "4 GB/s".to_owned() };
        let fine = lines(&[share(0.9)], &On::Soft, false, || panic!("the doctor must not run"));
        assert_eq!(fine, ["write 1 MiB bandwidth: 0.90 of the prediction (4 GB/s)"]);
        let slow = lines(&[share(0.3)], &On::Soft, false, || vec![finding()]);
        assert!(slow[1].contains("explained by: one CPU for both ends (cpu-binding)"), "{slow:?}");
        let riddle = lines(&[share(0.3)], &On::Soft, false, Vec::new);
        assert!(riddle[1].contains("other load"), "{riddle:?}");
    }

    /// A run on an adapter of a machine that we know: as fast as it should be, and with a slot that
    /// lost lanes.
    #[test]
    fn an_adapter_is_held_against_its_parts_and_its_findings() {
        let mut facts = machines::machine("dgx-h100").unwrap();
        let mut report = BenchReport { raw: None, ..sample_report() };
        report.results.retain(|one| (one.kind, one.size, one.qps) == (CaseKind::Bandwidth, 1 << 20, 1));
        let set = |report: &mut BenchReport, rate: f64| {
            for one in &mut report.results {
                one.gbytes_per_s = Some(rate);
            }
        };
        let on = |facts: &Facts| On::Adapter {
            name: "mlx5_0".to_owned(),
            rails: 1,
            looped: false,
            facts: Some(Box::new(facts.clone())),
        };
        set(&mut report, 46.0);
        let fine = shares(&report, None, &on(&facts));
        assert!(!fine.is_empty() && fine.iter().all(|one| (0.9..1.1).contains(&one.share)), "{fine:?}");
        assert!(lines(&fine, &on(&facts), false, || panic!("the doctor must not run")).len() == fine.len());

        let address = facts.nics.iter().find(|nic| nic.name == "mlx5_0").and_then(|nic| nic.address.clone());
        for device in facts.pci.iter_mut().filter(|device| Some(&device.address) == address.as_ref()) {
            device.link.as_mut().unwrap().width = 4;
        }
        set(&mut report, 12.0);
        let slow = shares(&report, None, &on(&facts));
        assert!(slow.iter().all(|one| one.share < 0.3), "{slow:?}");
        let said = lines(&slow, &on(&facts), false, || diagnose(&facts).findings).pop().unwrap();
        assert!(said.contains("explained by") && said.contains("(pcie-degraded)"), "{said}");
        let other = On::Adapter {
            name: "mlx5_1".to_owned(),
            rails: 1,
            looped: false,
            facts: Some(Box::new(facts.clone())),
        };
        let said = lines(&slow, &other, false, || diagnose(&facts).findings).pop().unwrap();
        assert!(!said.contains("pcie-degraded"), "it is another adapter's: {said}");
        let software =
            On::Adapter { name: "rxe0".to_owned(), rails: 1, looped: true, facts: Some(Box::new(facts)) };
        let said = lines(&shares(&report, None, &software), &software, false, Vec::new);
        assert!(said.len() == 1 && said[0].contains("no prediction for rxe0"), "{said:?}");
    }

    #[test]
    fn gpu_memory_has_a_prediction_of_its_own() {
        let mut report = sample_report();
        let expected = |report: &BenchReport| shares(report, None, &On::Soft)[0].share;
        report.results.retain(|one| (one.kind, one.size) == (CaseKind::Latency, 8));
        let host = expected(&report);
        for one in &mut report.results {
            one.memory = "gpu".to_owned();
        }
        assert!(expected(&report) > host * 1.1, "more time is expected of GPU memory");
    }
}
