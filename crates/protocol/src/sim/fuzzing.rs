//! The fuzz targets. They are ordinary functions, so that ordinary tests replay the corpora. Each
//! panics on a finding.

use std::net::{IpAddr, Ipv4Addr};

pub use super::management::management;
use super::plan::{self, Op, OpKind, Plan};
use super::{A, Conditions, Setup, Sim, unreliable};
use crate::qp::{Mtu, Operation, QpState, Remote, Service};
use crate::timing::MICROSECOND;
use crate::wire::icrc::Flow;
use crate::wire::{Header, Opcode, Psn, Qpn, ROCE_PORT, SelectiveAck};

/// Any bytes are a packet or an error, and a packet round-trips.
///
/// # Panics
/// That is not so.
pub fn parser(data: &[u8]) {
    let localhost = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let flow = Flow { src: localhost, dst: localhost, src_port: 0xc000, dst_port: ROCE_PORT };
    let _ = flow.verify(0, data);
    if let Some(ack) = SelectiveAck::parse(data) {
        let mut again = vec![0; ack.len()];
        ack.emit(&mut again);
        assert_eq!(SelectiveAck::parse(&again), Some(ack), "from {data:02x?} to {again:02x?}");
    }
    let Ok(parsed) = Header::parse(data) else { return };
    assert!(parsed.payload.end <= data.len());
    let again = super::encode(&parsed.header, &data[parsed.payload.clone()], &flow, 0);
    let reread = Header::parse(&again);
    assert_eq!(reread.as_ref(), Ok(&parsed), "from {data:02x?} to {again:02x?}");
}

/// Whatever packets a peer forges, nothing panics, nothing outside the region changes, nothing
/// grows without bound.
///
/// # Panics
/// One of these is not so.
pub fn responder(data: &[u8]) {
    forged(data, Service::Rc, false);
    forged(data, Service::Rc, true);
}

/// The same for the unreliable services: the first byte chooses.
///
/// # Panics
/// One of these is not so.
pub fn receiver(data: &[u8]) {
    let (first, rest) = data.split_first().unwrap_or((&0, &[]));
    forged(rest, if first & 1 == 0 { Service::Uc } else { Service::Ud }, false);
}

