//! A received packet: whether it is valid, whose it is, and what its queue pair does with it.

use nobounce_protocol::qp::QpState;
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Header, Malformed, Marker, Parsed, Service};

use crate::links::{Arrival, RxDatagram};
use crate::soft::engine::Core;
use crate::soft::engine::host::{PacketHost, ReceiveSource};
use crate::soft::engine::queue_pair::Posted;
use crate::soft::qp_index::QpIndex;

/// Payload of a packet, or of coalesced packets, from which on a message does not count as short.
const LONG: usize = 1024;

impl Core {
    pub(crate) fn handle_datagram(&mut self, now: Nanos, datagram: &RxDatagram<'_>) {
        self.account.counters.rcvd_pkts += u64::from(datagram.packets);
        // Parse in place. A moved header would be read in other sizes than it was written in. That
        // store-forwarding stall waits until the payload before it is stored (5 % of a receiver's
        // time).
        let parsed = &Header::parse(datagram.bytes);
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(malformed) => {
                let is_ours = *malformed == Malformed::UnknownOpcode
                    && datagram.group.is_none()
                    && (self.handle_selective_ack(now, datagram)
                        || self.handle_congestion_notification(now, datagram)
                        || self.handle_marker(datagram)
                        || self.handle_presence(now, datagram));
                if is_ours {
                    return;
                }
                self.account.counters.malformed[malformed.index()] += 1;
                return;
            }
        };
        if datagram.has_icrc && !self.icrc.is_valid(self.local, datagram) {
            self.account.counters.icrc_errors += 1;
            return;
        }
        let header = &parsed.header;
        // Admit receives that were posted before the peer sent this message.
        if !header.opcode.is_response() {
            self.take_submissions(|| now);
        }
        if let Some(&group) = datagram.group {
            return self.handle_multicast(now, group, datagram, parsed);
        }
        if !self.qps.owns(header.dest_qpn) {
            return self.handle_stray(datagram, parsed);
        }
        self.deliver(now, QpIndex::of(header.dest_qpn), datagram, parsed);
    }

    /// Lets the queue pair with that index handle a packet.
    // Always inlined: it is most of the work for each packet.
    #[inline(always)]
    pub(super) fn deliver(&mut self, now: Nanos, index: QpIndex, datagram: &RxDatagram<'_>, parsed: &Parsed) {
        let header = &parsed.header;
        let Some(entry) = self.qps.get_mut(index) else {
            return self.handle_stray(datagram, parsed);
        };
        if matches!(entry.qp.state(), QpState::Reset | QpState::Init) {
            self.account.counters.wrong_state += 1;
            return;
        }
        if entry.qp.service() != Service::Ud {
            // A peer that writes to a ring sends nothing by UDP: such a packet is forged.
            let beside = entry.route.heard_locally && datagram.arrival == Arrival::BesideLocal;
            if entry.qp.attr().remote != datagram.src || beside {
                self.account.counters.wrong_peer += 1;
                return;
            }
            entry.route.heard_locally |= datagram.arrival == Arrival::Local;
            entry.schedule.heard = now;
        }
        let mut payload =
            datagram.whole.unwrap_or_else(|| datagram.bytes.into()).slice(parsed.payload.clone());
        let mut packets = u32::from(datagram.packets);
        let taken = entry.qp.taken_of_run(header, packets, payload.len());
        let rest;
        let header = if taken == 0 {
            header
        } else {
            payload = payload.skip(taken as usize * (payload.len() / packets as usize));
            packets -= taken;
            rest = Header { psn: header.psn.plus(taken), ..*header };
            &rest
        };
        entry.ack.heard_long = payload.len() > LONG;
        let Posted { receives, srq, xrc, receive_pd, sends, current, .. } = &mut entry.posted;
        let receives = ReceiveSource::of(receives, *srq, xrc.as_mut(), &mut self.srqs);
        let mut host = PacketHost {
            regions: &mut self.regions,
            pd: &mut entry.pd,
            receive_pd,
            payload,
            datagram,
            local: &self.local,
            sends,
            receives,
            current,
            psn: header.psn,
            qp: index,
            ticket: &mut entry.gpu.ticket,
            tally: &mut entry.tally.inbound,
        };
        let handled = entry.qp.handle_run(now, (header, packets), payload.len(), &mut host);
        self.account.counters.count_handled(handled);
        if entry.qp.holds_packets() {
            self.deliver_held(now, index, datagram);
        }
        let Some(entry) = self.qps.get_mut(index) else { return };
        if header.has_xrceth()
            && let Some(srq) = entry.posted.shared()
        {
            // The next message may name another queue.
            self.srqs.check_limit(srq, &self.reports.events);
            self.srqs.publish_room(srq);
        }
        if datagram.marked {
            entry.qp.handle_mark(now, header.opcode, packets);
        }
        entry.schedule.answered |= header.opcode.is_response();
        self.scheduler.touch(entry);
    }

    /// Returns a marker of a same-host peer, or handles a returned one; false if the packet is no
    /// marker.
    #[cold]
    fn handle_marker(&mut self, datagram: &RxDatagram<'_>) -> bool {
        let Some(marker) = Marker::parse(datagram.bytes) else { return false };
        if !self.same_host.peers.contains(datagram.src) || !self.icrc.is_valid(self.local, datagram) {
            return false;
        }
        if !marker.returns {
            self.same_host.take_marker(datagram.src, &marker);
        } else if let Some(entry) = self.qps.get_mut(QpIndex::of(marker.to)) {
            entry.qp.handle_marker(marker.number);
            entry.schedule.answered = true;
            self.scheduler.touch(entry);
        }
        true
    }
}
