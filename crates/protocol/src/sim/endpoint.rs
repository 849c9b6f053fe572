//! One side of a simulated connection.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

use super::memory::{Handling, Memory, Region};
use crate::qp::IpOptions;
use crate::qp::{
    Access, AttrMask, Completion, Datagram, Handled, Mtu, Nak, Operation, Payload, PostError, Qp, QpAttr,
    QpConfig, QpEvent, QpState, Remote, Service, Status, Transmit, WorkKind, WorkRequest,
};
use crate::timing::Nanos;
use crate::wire::icrc::{Flow, IcrcCheck};
use crate::wire::{CongestionNotification, Header, ICRC_LEN, Opcode, Psn, Qpn, ROCE_PORT, SelectiveAck};

/// How both ends of a connection are made.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are the standard's
pub struct Setup {
    pub service: Service,
    /// Of both ends of a connection, and of the port where there is none.
    pub mtu: Mtu,
    /// First sequence number of the even end, and of the odd one.
    pub psn: [u32; 2],
    pub access: Access,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    /// READs and atomics that both ends are known to answer at a time.
    pub resources: u8,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub send_depth: usize,
    pub signal_all: bool,
    /// Bytes of memory of each end. The region leaves [`Setup::GUARD`] bytes free at both ends.
    pub memory: usize,
    /// What a path takes, in bytes.
    pub room: u64,
    /// Runs of similar packets travel as one, as they do through shared memory.
    pub runs: bool,
    /// Both ends know that the other retransmits selectively.
    pub selective: bool,
}

impl Setup {
    /// Bytes before and after the region.
    pub const GUARD: usize = 4096;
    /// The key of datagram queue pairs.
    pub const QKEY: u32 = 0x1111_1111;
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            service: Service::Rc,
            mtu: Mtu::Mtu1024,
            psn: [0, 0x10_0000],
            access: Access::all(),
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            resources: 0,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            send_depth: 256,
            signal_all: true,
            memory: 320 << 10,
            room: u64::MAX,
            runs: false,
            selective: false,
        }
    }
}

/// Datagrams that an endpoint did not pass to its queue pair, by cause, and the queue pair's
/// outcome for the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct EndpointCounters {
    pub malformed: u64,
    pub icrc_errors: u64,
    pub wrong_state: u64,
    pub unsolicited: u64,
    pub wrong_service: u64,
}

/// Packets taken without asking for each; a NIC's batch has room for about as many.
const MOST_REPEATS: u64 = 14;

/// One side of a connection: a queue pair, its memory, and what came out.
#[derive(Debug)]
pub struct Endpoint {
    /// The queue pair.
    pub qp: Qp,
    /// Its memory.
    pub memory: Memory,
    /// Its number.
    pub qpn: Qpn,
    /// Where its peer is.
    pub peer: Datagram,
    /// The key of its first region.
    pub rkey: u32,
    /// Completions, in the order they came.
    pub completions: Vec<Completion>,
    /// Events, in the order they came.
    pub events: Vec<QpEvent>,
    /// What was dropped.
    pub counters: EndpointCounters,
    /// What its path takes, in bytes.
    pub room: u64,
    pub(crate) pipe: usize,
    pub(crate) address: IpAddr,
    pub(crate) peer_address: IpAddr,
    next_id: u16,
    next_wr_id: u64,
    runs: bool,
    /// Packets that follow the one polled last.
    repeats: VecDeque<Transmit>,
}

