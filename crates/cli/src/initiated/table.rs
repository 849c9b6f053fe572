//! The report as text.

use std::fmt::Write;

use super::figures::{InitiatedLinkFigures, InitiatedReport, Rate};
use crate::bench::numbers::figure;
use crate::bench::ranks::{link_name, size};

pub(super) fn render(report: &InitiatedReport) -> String {
    let mut out = format!("{}\ntwo processes, one GPU: {}\n", report.machine, report.sharing);
    for link in &report.links {
        // Writing to a string does not fail.
        let _ = section(&mut out, link);
    }
    out
}

fn section(out: &mut String, link: &InitiatedLinkFigures) -> std::fmt::Result {
    writeln!(out, "\nover {}; symmetric heap: {}", link_name(&link.link), link.paths)?;
    writeln!(out, "\n  put with signal, kernel to kernel   p50 us   mean us   p99 us   (half round trip)")?;
    for one in &link.latency {
        let [p50, mean, p99] = [one.p50_us, one.mean_us, one.p99_us].map(figure);
        writeln!(out, "  {:>33} {p50:>8} {mean:>9} {p99:>8}", size(one.bytes))?;
    }
    writeln!(
        out,
        "\n  stream, GB/s                           put       get   host-posted WRITE   put, get of it"
    )?;
    for one in &link.bandwidth {
        let [put, get, host] = [one.put_gbytes_per_s, one.get_gbytes_per_s, one.host_write_gbytes_per_s];
        let [put_of, get_of] = [put / host, get / host];
        let [put, get, host] = [put, get, host].map(figure);
        writeln!(
            out,
            "  {:>33} {put:>9} {get:>9} {host:>19}       {put_of:.2}, {get_of:.2}",
            size(one.bytes)
        )?;
    }
    rates(out, "values of 8 B", &link.rate)?;
    rates(out, "signals", &link.signal_rate)?;
    let idle = &link.idle;
    writeln!(
        out,
        "\n  idle kernels: {:.2} % of a CPU; first put after a pause of 1 s: at most {} us in {} tries",
        idle.cpu_percent,
        figure(idle.first_put_us),
        idle.pauses
    )
}

fn rates(out: &mut String, what: &str, rates: &[Rate]) -> std::fmt::Result {
    writeln!(out, "\n  {what}, millions/s")?;
    for one in rates {
        let plural = if one.channels == 1 { "channel" } else { "channels" };
        writeln!(out, "  {:>24} {plural:<8} {:>9}", one.channels, figure(one.million_per_s))?;
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::figures::{Bandwidth, Idle, Latency, SCHEMA};
    use super::*;

    pub(crate) fn report() -> InitiatedReport {
        let figures = |link: &str, factor: f64| InitiatedLinkFigures {
            link: link.into(),
            gpu: "a GPU".into(),
            paths: "in direct (window), out direct (copy-engine)".into(),
            latency: [8, 4096, 1 << 20]
                .map(|bytes| Latency {
                    bytes,
                    p50_us: 4.5 * factor,
                    mean_us: 4.75 * factor,
                    p99_us: 9.0 * factor,
                })
                .into(),
            rate: [1, 4].map(|channels| Rate { channels, million_per_s: 0.9 * f64::from(channels) }).into(),
            signal_rate: [1, 4]
                .map(|channels| Rate { channels, million_per_s: 0.5 * f64::from(channels) })
                .into(),
            bandwidth: [64 << 10, 1 << 20]
                .map(|bytes| Bandwidth {
                    bytes,
                    put_gbytes_per_s: 12.0 / factor,
                    get_gbytes_per_s: 9.0 / factor,
                    host_write_gbytes_per_s: 12.5 / factor,
                })
                .into(),
            idle: Idle { cpu_percent: 0.7, first_put_us: 1500.0, pauses: 3 },
        };
        InitiatedReport {
            schema: SCHEMA.into(),
            version: "0.0.0".into(),
            started: "2026-01-01T00:00:00Z".into(),
            machine: "a machine, a GPU".into(),
            sharing: "MPS was started for this run".into(),
            links: vec![figures("auto", 1.0), figures("udp", 2.0)],
        }
    }

    #[test]
    fn a_report_reads_well() {
        insta::assert_snapshot!(render(&report()));
    }
}
