//! Selective retransmission: acknowledgements of packets behind a gap, and the packets themselves.
//! Congestion notifications.

use nobounce_protocol::qp::{Handled, IpOptions, QpState};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{CongestionNotification, Qpn, SelectiveAck};

use crate::links::{Arrival, PeerName, RxDatagram, TxBatch};
use crate::soft::engine::Core;
use crate::soft::engine::host::{PacketHost, ReceiveSource};
use crate::soft::engine::packet::port_hint;
use crate::soft::engine::queue_pair::{Posted, QueuePair};
use crate::soft::engine::region::Regions;
use crate::soft::qp_index::QpIndex;

/// Adds the selective acknowledgement of the queue pair to the batch. None leaves while a GPU does
/// not have all bytes: it covers them, and a later one, or the answer to a probe, says the same.
pub(crate) fn put_selective_ack(entry: &mut QueuePair, tx: &mut TxBatch, regions: &Regions) {
    let Some(ack) = entry.qp.poll_selective_ack(true) else { return };
    if !regions.staging.is_settled(entry.owner()) {
        return;
    }
    let to = entry.qp.attr().remote;
    tx.set_ip_options(entry.qp.attr().ip_options);
    tx.put(to, port_hint(entry), ack.len(), |room| ack.emit(room));
    tx.set_ip_options(IpOptions::default());
}

/// Adds the congestion notification of the queue pair to the batch.
#[cold]
pub(crate) fn put_congestion_notification(entry: &mut QueuePair, tx: &mut TxBatch) {
    let Some(notification) = entry.qp.poll_congestion_notification() else { return };
    let to = entry.qp.attr().remote;
    tx.set_ip_options(entry.qp.attr().ip_options);
    tx.put(to, port_hint(entry), CongestionNotification::LEN, |room| notification.emit(room));
    tx.set_ip_options(IpOptions::default());
}

/// A peer that writes to a ring sends nothing by UDP: such a packet is forged.
fn is_from_peer(entry: &QueuePair, datagram: &RxDatagram<'_>) -> bool {
    let beside = entry.route.heard_locally && datagram.arrival == Arrival::BesideLocal;
    entry.qp.attr().remote == datagram.src && !beside
}

impl Core {
    /// Handles a selective acknowledgement; false if the packet is none, or not from the peer.
    pub(crate) fn handle_selective_ack(&mut self, now: Nanos, datagram: &RxDatagram<'_>) -> bool {
        let Some(ack) = SelectiveAck::parse(datagram.bytes) else { return false };
        let ours = self.qps.owns(ack.to);
        if !ours
            || !self.presences.is_selective()
            || (datagram.has_icrc && !self.icrc.is_valid(self.local, datagram))
        {
            return false;
        }
        let Some(entry) = self.entry(ack.to) else { return false };
        if !is_from_peer(entry, datagram) {
            self.account.counters.wrong_peer += 1;
            return true;
        }
        let handled = entry.qp.handle_selective_ack(now, &ack);
        self.note_answered(now, ack.to, handled);
        true
    }

    /// Handles a congestion notification; false if the packet is none.
    pub(crate) fn handle_congestion_notification(&mut self, now: Nanos, datagram: &RxDatagram<'_>) -> bool {
        let Some(CongestionNotification { to }) = CongestionNotification::parse(datagram.bytes) else {
            return false;
        };
        let ours = self.qps.owns(to);
        if !ours || (datagram.has_icrc && !self.icrc.is_valid(self.local, datagram)) {
            return false;
        }
        let Some(entry) = self.entry(to) else { return false };
        if !is_from_peer(entry, datagram) {
            self.account.counters.wrong_peer += 1;
            return true;
        }
        let handled = entry.qp.handle_congestion_notification(now);
        self.note_answered(now, to, handled);
        true
    }

    fn note_answered(&mut self, now: Nanos, to: Qpn, handled: Handled) {
        self.account.counters.count_handled(handled);
        let Some(entry) = self.qps.get_mut(QpIndex::of(to)) else { return };
        (entry.schedule.heard, entry.schedule.answered) = (now, true);
        self.scheduler.touch(entry);
    }

    /// A gap may have closed: delivers the packets behind it.
    #[cold]
    pub(crate) fn deliver_held(&mut self, now: Nanos, index: QpIndex, datagram: &RxDatagram<'_>) {
        loop {
            let Some(entry) = self.qps.get_mut(index) else { return };
            let Some(held) = entry.qp.poll_held() else { return };
            let Posted { receives, srq, xrc, receive_pd, sends, current, .. } = &mut entry.posted;
            let mut host = PacketHost {
                regions: &mut self.regions,
                pd: &mut entry.pd,
                receive_pd,
                payload: (&held.payload).into(),
                datagram,
                local: &self.local,
                sends,
                receives: ReceiveSource::of(receives, *srq, xrc.as_mut(), &mut self.srqs),
                current,
                psn: held.header.psn,
                qp: index,
                ticket: &mut entry.gpu.ticket,
                tally: &mut entry.tally.inbound,
            };
            let handled =
                entry.qp.handle_run(now, (&held.header, held.packets), held.payload.len(), &mut host);
            self.account.counters.count_handled(handled);
            if held.header.has_xrceth()
                && let Some(srq) = entry.posted.shared()
            {
                self.srqs.check_limit(srq, &self.reports.events);
                self.srqs.publish_room(srq);
            }
        }
    }

    /// A peer announced that it retransmits selectively, in this generation of its device.
    pub(crate) fn retransmit_selectively(&mut self, now: Nanos, name: PeerName, generation: u64) {
        if !self.presences.is_selective() {
            return;
        }
        for entry in self.qps.iter_mut().filter(|entry| entry.peer() == name) {
            let is_same = entry.schedule.peer_generation.is_none_or(|known| known == generation);
            let connected = matches!(entry.qp.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
            if is_same && connected && entry.qp.service().is_reliable() && entry.route.local.is_none() {
                entry.qp.retransmit_selectively(now);
            }
        }
    }
}
