//! What a run on GPU memory comes to: direct against staged, against naive staging and against host memory, and whether the counters of
//! the NIC agree with what the results say.

use super::case::{Kind, Op};
use super::counted::Counted;
use super::model::{CaseOutcome, Report, Way};
use super::size::Bytes;
use super::table::figure;

/// Latencies by which direct is judged: up to this size.
const SHORT: u64 = 4 << 10;
/// Bandwidths by which it is judged: from this size on.
const LONG: u64 = 1 << 20;
/// At most this share of staging's latency.
const LATENCY_GOAL: f64 = 0.5;
/// At least this share of staging's bandwidth.
const BANDWIDTH_GOAL: f64 = 0.95;
/// At least this share of the bandwidth between host memories.
const HOST_GOAL: f64 = 0.8;

/// One line for each thing worth remembering.
pub(super) fn lines(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    let figures = Figures(report);
    if report.results.iter().all(|one| one.way() != Way::Direct) {
        lines.push("no direct figures: every path was staged, naive or in host memory".to_owned());
    }
    for way in [Way::Staged, Way::Naive] {
        lines.extend(figures.three(way));
    }
    if let Some((direct, staged)) = figures.pair(Kind::GpuVisible, 8, Way::Staged) {
        let share = figure(direct / staged);
        let (direct, staged) = (figure(direct), figure(staged));
        lines.push(format!(
            "until a kernel sees a flag of 8 B: direct {direct} us, staged {staged} us, {share} of it"
        ));
    }
    lines.extend(figures.goals());
    let mut total = Counted::default();
    let counted: Vec<&Counted> = report.results.iter().filter_map(|one| one.counted.as_ref()).collect();
    counted.iter().for_each(|one| total.add(one));
    if !counted.is_empty() {
        lines.push(format!("bytes by path, as the NIC counted them here: {}", total.here));
        lines.push(format!("bytes by path, at the other end: {}", total.there));
    }
    lines
}

/// Results that say something else than the NIC counted.
pub(super) fn contradictions(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    for one in &report.results {
        let Some(counted) = &one.counted else { continue };
        let case = format!("{} {} {}", one.op, Bytes(one.size), one.kind);
        let staged = counted.staged_bytes();
        if one.path == "direct" && staged > 0 {
            lines.push(format!("NOT DIRECT: {case} says direct, but the NIC counted {staged} staged bytes"));
        }
        if one.way() == Way::Staged && staged == 0 && one.size > 0 {
            lines.push(format!("NOT STAGED: {case} says {}, but the NIC counted no staged byte", one.path));
        }
    }
    lines
}

struct Figures<'a>(&'a Report);

impl Figures<'_> {
    /// The figure of a write.
    fn of(&self, kind: Kind, size: u64, way: Way) -> Option<f64> {
        let wanted = |one: &&CaseOutcome| {
            (one.op, one.kind, one.size, one.qps, one.way()) == (Op::Write, kind, size, 1, way)
        };
        let one = self.0.results.iter().find(wanted)?;
        if kind.is_latency() { one.p50_us } else { one.gbytes_per_s }
    }

    /// Direct's figure, and the other's.
    fn pair(&self, kind: Kind, size: u64, other: Way) -> Option<(f64, f64)> {
        self.of(kind, size, Way::Direct).zip(self.of(kind, size, other)).filter(|(_, other)| *other > 0.0)
    }

    /// The three figures of NVIDIA's product brief: latency, bandwidth one way, bandwidth both ways.
    fn three(&self, other: Way) -> Vec<String> {
        let three = [
            (Kind::Latency, 8, "latency of 8 B", "us"),
            (Kind::Bandwidth, LONG, "one way, 1 MiB", "GB/s"),
            (Kind::Bidirectional, LONG, "both ways, 1 MiB", "GB/s"),
        ];
        let name = if other == Way::Naive { "naive staging" } else { "staged" };
        let lines = three.into_iter().filter_map(|(kind, size, what, unit)| {
            let (direct, staged) = self.pair(kind, size, other)?;
            // More is better for a bandwidth, less for a latency: either way a factor above 1 is direct's.
            let factor = if kind.is_latency() { staged / direct } else { direct / staged };
            let (direct, staged) = (figure(direct), figure(staged));
            Some(format!(
                "{what}: direct {direct} {unit}, {name} {staged} {unit}: {} x as good",
                figure(factor)
            ))
        });
        lines.collect()
    }

    fn goals(&self) -> Vec<String> {
        let short = |size: u64| (8..=SHORT).contains(&size);
        let long = |size: u64| size >= LONG;
        let goals = [
            (Kind::Latency, &short as &dyn Fn(u64) -> bool, Way::Staged, LATENCY_GOAL, "8 B to 4 KiB"),
            (Kind::Bandwidth, &long, Way::Staged, BANDWIDTH_GOAL, "1 MiB and above"),
            (Kind::Bandwidth, &long, Way::Host, HOST_GOAL, "1 MiB and above"),
        ];
        let mut lines = Vec::new();
        for (kind, sizes, other, goal, range) in goals {
            let shares: Vec<(u64, f64)> = self
                .sizes(kind)
                .into_iter()
                .filter(|size| sizes(*size))
                .filter_map(|size| self.pair(kind, size, other).map(|(direct, other)| (size, direct / other)))
                .collect();
            // The worst one counts.
            let worse = |a: &f64, b: &f64| if kind.is_latency() { b.total_cmp(a) } else { a.total_cmp(b) };
            let Some((size, worst)) = shares.into_iter().min_by(|(_, a), (_, b)| worse(a, b)) else {
                continue;
            };
            let reached = if kind.is_latency() { worst <= goal } else { worst >= goal };
            let (bound, verdict) = (
                if kind.is_latency() { "at most" } else { "at least" },
                if reached { "reached" } else { "missed" },
            );
            let other = if other == Way::Host { "host to host" } else { "staged" };
            lines.push(format!(
                "goal {verdict}: WRITE {kind} direct / {other}, {range}: {} at {}, wanted {bound} {goal}",
                figure(worst),
                Bytes(size)
            ));
        }
        lines
    }

    fn sizes(&self, kind: Kind) -> Vec<u64> {
        let direct = self.0.results.iter().filter(|one| one.kind == kind && one.way() == Way::Direct);
        let mut sizes: Vec<u64> = direct.map(|one| one.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}
