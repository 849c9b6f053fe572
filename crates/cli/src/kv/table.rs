//! The report as text.

use std::fmt::Write;

use super::figures::{KvLinkFigures, KvReport};
use crate::bench::numbers::figure;
use crate::bench::ranks::{link_name, size};

pub(super) fn render(report: &KvReport) -> String {
    let mut out = format!("{}\ntwo processes, {}\n", report.machine, report.memory);
    for link in &report.links {
        // Writing to a string does not fail.
        let _ = section(&mut out, link);
    }
    out
}

fn section(out: &mut String, link: &KvLinkFigures) -> std::fmt::Result {
    writeln!(out, "\nover {}; pages: {}", link_name(&link.link), link.paths)?;
    writeln!(out, "connect and write the first byte: {} ms", figure(link.connect_ms))?;
    writeln!(
        out,
        "\n  pages of random tables, GB/s     write      read    contiguous write, read    of it    call us"
    )?;
    for one in &link.lists {
        let (write_of, read_of) = (
            one.write_gbytes_per_s / one.contiguous_write_gbytes_per_s,
            one.read_gbytes_per_s / one.contiguous_read_gbytes_per_s,
        );
        let [write, read, whole_write, whole_read] = [
            one.write_gbytes_per_s,
            one.read_gbytes_per_s,
            one.contiguous_write_gbytes_per_s,
            one.contiguous_read_gbytes_per_s,
        ]
        .map(figure);
        writeln!(
            out,
            "  {:>12} x {:>8} {write:>15} {read:>9} {whole_write:>19}, {whole_read:>4} {write_of:>7.2}, {read_of:.2} {:>7}",
            one.pages,
            size(one.page_bytes),
            figure(one.submit_us),
        )?;
    }
    writeln!(out, "\n  requests at once, with a tag each     GB/s    p50 ms    p99 ms")?;
    for one in &link.requests {
        let [speed, p50, p99] = [one.gbytes_per_s, one.p50_ms, one.p99_ms].map(figure);
        writeln!(
            out,
            "  {:>3} x {:>7}, pages of {:>2} tokens {speed:>12} {p50:>9} {p99:>9}",
            one.at_once,
            size(one.request_bytes),
            one.page_tokens
        )?;
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::figures::{List, Requests, SCHEMA};
    use super::*;

    pub(crate) fn report() -> KvReport {
        let figures = |link: &str, factor: f64| KvLinkFigures {
            link: link.into(),
            paths: "cpu".into(),
            connect_ms: 1.5,
            lists: [(4096, 4096), (65_536, 1024)]
                .map(|(page_bytes, pages)| List {
                    page_bytes,
                    pages,
                    write_gbytes_per_s: 5.0 / factor,
                    read_gbytes_per_s: 4.0 / factor,
                    contiguous_write_gbytes_per_s: 6.25 / factor,
                    contiguous_read_gbytes_per_s: 5.0 / factor,
                    submit_us: 120.0,
                })
                .into(),
            requests: [1, 64]
                .map(|at_once| Requests {
                    at_once,
                    page_tokens: 16,
                    page_bytes: 16_384,
                    request_bytes: 16 << 20,
                    gbytes_per_s: 5.0 / factor,
                    p50_ms: 3.2 * factor,
                    p99_ms: 4.5 * factor,
                })
                .into(),
        };
        KvReport {
            schema: SCHEMA.into(),
            version: "0.0.0".into(),
            started: "2026-01-01T00:00:00Z".into(),
            machine: "a machine".into(),
            memory: "host memory".into(),
            links: vec![figures("auto", 1.0), figures("udp", 2.0)],
        }
    }

    #[test]
    fn a_report_reads_well() {
        insta::assert_snapshot!(render(&report()));
    }
}
