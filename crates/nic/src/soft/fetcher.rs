//! The thread that makes CUDA's calls for fetches.
//!
//! CUDA's driver has locks. A thread of the application that loads a kernel for the first time, frees memory or copies synchronously may
//! keep one until the kernels that run are over; and these may wait for bytes that we are to send. So whoever drives the device makes no
//! such call: it asks this thread, and where no answer comes in time, it loads the bytes through the window instead (`build.rs`).

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{Copy, CopyEngine, CopyError, PinnedChunk, Rows};

use super::fork;
use super::helper::{CPUS_TO_SPIN, allowed_cpus};
use super::signals::BlockedSignals;
use super::slices::ask_for_short_slices;

/// How long the thread looks for more work before it sleeps, where there are CPUs to spare: being woken costs as much as a short copy.
const SPIN: Duration = Duration::from_millis(1);
/// How long it spins while a copy is under way, and how often it looks otherwise.
const BUSY: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(10);

/// How long deregistration waits for fetches from the memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes to fetch.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) offset: usize,
    pub(crate) len: usize,
    pub(crate) rows: Rows,
    pub(crate) chunk: PinnedChunk,
}

/// A fetch that was asked for. Dropping it does not stop it.
#[derive(Debug)]
pub(crate) struct Fetching(Arc<Answer>);

impl Fetching {
    /// The chunk with the bytes, once they are there. To be taken once.
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

/// Fetches bytes of one context's memory.
#[derive(Debug)]
pub(crate) struct Fetcher {
    engine: Arc<CopyEngine>,
    desk: Arc<Desk>,
    generation: u64,
}

/// Where jobs are handed over.
#[derive(Debug, Default)]
struct Desk {
    waiting: Mutex<Waiting>,
    more: Condvar,
    /// Jobs that are not over yet.
    outstanding: AtomicUsize,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: VecDeque<(Job, Arc<Answer>)>,
    /// The memories of all jobs that are not over: each as often as it has one.
    memories: Vec<usize>,
    sleeps: bool,
    closed: bool,
}

impl Fetcher {
    /// Starts the thread.
    pub(crate) fn new(engine: CopyEngine) -> io::Result<Self> {
        let (engine, desk) = (Arc::new(engine), Arc::<Desk>::default());
        let worker = Worker {
            engine: engine.clone(),
            desk: desk.clone(),
            under_way: VecDeque::new(),
            spins: allowed_cpus() >= CPUS_TO_SPIN,
        };
        let _blocked = BlockedSignals::new();
        std::thread::Builder::new().name("nobounce-fetch".into()).spawn(move || worker.run())?;
        Ok(Self { engine, desk, generation: fork::generation() })
    }

    /// A chunk to fetch into, or none at the moment.
    pub(crate) fn take_chunk(&self) -> Option<PinnedChunk> {
        self.engine.take_chunk()
    }

    /// Asks for bytes.
    pub(crate) fn start(&self, job: Job) -> Fetching {
        let answer = Arc::<Answer>::default();
        self.desk.outstanding.fetch_add(1, Ordering::Relaxed);
        let mut waiting = lock(&self.desk.waiting);
        waiting.memories.push(name(&job.memory));
        waiting.jobs.push_back((job, answer.clone()));
        if waiting.sleeps {
            self.desk.more.notify_one();
        }
        Fetching(answer)
    }

    /// What is being fetched from this memory.
    pub(crate) fn fetches_of(&self, memory: &Arc<GpuMemory>) -> Fetches {
        Fetches { desk: self.desk.clone(), memory: memory.clone() }
    }

    /// Whether nothing is fetched, for whomever.
    pub(crate) fn is_idle(&self) -> bool {
        self.desk.outstanding.load(Ordering::Acquire) == 0
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        // In a forked child there is no thread, and the lock may be held by it for ever.
        if fork::current() == self.generation {
            lock(&self.desk.waiting).closed = true;
            self.desk.more.notify_one();
        }
    }
}

/// What is being fetched from one memory: to be waited for before the memory is freed.
#[derive(Debug)]
pub(crate) struct Fetches {
    desk: Arc<Desk>,
    memory: Arc<GpuMemory>,
}

impl Fetches {
    /// Waits until there are none, but not for ever. Not to be called by whoever keeps the device from being driven: CUDA may make the
    /// fetch wait for kernels, and these for us.
    pub(crate) fn wait(&self) {
        let begin = Instant::now();
        while lock(&self.desk.waiting).memories.contains(&name(&self.memory)) {
            if begin.elapsed() > PATIENCE {
                tracing::warn!("the GPU still copies out of memory that is deregistered: it is stuck");
                return;
            }
            std::thread::sleep(NAP);
        }
    }
}

struct Worker {
    engine: Arc<CopyEngine>,
    desk: Arc<Desk>,
    /// In the order in which they were started, which is the order in which they end.
    under_way: VecDeque<(Copy, Arc<GpuMemory>, Arc<Answer>)>,
    spins: bool,
}

impl Worker {
    fn run(mut self) {
        ask_for_short_slices();
        let mut moved = Instant::now();
        loop {
            let begun = self.begin();
            if begun | self.end() {
                moved = Instant::now();
            } else if !self.under_way.is_empty() {
                self.wait_for_copy(moved);
            } else if self.spins && moved.elapsed() < SPIN {
                std::hint::spin_loop();
            } else if !self.sleep() {
                return;
            }
        }
    }

    /// Starts what waits; whether there was any.
    fn begin(&mut self) -> bool {
        let jobs = std::mem::take(&mut lock(&self.desk.waiting).jobs);
        let any = !jobs.is_empty();
        for (Job { memory, offset, len, rows, chunk }, answer) in jobs {
            match self.engine.start_read_rows(&memory, offset, len, rows, chunk) {
                Ok(copy) => self.under_way.push_back((copy, memory, answer)),
                Err(error) => self.give(&answer, &memory, Err(error)),
            }
        }
        any
    }

    /// Hands out what is there; whether there was any.
    fn end(&mut self) -> bool {
        let mut any = false;
        while let Some((copy, memory, answer)) = self.under_way.pop_front() {
            let over = self.engine.poll(&copy);
            if matches!(over, Ok(false)) {
                self.under_way.push_front((copy, memory, answer));
                break;
            }
            any = true;
            match (over, copy.into_chunk()) {
                (Ok(_), Ok(chunk)) => self.give(&answer, &memory, Ok(chunk)),
                (Ok(_), Err(copy)) => self.under_way.push_back((copy, memory, answer)),
                (Err(error), _) => self.give(&answer, &memory, Err(error)),
            }
        }
        any
    }

    fn give(&self, answer: &Answer, memory: &Arc<GpuMemory>, chunk: Result<PinnedChunk, CopyError>) {
        answer.give(chunk);
        let memories = &mut lock(&self.desk.waiting).memories;
        if let Some(at) = memories.iter().position(|one| *one == name(memory)) {
            memories.swap_remove(at);
        }
        self.desk.outstanding.fetch_sub(1, Ordering::Release);
    }

    fn wait_for_copy(&self, since: Instant) {
        if since.elapsed() > BUSY {
            std::thread::sleep(NAP);
        } else if self.spins {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// Waits for work; false when there will be none.
    fn sleep(&self) -> bool {
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
