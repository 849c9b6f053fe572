//! Detects memory that is freed while our window still maps it, by periodic queries, and revokes
//! the mapping.
//!
//! A window keeps the driver's memory object alive, so freed memory is not reused for as long as we
//! can reach it. But stores to it are lost, and the sender must get an error. Short allocations of
//! `cudaMalloc` are parts of an object, which CUDA reuses for the next allocation. No callback
//! reports that memory is freed, its context destroyed or the device reset. A query before each
//! store would wait for CUDA's locks, which other threads may hold until their kernels end. So a
//! thread polls.
//!
//! It queries each allocation once, however many registrations share it, by a call that needs no
//! context and waits for no kernel. It holds no registration meanwhile, so that none is kept alive.
//! A round takes no longer than [`ROUND`].

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, mem};

use super::driver::Driver;
use super::error::CudaError;
use super::range;
use super::region::GpuMemory;
use crate::signals::BlockedSignals;

/// Polling interval. Until the next round, packets for freed short allocations may reach the
/// memory's next owner, as with an adapter that knows the memory by dma-buf.
const EVERY: Duration = Duration::from_millis(20);
/// Time budget of a round. The rest is queried in the next round: the thread takes a twentieth of a
/// CPU at most.
const ROUND: Duration = Duration::from_millis(1);
/// Allocations looked up in one batch, under the lock.
const BATCH: usize = 64;
/// Empty rounds until the thread ends: programs register and deregister again and again.
const IDLE_ROUNDS: u32 = 50;
/// How long process exit waits for a pending CUDA query.
const QUERY_TIMEOUT: Duration = Duration::from_millis(100);

/// Where an allocation begins, and its number.
type Allocation = (u64, u64);

/// One registration's part of an allocation.
#[derive(Clone)]
struct Watch {
    /// An address inside.
    addr: u64,
    memory: Weak<GpuMemory>,
    /// Which of the registration's segments it is.
    segment: usize,
}

#[derive(Default)]
struct Watched {
    /// By allocation and registration, so that those of one allocation follow each other.
    watches: BTreeMap<(Allocation, usize), Watch>,
    /// There was a watched registration since the last round, though it may be gone again.
    in_use: bool,
    /// The watcher thread runs.
    is_running: bool,
}

static WATCHED: Mutex<Watched> =
    Mutex::new(Watched { watches: BTreeMap::new(), in_use: false, is_running: false });

fn lock() -> MutexGuard<'static, Watched> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A registration is watched for as long as this lives.
#[derive(Debug)]
pub(super) struct WatchGuard {
    allocations: Vec<Allocation>,
    memory: usize,
}

/// Watches this memory from now on.
pub(super) fn add(memory: &Arc<GpuMemory>) -> io::Result<WatchGuard> {
    let name = Arc::as_ptr(memory).addr();
    let mut watched = lock();
    if !watched.is_running {
        start()?;
        watched.is_running = true;
    }
    watched.in_use = true;
    let mut allocations = Vec::new();
    for (segment, found) in memory.range().segments().iter().enumerate() {
        let allocation = (found.base, found.buffer_id);
        let watch = Watch { addr: found.base.max(memory.addr()), memory: Arc::downgrade(memory), segment };
        watched.watches.insert((allocation, name), watch);
        allocations.push(allocation);
    }
    Ok(WatchGuard { allocations, memory: name })
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        // A forked child has no watcher thread, and a thread that does not exist there may hold the
        // lock.
        if Driver::is_forked() {
            return;
        }
        let mut watched = lock();
        for allocation in &self.allocations {
            watched.watches.remove(&(*allocation, self.memory));
        }
    }
}

impl Watched {
    /// One watch for each of the next allocations after `last`.
    fn next(&self, last: Option<Allocation>) -> Vec<(Allocation, u64)> {
        let mut batch = Vec::with_capacity(BATCH);
        let mut from = last.map_or(Bound::Unbounded, behind);
        while batch.len() < BATCH
            && let Some(((allocation, _), watch)) = self.watches.range((from, Bound::Unbounded)).next()
        {
            batch.push((*allocation, watch.addr));
            from = behind(*allocation);
        }
        batch
    }

