//! The lock around one engine.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::links::now_ns;
use crate::process::fork;
use crate::soft::engine::Engine;
use crate::soft::engine::submission::Submissions;

/// The engine behind its lock.
#[derive(Debug)]
pub(crate) struct EngineLock {
    engine: Mutex<Engine>,
    generation: u64,
    pub(crate) submissions: Arc<Submissions>,
}

impl EngineLock {
    pub(crate) fn new(engine: Engine) -> Self {
        let submissions = engine.core.submissions.clone();
        Self { submissions, engine: Mutex::new(engine), generation: fork::generation() }
    }

    /// Whether this process is a forked child, where no lock may be taken.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        fork::current() != self.generation
    }

    /// The number of forks before this process.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Locks the engine and admits all earlier submissions. `None` in a forked child, where the
    /// lock may be held by a thread that does not exist.
    #[inline]
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, Engine>> {
        if self.is_forked() {
            return None;
        }
        let mut engine = self.engine.lock();
        engine.core.take_all_submissions(now_ns);
        Some(engine)
    }

    /// Locks the engine for the thread that drives it, which takes submissions itself.
    #[inline]
    pub(crate) fn lock_to_drive(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock()
    }

    /// Locks the engine, unless another thread holds it (or the process forked).
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Engine>> {
        if self.is_forked() { None } else { self.engine.try_lock() }
    }
}

/// Releases the engine fairly: a waiting thread gets it, even if this one wants it again at once. A
/// caller that polls without pause and a busy engine thread hold the lock nearly always.
#[inline]
pub(crate) fn release(engine: MutexGuard<'_, Engine>) {
    MutexGuard::unlock_fair(engine);
}
