//! Completion channels: descriptors that become readable when an armed completion queue has a
//! completion.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use crate::sync::notices::Notices;

/// Events kept in a channel without a reader; older ones are dropped first.
const MAX_COMPLETION_EVENTS: usize = 1 << 16;

/// A completion channel: readable when a completion queue armed on it has a completion. Several
/// queues may share one.
///
/// There are two methods to take events; do not mix them on one channel. [`next`](Self::next),
/// [`take`](Self::take) and [`wait`](Self::wait) never block in a read. A program that reads
/// [`counter_fd`](Self::counter_fd) itself (8 bytes for each event, blocking) then calls
/// [`claim`](Self::claim). The descriptor of the channel can be polled, not read.
#[derive(Clone, Debug)]
pub struct Channel {
    notices: Arc<Notices<u32>>,
}

impl Channel {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { notices: Arc::new(Notices::new()?) })
    }

    pub(crate) fn push(&self, cq: u32) {
        self.notices.push(cq, MAX_COMPLETION_EVENTS);
    }

    /// Drops the events of a destroyed completion queue.
    pub(crate) fn forget(&self, cq: u32) {
        self.notices.forget(|notice| *notice == cq);
    }

    /// Takes the next event: the number of its completion queue. Never blocks.
    pub fn next(&self) -> Option<u32> {
        self.notices.next()
    }

    /// As [`next`](Self::next), for a caller that has just read 8 bytes from
    /// [`counter_fd`](Self::counter_fd). `None` if the completion queue was destroyed meanwhile:
    /// then read again.
    pub fn claim(&self) -> Option<u32> {
        self.notices.claim()
    }

    /// The descriptor that counts the events.
    pub fn counter_fd(&self) -> RawFd {
        self.notices.counter_fd()
    }

    /// Takes all pending events; returns whether there were any. Never blocks: poll the descriptor
    /// to wait.
    pub fn take(&self) -> bool {
        self.notices.take_all()
    }

    /// Waits for an event, at most `timeout`. Takes all pending events; returns whether there were
    /// any.
    pub fn wait(&self, timeout: std::time::Duration) -> bool {
        self.notices.counter.wait(i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX));
        self.take()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.notices.as_raw_fd()
    }
}
