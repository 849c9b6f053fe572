//! A whole prediction: every size, both ways, where they cross, what to change. The source of
//! table, JSON and plot.

use std::fmt::Write as _;

use serde::Serialize;

use super::basis::NoEstimate;
use super::factor::Factor;
use super::model::{Estimate, direct};
use super::parts::{End, Memory, Parts};
use super::staging::staged;
use super::upgrade::{Upgrade, upgrades};

/// A whole prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Always [`SCHEMA`].
    pub schema: &'static str,
    /// What is predicted.
    pub title: String,
    /// The parts, with what was assumed.
    pub parts: Parts,
    /// One entry for each size.
    pub rows: Vec<SizeRow>,
    /// Bytes from which on staging in chunks is faster than the direct way, if ever.
    pub staged_wins_from: Option<u64>,
    /// Bytes below which the direct way is at least twice as fast as staging.
    pub twice_as_fast_below: Option<u64>,
    /// What of the transfer no published figure validates: the bands are the widest then.
    pub unvalidated: Vec<&'static str>,
    /// What could be changed for the largest size, the most first.
    pub upgrades: Vec<Upgrade>,
}

/// Name and version of the JSON.
pub const SCHEMA: &str = "nobounce-predict/1";

/// One size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SizeRow {
    /// Bytes.
    pub size: u64,
    /// The direct way; none where bytes cannot take it.
    pub direct: Option<Estimate>,
    /// Why not.
    pub not_direct: Option<String>,
    /// Why the direct way is not predicted, if it is not for a lack of knowledge.
    pub not_predicted: Option<String>,
    /// Staged in chunks; none for host memory.
    pub staged: Option<Estimate>,
    /// Why the staged way is not predicted.
    pub staged_not_predicted: Option<String>,
    /// Staged as a whole, one step after the other; none for host memory.
    pub unpipelined: Option<Estimate>,
}

/// Largest size that is predicted.
pub const MAX_SIZE: u64 = 1 << 40;

/// Predicts.
#[must_use]
pub fn report(title: &str, parts: &Parts, sizes: &[u64]) -> Report {
    let rows: Vec<SizeRow> = sizes.iter().map(|size| row(parts, (*size).min(MAX_SIZE))).collect();
    let largest = sizes.iter().max().copied().unwrap_or(1 << 20);
    let powers = (0..=40).map(|power| 1_u64 << power);
    let is_gpu = parts.memory == Memory::Gpu;
    let times = |size: u64| {
        let way = direct(parts, size).ok().map(|one| one.microseconds.expected);
        (way, staged(parts, size, true).ok().map(|one| one.microseconds.expected))
    };
    let staged_wins = |size: u64| matches!(times(size), (Some(direct), Some(staged)) if staged < direct);
    let staged_wins_from = powers
        .clone()
        .filter(|_| is_gpu)
        .find(|size| staged_wins(*size))
        .map(|size| first(size / 2, size, staged_wins));
    let twice_as_fast_below = powers
        .filter(|_| is_gpu)
        .skip_while(|size| !matches!(times(*size), (Some(_), Some(_))))
        .take_while(|size| matches!(times(*size), (Some(direct), Some(staged)) if staged >= 2.0 * direct))
        .last();
    let is_direct = |row: &&SizeRow| row.direct.is_some() || row.staged.is_some();
    let predicted: Vec<u64> = rows.iter().filter(is_direct).map(|row| row.size).collect();
    let estimates = rows.iter().flat_map(|row| [&row.direct, &row.staged, &row.unpipelined]).flatten();
    let limits: Vec<Factor> = estimates.flat_map(|one| [one.binds, one.stream_binds]).collect();
    Report {
        schema: SCHEMA,
        title: title.to_owned(),
        rows,
        staged_wins_from,
        twice_as_fast_below,
        unvalidated: parts.unvalidated_of(predicted.into_iter()),
        upgrades: upgrades(parts, largest),
        parts: parts.clone().with_limits(limits.into_iter()),
    }
}

/// The first size above `low` for which it is so, if it is so for `high`; to a hundredth.
fn first(mut low: u64, mut high: u64, is_so: impl Fn(u64) -> bool) -> u64 {
    while high - low > (high / 100).max(1) {
        let middle = u64::midpoint(low, high);
        if is_so(middle) { high = middle } else { low = middle }
    }
    high
}

