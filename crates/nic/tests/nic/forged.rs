//! Unsolicited packets: malformed, truncated, forged, replayed. Each is counted under its cause,
//! and nothing else happens.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::common::unreliable::{QKEY, uc_pair, ud_end_with};
use crate::common::{
    End, check_write, child, config, pair_with, patterns, resident, role, unguarded, unguarded_udp, unix,
    until,
};
use nobounce_nic::soft::{Config, LinkChoice};
use nobounce_nic::work::{Mtu, Operation, Psn, QpAttr, QpLimits, QpState, Qpn, Status};
use nobounce_protocol::wire::icrc::Flow;
use nobounce_protocol::wire::{Deth, Header, ICRC_LEN, Opcode, ROCE_PORT, Reth, Syndrome};

const LEN: usize = 64 << 10;

/// Someone with a socket of his own.
pub(crate) struct Forger {
    socket: UdpSocket,
    flow: Flow,
}

impl Forger {
    pub(crate) fn new(from: IpAddr, to: &End) -> Self {
        let socket = UdpSocket::bind((from, 0)).unwrap();
        let always: libc::c_int = libc::IP_PMTUDISC_DO;
        // SAFETY: one live integer. With DF the identification, which the ICRC covers, is 0.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_IP,
                libc::IP_MTU_DISCOVER,
                (&raw const always).cast(),
                size_of::<libc::c_int>() as u32,
            )
        };
        assert_eq!(set, 0);
        let src_port = socket.local_addr().unwrap().port();
        let flow = Flow { src: from, dst: to.device.local(), src_port, dst_port: ROCE_PORT };
        Self { socket, flow }
    }

    pub(crate) fn send(&self, bytes: &[u8]) {
        self.socket.send_to(bytes, (self.flow.dst, ROCE_PORT)).unwrap();
    }

    /// A packet with a correct ICRC.
    pub(crate) fn packet(&self, header: &Header, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; header.len()];
        header.emit(&mut packet);
        packet.extend_from_slice(payload);
        packet.extend_from_slice(&[0; ICRC_LEN]);
        self.close(packet)
    }

    /// Sends a packet whose last four bytes are to be its ICRC.
    pub(crate) fn send_closed(&self, packet: Vec<u8>) {
        self.send(&self.close(packet));
    }

    fn close(&self, mut packet: Vec<u8>) -> Vec<u8> {
        self.flow.close(0, &mut packet);
        packet
    }
}

/// The unreliable services send no answers, so errors must show in the counters.
#[test]
fn packets_for_unreliable_queue_pairs_are_judged_too() {
    let (_a, b) = uc_pair(&unguarded_udp("127.57.20.1"), &unguarded_udp("127.57.20.2"), LEN, Mtu::Mtu1024);
    let d = ud_end_with(&unguarded_udp("127.57.20.3"), LEN);
    let header = |opcode, to: &End| {
        let mut header = Header::new(opcode, to.last_qp().qpn(), Psn::new(0xff_fff0));
        header.deth = Deth { qkey: QKEY, source: Qpn::new(9) };
        header
    };
    let (near_b, near_d) =
        (Forger::new([127, 57, 20, 1].into(), &b), Forger::new([127, 57, 20, 1].into(), &d));
    let stranger = Forger::new([127, 57, 20, 9].into(), &b);
    let send = stranger.packet(&header(Opcode::UcSendOnly, &b), &[0; 8]);
    counted(&stranger, &b, "wrong_peer", &send);
    for opcode in [Opcode::SendOnly, Opcode::Ack, Opcode::UdSendOnly] {
        counted(&near_b, &b, "wrong_service", &near_b.packet(&header(opcode, &b), &[]));
    }
    counted(&near_b, &b, "out_of_buffer", &near_b.packet(&header(Opcode::UcSendOnly, &b), &[0; 8]));
    counted(&near_d, &d, "wrong_service", &near_d.packet(&header(Opcode::UcSendOnly, &d), &[0; 8]));
    let wrong_key = Header { deth: Deth { qkey: 0, ..Deth::default() }, ..header(Opcode::UdSendOnly, &d) };
    counted(&near_d, &d, "qkey_violations", &near_d.packet(&wrong_key, &[0; 8]));
    let mut damaged = near_d.packet(&header(Opcode::UdSendOnly, &d), &[0; 8]);
    damaged[20] ^= 1;
    counted(&near_d, &d, "icrc_errors", &damaged);
    // Valid packets are accepted from any source.
    d.post_recv(1, 0, 100);
    near_d.send(&near_d.packet(&header(Opcode::UdSendOnly, &d), &[7; 8]));
    let got = d.completions(1)[0];
    assert_eq!((got.status, got.source.map(|s| s.qpn)), (Status::Success, Some(Qpn::new(9))));
}

