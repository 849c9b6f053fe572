//! This run against an earlier one: what got slower, what got faster.

use std::fmt;
use std::path::Path;

use super::case::{CaseKind, Op, Wait};
use super::model::{BenchReport, CaseOutcome, SCHEMA};
use crate::size::Bytes;

/// Bytes of an earlier run that we are willing to read.
const MAX_FILE: u64 = 256 << 20;

/// Why there is nothing to compare with.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompareError {
    /// The file is not there or not readable.
    #[error("cannot read the earlier run {path}; write one with: nobounce bench --json {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Not one of ours.
    #[error("{path} is too large for an earlier run ({}); was it written by --json?", Bytes(*bytes))]
    TooLarge {
        /// The file.
        path: String,
        /// Its length.
        bytes: u64,
    },
    /// Not our JSON.
    #[error("{path} is not a run of nobounce bench; write one with: nobounce bench --json FILE")]
    Parse {
        /// The file.
        path: String,
        /// Why.
        source: serde_json::Error,
    },
    /// Another form of our JSON.
    #[error("{path} has schema {found:?}, expected {SCHEMA:?}; repeat the earlier run with this version")]
    Schema {
        /// The file.
        path: String,
        /// What it says.
        found: String,
    },
    /// No case in common.
    #[error(
        "the earlier run and this one have no case in common; use the same --memory, --op, --kind, --size, --qps and --wait"
    )]
    NothingInCommon,
}

/// Reads an earlier run.
pub(crate) fn load(path: &Path) -> Result<BenchReport, CompareError> {
    let shown = path.display().to_string();
    let read = |source| CompareError::Read { path: shown.clone(), source };
    let bytes = std::fs::metadata(path).map_err(read)?.len();
    if bytes > MAX_FILE {
        return Err(CompareError::TooLarge { path: shown, bytes });
    }
    let text = std::fs::read(path).map_err(read)?;
    parse(&text, &shown)
}

fn parse(text: &[u8], path: &str) -> Result<BenchReport, CompareError> {
    let wrong = |source| CompareError::Parse { path: path.to_owned(), source };
    // Check the schema first: another one may lack the fields of this one.
    let loose: serde_json::Value = serde_json::from_slice(text).map_err(wrong)?;
    match loose.get("schema").and_then(serde_json::Value::as_str) {
        Some(SCHEMA) | None => {}
        Some(found) => return Err(CompareError::Schema { path: path.to_owned(), found: found.to_owned() }),
    }
    serde_json::from_value(loose).map_err(wrong)
}

/// Two runs, case by case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Comparison {
    /// Slower beyond the tolerance, worst first.
    pub(crate) slower: Vec<Change>,
    /// Faster beyond the tolerance, best first.
    pub(crate) faster: Vec<Change>,
    /// Within the tolerance.
    pub(crate) same: usize,
    /// Measured before and not now.
    pub(crate) only_old: usize,
    /// Measured now and not before.
    pub(crate) only_new: usize,
    /// The tolerance, as a share.
    pub(crate) tolerance: f64,
    /// What plain UDP did then and now, GB/s.
    pub(crate) raw: Option<(f64, f64)>,
}

/// One case in both runs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Change {
    case: String,
    unit: &'static str,
    old: f64,
    new: f64,
    /// New speed / old speed: below 1 is slower, also for latencies.
    speed: f64,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, unit, old, new, .. } = self;
        let percent = (new / old - 1.0) * 100.0;
        write!(f, "{case}: {old:.2} -> {new:.2} {unit} ({percent:+.0} %)")
    }
}

/// Compares case by case what both runs measured.
pub(crate) fn compare(
    old: &BenchReport,
    new: &BenchReport,
    tolerance: f64,
) -> Result<Comparison, CompareError> {
    let mut found = Comparison {
        slower: Vec::new(),
        faster: Vec::new(),
        same: 0,
        only_old: 0,
        only_new: 0,
        tolerance,
        raw: old.raw.as_ref().zip(new.raw.as_ref()).map(|(old, new)| (old.gbytes_per_s, new.gbytes_per_s)),
    };
    for outcome in &new.results {
        let before = old.results.iter().find(|other| key(other) == key(outcome));
        let Some(change) = before.and_then(|before| change(before, outcome)) else {
            found.only_new += 1;
            continue;
        };
        // In the unit of the figure itself: 10 % more microseconds, 10 % fewer bytes.
        let worse = if outcome.kind.is_latency() {
            change.new / change.old - 1.0
        } else {
            1.0 - change.new / change.old
        };
        if worse > tolerance {
            found.slower.push(change);
        } else if worse < -tolerance {
            found.faster.push(change);
        } else {
            found.same += 1;
        }
    }
    found.only_old =
        old.results.iter().filter(|other| !new.results.iter().any(|one| key(one) == key(other))).count();
    if found.slower.is_empty() && found.faster.is_empty() && found.same == 0 {
        return Err(CompareError::NothingInCommon);
    }
    found.slower.sort_by(|a, b| a.speed.total_cmp(&b.speed));
    found.faster.sort_by(|a, b| b.speed.total_cmp(&a.speed));
    Ok(found)
}

type Key<'a> = ((Op, CaseKind, u64, u32, Wait), [&'a str; 3], u32);

fn key(outcome: &CaseOutcome) -> Key<'_> {
    let CaseOutcome { op, kind, size, qps, wait, link, memory, path, mtu, .. } = outcome;
    ((*op, *kind, *size, *qps, *wait), [link, memory, path], *mtu)
}