impl Endpoint {
    pub(crate) fn connected(index: usize, setup: &Setup, pipe: usize) -> Self {
        let number = u32::try_from(index).unwrap_or(0);
        let (qpn, peer) = (Qpn::new(0x11 + number), Qpn::new(0x11 + (number ^ 1)));
        let address = |side: u8| IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + side));
        let side = u8::from(index % 2 == 1);
        let config = QpConfig {
            service: setup.service,
            qpn,
            port_mtu: setup.mtu,
            send_depth: setup.send_depth,
            signal_all: setup.signal_all,
            responder_resources: setup.resources,
            peer_resources: setup.resources,
        };
        let mut endpoint = Self {
            qp: Qp::new(config),
            memory: Memory::new(setup.memory),
            qpn,
            peer: Datagram {
                remote: address(1 - side),
                dest_qpn: peer,
                qkey: Setup::QKEY,
                ip_options: IpOptions::default(),
            },
            rkey: 0x1000 + number,
            completions: Vec::new(),
            events: Vec::new(),
            counters: EndpointCounters::default(),
            room: setup.room,
            pipe,
            address: address(side),
            peer_address: address(1 - side),
            next_id: 0,
            repeats: VecDeque::new(),
            next_wr_id: 1,
            runs: setup.runs,
        };
        let len = setup.memory.saturating_sub(2 * Setup::GUARD) as u64;
        let addr = Memory::BASE + Setup::GUARD as u64;
        endpoint.memory.register(Region { rkey: endpoint.rkey, addr, len, access: Access::all() });
        let (own, other) = (setup.psn[index % 2], setup.psn[(index + 1) % 2]);
        if setup.selective {
            endpoint.qp.retransmit_selectively(0);
        }
        match setup.service {
            Service::Rc | Service::XrcInitiator | Service::XrcTarget => {
                endpoint.bring_up(setup, peer, own, other);
            }
            Service::Uc => {
                let (remote, mtu) = (endpoint.peer_address, setup.mtu);
                endpoint.modify(&QpAttr::to_init(setup.access));
                endpoint.modify(&QpAttr::uc_to_rtr(remote, peer, Psn::new(other), mtu));
                endpoint.modify(&QpAttr::unreliable_to_rts(Psn::new(own)));
            }
            Service::Ud => {
                endpoint.modify(&QpAttr::ud_to_init(Setup::QKEY));
                endpoint.modify(&QpAttr::to_state(QpState::Rtr));
                endpoint.modify(&QpAttr::unreliable_to_rts(Psn::new(own)));
            }
        }
        endpoint
    }

    fn bring_up(&mut self, setup: &Setup, peer: Qpn, own_psn: u32, peer_psn: u32) {
        let rtr = QpAttr {
            max_dest_rd_atomic: setup.max_dest_rd_atomic,
            min_rnr_timer: setup.min_rnr_timer,
            ..QpAttr::to_rtr(self.peer_address, peer, Psn::new(peer_psn), setup.mtu)
        };
        let rts = QpAttr {
            max_rd_atomic: setup.max_rd_atomic,
            timeout: setup.timeout,
            retry_cnt: setup.retry_cnt,
            rnr_retry: setup.rnr_retry,
            ..QpAttr::to_rts(Psn::new(own_psn))
        };
        for attr in [QpAttr::to_init(setup.access), rtr, rts] {
            self.modify(&attr);
        }
    }

    /// Modifies the queue pair.
    ///
    /// # Panics
    /// The queue pair refuses: the test is wrong.
    #[allow(clippy::panic)]
    pub fn modify(&mut self, attr: &QpAttr) {
        if let Err(error) = self.qp.modify(attr) {
            panic!("{error}");
        }
    }

    /// Stops the send queue and asks for an event when it has drained.
    pub fn drain(&mut self) {
        let mask = AttrMask::STATE | AttrMask::EN_SQD_ASYNC_NOTIFY;
        self.modify(&QpAttr { mask, en_sqd_async_notify: true, ..QpAttr::to_state(QpState::Sqd) });
    }

    /// An address of this endpoint's region.
    pub const fn addr(&self, offset: u64) -> u64 {
        Memory::BASE + Setup::GUARD as u64 + offset
    }

    /// The same, for a peer.
    pub const fn remote(&self, offset: u64) -> Remote {
        Remote { addr: self.addr(offset), rkey: self.rkey }
    }

    /// Posts a signalled request whose local bytes begin `local` bytes into the region; returns its
    /// `wr_id`.
    ///
    /// # Errors
    /// See [`Qp::post`].
    pub fn post(&mut self, op: Operation, local: u64, len: u32) -> Result<u64, PostError> {
        let request =
            WorkRequest { wr_id: 0, op, len, signaled: true, solicited: false, fence: false, xrc_srq: 0 };
        self.post_request(request, local)
    }

    /// Posts a request; its `wr_id` is replaced by the next number, which is returned.
    ///
    /// # Errors
    /// See [`Qp::post`].
    pub fn post_request(&mut self, request: WorkRequest, local: u64) -> Result<u64, PostError> {
        let wr_id = self.next_wr_id;
        let request = WorkRequest { wr_id, ..request };
        let serial = match self.qp.service() {
            Service::Ud => self.qp.post_to(request, self.peer)?,
            _ => self.qp.post(request)?,
        };
        self.memory.set_local(serial, self.addr(local));
        self.next_wr_id += 1;
        self.collect();
        Ok(wr_id)
    }

    /// Posts a receive of `len` bytes, `offset` bytes into the region; returns its `wr_id`.
    pub fn post_receive(&mut self, offset: u64, len: u64) -> u64 {
        let wr_id = self.next_wr_id;
        self.next_wr_id += 1;
        self.memory.post_receive(wr_id, self.addr(offset), len);
        self.collect();
        wr_id
    }

    /// How the send requests ended: their numbers and statuses, in order.
    pub fn sends(&self) -> Vec<(u64, Status)> {
        self.completions.iter().filter(|c| !c.is_receive()).map(|c| (c.wr_id, c.status)).collect()
    }

    /// The completions of receives, in order.
    pub fn received(&self) -> Vec<Completion> {
        self.completions.iter().filter(|c| c.is_receive()).copied().collect()
    }

    /// Takes completions and events out of the queue pair. In the error state, receives are
    /// flushed, as a device does.
    pub(crate) fn collect(&mut self) {
        while let Some(completion) = self.qp.poll_completion() {
            self.completions.push(completion);
        }
        while let Some(event) = self.qp.poll_event() {
            self.events.push(event);
        }
        if self.qp.state() == QpState::Error {
            for wr_id in self.memory.flush_receives() {
                self.completions.push(Completion::flushed(wr_id, WorkKind::Receive));
            }
        }
    }

    fn flow(&self, outgoing: bool) -> Flow {
        let (src, dst) =
            if outgoing { (self.address, self.peer_address) } else { (self.peer_address, self.address) };
        Flow { src, dst, src_port: 0xc000, dst_port: ROCE_PORT }
    }

    /// The next packet as bytes, if one may leave; a payload that cannot be read is reported to the
    /// queue pair.
    pub(crate) fn next_packet(&mut self, now: Nanos) -> Option<(Header, u16, Vec<u8>)> {
        if let Some(ack) = self.qp.poll_selective_ack(true) {
            let mut bytes = vec![0; ack.len()];
            ack.emit(&mut bytes);
            let id = self.next_id();
            self.flow(true).close(id, &mut bytes);
            // For scripts, it is an ACK.
            return Some((Header::new(Opcode::Ack, ack.to, ack.missing), id, bytes));
        }
        if let Some(notification) = self.qp.poll_congestion_notification() {
            let mut bytes = vec![0; CongestionNotification::LEN];
            notification.emit(&mut bytes);
            let id = self.next_id();
            self.flow(true).close(id, &mut bytes);
            return Some((Header::new(Opcode::Ack, notification.to, Psn::new(0)), id, bytes));
        }
        let room = self.room.saturating_sub(self.qp.outstanding());
        loop {
            let transmit = match self.repeats.pop_front() {
                Some(transmit) => transmit,
                None => self.poll(now, room)?,
            };
            match self.encode(&transmit) {
                Some((id, bytes)) => return Some((transmit.header, id, bytes)),
                None => {
                    self.repeats.clear();
                    self.qp.handle_gather_fault(&transmit, Nak::RemoteAccess);
                }
            }
        }
    }

    /// Polls a packet, and puts those that may follow it unasked where they are taken from next.
    fn poll(&mut self, now: Nanos, room: u64) -> Option<Transmit> {
        let first = self.qp.poll_transmit(now, room, true)?;
        let left = self.room.saturating_sub(self.qp.outstanding());
        let mut last = first;
        let repeats = self.qp.poll_repeat(now, &first, left, MOST_REPEATS);
        for _ in 0..repeats {
            last.advance();
            self.repeats.push_back(last);
        }
        if self.runs && repeats > 0 {
            self.repeats.truncate(self.repeats.len() + 1 - usize::try_from(repeats).unwrap_or(1));
            if let Some(Transmit {
                payload: Payload::Request { len, .. } | Payload::Region { len, .. },
                ..
            }) = self.repeats.back_mut()
            {
                *len *= u32::try_from(repeats).unwrap_or(1);
            }
        }
        Some(first)
    }

    fn next_id(&mut self) -> u16 {
        let id = self.next_id;
        self.next_id = (id + 1) % 64;
        id
    }

    fn encode(&mut self, transmit: &Transmit) -> Option<(u16, Vec<u8>)> {
        let id = self.next_id;
        let payload = self.memory.gather(&transmit.payload).ok()?;
        let bytes = encode(&transmit.header, payload, &self.flow(true), id);
        Some((self.next_id(), bytes))
    }

    /// A datagram arrived, perhaps with a congestion mark.
    pub(crate) fn receive_marked(&mut self, now: Nanos, ip_id: u16, datagram: &[u8], marked: bool) {
        if let Some(parsed) = Header::parse(datagram).ok().filter(|_| marked) {
            self.qp.handle_mark(now, parsed.header.opcode, 1);
        }
        self.receive(now, ip_id, datagram);
    }

    /// A datagram arrived.
    pub(crate) fn receive(&mut self, now: Nanos, ip_id: u16, datagram: &[u8]) {
        if self.flow(false).verify(ip_id, datagram) != (IcrcCheck::Valid { ip_id: Some(ip_id) }) {
            self.counters.icrc_errors += 1;
            return;
        }
        self.receive_trusted(now, datagram);
    }

    /// A datagram arrived whose ICRC is right, or is to be taken for right.
    pub fn receive_trusted(&mut self, now: Nanos, datagram: &[u8]) {
        if CongestionNotification::parse(datagram).is_some() {
            let handled = self.qp.handle_congestion_notification(now);
            return self.count(handled);
        }
        if let Some(ack) = SelectiveAck::parse(datagram) {
            let handled = self.qp.handle_selective_ack(now, &ack);
            self.count(handled);
            return self.collect();
        }
        let Ok(parsed) = Header::parse(datagram) else {
            self.counters.malformed += 1;
            return;
        };
        let (mut header, mut payload) = (parsed.header, &datagram[parsed.payload]);
        let mtu = self.qp.attr().path_mtu.bytes() as usize;
        let mut run = if self.runs { u32::try_from(payload.len() / mtu).unwrap_or(1).max(1) } else { 1 };
        let taken = self.qp.taken_of_run(&header, run, payload.len());
        run -= taken;
        header.psn = header.psn.plus(taken);
        payload = &payload[taken as usize * mtu..];
        self.handle_run(now, (&header, run), payload);
        while let Some(held) = self.qp.poll_held() {
            self.handle_run(now, (&held.header, held.packets), &held.payload);
        }
        self.collect();
    }

    fn handle_run(&mut self, now: Nanos, run: (&Header, u32), payload: &[u8]) {
        let mut host = Handling { memory: &mut self.memory, payload };
        let handled = self.qp.handle_run(now, run, payload.len(), &mut host);
        self.count(handled);
    }

    fn count(&mut self, handled: Handled) {
        match handled {
            Handled::Taken => {}
            Handled::WrongState => self.counters.wrong_state += 1,
            Handled::Unsolicited => self.counters.unsolicited += 1,
            Handled::WrongService => self.counters.wrong_service += 1,
        }
    }

    /// A packet from an unknown source arrives, with a valid ICRC.
    pub fn inject(&mut self, now: Nanos, header: &Header, payload: &[u8]) {
        let flow = self.flow(false);
        let bytes = encode(header, payload, &flow, 0);
        self.receive(now, 0, &bytes);
    }
}

/// A packet as bytes: headers, payload, padding, ICRC.
pub fn encode(header: &Header, payload: &[u8], flow: &Flow, ip_id: u16) -> Vec<u8> {
    let len = header.len() + payload.len() + usize::from(header.pad) + ICRC_LEN;
    let mut bytes = vec![0; len];
    let at = header.emit(&mut bytes);
    bytes[at..at + payload.len()].copy_from_slice(payload);
    flow.close(ip_id, &mut bytes);
    bytes
}
