//! Guarded copies in assembly: the fault guard recognises a fault by its instruction pointer and
//! resumes at a fix-up label.
//!
//! Structure of a copy, where the *window side* is the source of a load and the destination of a
//! store:
//! * head and tail by 1, 2 and 4 bytes, so that every access is naturally aligned on the window
//!   side;
//! * the aligned rest by 8-byte words, from 128 bytes on by vectors aligned on the window side,
//!   from 4 KiB on by `rep movsq` where both sides agree modulo 8.
//!
//! So one access always moves an aligned 8-byte word of the window whole. Processors move each
//! aligned 8 bytes of an aligned vector at once (16 bytes are guaranteed with AVX; older ones split
//! vectors into 8-byte halves). Up to 127 bytes are stored in ascending order of address.
//!
//! Measured on a Sapphire Rapids class Xeon, 4 KiB out of L2, GB/s: memcpy 37, `rep movsq` 36 (but
//! 15 where the two sides disagree modulo 8, as packet payloads in a slab do), `rep movsb` 35
//! (words may tear), 32-byte vectors 37, 16-byte vectors 23, 8-byte words 20. `rep movsq` has a
//! start-up cost that loses below 1 KiB and wins again from 64 KiB on.

use std::arch::global_asm;
use std::sync::atomic::{AtomicU8, Ordering};

use super::fixup::{self, Fixup};

global_asm!(include_str!("x86_64.s"));

unsafe extern "C" {
    #[link_name = "nobounce_memory_load"]
    fn raw_load(dst: *mut u8, src: *const u8, len: usize, wide: u32) -> usize;
    #[link_name = "nobounce_memory_store"]
    fn raw_store(dst: *mut u8, src: *const u8, len: usize, wide: u32) -> usize;
    #[link_name = "nobounce_memory_load_u64"]
    fn raw_load_u64(address: *const u64, value: *mut u64) -> usize;
    #[link_name = "nobounce_memory_store_u64"]
    fn raw_store_u64(address: *mut u64, value: u64) -> usize;
    #[link_name = "nobounce_memory_fetch_add"]
    fn raw_fetch_add(address: *mut u64, add: u64, old: *mut u64) -> usize;
    #[link_name = "nobounce_memory_compare_swap"]
    fn raw_compare_swap(address: *mut u64, compare: u64, swap: u64, old: *mut u64) -> usize;
    #[link_name = "nobounce_memory_fixups"]
    static FIXUPS: [Fixup; 11];
}

/// Where to go on after a fault at `instruction`, if that is one of this file's. Async-signal-safe.
pub(super) fn find_fixup(instruction: u64) -> Option<u64> {
    // SAFETY: the table is defined in the assembly with this layout and number of entries, and is
    // never written.
    fixup::find(unsafe { &FIXUPS }, instruction)
}

/// Copies out of the window.
///
/// # Safety
/// `dst` is valid for writes of `len` bytes. `src` may be anything, but whatever is mapped there
/// may be read.
#[inline]
pub(crate) unsafe fn load(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's promise; faults on the window side are fixed up.
    unsafe { raw_load(dst, src, len, wide()) }
}

/// Copies into the window, up to 127 bytes in ascending order of address.
///
/// # Safety
/// `src` is valid for reads of `len` bytes. `dst` may be anything, but whatever is mapped there may
/// be written.
#[inline]
pub(crate) unsafe fn store(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's promise; faults on the window side are fixed up.
    unsafe { raw_store(dst, src, len, wide()) }
}

/// # Safety
/// `address` is a multiple of 8; whatever is mapped there may be read.
#[inline]
pub(crate) unsafe fn load_u64(address: *const u64) -> Option<u64> {
    let mut value = 0;
    // SAFETY: the caller's promise; `value` is ours.
    (unsafe { raw_load_u64(address, &raw mut value) } == 0).then_some(value)
}

/// # Safety
/// `address` is a multiple of 8; whatever is mapped there may be written.
#[inline]
pub(crate) unsafe fn store_u64(address: *mut u64, value: u64) -> bool {
    // SAFETY: the caller's promise.
    unsafe { raw_store_u64(address, value) == 0 }
}

/// # Safety
/// `address` is a multiple of 8; whatever is mapped there may be written.
#[inline]
pub(crate) unsafe fn fetch_add(address: *mut u64, add: u64) -> Option<u64> {
    let mut old = 0;
    // SAFETY: the caller's promise; `old` is ours.
    (unsafe { raw_fetch_add(address, add, &raw mut old) } == 0).then_some(old)
}

/// # Safety
/// `address` is a multiple of 8; whatever is mapped there may be written.
#[inline]
pub(crate) unsafe fn compare_swap(address: *mut u64, compare: u64, swap: u64) -> Option<u64> {
    let mut old = 0;
    // SAFETY: the caller's promise; `old` is ours.
    (unsafe { raw_compare_swap(address, compare, swap, &raw mut old) } == 0).then_some(old)
}

/// 1 where 32-byte vectors may be used (the processor has AVX and the system saves its registers),
/// else 0.
#[inline]
fn wide() -> u32 {
    const UNKNOWN: u8 = 2;
    static WIDE: AtomicU8 = AtomicU8::new(UNKNOWN);
    match WIDE.load(Ordering::Relaxed) {
        UNKNOWN => {
            let wide = u8::from(std::arch::is_x86_feature_detected!("avx"));
            WIDE.store(wide, Ordering::Relaxed);
            u32::from(wide)
        }
        known => u32::from(known),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs both vector widths, of which an ordinary call takes only the one this machine has.
    #[test]
    fn every_width_copies_every_size_and_alignment() {
        let source: Vec<u8> = (0u32..9000).map(|i| u8::try_from((i * 7 + i / 251) % 256).unwrap()).collect();
        let widths = if wide() == 1 { vec![0, 1] } else { vec![0] };
        for &wide in &widths {
            for len in (0..300).chain([1000, 4095, 4096, 4097, 4104, 8200]) {
                for (dst_shift, src_shift) in (0..8).flat_map(|d| [0, 1, 3, 4, 5, 12].map(|s| (d, s))) {
                    let mut loaded = vec![0xEE; len + 96];
                    let mut stored = loaded.clone();
                    // SAFETY: both sides lie inside vectors that are long enough.
                    let rest = unsafe {
                        raw_load(
                            loaded.as_mut_ptr().add(32 + dst_shift),
                            source.as_ptr().add(src_shift),
                            len,
                            wide,
                        ) + raw_store(
                            stored.as_mut_ptr().add(32 + dst_shift),
                            source.as_ptr().add(src_shift),
                            len,
                            wide,
                        )
                    };
                    let mut expected = vec![0xEE; len + 96];
                    expected[32 + dst_shift..][..len].copy_from_slice(&source[src_shift..][..len]);
                    assert_eq!(rest, 0);
                    assert!(
                        loaded == expected && stored == expected,
                        "{len} bytes, {src_shift} -> {dst_shift}, {wide}"
                    );
                }
            }
        }
    }

    #[test]
    fn fixups_cover_the_routines_and_nothing_else() {
        let inside = [
            raw_load as *const () as u64,
            raw_store as *const () as u64,
            raw_load_u64 as *const () as u64,
            raw_compare_swap as *const () as u64,
        ];
        assert!(inside.iter().all(|&address| find_fixup(address).is_some()));
        assert_eq!(find_fixup(find_fixup as *const () as u64), None);
        assert_eq!(find_fixup(0), None);
    }
}