fn row(parts: &Parts, size: u64) -> SizeRow {
    let way = direct(parts, size);
    let is_gpu = parts.memory == Memory::Gpu;
    let (not_direct, not_predicted) = match &way {
        Ok(_) => (None, None),
        Err(NoEstimate::NotDirect(why)) => (Some(why.to_string()), None),
        Err(NoEstimate::NoBasis(why)) => (None, Some(why.to_string())),
    };
    let chunked = is_gpu.then(|| staged(parts, size, true));
    SizeRow {
        size,
        not_direct,
        not_predicted,
        direct: way.ok(),
        staged_not_predicted: chunked.as_ref().and_then(|way| way.as_ref().err()).map(ToString::to_string),
        staged: chunked.and_then(Result::ok),
        unpipelined: is_gpu.then(|| staged(parts, size, false).ok()).flatten(),
    }
}

impl SizeRow {
    /// Why there is no direct estimate.
    #[must_use]
    pub fn why_not(&self) -> Option<String> {
        let unknown = self.not_predicted.as_ref().map(|why| format!("not predicted: {why}"));
        self.not_direct.clone().or(unknown)
    }

    /// Why there is no staged estimate, if not for the reason of the direct one.
    #[must_use]
    pub fn why_not_staged(&self) -> Option<String> {
        let why = self.staged_not_predicted.as_ref();
        why.filter(|_| self.staged_not_predicted != self.not_predicted)
            .map(|why| format!("not predicted: {why}"))
    }
}

/// Why figures are missing: a sentence for each reason, with the sizes that lack the figure.
pub(super) fn reasons<'a>(
    rows: impl Iterator<Item = &'a SizeRow>,
    way: &str,
    why: fn(&SizeRow) -> Option<String>,
) -> Vec<String> {
    let mut found: Vec<(String, u64, u64)> = Vec::new();
    for (size, why) in rows.filter_map(|row| Some((row.size, why(row)?))) {
        match found.iter_mut().find(|(known, ..)| *known == why) {
            Some((_, _, to)) => *to = size,
            None => found.push((why, size, size)),
        }
    }
    let sentence = |(why, from, to): (String, u64, u64)| {
        let to = if to == from { String::new() } else { format!(" to {}", bytes(to)) };
        format!("{way}, {}{to}: {why}", bytes(from))
    };
    found.into_iter().map(sentence).collect()
}

