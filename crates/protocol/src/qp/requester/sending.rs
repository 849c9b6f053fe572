//! The next packet: which one it is, and whether it may leave now.

use super::Requester;
use crate::qp::wqe::Wqe;
use crate::qp::{Params, Transmit};
use crate::timing::Nanos;

/// Largest READ request in bytes; longer READs are split. The response to a request cannot be
/// slowed down, so its size keeps the requester's socket buffer from overflowing.
const READ_CHUNK: u64 = 128 << 10;

impl Requester {
    /// The next packet, if one may leave now. `room` is what the path still takes, in bytes.
    pub(crate) fn poll_transmit(
        &mut self,
        now: Nanos,
        params: &Params,
        may_start: bool,
        room: u64,
    ) -> Option<Transmit> {
        self.path.is_limited = false;
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
        if self.rate.pace.is_set(now) && self.has_unsent() {
            self.rate.pace.hold_back();
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
        let wqe = self.queue.current()?;
        let (cost, end_of_wqe) = (wqe.packet_cost(), wqe.end());
        let in_flight = self.in_flight();
        let window = self.rate.window(params);
        if in_flight >= window || self.is_span_full() {
            return None;
        }
        if !self.path.takes(cost, room) {
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
                || (self.next + 1).is_multiple_of(self.path.ack_every(window))
                || (full && !(self.path.asks_rarely && self.asked > self.una));
            let transmit = wqe.data_packet(self.next, ack_req, params);
            self.note_on_board(now, 1, cost, false);
            self.note_sent(now, (cost, end_of_wqe), 1, ack_req, params);
            transmit
        };
        Some(transmit)
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.next < self.top || self.queue.waiting().is_some() || self.has_lost()
    }

    /// How many more packets like the one just polled may leave: full ones from the middle of the
    /// same message, without an ACK request. Their PSNs and payload are consecutive. They count as
    /// sent.
    pub(crate) fn poll_repeat(&mut self, now: Nanos, params: &Params, room: u64, most: u64) -> u64 {
        let Some(wqe) = self.queue.current().copied().filter(|_| self.next < self.top) else { return 0 };
        if wqe.request.op.fetches()
            || self.next == wqe.psn
            || wqe.split
            || self.recovery.rnr_until.is_some()
            || self.recovery.send_probe
            || self.rate.pace.is_set(now)
            || self.has_lost()
            || self.board.as_ref().is_some_and(|board| board.last() + 1 != self.next)
        {
            return 0;
        }
        let to_last = wqe.end() - 1 - self.next;
        let window = self.rate.window(params);
        let every = self.path.ack_every(window);
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
        let Some(Wqe { request, .. }) = self.queue.waiting().filter(|_| may_start) else { return false };
        let fetches = request.op.fetches();
        if (request.fence && self.fetches.open > 0) || request.op.local().is_some() {
            return false;
        }
        self.top = self.queue.start(self.top, params.mtu, self.path.splits_writes);
        self.fetches.open += usize::from(fetches);
        true
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
            if !self.rate.pace.has_held_back() && now >= self.recovery.last_progress + self.rtt.shortest() {
                self.rate.control.on_restart(now);
            }
            // The retransmission timer runs from the first unacknowledged packet. A retransmission
            // must not restart it, or a dead peer would never time out.
            self.recovery.last_progress = now;
            self.recovery.probes = 0;
        }
        if answered && self.next >= self.sent_top {
            self.rtt.time(self.next, now);
        }
        self.rate.note_sent(now, packets, params);
        self.path.outstanding += packets * cost;
        self.next += packets;
        if answered {
            self.asked = self.next;
        }
        self.sent_top = self.sent_top.max(self.next);
        if self.next == end {
            self.queue.advance();
        }
        self.arm_probe(now);
    }
}
