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
mod selective;

use std::collections::VecDeque;

use super::completion::{Completion, Nak, Status};
use super::pace::Pace;
use super::recovery::Recovery;
use super::request::{LocalWork, Operation, PostError, SendRequest};
use super::rtt::Rtt;
use super::scoreboard::Scoreboard;
use super::wqe::Wqe;
use super::{Host, Params, QpCounters, Transmit};
use crate::congestion::{Ack, Aimd, CongestionControl, Loss};
use crate::timing::{self, Nanos};
use crate::wire::{Header, Opcode, Psn, Syndrome};

/// The PSN window: less than half of the PSN space, or old and new PSNs would be ambiguous.
const MAX_OUTSTANDING: u64 = (1 << 23) - 1;
/// Largest READ request in bytes; longer READs are split. The response to a request cannot be
/// slowed down, so its size keeps the requester's socket buffer from overflowing.
const READ_CHUNK: u64 = 128 << 10;
/// Packets of a long message between two ACK requests, at most.
const ACK_EVERY: u64 = 30;

/// Probes without an answer before the peer counts as silent. The second probe of go-back-N sends
/// everything again, so it comes with a small window.
const PROBES: u32 = 1;
/// The same with selective retransmission, where a probe is one packet: three in a row are lost by
/// persistent congestion (RFC 9002, section 7.6), not by chance.
const PROBES_SELECTIVE: u32 = 2;

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
    sq: VecDeque<Wqe>,
    depth: usize,
    started: usize,
    cursor: usize,
    next_serial: u64,
    una: u64,
    next: u64,
    sent_top: u64,
    top: u64,
    fetches: Fetches,
    /// Bytes that may occupy the receiver's socket buffer because of this queue pair.
    outstanding: u64,
    /// The last packet was held back only for lack of room on the path.
    path_limited: bool,
    /// With a full window, keep at most one ACK request in flight.
    asks_rarely: bool,
    /// Short WRITEs are sent as WRITEs of one packet each.
    splits_writes: bool,
    /// One past the last packet with an ACK request.
    asked: u64,
    control: Box<dyn CongestionControl>,
    pace: Pace,
    rtt: Rtt,
    timed: Option<Timed>,
    recovery: Recovery,
    /// With a peer that keeps packets behind a gap: what became of each packet.
    board: Option<Box<Scoreboard>>,
    /// Packets sent again since they were counted.
    resent: u64,
}

impl Requester {
    pub(crate) fn new(depth: usize) -> Self {
        Self {
            sq: VecDeque::new(),
            depth,
            started: 0,
            cursor: 0,
            next_serial: 0,
            una: Psn::SPACE,
            next: Psn::SPACE,
            sent_top: Psn::SPACE,
            top: Psn::SPACE,
            fetches: Fetches::default(),
            outstanding: 0,
            path_limited: false,
            asks_rarely: false,
            splits_writes: false,
            asked: Psn::SPACE,
            control: Box::new(Aimd::default()),
            pace: Pace::default(),
            rtt: Rtt::new(),
            timed: None,
            recovery: Recovery::default(),
            board: None,
            resent: 0,
        }
    }

    /// Sets the PSNs and parameters of the connection.
    pub(crate) fn connect(&mut self, sq_psn: Psn, params: &Params) {
        let first = Psn::SPACE + u64::from(sq_psn.get());
        (self.una, self.next, self.sent_top, self.top) = (first, first, first, first);
        self.asked = first;
        self.control.begin(params.mtu);
        self.pace = Pace::default();
        self.recovery.refill_retries(params);
    }

