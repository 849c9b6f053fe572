//! The lines of a plot about GPU memory: one for each path.

use plotters::style::RGBColor;

use super::case::{CaseKind, Op};
use super::model::{BenchReport, CaseOutcome, MemoryPath};
use super::plot_line::{Line, line};

const MEMORY_PATHS: [MemoryPath; 4] =
    [MemoryPath::Direct, MemoryPath::Staged, MemoryPath::Naive, MemoryPath::Host];

/// The title: what is measured, and whether it is a GPU at all.
pub(super) fn title(report: &BenchReport) -> &'static str {
    match &report.machine.gpu {
        None => "nobounce bench",
        Some(gpu) if gpu.stand_in => "nobounce bench: STAND-IN for a GPU (host memory)",
        Some(_) => "nobounce bench: GPU memory",
    }
}

pub(super) fn latency(report: &BenchReport) -> Vec<Line> {
    let mut lines = lines(report, CaseKind::Latency, "", true, |one| one.p50_us);
    for path in MEMORY_PATHS {
        let chosen = |one: &CaseOutcome| (one.kind, one.memory_path()) == (CaseKind::GpuVisible, path);
        let name = format!("GPU-visible, {path}");
        lines.extend(line(report, name, color(path), false, |one| one.p50_us.filter(|_| chosen(one))));
    }
    lines
}

pub(super) fn bandwidth(report: &BenchReport) -> Vec<Line> {
    let mut all = lines(report, CaseKind::Bandwidth, "", true, |one| one.gbytes_per_s);
    all.extend(lines(report, CaseKind::Bidirectional, ", both ways", false, |one| one.gbytes_per_s));
    all
}

/// Writes were measured on all paths; without them, use any operation.
fn lines(
    report: &BenchReport,
    kind: CaseKind,
    suffix: &str,
    strong: bool,
    value: impl Fn(&CaseOutcome) -> Option<f64>,
) -> Vec<Line> {
    let of_kind = || report.results.iter().filter(|one| one.kind == kind);
    let mut ops: Vec<Op> = of_kind().map(|one| one.op).collect();
    ops.sort_unstable();
    ops.dedup();
    if ops.contains(&Op::Write) {
        ops = vec![Op::Write];
    }
    let mut found = Vec::new();
    for op in ops {
        for path in MEMORY_PATHS {
            let chosen =
                |one: &CaseOutcome| (one.kind, one.op, one.memory_path(), one.qps) == (kind, op, path, 1);
            let name = format!("{op}, {path}{suffix}");
            found.extend(line(report, name, color(path), strong, |one| value(one).filter(|_| chosen(one))));
        }
    }
    found
}

/// Colour-blind safe.
fn color(path: MemoryPath) -> RGBColor {
    match path {
        MemoryPath::Direct => RGBColor(0x00, 0x72, 0xb2),
        MemoryPath::Staged => RGBColor(0xd5, 0x5e, 0x00),
        MemoryPath::Naive => RGBColor(0xaa, 0x33, 0x77),
        MemoryPath::Host => RGBColor(0x00, 0x9e, 0x73),
    }
}
