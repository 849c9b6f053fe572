//! Asynchronous events: state changes of an object without a completion.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use nobounce_protocol::qp::QpEvent;
use nobounce_protocol::wire::Qpn;

use crate::soft::limits::MAX_QPS;
use crate::sync::notices::Notices;

/// Events kept for an application that does not fetch them; older ones are dropped first. Several
/// for every queue pair: a program that waits for a lost last event could never destroy its queue
/// pair.
const MAX_EVENTS: usize = 4 * MAX_QPS;

/// An asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// To a queue pair.
    #[allow(missing_docs)]
    Qp { qpn: Qpn, event: QpEvent },
    /// A completion queue overflowed: completions are lost, and its queue pairs have stopped.
    #[allow(missing_docs)]
    CqOverflow { cq: u32 },
    /// A shared receive queue holds fewer receives than its limit.
    #[allow(missing_docs)]
    SrqLimitReached { srq: u32 },
    /// The device cannot go on: an engine thread ended by a panic, which is logged.
    DeviceFatal,
}

#[derive(Debug)]
pub(crate) struct Events(Notices<AsyncEvent>);

impl Events {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Notices::new()?))
    }

    pub(crate) fn push(&self, event: AsyncEvent) {
        self.0.push(event, MAX_EVENTS);
    }

    pub(crate) fn next(&self) -> Option<AsyncEvent> {
        self.0.next()
    }

    pub(crate) fn claim(&self) -> Option<AsyncEvent> {
        self.0.claim()
    }

    /// Drops the events of a destroyed object.
    pub(crate) fn forget(&self, of: impl Fn(&AsyncEvent) -> bool) {
        self.0.forget(of);
    }

    pub(crate) fn counter_fd(&self) -> RawFd {
        self.0.counter_fd()
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
