//! `caller` mode: a thread that blocks on a completion channel watches the links itself.
//!
//! Otherwise a packet would wake the engine thread, and that one the blocked thread. One thread at
//! a time watches. The others are woken by it, or by the engine thread while it is away. The
//! watching thread reads an eventfd of its own, which packets (by Linux AIO) and events of its
//! channel raise. A raise too many costs it a look.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::links::now_ns;
use crate::process::aio::ReadAlarm;
use crate::process::epoll::Epoll;
use crate::process::eventfd::EventFd;
use crate::soft::progress::mode::Mode;
use crate::soft::progress::set::EngineSet;
use crate::sync::notices::Notices;
use crate::sync::spin::MAX_CALLER_SPIN_NS;

/// How a thread blocks.
#[derive(Debug)]
pub(crate) enum Watching {
    /// Packets on the links of the first `engines` wake it, and events of its channel: it reads
    /// `woken`.
    #[allow(missing_docs)]
    Links { engines: usize, woken: Arc<EventFd> },
    /// Another thread wakes it: it reads the counter of its channel.
    Nothing,
}

/// Threads of a device that block on completion channels.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    blocked: AtomicU32,
    /// One of them watches the links.
    is_watched: AtomicBool,
    tools: Mutex<Option<Tools>>,
}

/// What the watching thread uses.
#[derive(Debug)]
struct Tools {
    /// What it reads: raised by packets, and by events of its channel.
    woken: Arc<EventFd>,
    alarm: ReadAlarm,
    /// The descriptors of all links in one.
    links: Epoll,
    /// Engines whose links are in it.
    engines: usize,
}

/// Rounds of driving after which a thread leaves the links to the engine threads: packets that
/// bring no event for it come without end.
const MAX_ROUNDS: usize = 4;

impl EngineSet {
    pub(crate) fn is_driven_by_callers(&self) -> bool {
        self.mode() == Mode::Caller && !self.first().is_forked()
    }

    /// Drives the engines for the length of a spin; `None` if that brought an event. Else the
    /// thread may block, until [`end_watch`](Self::end_watch). It watches the links if no other
    /// does.
    pub(crate) fn watch_for(&self, events: &Notices<u32>) -> Option<Watching> {
        for round in 1.. {
            if self.spin_until(|| events.has_any()) {
                return None;
            }
            // Counted first: a watcher that leaves sees this thread, or this one sees it gone.
            self.watch.blocked.fetch_add(1, Ordering::SeqCst);
            if self.watch.is_watched.swap(true, Ordering::SeqCst) {
                return Some(Watching::Nothing);
            }
            match self.begin_watch(events) {
                Begun::Watch(watching) => return Some(watching),
                Begun::Busy if round >= MAX_ROUNDS => {
                    self.leave_links_to_threads();
                    return Some(Watching::Nothing);
                }
                Begun::Busy => _ = self.watch.blocked.fetch_sub(1, Ordering::SeqCst),
            }
        }
        None
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

    /// The caller alone has set `is_watched`.
    fn begin_watch(&self, events: &Notices<u32>) -> Begun {
        let count = self.iter().count();
        self.iter().take(count).for_each(|handle| handle.callers.begin_watch());
        let armed = self.iter().take(count).take_while(|handle| handle.link.arm()).count();
        let is_quiet = armed == count && self.iter().take(count).all(|handle| handle.settle_to_sleep());
        let woken = if is_quiet { self.set_alarm(count) } else { None };
        if let Some(woken) = woken.clone().filter(|woken| events.watch(woken)) {
            return Begun::Watch(Watching::Links { engines: count, woken });
        }
        self.iter().take(armed).for_each(|handle| handle.link.disarm());
        self.iter().take(count).for_each(|handle| handle.callers.end_watch());
        self.watch.is_watched.store(false, Ordering::SeqCst);
        if armed < count || woken.is_some() {
            self.wake_threads();
            return Begun::Busy;
        }
        self.leave_links_to_threads();
        Begun::Watch(Watching::Nothing)
    }

    /// The thread is awake: drives the engines that it watched.
    pub(crate) fn end_watch(&self, watching: &Watching, events: &Notices<u32>) {
        if let Watching::Links { engines, .. } = watching {
            events.end_watch();
            for handle in self.iter().take(*engines) {
                handle.link.disarm();
                handle.callers.end_watch();
                handle.drive_woken();
            }
            self.watch.is_watched.store(false, Ordering::SeqCst);
        }
        let are_others = self.watch.blocked.fetch_sub(1, Ordering::SeqCst) > 1;
        match watching {
            Watching::Links { .. } if are_others => self.leave_links_to_threads(),
            Watching::Links { .. } => self.wake_threads(),
            Watching::Nothing => {}
        }
    }

    fn leave_links_to_threads(&self) {
        self.iter().for_each(|handle| handle.waker.ask_to_watch());
        self.wake_threads();
    }

    /// Engine threads may have gone to sleep until the watch ends.
    fn wake_threads(&self) {
        self.iter().for_each(|handle| handle.waker.wake_if_asleep());
    }

    /// From now on packets on the links of the first `count` engines raise the descriptor that is
    /// returned. `None` where the kernel refuses.
    fn set_alarm(&self, count: usize) -> Option<Arc<EventFd>> {
        let mut tools = self.watch.tools.lock().unwrap_or_else(PoisonError::into_inner);
        if tools.is_none() {
            *tools = Some(Tools::new().ok()?);
        }
        let Tools { woken, alarm, links, engines } = tools.as_mut()?;
        for handle in self.iter().take(count).skip(*engines) {
            handle.link.fds().try_for_each(|fd| links.add(fd)).ok()?;
            *engines += 1;
        }
        // Before the alarm is set: what is taken here is of an earlier watch.
        while woken.take() {}
        alarm.set(links.fd(), woken.as_raw_fd()).ok()?;
        Some(woken.clone())
    }
}

/// The beginning of a watch.
enum Begun {
    /// The thread may block.
    Watch(Watching),
    /// There are packets, or an event.
    Busy,
}

impl Tools {
    fn new() -> io::Result<Self> {
        let woken = Arc::new(EventFd::counting()?);
        Ok(Self { woken, alarm: ReadAlarm::new()?, links: Epoll::new()?, engines: 0 })
    }
}
