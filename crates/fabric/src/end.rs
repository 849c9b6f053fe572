//! One end of a connection: a queue pair of the protocol crate, its pacing, and what it measures.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

use nobounce_protocol::qp::{
    Access, Completion, GRH_LEN, Host, LocalFault, Mtu, Nak, Operation, Qp, QpAttr, QpConfig, Receive,
    Remote, SendRequest, Service, Transmit,
};
use nobounce_protocol::wire::{Header, Psn, Qpn, Syndrome};

use crate::config::Transport;
use crate::control::{Ack, CongestionControl, Path};
use crate::units::{NANOSECOND, Picos, float, nanos, whole};

/// Requests that a queue pair takes at a time.
const SEND_DEPTH: usize = 128;
/// Packets between two ACK requests of a window, at most.
const ACK_EVERY: u32 = 16;
/// What the queue pair counts for a packet besides its payload, when it limits bytes in flight.
const PACKET_OVERHEAD: u64 = 512;

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) qp: Qp,
    pub(crate) host: u32,
    pub(crate) peer_host: u32,
    pub(crate) generation: u32,
    pub(crate) port: u16,
    pub(crate) control: Box<dyn CongestionControl>,
    mtu: u32,
    burst: f64,
    /// When the next data packet may leave.
    next_send: Picos,
    /// When the last one left.
    last_send: Picos,
    /// Round trip of an empty fabric: a pause of that length ends what is known of the path.
    pause: Picos,
    /// Bytes that may leave beyond the window, after a pause without anything to send.
    allowance: f64,
    /// A wake-up for that time is on its way.
    pub(crate) paced: bool,
    /// It stands in the queue of its host.
    pub(crate) queued: bool,
    /// When its timer fires.
    pub(crate) timer_at: Picos,
    /// A timeout asks for a packet, whatever the window says.
    pub(crate) urgent: bool,
    /// A READ response that waits for its turn.
    held: Option<Transmit>,
    /// Data packets since the last that asked for an ACK.
    unasked: u32,
    acknowledged: u64,
    highest: u64,
    /// Packets that left once and asked for an ACK, and when.
    timed: VecDeque<(u64, Picos)>,
    pub(crate) notified_at: Option<Picos>,
    pub(crate) received: u64,
}

/// What an end does when its host offers it the link.
#[derive(Debug)]
pub(crate) enum Turn {
    Send(Transmit),
    /// Its rate allows a packet at that time.
    WaitUntil(Picos),
    Idle,
}

impl End {
    /// Both ends of connection `number` between two hosts, connected.
    pub(crate) fn pair(
        number: u32,
        generation: u32,
        hosts: [u32; 2],
        port: u16,
        transport: &Transport,
        path: Path,
    ) -> [Self; 2] {
        [0, 1].map(|side: u32| {
            let own = Qpn::new(2 * number + side);
            let peer = Qpn::new(2 * number + (side ^ 1));
            let mtu = Mtu::from_bytes(transport.mtu).unwrap_or(Mtu::Mtu4096);
            let psn = 1;
            Self {
                qp: connected(own, peer, mtu, Psn::new(psn)),
                host: hosts[side as usize],
                peer_host: hosts[1 - side as usize],
                generation,
                port,
                control: transport.control.start(path),
                mtu: transport.mtu,
                burst: float(transport.burst),
                next_send: 0,
                last_send: 0,
                pause: path.round_trip,
                allowance: float(transport.burst),
                paced: false,
                queued: false,
                timer_at: Picos::MAX,
                urgent: false,
                held: None,
                unasked: 0,
                acknowledged: Psn::SPACE + u64::from(psn),
                highest: Psn::SPACE + u64::from(psn),
                timed: VecDeque::new(),
                notified_at: None,
                received: 0,
            }
        })
    }

