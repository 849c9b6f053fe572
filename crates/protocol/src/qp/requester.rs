//! The requester of a reliable connection: segments requests into packets, retransmits lost ones,
//! retires acknowledged ones.
//!
//! PSNs are 64 bits wide here. A prefix of the send queue is *started* (has PSNs):
//!
//! ```text
//!   sq:   [ started ............................ ][ waiting ]
//!   PSN:   una ........ next ........ sent_top .. top
//!          oldest       next to       one past    one past the last
//!          unanswered   send          ever sent   started
//! ```
//! `una` always lies in the front request. With go-back-N, a rewind moves `next` back to `una`;
//! with selective retransmission `next` is `sent_top`, and a [`Scoreboard`] tells what is in
//! flight.

mod go_back_n;
mod path_use;
mod rate;
mod selective;
mod send_queue;
mod sending;
mod timeouts;

use std::collections::VecDeque;

use super::completion::{Completion, Nak, Status};
use super::recovery::Recovery;
use super::request::{LocalWork, PostError, WorkRequest};
use super::rtt::Rtt;
use super::scoreboard::Scoreboard;
use super::wqe::Wqe;
use super::{Host, Params, QpCounters};
use crate::congestion::{Ack, CongestionControl, Loss};
use crate::timing::Nanos;
use crate::wire::{Header, Opcode, Psn, Syndrome};
use path_use::PathUse;
use rate::Rate;
use send_queue::SendQueue;

/// Outcome of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseOutcome {
    /// It was useful, or a harmless duplicate.
    Taken,
    /// It matches no outstanding request.
    Unsolicited,
    /// The request at the front failed; the queue pair must go to the error state.
    Failed(Status),
}

/// READs, atomics and others with a response of their own.
#[derive(Debug, Default)]
struct Fetches {
    /// Those without a complete response: first PSN and one past the last. A retransmitted request
    /// keeps these boundaries, because the peer may have accepted the first copy.
    requests: VecDeque<(u64, u64)>,
    /// How many of them were sent since the last rewind.
    asked: usize,
    /// Started READs and atomics that are incomplete, for fences.
    open: usize,
}

#[derive(Debug)]
pub(crate) struct Requester {
    queue: SendQueue,
    una: u64,
    next: u64,
    sent_top: u64,
    top: u64,
    /// One past the last packet with an ACK request.
    asked: u64,
    fetches: Fetches,
    path: PathUse,
    rate: Rate,
    rtt: Rtt,
    recovery: Recovery,
    /// With a peer that keeps packets behind a gap: what became of each packet.
    board: Option<Box<Scoreboard>>,
}

impl Requester {
    pub(crate) fn new(depth: usize) -> Self {
        Self {
            queue: SendQueue::new(depth),
            una: Psn::SPACE,
            next: Psn::SPACE,
            sent_top: Psn::SPACE,
            top: Psn::SPACE,
            asked: Psn::SPACE,
            fetches: Fetches::default(),
            path: PathUse::default(),
            rate: Rate::new(),
            rtt: Rtt::new(),
            recovery: Recovery::default(),
            board: None,
        }
    }

    /// Sets the PSNs and parameters of the connection.
    pub(crate) fn connect(&mut self, sq_psn: Psn, params: &Params) {
        let first = Psn::SPACE + u64::from(sq_psn.get());
        (self.una, self.next, self.sent_top, self.top) = (first, first, first, first);
        self.asked = first;
        self.rate.begin(params.mtu);
        self.recovery.refill_retries(params);
    }

    /// Posts a request. The caller has checked the state.
    pub(crate) fn post(&mut self, request: WorkRequest) -> Result<u64, PostError> {
        self.queue.post(request)
    }

    /// Incomplete requests.
    pub(crate) fn posted(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.board.as_ref().map_or(self.path.outstanding, |board| board.bytes())
    }

    /// Whether this PSN was sent last and is unacknowledged.
    pub(crate) fn sent_last(&self, psn: Psn) -> bool {
        let psn = psn.extend(self.next);
        match &self.board {
            // A lost packet before it must not wait with it for its payload.
            Some(board) => board.is_last(psn) && board.first_lost().is_none_or(|lost| lost > psn),
            None => psn + 1 == self.next && psn >= self.una,
        }
    }

