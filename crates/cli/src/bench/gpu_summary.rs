//! Summary of a run on GPU memory: direct against staged, against naive staging and against host
//! memory. Also checks that the NIC counters agree with the results.

use std::fmt;
use std::ops::RangeInclusive;

use super::case::{CaseKind, Op};
use super::counted::Counted;
use super::model::{BenchReport, CaseOutcome, MemoryPath};
use super::numbers::figure;
use crate::size::Bytes;

/// Latencies up to this size rate the direct path.
const SHORT: u64 = 4 << 10;
/// Bandwidths from this size on rate it.
const LONG: u64 = 1 << 20;
/// At most this share of staging's latency.
const LATENCY_GOAL: f64 = 0.5;
/// At least this share of staging's bandwidth.
const BANDWIDTH_GOAL: f64 = 0.95;
/// At least this share of the bandwidth between host memories.
const HOST_GOAL: f64 = 0.8;

/// One line for each thing worth remembering.
pub(super) fn lines(report: &BenchReport) -> Vec<String> {
    let mut lines = Vec::new();
    let figures = Figures { report, link: report.main_link().unwrap_or_default() };
    if report.results.iter().all(|one| one.memory_path() != MemoryPath::Direct) {
        lines.push("no direct figures: every path was staged, naive or in host memory".to_owned());
    }
    for path in [MemoryPath::Staged, MemoryPath::Naive] {
        lines.extend(figures.three(path));
    }
    if let Some((direct, staged)) = figures.pair(Op::Write, CaseKind::GpuVisible, 8, MemoryPath::Staged) {
        let share = figure(direct / staged);
        let (direct, staged) = (figure(direct), figure(staged));
        lines.push(format!(
            "GPU-visible latency of 8 B: direct {direct} us, staged {staged} us: {share} of staged"
        ));
    }
    for op in OPS {
        lines.extend(figures.shares(op).iter().map(WorstShare::as_goal));
    }
    for link in other_links(report) {
        let shares = Figures { report, link }.shares(Op::Write);
        lines.extend(shares.iter().map(|share| format!("share over {link}: {share}")));
    }
    let mut total = Counted::default();
    let counted: Vec<&Counted> = report.results.iter().filter_map(|one| one.counted.as_ref()).collect();
    counted.iter().for_each(|one| total.add(one));
    if !counted.is_empty() {
        lines.push(format!("bytes by path, counted by the NIC at this end: {}", total.here));
        lines.push(format!("bytes by path, counted by the NIC at the peer: {}", total.there));
    }
    lines
}

/// Results that say something else than the NIC counted.
pub(super) fn contradictions(report: &BenchReport) -> Vec<String> {
    let mut lines = Vec::new();
    for one in &report.results {
        let Some(counted) = &one.counted else { continue };
        let case = format!("{} {} {}", one.op, Bytes(one.size), one.kind);
        let staged = counted.staged_bytes();
        if one.path.starts_with("direct") && staged > 0 {
            lines.push(format!(
                "NOT DIRECT: {case} reports direct, but the NIC counted {staged} staged bytes"
            ));
        }
        if one.memory_path() == MemoryPath::Staged && staged == 0 && one.size > 0 {
            lines.push(format!(
                "NOT STAGED: {case} reports {}, but the NIC counted no staged bytes",
                one.path
            ));
        }
    }
    lines
}

/// The operations whose shares are reported, where they were measured.
const OPS: [Op; 3] = [Op::Write, Op::Read, Op::Send];

/// A goal for the direct path against another one, over a range of sizes; the worst size counts.
struct Goal {
    kind: CaseKind,
    range: RangeInclusive<u64>,
    range_name: &'static str,
    other: MemoryPath,
    bound: f64,
}

const GOALS: [Goal; 3] = [
    Goal {
        kind: CaseKind::Latency,
        range: 8..=SHORT,
        range_name: "8 B to 4 KiB",
        other: MemoryPath::Staged,
        bound: LATENCY_GOAL,
    },
    Goal {
        kind: CaseKind::Bandwidth,
        range: LONG..=u64::MAX,
        range_name: "1 MiB and above",
        other: MemoryPath::Staged,
        bound: BANDWIDTH_GOAL,
    },
    Goal {
        kind: CaseKind::Bandwidth,
        range: LONG..=u64::MAX,
        range_name: "1 MiB and above",
        other: MemoryPath::Host,
        bound: HOST_GOAL,
    },
];

