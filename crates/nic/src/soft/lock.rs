//! The lock around one engine.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::door::Door;
use super::engine::Engine;
use super::fork;
use super::helper::{CPUS_TO_SPIN, allowed_cpus};

/// How often the one who drives on and on looks whether those who want the lock have had it: for some ten microseconds, in which a
/// sleeping thread is awake.
const COURTESY: u32 = 300;

/// How often one who wants the lock looks whether it is free before it sleeps, where there are CPUs to spare: some ten microseconds, longer
/// than a round of the engine takes. Being woken costs more than that, and the one who has to wake it as much again.
const TRIES: u32 = 300;

/// The engine behind its lock. The helper thread knows this much of the device and keeps none of it alive, so that
/// the device is closed when its last object is dropped, and not a little later.
#[derive(Debug)]
pub(crate) struct EngineLock {
    engine: Mutex<Engine>,
    generation: u64,
    /// Threads that found it taken and wait for it.
    wanted: Arc<AtomicUsize>,
    tries: u32,
    /// What is posted while somebody else has it.
    pub(crate) door: Arc<Door>,
}

impl EngineLock {
    pub(crate) fn new(engine: Engine) -> Self {
        let tries = if allowed_cpus() >= CPUS_TO_SPIN { TRIES } else { 0 };
        Self {
            wanted: engine.wanted.clone(),
            door: engine.core.door.clone(),
            engine: Mutex::new(engine),
            generation: fork::generation(),
            tries,
        }
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

    /// The engine; `None` in a forked child, where the lock may be held by a thread that does not exist.
    #[inline]
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, Engine>> {
        if self.is_forked() {
            return None;
        }
        Some(self.look().unwrap_or_else(|| self.wait()))
    }

    /// The engine, unless somebody else is driving it right now (or the process forked).
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Engine>> {
        if self.is_forked() { None } else { self.look() }
    }

    #[inline]
    fn look(&self) -> Option<MutexGuard<'_, Engine>> {
        match self.engine.try_lock() {
            Ok(engine) => Some(self.enter(engine)),
            Err(TryLockError::Poisoned(poisoned)) => Some(self.enter(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The same for a thread that ends the process, and may be the one that was leaving something: waits for nobody.
    pub(crate) fn try_lock_at_exit(&self) -> Option<MutexGuard<'_, Engine>> {
        let mut engine = match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        self.door.open_if_free(&mut engine.core);
        Some(engine)
    }

    /// Whoever has the lock lets in what was left at the door.
    #[inline]
    fn enter<'a>(&self, mut engine: MutexGuard<'a, Engine>) -> MutexGuard<'a, Engine> {
        if self.door.is_used() {
            self.door.open(&mut engine.core);
        }
        engine
    }

    /// Waits for it, and lets that be known.
    #[cold]
    fn wait(&self) -> MutexGuard<'_, Engine> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let soon = (0..self.tries).find_map(|_| {
            std::hint::spin_loop();
            self.look()
        });
        let engine =
            soon.unwrap_or_else(|| self.enter(self.engine.lock().unwrap_or_else(PoisonError::into_inner)));
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        engine
    }

    /// Called by who is going to take it again at once: lets others have it first, who could not be awake by then.
    #[inline]
    pub(crate) fn make_way(&self) {
        for _ in 0..COURTESY {
            if self.wanted.load(Ordering::Relaxed) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
    }
}
