//! One end of a connection: a queue pair of the protocol crate.

use std::net::{IpAddr, Ipv4Addr};

use nobounce_protocol::qp::{
    Access, Completion, GRH_LEN, Host, LocalFault, Mtu, Nak, Operation, Qp, QpAttr, QpConfig, Receive,
    Remote, Service, WorkRequest,
};
use nobounce_protocol::wire::{Psn, Qpn};

use crate::config::Transport;
use crate::control::Path;
use crate::packet::{Kind, Packet};
use crate::units::{NANOSECOND, Picos, nanos};

/// Requests that a queue pair takes at a time.
const SEND_DEPTH: usize = 128;

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) qp: Qp,
    pub(crate) host: u32,
    pub(crate) peer_host: u32,
    pub(crate) generation: u32,
    pub(crate) port: u16,
    /// It stands in the queue of its host.
    pub(crate) queued: bool,
    /// When its timer fires.
    pub(crate) timer_at: Picos,
    pub(crate) received: u64,
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
            let mut qp = connected(own, peer, mtu, Psn::new(1));
            qp.set_congestion_control(transport.control.start(path));
            if transport.selective {
                qp.retransmit_selectively(0);
            }
            Self {
                qp,
                host: hosts[side as usize],
                peer_host: hosts[1 - side as usize],
                generation,
                port,
                queued: false,
                timer_at: Picos::MAX,
                received: 0,
            }
        })
    }

    /// Posts a message: a WRITE with its number as immediate data. Returns whether there was room.
    pub(crate) fn post(&mut self, message: u32, len: u32) -> bool {
        let op = Operation::WriteImmediate(Remote { addr: 0, rkey: 1 }, message);
        let wr_id = u64::from(message);
        let request =
            WorkRequest { wr_id, op, len, signaled: true, solicited: false, fence: false, xrc_srq: 0 };
        self.qp.post(request).is_ok()
    }

    /// The next packet and its payload, if one may leave: the host's link is free.
    pub(crate) fn poll(&mut self, now: Picos) -> Option<(Kind, u32)> {
        if let Some(ack) = self.qp.poll_selective_ack(true) {
            return Some((Kind::SelectiveAck(ack), 0));
        }
        if self.qp.poll_congestion_notification().is_some() {
            return Some((Kind::CongestionNotification, 0));
        }
        let answer = if self.qp.has_replies() { self.qp.poll_answer(true) } else { None };
        let transmit = answer.or_else(|| self.qp.poll_request(nanos(now), u64::MAX))?;
        Some((Kind::Transport(transmit.header), transmit.payload.len()))
    }

    /// A packet of the peer arrived.
    pub(crate) fn receive(&mut self, now: Picos, packet: &Packet) {
        let at = nanos(now);
        match &packet.kind {
            Kind::CongestionNotification => _ = self.qp.handle_congestion_notification(at),
            Kind::SelectiveAck(ack) => _ = self.qp.handle_selective_ack(at, ack),
            Kind::Transport(header) => {
                let mut host = Sink { received: 0 };
                self.qp.handle_packet(at, header, packet.payload as usize, &mut host);
                while let Some(held) = self.qp.poll_held() {
                    let len = held.payload.len();
                    self.qp.handle_run(at, (&held.header, held.packets), len, &mut host);
                }
                self.received += host.received;
                if packet.marked {
                    self.qp.handle_mark(at, header.opcode, 1);
                }
            }
        }
    }

    /// When the timer has to fire.
    pub(crate) fn timeout(&self) -> Option<Picos> {
        self.qp.poll_timeout().map(|at| at.saturating_mul(NANOSECOND))
    }

    /// The timer fired.
    pub(crate) fn handle_timeout(&mut self, now: Picos) {
        self.qp.handle_timeout(nanos(now));
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

    fn copy_payload(&mut self, _into: &mut [u8]) -> Result<(), LocalFault> {
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
