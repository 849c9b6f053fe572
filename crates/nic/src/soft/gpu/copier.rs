//! The copier thread, which makes CUDA's copy calls: one for each context with registered memory.
//!
//! CUDA's driver has locks. An application thread that loads a kernel for the first time, frees
//! memory or copies synchronously may hold one until the running kernels end. Those kernels may
//! wait for bytes that this device sends or places. So the thread that drives the device makes no
//! such call: it submits a job to the copier thread. If a fetch is late, bytes to send are loaded
//! through the BAR1 window instead (`build.rs`). Bytes to place wait, and nothing else does
//! (`staging.rs`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nobounce_memory::gpu::copy_engine::{CopyEngine, CopyError, GatherPart, PendingCopy, PinnedChunk, Rows};
use nobounce_memory::gpu::{Gpu, GpuMemory};
use nobounce_memory::signals::BlockedSignals;

use crate::links::now_ns;
use crate::process::cpu::{ask_for_short_slices, has_many_cpus};
use crate::process::fork;
use crate::soft::error::RegisterError;
use crate::soft::gpu::copiers::ContextKey;
use crate::soft::gpu::standstill::{Inside, Standstill};
use crate::sync::waker::Waker;

/// Payload bytes per chunk.
pub(crate) const CHUNK: usize = 512 << 10;
/// Bytes of a fetch chunk: room for headers between the smallest packets.
pub(crate) const FETCH_CHUNK: usize = CHUNK + CHUNK / 16;
/// Fetch chunks and place chunks, for each context. The pools are separate: a queue pair that
/// cannot send what it fetched must not block receives.
const FETCH_CHUNKS: usize = 32;
const PLACE_CHUNKS: usize = 16;

/// How long the thread spins for more jobs before it sleeps: a wake-up costs as much as a short
/// copy.
const SPIN_NS: u64 = 50_000;
/// Pause instructions between two polls, which leave the core to its sibling hardware thread.
const PAUSES: u32 = 8;
/// How long it spins while a copy is in flight, and the poll interval after that.
const BUSY_NS: u64 = 200_000;
const NAP: Duration = Duration::from_micros(10);

/// How long deregistration waits for copies from and to the memory.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes of a memory, and the purpose of their copy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CopyWork {
    /// Bytes to send, into these rows of a fetch chunk.
    Fetch { rows: Rows, offset: usize, len: usize },
    /// Several pieces to send, each into rows of its own.
    Gather(Rows, Vec<GatherPart>),
    /// Received bytes, from the start of a place chunk.
    Place { offset: usize, len: usize },
    /// Bytes that an atomic will change, to the start of a place chunk.
    Look { offset: usize, len: usize },
}

/// A copy job.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) work: CopyWork,
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) chunk: PinnedChunk,
}

/// A submitted copy. Dropping it does not stop the copy.
#[derive(Debug)]
pub(crate) struct Copying(Arc<CopyReply>);

impl Copying {
    /// The chunk, once the copy is over. Can be taken once.
    pub(crate) fn take(&self) -> Option<Result<PinnedChunk, CopyError>> {
        if !self.0.is_there.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.0.chunk).take()
    }
}

#[derive(Debug, Default)]
struct CopyReply {
    is_there: AtomicBool,
    chunk: Mutex<Option<Result<PinnedChunk, CopyError>>>,
}

impl CopyReply {
    fn give(&self, chunk: Result<PinnedChunk, CopyError>) {
        *lock(&self.chunk) = Some(chunk);
        self.is_there.store(true, Ordering::Release);
    }
}

/// Copies bytes of one context's memory.
#[derive(Debug)]
pub(crate) struct Copier {
    engines: Arc<Engines>,
    /// A fetch is late: loadable bytes are not fetched until it is over.
    late: AtomicBool,
    /// Dropped after the engines, so that the thread is the last to hold them.
    queue: OpenJobQueue,
}

/// One copy engine for each direction.
#[derive(Debug)]
struct Engines {
    fetch: CopyEngine,
    place: CopyEngine,
}

/// The job queue.
#[derive(Debug, Default)]
struct JobQueue {
    waiting: Mutex<CopyQueue>,
    more: Condvar,
    /// Queued jobs: read without the lock.
    posted: AtomicUsize,
    /// Fetches that are not over.
    fetches: AtomicUsize,
    inside: Inside,
}

#[derive(Debug, Default)]
struct CopyQueue {
    jobs: VecDeque<(Job, Arc<CopyReply>)>,
    /// The memories of all jobs that are not over: one entry per job.
    memories: Vec<usize>,
    sleeps: bool,
    closed: bool,
}

