//! Why copies of GPU memory do not end.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::links::now_ns;

/// A thread inside a CUDA call for this long is blocked.
const KEPT: Duration = Duration::from_secs(1);

/// Since when the copier thread is inside a CUDA call.
#[derive(Debug, Default)]
pub(crate) struct Inside(AtomicU64);

impl Inside {
    /// Makes calls, and records their time.
    pub(crate) fn of<T>(&self, calls: impl FnOnce() -> T) -> T {
        self.0.store(now_ns(), Ordering::Relaxed);
        let result = calls();
        self.0.store(0, Ordering::Relaxed);
        result
    }

    /// What blocks a copy that does not end.
    pub(crate) fn standstill(&self) -> Standstill {
        let inside = match self.0.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => Duration::from_nanos(now_ns().saturating_sub(since)),
        };
        if inside > KEPT { Standstill::Call(inside) } else { Standstill::Queue }
    }
}

/// What blocks a copy that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standstill {
    /// A CUDA call has not returned for so long.
    Call(Duration),
    /// The GPU has the copy queued and does not run it.
    Queue,
}

impl fmt::Display for Standstill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(inside) => write!(
                f,
                "CUDA has not come back from a call for {} s: another thread of this process copies synchronously, frees memory or loads a kernel, \
                 and waits for kernels that may wait for these bytes; do so before or after communication, or let the memory have a window \
                 (docs/reference/visibility.md)",
                inside.as_secs()
            ),
            Self::Queue => f.write_str(
                "the GPU has the copy and does not get to it: it is stuck, or the copy stands behind work that waits for these bytes, in a queue that \
                 streams share (CUDA_DEVICE_MAX_CONNECTIONS=32 gives more queues); memory that has a window needs no copy (docs/reference/visibility.md)",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_come_back_are_not_to_blame() {
        let inside = Inside::default();
        assert_eq!(inside.of(|| inside.standstill()), Standstill::Queue);
        assert_eq!(inside.standstill(), Standstill::Queue);
        inside.0.store(now_ns() - 3_000_000_000, Ordering::Relaxed);
        assert!(matches!(inside.standstill(), Standstill::Call(time) if time.as_secs() == 3));
        assert!(inside.standstill().to_string().contains("for 3 s"));
    }
}
