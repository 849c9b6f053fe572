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
    /// Between which processes.
    pub via: Via,
}

/// Between which processes the software NIC works.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Via {
    /// `udp` or `shm`; none: UDP, or shared memory where only that was measured.
    pub link: Option<String>,
    /// Processes that spin beside it.
    pub busy: u32,
    /// Whether they are on two machines.
    pub between_machines: bool,
}

impl Default for Soft {
    fn default() -> Self {
        Self {
            base_us: c::SOFT_BASE,
            gbytes_per_s: c::SOFT_RATE,
            gap_us: c::SOFT_GAP,
            calibration: None,
            via: Via::default(),
        }
    }
}

impl Soft {
    /// From constants that were fitted to a run. What they lack, such as staged transfers or GPU
    /// memory, is derived from this machine's host-memory figures.
    #[must_use]
    pub fn of_calibration(calibration: Calibration, via: Via, mtu: u32) -> Self {
        const LONG: u64 = 8 << 20;
        let known = both(&calibration, "write", "host", &via, mtu).map(|(latency, stream)| Self {
            base_us: latency.base_us,
            gbytes_per_s: float(LONG) / stream.fitted(LONG) / 1000.0,
            gap_us: stream.base_us,
            ..Self::default()
        });
        Self { calibration: Some(calibration), via, ..known.unwrap_or_default() }
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
    let (latency, stream) = both(calibration, op, memory, &parts.soft.via, parts.mtu)?;
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
fn both<'a>(
    calibration: &'a Calibration,
    op: &str,
    memory: &str,
    via: &Via,
    mtu: u32,
) -> Option<(&'a Fit, &'a Fit)> {
    let fit = |kind: &str| {
        let of_link = |link: &str| {
            let is_it = |fit: &&Fit| {
                let one = &fit.series;
                (one.op.as_str(), one.kind.as_str(), one.memory.as_str()) == (op, kind, memory)
                    && (one.link.as_str(), one.qps, one.wait.as_str()) == (link, 1, "cq")
                    && (one.mtu, one.busy, one.between_machines) == (mtu, via.busy, via.between_machines)
            };
            calibration.fits.iter().find(is_it)
        };
        match &via.link {
            Some(link) => of_link(link),
            None => of_link("udp").or_else(|| of_link("shm")),
        }
    };
    Some((fit("latency")?, fit("bandwidth")?))
}

/// What no run of the calibration measured, if the calibration says nothing of these processes.
pub(super) fn not_calibrated(parts: &Parts) -> Option<String> {
    let calibration = parts.soft.calibration.as_ref().filter(|_| parts.is_software_nic_here())?;
    let via = &parts.soft.via;
    if both(calibration, "write", "host", via, parts.mtu).is_some() || calibrated(parts, 1).is_some() {
        return None;
    }
    let link = via.link.as_deref().unwrap_or("udp or shm");
    let busy = if via.busy > 0 { format!(" beside {} busy processes", via.busy) } else { String::new() };
    let reach = if via.between_machines { " between machines" } else { "" };
    Some(format!("{link} at MTU {}{busy}{reach}", parts.mtu))
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

    /// A calibration predicts the link, the MTU and the load that were measured, and no other.
    #[test]
    fn every_link_mtu_and_load_has_its_own_constants() {
        let run = |link: &str, mtu: u32, busy: u32, command: &str, factor: f64| {
            let case = |kind: &str, size: u64| {
                let time = factor * (3.0 + float(size) / 2000.0);
                serde_json::json!({"op": "write", "kind": kind, "size": size, "qps": 1, "memory": "host",
                    "path": "direct", "link": link, "mtu": mtu, "wait": "cq", "p50_us": time,
                    "gbytes_per_s": float(size) / time / 1000.0})
            };
            let sizes = [1_u64, 64, 512, 4096, 65536, 1 << 20];
            let results: Vec<_> =
                sizes.iter().flat_map(|size| [case("latency", *size), case("bandwidth", *size)]).collect();
            let text = serde_json::json!({"schema": "nobounce-bench/1", "command": command,
                "busy": (busy > 0).then_some(busy), "results": results});
            crate::calibration::Bench::from_json(&text.to_string()).unwrap()
        };
        let runs = [
            run("udp", 4096, 0, "bench", 1.0),
            run("shm", 4096, 0, "bench", 0.5),
            run("udp", 4096, 2, "bench --busy 2", 4.0),
            run("udp", 1024, 0, "bench --peer 10.0.0.7", 8.0),
        ];
        let calibration = Calibration::of(&runs).unwrap();
        let time = |link: Option<&str>, mtu: u32, busy: u32, between_machines: bool| {
            let spec = Spec {
                link: "loopback:1000".parse().ok(),
                mtu: Some(mtu),
                memory: Some(Memory::Host),
                software: Some(Software::Nobounce),
                ..Spec::default()
            };
            let via = Via { link: link.map(ToOwned::to_owned), busy, between_machines };
            let soft = Soft::of_calibration(calibration.clone(), via, mtu);
            let parts = Parts { soft, ..spec.resolve().unwrap() };
            direct(&parts, 4096).map(|one| one.microseconds.expected).map_err(|error| error.to_string())
        };
        let base = time(None, 4096, 0, false).unwrap();
        for (found, factor) in [
            (time(Some("udp"), 4096, 0, false), 1.0),
            (time(Some("shm"), 4096, 0, false), 0.5),
            (time(None, 4096, 2, false), 4.0),
            (time(None, 1024, 0, true), 8.0),
        ] {
            let quotient = found.unwrap() / base;
            assert!((quotient / factor - 1.0).abs() < 0.15, "{quotient} instead of {factor}");
        }
        let missing = time(None, 4096, 0, true).unwrap_err();
        assert!(missing.contains("udp or shm at MTU 4096 between machines"), "{missing}");
    }
}