impl Copier {
    /// Creates the copy engines and starts the thread, for memory of this context. Takes
    /// milliseconds: not under the engine's lock.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        context: ContextKey,
        waker: &Arc<Waker>,
    ) -> Result<Arc<Self>, RegisterError> {
        let make = |chunks, len| CopyEngine::in_context(gpu, context.handle(), chunks, len);
        let engines = Engines { fetch: make(FETCH_CHUNKS, FETCH_CHUNK)?, place: make(PLACE_CHUNKS, CHUNK)? };
        let (engines, queue) = (Arc::new(engines), Arc::<JobQueue>::default());
        let worker = Worker {
            engines: engines.clone(),
            queue: queue.clone(),
            waker: waker.clone(),
            under_way: Default::default(),
            lost: Vec::new(),
            spins: has_many_cpus(),
        };
        let _blocked = BlockedSignals::new();
        std::thread::Builder::new()
            .name("nobounce-copy".into())
            .spawn(move || worker.run())
            .map_err(RegisterError::Thread)?;
        let queue = OpenJobQueue { queue, generation: fork::generation() };
        Ok(Arc::new(Self { engines, late: AtomicBool::new(false), queue }))
    }

    /// Takes a fetch chunk, or none if all are in use.
    pub(crate) fn take_fetch_chunk(&self) -> Option<PinnedChunk> {
        self.engines.fetch.take_chunk()
    }

    /// Takes a place chunk, or none if all are in use.
    pub(crate) fn take_place_chunk(&self) -> Option<PinnedChunk> {
        self.engines.place.take_chunk()
    }

    /// Submits a copy. Copies of one kind are made in the order of submission.
    pub(crate) fn start(&self, job: Job) -> Copying {
        let answer = Arc::<CopyReply>::default();
        let queue = &self.queue.queue;
        if matches!(job.work, CopyWork::Fetch { .. } | CopyWork::Gather(..)) {
            queue.fetches.fetch_add(1, Ordering::Relaxed);
        }
        let mut waiting = lock(&queue.waiting);
        waiting.memories.push(name(&job.memory));
        waiting.jobs.push_back((job, answer.clone()));
        queue.posted.store(waiting.jobs.len(), Ordering::Release);
        let sleeps = waiting.sleeps;
        drop(waiting); // otherwise the woken thread blocks on the lock at once
        if sleeps {
            queue.more.notify_one();
        }
        Copying(answer)
    }

    /// The copies in flight from and to this memory.
    pub(crate) fn copies_of(&self, memory: &Arc<GpuMemory>) -> Copies {
        Copies { queue: self.queue.queue.clone(), memory: memory.clone() }
    }

    /// A fetch is late: the GPU has not run it.
    pub(crate) fn found_late(&self) {
        self.late.store(true, Ordering::Relaxed);
    }

    /// Whether a fetch that was found late is still not over.
    pub(crate) fn is_late(&self) -> bool {
        let mut late = self.late.load(Ordering::Relaxed);
        if late && self.queue.queue.fetches.load(Ordering::Acquire) == 0 {
            late = false;
            self.late.store(false, Ordering::Relaxed);
        }
        late
    }

    /// What blocks a copy that does not end.
    pub(crate) fn standstill(&self) -> Standstill {
        self.queue.queue.inside.standstill()
    }

    /// Whether its context was destroyed. Calls CUDA: not under the engine's lock.
    pub(crate) fn is_gone(&self) -> bool {
        self.engines.place.is_gone()
    }
}

/// A job queue that accepts jobs until it is dropped.
#[derive(Debug)]
struct OpenJobQueue {
    queue: Arc<JobQueue>,
    generation: u64,
}

impl Drop for OpenJobQueue {
    fn drop(&mut self) {
        // A forked child has no copier thread, and that thread may have held the lock at the fork.
        if fork::current() == self.generation {
            lock(&self.queue.waiting).closed = true;
            self.queue.more.notify_one();
        }
    }
}

/// The copies in flight from and to one memory: awaited before the memory is freed.
#[derive(Debug)]
pub(crate) struct Copies {
    queue: Arc<JobQueue>,
    memory: Arc<GpuMemory>,
}

impl Copies {
    /// Waits until there are none, with a timeout. The caller must not block the device's progress:
    /// CUDA may delay the copy until kernels end, and those may wait for this device.
    pub(crate) fn wait(&self) {
        let begin = Instant::now();
        while lock(&self.queue.waiting).memories.contains(&name(&self.memory)) {
            if begin.elapsed() > DRAIN_TIMEOUT {
                tracing::warn!(
                    "the GPU still copies out of or into memory that is deregistered: it is stuck"
                );
                return;
            }
            std::thread::sleep(NAP);
        }
    }
}

/// A started copy.
#[derive(Debug)]
struct UnderWay {
    copy: PendingCopy,
    memory: Arc<GpuMemory>,
    answer: Arc<CopyReply>,
    is_fetch: bool,
}

struct Worker {
    engines: Arc<Engines>,
    queue: Arc<JobQueue>,
    /// Wakes the engine thread, which may sleep until a copy is over.
    waker: Arc<Waker>,
    /// Fetches, placements and reads for atomics. Each kind ends in the order in which it was
    /// started.
    under_way: [VecDeque<UnderWay>; 3],
    /// Copies in an unknown state: the GPU keeps their chunks until they are known to be over.
    lost: Vec<PendingCopy>,
    spins: bool,
}