    pub(crate) const fn split_short_writes(&mut self, split: bool) {
        self.path.splits_writes = split;
    }

    pub(crate) const fn ask_rarely(&mut self, rarely: bool) {
        self.path.asks_rarely = rarely;
    }

    pub(crate) const fn is_path_limited(&self) -> bool {
        self.path.is_limited
    }

    /// The serial number of the oldest incomplete request.
    pub(crate) fn oldest_serial(&self) -> u64 {
        self.queue.oldest_serial()
    }

    pub(crate) const fn is_drained(&self) -> bool {
        self.queue.is_drained()
    }

    /// Whether anything is left to send, even if it is blocked.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.has_unsent() || self.recovery.send_probe || self.recovery.rnr_until.is_some()
    }

    /// The next request, if its work is local and its turn has come; [`Self::handle_local`] ends
    /// it.
    pub(crate) fn poll_local(&self) -> Option<(u64, LocalWork)> {
        let wqe = self.queue.waiting().filter(|_| self.next == self.top)?;
        let waits = self.recovery.rnr_until.is_some() || (wqe.request.fence && self.fetches.open > 0);
        wqe.request.op.local().filter(|_| !waits).map(|work| (wqe.serial, *work))
    }

    /// The request from [`Self::poll_local`] was carried out. It takes no PSN, and completes in
    /// order.
    pub(crate) fn handle_local(&mut self, out: &mut Out<'_>) {
        self.queue.start_local(self.top);
        self.retire_local(out);
    }

    /// Completes the local requests at the front.
    fn retire_local(&mut self, out: &mut Out<'_>) {
        while self.queue.front().is_some_and(|wqe| wqe.packets == 0) {
            self.pop(out);
        }
    }

    /// Handles a response: ACK, NAK, READ response, atomic response.
    pub(crate) fn handle_answer(
        &mut self,
        now: Nanos,
        (header, packets): (&Header, u64),
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> ResponseOutcome {
        let psn = header.psn.extend(self.una);
        if psn + packets > self.sent_top {
            return ResponseOutcome::Unsolicited;
        }
        if self.board.is_some() {
            return self.handle_selectively(now, (psn, packets), header, payload_len, params, host, out);
        }
        if header.opcode != Opcode::Ack {
            return self.handle_data(now, (psn, packets), header, payload_len, params, host, out);
        }
        match header.aeth.syndrome {
            Syndrome::Ack(_) => {
                if psn >= self.una {
                    self.advance(now, psn + 1, params, out);
                    if self.una <= psn {
                        self.data_lost(now, out);
                    }
                }
                ResponseOutcome::Taken
            }
            Syndrome::RnrNak(code) => {
                if psn < self.una || self.recovery.rnr_until.is_some() {
                    return ResponseOutcome::Taken; // known already: nothing was sent since
                }
                out.counters.rcvd_rnr_err += 1;
                self.advance(now, psn, params, out);
                if self.una < psn {
                    self.data_lost(now, out);
                } else {
                    if !self.recovery.wait_for_receive(now, code, params) {
                        return ResponseOutcome::Failed(Status::RnrRetryExceeded);
                    }
                    self.rewind();
                }
                ResponseOutcome::Taken
            }
            Syndrome::Nak(code) => self.handle_nak(now, psn, Nak::from_code(code), params, out),
            Syndrome::Reserved(_) => ResponseOutcome::Unsolicited,
        }
    }

    /// Acknowledges everything before `upto`; missing READ data stops it.
    fn advance(&mut self, now: Nanos, upto: u64, params: &Params, out: &mut Out<'_>) {
        let before = self.una;
        while let Some(wqe) = self.queue.front().filter(|_| self.una < upto) {
            let end = wqe.end();
            if wqe.request.op.fetches() {
                break;
            }
            self.step(end.min(upto));
            if self.una == end {
                self.retire(out);
            }
        }
        self.resync();
        if self.una > before {
            self.note_progress(now, self.una - before, None, params);
        }
    }

    /// Moves `una` to `to`, inside the front request.
    fn step(&mut self, to: u64) {
        let counted = to.min(self.next).saturating_sub(self.una);
        self.path.release(counted * self.queue.front().map_or(0, Wqe::packet_cost));
        self.una = to;
    }

    fn retire(&mut self, out: &mut Out<'_>) {
        self.pop(out);
        self.retire_local(out);
    }

    fn pop(&mut self, out: &mut Out<'_>) {
        if let Some(wqe) = self.queue.pop().filter(|wqe| wqe.request.signaled) {
            out.completions.push_back(wqe.completion(Status::Success));
        }
    }

    /// Packets were acknowledged, one of which is known to have left once, at `sent`.
    fn note_progress(&mut self, now: Nanos, packets: u64, sent: Option<Nanos>, params: &Params) {
        let mut round_trip = sent.map(|sent| now.saturating_sub(sent));
        if let Some(first) = round_trip.filter(|_| self.rtt.shortest() == 0) {
            // A loss in the first window waits for the first probe, which would come late.
            self.rtt.sample(first);
        }
        let timed = self.rtt.sample_timed(now, |psn| {
            psn < self.una || self.board.as_ref().is_some_and(|board| board.has_arrived(psn))
        });
        round_trip = round_trip.or(timed);
        let is_probed = self.recovery.probes > 0;
        let was_probed = std::mem::replace(&mut self.recovery.was_probed, is_probed);
        if self.recovery.probes > 1 || (is_probed && was_probed) {
            // The round trip took longer than estimated; one probe alone may have repaired a loss.
            // Sample it, whichever copy was answered: the next probe may wait as long. Otherwise a
            // peer that becomes slow would be probed again and again.
            self.rtt.sample(now.saturating_sub(self.recovery.last_progress));
        }
        let in_use = 2 * (self.in_flight() + packets) >= self.rate.window(params);
        self.rate.control.on_ack(now, Ack { bytes: packets * u64::from(params.mtu), round_trip, in_use });
        self.recovery.last_progress = now;
        self.recovery.probes = 0;
        self.recovery.rewound = None;
        self.recovery.stalled_since = None;
        self.recovery.refill_retries(params);
        self.arm_probe(now);
    }

    fn loss(&mut self, now: Nanos, packets: u64) {
        self.recovery.silent_before = None;
        let is_new = self.una >= self.recovery.recovery_point;
        if is_new && self.rate.control.on_loss(now, Loss { packets, resends_all: self.board.is_none() }) {
            self.recovery.recovery_point = self.sent_top;
        }
    }

    /// The path to or from the peer is congested: a notification, or a marked response, arrived.
    pub(crate) fn handle_congestion(&mut self, now: Nanos) {
        self.rate.control.on_mark(now);
    }

    pub(crate) fn set_control(&mut self, control: Box<dyn CongestionControl>) {
        self.rate.control = control;
    }

    /// Retransmits everything unacknowledged.
    fn rewind(&mut self) {
        self.rtt.time_again();
        if let Some(board) = &mut self.board {
            board.lose_all();
            return;
        }
        self.next = self.una;
        self.asked = self.una;
        self.queue.seek(self.next);
        self.path.outstanding = 0;
        self.fetches.asked = 0;
    }

    /// Ends every request: the front one with `status` if it was started, the others as flushed.
    pub(crate) fn fail(&mut self, status: Option<Status>, out: &mut Out<'_>) {
        let mut status = status;
        for wqe in self.queue.drain() {
            out.completions.push_back(wqe.completion(status.take().unwrap_or(Status::Flushed)));
        }
        self.top = self.sent_top;
        self.una = self.sent_top;
        self.next = self.sent_top;
        self.board = self.board.take().map(|_| Box::new(Scoreboard::new(self.sent_top)));
        self.rewind();
        self.fetches.requests.clear();
        self.fetches.open = 0;
        self.recovery.rnr_until = None;
        self.recovery.send_probe = false;
        self.recovery.probe_at = None;
    }

    /// Local memory of a request could not be read. Earlier requests are not at fault.
    ///
    /// Earlier requests may be unacknowledged. A NIC may flush them, and this one does.
    pub(crate) fn fail_at(&mut self, serial: u64, status: Status, out: &mut Out<'_>) {
        let earlier = self.queue.drain_before(serial);
        out.completions.extend(earlier.map(|wqe| wqe.completion(Status::Flushed)));
        self.fail(Some(status), out);
    }
}

/// Where requester and responder put completions and counters.
#[derive(Debug)]
pub(crate) struct Out<'a> {
    pub(crate) completions: &'a mut VecDeque<Completion>,
    pub(crate) counters: &'a mut QpCounters,
}
