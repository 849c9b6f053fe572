//! The report as text.

use std::fmt::Write;

use super::figures::{Cached, LinkFigures, Report};
use crate::bench::numbers::figure;
use crate::bench::numbers::float;
use crate::bench::ranks::{link_name, size};

pub(super) fn render(report: &Report) -> String {
    let mut out = format!("{}\nfiles into {}\n", report.machine, report.memory);
    if let Some(first) = report.links.first() {
        // Writing to a string does not fail.
        let _ = local(&mut out, first);
    }
    for link in &report.links {
        let _ = remote(&mut out, link);
    }
    out
}

fn local(out: &mut String, link: &LinkFigures) -> std::fmt::Result {
    let has_others = link.cached.iter().any(|one| one.memcpy_us.is_some());
    writeln!(out, "\nthis machine, from the page cache")?;
    write!(out, "  {:>8} {:>10} {:>8}  {:<14}", "bytes", "us", "GB/s", "path")?;
    writeln!(
        out,
        "{}",
        if has_others { "  pread + cudaMemcpy us (ratio)  double-buffering us (ratio)" } else { "" }
    )?;
    for one in &link.cached {
        let Cached { bytes, read_us, path, memcpy_us, double_buffered_us } = one;
        let speed = figure(float(*bytes) / read_us / 1e3);
        write!(out, "  {:>8} {:>10} {speed:>8}  {path:<14}", size(*bytes), figure(*read_us))?;
        let ratio = |other: f64| format!("{} ({:.2})", figure(other), read_us / other);
        if let (Some(memcpy), Some(double)) = (memcpy_us, double_buffered_us) {
            write!(out, " {:>31} {:>28}", ratio(*memcpy), ratio(*double))?;
        }
        writeln!(out)?;
    }
    match &link.cold {
        Some(cold) => {
            let (read, disk) = (cold.read_gbytes_per_s, cold.disk_gbytes_per_s);
            let (speed, of_disk) = (figure(read), read / disk);
            writeln!(
                out,
                "not in the page cache: {speed} GB/s; four threads with O_DIRECT: {} GB/s ({of_disk:.2})",
                figure(disk)
            )
        }
        None => writeln!(out, "not in the page cache: not measured, the file system keeps the pages"),
    }
}

fn remote(out: &mut String, link: &LinkFigures) -> std::fmt::Result {
    writeln!(out, "\nfrom a file server, over {}", link_name(&link.link))?;
    writeln!(out, "  {:>14} {:>10} {:>8}  {:>22}", "bytes", "us", "GB/s", "of a WRITE from memory")?;
    for one in &link.remote {
        let speed = figure(float(one.ranges * one.bytes) / one.read_us / 1e3);
        let bytes = match one.ranges {
            1 => size(one.bytes),
            ranges => format!("{ranges} x {}", size(one.bytes)),
        };
        let (us, of_write) = (figure(one.read_us), one.write_us / one.read_us);
        writeln!(out, "  {bytes:>14} {us:>10} {speed:>8}  {of_write:>22.2}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::figures::{Cold, Remote, SCHEMA};
    use super::*;

    #[test]
    fn a_report_reads_well() {
        let cached = |bytes, others: bool| Cached {
            bytes,
            read_us: 1.5,
            path: if others { "window" } else { "cpu" }.to_owned(),
            memcpy_us: others.then_some(9.0),
            double_buffered_us: others.then_some(12.5),
        };
        let link = |name: &str, gpu: bool| LinkFigures {
            link: name.to_owned(),
            cached: vec![cached(4096, gpu), cached(1 << 20, gpu)],
            cold: gpu.then_some(Cold { read_gbytes_per_s: 1.9, disk_gbytes_per_s: 2.0 }),
            remote: vec![
                Remote { bytes: 1 << 20, ranges: 1, read_us: 120.0, write_us: 110.0 },
                Remote { bytes: 64 << 10, ranges: 256, read_us: 1700.0, write_us: 1500.0 },
            ],
        };
        let report = |gpu: bool| Report {
            schema: SCHEMA.to_owned(),
            version: "0.0.0".to_owned(),
            started: "2026-01-01T00:00:00Z".to_owned(),
            machine: "a machine".to_owned(),
            memory: if gpu { "memory of GPU 0" } else { "host memory" }.to_owned(),
            links: vec![link("auto", gpu), link("udp", gpu)],
        };
        insta::assert_snapshot!(format!("{}\n----\n{}", render(&report(true)), render(&report(false))));
    }
}