    /// Posts a message: a WRITE with its number as immediate data. Returns whether there was room.
    pub(crate) fn post(&mut self, now: Picos, message: u32, len: u32) -> bool {
        if self.qp.send_room() == SEND_DEPTH && now >= self.last_send + self.pause {
            self.allowance = self.burst;
            self.control.on_restart(now);
        }
        let op = Operation::WriteImmediate(Remote { addr: 0, rkey: 1 }, message);
        let wr_id = u64::from(message);
        let request =
            SendRequest { wr_id, op, len, signaled: true, solicited: false, fence: false, xrc_srq: 0 };
        self.qp.post(request).is_ok()
    }

    /// The host's link is free.
    pub(crate) fn poll(&mut self, now: Picos) -> Turn {
        if self.held.is_none() && self.qp.has_replies() {
            match self.qp.poll_answer(true) {
                Some(answer) if answer.payload.is_empty() => return Turn::Send(answer),
                answer => self.held = answer,
            }
        }
        if self.held.is_none() && !self.qp.may_send() {
            return Turn::Idle;
        }
        if now < self.next_send && !self.urgent {
            return Turn::WaitUntil(self.next_send);
        }
        if let Some(answer) = self.held.take() {
            self.charge(now, &answer);
            return Turn::Send(answer);
        }
        let Some(room) = self.room() else { return Turn::Idle };
        self.urgent = false;
        let Some(request) = self.qp.poll_request(nanos(now), room) else { return Turn::Idle };
        self.note_request(now, &request.header);
        self.charge(now, &request);
        Turn::Send(request)
    }

    /// Bytes that the queue pair may send into; none with a full window. A room of less than two
    /// packets makes it ask for an ACK.
    fn room(&self) -> Option<u64> {
        let cost = u64::from(self.mtu) + PACKET_OVERHEAD;
        let in_flight = float(self.qp.outstanding() / cost);
        let window = self.control.window() / f64::from(self.mtu);
        let is_full = in_flight > 0.0 && in_flight + 1.0 > window && self.allowance <= 0.0;
        if is_full && !self.urgent {
            return None;
        }
        let every = ((window / 4.0).min(f64::from(ACK_EVERY)) - 1.0).max(0.0);
        let asks = in_flight + 2.0 > window || f64::from(self.unasked) >= every;
        Some(if asks { 2 * cost - 1 } else { u64::MAX })
    }

    fn note_request(&mut self, now: Picos, header: &Header) {
        let psn = header.psn.extend(self.highest);
        let packets = if header.opcode.has_reth() && !header.opcode.is_write() {
            u64::from(header.reth.len.div_ceil(self.mtu).max(1))
        } else {
            1
        };
        self.unasked = if header.ack_req { 0 } else { self.unasked + 1 };
        if psn < self.highest {
            // Which copy an ACK answers is unknown from here on.
            self.timed.clear();
        } else {
            self.highest = psn + packets;
            if header.ack_req {
                self.timed.push_back((psn, now));
            }
        }
    }

    /// Accounts for a data packet that leaves now.
    fn charge(&mut self, now: Picos, transmit: &Transmit) {
        let bytes = f64::from(transmit.payload.len());
        self.control.on_sent(now, bytes);
        let picos_per_byte = 8_000.0 / self.control.rate(now);
        self.allowance -= bytes;
        self.last_send = now;
        // A pause earns no more than a burst.
        let earliest = now.saturating_sub(whole(self.burst * picos_per_byte));
        self.next_send = self.next_send.max(earliest) + whole(bytes * picos_per_byte);
    }

    /// A packet of the peer arrived.
    pub(crate) fn receive(&mut self, now: Picos, header: &Header, payload: u32) {
        let losses = self.losses();
        let mut host = Sink { received: 0 };
        self.qp.handle_packet(nanos(now), header, payload as usize, &mut host);
        self.received += host.received;
        if header.opcode.is_response() {
            let round_trip = self.take_ack(now, header);
            if let Some(ack) = round_trip {
                self.control.on_ack(now, ack);
            }
        }
        if self.losses() > losses {
            self.control.on_loss(now);
        }
    }

