//! The report of a run: the JSON, and the single source of table, plot and comparison.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::case::{Case, CaseKind, CaseResult, CpuUse, Op, Samples, Wait};
use super::counted::Counted;
use super::machine::Machine;
use super::numbers::{float, rounded};
use super::raw::Raw;
use super::stats::{Percentiles, thin};
use super::tcp::Tcp;
use super::udp_counters::KernelUdp;

/// Name and version of the JSON; the number changes when a reader of the old form would misread the
/// new.
pub(crate) const SCHEMA: &str = "nobounce-bench/1";

/// Latency samples kept for one case; percentiles are taken over all of them before.
pub(crate) const KEPT_SAMPLES: usize = 4096;

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct BenchReport {
    /// Always [`SCHEMA`].
    pub(crate) schema: String,
    /// Where it ran. The host name is omitted on purpose: these files are shared.
    pub(crate) machine: Machine,
    /// How it was called.
    pub(crate) command: String,
    /// When it began, UTC, RFC 3339.
    pub(crate) started: String,
    /// Share of sent packets dropped on purpose, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) loss: Option<f64>,
    /// What plain UDP does between two processes here; absent with `--peer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) raw: Option<Raw>,
    /// Processes that spun beside the measurement; absent without `--busy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) busy: Option<u32>,
    /// TCP between the same two processes; absent without `--busy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tcp: Option<Tcp>,
    /// What the kernel counted while the cases ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kernel_udp: Option<KernelUdp>,
    /// What is to be known about the run besides, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    /// One entry per case, in the order they ran.
    pub(crate) results: Vec<CaseOutcome>,
}

/// One measured case. Fields that do not apply are absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CaseOutcome {
    /// The operation.
    pub(crate) op: Op,
    /// What was measured of it.
    pub(crate) kind: CaseKind,
    /// Bytes in one message.
    pub(crate) size: u64,
    /// Queue pairs at work.
    pub(crate) qps: u32,
    /// `udp`, `shm`, or what hardware has.
    pub(crate) link: String,
    /// `host`, `gpu`, or `stand-in`.
    pub(crate) memory: String,
    /// `direct`, `staged (reason)`, or `naive staging`.
    pub(crate) path: String,
    /// What the NICs of both ends counted meanwhile, by path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) counted: Option<Counted>,
    /// How the target waited.
    pub(crate) wait: Wait,
    /// Path MTU.
    pub(crate) mtu: u32,
    /// Operations in the timed part.
    pub(crate) iters: u64,
    /// Smallest latency, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) min_us: Option<f64>,
    /// Median latency, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) p50_us: Option<f64>,
    /// Mean latency, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mean_us: Option<f64>,
    /// 99th percentile, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) p99_us: Option<f64>,
    /// 99.9th percentile, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) p999_us: Option<f64>,
    /// 10^9 payload bytes per second, the sum of both directions where there are two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gbytes_per_s: Option<f64>,
    /// 10^6 messages per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mops: Option<f64>,
    /// Ours / raw: at most about 1 for bandwidth, at least about 1 for latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) of_raw: Option<f64>,
    /// Why there is no `of_raw` though plain UDP was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) raw_doubt: Option<String>,
    /// Ours / TCP of the same pass: bandwidth, or median latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) of_tcp: Option<f64>,
    /// CPU seconds of both ends for 10^9 bytes of payload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_s_per_gb: Option<f64>,
    /// CPU seconds of both ends for 10^6 messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_s_per_mop: Option<f64>,
    /// Messages that were compared one by one, outside the timed part.
    #[serde(default)]
    pub(crate) compared: u64,
    /// Whether every byte and guard zone was right.
    pub(crate) verified: bool,
    /// What was wrong first, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fault: Option<String>,
    /// The figure of each pass, where there were several: the median latency, the bandwidth, or the
    /// rate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) passes: Vec<f64>,
    /// In the unit of the result. Latency: at most [`KEPT_SAMPLES`], evenly chosen. Else: one per
    /// interval.
    pub(crate) samples: Vec<f64>,
}

/// Memory and path of a result, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryPath {
    /// Host memory.
    Host,
    /// GPU memory, direct.
    Direct,
    /// GPU memory, staged by the NIC.
    Staged,
    /// GPU memory, staged by a naive application.
    Naive,
}

impl fmt::Display for MemoryPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Host => "host",
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Naive => "naive",
        })
    }
}

/// The measurer handed back something that is no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum OutcomeError {
    /// Nothing was sampled.
    #[error("{case}: no samples; raise --iters")]
    NoSamples {
        /// The case.
        case: String,
    },
    /// A latency for a bandwidth or the reverse.
    #[error("{case}: samples of the wrong kind; this is a bug in nobounce")]
    WrongSamples {
        /// The case.
        case: String,
    },
}

impl BenchReport {
    /// The link of its cases, except for those that say otherwise.
    pub(crate) fn main_link(&self) -> Option<&str> {
        self.results.first().map(|one| one.link.as_str())
    }

