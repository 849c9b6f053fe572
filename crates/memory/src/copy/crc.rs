//! Guarded loads that compute the CRC-32 (IEEE 802.3, as in zlib, Ethernet and the ICRC of RoCE) of
//! the bytes they copy.
//!
//! The CRC is computed from the registers that are stored to the private side. It therefore matches
//! these bytes even under concurrent writes to the window. Method: folding by carry-less
//! multiplication (Gopal and others, "Fast CRC computation for generic polynomials using
//! PCLMULQDQ", Intel 2009). Vectors are aligned on the window's side, for the reason given in
//! `x86_64.rs`.
//!
//! * 64-byte vectors (AVX-512 with VBMI and VPCLMULQDQ: Ice Lake, Zen 4 and later): head and tail
//!   are masked parts of aligned blocks.
//! * 16-byte vectors (PCLMULQDQ): the few bytes of head and tail are copied and summed separately.
//! * Short loads, and processors with neither: a plain load, then the CRC of the private side.

use std::arch::global_asm;
use std::sync::atomic::{AtomicU8, Ordering};

use super::fixup::{self, Fixup};
use super::x86_64::load;

global_asm!(include_str!("crc.s"), options(raw));

unsafe extern "C" {
    #[link_name = "nobounce_memory_load_crc512"]
    fn raw_load_crc512(dst: *mut u8, src: *const u8, len: usize, state: u32, out: *mut u64) -> usize;
    #[link_name = "nobounce_memory_load_crc128"]
    fn raw_load_crc128(dst: *mut u8, src: *const u8, len: usize, state: u32, out: *mut u64) -> usize;
    #[link_name = "nobounce_memory_crc_fixups"]
    static FIXUPS: [Fixup; 2];
}

/// Below this many bytes a plain load and a CRC by table are as fast.
const SHORT: usize = 128;

/// Where to go on after a fault at `instruction`, if that is one of this file's. Async-signal-safe.
pub(super) fn find_fixup(instruction: u64) -> Option<u64> {
    // SAFETY: the table is defined in the assembly with this layout and number of entries, and is
    // never written.
    fixup::find(unsafe { &FIXUPS }, instruction)
}

/// Copies out of the window, and returns the CRC-32 of the copied bytes, continuing from `crc`.
///
/// The CRC is meaningless after a partial copy.
///
/// # Safety
/// `dst` is valid for writes of `len` bytes. `src` may be anything, but whatever is mapped there
/// may be read.
#[inline]
pub(crate) unsafe fn load_crc(dst: *mut u8, src: *const u8, len: usize, crc: u32) -> (usize, u32) {
    let width = if len < SHORT { Width::None } else { width() };
    // SAFETY: the caller's promise; this processor has the width found.
    unsafe { load_crc_by(width, dst, src, len, crc) }
}

/// # Safety
/// As for [`load_crc`], and the processor has this width.
#[inline]
unsafe fn load_crc_by(width: Width, dst: *mut u8, src: *const u8, len: usize, crc: u32) -> (usize, u32) {
    // SAFETY: the caller's promise, and lengths checked here.
    unsafe {
        match width {
            Width::Bytes64 if len >= SHORT => folded(raw_load_crc512, dst, src, len, crc),
            Width::Bytes16 if len >= SHORT => in_three(dst, src, len, crc),
            _ => in_two_passes(dst, src, len, crc),
        }
    }
}

type Folded = unsafe extern "C" fn(*mut u8, *const u8, usize, u32, *mut u64) -> usize;

/// # Safety
/// As for [`load_crc`], and as `routine` wants it.
#[inline]
unsafe fn folded(routine: Folded, dst: *mut u8, src: *const u8, len: usize, crc: u32) -> (usize, u32) {
    let mut state = u64::MAX;
    // SAFETY: the caller's promise; `state` is ours.
    let rest = unsafe { routine(dst, src, len, !crc, &raw mut state) };
    match u32::try_from(state) {
        Ok(state) => (rest, !state),
        // A fault; but if the memory is mapped again by now, all bytes have arrived, and their CRC
        // is still to be computed.
        // SAFETY: `dst` is valid for `len` bytes, of which those before `rest` have just been
        // written.
        Err(_) => (rest, unsafe { sum(dst, len - rest, crc) }),
    }
}

/// Head up to an aligned address, body, and the bytes left over.
///
/// # Safety
/// As for [`load_crc`]; at least 128 bytes.
unsafe fn in_three(dst: *mut u8, src: *const u8, len: usize, crc: u32) -> (usize, u32) {
    let head = src.addr().wrapping_neg() % 16;
    let body = (len - head) & !15;
    // SAFETY: the three parts make up the caller's range; the body is aligned, and long enough
    // since `len` is at least 128.
    unsafe {
        let (rest, crc) = in_two_passes(dst, src, head, crc);
        if rest > 0 {
            return (len - head + rest, crc);
        }
        let (dst, src, len) = (dst.add(head), src.wrapping_add(head), len - head);
        let (rest, crc) = folded(raw_load_crc128, dst, src, body, crc);
        if rest > 0 {
            return (len - body + rest, crc);
        }
        in_two_passes(dst.add(body), src.wrapping_add(body), len - body, crc)
    }
}

/// # Safety
/// As for [`load_crc`].
unsafe fn in_two_passes(dst: *mut u8, src: *const u8, len: usize, crc: u32) -> (usize, u32) {
    // SAFETY: the caller's promise; what was copied has been written.
    unsafe {
        let rest = load(dst, src, len);
        (rest, sum(dst, len - rest, crc))
    }
}

