//! The report as text.

use std::fmt::Write;

use super::figures::{Condition, PathReport};
use super::flow::NB0;
use crate::bench::numbers::figure;

pub(super) fn render(report: &PathReport) -> String {
    let mut out = format!("{}\n", report.machine);
    // Writing to a string does not fail.
    let _ = clean(&mut out, report);
    let _ = alone(&mut out, report);
    let _ = beside(&mut out, report);
    for note in &report.notes {
        let _ = writeln!(out, "{note}");
    }
    out
}

fn clean(out: &mut String, report: &PathReport) -> std::fmt::Result {
    writeln!(out, "\nthe emulated path without faults and rate:")?;
    writeln!(
        out,
        "   MTU    flow      GB/s    round trip us    p50       p99    emulator: CPU s/GB    late us"
    )?;
    for path in &report.clean {
        for one in &path.flows {
            writeln!(
                out,
                "  {:>4}  {:>6}  {:>8}  {:>21}  {:>8}  {:>20}  {:>9}",
                path.mtu,
                one.kind,
                figure(one.gbytes_per_s),
                figure(one.round_trip_p50_us),
                figure(one.round_trip_p99_us),
                figure(one.emulator_cpu_s_per_gb),
                figure(one.late_us),
            )?;
        }
    }
    Ok(())
}

fn alone(out: &mut String, report: &PathReport) -> std::fmt::Result {
    writeln!(out, "\none flow alone, median of {}:", report.passes)?;
    writeln!(
        out,
        "   MTU  delay us    loss  rate GB/s    flow      GB/s   of rate   nb0 of it    sent again"
    )?;
    for path in &report.conditions {
        let nb0 = path.of(NB0).unwrap_or(0.0);
        for one in &path.alone {
            let wrong = if one.wrong_bytes > 0 { "   WRONG BYTES" } else { "" };
            writeln!(
                out,
                "  {:>4}  {:>8}  {:>6}  {:>9}  {:>6}  {:>8}  {:>8.2}  {:>10}  {:>12}{wrong}",
                path.mtu,
                figure(path.delay_us),
                percent(path.loss),
                figure(path.rate_gbytes_per_s),
                one.kind,
                figure(one.gbytes_per_s),
                one.gbytes_per_s / path.rate_gbytes_per_s,
                if one.kind == NB0 { String::new() } else { times(nb0, one.gbytes_per_s) },
                one.retransmitted,
            )?;
        }
    }
    Ok(())
}

fn beside(out: &mut String, report: &PathReport) -> std::fmt::Result {
    if report.conditions.iter().all(|path| path.beside.is_empty()) {
        return Ok(());
    }
    writeln!(out, "\nflows of nb0 beside flows of TCP:")?;
    writeln!(out, "   MTU  delay us    loss      flows         nb0 GB/s    TCP GB/s   nb0 share    Jain")?;
    for path in &report.conditions {
        for one in &path.beside {
            writeln!(
                out,
                "  {:>4}  {:>8}  {:>6}  {:>17}  {:>8}  {:>10}  {:>10.2}  {:>6.2}",
                path.mtu,
                figure(path.delay_us),
                percent(path.loss),
                flows(one.nb0_gbytes_per_s.len(), one.tcp_gbytes_per_s.len(), &one.tcp),
                figure(one.nb0_gbytes_per_s.iter().sum()),
                figure(one.tcp_gbytes_per_s.iter().sum()),
                one.nb0_share,
                one.jain,
            )?;
        }
    }
    Ok(())
}

fn flows(nb0: usize, tcp: usize, algorithm: &str) -> String {
    format!("{nb0} nb0, {tcp} {algorithm}")
}

/// In percent, without trailing zeros.
fn percent(share: f64) -> String {
    format!("{} %", (share * 1e6).round() / 1e4)
}

fn times(nb0: f64, other: f64) -> String {
    if other > 0.0 { format!("{:.2} x", nb0 / other) } else { String::new() }
}

/// Whether every flow carried what was sent.
pub(super) fn is_verified(conditions: &[Condition]) -> bool {
    conditions.iter().flat_map(|path| &path.alone).all(|one| one.wrong_bytes == 0)
}

#[cfg(test)]
mod tests {
    use super::super::figures::{Alone, Beside, Clean, CleanFlow, SCHEMA};
    use super::*;

    fn report() -> PathReport {
        let alone = |kind: &str, speed: f64| Alone {
            kind: kind.into(),
            gbytes_per_s: speed,
            samples: vec![speed],
            retransmitted: 4711,
            wrong_bytes: 0,
        };
        let clean = |kind: &str, speed| CleanFlow {
            kind: kind.into(),
            gbytes_per_s: speed,
            round_trip_p50_us: 31.0,
            round_trip_p99_us: 64.2,
            emulator_cpu_s_per_gb: 1.5,
            late_us: 3.25,
        };
        PathReport {
            schema: SCHEMA.into(),
            version: "0.0.0".into(),
            started: "2026-01-01T00:00:00Z".into(),
            machine: "a machine".into(),
            passes: 3,
            clean: vec![Clean { mtu: 1500, flows: vec![clean("nb0", 0.15), clean("cubic", 0.2)] }],
            conditions: vec![Condition {
                path: "mtu=1500,rate=800000000,queue=262144,delay=100us,loss=0.01".into(),
                rate_gbytes_per_s: 0.1,
                loss: 0.01,
                delay_us: 100.0,
                mtu: 1500,
                alone: vec![alone("nb0", 0.09), alone("cubic", 0.03), alone("bbr", 0.0)],
                beside: vec![Beside::new("bbr".into(), vec![0.02, 0.03], vec![0.025, 0.025])],
            }],
            notes: vec!["no bbr: this kernel does not have it".into()],
        }
    }

    #[test]
    fn a_report_reads_well() {
        insta::assert_snapshot!(render(&report()));
    }

    #[test]
    fn shares_are_written_in_percent() {
        assert_eq!([0.0, 0.0001, 0.01, 0.05].map(percent), ["0 %", "0.01 %", "1 %", "5 %"]);
    }
}