impl Report {
    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!(
            "{}\n{}\n\n",
            nobounce_topology::clean(&self.title),
            nobounce_topology::clean(&self.parts.line())
        );
        let is_gpu = self.parts.memory == Memory::Gpu;
        let way = if is_gpu { "direct" } else { "time" };
        let _ = write!(
            text,
            "{:>9}  {:>9} {:>17}  {:>8} {:>15}",
            "size",
            format!("{way} us"),
            "band",
            "GB/s",
            "band"
        );
        if is_gpu {
            let _ = write!(text, "  {:>9} {:>17} {:>7}", "staged us", "band", "direct");
        }
        let _ = writeln!(text, "  {:<48} limit of a stream", "largest share of the time");
        for row in &self.rows {
            text.push_str(&self.line(row));
        }
        text.push('\n');
        text.push_str(&self.conclusions());
        text
    }

    fn line(&self, row: &SizeRow) -> String {
        let mut text = format!("{:>9}  ", bytes(row.size));
        let is_gpu = self.parts.memory == Memory::Gpu;
        match &row.direct {
            Some(one) => {
                let (time, rate) = (one.microseconds, one.gbytes_per_s);
                let _ = write!(text, "{:>9} {:>17}  ", figure(time.expected), band(time.low, time.high));
                let _ = write!(text, "{:>8} {:>15}", figure(rate.expected), band(rate.low, rate.high));
            }
            None => {
                let _ = write!(text, "{:>9} {:>17}  {:>8} {:>15}", "-", "-", "-", "-");
            }
        }
        if is_gpu && row.staged.is_none() {
            let _ = write!(text, "  {:>9} {:>17} {:>7}", "-", "-", "-");
        }
        if let Some(staged) = &row.staged {
            let time = staged.microseconds;
            let gain = row.direct.as_ref().map_or("-".to_owned(), |one| {
                format!("{} x", figure(time.expected / one.microseconds.expected))
            });
            let band = band(time.low, time.high);
            let _ = write!(text, "  {:>9} {band:>17} {gain:>7}", figure(time.expected));
        }
        let binds = match &row.direct {
            Some(one) => {
                let share = one.shares.first().map_or(0.0, |share| one.part(share));
                let most = format!("{} ({:.0} %)", one.binds.words(), share * 100.0);
                format!("{most:<48} {}", one.stream_binds.words())
            }
            None => row.why_not().unwrap_or_default(),
        };
        let _ = writeln!(text, "  {binds}");
        text
    }

    /// What of the figures is no model's word, if anything: the largest such part of a message, and
    /// of a stream.
    fn seen(&self) -> Option<String> {
        let parts = |of: fn(&Estimate) -> (f64, f64)| {
            let of_row = move |row: &SizeRow| {
                let one = row.direct.as_ref()?;
                let (seen, all) = of(one);
                Some((seen / all, seen, one.size)).filter(|(share, ..)| share.abs() >= 0.001)
            };
            self.rows.iter().filter_map(of_row).max_by(|a, b| a.0.abs().total_cmp(&b.0.abs()))
        };
        let alone = parts(|one| (one.seen_us(), one.microseconds.expected));
        let stream = parts(|one| {
            let each = super::route::float(one.size) / one.gbytes_per_s.expected / 1000.0;
            (one.stream_seen_us, each)
        });
        let words =
            [("one message", alone), ("in a stream", stream)].into_iter().filter_map(|(what, found)| {
                let (share, seen, size) = found?;
                let sign = if seen < 0.0 { "-" } else { "+" };
                let (time, percent) = (figure(seen.abs()), figure(share.abs() * 100.0));
                Some(format!("{what} of {} {sign}{time} us ({percent} % of its time)", bytes(size)))
            });
        let words: Vec<String> = words.collect();
        (!words.is_empty()).then(|| {
            format!("includes the residual correction of this machine: at most {}", words.join("; "))
        })
    }

    /// The last size that can take the direct path, and why longer ones cannot.
    fn ends_at(&self) -> Option<(u64, String)> {
        let last = self.rows.iter().rev().find(|row| row.direct.is_some())?;
        let next = self.rows.iter().find(|row| row.size > last.size)?;
        Some((last.size, next.why_not()?))
    }

    /// Which path is faster, of the sizes that have both figures.
    fn comparison(&self) -> Option<String> {
        let has_both = |row: &&SizeRow| row.direct.is_some() && row.staged.is_some();
        let Some(first) = self.rows.iter().find(has_both) else {
            return self.rows.iter().all(|row| row.direct.is_none()).then(|| self.no_direct());
        };
        let last = self.rows.iter().rev().find(has_both).unwrap_or(first);
        let starts = self.rows.first().is_some_and(|row| row.size == first.size);
        let ends = self.rows.last().is_some_and(|row| row.size == last.size);
        let (from, to) = (bytes(first.size), bytes(last.size));
        let sizes = match (starts, ends) {
            _ if self.rows.iter().all(|row| has_both(&row)) => "at every size".to_owned(),
            (_, true) => format!("at every predicted size, from {from} on"),
            (true, false) => format!("at every predicted size, up to {to}"),
            (false, false) => format!("at every predicted size, from {from} to {to}"),
        };
        let overlaps = |row: &SizeRow| match (&row.direct, &row.staged) {
            (Some(direct), Some(staged)) => direct.microseconds.high >= staged.microseconds.low,
            _ => false,
        };
        let overlap = self.rows.iter().any(overlaps);
        let is = if overlap { "is expected to be" } else { "is" };
        let line = match (self.staged_wins_from, self.twice_as_fast_below) {
            (Some(size), _) => format!(
                "from {} on, staging in chunks is faster than the direct path; see the settings and upgrades below",
                bytes(size)
            ),
            (None, Some(size)) => {
                format!(
                    "the direct path {is} faster {sizes}, and at least twice as fast up to {}",
                    bytes(size)
                )
            }
            (None, None) => format!("the direct path {is} faster {sizes}"),
        };
        let line = if overlap { format!("{line}; the bands overlap") } else { line };
        Some(match self.ends_at() {
            Some((last, why)) => format!("{line}; beyond {}, {why}", bytes(last)),
            None => line,
        })
    }

    fn no_direct(&self) -> String {
        match self.rows.iter().find_map(|row| row.not_predicted.as_ref()) {
            Some(why) => format!("the direct path is not predicted: {why}"),
            None => "no direct path here".to_owned(),
        }
    }

    fn conclusions(&self) -> String {
        let mut text = String::new();
        if let Some(one) = self.rows.last().and_then(|row| row.direct.as_ref()) {
            let _ =
                writeln!(text, "a stream of {} is limited by {}", bytes(one.size), one.stream_binds.words());
        }
        if let Some(line) = self.seen() {
            let _ = writeln!(text, "{line}");
        }
        if self.parts.memory == Memory::Gpu {
            if let Some(line) = self.comparison() {
                let _ = writeln!(text, "{line}");
            }
            for line in reasons(self.rows.iter(), "staged", SizeRow::why_not_staged) {
                let _ = writeln!(text, "{line}");
            }
        }
        // Settings cost nothing: they are listed however much more hardware would gain.
        let settings = self.upgrades.iter().filter(|one| one.free);
        let hardware = self.upgrades.iter().filter(|one| !one.free).take(3);
        for one in settings.chain(hardware) {
            let kind = if one.free { "a setting" } else { "an upgrade" };
            let _ = writeln!(
                text,
                "{kind}: {}: {} to {} GB/s, {} to {} us",
                one.change,
                figure(one.gbytes_before),
                figure(one.gbytes_after),
                figure(one.microseconds_before),
                figure(one.microseconds_after)
            );
        }
        if !self.parts.assumed.is_empty() {
            let _ = writeln!(text, "assumed: {}", nobounce_topology::clean(&self.parts.assumed.join("; ")));
        }
        if !self.unvalidated.is_empty() {
            let what = self.unvalidated.join("; ");
            let _ = writeln!(text, "widest band: no published figure validates {what}");
        }
        text
    }
}

