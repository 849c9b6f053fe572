//! The tests' own copies of the product's load and store sequences, instruction by instruction,
//! with a switchable fence. They are separate from the product's code, so that removing a fence
//! here removes nothing there.
//!
//! Addresses are multiples of 8, lengths too.

use std::arch::asm;
use std::arch::x86_64::{_mm_mfence, _mm_sfence};
use std::sync::OnceLock;

/// Whether a fence is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    Kept,
    TakenOut,
}

const LINE: usize = 64;

/// Drains the write-combining buffers.
pub(crate) fn sfence() {
    // SAFETY: sfence is part of the x86_64 baseline.
    unsafe { _mm_sfence() }
}

/// Makes later loads wait for earlier accesses, and forgets lines read ahead.
pub(crate) fn mfence() {
    // SAFETY: mfence is part of the x86_64 baseline.
    unsafe { _mm_mfence() }
}

fn has_avx512() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| std::is_x86_feature_detected!("avx512f"))
}

/// Non-temporal stores: whole lines, then words.
///
/// # Safety
/// `to` is a mapped window onto at least `from.len()` words.
pub(crate) unsafe fn store(to: *mut u8, from: &[u64]) {
    let (lines, words) = from.as_chunks::<8>();
    for (at, line) in lines.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { store_line(to.add(at * LINE), line) };
    }
    for (at, &word) in words.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(lines.len() * LINE + at * 8);
            asm!("movnti [{to}], {word}", to = in(reg) to, word = in(reg) word, options(nostack, preserves_flags));
        }
    }
}

/// # Safety
/// `to` is a mapped line.
unsafe fn store_line(to: *mut u8, line: &[u64; 8]) {
    let from = line.as_ptr();
    if has_avx512() && to.addr().is_multiple_of(LINE) {
        // SAFETY: the processor has AVX-512, both addresses name 64 bytes, the window's on a line.
        unsafe { store_line_at_once(to, from) };
        return;
    }
    for at in 0..8 {
        // SAFETY: within the line.
        unsafe {
            let (to, word) = (to.add(at * 8), *from.add(at));
            asm!("movnti [{to}], {word}", to = in(reg) to, word = in(reg) word, options(nostack, preserves_flags));
        }
    }
}

/// # Safety
/// `to` is a mapped line, `from` names 64 bytes.
#[target_feature(enable = "avx512f")]
unsafe fn store_line_at_once(to: *mut u8, from: *const u64) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "vmovdqu64 {line}, [{from}]",
            "vmovntdq [{to}], {line}",
            line = out(zmm_reg) _, from = in(reg) from, to = in(reg) to,
            options(nostack, preserves_flags),
        );
    }
}

/// A message as `store_last` stores it: all but the last 64 bytes, the fence, the last 64 bytes.
/// Drained at the end.
///
/// # Safety
/// As for [`store`].
pub(crate) unsafe fn store_message(to: *mut u8, from: &[u64], fence: Fence) {
    let cut = from.len().saturating_sub(8);
    // SAFETY: the caller's promise, for both parts.
    unsafe {
        store(to, &from[..cut]);
        if fence == Fence::Kept {
            sfence();
        }
        store(to.add(cut * 8), &from[cut..]);
    }
    sfence();
}

