//! The bell: how those who post, poll and arm wake the helper thread, and how the helper tells them whether it needs waking.
//!
//! Nobody takes a lock for it but the engine's, which they take anyway. Whoever changed the engine's deadline looks afterwards how
//! long the helper sleeps; the helper says how long it sleeps, and looks afterwards at the deadline. So one of the two sees the
//! other: the engine's lock orders them, and the numbers here need no order of their own. `tests/loom.rs` tries them all.

use std::sync::Arc;

use super::eventfd::EventFd;
use super::sync::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// How often a helper looks that does not watch the sockets, or that cannot know how long it may sleep.
pub(crate) const LOOK_EVERY_NS: u64 = 1_000_000;

/// The helper looks now and then.
const AWAY: u8 = 0;
/// The helper waits on the sockets.
const WATCHING: u8 = 1;
/// It does, and somebody asked for it since the helper looked: it must not step back now.
const ASKED: u8 = 2;

/// What others need to know about the helper to wake it when it must not sleep on.
#[derive(Clone, Debug)]
pub(crate) struct Bell {
    pub(super) wake: Arc<EventFd>,
    /// Whether it waits on the sockets, so that nothing needs to wake it.
    watch: Arc<AtomicU8>,
    /// When it wakes by itself, in nanoseconds; 0 while it is awake.
    due: Arc<AtomicU64>,
    /// The application sleeps now and then: its last poll may be followed by none for long.
    sleepy: Arc<AtomicBool>,
}

/// For those who post, poll and arm.
impl Bell {
    pub(crate) fn new(wake: EventFd) -> Self {
        Self {
            wake: Arc::new(wake),
            watch: Arc::new(AtomicU8::new(WATCHING)),
            due: Arc::default(),
            sleepy: Arc::default(),
        }
    }

    /// As [`ring`](Self::ring), by an application that polls: if it is known to sleep now and then.
    #[inline]
    pub(crate) fn ring_if_sleepy(&self, deadline: impl FnOnce() -> Option<u64>) {
        if self.sleepy.load(Ordering::Relaxed) {
            self.ring(deadline());
        }
    }

    /// The engine must be driven at `deadline`, and the caller may not do it: wakes the helper if it would sleep longer, or much
    /// longer where there is time. One that does not watch looks often enough.
    #[inline]
    pub(crate) fn ring(&self, deadline: Option<u64>) {
        if let Some(at) = deadline
            && self.watch.load(Ordering::Relaxed) != AWAY
            && if at == 0 { 0 } else { at.saturating_add(LOOK_EVERY_NS) } < self.due.load(Ordering::Relaxed)
        {
            self.wake.raise();
        }
    }

    /// Wakes the helper, whatever it waits for.
    pub(crate) fn wake(&self) {
        self.wake.raise();
    }

    /// The application is about to sleep: from now on the helper must watch.
    pub(crate) fn ask_to_watch(&self) {
        self.sleepy.store(true, Ordering::Relaxed);
        if self.watch.swap(ASKED, Ordering::Relaxed) == AWAY {
            self.wake.raise();
        }
    }
}

/// For the helper.
impl Bell {
    /// Whether to watch the sockets in the round that begins.
    pub(crate) fn begin_round(&self) -> bool {
        let asked = self.watch.compare_exchange(ASKED, WATCHING, Ordering::Relaxed, Ordering::Relaxed);
        asked.unwrap_or_else(|other| other) != AWAY
    }

    /// The helper, watching, is going to sleep until `deadline`, as far as it knows: until when it may. `engine` tells the
    /// engine's deadline now, or nothing while somebody else drives.
    pub(crate) fn fall_asleep(
        &self,
        deadline: Option<u64>,
        now: u64,
        engine: impl FnOnce() -> Option<Option<u64>>,
    ) -> Option<u64> {
        self.due.store(deadline.unwrap_or(u64::MAX), Ordering::Relaxed);
        // Whoever drove the engine since we last looked did not know yet how long we sleep; whoever does from now on rings. Who is
        // driving right now may have looked already, or not ring at all, and hides what others left: sleep a moment only.
        let known = engine().unwrap_or_else(|| Some(now.saturating_add(LOOK_EVERY_NS)));
        [deadline, known].into_iter().flatten().min()
    }

    /// The helper is awake; whether somebody called.
    pub(crate) fn wake_up(&self) -> bool {
        self.due.store(0, Ordering::Relaxed);
        self.wake.take()
    }

    /// Whether the application sleeps now and then.
    pub(crate) fn is_sleepy(&self) -> bool {
        self.sleepy.load(Ordering::Relaxed)
    }

    /// From the next round on the helper looks now and then, unless somebody asked it to watch since this one began.
    pub(crate) fn step_back(&self) {
        let _ = self.watch.compare_exchange(WATCHING, AWAY, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// From the next round on the helper watches.
    pub(crate) fn step_up(&self) {
        let _ = self.watch.compare_exchange(AWAY, WATCHING, Ordering::Relaxed, Ordering::Relaxed);
    }
}
