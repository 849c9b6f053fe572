//! Completion channels: descriptors that become readable when something completed.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use crate::sync::notices::Notices;

/// Events kept in a channel that nobody reads; older ones are dropped first.
const MAX_COMPLETION_EVENTS: usize = 1 << 16;

/// A completion channel: readable when a completion queue that was armed on it has something. Several queues may share one.
///
/// Events come in two ways, not to be mixed on one channel: [`next`](Self::next), [`take`](Self::take) and [`wait`](Self::wait)
/// never block by reading; a program that reads the descriptor itself (8 bytes for each event, blocking unless it sets
/// `O_NONBLOCK`) then calls [`claim`](Self::claim).
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

    /// Forgets the events of a completion queue that goes.
    pub(crate) fn forget(&self, cq: u32) {
        self.notices.forget(|notice| *notice == cq);
    }

    /// Takes the next event: the number of the completion queue that it is of. Never blocks.
    pub fn next(&self) -> Option<u32> {
        self.notices.next()
    }

    /// As [`next`](Self::next), for a caller who has just read 8 bytes from the descriptor. Nothing if the completion queue
    /// went meanwhile: then read again.
    pub fn claim(&self) -> Option<u32> {
        self.notices.claim()
    }

    /// Takes all events there are; whether there were any. Never blocks: poll the descriptor to wait.
    pub fn take(&self) -> bool {
        self.notices.take_all()
    }

    /// Waits for an event, at most `timeout`; whether one came (all there are, are taken).
    pub fn wait(&self, timeout: std::time::Duration) -> bool {
        self.notices.fd.wait(i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX));
        self.take()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.notices.as_raw_fd()
    }
}
