//! The report of a simulation, as it is printed.

use std::fmt::Write as _;

use nobounce_fabric::{Algorithm, Report};

use crate::size::decimal;

/// A few lines, ready to print.
pub(super) fn of(report: &Report) -> String {
    let mut text = format!("{}\n\n", title(report));
    let share = 100.0 * report.goodput;
    let mut line = |name: &str, rest: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<20}{rest}");
    };
    let end = match report.complete {
        Some(true) => ", all done",
        Some(false) => ", and the traffic did not end",
        None => "",
    };
    line("time", format!("{} us{end}", rounded(report.time_us)));
    line("goodput", format!("{} Gb/s, {share:.1} % of the receivers' links", rounded(report.goodput_gbits)));
    let [low, high] = report.spread.map(|share| format!("{share:.2}"));
    line("fairness", format!("Jain {:.3}; lowest {low}, highest {high} of the mean", report.jain));
    line("latency us", "       p50       p99     p99.9       max     count".to_owned());
    for class in &report.latency_us {
        let us = &class.us;
        let figures = [us.p50, us.p99, us.p999, us.max].map(|value| format!("{:>10}", rounded(value)));
        line(&format!("  {}", class.class), format!("{}{:>10}", figures.concat(), us.count));
    }
    let (queue, deepest) = (&report.queue_bytes, &report.deepest_queue);
    let bytes = decimal;
    line("queues", format!("mean {}, p99 {}", bytes(queue.mean), bytes(queue.p99)));
    line("deepest", format!("{}, {}", bytes(float(deepest.bytes)), deepest.link));
    if let Some((mean, highest)) = report.fabric_load {
        line("spine links", format!("{:.1} % busy, the busiest {:.1} %", 100.0 * mean, 100.0 * highest));
    }
    let packets = &report.packets;
    line(
        "packets",
        format!(
            "{} sent, {} marked, {} dropped, {} lost on links, {} CNPs",
            packets.sent, packets.marked, packets.dropped, packets.lost, packets.notifications
        ),
    );
    line(
        "repairs",
        format!(
            "{} gaps, {} sent again, {} timeouts, {} probes; {} messages failed",
            packets.gaps, packets.retransmitted, packets.timeouts, packets.probes, packets.failed
        ),
    );
    text
}

/// What was simulated, in one line.
pub(super) fn title(report: &Report) -> String {
    let (fabric, transport) = (&report.config.fabric, &report.config.transport);
    let shape = if fabric.spines == 0 {
        "one switch".to_owned()
    } else {
        format!("{} leaves, {} spines", fabric.leaves(), fabric.spines)
    };
    let control = match transport.control {
        Algorithm::Swift => "swift",
        Algorithm::Dcqcn | Algorithm::DcqcnWith(_) => "dcqcn",
        Algorithm::Fixed(_) => "fixed",
        Algorithm::Aimd => "aimd",
    };
    let ecn = if fabric.switch.ecn {
        format!("ECN {} to {}", decimal(float(fabric.switch.ecn_min)), decimal(float(fabric.switch.ecn_max)))
    } else {
        "no ECN".to_owned()
    };
    format!(
        "{}: {} nodes at {} Gb/s, {shape}, MTU {}, {control}, {ecn}, seed {}",
        report.workload.name(),
        fabric.hosts,
        fabric.host_gbits,
        transport.mtu,
        report.config.seed
    )
}

/// Three digits where it matters, none after the point above a hundred.
pub(super) fn rounded(value: f64) -> String {
    if value >= 100.0 {
        format!("{value:.0}")
    } else if value >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
pub(super) const fn float(value: u64) -> f64 {
    value as f64
}
