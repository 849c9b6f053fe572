//! Parts of a registration that are gone, and why.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use super::error::CudaError;
use super::region::Gone;

impl Gone {
    /// Whether CUDA reported that the memory is gone, as opposed to failing to answer: during
    /// process exit, in a forked child, after a kernel fault. A copy by address is refused either
    /// way; a window is revoked for the first only.
    pub(super) fn is_certain(&self) -> bool {
        match self {
            Self::Freed { error, .. } => error.code == CudaError::INVALID_VALUE,
            // 0 is no number: the question after the physical memory failed.
            Self::Reused { now, .. } => *now != 0,
            Self::Context { error, .. } => {
                matches!(error.code, CudaError::INVALID_VALUE | CudaError::CONTEXT_IS_DESTROYED)
            }
        }
    }

    /// The same of another address.
    pub(super) fn from(self, addr: u64) -> Self {
        match self {
            Self::Freed { error, .. } => Self::Freed { addr, error },
            Self::Reused { was, now, .. } => Self::Reused { addr, was, now },
            Self::Context { error, .. } => Self::Context { addr, error },
        }
    }
}

/// The parts of one registration that have ended, by GPU address.
#[derive(Debug, Default)]
pub(super) struct Endings {
    /// Checked for every packet.
    any: AtomicBool,
    parts: RwLock<Vec<(Range<u64>, Gone)>>,
}

impl Endings {
    /// Notes that a part is gone; the first reason is kept.
    pub(super) fn add(&self, part: Range<u64>, gone: Gone) {
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        if !parts.iter().any(|(known, _)| *known == part) {
            parts.push((part, gone));
        }
        self.any.store(true, Ordering::Release);
    }

    /// Why something of these addresses is gone, if that is so.
    #[inline]
    pub(super) fn among(&self, wanted: &Range<u64>) -> Option<Gone> {
        if self.any.load(Ordering::Acquire) { self.search(wanted) } else { None }
    }

    #[cold]
    fn search(&self, wanted: &Range<u64>) -> Option<Gone> {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        let gone = |part: &Range<u64>| part.start < wanted.end && wanted.start < part.end;
        parts.iter().find(|(part, _)| gone(part)).map(|(_, gone)| *gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u32) -> CudaError {
        CudaError { call: "cuPointerGetAttribute", code, name: "" }
    }

    /// A failed driver query must not end memory that is still alive.
    #[test]
    fn only_what_cuda_says_is_certain() {
        let addr = 0x1000;
        assert!(Gone::Freed { addr, error: error(1) }.is_certain());
        assert!(Gone::Reused { addr, was: 5, now: 6 }.is_certain());
        assert!(Gone::Context { addr, error: error(1) }.is_certain());
        assert!(Gone::Context { addr, error: error(709) }.is_certain());
        assert!(!Gone::Reused { addr, was: 5, now: 0 }.is_certain());
        for code in [3, 4, 201, 700, 719, 999] {
            assert!(!Gone::Freed { addr, error: error(code) }.is_certain(), "{code}");
            assert!(!Gone::Context { addr, error: error(code) }.is_certain(), "{code}");
        }
    }

    #[test]
    fn parts_end_by_themselves() {
        let endings = Endings::default();
        assert_eq!(endings.among(&(0..100)), None);
        let (first, second) =
            (Gone::Freed { addr: 10, error: error(1) }, Gone::Freed { addr: 99, error: error(1) });
        endings.add(10..20, first);
        endings.add(10..20, second);
        assert_eq!(endings.among(&(19..40)), Some(first), "the first reason is kept");
        assert_eq!(endings.among(&(20..40)), None);
        assert_eq!(endings.among(&(0..10)), None);
    }
}
