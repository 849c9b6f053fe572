//! A rank: the queue pair to it, and the work requests that are posted to it.

use std::collections::VecDeque;

use nobounce_nic::any::Qp;
use nobounce_nic::work::{Operation, RecvRequest, SendRequest, Sge};

use crate::descriptor::Counted;
use crate::parts::MAX_REQUESTS;

/// The bits of a completion's number that are the number of its request. Above them is the rank.
const NUMBER_BITS: u32 = 48;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;
/// Marks the receive of each queue pair, which no message takes.
const END: u64 = 1 << 63;

/// What a completion says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completed {
    /// The index of the rank.
    pub(crate) at: usize,
    /// All requests up to this one; `None`: the queue pair has ended.
    pub(crate) requests: Option<u64>,
}

impl Completed {
    pub(crate) fn of(wr_id: u64) -> Self {
        let at = usize::try_from((wr_id & !END) >> NUMBER_BITS).unwrap_or(usize::MAX);
        let number = wr_id & NUMBER_MASK;
        Self { at, requests: (wr_id & END == 0).then_some(number) }
    }
}

/// Where the bytes of a request come from, or go to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    None,
    Memory(Sge),
    /// The first bytes of a value.
    Value([u8; 8], u8),
}

#[derive(Clone, Copy, Debug)]
struct Request {
    operation: Operation,
    source: Source,
    fence: bool,
    signaled: bool,
}

impl Request {
    fn send(&self, wr_id: u64) -> SendRequest<'_> {
        let (sges, inline) = match &self.source {
            Source::None => (&[][..], None),
            Source::Memory(sge) => (std::slice::from_ref(sge), None),
            Source::Value(bytes, len) => (&[][..], Some(&bytes[..usize::from(*len).min(8)])),
        };
        let Self { fence, signaled, .. } = *self;
        SendRequest { inline, fence, signaled, ..SendRequest::new(wr_id, self.operation, sges) }
    }
}

/// A descriptor that is complete when so many requests of its peer are.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) requests: u64,
    pub(crate) channel: usize,
    /// Of the descriptor, in its channel.
    pub(crate) number: u64,
    pub(crate) counter: Option<Counted>,
    pub(crate) is_flush: bool,
}

/// A rank.
#[derive(Debug)]
pub(crate) struct Peer {
    at: usize,
    qp: Qp,
    /// Requests that are to be posted together.
    queued: Vec<Request>,
    /// How many were queued so far, and how many of them are complete.
    requests: u64,
    completed: u64,
    /// Requests up to the last READ. Later requests wait for it.
    last_read: u64,
    /// Descriptors that wait for the completion of a request, in order of their requests.
    waiting: VecDeque<Waiting>,
    pub(crate) failure: Option<String>,
    /// Channels with a refused descriptor to this rank since their last flush: that fails.
    pub(crate) refused: Vec<bool>,
}

impl Peer {
    pub(crate) fn new(at: usize, qp: Qp, channels: usize) -> Self {
        // Completes with an error when the queue pair ends, though nothing was posted to it.
        let wr_id = END | (at as u64) << NUMBER_BITS;
        let failure = qp.post_recv(&RecvRequest { wr_id, sges: &[] }).err();
        Self {
            at,
            qp,
            queued: Vec::new(),
            requests: 0,
            completed: 0,
            last_read: 0,
            waiting: VecDeque::new(),
            failure: failure.map(|error| error.to_string()),
            refused: vec![false; channels],
        }
    }

    /// Whether the send queue has room for the requests of a descriptor.
    pub(crate) fn has_room(&self) -> bool {
        let outstanding = usize::try_from(self.requests - self.completed).unwrap_or(usize::MAX);
        outstanding.saturating_add(MAX_REQUESTS) <= self.qp.limits().send_depth
    }

    /// Whether requests are not complete.
    pub(crate) fn is_waiting(&self) -> bool {
        self.requests > self.completed && self.failure.is_none()
    }

    /// Queues a request.
    pub(crate) fn queue(&mut self, operation: Operation, source: Source) {
        // Data of an earlier READ may be the source of this one, or its target there.
        let fence = self.completed < self.last_read;
        self.requests += 1;
        if matches!(operation, Operation::Read(_)) {
            self.last_read = self.requests;
        }
        self.queued.push(Request { operation, source, fence, signaled: false });
    }

    /// A descriptor is complete when all requests so far are. Returns it if they are already.
    pub(crate) fn wait(&mut self, waiting: Waiting) -> Option<Waiting> {
        let waiting = Waiting { requests: self.requests, ..waiting };
        if self.completed >= self.requests {
            return Some(waiting);
        }
        // A kernel waits for this one, not for those behind it.
        if let Some(last) = self.queued.last_mut() {
            last.signaled |= waiting.counter.is_some();
        }
        self.waiting.push_back(waiting);
        None
    }

    /// Posts what is queued. One completion tells of all that were posted before it.
    pub(crate) fn post(&mut self) {
        let Some(last) = self.queued.last_mut() else { return };
        last.signaled = true;
        let first = self.requests - self.queued.len() as u64 + 1;
        let rank = (self.at as u64) << NUMBER_BITS;
        let number = |number: u64| rank | number & NUMBER_MASK;
        let requests: Vec<_> =
            self.queued.iter().zip(first..).map(|(request, at)| request.send(number(at))).collect();
        if let Err((_, error)) = self.qp.post_sends(&requests) {
            // Some may be on their way: the rank cannot be served in order any more.
            self.failure.get_or_insert_with(|| error.to_string());
        }
        self.queued.clear();
    }

    /// Requests up to this one are complete.
    pub(crate) fn complete(&mut self, requests: u64) {
        self.completed = self.completed.max(requests);
    }

    /// The next descriptor whose requests are all complete.
    pub(crate) fn next_complete(&mut self) -> Option<Waiting> {
        let completed = self.completed;
        self.waiting.front().filter(|first| first.requests <= completed)?;
        self.waiting.pop_front()
    }

    /// All descriptors that wait.
    pub(crate) fn take_waiting(&mut self) -> VecDeque<Waiting> {
        std::mem::take(&mut self.waiting)
    }
}
