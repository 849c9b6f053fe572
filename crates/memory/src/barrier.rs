//! Memory ordering points, each named after the order it keeps and documented by its writer and its
//! observer.
//!
//! They order accesses through a [`Window`](crate::Window), which are opaque to the compiler, as
//! well as ordinary ones.

use std::sync::atomic::{Ordering, fence};

/// Payload first, then the last bytes of the message.
///
/// *Writer*: the thread that stores a message into registered memory. *Observer*: a program that
/// spins on the last byte of its buffer and, once that has changed, reads all of it without a
/// completion.
///
/// x86_64: `sfence`. Stores to ordinary memory already become visible in program order there (TSO).
/// The fence costs a few nanoseconds once per message and extends that order to write-combining
/// mappings. Elsewhere: a release fence.
#[inline]
pub fn before_last_bytes() {
    drain_stores();
}

/// Payload first, then the completion that announces it.
///
/// *Writer*: the thread that stores a message and then adds an entry to a completion queue.
/// *Observer*: the thread that polls the queue and then reads the message, perhaps through another
/// mapping of the same memory.
///
/// x86_64: `sfence`, for the reason given at [`before_last_bytes`]. Elsewhere: a release fence.
#[inline]
pub fn before_completion() {
    drain_stores();
}

/// The notification first, then loads of the data through a write-combining window.
///
/// *Writer*: a GPU that stores data and then a flag. *Observer*: the thread that has seen the flag,
/// or starts a gather, and loads the data through the window. Non-temporal loads may hit a fill
/// buffer with stale data: on an H200, 114 846 of 200 000 reads were stale without this, none with
/// it. It also drains our own stores before the loads.
///
/// x86_64: `mfence`. Elsewhere: a full fence.
#[inline]
pub fn before_window_loads() {
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: mfence is part of the x86_64 baseline and touches neither memory nor registers.
    unsafe {
        std::arch::x86_64::_mm_mfence();
    }
}

#[inline]
fn drain_stores() {
    fence(Ordering::Release);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: sfence is part of the x86_64 baseline and touches neither memory nor registers.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