fn forged(data: &[u8], service: Service, selective: bool) {
    let setup = Setup {
        service,
        selective,
        mtu: Mtu::Mtu256,
        psn: [0xff_fff0, 0xff_fff8],
        max_dest_rd_atomic: 4,
        memory: 4 * Setup::GUARD,
        retry_cnt: 2,
        timeout: 4,
        ..Setup::default()
    };
    let mut sim = Sim::new(&setup);
    let end = &mut sim.ends[A];
    end.memory.fill(0x33);
    let before = end.memory.bytes().to_vec();
    for i in 0..4 {
        end.post_receive(i * 600, 600);
    }
    let mut bytes = Bytes(data);
    let mut now = 0;
    let mut aim = Aim {
        service,
        qpn: end.qpn,
        memory: end.remote(0),
        mtu: Mtu::Mtu256.bytes(),
        qkey: Setup::QKEY,
        requests: 0xff_fff8,
        answers: 0xff_fff0,
    };
    while !bytes.0.is_empty() {
        let choice = bytes.byte();
        now += u64::from(choice >> 4) * MICROSECOND;
        match choice % 8 {
            0 => {
                let op = match bytes.byte() % 4 {
                    0 => Operation::Write(end.remote(0)),
                    1 => Operation::Read(end.remote(0)),
                    2 => Operation::FetchAdd { remote: end.remote(0), add: 1 },
                    _ => Operation::Send,
                };
                let len = if op.moves_word() { 8 } else { u32::from(bytes.byte()) * 5 };
                let _ = end.post(op, 0, len); // the queue may be full
            }
            1 => {
                for _ in 0..bytes.byte() {
                    if end.next_packet(now).is_none() {
                        break;
                    }
                }
            }
            2 => {
                if let Some(at) = end.qp.poll_timeout() {
                    now = now.max(at);
                    end.qp.handle_timeout(now);
                }
            }
            3 => {
                let len = usize::from(bytes.byte());
                let raw = bytes.take(len);
                end.receive_trusted(now, raw);
            }
            4 if selective => {
                let missing = Psn::new(aim.answers.wrapping_add(u32::from(bytes.byte() % 32)));
                let mut ack = SelectiveAck::new(end.qpn, missing);
                for _ in 0..bytes.byte() % 8 {
                    ack.note(u64::from(bytes.byte()) * 5);
                }
                let mut packet = vec![0; ack.len()];
                ack.emit(&mut packet);
                end.receive_trusted(now, &packet);
            }
            _ => {
                let (header, payload) = aim.forge(&mut bytes);
                end.inject(now, &header, &payload);
            }
        }
        end.collect();
    }
    let guard = Setup::GUARD;
    let after = end.memory.bytes();
    assert_eq!(before[..guard], after[..guard], "memory before the region changed");
    assert_eq!(
        before[before.len() - guard..],
        after[before.len() - guard..],
        "memory behind the region changed"
    );
    // Upper bound of pending packets: 2 x 4 responses of at most the region, ACKs, and one window
    // of requests.
    let owed = std::iter::from_fn(|| end.next_packet(now)).take(100_000).count();
    assert!(owed < 20_000, "{owed} packets were owed");
    for _ in 0..10_000 {
        let Some(at) = end.qp.poll_timeout() else { break };
        now = now.max(at);
        end.qp.handle_timeout(now);
        while end.next_packet(now).is_some() {}
    }
    let busy = end.qp.poll_timeout().is_some();
    assert!(!busy || end.qp.state() != QpState::Rts, "a queue pair whose peer is silent gives up");
}

/// The target of a forged packet, and what the forger knows of it.
#[derive(Clone, Copy, Debug)]
pub struct Aim {
    /// The service of the queue pair.
    pub service: Service,
    /// Its number.
    pub qpn: Qpn,
    /// Memory that it may reach, and the key to it.
    pub memory: Remote,
    /// Bytes of a full packet.
    pub mtu: u32,
    /// The key of its datagrams.
    pub qkey: u32,
    /// The sequence number of the next request that it awaits.
    pub requests: u32,
    /// The same of the next answer.
    pub answers: u32,
}

impl Aim {
    /// Makes a mostly valid packet, header and payload: a wholly invalid one is dropped on arrival.
    pub fn forge(&mut self, bytes: &mut Bytes<'_>) -> (Header, Vec<u8>) {
        let chosen = bytes.byte();
        let opcode = Opcode::ALL[usize::from(chosen) % Opcode::ALL.len()];
        // Rarely of another service: such a packet is dropped on arrival.
        let opcode = if chosen < 0xe0 { opcode.in_service(self.service).unwrap_or(opcode) } else { opcode };
        let flags = bytes.byte();
        let psn = if opcode.is_response() { &mut self.answers } else { &mut self.requests };
        let step = match flags & 3 {
            0 | 1 => 0,
            2 => u32::from(bytes.byte()),
            _ => u32::from(bytes.byte()).wrapping_neg(),
        };
        let mut header = Header::new(opcode, self.qpn, Psn::new(psn.wrapping_add(step)));
        *psn = psn.wrapping_add(1);
        header.ack_req = flags & 4 != 0;
        header.solicited = flags & 8 != 0;
        let addr = self.memory.addr + u64::from(bytes.byte()) * 40;
        let rkey = if flags & 0x30 == 0x30 { u32::from(bytes.byte()) } else { self.memory.rkey };
        let len = match flags >> 6 {
            0 => 256,
            1 => usize::from(bytes.byte()),
            2 => 0,
            _ => usize::from(bytes.byte()) * 2,
        };
        let len = if opcode.has_payload() { len } else { 0 };
        let extra = u32::from(bytes.byte()) * 16;
        header.deth.qkey = if flags & 0x30 == 0x20 { extra } else { self.qkey };
        header.reth.addr = addr;
        header.reth.rkey = rkey;
        header.reth.len =
            u32::try_from(len).unwrap_or(0) + if opcode.place().ends() { extra & 0x110 } else { extra };
        header.atomic.addr = addr;
        header.atomic.rkey = rkey;
        header.atomic.swap_or_add = u64::from(extra);
        header.invalidate = rkey;
        header.immediate = extra;
        header.pad = u8::try_from(len.wrapping_neg() & 3).unwrap_or(0);
        if opcode.has_aeth() && flags & 0x10 != 0 {
            header.aeth.syndrome = crate::wire::Syndrome::from_byte(bytes.byte());
        }
        if opcode == Opcode::ReadRequest && header.reth.len > 0 {
            *psn = psn.wrapping_add(header.reth.len.div_ceil(self.mtu) - 1);
        }
        (header, vec![flags; len])
    }
}