    /// Posts a request. The caller has checked the state.
    pub(crate) fn post(&mut self, request: SendRequest) -> Result<u64, PostError> {
        if self.sq.len() >= self.depth {
            return Err(PostError::QueueFull(self.depth));
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        self.sq.push_back(Wqe { serial, request, psn: 0, packets: 0, split: false });
        Ok(serial)
    }

    /// Incomplete requests.
    pub(crate) fn posted(&self) -> usize {
        self.sq.len()
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.board.as_ref().map_or(self.outstanding, |board| board.bytes())
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
        self.splits_writes = split;
    }

    pub(crate) const fn ask_rarely(&mut self, rarely: bool) {
        self.asks_rarely = rarely;
    }

    pub(crate) const fn is_path_limited(&self) -> bool {
        self.path_limited
    }

    /// The serial number of the oldest incomplete request.
    pub(crate) fn oldest_serial(&self) -> u64 {
        self.sq.front().map_or(self.next_serial, |wqe| wqe.serial)
    }

    pub(crate) const fn is_drained(&self) -> bool {
        self.started == 0
    }

    /// The next packet, if one may leave now. `room` is what the path still takes, in bytes.
    pub(crate) fn poll_transmit(
        &mut self,
        now: Nanos,
        params: &Params,
        may_start: bool,
        room: u64,
    ) -> Option<Transmit> {
        self.path_limited = false;
        match self.recovery.rnr_until {
            Some(until) if now < until => return None,
            Some(_) => self.recovery.rnr_until = None,
            None => {}
        }
        if self.recovery.send_probe {
            self.recovery.send_probe = false;
            if let Some(probe) = self.probe(params) {
                return Some(probe);
            }
        }
        if self.pace.is_set(now) && self.has_unsent() {
            self.pace.hold_back();
            return None;
        }
        if self.has_lost() {
            return self.resend(now, params, room);
        }
        if self.next == self.top && !self.start_next(params, may_start) {
            return None;
        }
        // By reference: it may have been posted just now, and copying it would cause a
        // store-forwarding stall.
        let wqe = &self.sq[self.cursor];
        let (cost, end_of_wqe) = (wqe.packet_cost(), wqe.end());
        let in_flight = self.in_flight();
        let window = self.window(params);
        if in_flight >= window || self.is_span_full() {
            return None;
        }
        if cost > room {
            self.path_limited = true;
            return None;
        }
        let transmit = if wqe.request.op.fetches() {
            let end = match self.fetches.requests.get(self.fetches.asked) {
                Some(&(_, end)) => end,
                None if self.fetches.requests.len() >= usize::from(params.max_rd_atomic) => return None,
                None => {
                    let left = room / cost;
                    let fits = (window - in_flight).min(left).max(1);
                    let wanted = (end_of_wqe - self.next).min(READ_CHUNK / u64::from(params.mtu));
                    // Half of the window, and two thirds of what the path takes: the rest is in
                    // flight meanwhile.
                    let enough = (window / 2).min(in_flight.saturating_add(left).saturating_mul(2) / 3);
                    if self.fetches.asked > 0 && fits < wanted.min(enough) {
                        // Room comes back packet by packet. A READ that takes it at once would
                        // fetch a few packets at a time from then on. Responses still to come free
                        // more room and trigger another attempt. (WRITEs may have no ACK request
                        // pending.)
                        return None;
                    }
                    let end = self.next + fits.min(wanted);
                    self.fetches.requests.push_back((self.next, end));
                    end
                }
            };
            self.fetches.asked += 1;
            let packets = end - self.next;
            let transmit = wqe.fetch_packet(self.next, packets, params);
            self.note_on_board(now, packets, cost, true);
            self.note_sent(now, (cost, end_of_wqe), packets, true, params);
            transmit
        } else {
            // An unsignaled request needs no ACK of its own. A later ACK covers it, or a probe
            // requests one.
            let last = self.next + 1 == end_of_wqe;
            let full = in_flight + 1 >= window || 2 * cost > room;
            let ack_req = (last && wqe.request.signaled)
                || (self.next + 1).is_multiple_of(self.ack_every(window))
                || (full && !(self.asks_rarely && self.asked > self.una));
            let transmit = wqe.data_packet(self.next, ack_req, params);
            self.note_on_board(now, 1, cost, false);
            self.note_sent(now, (cost, end_of_wqe), 1, ack_req, params);
            transmit
        };
        Some(transmit)
    }

    /// Whether anything is left to send, even if it is blocked.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.has_unsent() || self.recovery.send_probe || self.recovery.rnr_until.is_some()
    }

    fn has_unsent(&self) -> bool {
        self.next < self.top || self.started < self.sq.len() || self.has_lost()
    }

    /// How many more packets like the one just polled may leave: full ones from the middle of the
    /// same message, without an ACK request. Their PSNs and payload are consecutive. They count as
    /// sent.
    pub(crate) fn poll_repeat(&mut self, now: Nanos, params: &Params, room: u64, most: u64) -> u64 {
        let Some(wqe) = self.sq.get(self.cursor).copied().filter(|_| self.next < self.top) else { return 0 };
        if wqe.request.op.fetches()
            || self.next == wqe.psn
            || wqe.split
            || self.recovery.rnr_until.is_some()
            || self.recovery.send_probe
            || self.pace.is_set(now)
            || self.has_lost()
            || self.board.as_ref().is_some_and(|board| board.last() + 1 != self.next)
        {
            return 0;
        }
        let to_last = wqe.end() - 1 - self.next;
        let window = self.window(params);
        let every = self.ack_every(window);
        let to_ack = every - 1 - self.next % every;
        let in_window = window.saturating_sub(self.in_flight() + 1);
        let in_room = (room / wqe.packet_cost()).saturating_sub(1);
        let count = most.min(to_last).min(to_ack).min(in_window).min(in_room).min(self.span_left());
        debug_assert!(u64::from(params.mtu) * (self.next - wqe.psn + count) < u64::from(wqe.request.len));
        if count > 0 {
            self.note_on_board(now, count, wqe.packet_cost(), false);
            self.note_sent(now, (wqe.packet_cost(), wqe.end()), count, false, params);
        }
        count
    }

