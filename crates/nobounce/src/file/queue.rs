//! File jobs in the background.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::FileOptions;
use super::error::FileError;
use super::open::File;
use super::report::FileReport;
use crate::region::Region;

/// Threads that read and write files in the background. Dropping it ends them after their present
/// job; jobs that have not begun end with [`FileError::Closed`].
#[derive(Debug)]
pub struct FileQueue {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// A job of a [`FileQueue`]. Dropping it does not cancel the job.
#[derive(Debug)]
pub struct FileJob(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// There is one, until it is taken.
    result: Mutex<Option<Option<Result<FileReport, FileError>>>>,
    ended: Condvar,
}

#[derive(Debug)]
struct Job {
    region: Arc<Region>,
    file: Arc<File>,
    offset: u64,
    range: Range<usize>,
    options: FileOptions,
    is_read: bool,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct Shared {
    jobs: Mutex<Jobs>,
    added: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    is_closed: bool,
}

impl FileQueue {
    /// A queue with so many threads, at least one. They sleep while there is nothing to do.
    ///
    /// # Errors
    /// There can be no more threads.
    pub fn new(threads: usize) -> io::Result<Self> {
        let mut queue = Self { shared: Arc::default(), threads: Vec::new() };
        for _ in 0..threads.max(1) {
            let shared = queue.shared.clone();
            let thread = thread::Builder::new().name("nb-files".to_owned()).spawn(move || shared.work())?;
            queue.threads.push(thread);
        }
        Ok(queue)
    }

    /// Begins [`Region::read_file_with`].
    pub fn read(
        &self,
        region: &Arc<Region>,
        file: &Arc<File>,
        offset: u64,
        range: Range<usize>,
        options: FileOptions,
    ) -> FileJob {
        self.add(true, region, file, offset, range, options)
    }

    /// Begins [`Region::write_file_with`].
    pub fn write(
        &self,
        region: &Arc<Region>,
        file: &Arc<File>,
        offset: u64,
        range: Range<usize>,
        options: FileOptions,
    ) -> FileJob {
        self.add(false, region, file, offset, range, options)
    }

    fn add(
        &self,
        is_read: bool,
        region: &Arc<Region>,
        file: &Arc<File>,
        offset: u64,
        range: Range<usize>,
        options: FileOptions,
    ) -> FileJob {
        let state = Arc::<State>::default();
        let (region, file) = (region.clone(), file.clone());
        let job = Job { region, file, offset, range, options, is_read, state: state.clone() };
        self.shared.lock().waiting.push_back(job);
        self.shared.added.notify_one();
        FileJob(state)
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        let mut jobs = self.shared.lock();
        jobs.is_closed = true;
        let left = std::mem::take(&mut jobs.waiting);
        drop(jobs);
        self.shared.added.notify_all();
        left.into_iter().for_each(|job| job.state.end(Err(FileError::Closed)));
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let idle = |jobs: &mut Jobs| jobs.waiting.is_empty() && !jobs.is_closed;
            let waited = self.added.wait_while(self.lock(), idle);
            let Some(job) = waited.unwrap_or_else(PoisonError::into_inner).waiting.pop_front() else {
                return;
            };
            let Job { region, file, offset, range, options, is_read, state } = job;
            let state = Ending(state);
            let result = if is_read {
                region.read_file_with(&file, offset, range, options)
            } else {
                region.write_file_with(&file, offset, range, options)
            };
            // The memory is released before the application hears of the end.
            drop((region, file));
            state.0.end(result);
        }
    }
}

/// Ends a job whose thread panics.
struct Ending(Arc<State>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end(Err(FileError::Closed));
    }
}

impl State {
    /// The first result counts.
    fn end(&self, result: Result<FileReport, FileError>) {
        let mut ended = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.is_none() {
            *ended = Some(Some(result));
        }
        drop(ended);
        self.ended.notify_all();
    }
}

impl FileJob {
    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.0.result.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Waits for its result, and takes it: a second call is an error.
    ///
    /// # Errors
    /// The job failed, or has not ended in time.
    pub fn wait(&self, timeout: Duration) -> Result<FileReport, FileError> {
        let result = self.0.result.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.ended.wait_timeout_while(result, timeout, |result| result.is_none());
        match &mut *waited.unwrap_or_else(PoisonError::into_inner).0 {
            None => Err(FileError::Timeout(timeout)),
            Some(result) => result.take().unwrap_or(Err(FileError::Taken)),
        }
    }
}
