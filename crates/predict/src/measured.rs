//! Results of a bench, as far as constants are fitted to them.

use serde::{Deserialize, Serialize};

use super::calibration::CalibrationError;
use super::route::float;

/// Results of one run that are read: more than any bench has cases, few enough to go through them
/// for each series.
const MAX_RESULTS: usize = 5000;

/// Size from which a stream of the bench posts and signals each message by itself; shorter ones go
/// in lists.
pub const LISTED_BELOW: u64 = 4096;

/// The part of a bench's JSON that is read here.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Bench {
    /// `nobounce-bench/1`.
    pub schema: String,
    /// How it was called.
    #[serde(default)]
    pub command: String,
    /// Processes that spun beside it.
    #[serde(default)]
    pub busy: Option<u32>,
    /// What was measured.
    pub results: Vec<Measured>,
}

/// One measured case.
#[derive(Clone, Debug, Deserialize)]
pub struct Measured {
    /// `write`, `read`, `send`, ...
    pub op: String,
    /// `latency`, `bandwidth`, ...
    pub kind: String,
    /// Bytes.
    pub size: u64,
    /// Queue pairs.
    pub qps: u32,
    /// `host`, `gpu`.
    pub memory: String,
    /// `direct`, `staged (...)`, ...
    pub path: String,
    /// `udp`, `shm`, `roce`, `infiniband`.
    #[serde(default = "udp")]
    pub link: String,
    /// Path MTU.
    pub mtu: u32,
    /// How the target waited.
    #[serde(default)]
    pub wait: String,
    /// Processes that spun beside the run.
    #[serde(skip)]
    pub busy: u32,
    /// Whether the ends are on two machines.
    #[serde(skip)]
    pub between_machines: bool,
    /// Median, microseconds.
    #[serde(default)]
    pub p50_us: Option<f64>,
    /// GB/s.
    #[serde(default)]
    pub gbytes_per_s: Option<f64>,
    /// What each pass found, in the unit of the result, where there were several.
    #[serde(default)]
    pub passes: Vec<f64>,
}

impl Measured {
    /// WRITE of host memory over UDP that takes so long, in `latency` or as a share of `bandwidth`;
    /// passes that took these.
    #[cfg(test)]
    pub(super) fn write(kind: &str, size: u64, time: f64, passes: &[f64]) -> Self {
        let is_latency = kind == "latency";
        let figure = |time: f64| if is_latency { time } else { float(size) / time / 1000.0 };
        Self {
            op: "write".to_owned(),
            kind: kind.to_owned(),
            size,
            qps: 1,
            memory: "host".to_owned(),
            path: "direct".to_owned(),
            link: "udp".to_owned(),
            mtu: 4096,
            wait: "cq".to_owned(),
            busy: 0,
            between_machines: false,
            p50_us: is_latency.then_some(time),
            gbytes_per_s: (!is_latency).then_some(figure(time)),
            passes: passes.iter().map(|time| figure(*time)).collect(),
        }
    }

    /// Microseconds of one message: its latency, or its share of a stream.
    #[must_use]
    pub fn microseconds(&self) -> Option<f64> {
        self.time_of(match self.kind.as_str() {
            "latency" => self.p50_us?,
            "bandwidth" => self.gbytes_per_s?,
            _ => return None,
        })
    }

    /// Microseconds of each pass.
    #[must_use]
    pub fn times_of_passes(&self) -> Vec<f64> {
        self.passes.iter().filter_map(|figure| self.time_of(*figure)).collect()
    }

    /// What these passes found, by themselves.
    fn of_passes(&self, passes: Vec<f64>) -> Option<Self> {
        let figure = middle(&passes)?;
        Some(Self {
            p50_us: self.p50_us.map(|_| figure),
            gbytes_per_s: self.gbytes_per_s.map(|_| figure),
            passes,
            ..self.clone()
        })
    }

    /// Microseconds of a figure in the unit of the result.
    fn time_of(&self, figure: f64) -> Option<f64> {
        let time = match self.kind.as_str() {
            "latency" => figure,
            "bandwidth" => float(self.size) / figure / 1000.0,
            _ => return None,
        };
        (time.is_finite() && time > 0.0).then_some(time)
    }

    /// What belongs into one fit.
    #[must_use]
    pub fn series(&self) -> Series {
        let path = self.path.split_whitespace().next().unwrap_or_default().to_owned();
        let memory =
            if self.memory == "host" { "host".to_owned() } else { format!("{} {path}", self.memory) };
        Series {
            op: self.op.clone(),
            kind: self.kind.clone(),
            memory,
            link: self.link.clone(),
            qps: self.qps,
            wait: self.wait.clone(),
            mtu: self.mtu,
            busy: self.busy,
            between_machines: self.between_machines,
        }
    }
}

/// The link of files that do not name it.
fn udp() -> String {
    "udp".to_owned()
}

/// What a fit is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    /// The operation.
    pub op: String,
    /// `latency` or `bandwidth`.
    pub kind: String,
    /// Memory and path.
    pub memory: String,
    /// The way of the packets.
    #[serde(default = "udp")]
    pub link: String,
    /// Queue pairs.
    pub qps: u32,
    /// How the target waited.
    pub wait: String,
    /// Path MTU.
    #[serde(default = "usual_mtu")]
    pub mtu: u32,
    /// Processes that spun beside the run.
    #[serde(default)]
    pub busy: u32,
    /// Whether the ends are on two machines.
    #[serde(default)]
    pub between_machines: bool,
}

/// The path MTU of files that do not name it.
const fn usual_mtu() -> u32 {
    4096
}

