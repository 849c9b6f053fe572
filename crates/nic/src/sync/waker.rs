//! Wakes a sleeping engine thread.
//!
//! The thread publishes its sleep deadline, then checks once more for work. Producers publish work,
//! then check whether the thread sleeps. So one of the two sees the other. `tests/loom.rs` tries
//! every order.

use std::os::fd::RawFd;

use crate::process::eventfd::EventFd;
use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// Slack of protocol timers that only the application thread knows of: saves a system call on most
/// posts. Timers are milliseconds and more.
pub(crate) const TIMER_SLACK_NS: u64 = 1_000_000;

/// The engine thread is awake, or wakes by itself before anything is due.
const AWAKE: u64 = 0;
/// It sleeps until it is woken.
const NO_DEADLINE: u64 = u64::MAX;

/// Wakes the engine thread.
#[derive(Debug)]
pub(crate) struct Waker {
    pub(crate) fd: EventFd,
    /// Until when the thread sleeps, in nanoseconds, or [`AWAKE`], or [`NO_DEADLINE`].
    sleeps_until: AtomicU64,
    /// `caller` mode: a completion queue was armed, so that the thread has to watch the link.
    watch: AtomicBool,
    /// `caller` mode: the thread does not watch the link, because the application polls.
    stands_by: AtomicBool,
}

/// For threads that post, poll, arm and copy.
impl Waker {
    pub(crate) fn new(fd: EventFd) -> Self {
        Self {
            fd,
            sleeps_until: AtomicU64::new(AWAKE),
            watch: AtomicBool::new(false),
            stands_by: AtomicBool::new(false),
        }
    }

    /// Something was submitted, or a copy ended: wakes the thread if it sleeps.
    #[inline]
    pub(crate) fn wake_if_asleep(&self) {
        fence(Ordering::SeqCst);
        if self.is_asleep() {
            self.rouse();
        }
    }

    /// The engine must be driven at `deadline` (0: at once): wakes the thread if it would sleep
    /// past that plus the slack. The caller holds or just held the engine lock.
    #[inline]
    pub(crate) fn wake_by(&self, deadline: Option<u64>) {
        let Some(deadline) = deadline else { return };
        let latest = if deadline == 0 { 0 } else { deadline.saturating_add(TIMER_SLACK_NS) };
        if latest < self.sleeps_until.load(Ordering::Relaxed) {
            self.rouse();
        }
    }

    /// Whether the thread sleeps, and a nearer deadline has to wake it.
    #[inline]
    pub(crate) fn is_asleep(&self) -> bool {
        self.sleeps_until.load(Ordering::Relaxed) != AWAKE
    }

    /// Wakes the thread, whatever it waits for.
    pub(crate) fn wake(&self) {
        self.fd.raise();
    }

    /// The application is going to sleep until something completes: the thread must watch the link
    /// from now on.
    pub(crate) fn ask_to_watch(&self) {
        self.watch.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.stands_by.load(Ordering::Relaxed) {
            self.fd.raise();
        }
    }

    #[cold]
    fn rouse(&self) {
        // The first one wakes it; the others see it awake.
        if self.sleeps_until.swap(AWAKE, Ordering::Relaxed) != AWAKE {
            self.fd.raise();
        }
    }
}

/// For the engine thread.
impl Waker {
    /// The descriptor that a wake-up makes readable.
    pub(crate) fn fd(&self) -> RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.fd)
    }

    /// The thread is going to sleep until `deadline`. It must check for work once more afterwards,
    /// and not sleep if there is some.
    pub(crate) fn fall_asleep(&self, deadline: Option<u64>) {
        self.sleeps_until.store(deadline.unwrap_or(NO_DEADLINE).max(1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The thread is awake.
    pub(crate) fn wake_up(&self) {
        self.sleeps_until.store(AWAKE, Ordering::Relaxed);
    }

    /// Takes what made the descriptor readable.
    pub(crate) fn clear(&self) {
        self.fd.take();
    }

    /// Whether a completion queue was armed since the last call.
    pub(crate) fn take_watch(&self) -> bool {
        self.watch.load(Ordering::Relaxed) && self.watch.swap(false, Ordering::AcqRel)
    }

    /// The thread leaves the link to the application; false if a completion queue was armed
    /// meanwhile.
    pub(crate) fn stand_by(&self) -> bool {
        self.stands_by.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.watch.load(Ordering::Relaxed)
    }

    /// It does not any more.
    pub(crate) fn stand_up(&self) {
        self.stands_by.store(false, Ordering::Relaxed);
    }
}
