//! Counters, for programs and for the report of the process.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use crate::abi::{Error, Status};
use crate::calls::{put, status};
use crate::transfer::Direction;

/// Operations that succeeded and failed.
#[derive(Debug)]
pub(crate) struct Operations {
    succeeded: AtomicU64,
    failed: AtomicU64,
}

impl Operations {
    const fn new() -> Self {
        Self { succeeded: AtomicU64::new(0), failed: AtomicU64::new(0) }
    }

    pub(crate) fn count(&self, is_success: bool) {
        let counter = if is_success { &self.succeeded } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn both(&self) -> [u64; 2] {
        [self.succeeded.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed)]
    }

    fn clear(&self) {
        self.succeeded.store(0, Ordering::Relaxed);
        self.failed.store(0, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Moved {
    operations: Operations,
    bytes: AtomicU64,
    microseconds: AtomicU64,
}

impl Moved {
    const fn new() -> Self {
        Self { operations: Operations::new(), bytes: AtomicU64::new(0), microseconds: AtomicU64::new(0) }
    }

    fn clear(&self) {
        self.operations.clear();
        self.bytes.store(0, Ordering::Relaxed);
        self.microseconds.store(0, Ordering::Relaxed);
    }
}

static READS: Moved = Moved::new();
static WRITES: Moved = Moved::new();
pub(crate) static HANDLES: Operations = Operations::new();
pub(crate) static HANDLE_ENDS: Operations = Operations::new();
pub(crate) static BUFFERS: Operations = Operations::new();
pub(crate) static BUFFER_ENDS: Operations = Operations::new();
static LEVEL: AtomicI32 = AtomicI32::new(0);

/// Counts a read or a write; `moved` is `None` for one that failed.
pub(crate) fn count(direction: Direction, moved: Option<usize>, took: Duration) {
    let counters = if direction == Direction::Read { &READS } else { &WRITES };
    counters.operations.count(moved.is_some());
    counters.bytes.fetch_add(moved.unwrap_or(0) as u64, Ordering::Relaxed);
    let microseconds = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    counters.microseconds.fetch_add(microseconds, Ordering::Relaxed);
}

/// Numbers of `CUfileStatsLevel1_t` before those of vectors were added: a program that was built
/// before would be written past its end.
const WORDS: usize = 64;

fn level_1() -> [u64; WORDS] {
    let mut words = [0; WORDS];
    let operations = [&READS.operations, &WRITES.operations, &HANDLES, &HANDLE_ENDS, &BUFFERS, &BUFFER_ENDS]
        .map(Operations::both);
    words[..12].copy_from_slice(operations.as_flattened());
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let per_second = |amount: u64, took: u64| amount.saturating_mul(1_000_000).checked_div(took).unwrap_or(0);
    for (number, moved) in [&READS, &WRITES].into_iter().enumerate() {
        let (bytes, took, done) = (of(&moved.bytes), of(&moved.microseconds), moved.operations.both()[0]);
        let facts = [
            bytes,
            per_second(bytes, took),
            took.checked_div(done).unwrap_or(0),
            per_second(done, took),
            took,
        ];
        for (place, fact) in facts.into_iter().enumerate() {
            words[12 + 2 * place + number] = fact;
        }
    }
    words
}

/// # Safety
/// `stats` is null or a place for a `CUfileStatsLevel1_t`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileGetStatsL1(stats: *mut [u64; WORDS]) -> Error {
    // SAFETY: the caller's promise.
    status(|| unsafe { put(stats, level_1()) })
}

/// Sets the level; counters are always kept.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileSetStatsLevel(level: c_int) -> Error {
    status(|| {
        if !(0..=3).contains(&level) {
            return Err(Status::InvalidValue);
        }
        LEVEL.store(level, Ordering::Relaxed);
        Ok(())
    })
}

/// # Safety
/// `level` is null or a place for an int.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileGetStatsLevel(level: *mut c_int) -> Error {
    // SAFETY: the caller's promise.
    status(|| unsafe { put(level, LEVEL.load(Ordering::Relaxed)) })
}

/// Counters are always kept.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileStatsStart() -> Error {
    Error::from(Ok(()))
}

/// Counters are always kept.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileStatsStop() -> Error {
    Error::from(Ok(()))
}

/// Sets all counters to zero.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileStatsReset() -> Error {
    status(|| {
        [&READS, &WRITES].into_iter().for_each(Moved::clear);
        [&HANDLES, &HANDLE_ENDS, &BUFFERS, &BUFFER_ENDS].into_iter().for_each(Operations::clear);
        Ok(())
    })
}
