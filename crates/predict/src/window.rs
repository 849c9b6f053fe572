//! A core that moves bytes through a GPU's window, and GPUs that are wired to each other: parts of
//! ways that need no adapter.

use super::constants as c;
use super::route::float;
use super::slot::Slot;

/// GB/s of stores: a core's write-combining buffers leave in packets of 64 bytes.
#[must_use]
pub fn store(gpu: Slot) -> f64 {
    gpu.carries(64)
}

/// Microseconds of loads: as many lines under way as a core has buffers for.
#[must_use]
pub fn load_microseconds(size: u64) -> f64 {
    let lines = (float(size) / 64.0).ceil().max(1.0);
    c::WINDOW_LOAD * (lines / c::FILL_BUFFERS).max(1.0)
}

/// GB/s of an xGMI link in one direction.
#[must_use]
pub fn xgmi(gbytes: f64) -> f64 {
    gbytes * c::XGMI
}

/// GB/s of NVLinks in one direction.
#[must_use]
pub fn nvlink(links: u32, gbytes_each: f64) -> f64 {
    f64::from(links) * gbytes_each * c::NVLINK
}