impl Parts {
    /// The parts in one line.
    #[must_use]
    pub fn line(&self) -> String {
        let rails = if self.rails > 1 { format!("{} x ", self.rails) } else { String::new() };
        let gpu = match (self.memory, self.gpu) {
            (Memory::Host, _) => "host memory".to_owned(),
            (Memory::Gpu, Some(slot)) => {
                let ends = match self.host_end {
                    None => "",
                    Some(End::Source) => "host memory to ",
                    Some(End::Target) => "host memory from ",
                };
                format!("{ends}GPU on {slot}, {}", self.distance.words())
            }
            (Memory::Gpu, None) => "GPU coherent with the processor".to_owned(),
        };
        if self.link.kind == super::fabric::Kind::Loopback {
            return format!("software NIC, no wire, MTU {}", self.mtu);
        }
        let far = match self.far_rails {
            0 => String::new(),
            far => format!(", {far} of them on another socket than the GPU"),
        };
        let order = if self.relaxed_ordering { "" } else { ", strict ordering" };
        format!(
            "{rails}{} (MTU {}), adapter on {}{far}, {gpu}, MaxPayload {}, MaxReadReq {}{order}",
            self.link, self.mtu, self.nic, self.max_payload, self.max_read_request
        )
    }
}

/// A figure with three digits.
#[must_use]
pub fn figure(value: f64) -> String {
    match value {
        value if !value.is_finite() => "-".to_owned(),
        0.0 => "0".to_owned(),
        value if value < 0.01 => format!("{value:.2e}"),
        value if value < 1.0 => format!("{value:.3}"),
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 100.0 => format!("{value:.1}"),
        value if value < 1e7 => format!("{value:.0}"),
        value => format!("{value:.2e}"),
    }
}

fn band(low: f64, high: f64) -> String {
    format!("{} - {}", figure(low), figure(high))
}