/// Non-temporal loads of whole lines.
///
/// # Safety
/// `from` is a mapped window onto at least `to.len()` words, on a line of 64 bytes; `to` holds
/// whole lines.
pub(crate) unsafe fn load(to: &mut [u64], from: *const u8, fence: Fence) {
    if fence == Fence::Kept {
        mfence();
    }
    let (lines, _) = to.as_chunks_mut::<8>();
    for (at, line) in lines.iter_mut().enumerate() {
        for part in 0..4 {
            // SAFETY: 16 bytes on a multiple of 16 inside the window, by the caller's promise;
            // SSE4.1 is as old as any GPU's host.
            unsafe {
                let (from, to) = (from.add(at * LINE + part * 16), line.as_mut_ptr().add(part * 2));
                asm!(
                    "movntdqa {piece}, [{from}]",
                    "movdqu [{to}], {piece}",
                    piece = out(xmm_reg) _, from = in(reg) from, to = in(reg) to,
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}

/// Loads a word of ordinary memory late: its address depends on a chain of square roots, a
/// microsecond long. Independent later instructions may execute before it. The processor keeps some
/// 400 instructions in flight; these are fewer.
///
/// # Safety
/// `from` names a word.
#[inline(always)]
pub(crate) unsafe fn load_late(from: *const u64) -> u64 {
    const ROOTS: u64 = 150;
    let value: u64;
    // SAFETY: the offset is 0, whatever the root is; the word is the caller's promise.
    unsafe {
        asm!(
            "2:",
            "sqrtsd {root}, {root}",
            "dec {count}",
            "jnz 2b",
            "cvttsd2si {offset}, {root}",
            "and {offset}, 0",
            "mov {value}, [{from} + {offset}]",
            root = inout(xmm_reg) 3.0_f64 => _,
            count = inout(reg) ROOTS => _,
            offset = out(reg) _,
            value = out(reg) value,
            from = in(reg) from,
            options(nostack),
        );
    }
    value
}

/// Words stored as two halves each, first all the low ones of a line, then all the high ones: torn
/// for a reader in between.
///
/// # Safety
/// As for [`store`].
pub(crate) unsafe fn store_halves(to: *mut u8, from: &[u64]) {
    for (at, line) in from.chunks(8).enumerate() {
        for half in 0..2 {
            for (word, &value) in line.iter().enumerate() {
                let value = value >> (32 * half);
                // SAFETY: within the window, by the caller's promise.
                unsafe {
                    let to = to.add(at * LINE + word * 8 + half * 4);
                    asm!("movnti [{to}], {value:e}", to = in(reg) to, value = in(reg) value, options(nostack, preserves_flags));
                }
            }
            sfence();
        }
    }
}

/// A word loaded as two halves.
///
/// # Safety
/// `from` is a mapped word of a window, on a multiple of 8.
pub(crate) unsafe fn load_halves(from: *const u8) -> u64 {
    let half = |at: usize| {
        mfence();
        // SAFETY: within the word; volatile, since others change it.
        u64::from(unsafe { from.add(at).cast::<u32>().read_volatile() })
    };
    half(0) | half(4) << 32
}

/// On ordinary memory: a sequence that stored or loaded the wrong bytes would blame the machine.
#[test]
fn sequences_move_what_they_should() {
    #[repr(align(64))]
    struct Lines([u64; 64]);
    let from: Vec<u64> = (0..64).map(|at| at * 0x0101_0101_0101_0101 + 7).collect();
    for words in [0, 1, 5, 8, 9, 16, 61, 64] {
        for kind in 0..4 {
            let mut lines = Lines([u64::MAX; 64]);
            let to = lines.0.as_mut_ptr().cast();
            // SAFETY: the lines have room for all words.
            unsafe {
                match kind {
                    0 => store(to, &from[..words]),
                    1 => store_halves(to, &from[..words]),
                    2 => store_message(to, &from[..words], Fence::Kept),
                    _ => store_message(to, &from[..words], Fence::TakenOut),
                }
            }
            sfence();
            assert_eq!(lines.0[..words], from[..words], "{words} words, kind {kind}");
            assert!(lines.0[words..].iter().all(|&word| word == u64::MAX), "{words} words, kind {kind}");
            let mut found = [0; 64];
            // SAFETY: whole lines of our own.
            unsafe { load(&mut found, lines.0.as_ptr().cast(), Fence::Kept) };
            assert_eq!(found, lines.0);
            // SAFETY: a word of our own.
            assert_eq!(unsafe { load_late(lines.0.as_ptr().add(5)) }, lines.0[5]);
            // SAFETY: a word of our own.
            assert_eq!(unsafe { load_halves(lines.0.as_ptr().add(3).cast()) }, lines.0[3]);
        }
    }
}
