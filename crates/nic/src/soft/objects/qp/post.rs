//! Posting: checks a request, and hands it to the engine by its submission queue or under its lock.

use std::borrow::Borrow;

use nobounce_protocol::qp::{MAX_MESSAGE, PostError, QpState, WorkRequest};
use parking_lot::MutexGuard;

use super::Qp;
use crate::links::now_ns;
use crate::soft::engine::Engine;
use crate::soft::engine::host::PostedReceive;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::scatter::RequestBytes;
use crate::soft::engine::submission::Submission;
use crate::soft::qp_index::QpIndex;
use crate::work::{QpLimits, RecvRequest, SendRequest};

impl Qp {
    /// Posts a send request and sends what may leave at once.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_send(&self, request: &SendRequest<'_>) -> Result<(), PostError> {
        self.post_sends(std::slice::from_ref(request)).map_err(|(_, error)| error)
    }

    /// Posts several send requests, then sends what may leave at once.
    ///
    /// # Errors
    /// The number of accepted requests, and why the next one was not accepted.
    pub fn post_sends(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, PostError)> {
        self.post_list(|post| {
            for (taken, request) in requests.iter().enumerate() {
                post(request).map_err(|error| (taken, error))?;
            }
            Ok(())
        })
        .unwrap_or_else(|error| Err((0, error)))
    }

    /// Posts all of these send requests, or none.
    ///
    /// # Errors
    /// The number of the first request that was invalid (or found no room), and why.
    pub fn post_all<'r, L>(&self, requests: L) -> Result<(), (usize, PostError)>
    where
        L: IntoIterator<Item: Borrow<SendRequest<'r>>, IntoIter: ExactSizeIterator + Clone>,
    {
        let requests = requests.into_iter();
        let Some(mut engine) = self.handle.lock() else { return Err((0, PostError::State(QpState::Error))) };
        let Some(entry) = engine.core.entry(self.qpn) else {
            return Err((0, PostError::State(QpState::Reset)));
        };
        for (nth, request) in requests.clone().enumerate() {
            let request = request.borrow();
            let checked = self.checked(request);
            let checked = checked.and_then(|send| entry.qp.check_post(&send, request.to.is_some()));
            checked.map_err(|error| (nth, error))?;
        }
        let depth = self.limits.send_depth;
        if !self.work_queues.sends.take(requests.len(), depth) {
            return Err((self.work_queues.sends.free(depth), PostError::QueueFull(depth)));
        }
        let posted = requests.enumerate().try_for_each(|(nth, request)| {
            let request = request.borrow();
            let send = self.checked(request);
            send.and_then(|send| self.post_admitted(entry, send, request)).map_err(|error| (nth, error))
        });
        self.start_posted(engine);
        posted
    }

    /// Lets `each` post requests one by one, then sends what may leave at once; returns what `each`
    /// returned.
    ///
    /// # Errors
    /// The device is gone, and `each` was not called.
    pub fn post_list<R>(
        &self,
        each: impl FnOnce(&mut dyn FnMut(&SendRequest<'_>) -> Result<(), PostError>) -> R,
    ) -> Result<R, PostError> {
        if self.handle.has_submissions() {
            let submitter = Submitter { qp: self };
            return Ok(each(&mut |request| submitter.post(request)));
        }
        let mut engine = self.handle.lock().ok_or(PostError::State(QpState::Error))?;
        let Some(entry) = engine.core.entry(self.qpn) else {
            return Err(PostError::State(QpState::Reset));
        };
        if let Some(route) = &entry.route.local {
            route.expect();
        }
        let result = each(&mut |request| self.post_locked(entry, request));
        self.start_posted(engine);
        Ok(result)
    }

    /// Posts one request under the lock.
    #[inline]
    fn post_locked(&self, entry: &mut QueuePair, request: &SendRequest<'_>) -> Result<(), PostError> {
        let send = self.checked(request)?;
        let depth = self.limits.send_depth;
        if !self.work_queues.sends.take(1, depth) {
            // An invalid request is invalid whether or not there is room.
            entry.qp.check_post(&send, request.to.is_some())?;
            return Err(PostError::QueueFull(depth));
        }
        self.post_admitted(entry, send, request)
    }

    /// Posts one request with a reserved place.
    #[inline]
    fn post_admitted(
        &self,
        entry: &mut QueuePair,
        send: WorkRequest,
        request: &SendRequest<'_>,
    ) -> Result<(), PostError> {
        let bytes = RequestBytes::of_request(request.inline, request.sges);
        let posted = entry.admit_send(send, bytes, request.to);
        match posted {
            Ok(()) => self.work_queues.sends.admit(),
            Err(_) => self.work_queues.sends.give_back(),
        }
        posted
    }

    /// Sends what may leave of the requests posted just now.
    #[inline]
    fn start_posted(&self, mut engine: MutexGuard<'_, Engine>) {
        let now = now_ns();
        engine.core.note_posted(now, QpIndex::of(self.qpn));
        self.handle.start(engine, now);
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// The queue is full, the list too long, the queue pair is in RESET, or it takes its receives
    /// from a shared queue.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        if self.shares {
            return Err(PostError::SharedReceives);
        }
        if request.sges.len() > self.limits.recv_sges {
            return Err(PostError::TooManySges { given: request.sges.len(), max: self.limits.recv_sges });
        }
        let depth = self.limits.recv_depth;
        let mut receive = PostedReceive::of(request);
        if self.handle.has_submissions() && self.work_queues.may_receive() {
            if !self.work_queues.receives.take(1, depth) {
                return Err(PostError::QueueFull(depth));
            }
            match self.handle.submit(Submission::Receive { qpn: self.qpn, receive }) {
                Ok(()) => return Ok(()), // the engine drains the queue before it takes a receive
                Err(Submission::Receive { receive: back, .. }) => receive = back,
                Err(_) => return Err(PostError::State(QpState::Error)),
            }
            self.work_queues.receives.give_back();
        }
        let mut engine = self.handle.lock().ok_or(PostError::State(QpState::Error))?;
        let index = QpIndex::of(self.qpn);
        let Some(entry) = engine.core.entry(self.qpn) else { return Err(PostError::State(QpState::Reset)) };
        if entry.qp.state() == QpState::Reset {
            return Err(PostError::State(QpState::Reset));
        }
        if !self.work_queues.receives.take(1, depth) {
            return Err(PostError::QueueFull(depth));
        }
        self.work_queues.receives.admit();
        entry.posted.receives.push_back(receive);
        if entry.qp.state() == QpState::Error {
            engine.core.settle(index);
        }
        Ok(())
    }

    /// The request in the protocol's form, if it keeps the queue pair's limits.
    #[inline]
    fn checked(&self, request: &SendRequest<'_>) -> Result<WorkRequest, PostError> {
        checked(&self.limits, self.shared.is_ipv4, request)
    }
}

