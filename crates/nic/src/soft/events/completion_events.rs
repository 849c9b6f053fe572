//! Events of completion queues, for the descriptors of their channel.

use std::io;
use std::sync::Arc;

use crate::sync::notices::Notices;

/// Events kept in a channel without a reader; older ones are dropped first.
const MAX_COMPLETION_EVENTS: usize = 1 << 16;

/// Numbers of completion queues that have a completion after they were armed.
#[derive(Clone, Debug)]
pub(crate) struct CompletionEvents(pub(crate) Arc<Notices<u32>>);

impl CompletionEvents {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(Notices::new()?)))
    }

    pub(crate) fn push(&self, cq: u32) {
        self.0.push(cq, MAX_COMPLETION_EVENTS);
    }

    /// Drops the events of a destroyed completion queue.
    pub(crate) fn forget(&self, cq: u32) {
        self.0.forget(|notice| *notice == cq);
    }
}
