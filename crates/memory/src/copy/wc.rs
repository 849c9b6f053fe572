//! Copies to and from write-combining memory: a BAR1 window, which is uncached and weakly ordered.
//!
//! The routines do not order anything: [`GpuWindow`](crate::gpu::GpuWindow) adds the fences.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(any(test, not(target_arch = "x86_64")))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::find_fixup;

/// The instructions that copies are made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Isa {
    /// 16-byte vectors with ordinary loads. Every x86_64 has it. (On other architectures: words of
    /// 8 bytes.)
    Sse2,
    /// 16-byte vectors, with non-temporal loads.
    Sse41,
    /// 32-byte vectors.
    Avx2,
    /// 64-byte vectors, masked at the ends (AVX-512 F and BW).
    Avx512,
}

impl Isa {
    const ALL: [Self; 4] = [Self::Sse2, Self::Sse41, Self::Avx2, Self::Avx512];

    /// The best this processor has: chosen once.
    #[inline]
    #[must_use]
    pub fn best() -> Self {
        const UNKNOWN: u8 = 0xFF;
        static BEST: AtomicU8 = AtomicU8::new(UNKNOWN);
        match BEST.load(Ordering::Relaxed) {
            UNKNOWN => {
                let best = Self::available().into_iter().max().unwrap_or(Self::Sse2);
                BEST.store(best as u8, Ordering::Relaxed);
                best
            }
            known => Self::ALL[usize::from(known)],
        }
    }

    /// All that this processor has and the system supports, narrowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return x86_64::available(self);
        #[cfg(not(target_arch = "x86_64"))]
        return self == Self::Sse2;
    }

    /// This one where the processor has it, else the best.
    #[must_use]
    pub(crate) fn or_best(self) -> Self {
        if self.is_available() { self } else { Self::best() }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sse2 => "sse2",
            Self::Sse41 => "sse4.1",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

/// Copies into the window; returns how many bytes were left after a fault.
///
/// # Safety
/// `src` is valid for reads of `len` bytes. `dst` may be anything, but whatever is mapped there may
/// be written. The processor has `isa`.
#[inline]
pub(crate) unsafe fn store(isa: Isa, dst: *mut u8, src: *const u8, len: usize) -> usize {
    #[cfg(not(target_arch = "x86_64"))]
    use portable as routines;
    #[cfg(target_arch = "x86_64")]
    use x86_64 as routines;
    // SAFETY: the caller's promise.
    unsafe { routines::store(isa, dst, src, len) }
}

/// Copies out of the window; returns how many bytes were left after a fault. May read to the ends
/// of the 64-byte lines that the range begins and ends in.
///
/// # Safety
/// `dst` is valid for writes of `len` bytes. `src` may be anything, but whatever is mapped there
/// may be read. The processor has `isa`.
#[inline]
pub(crate) unsafe fn load(isa: Isa, dst: *mut u8, src: *const u8, len: usize) -> usize {
    #[cfg(not(target_arch = "x86_64"))]
    use portable as routines;
    #[cfg(target_arch = "x86_64")]
    use x86_64 as routines;
    // SAFETY: the caller's promise.
    unsafe { routines::load(isa, dst, src, len) }
}
