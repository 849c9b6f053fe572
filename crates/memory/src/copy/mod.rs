//! The routines that access memory which may be unmapped at any time. Two backends with one
//! interface, used by [`Window`](crate::Window) and, for single words, by
//! [`GpuWindow`](crate::gpu::GpuWindow).
//!
//! Copies return how many bytes were *not* copied (0: all were). 8-byte accesses return `None` or
//! `false` on a fault.

#[cfg(target_arch = "x86_64")]
mod crc;
#[cfg(target_arch = "x86_64")]
pub(crate) mod fixup;
#[cfg(any(test, not(target_arch = "x86_64")))]
pub(crate) mod portable;
pub mod wc;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use crc::load_crc;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) use portable::{
    compare_swap, fetch_add, load, load_crc, load_u64, store, store_ascending, store_u64,
};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{
    compare_swap, fetch_add, load, load_u64, store, store as store_ascending, store_u64,
};

/// The resume address after a fault at `instruction`, if that is in a guarded routine.
/// Async-signal-safe.
#[cfg(target_arch = "x86_64")]
pub(crate) fn find_fixup(instruction: u64) -> Option<u64> {
    x86_64::find_fixup(instruction)
        .or_else(|| crc::find_fixup(instruction))
        .or_else(|| wc::find_fixup(instruction))
}