    /// Its cases, without those that took another link.
    pub(crate) fn on_main_link(&self) -> impl Iterator<Item = &CaseOutcome> {
        let main = self.main_link();
        self.results.iter().filter(move |one| Some(one.link.as_str()) == main)
    }
}

impl CaseOutcome {
    /// Turns samples into the figures people compare.
    pub(crate) fn new(
        case: &Case,
        result: &CaseResult,
        raw: Option<&Raw>,
        tcp: Option<&Tcp>,
    ) -> Result<Self, OutcomeError> {
        let mut outcome = Self::empty(case, result);
        let no_samples = || OutcomeError::NoSamples { case: case.to_string() };
        match (&result.samples, case.kind) {
            (Samples::Latency(samples), CaseKind::Latency | CaseKind::GpuVisible) => {
                let found = Percentiles::of(samples).ok_or_else(no_samples)?;
                outcome.min_us = Some(found.min);
                outcome.p50_us = Some(found.p50);
                outcome.mean_us = Some(samples.iter().sum::<f64>() / float(samples.len() as u64));
                outcome.p99_us = Some(found.p99);
                outcome.p999_us = Some(found.p999);
                outcome.samples = thin(samples, KEPT_SAMPLES);
                let passes = if case.op.is_round_trip() { 2.0 } else { 1.0 };
                outcome.of_raw = raw.map(|raw| found.p50 / (raw.half_round_trip_us * passes));
                outcome.of_tcp = tcp.map(|tcp| found.p50 / (tcp.half_round_trip_us * passes));
                outcome.raw_doubt = raw.and_then(Raw::latency_doubt);
            }
            (
                Samples::Throughput(intervals),
                CaseKind::Bandwidth | CaseKind::Bidirectional | CaseKind::Rate,
            ) => {
                let seconds: f64 = intervals.iter().map(|interval| interval.seconds).sum();
                let messages: u64 = intervals.iter().map(|interval| interval.messages).sum();
                if !(seconds > 0.0 && messages > 0) {
                    return Err(no_samples());
                }
                let unit = if case.kind == CaseKind::Rate { 1e6 } else { 1e9 / float(case.size) };
                let kept = intervals.iter().filter(|interval| interval.seconds > 0.0);
                outcome.samples =
                    kept.map(|interval| float(interval.messages) / interval.seconds / unit).collect();
                let total = float(messages) / seconds / unit;
                if case.kind == CaseKind::Rate {
                    outcome.mops = Some(total);
                } else {
                    outcome.gbytes_per_s = Some(total);
                    outcome.of_raw = raw.map(|raw| total / raw.gbytes_per_s);
                    outcome.of_tcp = tcp.map(|tcp| total / tcp.gbytes_per_s);
                    outcome.raw_doubt = raw.and_then(Raw::bandwidth_doubt);
                }
            }
            _ => return Err(OutcomeError::WrongSamples { case: case.to_string() }),
        }
        outcome.of_raw = outcome.of_raw.filter(|share| share.is_finite() && outcome.raw_doubt.is_none());
        let CpuUse { seconds, messages } = result.cpu;
        let per = |amount: f64| (amount > 0.0 && seconds > 0.0).then(|| seconds / amount);
        outcome.cpu_s_per_gb = per(float(messages) * float(case.size) / 1e9);
        outcome.cpu_s_per_mop = per(float(messages) / 1e6);
        outcome.round();
        Ok(outcome)
    }

    /// Memory and path in one word: `host`, `direct`, `staged` or `naive`.
    pub(crate) fn memory_path(&self) -> MemoryPath {
        match (self.memory.as_str(), self.path.split_whitespace().next()) {
            ("host", _) => MemoryPath::Host,
            (_, Some("staged")) => MemoryPath::Staged,
            (_, Some("naive")) => MemoryPath::Naive,
            _ => MemoryPath::Direct,
        }
    }

    fn round(&mut self) {
        let figures =
            [&mut self.min_us, &mut self.p50_us, &mut self.mean_us, &mut self.p99_us, &mut self.p999_us];
        let others = [&mut self.gbytes_per_s, &mut self.mops, &mut self.of_raw, &mut self.of_tcp];
        let costs = [&mut self.cpu_s_per_gb, &mut self.cpu_s_per_mop];
        let figures = figures.into_iter().chain(others).chain(costs).flatten();
        figures.chain(&mut self.samples).for_each(|figure| *figure = rounded(*figure));
    }

