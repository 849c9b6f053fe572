//! Guarded copies in assembly for write-combining memory.
//!
//! *Stores.* The processor collects stores in write-combining buffers of one 64-byte line and sends
//! a full line as one transaction. So every line that the range covers is written whole, by
//! non-temporal vectors. Partial first and last lines take one masked store (AVX-512) or ascending,
//! naturally aligned pieces. The destination is never read.
//!
//! *Loads.* Nothing is cached, and each load is a round trip of about 1 us, whatever it fetches up
//! to one line. So whole lines are fetched, by non-temporal loads where available: a line arrives
//! at once and its parts come from a fill buffer. That includes partial lines: the rest of an
//! aligned line lies in the same page, and reading it has no effect.
//!
//! Either way one access moves an aligned 8-byte word of the window whole.

use std::arch::global_asm;
use std::ptr;

use super::Isa;
use crate::copy::fixup::{self, Fixup};

global_asm!(include_str!("x86_64.s"), options(raw));

type CopyFn = unsafe extern "C" fn(dst: *mut u8, src: *const u8, len: usize) -> usize;

unsafe extern "C" {
    #[link_name = "nobounce_memory_wc_store_avx512"]
    fn raw_store_avx512(dst: *mut u8, src: *const u8, len: usize) -> usize;
    #[link_name = "nobounce_memory_wc_store_avx2"]
    fn raw_store_avx2(dst: *mut u8, src: *const u8, len: usize) -> usize;
    #[link_name = "nobounce_memory_wc_store_sse2"]
    fn raw_store_sse2(dst: *mut u8, src: *const u8, len: usize) -> usize;
    #[link_name = "nobounce_memory_wc_load_avx512"]
    fn raw_load_avx512(dst: *mut u8, src: *const u8, len: usize) -> usize;
    #[link_name = "nobounce_memory_wc_load_avx2"]
    fn raw_load_avx2(dst: *mut u8, src: *const u8, len: usize) -> usize;
    #[link_name = "nobounce_memory_wc_load_sse41"]
    fn raw_load_sse41(dst: *mut u8, src: *const u8, len: usize) -> usize;
    #[link_name = "nobounce_memory_wc_load_sse2"]
    fn raw_load_sse2(dst: *mut u8, src: *const u8, len: usize) -> usize;
    #[link_name = "nobounce_memory_wc_fixups"]
    static FIXUPS: [Fixup; 11];
}

/// One line of write-combined memory, in bytes.
const LINE: usize = 64;

#[repr(align(64))]
struct Line([u8; LINE]);

/// Where to go on after a fault at `instruction`, if that is one of this file's. Async-signal-safe.
pub(crate) fn find_fixup(instruction: u64) -> Option<u64> {
    // SAFETY: the table is defined in the assembly with this layout and number of entries, and is
    // never written.
    fixup::find(unsafe { &FIXUPS }, instruction)
}

pub(super) fn available(isa: Isa) -> bool {
    match isa {
        Isa::Sse2 => true,
        Isa::Sse41 => std::arch::is_x86_feature_detected!("sse4.1"),
        Isa::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
        Isa::Avx512 => {
            std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("avx512bw")
                && std::arch::is_x86_feature_detected!("bmi2")
        }
    }
}

/// # Safety
/// As for [`super::store`].
#[inline]
pub(super) unsafe fn store(isa: Isa, dst: *mut u8, src: *const u8, len: usize) -> usize {
    let routine: CopyFn = match isa {
        Isa::Sse2 | Isa::Sse41 => raw_store_sse2,
        Isa::Avx2 => raw_store_avx2,
        Isa::Avx512 => raw_store_avx512,
    };
    // SAFETY: the caller's promise; faults on the window side are fixed up.
    unsafe { routine(dst, src, len) }
}

/// # Safety
/// As for [`super::load`].
pub(super) unsafe fn load(isa: Isa, dst: *mut u8, src: *const u8, len: usize) -> usize {
    let lines: CopyFn = match isa {
        Isa::Sse2 => raw_load_sse2,
        Isa::Sse41 => raw_load_sse41,
        Isa::Avx2 => raw_load_avx2,
        Isa::Avx512 => raw_load_avx512,
    };
    let lead = src.addr() % LINE;
    let head = if lead == 0 { 0 } else { (LINE - lead).min(len) };
    let body = (len - head) & !(LINE - 1);
    let tail = len - head - body;
    // SAFETY: head, body and tail make up the caller's range; the lines they lie in are in the same
    // pages.
    unsafe {
        if head > 0 && !load_part(lines, dst, src.wrapping_sub(lead), lead, head) {
            return len;
        }
        let rest = lines(dst.add(head), src.wrapping_add(head), body);
        if rest > 0 {
            return rest + tail;
        }
        let done = head + body;
        if tail > 0 && !load_part(lines, dst.add(done), src.wrapping_add(done), 0, tail) {
            return tail;
        }
    }
    0
}