    /// All of one allocation.
    fn all_of(&self, allocation: Allocation) -> Vec<Watch> {
        self.watches
            .range((allocation, 0)..=(allocation, usize::MAX))
            .map(|(_, watch)| watch.clone())
            .collect()
    }
}

fn behind(allocation: Allocation) -> Bound<(Allocation, usize)> {
    Bound::Excluded((allocation, usize::MAX))
}

/// Starts the thread.
fn start() -> io::Result<()> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        // SAFETY: the function lives as long as this code is loaded, and never unwinds.
        unsafe { libc::atexit(at_exit) };
    });
    let _blocked = BlockedSignals::new();
    std::thread::Builder::new().name("nobounce-watch".into()).spawn(watch_all).map(|_| ())
}

fn watch_all() {
    let Ok(driver) = Driver::get() else { return };
    driver.keep_relaxed();
    let (mut last, mut idle) = (None, 0);
    loop {
        std::thread::sleep(EVERY);
        let mut watched = lock();
        let in_use = mem::take(&mut watched.in_use) || !watched.watches.is_empty();
        idle = if in_use { 0 } else { idle + 1 };
        if idle == IDLE_ROUNDS || EXITING.load(Ordering::SeqCst) {
            watched.is_running = false;
            return;
        }
        drop(watched);
        last = round(driver, last);
    }
}

/// Queries all allocations behind `last`, or as many as the budget allows; returns the last one in
/// that case.
fn round(driver: &Driver, mut last: Option<Allocation>) -> Option<Allocation> {
    let begin = Instant::now();
    loop {
        let batch = lock().next(last);
        for (allocation, addr) in &batch {
            let _asking = Asking::begin()?;
            if seems_gone(driver, *allocation, *addr) {
                end_all_of(*allocation);
            }
        }
        last = batch.last().filter(|_| batch.len() == BATCH).map(|(allocation, _)| *allocation);
        if last.is_none() || begin.elapsed() >= ROUND {
            return last;
        }
    }
}

/// Whether it is worth a second question.
fn seems_gone(driver: &Driver, (_, number): Allocation, addr: u64) -> bool {
    match driver.relaxed(|api| range::buffer_id(api, addr)) {
        Ok(now) => now != number,
        Err(error) => matches!(error.code, CudaError::INVALID_VALUE | CudaError::CONTEXT_IS_DESTROYED),
    }
}

/// Ends all registrations of an allocation, if CUDA confirms that it is gone.
fn end_all_of(allocation: Allocation) {
    let watches = lock().all_of(allocation);
    let memories: Vec<_> =
        watches.iter().filter_map(|watch| Some((watch.memory.upgrade()?, watch.segment))).collect();
    let Some(gone) = memories.first().and_then(|(memory, segment)| memory.certainly_gone(*segment)) else {
        return;
    };
    // They may share a mapping: record the reason everywhere before any of them is revoked.
    memories.iter().for_each(|(memory, segment)| memory.note_end(*segment, gone));
    for (memory, segment) in memories {
        memory.cut_off(segment);
        lock().watches.remove(&(allocation, Arc::as_ptr(&memory).addr()));
    }
}

/// The process exits: later exit handlers shut the driver down, so it must not be called any more.
static EXITING: AtomicBool = AtomicBool::new(false);
/// A question was put to the driver.
static ASKING: AtomicBool = AtomicBool::new(false);

struct Asking(());

impl Asking {
    fn begin() -> Option<Self> {
        ASKING.store(true, Ordering::SeqCst);
        let asking = Self(());
        // After the flag: the exit handler sets `EXITING` first and then waits for `ASKING`.
        (!EXITING.load(Ordering::SeqCst)).then_some(asking)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        ASKING.store(false, Ordering::SeqCst);
    }
}

extern "C" fn at_exit() {
    if Driver::is_forked() {
        return;
    }
    EXITING.store(true, Ordering::SeqCst);
    let end = Instant::now() + QUERY_TIMEOUT;
    while ASKING.load(Ordering::SeqCst) && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(100));
    }
}
