//! Work at process exit, done by an engine thread.
//!
//! A program may call `exit` in a signal handler that interrupted `malloc`. The exiting thread must
//! not allocate then. Engine threads receive no signals, so that they can.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Interval at which the exiting thread looks whether the work is done.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

static WORK: OnceLock<fn()> = OnceLock::new();
static WANTED: AtomicBool = AtomicBool::new(false);
static DONE: AtomicBool = AtomicBool::new(false);
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Sets the work, once.
pub(crate) fn set(work: fn()) {
    let _ = WORK.set(work);
}

/// A running engine thread, until it is dropped.
pub(crate) struct RunningThread(());

impl RunningThread {
    pub(crate) fn new() -> Self {
        THREADS.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for RunningThread {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// In a forked child: the threads are its parent's.
pub(crate) fn forget_threads() {
    THREADS.store(0, Ordering::Release);
}

/// Lets an engine thread do the work, until `end` at most; `wake` wakes the threads. False if there
/// is no engine thread. Does not allocate.
pub(crate) fn delegate(wake: impl FnOnce(), end: Instant) -> bool {
    if THREADS.load(Ordering::Acquire) == 0 {
        return false;
    }
    WANTED.store(true, Ordering::SeqCst);
    wake();
    while !DONE.load(Ordering::Acquire) && Instant::now() < end {
        std::thread::sleep(LOOK_AGAIN);
    }
    true
}

/// Does the work if it is wanted: for engine threads, without their engine's lock.
#[inline]
pub(crate) fn serve() {
    if WANTED.load(Ordering::Relaxed) && WANTED.swap(false, Ordering::AcqRel) {
        if let Some(work) = WORK.get() {
            work();
        }
        DONE.store(true, Ordering::Release);
    }
}