    fn empty(case: &Case, result: &CaseResult) -> Self {
        Self {
            op: case.op,
            kind: case.kind,
            size: case.size,
            qps: case.qps,
            link: result.link.clone(),
            memory: result.memory.clone(),
            path: result.path.clone(),
            counted: result.counted,
            wait: case.wait,
            mtu: result.mtu,
            iters: result.iters,
            min_us: None,
            p50_us: None,
            mean_us: None,
            p99_us: None,
            p999_us: None,
            gbytes_per_s: None,
            mops: None,
            of_raw: None,
            raw_doubt: None,
            of_tcp: None,
            cpu_s_per_gb: None,
            cpu_s_per_mop: None,
            compared: result.compared,
            verified: result.verified.is_ok(),
            fault: result.verified.clone().err(),
            passes: Vec::new(),
            samples: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::{Amount, Interval, Place};
    use super::*;

    fn case(op: Op, kind: CaseKind, size: u64) -> Case {
        let place = Place::Host;
        Case {
            op,
            kind,
            place,
            size,
            qps: 1,
            wait: Wait::Cq,
            mtu: 4096,
            amount: Amount::Iters(1000),
            over: None,
        }
    }

    fn result(samples: Samples) -> CaseResult {
        CaseResult {
            samples,
            mtu: 4096,
            iters: 1000,
            link: "udp".to_owned(),
            memory: "host".to_owned(),
            path: "direct".to_owned(),
            counted: None,
            compared: 64,
            cpu: CpuUse { seconds: 0.5, messages: 1000 },
            verified: Ok(()),
        }
    }

    fn raw() -> Raw {
        Raw {
            gbytes_per_s: 5.0,
            half_round_trip_us: 2.0,
            gbytes_per_s_samples: vec![],
            half_round_trip_us_samples: vec![],
            blast_cpu_samples: vec![],
            ping_cpu_samples: vec![],
        }
    }

    #[test]
    fn latency_of_a_read_is_set_against_two_passes() {
        let samples = result(Samples::Latency(vec![6.0, 4.0, 8.0]));
        let write =
            CaseOutcome::new(&case(Op::Write, CaseKind::Latency, 8), &samples, Some(&raw()), None).unwrap();
        assert_eq!((write.min_us, write.p50_us, write.of_raw), (Some(4.0), Some(6.0), Some(3.0)));
        let read =
            CaseOutcome::new(&case(Op::Read, CaseKind::Latency, 8), &samples, Some(&raw()), None).unwrap();
        assert_eq!(read.of_raw, Some(1.5));
    }

    #[test]
    fn bandwidth_is_bytes_over_the_whole_time() {
        let intervals =
            vec![Interval { seconds: 1.0, messages: 1000 }, Interval { seconds: 3.0, messages: 1000 }];
        let samples = result(Samples::Throughput(intervals));
        let found =
            CaseOutcome::new(&case(Op::Write, CaseKind::Bandwidth, 1_000_000), &samples, Some(&raw()), None)
                .unwrap();
        assert_eq!(found.gbytes_per_s, Some(0.5));
        assert_eq!(found.of_raw, Some(0.1));
        assert_eq!(found.samples, [1.0, 0.333333]);
        let rate =
            CaseOutcome::new(&case(Op::Write, CaseKind::Rate, 8), &samples, Some(&raw()), None).unwrap();
        assert_eq!((rate.mops, rate.of_raw, rate.gbytes_per_s), (Some(0.0005), None, None));
    }

    /// Plain UDP was measured on a busy machine, ours not: no 0.0011 x raw.
    #[test]
    fn a_share_of_nonsense_is_none_and_says_why() {
        let busy = Raw { half_round_trip_us: 3600.0, ping_cpu_samples: vec![0.4], ..raw() };
        let samples = result(Samples::Latency(vec![4.0]));
        let latency =
            CaseOutcome::new(&case(Op::Write, CaseKind::Latency, 8), &samples, Some(&busy), None).unwrap();
        assert_eq!((latency.p50_us, latency.of_raw), (Some(4.0), None));
        assert!(latency.raw_doubt.unwrap().contains("40 % of the CPU"));
        let samples = result(Samples::Throughput(vec![Interval { seconds: 1.0, messages: 1000 }]));
        let stream =
            CaseOutcome::new(&case(Op::Write, CaseKind::Bandwidth, 1_000_000), &samples, Some(&busy), None)
                .unwrap();
        assert_eq!((stream.of_raw, stream.raw_doubt), (Some(0.2), None), "the blast was fine");
    }

    #[test]
    fn what_is_no_result_is_refused() {
        let latency = result(Samples::Latency(vec![]));
        let of = |kind, result: &CaseResult| CaseOutcome::new(&case(Op::Write, kind, 8), result, None, None);
        assert!(matches!(of(CaseKind::Latency, &latency), Err(OutcomeError::NoSamples { .. })));
        assert!(matches!(of(CaseKind::Rate, &latency), Err(OutcomeError::WrongSamples { .. })));
        let still = result(Samples::Throughput(vec![Interval { seconds: 0.0, messages: 9 }]));
        assert!(matches!(of(CaseKind::Rate, &still), Err(OutcomeError::NoSamples { .. })));
    }

    #[test]
    fn absent_fields_are_absent_in_the_json() {
        let samples = result(Samples::Throughput(vec![Interval { seconds: 1.0, messages: 1 }]));
        let found =
            CaseOutcome::new(&case(Op::Send, CaseKind::Bidirectional, 64), &samples, None, None).unwrap();
        let json = serde_json::to_value(&found).unwrap();
        assert_eq!(json["kind"], "bidirectional");
        for absent in ["p50_us", "mops", "of_raw", "fault"] {
            assert!(json.get(absent).is_none(), "{absent}");
        }
        assert_eq!(serde_json::from_value::<CaseOutcome>(json).unwrap(), found);
    }
}
