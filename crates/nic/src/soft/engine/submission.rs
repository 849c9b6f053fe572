//! The submission queue of `thread` mode: posted requests that the engine thread has not taken yet.
//!
//! The posting thread checks a request, reserves its place in the work queue ([`WorkQueueSpace`]),
//! and pushes it into a bounded lock-free ring. The engine takes the ring's requests before
//! anything else, so that requests keep their order. Taking the engine's lock drains the ring
//! first: a state change follows everything posted before it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use nobounce_protocol::qp::{Datagram, PostError, QpState, WorkRequest};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Qpn, Service};

use crate::soft::engine::Core;
use crate::soft::engine::host::{PostedReceive, PostedSend};
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::scatter::RequestBytes;
use crate::soft::engine::srqs::SrqIndex;
use crate::soft::qp_index::QpIndex;
use crate::sync::ring::Ring;

/// Requests that fit between two polls of the engine thread; further ones are posted under the
/// engine's lock.
const PLACES: usize = 512;

/// A posted request.
#[derive(Debug)]
pub(crate) enum Submission {
    Send { qpn: Qpn, send: WorkRequest, bytes: RequestBytes, to: Option<Datagram> },
    Receive { qpn: Qpn, receive: PostedReceive },
    SharedReceive { srq: SrqIndex, receive: PostedReceive },
}

/// The queue of one engine; without places in `caller` mode, where everything is posted under the
/// lock.
#[derive(Debug)]
pub(crate) struct Submissions(Option<Ring<Submission>>);

impl Submissions {
    /// The queue of an engine; empty unless the engine thread drives it.
    pub(crate) fn new(has_thread: bool) -> Self {
        Self(has_thread.then(|| Ring::new(PLACES)))
    }

    /// Pushes a request.
    ///
    /// # Errors
    /// The ring is full: the request comes back.
    #[inline]
    #[allow(clippy::result_large_err)] // it is then posted under the lock
    pub(crate) fn push(&self, submission: Submission) -> Result<(), Submission> {
        match &self.0 {
            Some(ring) => ring.push(submission),
            None => Err(submission),
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(Ring::is_empty)
    }

    #[inline]
    fn pop(&self) -> Option<Submission> {
        self.0.as_ref()?.pop()
    }

    /// Whether it is empty and no thread is pushing.
    fn is_settled(&self) -> bool {
        self.0.as_ref().is_none_or(|ring| ring.claimed() == 0)
    }
}

impl Core {
    /// Takes the submitted requests; returns whether there were any.
    #[inline]
    pub(crate) fn take_submissions(&mut self, now: impl FnOnce() -> Nanos) -> bool {
        if self.submissions.is_empty() {
            return false;
        }
        let now = now();
        let submissions = self.submissions.clone();
        while let Some(submission) = submissions.pop() {
            self.admit(now, submission);
        }
        true
    }

    /// The same for state changes: waits for pushes of other threads in progress, because this
    /// thread's earlier requests may be behind them.
    pub(crate) fn take_all_submissions(&mut self, now: impl Fn() -> Nanos) {
        if self.submissions.is_settled() {
            return;
        }
        let submissions = self.submissions.clone();
        while !submissions.is_settled() {
            if !self.take_submissions(&now) {
                std::hint::spin_loop();
            }
        }
    }

    fn admit(&mut self, now: Nanos, submission: Submission) {
        match submission {
            Submission::Send { qpn, send, bytes, to } => self.admit_send(now, qpn, send, bytes, to),
            Submission::Receive { qpn, receive } => self.admit_receive(qpn, receive),
            Submission::SharedReceive { srq, receive } => {
                if let Some(entry) = self.srqs.get(srq) {
                    entry.admit(receive);
                }
            }
        }
    }

    fn admit_send(
        &mut self,
        now: Nanos,
        qpn: Qpn,
        send: WorkRequest,
        bytes: RequestBytes,
        to: Option<Datagram>,
    ) {
        let Some(entry) = self.entry(qpn) else { return };
        entry.posted.work_queues.sends.admit();
        // The request was valid when posted, and has a place. A queue pair that was reset since
        // then has dropped its requests.
        if entry.admit_send(send, bytes, to).is_err() {
            debug_assert!(matches!(entry.qp.state(), QpState::Reset | QpState::Init | QpState::Rtr));
            entry.publish_room();
            return;
        }
        let index = entry.index();
        self.note_posted(now, index);
    }

    /// Requests were posted to a queue pair: it may send.
    pub(crate) fn note_posted(&mut self, now: Nanos, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        entry.ack.note_posted(now);
        if entry.has_unresolved() {
            self.same_host.unresolved.push(index);
        }
        if entry.qp.has_completions() {
            self.settle(index);
        }
        self.make_ready(index);
    }

    fn admit_receive(&mut self, qpn: Qpn, receive: PostedReceive) {
        let Some(entry) = self.entry(qpn) else { return };
        entry.posted.work_queues.receives.admit();
        let (index, state) = (entry.index(), entry.qp.state());
        if state != QpState::Reset {
            entry.posted.receives.push_back(receive);
        }
        match state {
            QpState::Reset => entry.publish_room(),
            QpState::Error => self.settle(index),
            _ => {}
        }
    }
}

impl QueuePair {
    /// Puts a send request into the queue pair.
    ///
    /// # Errors
    /// See [`PostError`].
    #[inline]
    pub(crate) fn admit_send(
        &mut self,
        send: WorkRequest,
        bytes: RequestBytes,
        to: Option<Datagram>,
    ) -> Result<(), PostError> {
        // A fence orders it after earlier READs, which may write the bytes that it sends.
        let early = !send.fence && !send.op.fetches();
        let serial = match to {
            None => self.qp.post(send)?,
            Some(to) => {
                let serial = self.qp.post_to(send, to)?;
                self.note_addressee(&to);
                serial
            }
        };
        self.posted.sends.push_back(PostedSend { serial, bytes, early });
        Ok(())
    }