    /// Assigns PSNs to the next waiting request.
    fn start_next(&mut self, params: &Params, may_start: bool) -> bool {
        if !may_start || self.started == self.sq.len() {
            return false;
        }
        let request = &self.sq[self.started].request;
        let fetches = request.op.fetches();
        if (request.fence && self.fetches.open > 0) || request.op.local().is_some() {
            return false;
        }
        let wqe = &mut self.sq[self.started];
        wqe.psn = self.top;
        wqe.packets = if fetches && !matches!(wqe.request.op, Operation::Read(_)) {
            1
        } else {
            u64::from(wqe.request.len).div_ceil(u64::from(params.mtu)).max(1)
        };
        wqe.split = self.splits_writes && wqe.is_short_write();
        self.top += wqe.packets;
        self.cursor = self.started;
        self.started += 1;
        self.fetches.open += usize::from(fetches);
        true
    }

    /// The next request, if its work is local and its turn has come; [`Self::handle_local`] ends
    /// it.
    pub(crate) fn poll_local(&self) -> Option<(u64, LocalWork)> {
        let wqe = self.sq.get(self.started).filter(|_| self.next == self.top)?;
        let waits = self.recovery.rnr_until.is_some() || (wqe.request.fence && self.fetches.open > 0);
        wqe.request.op.local().filter(|_| !waits).map(|work| (wqe.serial, *work))
    }

    /// The request from [`Self::poll_local`] was carried out. It takes no PSN, and completes in
    /// order.
    pub(crate) fn handle_local(&mut self, out: &mut Out<'_>) {
        let wqe = &mut self.sq[self.started];
        (wqe.psn, wqe.packets) = (self.top, 0);
        self.started += 1;
        self.cursor = self.started;
        self.retire_local(out);
    }

    /// Completes the local requests at the front.
    fn retire_local(&mut self, out: &mut Out<'_>) {
        while self.started > 0 && self.sq[0].packets == 0 {
            self.pop(out);
        }
    }

    /// Accounts for packets that left, of a request with this cost per packet and this end.
    fn note_sent(
        &mut self,
        now: Nanos,
        (cost, end): (u64, u64),
        packets: u64,
        answered: bool,
        params: &Params,
    ) {
        if self.una == self.sent_top {
            if !self.pace.has_held_back() && now >= self.recovery.last_progress + self.rtt.shortest() {
                self.control.on_restart(now);
            }
            // The retransmission timer runs from the first unacknowledged packet. A retransmission
            // must not restart it, or a dead peer would never time out.
            self.recovery.last_progress = now;
            self.recovery.probes = 0;
        }
        if answered && self.timed.is_none() && self.next >= self.sent_top {
            self.timed = Some(Timed { psn: self.next, sent: now, again: false });
        }
        self.note_paced(now, packets, params);
        self.outstanding += packets * cost;
        self.next += packets;
        if answered {
            self.asked = self.next;
        }
        self.sent_top = self.sent_top.max(self.next);
        if self.next == end {
            self.cursor += 1;
            while self.cursor < self.started && self.sq[self.cursor].packets == 0 {
                self.cursor += 1;
            }
        }
        self.arm_probe(now);
    }

    /// A transport timeout shorter than the probe makes the probe pointless. It is armed all the
    /// same, and the timeout fires first.
    fn arm_probe(&mut self, now: Nanos) {
        self.recovery.probe_at =
            (self.una < self.next).then(|| now + self.rtt.probe_delay(self.recovery.probes));
    }

