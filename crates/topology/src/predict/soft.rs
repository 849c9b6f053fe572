//! The software NIC: what a core does for each message and byte, on a machine of which more or less is known.

use serde::Serialize;

use super::calibration::{Calibration, Series};
use super::constants as c;
use super::factor::{Factor, Share};
use super::model::Stream;
use super::parts::{Memory, Op, Parts, Software};
use super::route::float;

/// What is known of the software NIC on a machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Soft {
    /// Microseconds of a short message.
    pub base_us: f64,
    /// GB/s of a long one.
    pub gbytes_per_s: f64,
    /// Microseconds between two messages of a stream.
    pub gap_us: f64,
    /// Constants that were fitted to a run; they come before the three.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
}

impl Default for Soft {
    fn default() -> Self {
        Self { base_us: c::SOFT_BASE, gbytes_per_s: c::SOFT_RATE, gap_us: c::SOFT_GAP, calibration: None }
    }
}

impl Soft {
    /// From what plain UDP does between two processes here: half a round trip in microseconds, and GB/s.
    #[must_use]
    pub fn of_raw(half_round_trip_us: f64, gbytes_per_s: f64) -> Self {
        Self {
            base_us: half_round_trip_us + 2.0 * c::SOFT_ENGINE,
            // The same core that sends or receives also copies.
            gbytes_per_s: 1.0 / (1.0 / gbytes_per_s + 1.0 / c::CORE_COPY),
            ..Self::default()
        }
    }
}

/// Microseconds of a message by factor, and of its share of a stream, where a run on this machine tells.
pub(super) fn calibrated(parts: &Parts, size: u64) -> Option<(Vec<Share>, f64, f64)> {
    if parts.software != Software::Nobounce {
        return None;
    }
    let calibration = parts.soft.calibration.as_ref()?;
    let op = if parts.operation == Op::Read { "read" } else { "write" };
    let memory = if parts.memory == Memory::Host { "host" } else { "gpu direct" };
    let series = |kind: &str| Series {
        op: op.to_owned(),
        kind: kind.to_owned(),
        memory: memory.to_owned(),
        qps: 1,
        wait: "cq".to_owned(),
    };
    let (latency, stream) = (calibration.fit(&series("latency"))?, calibration.fit(&series("bandwidth"))?);
    let base = latency.base_us;
    let shares = vec![
        Share { factor: Factor::Software, microseconds: base },
        Share { factor: Factor::SoftNic, microseconds: latency.microseconds(size) - base },
    ];
    Some((shares, stream.microseconds(size), latency.worst().max(stream.worst())))
}

/// GB/s and what limits it, of messages that take this long each.
pub(super) fn stream(size: u64, microseconds: f64) -> Stream {
    Stream { gbytes_per_s: float(size) / microseconds / 1000.0, binds: Factor::SoftNic, most: f64::INFINITY }
}