fn change(old: &CaseOutcome, new: &CaseOutcome) -> Option<Change> {
    let (unit, old_value, new_value) = match new.kind {
        CaseKind::Latency | CaseKind::GpuVisible => ("us", old.p50_us?, new.p50_us?),
        CaseKind::Bandwidth | CaseKind::Bidirectional => ("GB/s", old.gbytes_per_s?, new.gbytes_per_s?),
        CaseKind::Rate => ("Mmsg/s", old.mops?, new.mops?),
    };
    let ratio = new_value / old_value;
    // A file may contain anything; only two positive figures can be compared.
    if !(old_value > 0.0 && new_value > 0.0 && ratio.is_finite()) {
        return None;
    }
    let mut case = format!("{} {} {}", new.op, Bytes(new.size), new.kind);
    if new.qps > 1 {
        case = format!("{case}, {} queue pairs", new.qps);
    }
    case.push_str(new.wait.words());
    if new.memory != "host" {
        case = format!("{case}, {} {}", new.memory, new.memory_path());
    }
    let speed = if new.kind.is_latency() { 1.0 / ratio } else { ratio };
    Some(Change { case, unit, old: old_value, new: new_value, speed })
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = self.tolerance * 100.0;
        let compared = self.slower.len() + self.faster.len() + self.same;
        writeln!(
            f,
            "compared {compared} cases, tolerance {percent:.0} %: {} slower, {} faster, {} the same",
            self.slower.len(),
            self.faster.len(),
            self.same
        )?;
        for change in &self.slower {
            writeln!(f, "  slower  {change}")?;
        }
        for change in &self.faster {
            writeln!(f, "  faster  {change}")?;
        }
        if self.only_old + self.only_new > 0 {
            writeln!(
                f,
                "  not compared: {} only in the earlier run, {} only in this one",
                self.only_old, self.only_new
            )?;
        }
        if let Some((old, new)) = self.raw
            && (new / old - 1.0).abs() > self.tolerance
        {
            writeln!(
                f,
                "  note: plain UDP went from {old:.2} to {new:.2} GB/s: the machine or its load differs; compare the shares of \
                 raw, or run again on an idle machine"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::flow_tests::sample_report;
    use super::*;

    /// Makes one figure this many times larger.
    fn scale(report: &mut BenchReport, kind: CaseKind, factor: f64) {
        for outcome in report.results.iter_mut().filter(|outcome| outcome.kind == kind) {
            for figure in
                [&mut outcome.p50_us, &mut outcome.gbytes_per_s, &mut outcome.mops].into_iter().flatten()
            {
                *figure *= factor;
            }
        }
    }

    #[test]
    fn a_run_equals_itself() {
        let run = sample_report();
        let found = compare(&run, &run, 0.0).unwrap();
        assert_eq!((found.slower.len(), found.faster.len(), found.same), (0, 0, run.results.len()));
    }

    #[test]
    fn slower_is_more_microseconds_and_fewer_bytes() {
        let old = sample_report();
        let mut new = old.clone();
        scale(&mut new, CaseKind::Latency, 1.2);
        scale(&mut new, CaseKind::Bandwidth, 0.5);
        scale(&mut new, CaseKind::Rate, 1.5);
        let found = compare(&old, &new, 0.10).unwrap();
        let count = |kind| old.results.iter().filter(|outcome| outcome.kind == kind).count();
        assert_eq!(found.slower.len(), count(CaseKind::Latency) + count(CaseKind::Bandwidth));
        assert_eq!(found.faster.len(), count(CaseKind::Rate));
        assert!(found.slower[0].to_string().contains("bandwidth"), "worst first: {}", found.slower[0]);
        assert!(found.slower[0].to_string().contains("(-50 %)"), "{}", found.slower[0]);
    }

    #[test]
    fn the_tolerance_is_the_boundary() {
        let old = sample_report();
        let mut new = old.clone();
        scale(&mut new, CaseKind::Latency, 1.09);
        assert!(compare(&old, &new, 0.10).unwrap().slower.is_empty());
        scale(&mut new, CaseKind::Latency, 1.03);
        assert!(!compare(&old, &new, 0.10).unwrap().slower.is_empty());
    }

    #[test]
    fn cases_of_one_run_only_are_counted_and_none_in_common_is_an_error() {
        let old = sample_report();
        let mut new = old.clone();
        new.results[0].qps = 7;
        let found = compare(&old, &new, 0.1).unwrap();
        assert_eq!((found.only_old, found.only_new), (1, 1));
        new.results.iter_mut().for_each(|outcome| outcome.link = "other".to_owned());
        assert!(matches!(compare(&old, &new, 0.1), Err(CompareError::NothingInCommon)));
    }

    #[test]
    fn a_different_machine_is_pointed_out() {
        let old = sample_report();
        let mut new = old.clone();
        new.raw.as_mut().unwrap().gbytes_per_s *= 0.5;
        let told = compare(&old, &new, 0.1).unwrap().to_string();
        assert!(told.contains("plain UDP went from 5.00 to 2.50"), "{told}");
    }

    #[test]
    fn files_that_are_no_run_are_refused_by_cause() {
        assert!(matches!(load(Path::new("/nonexistent/old.json")), Err(CompareError::Read { .. })));
        assert!(matches!(parse(b"{", "x"), Err(CompareError::Parse { .. })));
        assert!(matches!(parse(b"{}", "x"), Err(CompareError::Parse { .. })));
        assert!(matches!(parse(br#"{"schema":"nobounce-bench/9"}"#, "x"), Err(CompareError::Schema { .. })));
        let run = sample_report();
        assert!(
            parse(&serde_json::to_vec(&run).unwrap(), "x").unwrap() == run,
            "what is written reads back the same"
        );
    }

    #[test]
    fn figures_that_cannot_be_compared_are_left_out() {
        let old = sample_report();
        let mut new = old.clone();
        new.results[0].p50_us = Some(0.0);
        assert_eq!(compare(&old, &new, 0.1).unwrap().only_new, 1);
    }
}