    /// Requests an ACK for the last packet sent (tail-loss probe).
    ///
    /// The first probe repeats the last packet. A later one, or one that awaits READ data,
    /// retransmits everything unacknowledged. Neither counts as a retry.
    fn probe(&mut self, params: &Params) -> Option<Transmit> {
        if self.una == self.next {
            return None;
        }
        if self.board.is_some() {
            self.lose_for_probe();
            return None;
        }
        self.time_again();
        let last = self.next - 1;
        let wqe = *self.sq.iter().take(self.started).find(|w| (w.psn..w.end()).contains(&last))?;
        if self.recovery.probes > 1 || wqe.request.op.fetches() || self.fetches.open > 0 {
            self.rewind();
            return None;
        }
        Some(wqe.data_packet(last, true, params))
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
        while self.una < upto && self.started > 0 {
            let (fetches, end) = (self.sq[0].request.op.fetches(), self.sq[0].end());
            if fetches {
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
        self.outstanding -= (counted * self.sq[0].packet_cost()).min(self.outstanding);
        self.una = to;
    }

    fn retire(&mut self, out: &mut Out<'_>) {
        self.pop(out);
        self.retire_local(out);
    }

    fn pop(&mut self, out: &mut Out<'_>) {
        if let Some(wqe) = self.sq.pop_front() {
            self.started -= 1;
            self.cursor = self.cursor.saturating_sub(1);
            if wqe.request.signaled {
                out.completions.push_back(wqe.completion(Status::Success));
            }
        }
    }

    fn locate(&self, psn: u64) -> usize {
        self.sq.iter().take(self.started).position(|w| psn < w.end()).unwrap_or(self.started)
    }

    /// Packets were acknowledged, one of which is known to have left once, at `sent`.
    fn note_progress(&mut self, now: Nanos, packets: u64, sent: Option<Nanos>, params: &Params) {
        let mut round_trip = sent.map(|sent| now.saturating_sub(sent));
        if let Some(first) = round_trip.filter(|_| self.rtt.shortest() == 0) {
            // A loss in the first window waits for the first probe, which would come late.
            self.rtt.sample(first);
        }
        if let Some(Timed { sent, again, .. }) = self.timed.take_if(|timed| {
            timed.psn < self.una || self.board.as_ref().is_some_and(|board| board.has_arrived(timed.psn))
        }) {
            let took = now.saturating_sub(sent);
            if again {
                self.rtt.at_most(took);
            } else {
                self.rtt.sample(took);
                round_trip = round_trip.or(Some(took));
            }
        }
        let is_probed = self.recovery.probes > 0;
        let was_probed = std::mem::replace(&mut self.recovery.was_probed, is_probed);
        if self.recovery.probes > 1 || (is_probed && was_probed) {
            // The round trip took longer than estimated; one probe alone may have repaired a loss.
            // Sample it, whichever copy was answered: the next probe may wait as long. Otherwise a
            // peer that becomes slow would be probed again and again.
            self.rtt.sample(now.saturating_sub(self.recovery.last_progress));
        }
        let in_use = 2 * (self.in_flight() + packets) >= self.window(params);
        self.control.on_ack(now, Ack { bytes: packets * u64::from(params.mtu), round_trip, in_use });
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
        if is_new && self.control.on_loss(now, Loss { packets, resends_all: self.board.is_none() }) {
            self.recovery.recovery_point = self.sent_top;
        }
    }

    /// The path to or from the peer is congested: a notification, or a marked response, arrived.
    pub(crate) fn handle_congestion(&mut self, now: Nanos) {
        self.control.on_mark(now);
    }

    pub(crate) fn set_control(&mut self, control: Box<dyn CongestionControl>) {
        self.control = control;
    }

    /// Packets that may be in flight.
    fn window(&self, params: &Params) -> u64 {
        (self.control.window() / u64::from(params.mtu)).clamp(1, MAX_OUTSTANDING)
    }

    /// Packets of a long message between two ACK requests: a small window asks several times, so
    /// that it does not leave in one burst.
    const fn ack_every(&self, window: u64) -> u64 {
        let quarter = window / 4;
        if self.asks_rarely || quarter > ACK_EVERY {
            ACK_EVERY
        } else if quarter == 0 {
            1
        } else {
            quarter
        }
    }

    /// So many packets leave: the next ones wait as long as congestion control says.
    fn note_paced(&mut self, now: Nanos, packets: u64, params: &Params) {
        let bytes = packets * u64::from(params.mtu);
        self.control.on_sent(now, bytes);
        self.pace.note_sent(now, self.control.gap(now, bytes));
    }

    /// Retransmits everything unacknowledged.
    fn rewind(&mut self) {
        self.time_again();
        if let Some(board) = &mut self.board {
            board.lose_all();
            return;
        }
        self.next = self.una;
        self.asked = self.una;
        self.cursor = self.locate(self.next);
        self.outstanding = 0;
        self.fetches.asked = 0;
    }

    /// The packet under RTT measurement is retransmitted: the answer may be to either copy.
    fn time_again(&mut self) {
        if let Some(timed) = &mut self.timed {
            timed.again = true;
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self, params: &Params) -> Option<Nanos> {
        if self.recovery.rnr_until.is_some() {
            return self.recovery.rnr_until;
        }
        let pace = self.pace.deadline();
        if self.una == self.next {
            return pace;
        }
        [pace, self.recovery.probe_at, self.transport_deadline(params)].into_iter().flatten().min()
    }

    fn transport_deadline(&self, params: &Params) -> Option<Nanos> {
        Some(self.recovery.last_progress + timing::ack_timeout(params.timeout)?)
    }

    /// Handles a deadline. Fails when the retries are used up.
    pub(crate) fn handle_timeout(
        &mut self,
        now: Nanos,
        params: &Params,
        out: &mut Out<'_>,
    ) -> ResponseOutcome {
        self.pace.handle_timeout(now);
        if self.recovery.rnr_until.is_some() || self.una == self.next {
            return ResponseOutcome::Taken; // poll_transmit looks at the RNR timer itself
        }
        if self.transport_deadline(params).is_some_and(|at| at <= now) {
            out.counters.local_ack_timeout_err += 1;
            if !self.recovery.spend_retry() {
                return ResponseOutcome::Failed(Status::RetryExceeded);
            }
            self.control.on_silence(now);
            self.recovery.recovery_point = self.sent_top;
            self.recovery.last_progress = now;
            self.recovery.rewound = None;
            self.rewind();
        } else if self.recovery.probe_at.is_some_and(|at| at <= now) {
            out.counters.probes += 1;
            self.recovery.probes += 1;
            let max_probes = if self.board.is_some() { PROBES_SELECTIVE } else { PROBES };
            if self.recovery.probes > max_probes && self.una >= self.recovery.recovery_point {
                // Either much is lost, or the peer is descheduled and everything still sits in its
                // buffer. Retransmitting all of it would overflow that buffer. Probe with a small
                // window; an ACK restores it.
                self.control.on_silence(now);
                self.recovery.recovery_point = self.sent_top;
                self.recovery.silent_before = Some(self.sent_top);
            }
            self.recovery.send_probe = true;
            self.arm_probe(now);
        }
        ResponseOutcome::Taken
    }

    /// The packet polled last has not left. If nothing else is unacknowledged, restart all timers:
    /// the delay is local. Otherwise treat it as not polled, so that the retransmission timer still
    /// covers the packets that left, and return false.
    pub(crate) fn put_off(&mut self, now: Nanos) -> bool {
        if self.board.is_some() {
            return self.put_off_selectively(now);
        }
        let Some(last) = self.next.checked_sub(1).filter(|last| *last >= self.una) else { return false };
        self.timed.take_if(|timed| timed.psn >= last);
        if last == self.una {
            self.recovery.last_progress = now;
            self.recovery.probes = 0;
            self.recovery.send_probe = false;
            self.arm_probe(now);
            return true;
        }
        self.next = last;
        self.asked = self.una;
        self.cursor = self.locate(last);
        let cost = self.sq.get(self.cursor).map_or(0, Wqe::packet_cost);
        self.outstanding = self.outstanding.saturating_sub(cost);
        false
    }

    /// Ends every request: the front one with `status` if it was started, the others as flushed.
    pub(crate) fn fail(&mut self, status: Option<Status>, out: &mut Out<'_>) {
        let mut status = status;
        while let Some(wqe) = self.sq.pop_front() {
            out.completions.push_back(wqe.completion(status.take().unwrap_or(Status::Flushed)));
        }
        self.started = 0;
        self.cursor = 0;
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
        while self.sq.front().is_some_and(|w| w.serial != serial) {
            if let Some(wqe) = self.sq.pop_front() {
                out.completions.push_back(wqe.completion(Status::Flushed));
            }
        }
        self.fail(Some(status), out);
    }
}

/// A packet whose ACK is timed, to measure the round trip.
#[derive(Clone, Copy, Debug)]
struct Timed {
    psn: u64,
    /// When it was first sent.
    sent: Nanos,
    /// It was retransmitted since, or may have been.
    again: bool,
}

/// Where requester and responder put completions and counters.
#[derive(Debug)]
pub(crate) struct Out<'a> {
    pub(crate) completions: &'a mut VecDeque<Completion>,
    pub(crate) counters: &'a mut QpCounters,
}
