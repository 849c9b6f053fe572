//! Selective retransmission: only what is lost is sent again.

use super::{Out, Requester, ResponseOutcome};
use crate::qp::completion::{Nak, Status};
use crate::qp::request::Operation;
use crate::qp::scoreboard::{Arrival, News, Scoreboard};
use crate::qp::{Host, Params, Transmit};
use crate::timing::Nanos;
use crate::wire::{Header, Opcode, SelectiveAck, Syndrome};

impl Requester {
    /// The peer keeps packets behind a gap: retransmits selectively from now on.
    pub(crate) fn retransmit_selectively(&mut self, now: Nanos) {
        if self.board.is_some() {
            return;
        }
        let mut board = Scoreboard::new(self.una);
        for wqe in self.queue.started() {
            let (from, to) = (wqe.psn.max(self.una), wqe.end().min(self.sent_top));
            let packets = to.saturating_sub(from);
            if wqe.request.op.fetches() {
                for &(start, end) in &self.fetches.requests {
                    let (start, end) = (start.max(from), end.min(to));
                    board.push(now, end.saturating_sub(start), wqe.packet_cost(), true);
                }
            } else {
                board.push(now, packets, wqe.packet_cost(), false);
            }
        }
        (self.next..self.sent_top).for_each(|psn| board.lose(psn));
        self.next = self.sent_top;
        self.queue.seek(self.next);
        self.fetches.asked = self.fetches.requests.len();
        self.path.outstanding = 0;
        self.rtt.time_again();
        self.board = Some(Box::new(board));
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.board.as_ref().map_or(self.next - self.una, |board| board.in_flight())
    }

    pub(super) fn has_lost(&self) -> bool {
        self.board.as_ref().is_some_and(|board| board.has_lost())
    }

    /// PSNs that may be used before the oldest one is answered: the peer keeps and reports no more.
    pub(super) fn span_left(&self) -> u64 {
        match self.board {
            Some(_) => (self.una + SelectiveAck::SPAN).saturating_sub(self.next),
            None => u64::MAX,
        }
    }

    pub(super) fn is_span_full(&self) -> bool {
        self.span_left() == 0
    }

    pub(super) fn note_on_board(&mut self, now: Nanos, packets: u64, cost: u64, fetches: bool) {
        if let Some(board) = &mut self.board {
            board.push(now, packets, cost, fetches);
        }
    }

    /// An answer that comes sooner is to an earlier copy.
    fn soonest(&self) -> Nanos {
        self.rtt.shortest() / 4 * 3
    }

    /// The READ request that covers this PSN.
    fn fetch_of(&self, psn: u64) -> Option<(u64, u64)> {
        self.fetches.requests.iter().copied().find(|(start, end)| (*start..*end).contains(&psn))
    }

    /// The next lost packet, or a request for lost READ data, if it may leave now.
    pub(super) fn resend(&mut self, now: Nanos, params: &Params, room: u64) -> Option<Transmit> {
        let psn = self.board.as_ref()?.first_lost()?;
        let wqe = *self.queue.find(psn)?;
        let window = self.rate.window(params);
        if self.in_flight() >= window {
            return None;
        }
        if !self.path.takes(wqe.packet_cost(), room) {
            return None;
        }
        let fetch = wqe.request.op.fetches().then(|| self.fetch_of(psn)).flatten();
        let board = self.board.as_mut()?;
        let (transmit, packets) = if let Some((_, end)) = fetch {
            let packets = board.lost_run(psn, end).max(1);
            board.resend(now, psn, packets);
            (wqe.fetch_packet(psn, packets, params), packets)
        } else {
            board.resend(now, psn, 1);
            let last = psn + 1 == wqe.end();
            let ack_req = (last && wqe.request.signaled) || !board.has_lost() || board.in_flight() >= window;
            (wqe.data_packet(psn, ack_req, params), 1)
        };
        self.rtt.time_again_in(psn..psn + packets);
        self.rate.note_sent(now, packets, params);
        self.arm_probe(now);
        Some(transmit)
    }

    /// The probe: the oldest packet leaves again and asks for an answer, which tells what else is
    /// missing.
    pub(super) fn lose_for_probe(&mut self) {
        self.rtt.time_again();
        let una = self.una;
        let fetch = self.fetch_of(una);
        let Some(board) = &mut self.board else { return };
        match fetch {
            Some((_, end)) => {
                let missing = (una..end).take_while(|psn| !board.has_arrived(*psn)).count() as u64;
                (una..una + missing).for_each(|psn| board.lose(psn));
            }
            None => board.lose(una),
        }
    }