/// Any operations over any network end as the oracle says.
///
/// # Panics
/// They do not.
#[allow(clippy::panic)]
pub fn operations(data: &[u8]) {
    let plan = plan_of(data);
    if let Err(why) = plan::run(&plan) {
        panic!("{why}\n{plan:#?}");
    }
}

/// The same with queue pairs of the unreliable services: the first byte chooses.
///
/// # Panics
/// They do not.
#[allow(clippy::panic)]
pub fn unreliable(data: &[u8]) {
    let (first, rest) = data.split_first().unwrap_or((&0, &[]));
    let plan = plan_of(rest);
    let service = if first & 1 == 0 { Service::Uc } else { Service::Ud };
    if let Err(why) = unreliable::run(&plan, service) {
        panic!("{why}\n{plan:#?}");
    }
}

/// The plan these bytes stand for. Every input is a plan.
pub fn plan_of(data: &[u8]) -> Plan {
    let mut bytes = Bytes(data);
    let mtu = Mtu::ALL[usize::from(bytes.byte()) % Mtu::ALL.len()];
    let near_wrap = |byte: u8| Psn::new(u32::from(byte).wrapping_sub(128)).get();
    let psn = [near_wrap(bytes.byte()), near_wrap(bytes.byte())];
    let max_rd_atomic = bytes.byte() % 5;
    let mut rate = |most: u32| u32::from(bytes.byte()) * most / 255;
    let conditions = Conditions {
        loss: rate(150_000),
        duplicate: rate(300_000),
        reorder: rate(300_000),
        corrupt: rate(50_000),
        ..Conditions::default()
    };
    let seed = u64::from(bytes.byte());
    let selective = seed / 4 % 2 == 1;
    let mut ops = Vec::new();
    while !bytes.0.is_empty() && ops.len() < 64 {
        let (what, side) = (bytes.byte(), bytes.byte());
        let value = u16::from_be_bytes([bytes.byte(), bytes.byte()]);
        ops.push(match what % 16 {
            kind @ 0..=8 => {
                let at = value.rotate_left(5) ^ u16::from(what);
                let kind = OpKind::ALL[usize::from(kind)];
                Op::Post {
                    side: side & 1,
                    kind,
                    len: value,
                    at,
                    signaled: side & 2 == 0,
                    fence: side & 12 == 12,
                }
            }
            9 | 10 => Op::Receive { side: side & 1 },
            11 | 12 => Op::Wait { micros: value },
            13 => Op::Loss { pipe: side & 1, ppm: u32::from(value) * 2 },
            last => Op::Post {
                side: side & 1,
                kind: if last == 14 { OpKind::Flush } else { OpKind::Bad },
                len: value,
                at: value,
                signaled: true,
                fence: false,
            },
        });
    }
    Plan { mtu, psn, max_rd_atomic, conditions, selective, seed, ops }
}

/// Reads input; beyond its end there are zeros.
#[derive(Debug)]
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    /// The next one.
    pub fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    /// The next ones, as many as there are.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