impl Worker {
    fn run(mut self) {
        ask_for_short_slices();
        self.queue.inside.of(|| self.engines.place.gpu().driver().keep_relaxed());
        let mut moved = now_ns();
        loop {
            let begun = self.begin();
            if begun | self.end() {
                moved = now_ns();
            } else if self.under_way.iter().any(|copies| !copies.is_empty()) {
                self.wait_for_copy(moved);
            } else if self.spins && now_ns().saturating_sub(moved) < SPIN_NS {
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
            } else if !self.sleep() {
                break;
            }
        }
        drop(self);
        // If the context was destroyed, the copy engines' resources are unusable.
        CopyEngine::expire_idle();
    }

    /// Starts queued jobs; returns whether there were any.
    fn begin(&mut self) -> bool {
        if self.queue.posted.load(Ordering::Acquire) == 0 {
            return false;
        }
        let jobs = {
            let mut waiting = lock(&self.queue.waiting);
            self.queue.posted.store(0, Ordering::Relaxed);
            std::mem::take(&mut waiting.jobs)
        };
        for (Job { work, memory, chunk }, answer) in jobs {
            let Engines { fetch, place } = &*self.engines;
            let (lane, started) = self.queue.inside.of(|| match work {
                CopyWork::Fetch { rows, offset, len } => {
                    (0, fetch.start_read_rows(&memory, offset, len, rows, chunk))
                }
                CopyWork::Gather(rows, parts) => (0, fetch.start_gather(&memory, &parts, rows, chunk)),
                CopyWork::Place { offset, len } => (1, place.start_write(&memory, offset, chunk, len)),
                CopyWork::Look { offset, len } => (2, place.start_read(&memory, offset, len, chunk)),
            });
            let is_fetch = lane == 0;
            match started {
                Ok(copy) => self.under_way[lane].push_back(UnderWay { copy, memory, answer, is_fetch }),
                Err(error) => self.give(&answer, &memory, is_fetch, Err(error)),
            }
        }
        true
    }

    /// Completes finished copies; returns whether there were any.
    fn end(&mut self) -> bool {
        let mut any = false;
        for lane in 0..self.under_way.len() {
            while let Some(first) = self.under_way[lane].front() {
                let over = match self.queue.inside.of(|| self.engine(lane).poll(&first.copy)) {
                    Ok(false) => break,
                    Ok(true) => Ok(()),
                    Err(error) => Err(error),
                };
                let Some(UnderWay { copy, memory, answer, is_fetch }) = self.under_way[lane].pop_front()
                else {
                    break;
                };
                any = true;
                let copied = match (over, copy.into_chunk()) {
                    (Ok(()), Ok(chunk)) => Ok(chunk),
                    (Ok(()), Err(copy)) => {
                        self.lost.push(copy);
                        Err(CopyError::ChunkInUse { state: "takes part in another copy" })
                    }
                    (Err(error), Ok(_)) => Err(error),
                    (Err(error), Err(copy)) => {
                        self.lost.push(copy);
                        Err(error)
                    }
                };
                self.give(&answer, &memory, is_fetch, copied);
            }
        }
        any
    }

    fn engine(&self, lane: usize) -> &CopyEngine {
        if lane == 0 { &self.engines.fetch } else { &self.engines.place }
    }

    fn give(
        &self,
        answer: &CopyReply,
        memory: &Arc<GpuMemory>,
        is_fetch: bool,
        chunk: Result<PinnedChunk, CopyError>,
    ) {
        answer.give(chunk);
        let memories = &mut lock(&self.queue.waiting).memories;
        if let Some(at) = memories.iter().position(|one| *one == name(memory)) {
            memories.swap_remove(at);
        }
        if is_fetch {
            self.queue.fetches.fetch_sub(1, Ordering::Release);
        }
        self.waker.wake_if_asleep();
    }

    fn wait_for_copy(&self, since: u64) {
        if now_ns().saturating_sub(since) > BUSY_NS {
            std::thread::sleep(NAP);
        } else if self.spins {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// Waits for jobs; false when there will be none.
    fn sleep(&mut self) -> bool {
        // Chunks of copies whose query failed are reused only once the copies are known to be over.
        // This thread finds out, so that taking a chunk needs no query.
        let place = &self.engines.place;
        self.queue.inside.of(|| self.lost.retain(|copy| !matches!(place.poll(copy), Ok(true))));
        let mut waiting = lock(&self.queue.waiting);
        waiting.sleeps = true;
        while waiting.jobs.is_empty() && !waiting.closed {
            waiting = self.queue.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        waiting.sleeps = false;
        !waiting.jobs.is_empty() || !waiting.closed
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Identifies a memory for as long as a reference to it is held, as jobs do.
fn name(memory: &Arc<GpuMemory>) -> usize {
    Arc::as_ptr(memory).addr()
}