/// # Safety
/// `len` bytes at `bytes` have been written by us and belong to us alone.
unsafe fn sum(bytes: *const u8, len: usize, crc: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    // SAFETY: the caller's promise.
    hasher.update(unsafe { std::slice::from_raw_parts(bytes, len) });
    hasher.finalize()
}

/// The vectors a CRC can be folded by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Width {
    None,
    Bytes16,
    Bytes64,
}

/// The widest this processor has and the system saves.
#[inline]
fn width() -> Width {
    const UNKNOWN: u8 = 0xFF;
    static WIDTH: AtomicU8 = AtomicU8::new(UNKNOWN);
    match WIDTH.load(Ordering::Relaxed) {
        UNKNOWN => {
            let width = *widths().last().unwrap_or(&Width::None);
            WIDTH.store(width as u8, Ordering::Relaxed);
            width
        }
        known if known == Width::Bytes64 as u8 => Width::Bytes64,
        known if known == Width::Bytes16 as u8 => Width::Bytes16,
        _ => Width::None,
    }
}

/// All that this processor has, narrowest first.
fn widths() -> Vec<Width> {
    let mut widths = vec![Width::None];
    if !std::arch::is_x86_feature_detected!("pclmulqdq") {
        return widths;
    }
    widths.push(Width::Bytes16);
    if std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vbmi")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
    {
        widths.push(Width::Bytes64);
    }
    widths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostBuffer, guard, page_size};

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| u8::try_from((i * 7 + i / 251 + i * i / 1013) % 256).unwrap()).collect()
    }

    #[test]
    fn every_width_sums_what_it_copies() {
        let source = bytes(8400);
        for width in widths() {
            for len in (0..600).chain(1023..1100).chain([4096, 8200]) {
                let every = if len < 600 { 1 } else { 7 };
                for src_shift in (0..64).step_by(every) {
                    let dst_shift = [0, 16, 1, 12, 48, 63, 30, 8][(src_shift / every + len) % 8];
                    let crc = u32::try_from(len * 0x0007_0101 + src_shift).unwrap();
                    let mut copy = vec![0xEE; len + 192];
                    // SAFETY: both sides lie inside vectors that are long enough; the width is one
                    // of this processor's.
                    let (rest, got) = unsafe {
                        let (dst, src) =
                            (copy.as_mut_ptr().add(64 + dst_shift), source.as_ptr().add(src_shift));
                        load_crc_by(width, dst, src, len, crc)
                    };
                    let mut expected = vec![0xEE; len + 192];
                    expected[64 + dst_shift..][..len].copy_from_slice(&source[src_shift..][..len]);
                    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
                    hasher.update(&source[src_shift..][..len]);
                    assert_eq!(rest, 0);
                    assert!(copy == expected, "{len} bytes, {src_shift} -> {dst_shift}, {width:?}");
                    assert_eq!(got, hasher.finalize(), "{len} bytes, {src_shift} -> {dst_shift}, {width:?}");
                }
            }
        }
    }

    #[test]
    fn every_width_stops_where_the_memory_stops() {
        guard::ensure_installed().unwrap();
        let buffer = HostBuffer::guarded(4 * page_size()).unwrap();
        let source = bytes(buffer.len());
        buffer.write_at(0, &source).unwrap();
        for width in widths() {
            for reach in (0..400).chain([511, 1000, 4096, 4099, 8200]) {
                for beyond in [1, 2, 7, 8, 63, 64, 65, 200, 256, 300, 4096] {
                    let (len, start) = (reach + beyond, buffer.len() - reach);
                    let mut copy = vec![0xEE; len + 128];
                    let src = buffer.as_mut_ptr().wrapping_add(start);
                    // SAFETY: the private side is long enough; the window ends in a guard page of
                    // ours.
                    let (rest, _) = unsafe { load_crc_by(width, copy.as_mut_ptr().add(64), src, len, 0) };
                    assert_eq!(rest, beyond, "{reach} + {beyond}, {width:?}");
                    assert!(copy[64..][..reach] == source[start..], "{reach} + {beyond}, {width:?}");
                    assert!(
                        copy[..64].iter().chain(&copy[64 + reach..]).all(|&byte| byte == 0xEE),
                        "{reach} + {beyond}, {width:?}"
                    );
                }
            }
            // A range that begins in the guard page before the buffer.
            for before in [1, 5, 64, 100] {
                let mut copy = vec![0xEE; 500];
                let src = buffer.as_mut_ptr().wrapping_sub(before);
                // SAFETY: as above.
                let (rest, _) = unsafe { load_crc_by(width, copy.as_mut_ptr(), src, 500, 0) };
                assert_eq!(rest, 500, "{before} before, {width:?}");
            }
        }
    }

    /// The private side may end where the memory ends: masked stores touch nothing beyond it.
    #[test]
    fn the_private_side_may_lie_at_the_edge_of_a_mapping() {
        guard::ensure_installed().unwrap();
        let private = HostBuffer::guarded(page_size()).unwrap();
        let source = bytes(page_size());
        for width in widths() {
            for len in (128..300).chain([page_size() - 1, page_size()]) {
                let last = private.len() - len;
                for (start, src_shift) in [(0, 0), (0, 3), (last, 5), (last, 0)] {
                    if src_shift + len > source.len() {
                        continue;
                    }
                    // SAFETY: both sides are inside their memory.
                    let (rest, crc) = unsafe {
                        let dst = private.as_mut_ptr().add(start);
                        load_crc_by(width, dst, source.as_ptr().add(src_shift), len, 0)
                    };
                    assert_eq!((rest, crc), (0, crc32fast::hash(&source[src_shift..][..len])));
                }
            }
        }
    }
}
