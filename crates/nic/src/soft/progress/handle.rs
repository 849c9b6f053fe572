//! One engine with its lock and its thread. A device has one or more.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_protocol::timing::Nanos;
use parking_lot::MutexGuard;

use crate::links::now_ns;
use crate::soft::engine::submission::Submission;
use crate::soft::engine::{Answers, Engine};
use crate::soft::error::CreateQpError;
use crate::soft::progress::attention::Callers;
use crate::soft::progress::lock::{EngineLock, release};
use crate::soft::progress::mode::Mode;
use crate::soft::progress::thread::EngineThread;
use crate::soft::progress::wait::Arrivals;
use crate::sync::waker::Waker;

/// One engine with its lock and its thread.
#[derive(Debug)]
pub(crate) struct EngineHandle {
    /// Its index among the engines of the device.
    pub(crate) number: usize,
    mode: Mode,
    engine: Arc<EngineLock>,
    thread: Mutex<Option<EngineThread>>,
    pub(crate) waker: Arc<Waker>,
    pub(crate) callers: Arc<Callers>,
    /// Queue pairs and shared receive queues of this engine.
    load: AtomicUsize,
    /// Those of them that were the first to use a completion queue.
    first_users: AtomicUsize,
    pub(crate) link: Arrivals,
}

impl EngineHandle {
    pub(crate) fn new(number: usize, mode: Mode, engine: Engine) -> Self {
        Self {
            number,
            mode,
            thread: Mutex::new(None),
            waker: engine.waker.clone(),
            callers: Arc::default(),
            load: AtomicUsize::new(0),
            first_users: AtomicUsize::new(0),
            link: Arrivals::of(&*engine.link),
            engine: Arc::new(EngineLock::new(engine)),
        }
    }

    pub(crate) fn engine(&self) -> &EngineLock {
        &self.engine
    }

    /// The descriptors of its link.
    pub(crate) fn link_fds(&self) -> &[RawFd] {
        self.link.packets()
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.engine.is_forked()
    }

    #[inline]
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, Engine>> {
        self.engine.lock()
    }

    /// Whether posts go into the submission queue.
    #[inline]
    pub(crate) fn has_submissions(&self) -> bool {
        self.mode == Mode::Thread && !self.is_forked()
    }

    /// Makes the engine reachable, and starts its thread. From then on peers may depend on that
    /// thread.
    pub(crate) fn listen(&self) -> Result<(), CreateQpError> {
        if self.is_forked() {
            return Err(CreateQpError::Forked); // the lock may be held by a missing thread
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_some() {
            return Ok(());
        }
        self.lock().ok_or(CreateQpError::Forked)?.listen()?;
        let Self { number, mode, engine, link, waker, callers, .. } = self;
        *thread = Some(EngineThread::start(*number, *mode, engine, link.clone(), waker, callers)?);
        Ok(())
    }

    /// Puts a request into the submission queue.
    ///
    /// # Errors
    /// The queue is full: the request comes back.
    #[inline]
    #[allow(clippy::result_large_err)] // it is then posted under the lock
    pub(crate) fn submit(&self, submission: Submission) -> Result<(), Submission> {
        self.engine.submissions.push(submission)
    }

    /// A request was posted under the lock: sends what may leave at once, or leaves that to the
    /// engine thread.
    #[inline]
    pub(crate) fn start(&self, mut engine: MutexGuard<'_, Engine>, now: Nanos) {
        if self.mode == Mode::Thread {
            release(engine);
            return self.waker.wake_if_asleep();
        }
        engine.transmit(now, Answers::Travelling);
        self.let_go(engine);
    }

    /// Releases the engine; its thread wakes in time for the next deadline.
    pub(crate) fn let_go(&self, engine: MutexGuard<'_, Engine>) {
        // A thread that falls asleep after this reads the deadline itself.
        let deadline = if self.waker.is_asleep() { engine.unattended_deadline() } else { None };
        release(engine);
        self.waker.wake_by(deadline);
    }

    /// `caller` mode: drives the engine for a polling caller. Returns until when the caller should
    /// sleep, if it has waited long enough.
    #[inline]
    pub(crate) fn drive_polled(&self, is_attention: bool) -> Option<Nanos> {
        if is_attention {
            self.callers.count_poll();
        }
        let mut engine = self.engine.try_lock()?;
        engine.progress();
        let until = engine.sleep_of_caller(now_ns());
        self.let_go(engine);
        until
    }

    /// `caller` mode: the same for a caller that has just slept.
    pub(crate) fn drive_woken(&self) {
        if let Some(mut engine) = self.engine.try_lock() {
            engine.note_slept(now_ns());
            engine.progress();
            self.let_go(engine);
        }
    }

    /// `caller` mode: sends all delayed ACKs, for a caller that sleeps until a packet arrives.
    /// Returns whether it may: nothing else makes it drive the engine.
    pub(crate) fn settle_to_sleep(&self) -> bool {
        let Some(mut engine) = self.engine.try_lock() else { return false };
        let mut may_sleep = !engine.awaits_copies();
        if may_sleep {
            engine.send_answers();
            may_sleep = engine.deadline() != Some(0);
        }
        self.let_go(engine);
        may_sleep
    }

    /// Number of queue pairs and shared receive queues of this engine.
    pub(crate) fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// How many of them were the first to use a completion queue.
    pub(crate) fn first_users(&self) -> usize {
        self.first_users.load(Ordering::Relaxed)
    }

    /// Counts one more, until the result is dropped; `begins`: it is the first to use a completion
    /// queue.
    pub(crate) fn settle_in(self: &Arc<Self>, begins: bool) -> Resident {
        self.load.fetch_add(1, Ordering::Relaxed);
        self.first_users.fetch_add(usize::from(begins), Ordering::Relaxed);
        Resident { handle: self.clone(), begins }
    }

    /// The device closes: stops the thread, and sends delayed packets, ACKs above all.
    pub(crate) fn close(&self) -> Option<MutexGuard<'_, Engine>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut engine = self.lock()?;
        engine.hang_up();
        engine.drain();
        Some(engine)
    }

    /// From now on only the test drives the engine.
    #[cfg(test)]
    pub(crate) fn stop_thread(&self) {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// A queue pair's or shared receive queue's membership in an engine.
#[derive(Debug)]
pub(crate) struct Resident {
    handle: Arc<EngineHandle>,
    begins: bool,
}

impl std::ops::Deref for Resident {
    type Target = Arc<EngineHandle>;

    fn deref(&self) -> &Arc<EngineHandle> {
        &self.handle
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.handle.load.fetch_sub(1, Ordering::Relaxed);
        self.handle.first_users.fetch_sub(usize::from(self.begins), Ordering::Relaxed);
    }
}
