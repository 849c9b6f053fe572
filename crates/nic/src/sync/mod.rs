//! The standard-library types that the lock-free files (`waker.rs`, `notices.rs`, `ring.rs` here;
//! `completions.rs` of `soft/engine`) use. `tests/loom.rs` builds the same files with loom's types
//! in their place, and tries every order of events.

pub(crate) mod notices;
#[cfg(test)]
mod notices_tests;
pub(crate) mod ring;
pub(crate) mod spin;
pub(crate) mod waker;

pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};

/// Initial size of a completion ring, if the queue is as deep; it grows. Small in the models, which
/// fill it.
pub(crate) const FIRST_PLACES: usize = 256;

/// As `std::cell::UnsafeCell`, with loom's interface.
#[derive(Debug, Default)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline(always)]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