fn two(a: &str, b: &str) -> (End, End) {
    pair_with(&unguarded_udp(a), &unguarded_udp(b), LEN, Mtu::Mtu1024)
}

/// Sends the packet until its cause is counted (a full socket buffer may swallow it), and checks
/// that nothing else was.
#[track_caller]
pub(crate) fn counted(forger: &Forger, victim: &End, name: &str, packet: &[u8]) {
    let before = victim.counter(name);
    until(name, || {
        forger.send(packet);
        (0..1000).any(|_| victim.counter(name) > before)
    });
}

#[test]
fn every_cause_is_counted_under_its_name_while_traffic_goes_on() {
    let (a, mut b) = two("127.57.0.1", "127.57.0.2");
    b.add_qp(QpLimits::default()); // stays in INIT
    let (qpn, idle) = (b.qps[0].qpn(), b.qps[1].qpn());
    let (peer, stranger) =
        (Forger::new(a.device.local(), &b), Forger::new("127.57.0.9".parse().unwrap(), &b));
    let (stop, rounds) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let (rounds, stop, a, b) = (&rounds, &stop, &a, &b);
        let traffic = scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                check_write(a, b, rounds.load(Ordering::Relaxed) as u8, LEN);
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        // Before the first packet, a forged first packet would be taken for it.
        until("the traffic to begin", || rounds.load(Ordering::Relaxed) > 0 || traffic.is_finished());
        let far = Psn::new(b.qps[0].attr().rq_psn.get().wrapping_add(0x40_0000) & 0xff_ffff);
        let write = Header {
            reth: Reth { addr: b.mr.addr(), rkey: b.mr.rkey(), len: 8 },
            ..Header::new(Opcode::WriteOnly, qpn, far)
        };
        let good = stranger.packet(&write, &[0xaa; 8]);
        let changed = |at: usize, byte: u8| {
            let mut packet = good.clone();
            packet[at] = byte;
            stranger.close(packet)
        };
        // Not packets at all.
        counted(&stranger, b, "malformed_too_short", &[]);
        counted(&stranger, b, "malformed_too_short", &good[..15]);
        counted(&stranger, b, "malformed_transport_version", &changed(1, 0x05));
        counted(&stranger, b, "malformed_unknown_opcode", &changed(0, 0x66));
        counted(&stranger, b, "malformed_partition_key", &changed(3, 0x12));
        counted(&stranger, b, "malformed_truncated_headers", &stranger.close(good[..24].to_vec()));
        let mut padded = stranger.packet(&Header { pad: 3, ..write }, &[]);
        padded[1] |= 0x30;
        counted(&stranger, b, "malformed_padding", &stranger.close(padded));
        let ack = Header::new(Opcode::Ack, qpn, far);
        counted(&stranger, b, "malformed_unexpected_payload", &stranger.packet(&ack, &[1; 4]));
        // Packets, but not for us, or not from our peer.
        let mut damaged = good.clone();
        damaged[30] ^= 0x10;
        counted(&stranger, b, "icrc_errors", &damaged);
        counted(&stranger, b, "wrong_peer", &good);
        let to = |number: u32| stranger.packet(&Header { dest_qpn: Qpn::new(number), ..write }, &[0xaa; 8]);
        counted(&stranger, b, "no_such_qp", &to(qpn.get() & 0xff_0000 | 0xfff0));
        counted(&stranger, b, "no_such_qp", &to(qpn.get() & 0xff_0000 | 1));
        counted(&stranger, b, "no_such_slot", &to(0xc8_0000 | qpn.get() & 0xffff));
        counted(&stranger, b, "wrong_state", &to(idle.get()));
        // From our peer's address, with a correct ICRC, but out of place.
        let from_peer = |header: &Header, payload: &[u8]| peer.packet(header, payload);
        for opcode in [Opcode::Ack, Opcode::ReadResponseOnly, Opcode::ReadResponseMiddle, Opcode::AtomicAck] {
            let psn = Psn::new(b.qps[0].attr().sq_psn.get().wrapping_add(5) & 0xff_ffff);
            let payload: &[u8] = if opcode.has_payload() { &[0x55; 1024] } else { &[] };
            counted(&peer, b, "unsolicited", &from_peer(&Header::new(opcode, qpn, psn), payload));
        }
        let mut nak = Header::new(Opcode::Ack, qpn, far);
        nak.aeth.syndrome = Syndrome::Nak(2);
        counted(&peer, b, "unsolicited", &from_peer(&nak, &[]));
        let replayed = Header { psn: b.qps[0].attr().rq_psn, ..write };
        counted(&peer, b, "duplicate_request", &from_peer(&replayed, &[0xaa; 8]));
        counted(&peer, b, "out_of_seq_request", &from_peer(&write, &[0xaa; 8]));
        let before = rounds.load(Ordering::Relaxed);
        until("the traffic to go on", || {
            rounds.load(Ordering::Relaxed) > before + 1 || traffic.is_finished()
        });
        stop.store(true, Ordering::Relaxed);
        traffic.join().unwrap();
    });
    check_write(&a, &b, 0x33, LEN);
    assert_eq!(b.counter("refused_access"), 0);
    assert!(b.device.next_event().is_none() && a.device.next_event().is_none());
}