/// A size with the largest unit that fits.
#[must_use]
pub fn bytes(size: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| size >= *unit) {
        None => format!("{size} B"),
        Some((unit, name)) if size.is_multiple_of(*unit) => format!("{} {name}", size / unit),
        Some((unit, name)) => {
            let tenths = u128::from(size) * 10 / u128::from(*unit);
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fabric::Fabric;
    use super::super::parts::Spec;
    use super::*;

    #[test]
    fn a_report_names_what_binds_and_what_to_change() {
        let parts = Spec { link: Fabric::infiniband("ndr"), ..Spec::default() }.resolve().unwrap();
        let report = report("two machines", &parts, &[8, 4096, 1 << 20, 1 << 30]);
        let text = report.text();
        for wanted in
            ["two machines", "InfiniBand NDR", "PCIe reads", "the network link", "an upgrade:", "assumed:"]
        {
            assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
        }
        assert_eq!(report.staged_wins_from, None);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["schema"], SCHEMA);
        assert_eq!(json["rows"][3]["direct"]["binds"], "wire");
        let host = Spec { memory: Some(Memory::Host), link: Fabric::infiniband("edr"), ..Spec::default() };
        let text = super::report("host", &host.resolve().unwrap(), &[8]).text();
        assert!(!text.contains("staged"), "{text}");
    }

    #[test]
    fn the_crossover_is_where_both_ways_take_as_long() {
        let spec = Spec {
            link: Fabric::infiniband("ndr"),
            distance: Some(nobounce_topology::tree::Distance::Node),
            platform: Some(nobounce_topology::platform::Platform::EmeraldRapids),
            relaxed_ordering: Some(false),
            ..Spec::default()
        };
        let parts = spec.resolve().unwrap();
        let size = report("strict", &parts, &[8]).staged_wins_from.unwrap();
        let ratio = staged(&parts, size, true).unwrap().microseconds.expected
            / direct(&parts, size).unwrap().microseconds.expected;
        assert!((0.98..=1.0).contains(&ratio), "{size}: {ratio}");
    }

    #[test]
    fn a_window_that_is_too_small_is_said() {
        let spec = Spec { link: Fabric::infiniband("edr"), bar1: Some(256 << 20), ..Spec::default() };
        let report = report("small", &spec.resolve().unwrap(), &[1 << 20, 1 << 30]);
        assert!(report.rows[0].direct.is_some() && report.rows[1].direct.is_none());
        assert!(report.text().contains("BAR1"));
    }

    /// Only sizes with both figures are compared, and a missing staged figure has a reason.
    #[test]
    fn paths_are_compared_where_both_are_predicted() {
        let of = |spec: Spec, sizes: &[u64]| report("any", &spec.resolve().unwrap(), sizes);
        let mpi = Some(super::super::parts::Software::Mpi);
        let ndr = Spec { link: Fabric::infiniband("ndr"), ..Spec::default() };
        for (spec, sizes) in [
            (Spec { link: "efa:400".parse().ok(), ..Spec::default() }, &[8, 1 << 20][..]),
            (Spec { software: mpi, ..ndr.clone() }, &[8, 64 << 10, 1 << 20]),
        ] {
            let text = of(spec, sizes).text();
            assert!(text.contains("at every predicted size, from 1 MiB on"), "{text}");
            assert!(!text.contains("faster at every size"), "{text}");
        }
        for spec in [
            Spec { link: Fabric::infiniband("xdr"), ..Spec::default() },
            Spec { link: Fabric::infiniband("hdr"), gpus: Some(8), rails: Some(8), ..Spec::default() },
        ] {
            let found = of(spec, &[8, 1 << 20]);
            assert!(found.rows[0].direct.is_some() && found.rows[0].staged.is_none());
            assert!(found.rows[0].staged_not_predicted.as_ref().unwrap().contains("--dram"));
            let text = found.text();
            assert!(!text.contains("faster"), "{text}");
            assert!(text.contains("staged, 8 B to 1 MiB: not predicted: "), "{text}");
        }
        assert!(of(ndr, &[8, 1 << 20]).text().contains("faster at every size"));
    }

    /// The bands of both paths say whether one is certainly faster.
    #[test]
    fn a_comparison_says_whether_the_bands_overlap() {
        let spec = Spec {
            link: Fabric::infiniband("ndr"),
            distance: Some(nobounce_topology::tree::Distance::Pix),
            ..Spec::default()
        };
        let text = |sizes: &[u64]| report("any", &spec.resolve().unwrap(), sizes).text();
        let (short, long) = (text(&[8]), text(&[8, 1 << 30]));
        assert!(short.contains("direct path is faster") && !short.contains("overlap"), "{short}");
        assert!(long.contains("is expected to be faster at every size"), "{long}");
        assert!(long.contains("; the bands overlap"), "{long}");
    }

    #[test]
    fn figures_and_sizes_are_short() {
        assert_eq!(
            [0.0, 0.001, 0.5, 2.345, 23.45, 234.5].map(figure),
            ["0", "1.00e-3", "0.500", "2.35", "23.4", "234"]
        );
        assert_eq!([8, 1 << 40, 1536].map(bytes), ["8 B", "1 TiB", "1.5 KiB"]);
    }
}
