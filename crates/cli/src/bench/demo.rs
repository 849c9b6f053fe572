//! `nobounce demo`: a first look at this machine in under a minute, with a summary for readers who
//! do not know the bench.

use std::fmt::Write as _;
use std::io::Write as _;

use super::args::BenchArgs;
use super::case::{CaseKind, Link, Memory, Op};
use super::model::{BenchReport, CaseOutcome, MemoryPath};
use super::numbers::figure;
use super::{Verdict, explain_device, gpu_choice, measure, plan, with_world};
use crate::size::Sizes;

const TITLE: &str = "WRITE between two processes of this machine";
const SMALL: u64 = 8;
const LARGE: u64 = 1 << 20;

/// Measure a small and a large WRITE on this machine, and compare with TCP.
///
/// Starts a second process on this machine and writes to its memory: 8 B for latency, 1 MiB for
/// bandwidth, over UDP and over shared memory. With a GPU, measures its memory both direct and
/// staged through host buffers. Takes ten seconds, with a GPU half a minute.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct DemoArgs {}

/// The command.
pub(crate) fn main(_args: &DemoArgs) -> anyhow::Result<Verdict> {
    let has_gpu = matches!(nobounce::memory::gpu::Gpu::by_ordinal(0), Ok(Some(_)));
    let args = BenchArgs {
        op: vec![Op::Write],
        kind: vec![CaseKind::Latency, CaseKind::Bandwidth],
        size: vec![Sizes(vec![SMALL, LARGE])],
        link: vec![Link::Udp.name().to_owned(), Link::Shm.name().to_owned()],
        busy: Some(0),
        memory: has_gpu.then_some(Memory::Gpu),
        passes: (!has_gpu).then_some(3),
        ..BenchArgs::default()
    };
    let mut plan = plan::plan(&args, None)?;
    plan.show_over(Link::Shm);
    let shown = |kind: CaseKind, size: u64| {
        (kind == CaseKind::Latency && size == SMALL) || (kind == CaseKind::Bandwidth && size == LARGE)
    };
    plan.cases.retain(|case| shown(case.kind, case.size));
    let chosen = explain_device::resolve(&mut plan)?;
    gpu_choice::choose(0);
    let report = with_world(&mut plan, chosen, |plan, world| {
        let report = measure(plan, world)?;
        world.progress.finish();
        Ok(report)
    })?;
    std::io::stdout().write_all(render(&report).as_bytes())?;
    let verified = report.results.iter().all(|one| one.verified);
    Ok(if verified { Verdict::Fine } else { Verdict::Failed })
}

/// One row: a path, its small and its large WRITE.
struct DemoRow<'a> {
    name: String,
    small: Option<&'a CaseOutcome>,
    large: Option<&'a CaseOutcome>,
}

fn rows(report: &BenchReport) -> Vec<DemoRow<'_>> {
    let find = |path: MemoryPath, link: &str, kind: CaseKind| {
        report.results.iter().find(|one| one.memory_path() == path && one.link == link && one.kind == kind)
    };
    let mut rows = Vec::new();
    for (path, memory) in [
        (MemoryPath::Host, "host memory"),
        (MemoryPath::Direct, "GPU memory, direct"),
        (MemoryPath::Staged, "GPU memory, staged through host buffers"),
        (MemoryPath::Naive, "GPU memory, cudaMemcpy around the transfer"),
    ] {
        for (link, carried) in [("udp", "UDP"), ("shm", "shared memory")] {
            let (small, large) = (find(path, link, CaseKind::Latency), find(path, link, CaseKind::Bandwidth));
            if small.is_some() || large.is_some() {
                rows.push(DemoRow { name: format!("{carried}, {memory}"), small, large });
            }
        }
    }
    rows
}

/// The summary.
fn render(report: &BenchReport) -> String {
    let mut text = String::new();
    let rows = rows(report);
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(TITLE.len());
    let us = |one: Option<f64>| one.map_or_else(|| "-".to_owned(), |one| format!("{} us", figure(one)));
    let gb = |one: Option<f64>| one.map_or_else(|| "-".to_owned(), |one| format!("{} GB/s", figure(one)));
    let mut line = |name: &str, small: &str, large: &str, bytes: &str| {
        let row = format!("  {name:width$}  {small:>10}  {large:>11}  {bytes:>8}");
        let _ = writeln!(text, "{}", row.trim_end());
    };
    line(TITLE, "8 B", "1 MiB", "bytes");
    if let Some(tcp) = &report.tcp {
        line("TCP, host memory", &us(Some(tcp.half_round_trip_us)), &gb(Some(tcp.gbytes_per_s)), "");
    }
    for row in &rows {
        let verified = [row.small, row.large].into_iter().flatten().all(|one| one.verified);
        line(
            &row.name,
            &us(row.small.and_then(|one| one.p50_us)),
            &gb(row.large.and_then(|one| one.gbytes_per_s)),
            if verified { "verified" } else { "WRONG" },
        );
    }
    let _ = write!(text, "\n{}", explanation(report));
    text
}

fn explanation(report: &BenchReport) -> String {
    let mut text = String::from(
        "8 B: median one-way latency. 1 MiB: throughput of one stream of writes. Two machines would use\nUDP; processes of one machine use shared memory. The CPU moves the bytes; no RDMA NIC takes part.\n",
    );
    if let Some(gpu) = &report.machine.gpu {
        let _ = writeln!(text, "GPU: {}; path of its memory: {}.", gpu.name, gpu.paths);
    } else {
        text.push_str("No GPU found: measured host memory only.\n");
    }
    for wrong in report.results.iter().filter(|one| !one.verified) {
        let _ = writeln!(text, "WRONG BYTES: {}", wrong.fault.as_deref().unwrap_or("no detail"));
    }
    text.push_str(
        "\nNext:\n\
         \x20 nobounce run -- ib_write_bw     an RDMA program, unmodified, on this NIC\n\
         \x20 nobounce doctor                 whether GPUDirect works on this machine\n\
         \x20 nobounce bench                  every operation and size\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::super::flow_tests::sample_report;
    use super::*;

    #[test]
    fn every_path_has_a_row_and_wrong_bytes_are_named() {
        let mut report = sample_report();
        let kinds = |report: &BenchReport| {
            let text = render(report);
            (text.matches("verified").count(), text.matches("WRONG").count(), text)
        };
        let (fine, wrong, text) = kinds(&report);
        assert!(fine > 0 && wrong == 0 && text.contains("host memory"), "{text}");
        // The large message alone is wrong.
        let large = report.results.iter_mut().find(|one| one.kind == CaseKind::Bandwidth).unwrap();
        (large.verified, large.fault) = (false, Some("byte 7 is wrong".into()));
        let (_, wrong, text) = kinds(&report);
        assert!(wrong == 2 && text.contains("WRONG BYTES: byte 7 is wrong"), "{text}");
    }
}