/// A process that may write to our Unix socket can hand over packets, but gains no more than a
/// sender on the network.
#[test]
fn garbage_in_the_handover_socket_is_refused() {
    let (a, b) = two("127.57.1.1", "127.57.1.2");
    let slot = b.qps[0].qpn().get() >> 16;
    let socket = unix::connect(&format!("nobounce/slot/127.57.1.2/{slot}"));
    let give = |counter: &str, bytes: &[u8]| {
        let before = b.counter(counter);
        until(counter, || {
            unix::send(&socket, bytes); // a full queue is tried again
            b.quiet();
            b.counter(counter) > before
        });
    };
    let mut handover = b"nbh2\x04".to_vec();
    handover.extend_from_slice(&[slot as u8, 0xc0, 0, 0, 0, 0, 40, 127, 57, 1, 1]);
    handover.extend_from_slice(&[0; 12]);
    give("handover_refused", b"garbage");
    give("handover_refused", &handover);
    give("handover_refused", &[0xff; 60_000]);
    let mut other = handover.clone();
    other[5] ^= 1;
    other.extend_from_slice(&[0; 40]);
    give("handover_refused", &other);
    // Well formed, but what it carries is not: judged like everything else that arrives.
    let mut short = handover.clone();
    short.extend_from_slice(&[0, 0, 0, 0, 0, slot as u8]);
    give("malformed_too_short", &short);
    let mut packets = handover.clone();
    for _ in 0..50 {
        packets.extend_from_slice(&[4, 0, 0xff, 0xff, 0, slot as u8, 0, 2]);
        packets.extend_from_slice(&[0; 32]);
    }
    give("icrc_errors", &packets);
    assert!(b.counter("icrc_errors") >= 50);
    check_write(&a, &b, 1, LEN);
}

