//! A queue pair whose peer retransmits selectively.

use super::requester::{Out, ResponseOutcome};
use super::{Handled, HeldPacket, Qp, QpState};
use crate::timing::Nanos;
use crate::wire::SelectiveAck;

impl Qp {
    /// The peer keeps packets that arrive behind a gap, and obeys selective acknowledgements:
    /// retransmits selectively from now on, in both directions.
    pub fn retransmit_selectively(&mut self, now: Nanos) {
        self.config.selective = true;
        if self.unreliable.is_some() {
            return;
        }
        if matches!(self.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
            self.responder.keep_early();
        }
        if matches!(self.attr.state, QpState::Rts | QpState::Sqd) {
            self.requester.retransmit_selectively(now);
        }
    }

    /// Handles a selective acknowledgement. It proves that the peer retransmits selectively.
    pub fn handle_selective_ack(&mut self, now: Nanos, ack: &SelectiveAck) -> Handled {
        if self.unreliable.is_some() {
            return Handled::WrongService;
        }
        if !matches!(self.attr.state, QpState::Rts | QpState::Sqd) {
            return Handled::WrongState;
        }
        let params = self.params;
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        let outcome = self.requester.handle_selective_ack(now, ack, &params, &mut out);
        if outcome == ResponseOutcome::Taken {
            self.retransmit_selectively(now);
        }
        self.report_drained();
        self.settle(outcome)
    }

    /// Whether a selective acknowledgement may be sent.
    #[inline]
    pub fn has_selective_ack(&self) -> bool {
        self.responder.has_report()
    }

    /// The selective acknowledgement to send now, if one is due. Without `flush`, one that can wait
    /// stays.
    pub fn poll_selective_ack(&mut self, flush: bool) -> Option<SelectiveAck> {
        match self.attr.state {
            QpState::Rtr | QpState::Rts | QpState::Sqd => self.responder.poll_report(&self.params, flush),
            _ => None,
        }
    }

    /// Whether packets behind a gap are held.
    #[inline]
    pub fn holds_packets(&self) -> bool {
        self.responder.holds_packets()
    }

    /// A packet that arrived behind a gap, if its turn has come. Call it after each packet until
    /// there is none, and give each to [`Qp::handle_run`].
    pub fn poll_held(&mut self) -> Option<HeldPacket> {
        match self.attr.state {
            QpState::Rtr | QpState::Rts | QpState::Sqd => self.responder.take_early(&self.params),
            _ => None,
        }
    }
}
