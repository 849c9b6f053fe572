//! What was measured on emulated paths.

use serde::{Deserialize, Serialize};

/// Names the form of the JSON.
pub(super) const SCHEMA: &str = "nobounce-path/1";

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PathReport {
    pub(super) schema: String,
    pub(super) version: String,
    pub(super) started: String,
    pub(super) machine: String,
    /// Measured alternately so many times each; medians count.
    pub(super) passes: u32,
    /// The path without faults and without a rate, for each MTU.
    pub(super) clean: Vec<Clean>,
    pub(super) conditions: Vec<Condition>,
    /// What could not be measured, and why.
    pub(super) notes: Vec<String>,
}

/// The emulator's own cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Clean {
    pub(super) mtu: u32,
    pub(super) flows: Vec<CleanFlow>,
}

/// One kind of flow on a path without faults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CleanFlow {
    /// `nb0`, or the congestion control of TCP.
    pub(super) kind: String,
    pub(super) gbytes_per_s: f64,
    /// 8 bytes there and back.
    pub(super) round_trip_p50_us: f64,
    pub(super) round_trip_p99_us: f64,
    /// CPU seconds of the emulator for 10^9 bytes.
    pub(super) emulator_cpu_s_per_gb: f64,
    /// Packets that left the emulator late, microseconds on average.
    pub(super) late_us: f64,
}

/// One path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Condition {
    /// As it is written, with its rate.
    pub(super) path: String,
    /// The rate, in 10^9 bytes per second.
    pub(super) rate_gbytes_per_s: f64,
    pub(super) loss: f64,
    pub(super) delay_us: f64,
    pub(super) mtu: u32,
    /// One flow of each kind alone.
    pub(super) alone: Vec<Alone>,
    /// Flows of nb0 beside as many of TCP.
    pub(super) beside: Vec<Beside>,
}

/// One flow alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Alone {
    pub(super) kind: String,
    /// Median of the passes.
    pub(super) gbytes_per_s: f64,
    pub(super) samples: Vec<f64>,
    /// Packets or segments sent again, in all passes.
    pub(super) retransmitted: u64,
    pub(super) wrong_bytes: u64,
}

/// Flows of two kinds at once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Beside {
    /// The congestion control of TCP.
    pub(super) tcp: String,
    /// 10^9 bytes per second of each flow.
    pub(super) nb0_gbytes_per_s: Vec<f64>,
    pub(super) tcp_gbytes_per_s: Vec<f64>,
    /// Jain's index over all flows: 1 if all are equal.
    pub(super) jain: f64,
    /// What nb0 got of the sum.
    pub(super) nb0_share: f64,
}

impl Condition {
    /// What one flow of that kind reached.
    pub(super) fn of(&self, kind: &str) -> Option<f64> {
        self.alone.iter().find(|one| one.kind == kind).map(|one| one.gbytes_per_s)
    }
}

impl Beside {
    pub(super) fn new(tcp: String, nb0: Vec<f64>, of_tcp: Vec<f64>) -> Self {
        let all: Vec<f64> = nb0.iter().chain(&of_tcp).copied().collect();
        let (sum, squares) = (all.iter().sum::<f64>(), all.iter().map(|one| one * one).sum::<f64>());
        let count = f64::from(u32::try_from(all.len()).unwrap_or(u32::MAX));
        let of = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        Self {
            tcp,
            jain: of(sum * sum, count * squares),
            nb0_share: of(nb0.iter().sum(), sum),
            nb0_gbytes_per_s: nb0,
            tcp_gbytes_per_s: of_tcp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_flows_are_fair_and_a_single_one_is_not() {
        let even = Beside::new("bbr".into(), vec![1.0, 1.0], vec![1.0, 1.0]);
        assert_eq!((even.jain, even.nb0_share), (1.0, 0.5));
        let odd = Beside::new("bbr".into(), vec![1.0, 0.0], vec![0.0, 0.0]);
        assert_eq!((odd.jain, odd.nb0_share), (0.25, 1.0));
        let none = Beside::new("bbr".into(), vec![0.0], vec![0.0]);
        assert_eq!((none.jain, none.nb0_share), (0.0, 0.0));
    }
}
