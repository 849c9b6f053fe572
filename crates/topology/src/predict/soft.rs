//! The software NIC: what a core does for each message and byte, on a machine of which more or less is known.

use serde::Serialize;

use super::calibration::{Calibration, Fit};
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
    let (latency, stream) = (fit("latency")?, fit("bandwidth")?);
    let base = latency.base_us;
    let shares = vec![
        Share { factor: Factor::Software, microseconds: base },
        Share { factor: Factor::SoftNic, microseconds: latency.microseconds(size) - base },
    ];
    Some((shares, stream.microseconds(size), latency.worst().max(stream.worst())))
}

/// What a message of GPU memory waits for before the engine has its first bytes: loads through the window take a core's time, the copy engine
/// has to be started. Nothing for host memory, and for real adapters.
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

/// Microseconds between two messages of a stream: what the engine's core does for each, loads included. Copies are fetched ahead.
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

/// GB/s and what limits it, of messages that take this long each.
pub(super) fn stream(size: u64, microseconds: f64) -> Stream {
    Stream { gbytes_per_s: float(size) / microseconds / 1000.0, binds: Factor::SoftNic, most: f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::super::model::direct;
    use super::super::parts::Spec;
    use super::*;

    /// docs/measurements/2026-11-15-h200.md, commit 843c7f7: WRITE on an H200, in the same run as plain UDP.
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