/// Fetches one line and copies out `len` bytes of it, from `start` on. False after a fault.
///
/// # Safety
/// `line` is a multiple of 64 and may be read; `dst` is valid for writes of `len` bytes; `start +
/// len` is at most 64.
unsafe fn load_part(lines: CopyFn, dst: *mut u8, line: *const u8, start: usize, len: usize) -> bool {
    let mut fetched = Line([0; LINE]);
    // SAFETY: `fetched` has room for the line; the rest is the caller's promise.
    unsafe {
        if lines(fetched.0.as_mut_ptr(), line, LINE) > 0 {
            return false;
        }
        ptr::copy_nonoverlapping(fetched.0.as_ptr().add(start), dst, len);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostBuffer, guard, page_size};

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| u8::try_from((i * 7 + i / 251) % 251 + 1).unwrap()).collect()
    }

    #[test]
    fn every_set_copies_every_size_and_alignment() {
        let source = bytes(9000);
        for isa in Isa::available() {
            for len in (0..600).chain([1000, 4095, 4096, 4097, 8200]) {
                // All positions within the line on the window side, and some for the private side.
                for window_shift in (0..64).step_by(if len < 200 { 1 } else { 3 }) {
                    let private_shift = [0, 1, 8, 12, 16, 33][(window_shift + len) % 6];
                    let mut stored = vec![0xEE; len + 256];
                    let start = stored.as_ptr().align_offset(64) + 64 + window_shift;
                    // SAFETY: both sides lie inside vectors that are long enough.
                    let rest = unsafe {
                        store(isa, stored.as_mut_ptr().add(start), source.as_ptr().add(private_shift), len)
                    };
                    assert_eq!(rest, 0);
                    let (before, after) = (&stored[..start], &stored[start + len..]);
                    assert!(
                        stored[start..][..len] == source[private_shift..][..len]
                            && before.iter().chain(after).all(|&byte| byte == 0xEE),
                        "store of {len} bytes, {private_shift} -> {window_shift}, {isa}"
                    );
                    let mut loaded = vec![0xEE; len + 128];
                    // SAFETY: as above; the line around the range lies inside `stored`.
                    let rest = unsafe {
                        load(isa, loaded.as_mut_ptr().add(private_shift), stored.as_ptr().add(start), len)
                    };
                    assert_eq!(rest, 0);
                    let mut expected = vec![0xEE; len + 128];
                    expected[private_shift..][..len].copy_from_slice(&stored[start..][..len]);
                    assert!(
                        loaded == expected,
                        "load of {len} bytes, {window_shift} -> {private_shift}, {isa}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_set_stops_where_the_memory_stops() {
        guard::ensure_installed().unwrap();
        let buffer = HostBuffer::guarded(2 * page_size()).unwrap();
        let source = bytes(3 * page_size());
        for isa in Isa::available() {
            for reach in (0..300).chain([511, 1000, 4096, 4099]) {
                for beyond in [1, 2, 4, 7, 8, 63, 64, 65, 130, 256, 4000] {
                    let (len, start) = (reach + beyond, buffer.len() - reach);
                    let window = buffer.as_mut_ptr().wrapping_add(start);
                    buffer.write_at(start, &vec![0; reach]).unwrap();
                    // SAFETY: the private sides are long enough; the window ends in a guard page of
                    // ours.
                    let rest = unsafe { store(isa, window, source.as_ptr(), len) };
                    assert_eq!(rest, beyond, "store of {reach} + {beyond}, {isa}");
                    let mut stored = vec![0; reach];
                    buffer.read_at(start, &mut stored).unwrap();
                    assert!(stored == source[..reach], "store of {reach} + {beyond}, {isa}");

                    let mut loaded = vec![0xEE; len];
                    // SAFETY: as above.
                    let rest = unsafe { load(isa, loaded.as_mut_ptr(), window, len) };
                    assert_eq!(rest, beyond, "load of {reach} + {beyond}, {isa}");
                    assert!(loaded[..reach] == source[..reach], "load of {reach} + {beyond}, {isa}");
                    assert!(loaded[reach..].iter().all(|&byte| byte == 0xEE));
                }
            }
            for before in [1, 9, 64, 100] {
                let window = buffer.as_mut_ptr().wrapping_sub(before);
                let mut loaded = vec![0; 500];
                // SAFETY: as above; the window begins in a guard page of ours.
                let rests = unsafe {
                    [store(isa, window, source.as_ptr(), 500), load(isa, loaded.as_mut_ptr(), window, 500)]
                };
                assert_eq!(rests, [500, 500], "{before} before, {isa}");
            }
        }
    }

    /// Masked accesses touch nothing outside the range on the private side either.
    #[test]
    fn the_private_side_may_lie_at_the_edge_of_a_mapping() {
        guard::ensure_installed().unwrap();
        let private = HostBuffer::guarded(page_size()).unwrap();
        private.write_at(0, &bytes(page_size())).unwrap();
        let mut window = vec![0u8; page_size() + 256];
        let base = window.as_ptr().align_offset(64) + 64;
        for isa in Isa::available() {
            for len in (0..200).chain([page_size()]) {
                for (start, shift) in [(0, 0), (0, 40), (private.len() - len, 0), (private.len() - len, 33)] {
                    // SAFETY: both sides are inside their memory.
                    let rests = unsafe {
                        let (inside, side) =
                            (window.as_mut_ptr().add(base + shift), private.as_mut_ptr().add(start));
                        [store(isa, inside, side, len), load(isa, side, inside, len)]
                    };
                    assert_eq!(rests, [0, 0], "{len} bytes at {start}, {shift}, {isa}");
                }
            }
        }
    }
}
