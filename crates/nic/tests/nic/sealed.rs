//! Devices that share a secret: traffic, connection requests, and hostile packets beside a session.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::FromRawFd as _;
use std::time::{Duration, Instant};

use crate::cm::Side;
use crate::common::{End, LIMIT, check_write, pair_with, patterns, unguarded_udp, until, waive};
use crate::forged::Forger;
use nobounce_nic::links::sealed::{KeySource, SealKeys};
use nobounce_nic::soft::Config;
use nobounce_nic::work::{Mtu, Operation, Status};
use nobounce_protocol::cm::Event;
use nobounce_protocol::seal::{KeyRing, SealMode};
use nobounce_protocol::wire::{Header, Opcode, Psn, Reth};

const LEN: usize = 64 << 10;

fn keyed(addr: &str, digits: &str, mode: SealMode) -> Config {
    let ring = KeyRing::parse(&digits.repeat(32)).unwrap();
    Config {
        key: Some(SealKeys { source: KeySource::Descriptor(-1), ring, mode, version: None }),
        ..unguarded_udp(addr)
    }
}

#[test]
fn traffic_between_devices_of_one_key_in_both_modes() {
    for (net, mode) in [(1, SealMode::Encrypt), (2, SealMode::Authenticate)] {
        let at = |host: u8| keyed(&format!("127.61.{net}.{host}"), "5a", mode);
        let (a, b) = pair_with(&at(1), &at(2), LEN, Mtu::Mtu4096);
        for seed in 0..20 {
            check_write(&a, &b, seed, LEN);
            check_write(&b, &a, seed + 100, 8 + usize::from(seed));
        }
        a.post(Operation::Read(b.remote(0)), 0, LEN as u32);
        a.succeed(1);
        assert!(a.bytes(0, LEN) == b.bytes(0, LEN));
        for end in [&a, &b] {
            assert!(end.counter("sealed_sent") > 20 && end.counter("sealed_received") > 20);
            assert_eq!(end.device.counters().dropped(), 0);
            // Packets that are longer by the seal still leave in segmented sends.
            assert_eq!(end.counter("udp_tx_lost_too_long") + end.counter("udp_tx_unsegmented"), 0);
            for reason in ["plain", "malformed", "unknown_key", "unknown_session", "forged", "replayed"] {
                assert_eq!(end.counter(&format!("sealed_drop_{reason}")), 0, "{reason}");
            }
        }
    }
}

/// Another key, no key here, no key there: nothing passes, and the counters say why.
#[test]
fn devices_of_different_keys_do_not_connect() {
    let plain = unguarded_udp;
    let key = |addr: &str, digits: &str| keyed(addr, digits, SealMode::Encrypt);
    for (ca, cb, counter) in [
        (key("127.61.3.1", "01"), key("127.61.3.2", "02"), "sealed_drop_unknown_key"),
        (plain("127.61.3.3"), key("127.61.3.4", "02"), "sealed_drop_plain"),
        (key("127.61.3.5", "01"), plain("127.61.3.6"), "malformed_transport_version"),
    ] {
        let (a, b) = pair_with(&ca, &cb, LEN, Mtu::Mtu1024);
        b.fill(7);
        a.post(Operation::Write(b.remote(0)), 0, 100);
        assert_eq!(a.status(), Status::RetryExceeded, "{counter}");
        assert!(b.counter(counter) > 0, "{counter}");
        assert!(b.bytes(0, LEN) == patterns(7, 0, LEN));
    }
}

/// A device that is opened anew has other sessions: its peers ask for them.
#[test]
fn a_peer_that_is_opened_anew_is_reached_again() {
    let at = |host: u8| keyed(&format!("127.61.4.{host}"), "5a", SealMode::Encrypt);
    let (mut a, b) = pair_with(&at(1), &at(2), LEN, Mtu::Mtu1024);
    check_write(&a, &b, 1, LEN);
    drop(b);
    let mut b = End::open(&at(2), LEN);
    b.add_qp(Default::default());
    a.add_qp(Default::default());
    a.qps.swap(0, 1);
    crate::common::connect(&a, 0, &b, 0, Mtu::Mtu1024);
    check_write(&a, &b, 2, LEN);
    assert_eq!(a.counter("sealed_sessions"), 2);
}

#[test]
fn connection_requests_need_the_key() {
    let key = |addr: &str| keyed(addr, "5a", SealMode::Encrypt);
    let listener = Side::listening_as(&key("127.61.5.1"), 8);
    let friend = Side::open_as(&key("127.61.5.2"));
    friend.connect(listener.local(), 2);
    let event = listener.event_within(LIMIT);
    assert!(matches!(event, Some(Event::Request { .. })), "{event:?}");
    let stranger = Side::open_as(&unguarded_udp("127.61.5.3"));
    stranger.connect(listener.local(), 2);
    let device = listener.cm.device();
    let dropped = || device.link_counters().iter().find(|(name, _)| *name == "sealed_drop_plain").unwrap().1;
    until("the request to be dropped", || dropped() > 0);
    assert!(listener.event_within(Duration::from_millis(50)).is_none());
}