/// Direct's share of another path, where it is worst.
struct WorstShare {
    op: Op,
    goal: &'static Goal,
    size: u64,
    share: f64,
}

impl WorstShare {
    fn as_goal(&self) -> String {
        let Goal { kind, bound, .. } = self.goal;
        let (reached, word) = match kind.is_latency() {
            true => (self.share <= *bound, "at most"),
            false => (self.share >= *bound, "at least"),
        };
        format!("goal {}: {self}, {word} {bound} required", if reached { "reached" } else { "missed" })
    }
}

impl fmt::Display for WorstShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Goal { kind, range_name, other, .. } = self.goal;
        let op = self.op.to_string().to_uppercase();
        let other = if *other == MemoryPath::Host { "host to host" } else { "staged" };
        let (share, size) = (figure(self.share), Bytes(self.size));
        write!(f, "{op} {kind} direct / {other}, {range_name}: {share} at {size}")
    }
}

/// Links of results that differ from the main one.
fn other_links(report: &BenchReport) -> Vec<&str> {
    let mut others: Vec<&str> = report.results.iter().map(|one| one.link.as_str()).collect();
    others.retain(|link| Some(*link) != report.main_link());
    others.sort_unstable();
    others.dedup();
    others
}

/// What was measured over one link.
struct Figures<'a> {
    report: &'a BenchReport,
    link: &'a str,
}

impl Figures<'_> {
    fn of(&self, op: Op, kind: CaseKind, size: u64, path: MemoryPath) -> Option<f64> {
        let wanted = |one: &&CaseOutcome| {
            (one.op, one.kind, one.size, one.qps, one.memory_path()) == (op, kind, size, 1, path)
                && one.link == self.link
        };
        let one = self.report.results.iter().find(wanted)?;
        if kind.is_latency() { one.p50_us } else { one.gbytes_per_s }
    }

    /// Direct's figure, and the other's.
    fn pair(&self, op: Op, kind: CaseKind, size: u64, other: MemoryPath) -> Option<(f64, f64)> {
        let pair = self.of(op, kind, size, MemoryPath::Direct).zip(self.of(op, kind, size, other));
        pair.filter(|(_, other)| *other > 0.0)
    }

    /// The three figures of NVIDIA's product brief: latency, unidirectional and bidirectional
    /// bandwidth.
    fn three(&self, other: MemoryPath) -> Vec<String> {
        let three = [
            (CaseKind::Latency, 8, "latency of 8 B", "us"),
            (CaseKind::Bandwidth, LONG, "one way, 1 MiB", "GB/s"),
            (CaseKind::Bidirectional, LONG, "both ways, 1 MiB", "GB/s"),
        ];
        let name = if other == MemoryPath::Naive { "naive staging" } else { "staged" };
        let lines = three.into_iter().filter_map(|(kind, size, what, unit)| {
            let (direct, staged) = self.pair(Op::Write, kind, size, other)?;
            // Higher is better for bandwidth, lower for latency: a factor above 1 favours direct.
            let factor = if kind.is_latency() { staged / direct } else { direct / staged };
            let (direct, staged) = (figure(direct), figure(staged));
            Some(format!(
                "{what}: direct {direct} {unit}, {name} {staged} {unit}: {} x better",
                figure(factor)
            ))
        });
        lines.collect()
    }

    /// One share for each goal that can be rated.
    fn shares(&self, op: Op) -> Vec<WorstShare> {
        let judged = GOALS.iter().filter_map(|goal| {
            let sizes = self.sizes(op, goal.kind).into_iter().filter(|size| goal.range.contains(size));
            let shares = sizes.filter_map(|size| {
                let (direct, other) = self.pair(op, goal.kind, size, goal.other)?;
                Some(WorstShare { op, goal, size, share: direct / other })
            });
            // The worst one counts.
            shares.min_by(|a, b| {
                let order = a.share.total_cmp(&b.share);
                if goal.kind.is_latency() { order.reverse() } else { order }
            })
        });
        judged.collect()
    }

    fn sizes(&self, op: Op, kind: CaseKind) -> Vec<u64> {
        let of_it =
            |one: &&CaseOutcome| (one.op, one.kind, one.memory_path()) == (op, kind, MemoryPath::Direct);
        let mut sizes: Vec<u64> = self.report.results.iter().filter(of_it).map(|one| one.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}