    fn take_ack(&mut self, now: Picos, header: &Header) -> Option<Ack> {
        if header.opcode.has_aeth() && !matches!(header.aeth.syndrome, Syndrome::Ack(_)) {
            return None;
        }
        let psn = header.psn.extend(self.acknowledged);
        if psn < self.acknowledged || psn >= self.highest {
            return None;
        }
        let packets = psn + 1 - self.acknowledged;
        self.acknowledged = psn + 1;
        let mut round_trip = None;
        while let Some((asked, sent)) = self.timed.front().copied().filter(|(asked, _)| *asked <= psn) {
            round_trip = (asked == psn).then(|| now - sent);
            self.timed.pop_front();
        }
        Some(Ack { bytes: float(packets * u64::from(self.mtu)), round_trip })
    }

    const fn losses(&self) -> u64 {
        let counters = self.qp.counters();
        counters.rcvd_seq_err + counters.implied_nak_seq_err + counters.local_ack_timeout_err
    }

    /// When the timer has to fire.
    pub(crate) fn timeout(&self) -> Option<Picos> {
        self.qp.poll_timeout().map(|at| at.saturating_mul(NANOSECOND))
    }

    /// The timer fired.
    pub(crate) fn handle_timeout(&mut self, now: Picos) {
        let losses = self.losses();
        self.qp.handle_timeout(nanos(now));
        if self.losses() > losses {
            self.control.on_loss(now);
        }
        self.urgent = true;
    }

    pub(crate) fn poll_completion(&mut self) -> Option<Completion> {
        self.qp.poll_completion()
    }
}

fn connected(own: Qpn, peer: Qpn, mtu: Mtu, psn: Psn) -> Qp {
    let mut qp = Qp::new(QpConfig {
        service: Service::Rc,
        qpn: own,
        port_mtu: mtu,
        send_depth: SEND_DEPTH,
        signal_all: false,
        responder_resources: 0,
        peer_resources: 0,
    });
    let remote = IpAddr::V4(Ipv4Addr::LOCALHOST);
    for attr in [QpAttr::to_init(Access::all()), QpAttr::to_rtr(remote, peer, psn, mtu), QpAttr::to_rts(psn)]
    {
        let changed = qp.modify(&attr);
        debug_assert!(changed.is_ok(), "{changed:?}");
    }
    qp
}

/// Memory without bytes: every access is allowed, and lengths are counted.
struct Sink {
    received: u64,
}

impl Host for Sink {
    fn check(&mut self, _rkey: u32, _addr: u64, _len: u64, _access: Access) -> Result<(), Nak> {
        Ok(())
    }

    fn place_remote(&mut self, _rkey: u32, _addr: u64, len: usize, _last: bool) -> Result<(), Nak> {
        self.received += len as u64;
        Ok(())
    }

    fn take_receive(&mut self) -> Option<Receive> {
        Some(Receive { wr_id: 0, capacity: GRH_LEN })
    }

    fn place_receive(&mut self, _offset: u64, len: usize, _last: bool) -> Result<(), LocalFault> {
        self.received += len as u64;
        Ok(())
    }

    fn place_grh(&mut self) -> Result<(), LocalFault> {
        Ok(())
    }

    fn place_response(
        &mut self,
        _serial: u64,
        _offset: u64,
        len: usize,
        _last: bool,
    ) -> Result<(), LocalFault> {
        self.received += len as u64;
        Ok(())
    }

    fn place_atomic(&mut self, _serial: u64, _original: u64) -> Result<(), LocalFault> {
        Ok(())
    }

    fn compare_swap(&mut self, _rkey: u32, _addr: u64, _compare: u64, _swap: u64) -> Result<u64, Nak> {
        Ok(0)
    }

    fn fetch_add(&mut self, _rkey: u32, _addr: u64, _add: u64) -> Result<u64, Nak> {
        Ok(0)
    }

    fn flush(&mut self, _rkey: u32, _range: Option<(u64, u64)>) -> Result<(), Nak> {
        Ok(())
    }

    fn invalidate(&mut self, _rkey: u32) -> Result<(), Nak> {
        Ok(())
    }
}
