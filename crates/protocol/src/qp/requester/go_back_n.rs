//! Go-back-N: everything from the first lost packet on is sent again.

use super::{Out, Requester, ResponseOutcome};
use crate::qp::completion::{Nak, Status};
use crate::qp::request::Operation;
use crate::qp::{Host, Params};
use crate::timing::Nanos;
use crate::wire::{Header, Opcode};

impl Requester {
    pub(super) fn handle_nak(
        &mut self,
        now: Nanos,
        psn: u64,
        nak: Option<Nak>,
        params: &Params,
        out: &mut Out<'_>,
    ) -> ResponseOutcome {
        let Some(nak) = nak else { return ResponseOutcome::Unsolicited };
        if psn < self.una {
            return ResponseOutcome::Taken;
        }
        let before = self.una;
        self.advance(now, psn, params, out);
        let Some(status) = nak.refusal() else { return self.send_again_from_una(now, before, params, out) };
        if self.una < psn {
            // The NAK is for a later request, but data of an earlier one is missing: request that
            // first.
            self.data_lost(now, out);
            return ResponseOutcome::Taken;
        }
        ResponseOutcome::Failed(status)
    }

    /// Handles a NAK for a PSN sequence error: the peer has dropped everything from the gap on.
    /// `before` is the first unacknowledged packet before that NAK.
    pub(super) fn send_again_from_una(
        &mut self,
        now: Nanos,
        before: u64,
        params: &Params,
        out: &mut Out<'_>,
    ) -> ResponseOutcome {
        out.counters.rcvd_seq_err += 1;
        let repeated = self
            .recovery
            .rewound
            .is_some_and(|(at, when)| at == self.una && now.saturating_sub(when) < self.rtt.smoothed() / 2);
        if repeated || self.recovery.rnr_until.is_some() {
            return ResponseOutcome::Taken; // everything will be sent again anyway
        }
        if self.una == before && self.recovery.stalled(now, params) && !self.recovery.spend_retry() {
            return ResponseOutcome::Failed(Status::RetryExceeded);
        }
        self.loss(now, 1);
        self.recovery.last_progress = now;
        self.recovery.rewound = Some((self.una, now));
        self.rewind();
        ResponseOutcome::Taken
    }

    #[allow(clippy::too_many_arguments)] // the packet, the world, and where results go
    pub(super) fn handle_data(
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
        self.advance(now, psn, params, out);
        if self.una < psn {
            self.data_lost(now, out);
            return ResponseOutcome::Taken;
        }
        let Some(wqe) = self.queue.front().copied() else {
            return ResponseOutcome::Unsolicited;
        };
        let placed = match (wqe.request.op, header.opcode) {
            (Operation::Read(_), Opcode::AtomicAck) => return ResponseOutcome::Unsolicited,
            (Operation::Read(_), _) => {
                let offset = (psn - wqe.psn) * u64::from(params.mtu);
                let want = (u64::from(wqe.request.len) - offset).min(packets * u64::from(params.mtu));
                if u64::try_from(payload_len) != Ok(want) {
                    return ResponseOutcome::Unsolicited;
                }
                host.place_response(wqe.serial, offset, payload_len, psn + packets == wqe.end())
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
            return ResponseOutcome::Failed(Status::LocalProtection);
        }
        self.step(psn + packets);
        while self.fetches.requests.front().is_some_and(|&(_, end)| end <= self.una) {
            self.fetches.requests.pop_front();
            self.fetches.asked = self.fetches.asked.saturating_sub(1);
        }
        if self.una == wqe.end() {
            self.fetches.open -= 1;
            self.retire(out);
        }
        self.resync();
        self.note_progress(now, packets, None, params);
        ResponseOutcome::Taken
    }

    /// A response overtook data that should have come before it: that data is lost. Request it
    /// once.
    pub(super) fn data_lost(&mut self, now: Nanos, out: &mut Out<'_>) {
        if self.recovery.rewound.is_some_and(|(at, _)| at == self.una) {
            return;
        }
        out.counters.implied_nak_seq_err += 1;
        self.loss(now, 1);
        self.recovery.rewound = Some((self.una, now));
        self.rewind();
    }

    /// An ACK may overtake a rewind.
    pub(super) fn resync(&mut self) {
        if self.next < self.una {
            // Packets that were not retransmitted have arrived: nothing was lost, the peer was only
            // descheduled.
            self.rate.control.on_spurious();
            self.next = self.una;
            self.queue.seek(self.next);
        }
    }
}
