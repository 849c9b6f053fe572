//! The thread that makes CUDA's calls for copies: one for each context whose memory is registered.
//!
//! CUDA's driver has locks. A thread of the application that loads a kernel for the first time, frees memory or copies synchronously may
//! keep one until the kernels that run are over; and these may wait for bytes that we are to send or place. So whoever drives the device
//! makes no such call: it asks this thread. Where no answer comes in time, bytes to send are loaded through the window instead
//! (`build.rs`); what is to be placed waits, and nothing else does (`stage.rs`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nobounce_memory::gpu::copy_engine::{Copy, CopyEngine, CopyError, PinnedChunk, Rows};
use nobounce_memory::gpu::{Gpu, GpuMemory};
use nobounce_memory::signals::BlockedSignals;

use crate::links::now_ns;
use crate::process::cpu::{ask_for_short_slices, has_many_cpus};
use crate::process::fork;
use crate::soft::error::RegisterError;
use crate::soft::gpu::copiers::ContextKey;
use crate::soft::gpu::standstill::{Inside, Standstill};
use crate::sync::waker::Waker;

/// Bytes of payload that a chunk takes.
pub(crate) const CHUNK: usize = 512 << 10;
/// Bytes of a chunk to fetch into: room for headers between the smallest packets.
const FETCH_CHUNK: usize = CHUNK + CHUNK / 16;
/// Chunks to fetch into and to place from, for each context. They are apart: a queue pair that cannot send what it fetched
/// must not keep others from receiving.
const FETCH_CHUNKS: usize = 32;
const PLACE_CHUNKS: usize = 16;

/// How long the thread spins for more work before it sleeps: being woken costs as much as a short copy.
const SPIN_NS: u64 = 50_000;
/// Pauses of the processor between two looks meanwhile: whoever shares its core has that much more of it.
const PAUSES: u32 = 8;
/// How long it spins while a copy is under way, and how often it looks otherwise.
const BUSY_NS: u64 = 200_000;
const NAP: Duration = Duration::from_micros(10);

/// How long deregistration waits for copies from and to the memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a copy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Bytes to be sent, into such rows of a chunk to fetch into.
    Fetch(Rows),
    /// Bytes that arrived, from the start of a chunk to place from.
    Place,
    /// Bytes that are to be changed, to the start of a chunk to place from.
    Look,
}

/// A copy to be made.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) work: Work,
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) offset: usize,
    pub(crate) len: usize,
    pub(crate) chunk: PinnedChunk,
}

/// A copy that was asked for. Dropping it does not stop it.
#[derive(Debug)]
pub(crate) struct Copying(Arc<Answer>);

impl Copying {
    /// The chunk, once the copy is over. To be taken once.
    pub(crate) fn take(&self) -> Option<Result<PinnedChunk, CopyError>> {
        if !self.0.is_there.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.0.chunk).take()
    }
}

#[derive(Debug, Default)]
struct Answer {
    is_there: AtomicBool,
    chunk: Mutex<Option<Result<PinnedChunk, CopyError>>>,
}

impl Answer {
    fn give(&self, chunk: Result<PinnedChunk, CopyError>) {
        *lock(&self.chunk) = Some(chunk);
        self.is_there.store(true, Ordering::Release);
    }
}

/// Copies bytes of one context's memory.
#[derive(Debug)]
pub(crate) struct Copier {
    engines: Arc<Engines>,
    /// A fetch is late: what can be loaded is not fetched before it is over.
    late: AtomicBool,
    /// Goes after the engines, so that the thread is the last to have them.
    desk: OpenDesk,
}

/// One engine for each direction.
#[derive(Debug)]
struct Engines {
    fetch: CopyEngine,
    place: CopyEngine,
}

/// Where jobs are handed over.
#[derive(Debug, Default)]
struct Desk {
    waiting: Mutex<Waiting>,
    more: Condvar,
    /// Jobs that wait: looked at without the lock.
    posted: AtomicUsize,
    /// Fetches that are not over yet.
    fetches: AtomicUsize,
    inside: Inside,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: VecDeque<(Job, Arc<Answer>)>,
    /// The memories of all jobs that are not over: each as often as it has one.
    memories: Vec<usize>,
    sleeps: bool,
    closed: bool,
}

