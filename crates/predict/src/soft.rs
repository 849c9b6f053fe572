//! The software NIC: what a core does for each message and byte, on a machine of which more or less
//! is known.

use serde::Serialize;

use super::calibration::{Calibration, Fit};
use super::constants as c;
use super::fabric::Kind;
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
    /// From constants that were fitted to a run. What they lack, such as staged transfers or GPU
    /// memory, is derived from this machine's host-memory figures.
    #[must_use]
    pub fn of_calibration(calibration: Calibration) -> Self {
        const LONG: u64 = 8 << 20;
        let known = both(&calibration, "write", "host").map(|(latency, stream)| Self {
            base_us: latency.base_us,
            gbytes_per_s: float(LONG) / stream.fitted(LONG) / 1000.0,
            gap_us: stream.base_us,
            calibration: None,
        });
        Self { calibration: Some(calibration), ..known.unwrap_or_default() }
    }

    /// From what plain UDP does between two processes here: half a round trip in microseconds, and
    /// GB/s.
    #[must_use]
    pub fn of_raw(half_round_trip_us: f64, gbytes_per_s: f64) -> Self {
        Self {
            base_us: half_round_trip_us + 2.0 * c::SOFT_ENGINE,
            // The same core that sends or receives also copies.
            gbytes_per_s: 1.0 / (1.0 / gbytes_per_s + 1.0 / c::SOFT_COPY),
            ..Self::default()
        }
    }
}

impl Parts {
    /// Whether it is about two processes of one machine with the software NIC, which is what a
    /// calibration knows.
    #[must_use]
    pub fn is_software_nic_here(&self) -> bool {
        self.software == Software::Nobounce && self.link.kind == Kind::Loopback
    }
}

/// What a run on this machine tells of one size.
#[derive(Debug)]
pub(super) struct Calibrated {
    /// Microseconds of a message, by factor.
    pub(super) shares: Vec<Share>,
    /// Microseconds of its share of a stream.
    pub(super) each: f64,
    /// Those of them that were seen beyond the constants.
    pub(super) each_seen: f64,
    /// How far off it may be, as a share.
    pub(super) uncertainty: f64,
}

/// What a run on this machine tells, where there was one and it is about this: two processes, no
/// wire.
pub(super) fn calibrated(parts: &Parts, size: u64) -> Option<Calibrated> {
    if !parts.is_software_nic_here() {
        return None;
    }
    let calibration = parts.soft.calibration.as_ref()?;
    let op = if parts.operation == Op::Read { "read" } else { "write" };
    let memory = if parts.memory == Memory::Host { "host" } else { "gpu direct" };
    let (latency, stream) = both(calibration, op, memory)?;
    let base = latency.base_us;
    let shares = vec![
        Share { factor: Factor::Software, microseconds: base },
        Share { factor: Factor::SoftNic, microseconds: latency.fitted(size) - base },
        Share { factor: Factor::Seen, microseconds: latency.seen(size) },
    ];
    Some(Calibrated {
        shares,
        each: stream.microseconds(size),
        each_seen: stream.seen(size),
        uncertainty: latency.uncertainty(size).max(stream.uncertainty(size)),
    })
}

/// The constants of a message alone and of one in a stream, over UDP, or over shared memory where
/// only that was measured.
fn both<'a>(calibration: &'a Calibration, op: &str, memory: &str) -> Option<(&'a Fit, &'a Fit)> {
    let fit = |kind: &str| {
        let of_link = |link: &str| {
            let is_it = |fit: &&Fit| {
                let one = &fit.series;
                (one.op.as_str(), one.kind.as_str(), one.memory.as_str()) == (op, kind, memory)
                    && (one.link.as_str(), one.qps, one.wait.as_str()) == (link, 1, "cq")
            };
            calibration.fits.iter().find(is_it)
        };
        of_link("udp").or_else(|| of_link("shm"))
    };
    Some((fit("latency")?, fit("bandwidth")?))
}

/// What a message of GPU memory waits for before the engine has its first bytes: loads through the
/// window take a core's time, the copy engine has to be started. Nothing for host memory, and for
/// real adapters.
pub(super) fn fetch(parts: &Parts, size: u64) -> Option<Share> {
    if parts.software != Software::Nobounce || parts.memory == Memory::Host || size == 0 {
        return None;
    }
    let loads = c::SOFT_GPU_LOAD + float(size) / c::SOFT_GPU_LOAD_RATE / 1000.0;
    Some(if loads < c::SOFT_GPU_FETCH {
        Share { factor: Factor::PcieRead, microseconds: loads }
    } else {
        Share { factor: Factor::CopyCalls, microseconds: c::SOFT_GPU_FETCH }
    })
}

/// Microseconds between two messages of a stream: what the engine's core does for each, loads
/// included. Copies are fetched ahead.
pub(super) fn gap(parts: &Parts, size: u64) -> f64 {
    let loads = fetch(parts, size).filter(|share| share.factor == Factor::PcieRead);
    parts.soft.gap_us + loads.map_or(0.0, |share| share.microseconds)
}

/// GB/s of long messages.
pub(super) fn rate(parts: &Parts) -> f64 {
    match parts.memory {
        Memory::Host => parts.soft.gbytes_per_s,
        Memory::Gpu => parts.soft.gbytes_per_s * c::SOFT_GPU_SHARE,
    }
}

impl Calibrated {
    /// GB/s and what limits it. What was seen is never more than the constants' part of the time.
    pub(super) fn stream(&self, size: u64) -> Stream {
        Stream {
            gbytes_per_s: float(size) / self.each / 1000.0,
            binds: Factor::SoftNic,
            most: f64::INFINITY,
            seen_us: self.each_seen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::direct;
    use super::super::parts::Spec;
    use super::*;

    /// docs/measurements/README.md, commit 843c7f7: WRITE on an H200, in the same run as
    /// plain UDP.
    #[test]
    fn gpu_memory_is_as_on_the_machine_it_was_measured_on() {
        let spec = |memory| Spec {
            link: "loopback:1000".parse().ok(),
            memory: Some(memory),
            coherent: (memory == Memory::Gpu).then_some(true),
            software: Some(Software::Nobounce),
            ..Spec::default()
        };
        let of = |memory, size| {
            let parts = Parts { soft: Soft::of_raw(2.45, 7.02), ..spec(memory).resolve().unwrap() };
            let found = direct(&parts, size).unwrap();
            (found.microseconds.expected, found.gbytes_per_s.expected)
        };
        for (size, measured) in [(8, 4.70), (64, 4.93), (512, 5.72), (4096, 9.61), (1 << 20, 259.0)] {
            let (time, _) = of(Memory::Gpu, size);
            assert!((time / measured - 1.0).abs() < 0.25, "{size} B: {time} us instead of {measured}");
        }
        for (size, measured) in [(4096, 0.39), (1 << 20, 4.34), (8 << 20, 4.20)] {
            let (_, rate) = of(Memory::Gpu, size);
            assert!((rate / measured - 1.0).abs() < 0.4, "{size} B: {rate} GB/s instead of {measured}");
        }
        let (host, gpu) = (of(Memory::Host, 8), of(Memory::Gpu, 8));
        assert!(gpu.0 > host.0 + 1.0, "GPU memory is read through the window: {gpu:?}, {host:?}");
    }
}