    /// The packet polled last has not left; see [`Requester::put_off`].
    pub(super) fn put_off_selectively(&mut self, now: Nanos) -> bool {
        let Some(board) = &mut self.board else { return false };
        let last = board.last();
        if !board.is_last(last) {
            return false;
        }
        self.rtt.forget_from(last);
        if last == self.una {
            self.recovery.last_progress = now;
            self.recovery.probes = 0;
            self.recovery.send_probe = false;
            self.arm_probe(now);
            return true;
        }
        board.lose(last);
        false
    }

    /// Handles a response.
    #[allow(clippy::too_many_arguments)] // the packet, the world, and where results go
    pub(super) fn handle_selectively(
        &mut self,
        now: Nanos,
        (psn, packets): (u64, u64),
        header: &Header,
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> ResponseOutcome {
        if header.opcode != Opcode::Ack {
            return self.place_answer(now, (psn, packets), header, payload_len, params, host, out);
        }
        match header.aeth.syndrome {
            Syndrome::Ack(_) => {
                self.note_acknowledged(now, psn + 1, out);
                self.settle_arrivals(now, params, out);
                ResponseOutcome::Taken
            }
            Syndrome::RnrNak(code) => {
                if psn < self.una || self.recovery.rnr_until.is_some() {
                    return ResponseOutcome::Taken;
                }
                out.counters.rcvd_rnr_err += 1;
                self.note_acknowledged(now, psn, out);
                self.settle_arrivals(now, params, out);
                if self.una == psn {
                    if !self.recovery.wait_for_receive(now, code, params) {
                        return ResponseOutcome::Failed(Status::RnrRetryExceeded);
                    }
                    self.lose(psn);
                } else {
                    self.ask_again(now, psn);
                }
                ResponseOutcome::Taken
            }
            Syndrome::Nak(code) => {
                let Some(nak) = Nak::from_code(code) else { return ResponseOutcome::Unsolicited };
                self.refused(now, psn, nak, params, out)
            }
            Syndrome::Reserved(_) => ResponseOutcome::Unsolicited,
        }
    }

    fn lose(&mut self, psn: u64) {
        if let Some(board) = &mut self.board {
            board.lose(psn);
        }
    }

    /// A packet was refused while data of an earlier READ is missing, which goes first: the refusal
    /// is to come again. Once, or each answer to a copy would cause another.
    fn ask_again(&mut self, now: Nanos, psn: u64) {
        if self.recovery.rewound.is_none_or(|(at, _)| at != self.una) {
            self.recovery.rewound = Some((self.una, now));
            self.lose(psn);
        }
    }

    fn refused(
        &mut self,
        now: Nanos,
        psn: u64,
        nak: Nak,
        params: &Params,
        out: &mut Out<'_>,
    ) -> ResponseOutcome {
        if psn < self.una {
            return ResponseOutcome::Taken;
        }
        let before = self.una;
        self.note_acknowledged(now, psn, out);
        self.settle_arrivals(now, params, out);
        // A sequence error: the peer does not retransmit selectively yet.
        let Some(status) = nak.refusal() else { return self.send_again_from_una(now, before, params, out) };
        if self.una < psn {
            self.ask_again(now, psn);
            return ResponseOutcome::Taken;
        }
        ResponseOutcome::Failed(status)
    }

    /// The peer has accepted everything before `end` and has sent the answers: missing ones are
    /// lost.
    fn note_acknowledged(&mut self, now: Nanos, end: u64, out: &mut Out<'_>) {
        let order = self.board.as_ref().and_then(|board| board.order(end - 1));
        self.note_accepted(now, end);
        if let (Some(board), Some(order)) = (&mut self.board, order) {
            let found = board.detect_answers(end - 1, order);
            self.note_lost_answers(now, found, out);
        }
    }

    fn note_lost_answers(&mut self, now: Nanos, found: u64, out: &mut Out<'_>) {
        if found > 0 {
            out.counters.implied_nak_seq_err += 1;
            self.loss(now, found);
        }
    }

    /// The peer has accepted everything before `end`: SENDs and WRITEs need no more.
    fn note_accepted(&mut self, now: Nanos, end: u64) {
        let soonest = self.soonest();
        let Some(board) = &mut self.board else { return };
        board.accept(end);
        for psn in self.una..end.min(self.sent_top) {
            if board.fetches(psn) {
                board.hear(psn);
            } else {
                board.arrive(now, psn, soonest);
            }
        }
    }

    /// Handles a selective acknowledgement.
    pub(crate) fn handle_selective_ack(
        &mut self,
        now: Nanos,
        ack: &SelectiveAck,
        params: &Params,
        out: &mut Out<'_>,
    ) -> ResponseOutcome {
        let missing = ack.missing.extend(self.una);
        if missing > self.sent_top {
            return ResponseOutcome::Unsolicited;
        }
        self.retransmit_selectively(now);
        self.note_accepted(now, missing);
        let soonest = self.soonest();
        let Some(board) = &mut self.board else { return ResponseOutcome::Unsolicited };
        for psn in ack.arrived().map(|ahead| missing + ahead).take_while(|psn| *psn < self.sent_top) {
            if board.fetches(psn) {
                board.hear(psn);
            } else {
                board.arrive(now, psn, soonest);
            }
        }
        // The responder may discard what it has reported, as where no receive is posted.
        board.distrust(missing);
        let mut lost = 0;
        for &(start, end) in &self.fetches.requests {
            if start >= missing && !ack.has(start - missing) && board.is_overdue(start, soonest) {
                for psn in start..end {
                    if !board.has_arrived(psn) {
                        board.miss(psn);
                    }
                }
                // The request alone is lost.
                lost += 1;
            }
        }
        if lost > 0 {
            self.loss(now, lost);
        }
        self.settle_arrivals(now, params, out);
        ResponseOutcome::Taken
    }

    #[allow(clippy::too_many_arguments)] // the packet, the world, and where results go
    fn place_answer(
        &mut self,
        now: Nanos,
        (psn, packets): (u64, u64),
        header: &Header,
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
        out: &mut Out<'_>,
    ) -> ResponseOutcome {
        if psn < self.una {
            return ResponseOutcome::Taken;
        }
        let Some(wqe) = self.queue.find(psn).copied() else { return ResponseOutcome::Unsolicited };
        let soonest = self.soonest();
        let Some(board) = &self.board else { return ResponseOutcome::Unsolicited };
        let (end, mtu) = (psn + packets, u64::from(params.mtu));
        if board.have_arrived(psn, end) {
            return ResponseOutcome::Taken;
        }
        let is_whole = board.have_arrived(wqe.psn, psn) && board.have_arrived(end, wqe.end());
        let placed = match (wqe.request.op, header.opcode) {
            (Operation::Read(_), Opcode::AtomicAck) => return ResponseOutcome::Unsolicited,
            (Operation::Read(_), _) => {
                let offset = (psn - wqe.psn) * mtu;
                let want = (u64::from(wqe.request.len) - offset).min(packets * mtu);
                if payload_len as u64 != want {
                    return ResponseOutcome::Unsolicited;
                }
                host.place_response(wqe.serial, offset, payload_len, is_whole)
            }
            // The standard answers both as a READ of no bytes.
            (Operation::AtomicWrite(_) | Operation::Flush { .. }, Opcode::ReadResponseOnly)
                if payload_len == 0 =>
            {
                Ok(())
            }
            (op, Opcode::AtomicAck) if op.is_atomic() => host.place_atomic(wqe.serial, header.original),
            _ => return ResponseOutcome::Unsolicited,
        };
        if placed.is_err() {
            let is_front = self.queue.front().is_some_and(|front| front.serial == wqe.serial);
            // Earlier requests are not at fault: this one fails when it is the oldest.
            return if is_front {
                ResponseOutcome::Failed(Status::LocalProtection)
            } else {
                ResponseOutcome::Taken
            };
        }
        self.note_accepted(now, psn);
        let Some(board) = &mut self.board else { return ResponseOutcome::Unsolicited };
        let mut newest = None;
        for psn in psn..end {
            if let Arrival::Of(order) = board.arrive(now, psn, soonest) {
                newest = Some((psn, order));
            }
        }
        if let Some((psn, order)) = newest {
            let found = board.detect_answers((psn + 1).saturating_sub(board.tolerance()), order);
            self.note_lost_answers(now, found, out);
        }
        self.settle_arrivals(now, params, out);
        ResponseOutcome::Taken
    }

    /// Retires what has arrived in order, and finds what is lost.
    fn settle_arrivals(&mut self, now: Nanos, params: &Params, out: &mut Out<'_>) {
        while !self.queue.is_drained() && self.board.as_mut().is_some_and(|board| board.pop()) {
            self.una += 1;
            if let Some(front) = self.queue.front().filter(|front| front.end() == self.una) {
                self.fetches.open -= usize::from(front.request.op.fetches());
                self.retire(out);
            }
        }
        while self.fetches.requests.front().is_some_and(|&(_, end)| end <= self.una) {
            self.fetches.requests.pop_front();
            self.fetches.asked = self.fetches.asked.saturating_sub(1);
        }
        let soonest = self.soonest();
        let Some(board) = &mut self.board else { return };
        let News { arrived, sent, spurious, resent } = board.take_news();
        out.counters.retransmitted += resent;
        let found = board.detect(soonest);
        if spurious {
            self.rate.control.on_spurious();
        }
        if arrived > 0 {
            self.note_progress(now, arrived, sent, params);
        }
        if found > 0 {
            self.loss(now, found);
        }
        if self.recovery.silent_before.take_if(|end| *end <= self.una).is_some() {
            self.rate.control.on_spurious();
        }
    }
}