/// Puts requests into the submission queue, and wakes the engine thread at the end.
struct Submitter<'a> {
    qp: &'a Qp,
}

impl Submitter<'_> {
    fn post(&self, request: &SendRequest<'_>) -> Result<(), PostError> {
        let qp = self.qp;
        let send = qp.checked(request)?;
        if qp.work_queues.may_submit(qp.service, &send, request.to.is_some()) {
            let depth = qp.limits.send_depth;
            if !qp.work_queues.sends.take(1, depth) {
                return Err(PostError::QueueFull(depth));
            }
            let bytes = RequestBytes::of_request(request.inline, request.sges);
            if qp.handle.submit(Submission::Send { qpn: qp.qpn, send, bytes, to: request.to }).is_ok() {
                return Ok(());
            }
            qp.work_queues.sends.give_back();
        }
        // The submission queue is full, or the queue pair is not ready to send, or the request is
        // invalid.
        let mut engine = qp.handle.lock().ok_or(PostError::State(QpState::Error))?;
        let Some(entry) = engine.core.entry(qp.qpn) else { return Err(PostError::State(QpState::Reset)) };
        qp.post_locked(entry, request)?;
        engine.core.note_posted(now_ns(), QpIndex::of(qp.qpn));
        Ok(())
    }
}

impl Drop for Submitter<'_> {
    fn drop(&mut self) {
        self.qp.handle.waker.wake_if_asleep();
    }
}

/// The request in the protocol's form, if it keeps the queue pair's limits.
#[inline]
fn checked(limits: &QpLimits, v4: bool, request: &SendRequest<'_>) -> Result<WorkRequest, PostError> {
    if request.sges.len() > limits.send_sges {
        return Err(PostError::TooManySges { given: request.sges.len(), max: limits.send_sges });
    }
    let total = match request.inline {
        None => request.sges.iter().map(|sge| u64::from(sge.len)).sum(),
        // READs and atomics need a buffer for the result, and inline data excludes a list.
        Some(_) if request.op.returns_data() || !request.sges.is_empty() => {
            return Err(PostError::InlineMisused);
        }
        // Programs give the word of an atomic write as a pointer, on any queue pair.
        Some(bytes) if bytes.len() > limits.inline && !request.op.moves_word() => {
            return Err(PostError::InlineTooLong { given: bytes.len() as u64, max: limits.inline });
        }
        Some(bytes) => bytes.len() as u64,
    };
    if let Some(to) = request.to
        && to.remote.is_ipv4() != v4
    {
        return Err(PostError::Unreachable(to.remote));
    }
    Ok(WorkRequest {
        wr_id: request.wr_id,
        op: request.op,
        len: u32::try_from(total).ok().filter(|len| *len <= MAX_MESSAGE).ok_or(PostError::TooLong(total))?,
        signaled: request.signaled,
        solicited: request.solicited,
        fence: request.fence,
        xrc_srq: request.xrc_srq,
    })
}
