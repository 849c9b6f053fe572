//! One engine with what drives it: its lock, its helper thread, its bell. A device has one unit, or several.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::bell::Bell;
use super::engine::{Answers, Engine};
use super::helper::Helper;
use super::lock::EngineLock;
use super::qp::CreateQpError;
use crate::links::now_ns;

/// One engine with what drives it.
#[derive(Debug)]
pub(crate) struct Unit {
    /// Its place among the units of the device.
    pub(crate) number: usize,
    engine: Arc<EngineLock>,
    helper: Mutex<Helper>,
    polls: Arc<AtomicU64>,
    moved: Arc<AtomicU64>,
    pub(crate) bell: Bell,
    on_duty: Arc<AtomicBool>,
    /// A test says that it is.
    #[cfg(test)]
    pub(super) seems_on_duty: AtomicBool,
    several: Arc<AtomicBool>,
    /// Queue pairs and shared receive queues that live here.
    load: AtomicUsize,
    /// Those of them that were the first to use a completion queue.
    conversations: AtomicUsize,
    /// The descriptors by which others reach it.
    pub(crate) link: Vec<RawFd>,
}

impl Unit {
    pub(crate) fn new(number: usize, engine: Engine, several: Arc<AtomicBool>) -> io::Result<Self> {
        let helper = Helper::new(number)?;
        Ok(Self {
            number,
            polls: helper.polls.clone(),
            moved: helper.moved.clone(),
            bell: helper.bell.clone(),
            on_duty: helper.on_duty.clone(),
            #[cfg(test)]
            seems_on_duty: AtomicBool::new(false),
            several,
            helper: Mutex::new(helper),
            load: AtomicUsize::new(0),
            conversations: AtomicUsize::new(0),
            link: engine.link.wake_fds(),
            engine: Arc::new(EngineLock::new(engine)),
        })
    }

    pub(crate) fn engine(&self) -> &EngineLock {
        &self.engine
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.engine.is_forked()
    }

    #[inline]
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, Engine>> {
        self.engine.lock()
    }

    /// Lets it be reached, and has a thread look after it. From then on others may depend on that thread.
    pub(crate) fn listen(&self) -> Result<(), CreateQpError> {
        if self.is_forked() {
            return Err(CreateQpError::Forked); // where the lock below may be held by a thread that does not exist
        }
        let mut helper = self.helper.lock().unwrap_or_else(PoisonError::into_inner);
        if helper.is_running() {
            return Ok(());
        }
        let mut engine = self.lock().ok_or(CreateQpError::Forked)?;
        engine.listen()?;
        Ok(helper.start(&self.engine, &*engine.link, &self.several)?)
    }

    /// Drives the engine for a caller that polls.
    #[inline]
    pub(crate) fn drive_polled(&self) {
        // A count that two threads raise at once may miss one: it only tells whether anybody polls.
        self.polls.store(self.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        if let Some(mut engine) = self.engine.try_lock() {
            let before = engine.moved();
            engine.progress();
            let moved = engine.moved().wrapping_sub(before);
            if moved > 0 {
                self.moved.store(self.moved.load(Ordering::Relaxed).wrapping_add(moved), Ordering::Relaxed);
            }
            // It may have been the last poll before the caller sleeps.
            self.bell.ring_if_sleepy(|| engine.unattended_deadline());
        }
    }

    /// Whether its thread is driving it without pause: there is no need to help.
    #[inline]
    pub(crate) fn is_on_duty(&self) -> bool {
        #[cfg(test)]
        if self.seems_on_duty.load(Ordering::SeqCst) {
            return true;
        }
        self.on_duty.load(Ordering::SeqCst)
    }

    /// The engine, unless somebody has it.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Engine>> {
        self.engine.try_lock()
    }

    /// Whether its own thread is driving it, and others leave it to that.
    #[inline]
    pub(crate) fn has_thread_on_duty(&self) -> bool {
        self.several.load(Ordering::SeqCst) && self.is_on_duty() && !self.is_forked()
    }

    /// Something was left at the door of an engine whose thread was on duty. Whoever goes off duty looks once more afterwards; we look once more whether it is.
    pub(crate) fn see_to_the_door(&self) {
        if !self.is_on_duty()
            && let Some(engine) = self.lock()
        {
            self.start(engine, now_ns(), false);
        }
    }

    /// Something was posted: sends what may leave at once. Where the unit's own thread is on duty, `shared` work is left to it.
    #[inline]
    pub(crate) fn start<'a>(&'a self, mut engine: MutexGuard<'a, Engine>, now: u64, shared: bool) {
        if shared && self.is_on_duty() {
            drop(engine);
            // Whoever goes off duty looks once more afterwards; we look once more whether it is.
            if self.is_on_duty() {
                return;
            }
            let Some(again) = self.lock() else { return };
            engine = again;
        }
        engine.transmit(now, Answers::Travelling);
        let deadline = engine.unattended_deadline();
        drop(engine);
        // The caller may never come back to drive what it began.
        self.bell.ring(deadline);
    }

    /// How many queue pairs and shared receive queues live here.
    pub(crate) fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// How many of them were the first to use a completion queue.
    pub(crate) fn conversations(&self) -> usize {
        self.conversations.load(Ordering::Relaxed)
    }

    /// One more lives here, until the result is dropped; `begins` a conversation, if it is the first to use a completion queue.
    pub(crate) fn settle_in(self: &Arc<Self>, begins: bool) -> Resident {
        self.load.fetch_add(1, Ordering::Relaxed);
        self.conversations.fetch_add(usize::from(begins), Ordering::Relaxed);
        Resident { unit: self.clone(), begins }
    }

    /// The device goes: stops the thread, and says what was put off, acknowledgements above all. The engine, for its last words.
    pub(crate) fn close(&self) -> Option<MutexGuard<'_, Engine>> {
        let mut helper = self.helper.lock().unwrap_or_else(PoisonError::into_inner);
        helper.stop();
        let mut engine = self.lock()?;
        engine.hang_up();
        engine.drain();
        Some(engine)
    }
}

/// A queue pair's or shared receive queue's place in a unit.
#[derive(Debug)]
pub(crate) struct Resident {
    unit: Arc<Unit>,
    begins: bool,
}

impl std::ops::Deref for Resident {
    type Target = Arc<Unit>;

    fn deref(&self) -> &Arc<Unit> {
        &self.unit
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.unit.load.fetch_sub(1, Ordering::Relaxed);
        self.unit.conversations.fetch_sub(usize::from(self.begins), Ordering::Relaxed);
    }
}
