//! Packets behind a gap, with a peer that retransmits selectively.

use super::{Incoming, Responder};
use crate::qp::reassembly::HeldPacket;
use crate::qp::{Host, Params};
use crate::wire::{Header, Opcode, SelectiveAck};

impl Responder {
    /// Keeps a packet that is ahead of the expected one, if there is room for it.
    pub(super) fn handle_early(
        &mut self,
        psn: u64,
        (header, packets): (&Header, u64),
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
    ) {
        let is_placed = self.place_early(psn, (header, packets), payload_len, params, host);
        let Some(early) = &mut self.early else { return };
        if psn + packets > self.expected + SelectiveAck::SPAN {
            return;
        }
        if early.has(psn, packets) {
            if header.ack_req || header.opcode.place().ends() {
                early.ask();
            }
            return;
        }
        let most = packets * u64::from(params.mtu);
        let held = if is_placed || payload_len as u64 > most || !early.has_room(payload_len) {
            None
        } else {
            let mut payload = vec![0; payload_len];
            let copied = host.copy_payload(&mut payload);
            copied.ok().map(|()| payload)
        };
        early.note_arrival(psn, packets, header.ack_req);
        match held {
            _ if is_placed => early.place(psn, packets),
            Some(payload) => {
                let packets = u32::try_from(packets).unwrap_or(1);
                early.hold(psn, HeldPacket { header: *header, packets, payload });
            }
            None => {}
        }
    }

    /// Places payload from the middle of the WRITE that is arriving. Its last packet waits:
    /// programs poll the last byte of a message to see whether it is complete.
    fn place_early(
        &self,
        psn: u64,
        (header, packets): (&Header, u64),
        payload_len: usize,
        params: &Params,
        host: &mut dyn Host,
    ) -> bool {
        let Incoming::Write { rkey, addr, remaining, .. } = self.incoming else { return false };
        if header.opcode != Opcode::WriteMiddle || header.has_xrceth() {
            return false;
        }
        let (mtu, len) = (u64::from(params.mtu), payload_len as u64);
        let skipped = (psn - self.expected).saturating_mul(mtu);
        let is_inside = len == packets * mtu && skipped.saturating_add(len) < remaining;
        let is_known = self.early.as_ref().is_some_and(|early| early.has(psn, packets));
        let in_reach = psn + packets <= self.expected + SelectiveAck::SPAN;
        is_inside
            && in_reach
            && !is_known
            && host.place_remote(rkey, addr.wrapping_add(skipped), payload_len, false).is_ok()
    }

    /// A packet was accepted: moves past those behind it that are in their place.
    pub(super) fn note_accepted(&mut self, params: &Params) {
        self.skip_placed(params);
        if self.early.as_mut().is_some_and(|early| early.note_accepted()) {
            self.push_ack(self.expected - 1);
        }
    }

    fn skip_placed(&mut self, params: &Params) {
        let Some(early) = &mut self.early else { return };
        while let Some(packets) = early.take_placed(self.expected) {
            let bytes = packets * u64::from(params.mtu);
            let Incoming::Write { addr, remaining, .. } = &mut self.incoming else { return };
            if bytes >= *remaining {
                return; // not of this message: it comes again
            }
            *addr = addr.wrapping_add(bytes);
            *remaining -= bytes;
            self.expected += packets;
            let packets = u32::try_from(packets).unwrap_or(u32::MAX);
            self.unacknowledged = self.unacknowledged.saturating_add(packets);
        }
    }

    #[inline]
    pub(crate) fn holds_packets(&self) -> bool {
        self.early.as_ref().is_some_and(|early| early.holds_packets())
    }

    /// The held packet whose turn has come.
    pub(crate) fn take_early(&mut self, params: &Params) -> Option<HeldPacket> {
        self.early.as_mut()?.take_held(self.expected, params.mtu as usize)
    }

    /// Whether a selective acknowledgement is to be sent at once.
    pub(crate) fn owes_report(&self) -> bool {
        self.early.as_ref().is_some_and(|early| early.is_due())
    }

    /// Whether one may be sent.
    pub(crate) fn has_report(&self) -> bool {
        self.early.as_ref().is_some_and(|early| early.has_report())
    }

    /// The selective acknowledgement to send. Without `flush`, only one that is urgent.
    pub(crate) fn poll_report(&mut self, params: &Params, flush: bool) -> Option<SelectiveAck> {
        let early = self.early.as_mut().filter(|early| early.is_due() || (flush && early.has_report()))?;
        Some(early.report(params.dest_qpn, self.expected))
    }
}