    /// Publishes the free places to posters.
    #[inline]
    pub(crate) fn publish_room(&self) {
        let sends = self.posted.send_depth.saturating_sub(self.qp.send_room());
        self.posted.work_queues.sends.publish(sends);
        self.posted.work_queues.receives.publish(self.posted.receives.len());
    }

    /// Publishes to posters what they may post.
    pub(crate) fn publish_rules(&self) {
        let attr = self.qp.attr();
        let rules = &self.posted.work_queues.rules;
        rules.mtu.store(attr.path_mtu.bytes(), Ordering::Relaxed);
        rules.fetches.store(attr.max_rd_atomic > 0, Ordering::Relaxed);
        rules.is_open.store(attr.state == QpState::Rts, Ordering::Release);
    }
}

/// The work queues of a queue pair as posters see them.
#[derive(Debug, Default)]
pub(crate) struct WorkQueues {
    pub(crate) sends: WorkQueueSpace,
    pub(crate) receives: WorkQueueSpace,
    rules: Rules,
}

/// What may be posted without the engine's lock.
#[derive(Debug, Default)]
struct Rules {
    /// The queue pair is in RTS, or went from there to the error state by itself.
    is_open: AtomicBool,
    /// READs and atomics are allowed.
    fetches: AtomicBool,
    mtu: AtomicU32,
}

impl WorkQueues {
    /// Whether such a request, which keeps the limits, may be submitted. Others are posted under
    /// the lock, which finds the error.
    #[inline]
    pub(crate) fn may_submit(&self, service: Service, send: &WorkRequest, has_address: bool) -> bool {
        let Rules { is_open, fetches, mtu } = &self.rules;
        is_open.load(Ordering::Acquire)
            && (service == Service::Ud) == has_address
            && send.op.is_offered(service)
            && (!send.op.fetches() || fetches.load(Ordering::Relaxed))
            && (!send.op.moves_word() || send.len == 8)
            && (service != Service::Ud || send.len <= mtu.load(Ordering::Relaxed))
    }

    /// Whether receives may be submitted: they are valid in every state but RESET.
    #[inline]
    pub(crate) fn may_receive(&self) -> bool {
        self.rules.is_open.load(Ordering::Acquire)
    }

    /// From now on everything is posted under the lock, until the rules are published again.
    pub(crate) fn close(&self) {
        self.rules.is_open.store(false, Ordering::Release);
    }
}

/// How many requests one work queue holds, including submitted ones. On its own cache line:
/// different threads may post sends and receives.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct WorkQueueSpace {
    /// Places reserved so far.
    posted: AtomicU64,
    /// Places released so far.
    retired: AtomicU64,
    /// Requests that reached the engine; only the engine writes this.
    admitted: AtomicU64,
}

impl WorkQueueSpace {
    /// Reserves `count` places in a queue of that depth; false if fewer are free.
    #[inline]
    pub(crate) fn take(&self, count: usize, depth: usize) -> bool {
        let retired = self.retired.load(Ordering::Acquire);
        let place = |posted: u64| {
            let held = usize::try_from(posted.wrapping_sub(retired)).unwrap_or(usize::MAX);
            (held.saturating_add(count) <= depth).then(|| posted + count as u64)
        };
        self.posted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, place).is_ok()
    }

    /// Releases one unused place.
    pub(crate) fn give_back(&self) {
        self.posted.fetch_sub(1, Ordering::Relaxed);
    }

    /// How many places are free in a queue of that depth.
    pub(crate) fn free(&self, depth: usize) -> usize {
        let held = self.posted.load(Ordering::Relaxed).wrapping_sub(self.retired.load(Ordering::Acquire));
        depth.saturating_sub(usize::try_from(held).unwrap_or(usize::MAX))
    }

    /// A request with a reserved place has reached the engine.
    #[inline]
    pub(crate) fn admit(&self) {
        self.admitted.store(self.admitted.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// This many of the requests that reached the engine are left.
    #[inline]
    pub(crate) fn publish(&self, left: usize) {
        let admitted = self.admitted.load(Ordering::Relaxed);
        self.retired.store(admitted.saturating_sub(left as u64), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_the_places_that_it_has() {
        let room = WorkQueueSpace::default();
        assert!(room.take(2, 2) && !room.take(1, 2));
        room.admit();
        room.publish(1);
        assert!(!room.take(1, 2), "admitted, and not done");
        room.publish(0);
        assert!(room.take(1, 2) && !room.take(1, 2), "one was submitted and not admitted");
        room.give_back();
        assert_eq!(room.free(2), 1);
    }

    #[test]
    fn posting_threads_share_the_places() {
        let room = WorkQueueSpace::default();
        let taken: usize = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| (0..1000).filter(|_| room.take(1, 1000)).count())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!((taken, room.free(1000)), (1000, 0));
    }
}
