//! The model: every factor gives a time or a rate, and they add up.

use serde::Serialize;

use super::basis::{self, NoEstimate};
use super::factor::{Band, Factor, Share, Stage, in_series, slowest};
use super::fitted::Fitted;
use super::interval::{Class, Interval};
use super::parts::{Parts, Software};
use super::route::{self, float};
use super::soft;
use super::software::{Protocol, protocol};

/// What is expected of messages of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Bytes in a message.
    pub size: u64,
    /// Microseconds from the call to the last byte, one message at a time.
    pub microseconds: Band,
    /// GB/s (10^9 bytes), many messages under way.
    pub gbytes_per_s: Band,
    /// Microseconds of one message by factor, the longest first.
    pub shares: Vec<Share>,
    /// What takes most of a message's time.
    pub binds: Factor,
    /// What limits a stream of such messages.
    pub stream_binds: Factor,
    /// Microseconds of a message's share of a stream that were seen on this machine beyond the
    /// model, where a calibration has some.
    #[serde(skip_serializing_if = "is_nothing")]
    pub stream_seen_us: f64,
    /// GB/s of the slowest stage of a stream, which no band exceeds.
    #[serde(skip)]
    pub most: f64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_nothing(time: &f64) -> bool {
    *time == 0.0
}

impl Estimate {
    /// What a factor takes of a message: its part of all that takes time.
    #[must_use]
    pub fn part(&self, share: &Share) -> f64 {
        share.microseconds / self.shares.iter().map(|one| one.microseconds.max(0.0)).sum::<f64>()
    }

    /// Microseconds of a message that were seen on this machine beyond the model.
    #[must_use]
    pub fn seen_us(&self) -> f64 {
        self.shares.iter().find(|share| share.factor == Factor::Seen).map_or(0.0, |share| share.microseconds)
    }
}

/// The direct way.
///
/// # Errors
/// Bytes cannot go the direct way, or nothing is known of it, and why.
pub fn direct(parts: &Parts, size: u64) -> Result<Estimate, NoEstimate> {
    route::possible(parts, size)?;
    basis::known(parts, size)?;
    if let Some(known) = soft::calibrated(parts, size) {
        let stream = known.stream(size);
        return Ok(finish(size, known.shares, stream, spread(parts, size, Class::Verbs)));
    }
    let protocol = protocol(parts, size);
    let stages = route::stages(parts, protocol.rails);
    let rate = in_series(&stages, parts.fitted.series_exponent);
    let mut shares = route::delays(parts, size);
    shares.extend_from_slice(&protocol.shares);
    shares.push(flow(&stages, rate, size, &parts.fitted));
    let streamed = match parts.software {
        // A stream of theirs uses all rails, whatever one message does.
        Software::Mpi => stages,
        _ => route::stages(parts, parts.rails),
    };
    let stream = stream(&streamed, size, &protocol, &parts.fitted);
    Ok(finish(size, shares, stream, spread(parts, size, parts.class(size))))
}

/// Time in which the bytes of a lone message flow.
fn flow(stages: &[Stage], rate: f64, size: u64, fitted: &Fitted) -> Share {
    let factor = slowest(stages).map_or(Factor::Wire, |stage| stage.factor);
    let lone = if factor == Factor::SoftNic { 1.0 } else { fitted.lone_flow };
    Share { factor, microseconds: float(size) / (rate * lone) / 1000.0 }
}

fn stream(stages: &[Stage], size: u64, protocol: &Protocol, fitted: &Fitted) -> Stream {
    let binds = slowest(stages).map_or(Factor::Wire, |stage| stage.factor);
    let lone = if protocol.lone && binds != Factor::SoftNic { fitted.lone_flow } else { 1.0 };
    let rate = in_series(stages, fitted.series_exponent) * lone;
    let mut binds = binds;
    let flowing = float(size) / rate / 1000.0;
    let each = if protocol.overlaps {
        // Posting overlaps with the transfer: take the longer of the two, smoothed like stages in
        // series.
        let longest = flowing.max(protocol.gap);
        let sum = (flowing / longest).powf(fitted.series_exponent)
            + (protocol.gap / longest).powf(fitted.series_exponent);
        longest * sum.powf(1.0 / fitted.series_exponent)
    } else {
        flowing + protocol.gap
    };
    if protocol.gap > flowing {
        binds = Factor::Software;
    }
    let most = slowest(stages).map_or(f64::INFINITY, |stage| stage.gbytes_per_s);
    Stream { gbytes_per_s: float(size) / each / 1000.0, binds, most, seen_us: 0.0 }
}

/// What is known of a stream: GB/s, what limits it, and what the slowest stage could do at the
/// most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    pub(super) gbytes_per_s: f64,
    pub(super) binds: Factor,
    pub(super) most: f64,
    /// Microseconds of each message that were seen beyond the model.
    pub(super) seen_us: f64,
}

/// Puts an estimate together: sums up, sorts, and draws the band.
pub(super) fn finish(size: u64, mut shares: Vec<Share>, stream: Stream, interval: Interval) -> Estimate {
    shares.retain(|share| {
        share.microseconds > 0.0 || (share.factor == Factor::Seen && share.microseconds < 0.0)
    });
    shares = merged(shares);
    shares.sort_by(|a, b| b.microseconds.total_cmp(&a.microseconds));
    let total: f64 = shares.iter().map(|share| share.microseconds).sum();
    let binds = shares.first().map_or(Factor::Adapters, |share| share.factor);
    Estimate {
        size,
        microseconds: interval.of_time(total),
        gbytes_per_s: interval.of_rate(stream.gbytes_per_s, stream.most),
        most: stream.most,
        shares,
        binds,
        stream_binds: stream.binds,
        stream_seen_us: stream.seen_us,
    }
}

fn merged(shares: Vec<Share>) -> Vec<Share> {
    let mut found: Vec<Share> = Vec::with_capacity(shares.len());
    for share in shares {
        match found.iter_mut().find(|known| known.factor == share.factor) {
            Some(known) => known.microseconds += share.microseconds,
            None => found.push(share),
        }
    }
    found
}

/// The interval of the class; of the software NIC, that of its calibration, or of machines at
/// large.
pub(super) fn spread(parts: &Parts, size: u64, class: Class) -> Interval {
    if let Some(known) = soft::calibrated(parts, size) {
        // Two runs of one machine differ, too.
        let spread = (known.uncertainty + 0.05).min(0.9);
        return Interval { low: 1.0 - spread, high: 1.0 + spread };
    }
    if parts.software == Software::Nobounce {
        // One machine was measured; cores and kernels of others are up to twice as fast or slow.
        return Interval { low: 0.5, high: 2.0 };
    }
    Interval::of(class, size)
}