impl Copier {
    /// Makes the engines and starts the thread, for memory of this context. Takes milliseconds: not under the engine's lock.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        context: ContextKey,
        waker: &Arc<Waker>,
    ) -> Result<Arc<Self>, RegisterError> {
        let make = |chunks, len| CopyEngine::in_context(gpu, context.handle(), chunks, len);
        let engines = Engines { fetch: make(FETCH_CHUNKS, FETCH_CHUNK)?, place: make(PLACE_CHUNKS, CHUNK)? };
        let (engines, desk) = (Arc::new(engines), Arc::<Desk>::default());
        let worker = Worker {
            engines: engines.clone(),
            desk: desk.clone(),
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
        let desk = OpenDesk { desk, generation: fork::generation() };
        Ok(Arc::new(Self { engines, late: AtomicBool::new(false), desk }))
    }

    /// A chunk to fetch into, or none at the moment.
    pub(crate) fn take_fetch_chunk(&self) -> Option<PinnedChunk> {
        self.engines.fetch.take_chunk()
    }

    /// A chunk to place from, or none at the moment.
    pub(crate) fn take_place_chunk(&self) -> Option<PinnedChunk> {
        self.engines.place.take_chunk()
    }

    /// Asks for a copy. Those of one kind are made in the order in which they are asked for.
    pub(crate) fn start(&self, job: Job) -> Copying {
        let answer = Arc::<Answer>::default();
        let desk = &self.desk.desk;
        if matches!(job.work, Work::Fetch(_)) {
            desk.fetches.fetch_add(1, Ordering::Relaxed);
        }
        let mut waiting = lock(&desk.waiting);
        waiting.memories.push(name(&job.memory));
        waiting.jobs.push_back((job, answer.clone()));
        desk.posted.store(waiting.jobs.len(), Ordering::Release);
        let sleeps = waiting.sleeps;
        drop(waiting); // or whoever is woken waits for it at once
        if sleeps {
            desk.more.notify_one();
        }
        Copying(answer)
    }

    /// What is being copied from and to this memory.
    pub(crate) fn copies_of(&self, memory: &Arc<GpuMemory>) -> Copies {
        Copies { desk: self.desk.desk.clone(), memory: memory.clone() }
    }

    /// A fetch is late: the GPU does not get to it.
    pub(crate) fn found_late(&self) {
        self.late.store(true, Ordering::Relaxed);
    }

    /// Whether a fetch that was found late is still not over.
    pub(crate) fn is_late(&self) -> bool {
        let mut late = self.late.load(Ordering::Relaxed);
        if late && self.desk.desk.fetches.load(Ordering::Acquire) == 0 {
            late = false;
            self.late.store(false, Ordering::Relaxed);
        }
        late
    }

    /// What a copy that does not end stands behind.
    pub(crate) fn standstill(&self) -> Standstill {
        self.desk.desk.inside.standstill()
    }

    /// Whether its context was destroyed. Asks CUDA: not under the engine's lock.
    pub(crate) fn is_gone(&self) -> bool {
        self.engines.place.is_gone()
    }
}

/// A desk that takes jobs, until it is dropped.
#[derive(Debug)]
struct OpenDesk {
    desk: Arc<Desk>,
    generation: u64,
}

impl Drop for OpenDesk {
    fn drop(&mut self) {
        // In a forked child there is no thread, and the lock may be held by it for ever.
        if fork::current() == self.generation {
            lock(&self.desk.waiting).closed = true;
            self.desk.more.notify_one();
        }
    }
}

/// What is being copied from and to one memory: to be waited for before the memory is freed.
#[derive(Debug)]
pub(crate) struct Copies {
    desk: Arc<Desk>,
    memory: Arc<GpuMemory>,
}