/// Reads packets of the loopback interface, as who has the network does.
struct Tap(File);

impl Tap {
    fn open() -> io::Result<Self> {
        let protocol = i32::from(u16::to_be(libc::ETH_P_IP as u16));
        // SAFETY: no pointers are passed; the result is checked before it is owned.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, protocol) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, without another owner.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// The UDP payload of the next packet of a device to that host.
    fn next(&mut self, to: [u8; 4]) -> Option<Vec<u8>> {
        let mut packet = vec![0; 70_000];
        loop {
            let len = self.0.read(&mut packet).ok()?;
            let is_udp = len >= 28 && packet[9] == 17 && packet[16..20] == to && packet[0] == 0x45;
            if is_udp && packet[20..24] == [4791_u16.to_be_bytes(), 4791_u16.to_be_bytes()].concat() {
                return Some(packet[28..len].to_vec());
            }
        }
    }
}

/// Recorded packets, replayed, changed and cut, and forged ones, plain and sealed, beside a session
/// that goes on: no byte changes but those it writes. `NOBOUNCE_HOSTILE` sets how many.
#[test]
fn hostile_packets_change_nothing() {
    let mut tap = match Tap::open() {
        Ok(tap) => tap,
        Err(error) => {
            return waive("tap", &format!("no packet socket ({error}): recorded packets are not replayed"));
        }
    };
    let count: u64 = std::env::var("NOBOUNCE_HOSTILE").map_or(40_000, |count| count.parse().unwrap());
    // Without GSO, so that they are recorded one by one.
    let keyed = |host: u8| keyed(&format!("127.61.6.{host}"), "5a", SealMode::Encrypt);
    let at = |host: u8| Config { gso: false, ..keyed(host) };
    let (a, b) = pair_with(&at(1), &at(2), LEN, Mtu::Mtu1024);
    // From the address of the peer, by a port of its own: all that its user could do.
    let forger = Forger::new(a.device.local(), &b);
    let (half, seed) = (LEN / 2, 9);
    b.fill(seed);
    let mut random = crate::forged::Random(35);
    let (mut recorded, mut rounds, mut sent) = (Vec::new(), 0_u8, 0_u64);
    let start = Instant::now();
    while sent < count {
        rounds = rounds.wrapping_add(1);
        a.buffer.write_at(0, &patterns(rounds, 0, half)).unwrap();
        // Old and new ones; what the forger sent is not recorded again.
        while tap.next([127, 61, 6, 2]).is_some() {}
        a.post(Operation::Write(b.remote(0)), 0, half as u32);
        a.succeed(1);
        while let Some(packet) = tap.next([127, 61, 6, 2]) {
            if recorded.len() == 512 {
                recorded.swap_remove(random.next() as usize % 512);
            }
            recorded.push(packet);
        }
        a.post(Operation::Write(b.remote(0)), 0, half as u32);
        for _ in 0..500 {
            let draw = random.next();
            let mut packet = match recorded.get(draw as usize % recorded.len().max(1)) {
                Some(packet) if !draw.is_multiple_of(5) => packet.clone(),
                _ => {
                    let mut header = Header::new(Opcode::WriteOnly, b.qps[0].qpn(), Psn::new(draw as u32));
                    let remote = b.remote(half as u64 + draw % 1000);
                    header.reth = Reth { addr: remote.addr, rkey: remote.rkey, len: 16 };
                    forger.packet(&header, &[0xee; 16])
                }
            };
            let (at, len) = ((draw >> 8) as usize % packet.len(), packet.len());
            match draw >> 4 & 3 {
                0 => packet[at] ^= 1 << (draw >> 40 & 7),
                1 => packet.truncate(at),
                2 => packet.iter_mut().skip(24).for_each(|byte| *byte = random.next() as u8),
                _ => assert_eq!(packet.len(), len, "replayed"),
            }
            forger.send(&packet);
            sent += 1;
        }
        a.succeed(1);
        assert!(b.bytes(0, half) == patterns(rounds, 0, half));
        assert!(b.bytes(half, LEN - half) == patterns(seed, half, LEN - half), "changed after {sent}");
        assert!(start.elapsed() < 20 * LIMIT);
    }
    assert!(recorded.len() > 30, "{} packets were recorded", recorded.len());
    check_write(&a, &b, 77, LEN);
    let reasons = ["plain", "malformed", "forged", "replayed", "unknown_session", "unknown_key"];
    let counts = reasons.map(|reason| b.counter(&format!("sealed_drop_{reason}")));
    println!("{sent} hostile packets, dropped as {reasons:?}: {counts:?}");
    assert!(counts[0] > 0 && counts[2] > 0 && counts[3] > 0, "{counts:?}");
    assert_eq!((a.counter("sealed_sessions"), b.counter("sealed_sessions")), (1, 1));
}
