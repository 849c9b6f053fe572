//! Simulated time in picoseconds, link rates, and conversions that cannot wrap.

use nobounce_protocol::timing::Nanos;

/// A point in simulated time or a duration, in picoseconds. One byte at 400 Gb/s takes 20 of them.
pub type Picos = u64;

/// One nanosecond.
pub const NANOSECOND: Picos = 1_000;
/// One microsecond.
pub const MICROSECOND: Picos = 1_000_000;
/// One millisecond.
pub const MILLISECOND: Picos = 1_000_000_000;

/// The protocol's clock at this point.
pub(crate) const fn nanos(time: Picos) -> Nanos {
    time / NANOSECOND
}

/// Picoseconds per byte at a rate in Gb/s; at least one.
pub(crate) fn picos_per_byte(gbits: f64) -> Picos {
    whole(8_000.0 / gbits).max(1)
}

/// Microseconds of a duration.
pub(crate) fn micros(time: Picos) -> f64 {
    float(time) * 1e-6
}

/// Gb/s of so many bytes in that time; 0 if no time passed.
pub(crate) fn gbits(bytes: u64, time: Picos) -> f64 {
    if time == 0 { 0.0 } else { float(bytes) * 8_000.0 / float(time) }
}

/// The nearest whole number; 0 for negative numbers and for no number.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float saturates")]
pub(crate) const fn whole(value: f64) -> u64 {
    value.round() as u64
}

/// As a floating-point number; the simulator's numbers stay below 2^53.
#[allow(clippy::cast_precision_loss)]
pub(crate) const fn float(value: u64) -> f64 {
    value as f64
}

/// A count as a floating-point number.
#[allow(clippy::cast_precision_loss)]
pub(crate) const fn float_of(value: usize) -> f64 {
    value as f64
}

/// An index of a host, link or connection as the 32 bits that events carry.
pub(crate) fn index(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
