//! `caller` mode: a thread that blocks on a completion channel watches the links itself.
//!
//! Otherwise a packet would wake the engine thread, and that one the blocked thread. One thread at
//! a time watches. The others are woken by it, or by the engine thread while it is away.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::links::now_ns;
use crate::process::epoll::Epoll;
use crate::soft::progress::mode::Mode;
use crate::soft::progress::set::EngineSet;
use crate::sync::spin::MAX_CALLER_SPIN_NS;

/// How a thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watching {
    /// Packets on the links of the first engines, so many, wake it.
    Links(usize),
    /// Another thread wakes it.
    Nothing,
}

/// Threads of a device that block on completion channels.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    blocked: AtomicU32,
    /// One of them watches the links.
    is_watched: AtomicBool,
    links: Mutex<LinkSet>,
}

/// The descriptors of all links in one.
#[derive(Debug, Default)]
struct LinkSet {
    set: Option<Epoll>,
    /// Engines whose links are in it.
    engines: usize,
}

impl EngineSet {
    pub(crate) fn is_driven_by_callers(&self) -> bool {
        self.mode() == Mode::Caller && !self.first().is_forked()
    }

    /// Drives the engines for the length of a spin; `None` if that brought an event. Else the
    /// thread may block, until [`end_watch`](Self::end_watch). It watches the links if no other
    /// does: `set_alarm` gets a descriptor that packets make readable.
    pub(crate) fn watch_unless(
        &self,
        has_event: impl Fn() -> bool,
        set_alarm: impl Fn(RawFd) -> io::Result<()>,
    ) -> Option<Watching> {
        loop {
            if self.spin_until(&has_event) {
                return None;
            }
            // Counted first: a watcher that leaves sees this thread, or this one sees it gone.
            self.watch.blocked.fetch_add(1, Ordering::SeqCst);
            let watching = self.begin_watch(&set_alarm);
            if watching.is_some() {
                return watching;
            }
            self.watch.blocked.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Drives the engines until there is an event, or the spin is over.
    fn spin_until(&self, has_event: impl Fn() -> bool) -> bool {
        let end = now_ns() + MAX_CALLER_SPIN_NS;
        loop {
            let spinning = self.iter().filter(|handle| handle.drive_polled(true).is_none()).count();
            if has_event() {
                return true;
            }
            if spinning == 0 || now_ns() >= end {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// `None` if there are packets: drive once more.
    fn begin_watch(&self, set_alarm: impl Fn(RawFd) -> io::Result<()>) -> Option<Watching> {
        if self.watch.is_watched.swap(true, Ordering::SeqCst) {
            return Some(Watching::Nothing);
        }
        let count = self.iter().count();
        self.iter().take(count).for_each(|handle| handle.callers.fall_asleep());
        let armed = self.iter().take(count).take_while(|handle| handle.link.arm()).count();
        let may_sleep = armed == count && self.iter().take(count).all(|handle| handle.drain_to_sleep());
        if may_sleep && self.link_set(count).and_then(set_alarm).is_ok() {
            return Some(Watching::Links(count));
        }
        self.iter().take(armed).for_each(|handle| handle.link.disarm());
        self.iter().take(count).for_each(|handle| handle.callers.wake_up());
        self.watch.is_watched.store(false, Ordering::SeqCst);
        if armed < count {
            return None;
        }
        self.leave_links_to_threads();
        Some(Watching::Nothing)
    }

    /// The thread is awake: drives the engines that it watched.
    pub(crate) fn end_watch(&self, watching: Watching) {
        if let Watching::Links(count) = watching {
            for handle in self.iter().take(count) {
                handle.link.disarm();
                handle.callers.wake_up();
                handle.drive_woken();
            }
            self.watch.is_watched.store(false, Ordering::SeqCst);
        }
        let are_others = self.watch.blocked.fetch_sub(1, Ordering::SeqCst) > 1;
        match watching {
            Watching::Links(_) if are_others => self.leave_links_to_threads(),
            Watching::Links(_) => self.iter().for_each(|handle| handle.waker.wake_if_asleep()),
            Watching::Nothing => {}
        }
    }

    fn leave_links_to_threads(&self) {
        self.iter().for_each(|handle| handle.waker.ask_to_watch());
    }

    /// A descriptor that is readable when a link of the first `count` engines is.
    fn link_set(&self, count: usize) -> io::Result<RawFd> {
        let mut links = self.watch.links.lock().unwrap_or_else(PoisonError::into_inner);
        let LinkSet { set, engines } = &mut *links;
        let set = match set {
            Some(set) => set,
            None => set.insert(Epoll::new()?),
        };
        for handle in self.iter().take(count).skip(*engines) {
            handle.link.fds().try_for_each(|fd| set.add(fd))?;
            *engines += 1;
        }
        Ok(set.fd())
    }
}
