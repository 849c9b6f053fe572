//! Asynchronous events: what happened to an object and belongs to no completion.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};

use nobounce_protocol::qp::QpEvent;
use nobounce_protocol::wire::Qpn;

use super::channel::EventFd;

/// Events kept for an application that does not fetch them; older ones are dropped first.
const MAX_EVENTS: usize = 1024;

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// To a queue pair.
    #[allow(missing_docs)]
    Qp { qpn: Qpn, event: QpEvent },
    /// A completion queue overflowed: completions are lost, and its queue pairs have stopped.
    #[allow(missing_docs)]
    CqOverflow { cq: u32 },
}

#[derive(Debug)]
pub(crate) struct Events {
    fd: EventFd,
    queue: Mutex<VecDeque<AsyncEvent>>,
}

impl Events {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { fd: EventFd::new()?, queue: Mutex::default() })
    }

    pub(crate) fn push(&self, event: AsyncEvent) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.len() == MAX_EVENTS {
            queue.pop_front();
        }
        queue.push_back(event);
        self.fd.raise();
    }

    pub(crate) fn next(&self) -> Option<AsyncEvent> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let event = queue.pop_front();
        if queue.is_empty() {
            self.fd.take();
        }
        event
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