/// Numbers that look random and are the same each time.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[test]
fn a_flood_of_anything_takes_no_memory() {
    // In a process of its own, or the memory of other tests would be counted too.
    if role().is_none() {
        let done = child("forged::a_flood_of_anything_takes_no_memory", "flooded").status().unwrap();
        return assert!(done.success());
    }
    let (a, b) = two("127.57.2.1", "127.57.2.2");
    let stranger = Forger::new("127.57.2.9".parse().unwrap(), &b);
    let mut random = Random(12);
    let mut flood = |packets: usize| {
        let mut bytes = [0; 1100];
        for n in 0..packets {
            bytes.chunks_mut(8).for_each(|w| w.copy_from_slice(&random.next().to_ne_bytes()[..w.len()]));
            let len = random.next() as usize % bytes.len();
            if n % 2 == 0 {
                // Half of them look like ours up to the ICRC.
                bytes[..8].copy_from_slice(&[(random.next() % 24) as u8, 0, 0xff, 0xff, 0, 0, 0, 2]);
            }
            stranger.send(&bytes[..len]);
        }
    };
    flood(20_000); // what is kept for good is there afterwards
    let (resident_before, dropped_before) = (resident(), b.device.counters().dropped());
    flood(150_000);
    check_write(&a, &b, 1, LEN);
    let (grown, dropped) =
        (resident().saturating_sub(resident_before), b.device.counters().dropped() - dropped_before);
    println!("{dropped} of 150000 packets were looked at and dropped; resident memory grew by {grown} bytes");
    assert!(dropped > 1000, "{dropped} packets arrived");
    assert!(grown < 4 << 20, "{grown} bytes more");
}