/// Whether a bench was called with the other end on another machine.
#[must_use]
pub fn is_between_machines(command: &str) -> bool {
    command.split_whitespace().any(|word| word == "--peer" || word.starts_with("--peer="))
}

impl Series {
    /// Whether messages follow each other without waiting.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        self.kind == "bandwidth"
    }
}

impl std::fmt::Display for Series {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { op, kind, memory, link, qps, mtu, busy, between_machines, .. } = self;
        let link = if link == "udp" { String::new() } else { format!(", {link}") };
        let qps = if *qps > 1 { format!(", {qps} QPs") } else { String::new() };
        let mtu = if *mtu == usual_mtu() { String::new() } else { format!(", MTU {mtu}") };
        let busy = if *busy > 0 { format!(", beside {busy} busy processes") } else { String::new() };
        let reach = if *between_machines { ", between machines" } else { "" };
        f.pad(&format!("{op} {kind}, {memory}{link}{qps}{mtu}{busy}{reach}"))
    }
}

/// How the passes of one run are divided into two runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Alternating: drift over minutes affects both.
    Turns,
    /// The first half and the second: one run after the other.
    Halves,
}

impl Split {
    fn is_second(self, pass: usize, passes: usize) -> bool {
        match self {
            Self::Turns => pass % 2 == 1,
            Self::Halves => pass >= passes.div_ceil(2),
        }
    }
}

impl Bench {
    /// A run from the text of its file.
    ///
    /// # Errors
    /// It is something else.
    pub fn from_json(text: &str) -> Result<Self, CalibrationError> {
        let mut bench: Self =
            serde_json::from_str(text).map_err(|error| CalibrationError::NotBench(error.to_string()))?;
        let (busy, reach) = (bench.busy.unwrap_or(0), is_between_machines(&bench.command));
        for one in &mut bench.results {
            (one.busy, one.between_machines) = (busy, reach);
        }
        if bench.schema != "nobounce-bench/1" {
            return Err(CalibrationError::NotBench(format!("unexpected schema {:?}", bench.schema)));
        }
        if bench.results.len() > MAX_RESULTS {
            return Err(CalibrationError::NotBench(format!("more than {MAX_RESULTS} results")));
        }
        Ok(bench)
    }

    /// Divides one run into two. Every pass has fresh devices and a fresh second process, so passes
    /// are nearly independent runs.
    ///
    /// # Errors
    /// A case has one pass only.
    pub fn split(&self, how: Split) -> Result<(Self, Self), CalibrationError> {
        let timed = |one: &&Measured| one.microseconds().is_some();
        let half = |second: bool| {
            let results = self.results.iter().filter(timed).map(|one| {
                let count = one.passes.len();
                let ours =
                    one.passes.iter().enumerate().filter(|(at, _)| how.is_second(*at, count) == second);
                one.of_passes(ours.map(|(_, figure)| *figure).collect()).ok_or(CalibrationError::OnePass)
            });
            Ok(Self { results: results.collect::<Result<_, _>>()?, ..self.clone() })
        };
        Ok((half(false)?, half(true)?))
    }
}

/// Trimmed mean: without a tenth at either end (at least one of three or more); `None` without
/// samples. The bench merges passes by it.
///
/// Passes are often bimodal: a median would jump between the two modes with the least change of
/// their shares.
#[must_use]
pub fn middle(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let cut = if sorted.len() > 2 { sorted.len().div_ceil(10) } else { 0 };
    let kept = sorted.get(cut..sorted.len() - cut)?;
    let count = u32::try_from(kept.len()).ok().filter(|count| *count > 0)?;
    Some(kept.iter().sum::<f64>() / f64::from(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_a_mean_that_wild_samples_do_not_move() {
        assert_eq!(middle(&[]), None);
        assert_eq!(middle(&[3.0, 5.0]), Some(4.0));
        assert_eq!(middle(&[1.0, 4.0, 100.0]), Some(4.0));
        // Two states, four to three: the median would be one of them.
        assert_eq!(middle(&[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]), Some(1.4));
    }

    fn bench(passes: &str) -> Bench {
        let common = r#""op": "write", "size": 8, "qps": 1, "memory": "host", "path": "direct", "mtu": 4096"#;
        let text = format!(
            r#"{{"schema": "nobounce-bench/1", "results": [
                {{"kind": "latency", "p50_us": 9, "passes": {passes}, {common}}},
                {{"kind": "bandwidth", "gbytes_per_s": 9, "passes": {passes}, {common}}},
                {{"kind": "rate", {common}}}]}}"#
        );
        Bench::from_json(&text).unwrap()
    }

    #[test]
    fn passes_make_two_runs_in_turns_or_one_after_the_other() {
        let figures = |run: &Bench| (run.results[0].p50_us, run.results[1].gbytes_per_s);
        let run = bench("[1.0, 10.0, 2.0, 20.0, 3.0, 60.0]");
        let (first, second) = run.split(Split::Turns).unwrap();
        assert_eq!((figures(&first), figures(&second)), ((Some(2.0), Some(2.0)), (Some(20.0), Some(20.0))));
        assert_eq!((first.results.len(), &second.results[0].passes[..]), (2, &[10.0, 20.0, 60.0][..]));
        let (first, second) = run.split(Split::Halves).unwrap();
        assert_eq!((figures(&first), figures(&second)), ((Some(2.0), Some(2.0)), (Some(20.0), Some(20.0))));
        assert_eq!(first.results[0].passes, [1.0, 10.0, 2.0]);
    }

    #[test]
    fn one_pass_makes_no_two_runs() {
        for passes in ["[]", "[1.0]"] {
            for how in [Split::Turns, Split::Halves] {
                assert!(matches!(bench(passes).split(how), Err(CalibrationError::OnePass)));
            }
        }
    }
}
