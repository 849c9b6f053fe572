//! Completion channels: descriptors that become readable when an armed completion queue has a
//! completion.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::soft::events::completion_events::CompletionEvents;
use crate::soft::progress::set::EngineSet;
use crate::soft::progress::watch::Watching;

/// A completion channel: readable when a completion queue armed on it has a completion. Several
/// queues may share one.
///
/// There are two methods to take events; do not mix them on one channel. [`next`](Self::next),
/// [`take`](Self::take) and [`wait`](Self::wait) never block in a read. A program that reads
/// [`counter_fd`](Self::counter_fd) itself (8 bytes for each event, blocking) then calls
/// [`claim`](Self::claim). The descriptor of the channel can be polled, not read.
#[derive(Clone, Debug)]
pub struct Channel {
    pub(crate) events: CompletionEvents,
    readers: Arc<Readers>,
}

/// Threads that block on a channel.
#[derive(Debug)]
struct Readers {
    engines: Weak<EngineSet>,
    /// The last caller blocked in a read, as far as is known. The next will, too.
    do_block: AtomicBool,
}

impl Channel {
    pub(crate) fn new(engines: &Arc<EngineSet>) -> io::Result<Self> {
        let readers = Readers { engines: Arc::downgrade(engines), do_block: AtomicBool::new(false) };
        Ok(Self { events: CompletionEvents::new()?, readers: Arc::new(readers) })
    }

    /// Takes the next event: the number of its completion queue. Never blocks.
    pub fn next(&self) -> Option<u32> {
        self.events.0.next()
    }

    /// As [`next`](Self::next), for a caller that has just read 8 bytes from
    /// [`counter_fd`](Self::counter_fd). `None` if the completion queue was destroyed meanwhile:
    /// then read again.
    pub fn claim(&self) -> Option<u32> {
        self.events.0.claim()
    }

    /// The descriptor that counts the events.
    pub fn counter_fd(&self) -> RawFd {
        self.events.0.counter_fd()
    }

    /// Takes all pending events; returns whether there were any. Never blocks: poll the descriptor
    /// to wait.
    pub fn take(&self) -> bool {
        self.events.0.take_all()
    }

    /// Waits for an event, at most `timeout`. Takes all pending events; returns whether there were
    /// any.
    pub fn wait(&self, timeout: std::time::Duration) -> bool {
        self.events.0.counter.wait(i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX));
        self.take()
    }

    /// For a thread that is about to block in a read of [`Blocked::fd`]. If callers drive the
    /// device, this one does so first, for the time of a spin. If no event comes, it becomes the
    /// one that a packet wakes: the engine thread need not hand it over. Drop the result after the
    /// read, then [`claim`](Self::claim) or [`next`](Self::next), as [`Blocked::is_watching`] says.
    pub fn block(&self) -> Blocked {
        let events = &self.events.0;
        let engines = self.readers.engines.upgrade().filter(|engines| engines.is_driven_by_callers());
        let Some(engines) = engines.filter(|_| !events.has_any()) else {
            self.readers.do_block.store(false, Ordering::Relaxed);
            return Blocked { fd: self.counter_fd(), state: None };
        };
        self.readers.do_block.store(true, Ordering::Relaxed);
        let watching = engines.watch_for(events);
        let fd = match &watching {
            Some(Watching::Links { woken, .. }) => woken.as_raw_fd(),
            Some(Watching::Nothing) | None => self.counter_fd(),
        };
        Blocked { fd, state: watching.map(|watching| (watching, self.clone(), engines)) }
    }

    /// The caller does not block, but polls the descriptor.
    pub fn note_polled(&self) {
        self.readers.do_block.store(false, Ordering::Relaxed);
    }

    /// A completion queue was armed: whether its reader is going to block in
    /// [`block`](Self::block), and so watches the links itself.
    pub(crate) fn will_block(&self) -> bool {
        self.readers.do_block.load(Ordering::Relaxed)
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.events.0.as_raw_fd()
    }
}

/// A thread that blocks on a channel.
#[derive(Debug)]
#[must_use]
pub struct Blocked {
    fd: RawFd,
    state: Option<(Watching, Channel, Arc<EngineSet>)>,
}

impl Blocked {
    /// The descriptor to read 8 bytes from.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// Whether that is not the counter: take events with [`Channel::next`] after the read, and
    /// block again if there is none.
    pub fn is_watching(&self) -> bool {
        matches!(self.state, Some((Watching::Links { .. }, ..)))
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let Some((watching, channel, engines)) = self.state.take() else { return };
        if engines.first().is_forked() {
            // a signal handler forked: all of it is the parent's
            std::mem::forget((watching, channel, engines));
            return;
        }
        engines.end_watch(&watching, &channel.events.0);
    }
}