/// A connected peer that sends random header fields with valid ICRCs.
#[test]
fn a_mad_peer_breaks_its_own_connection_only() {
    let (a, mut b) = two("127.57.3.1", "127.57.3.2");
    let mad = Forger::new("127.57.3.9".parse().unwrap(), &b);
    b.add_qp(QpLimits::default());
    let (victim, psn) = (&b.qps[1], 1000);
    let mut random = Random(99);
    let (mut deaths, mut failures, mut left) = (0, 0, Vec::new());
    b.fill(0x5a);
    let before = resident();
    let deadline = Instant::now() + Duration::from_secs(30);
    for n in 0_u32.. {
        // Where the engine's thread gets little CPU time, most packets find a dead queue pair or no
        // room.
        if n >= 30_000 && (deaths > 10 || Instant::now() > deadline) {
            break;
        }
        if n == 0 || victim.state() == QpState::Error {
            deaths += u32::from(n > 0);
            // Completions go with the reset.
            b.cq.poll(&mut left, 64).unwrap();
            failures += left.drain(..).filter(|c| c.status != Status::Success).count();
            victim.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
            victim.modify(&QpAttr::to_init(crate::common::ALL_ACCESS)).unwrap();
            let rtr = QpAttr::to_rtr(mad.flow.src, Qpn::new(0x55), Psn::new(psn), Mtu::Mtu256);
            victim.modify(&rtr).unwrap();
            // A packet that was still in flight may have failed it again by now.
            let _ = victim.modify(&QpAttr::to_rts(Psn::new(psn)));
            let sges = b.sge(0, 4096);
            victim.post_recv(&nobounce_nic::work::RecvRequest { wr_id: 1, sges: &sges }).unwrap();
            // Something to be answered wrongly.
            let read = Operation::Read(b.remote(0));
            let _ = victim.post_send(&nobounce_nic::work::SendRequest::new(2, read, &b.sge(0, 600)));
        }
        let Some(opcode) = Opcode::from_byte((random.next() % 25) as u8) else { continue };
        let near = |r: u64| Psn::new((psn + (r % 8) as u32).wrapping_sub(2) & 0xff_ffff);
        let mut header = Header::new(opcode, victim.qpn(), near(random.next()));
        header.ack_req = random.next().is_multiple_of(2);
        header.solicited = random.next().is_multiple_of(2);
        // The key is right half of the time, the address always outside the region or before its
        // last page.
        header.reth = Reth {
            addr: b.mr.addr() + [0, LEN as u64 - 4, u64::MAX - b.mr.addr()][random.next() as usize % 3],
            rkey: if random.next().is_multiple_of(2) { b.mr.rkey() } else { random.next() as u32 },
            len: [0, 1, 256, 257, u32::MAX][random.next() as usize % 5],
        };
        header.atomic.addr = header.reth.addr;
        header.atomic.rkey = header.reth.rkey;
        header.aeth.syndrome = Syndrome::from_byte(random.next() as u8);
        header.aeth.msn = random.next() as u32 & 0xff_ffff;
        let len = [0, 1, 88, 255, 256, 257, 600][random.next() as usize % 7];
        let payload = if opcode.has_payload() { vec![0xbb; len] } else { Vec::new() };
        header.pad = if opcode.has_payload() { (4 - len % 4) as u8 % 4 } else { 0 };
        let padded = [&payload[..], &[0; 3][..usize::from(header.pad)]].concat();
        mad.send(&mad.packet(&header, &padded));
        if n % 4 == 0 {
            // Drives the device; what comes back is of no interest.
            (0..4).for_each(|_| _ = b.cq.poll(&mut left, 64).unwrap());
            failures += left.drain(..).filter(|c| c.status != Status::Success).count();
        }
    }
    assert!(failures > 0);
    println!("the connection died {deaths} times; {:?}", b.device.counters());
    println!("resident memory grew by {}", resident().saturating_sub(before));
    assert!(deaths > 10);
    // Drain the socket, which is polled less often beside shared memory, before the last check.
    victim.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    // Between its two ends the region was open to it: outside of what it named, nothing changed.
    assert!(b.bytes(8192, LEN - 8192 - 8) == patterns(0x5a, 8192, LEN - 8192 - 8));
    check_write(&a, &b, 1, LEN);
}

/// Another user of this host can have any port but the well-known one: its packets are dropped,
/// even with everything in them right.
#[test]
fn packets_of_this_host_from_another_port_are_dropped() {
    let (a, b) = pair_with(&config("127.57.21.1"), &config("127.57.21.2"), LEN, Mtu::Mtu1024);
    b.post_recv(1, 0, 100);
    let forger = Forger::new(a.device.local(), &b);
    let header = Header::new(Opcode::SendOnly, b.qps[0].qpn(), b.qps[0].attr().rq_psn);
    counted(&forger, &b, "foreign_port", &forger.packet(&header, &[7; 8]));
    let mut reset = Header { opcode: Opcode::Ack, ..header };
    reset.aeth.syndrome = Syndrome::Nak(0);
    counted(&forger, &b, "foreign_port", &forger.packet(&reset, &[]));
    check_write(&a, &b, 3, LEN);
    assert_eq!(b.qps[0].state(), QpState::Rts);
}

/// A peer that writes to a ring sends nothing by UDP: what comes that way is not its own.
#[test]
fn packets_by_udp_beside_a_ring_are_dropped() {
    let near = |addr: &str| Config { link: LinkChoice::Auto, ..unguarded(addr) };
    let (a, b) = pair_with(&near("127.57.22.1"), &near("127.57.22.2"), LEN, Mtu::Mtu1024);
    check_write(&a, &b, 1, LEN);
    let forger = Forger::new(a.device.local(), &b);
    let header = Header::new(Opcode::SendOnly, b.qps[0].qpn(), Psn::new(7));
    counted(&forger, &b, "wrong_peer", &forger.packet(&header, &[7; 8]));
    check_write(&a, &b, 2, LEN);
}