impl Copies {
    /// Waits until there are none, but not for ever. Not to be called by whoever keeps the device from being driven: CUDA may make the
    /// copy wait for kernels, and these for us.
    pub(crate) fn wait(&self) {
        let begin = Instant::now();
        while lock(&self.desk.waiting).memories.contains(&name(&self.memory)) {
            if begin.elapsed() > PATIENCE {
                tracing::warn!(
                    "the GPU still copies out of or into memory that is deregistered: it is stuck"
                );
                return;
            }
            std::thread::sleep(NAP);
        }
    }
}

/// A copy that was started.
#[derive(Debug)]
struct UnderWay {
    copy: Copy,
    memory: Arc<GpuMemory>,
    answer: Arc<Answer>,
    is_fetch: bool,
}

struct Worker {
    engines: Arc<Engines>,
    desk: Arc<Desk>,
    /// Wakes the engine thread, which may sleep until a copy is over.
    waker: Arc<Waker>,
    /// Fetches, placements and looks, each in the order in which they were started, which is the order in which they end.
    under_way: [VecDeque<UnderWay>; 3],
    /// Copies that nobody can tell whether they are over: their chunks are the GPU's until then.
    lost: Vec<Copy>,
    spins: bool,
}

impl Worker {
    fn run(mut self) {
        ask_for_short_slices();
        self.desk.inside.of(|| self.engines.place.gpu().driver().keep_relaxed());
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
        // Where the context was destroyed, what the engines had of it is of no use to anybody.
        CopyEngine::bury_idle();
    }

    /// Starts what waits; whether there was any.
    fn begin(&mut self) -> bool {
        if self.desk.posted.load(Ordering::Acquire) == 0 {
            return false;
        }
        let jobs = {
            let mut waiting = lock(&self.desk.waiting);
            self.desk.posted.store(0, Ordering::Relaxed);
            std::mem::take(&mut waiting.jobs)
        };
        for (Job { work, memory, offset, len, chunk }, answer) in jobs {
            let Engines { fetch, place } = &*self.engines;
            let (lane, started) = self.desk.inside.of(|| match work {
                Work::Fetch(rows) => (0, fetch.start_read_rows(&memory, offset, len, rows, chunk)),
                Work::Place => (1, place.start_write(&memory, offset, chunk, len)),
                Work::Look => (2, place.start_read(&memory, offset, len, chunk)),
            });
            let is_fetch = lane == 0;
            match started {
                Ok(copy) => self.under_way[lane].push_back(UnderWay { copy, memory, answer, is_fetch }),
                Err(error) => self.give(&answer, &memory, is_fetch, Err(error)),
            }
        }
        true
    }

    /// Hands out what is there; whether there was any.
    fn end(&mut self) -> bool {
        let mut any = false;
        for lane in 0..self.under_way.len() {
            while let Some(first) = self.under_way[lane].front() {
                let over = match self.desk.inside.of(|| self.engine(lane).poll(&first.copy)) {
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
        answer: &Answer,
        memory: &Arc<GpuMemory>,
        is_fetch: bool,
        chunk: Result<PinnedChunk, CopyError>,
    ) {
        answer.give(chunk);
        let memories = &mut lock(&self.desk.waiting).memories;
        if let Some(at) = memories.iter().position(|one| *one == name(memory)) {
            memories.swap_remove(at);
        }
        if is_fetch {
            self.desk.fetches.fetch_sub(1, Ordering::Release);
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

    /// Waits for work; false when there will be none.
    fn sleep(&mut self) -> bool {
        // Chunks of copies that could not be asked after are used again only once they are known to be over: it is found out here, so
        // that whoever takes a chunk need not ask.
        let place = &self.engines.place;
        self.desk.inside.of(|| self.lost.retain(|copy| !matches!(place.poll(copy), Ok(true))));
        let mut waiting = lock(&self.desk.waiting);
        waiting.sleeps = true;
        while waiting.jobs.is_empty() && !waiting.closed {
            waiting = self.desk.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        waiting.sleeps = false;
        !waiting.jobs.is_empty() || !waiting.closed
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells memories apart for as long as somebody holds them, as jobs do.
fn name(memory: &Arc<GpuMemory>) -> usize {
    Arc::as_ptr(memory).addr()
}
