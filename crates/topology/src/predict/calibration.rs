//! Constants of one machine, fitted from a bench run on it.

use serde::{Deserialize, Serialize};

/// What a bench run says about this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Time of an empty message, microseconds.
    pub microseconds: f64,
    /// Rate of a long one, GB/s.
    pub gbytes_per_s: f64,
    /// Between two messages of a stream, microseconds.
    pub gap_microseconds: f64,
    /// How far the measured sizes are from the fit at the most, as a share.
    pub residual: f64,
}
