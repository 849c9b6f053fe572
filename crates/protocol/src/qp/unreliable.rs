//! The sender of the unreliable services: segments requests into packets, and completes them once
//! they have left.
//!
//! A request is complete when all its packets are built: there is no retransmission. The caller
//! gathers the payload of a packet, or reports that it could not, before it polls the next packet.
//! So a request is retired at that next poll.

use std::collections::VecDeque;
use std::net::IpAddr;

use super::completion::Status;
use super::linger::Linger;
use super::request::{Datagram, PostError, WorkRequest};
use super::requester::Out;
use super::uc_receiver::UcReceiver;
use super::wqe::Wqe;
use super::{IpOptions, Params, Transmit};
use crate::timing::Nanos;
use crate::wire::{Deth, Psn, Service};

/// Replaces requester and responder for services without acknowledgements.
#[derive(Debug)]
pub(crate) struct Unreliable {
    pub(crate) sender: UnreliableSender,
    /// Idle where every datagram stands for itself.
    pub(crate) receiver: UcReceiver,
}

impl Unreliable {
    pub(crate) fn new(service: Service, depth: usize) -> Self {
        Self { sender: UnreliableSender::new(service, depth), receiver: UcReceiver::new() }
    }
}

#[derive(Debug)]
struct Outgoing {
    wqe: Wqe,
    /// Where it goes, if not to the peer.
    to: Option<Datagram>,
}

#[derive(Debug)]
pub(crate) struct UnreliableSender {
    service: Service,
    sq: VecDeque<Outgoing>,
    depth: usize,
    next_serial: u64,
    /// The next sequence number.
    next: u64,
    /// The request at the front has its PSNs.
    begun: bool,
    linger: Linger,
    path_limited: bool,
}

impl UnreliableSender {
    fn new(service: Service, depth: usize) -> Self {
        Self {
            service,
            sq: VecDeque::new(),
            depth,
            next_serial: 0,
            next: Psn::SPACE,
            begun: false,
            linger: Linger::default(),
            path_limited: false,
        }
    }

    /// The first sequence number is known.
    pub(crate) fn connect(&mut self, sq_psn: Psn) {
        self.next = Psn::SPACE + u64::from(sq_psn.get());
    }

    /// Posts a request. The caller has checked it and the state.
    pub(crate) fn post(&mut self, request: WorkRequest, to: Option<Datagram>) -> Result<u64, PostError> {
        if self.sq.len() >= self.depth {
            return Err(PostError::QueueFull(self.depth));
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        self.sq.push_back(Outgoing { wqe: Wqe { serial, request, psn: 0, packets: 0, split: false }, to });
        Ok(serial)
    }

    /// Requests that are not over.
    pub(crate) fn posted(&self) -> usize {
        self.sq.len()
    }

    pub(crate) const fn outstanding(&self) -> u64 {
        self.linger.bytes()
    }

    pub(crate) const fn is_path_limited(&self) -> bool {
        self.path_limited
    }

    pub(crate) fn oldest_serial(&self) -> u64 {
        self.sq.front().map_or(self.next_serial, |front| front.wqe.serial)
    }

    /// Nothing is half sent.
    pub(crate) const fn is_drained(&self) -> bool {
        !self.begun
    }

    /// Where the packet polled last goes, if not to the peer.
    pub(crate) fn destination(&self) -> Option<&IpAddr> {
        self.sq.front()?.to.as_ref().map(|to| &to.remote)
    }

    /// Its IP options, if it does not go to the peer.
    pub(crate) fn ip_options(&self) -> Option<IpOptions> {
        self.sq.front()?.to.as_ref().map(|to| to.ip_options)
    }

    /// Whether this PSN was polled last.
    pub(crate) fn sent_last(&self, psn: Psn) -> bool {
        self.begun && psn.extend(self.next) + 1 == self.next
    }

    /// The next packet, if one may leave now. `room` is what the path still takes, in bytes.
    pub(crate) fn poll(
        &mut self,
        now: Nanos,
        params: &Params,
        may_start: bool,
        room: u64,
        out: &mut Out<'_>,
    ) -> Option<Transmit> {
        self.path_limited = false;
        self.retire(out);
        let (front, to) = self.front(params, may_start)?;
        if front.packet_cost() > room {
            self.path_limited = true;
            return None;
        }
        let mut transmit = front.data_packet(self.next, false, params);
        let header = &mut transmit.header;
        header.opcode = header.opcode.in_service(self.service).unwrap_or(header.opcode);
        if let Some(to) = to {
            let own_key = to.qkey >> 31 == 1;
            let qkey = if own_key { params.qkey } else { to.qkey };
            header.deth = Deth { qkey, source: params.qpn };
            header.dest_qpn = to.dest_qpn;
        }
        self.next += 1;
        self.linger.add(now, front.packet_cost());
        Some(transmit)
    }

    /// How many more packets like the one just polled may leave: full ones from the middle of the
    /// same message. They count as sent.
    pub(crate) fn poll_repeat(&mut self, now: Nanos, room: u64, most: u64) -> u64 {
        let Some(front) = self.sq.front().filter(|_| self.begun) else { return 0 };
        let to_last = (front.wqe.end() - 1).saturating_sub(self.next);
        let in_room = room / front.wqe.packet_cost();
        let count = most.min(to_last).min(in_room);
        if count > 0 {
            let cost = front.wqe.packet_cost();
            self.next += count;
            self.linger.add(now, count * cost);
        }
        count
    }

    /// The request at the front; started if that is allowed.
    fn front(&mut self, params: &Params, may_start: bool) -> Option<(Wqe, Option<Datagram>)> {
        let front = self.sq.front_mut()?;
        if !self.begun {
            if !may_start {
                return None;
            }
            front.wqe.psn = self.next;
            front.wqe.packets = u64::from(front.wqe.request.len).div_ceil(u64::from(params.mtu)).max(1);
            self.begun = true;
        }
        Some((front.wqe, front.to))
    }

    /// Retires the request whose last packet was built.
    fn retire(&mut self, out: &mut Out<'_>) {
        if self.begun && self.sq.front().is_some_and(|front| self.next == front.wqe.end()) {
            self.begun = false;
            if let Some(front) = self.sq.pop_front()
                && front.wqe.request.signaled
            {
                out.completions.push_back(front.wqe.completion(Status::Success));
            }
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Nanos> {
        self.linger.next()
    }

    pub(crate) fn handle_timeout(&mut self, now: Nanos) {
        self.linger.expire(now);
    }

    pub(crate) fn set_same_host(&mut self, same_host: bool) {
        self.linger.set_same_host(same_host);
    }

    pub(crate) fn poll_marker(&mut self, now: Nanos) -> Option<u32> {
        self.linger.poll_marker(now, self.path_limited)
    }

    pub(crate) fn handle_marker(&mut self, number: u32) {
        self.linger.handle_marker(number);
    }

    /// The last packet polled could not be built: its request fails, and those behind it are
    /// flushed.
    pub(crate) fn fail_front(&mut self, status: Status, out: &mut Out<'_>) {
        self.begun = false;
        if let Some(front) = self.sq.pop_front() {
            out.completions.push_back(front.wqe.completion(status));
        }
        self.flush(out);
    }

    /// Ends every request. Whether the last packet polled has left is not known: its request may be
    /// among them.
    pub(crate) fn flush(&mut self, out: &mut Out<'_>) {
        self.begun = false;
        while let Some(front) = self.sq.pop_front() {
            out.completions.push_back(front.wqe.completion(Status::Flushed));
        }
    }
}
