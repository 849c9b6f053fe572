//! What a bench measured, as far as constants are fitted to it.

use serde::{Deserialize, Serialize};

use super::calibration::CalibrationError;
use super::route::float;

/// Results of one run that are read: more than any bench has cases, few enough to go through them for each series.
const MAX_RESULTS: usize = 5000;

/// The part of a bench's JSON that is read here.
#[derive(Clone, Debug, Deserialize)]
pub struct Bench {
    /// `nobounce-bench/1`.
    pub schema: String,
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
}

impl std::fmt::Display for Series {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { op, kind, memory, link, qps, .. } = self;
        let link = if link == "udp" { String::new() } else { format!(", {link}") };
        let qps = if *qps > 1 { format!(", {qps} QPs") } else { String::new() };
        f.pad(&format!("{op} {kind}, {memory}{link}{qps}"))
    }
}

impl Bench {
    /// A run from the text of its file.
    ///
    /// # Errors
    /// It is something else.
    pub fn from_json(text: &str) -> Result<Self, CalibrationError> {
        let bench: Self =
            serde_json::from_str(text).map_err(|error| CalibrationError::NotBench(error.to_string()))?;
        if bench.schema != "nobounce-bench/1" {
            return Err(CalibrationError::NotBench(format!("its schema is {:?}", bench.schema)));
        }
        if bench.results.len() > MAX_RESULTS {
            return Err(CalibrationError::NotBench(format!("it has more than {MAX_RESULTS} results")));
        }
        Ok(bench)
    }
}
