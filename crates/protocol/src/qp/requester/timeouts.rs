//! Timeouts: probes, ACK timeouts, and packets that could not leave.

use super::{Out, Requester, ResponseOutcome};
use crate::qp::completion::Status;
use crate::qp::wqe::Wqe;
use crate::qp::{Params, Transmit};
use crate::timing::{self, Nanos};

/// Probes without an answer before the peer counts as silent. The second probe of go-back-N sends
/// everything again, so it comes with a small window.
const PROBES: u32 = 1;
/// The same with selective retransmission, where a probe is one packet: three in a row are lost by
/// persistent congestion (RFC 9002, section 7.6), not by chance.
const PROBES_SELECTIVE: u32 = 2;

impl Requester {
    /// A transport timeout shorter than the probe makes the probe pointless. It is armed all the
    /// same, and the timeout fires first.
    pub(super) fn arm_probe(&mut self, now: Nanos) {
        self.recovery.probe_at =
            (self.una < self.next).then(|| now + self.rtt.probe_delay(self.recovery.probes));
    }

    /// Requests an ACK for the last packet sent (tail-loss probe).
    ///
    /// The first probe repeats the last packet. A later one, or one that awaits READ data,
    /// retransmits everything unacknowledged. Neither counts as a retry.
    pub(super) fn probe(&mut self, params: &Params) -> Option<Transmit> {
        if self.una == self.next {
            return None;
        }
        if self.board.is_some() {
            self.lose_for_probe();
            return None;
        }
        self.rtt.time_again();
        let last = self.next - 1;
        let wqe = *self.queue.started().find(|w| (w.psn..w.end()).contains(&last))?;
        if self.recovery.probes > 1 || wqe.request.op.fetches() || self.fetches.open > 0 {
            self.rewind();
            return None;
        }
        Some(wqe.data_packet(last, true, params))
    }

    /// When [`Self::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self, params: &Params) -> Option<Nanos> {
        if self.recovery.rnr_until.is_some() {
            return self.recovery.rnr_until;
        }
        let pace = self.rate.pace.deadline();
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
        self.rate.pace.handle_timeout(now);
        if self.recovery.rnr_until.is_some() || self.una == self.next {
            return ResponseOutcome::Taken; // poll_transmit looks at the RNR timer itself
        }
        if self.transport_deadline(params).is_some_and(|at| at <= now) {
            out.counters.local_ack_timeout_err += 1;
            if !self.recovery.spend_retry() {
                return ResponseOutcome::Failed(Status::RetryExceeded);
            }
            self.rate.control.on_silence(now);
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
                self.rate.control.on_silence(now);
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
        self.rtt.forget_from(last);
        if last == self.una {
            self.recovery.last_progress = now;
            self.recovery.probes = 0;
            self.recovery.send_probe = false;
            self.arm_probe(now);
            return true;
        }
        self.next = last;
        self.asked = self.una;
        self.queue.seek(last);
        self.path.release(self.queue.current().map_or(0, Wqe::packet_cost));
        false
    }
}
