//! A capture of our own traffic holds every packet with a correct ICRC, and every opcode of every
//! service. With `NOBOUNCE_TEST_CAPTURES` naming a folder the captures stay there, for
//! tests/tshark.sh.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::common::unreliable::connect_uc;
use crate::common::{End, config, pair_with, reconnect};
use nobounce_nic::soft::{Config, Retransmit};
use nobounce_nic::work::{Mtu, Operation, RecvRequest, Remote, SendRequest, Status};
use nobounce_protocol::pcap::Reader;
use nobounce_protocol::wire::icrc::IcrcCheck;
use nobounce_protocol::wire::{Feth, Header, Marker, Opcode};

const MTU: Mtu = Mtu::Mtu256;
/// Offset of fetched values, apart from the bytes that are sent. Otherwise a payload could by
/// chance begin with 06 00 00 00, which tshark takes for an EtherType.
const FETCHED: u64 = 2048;

/// One, two and three packets of every operation, some refusals, and one READ of nothing.
fn say_everything(a: &End, b: &End) {
    [a, b].iter().for_each(|end| end.fill(0x5a));
    for len in [1, 256, 300, 700] {
        b.post_recv(1, 0, 700);
        b.post_recv(2, 0, 700);
        b.post_recv(3, 0, 0);
        a.post(Operation::Send, 0, len);
        a.post(Operation::SendImmediate(0x0102_0304), 0, len);
        a.post(Operation::WriteImmediate(b.remote(0), 5), 0, len);
        a.post(Operation::Write(b.remote(0)), 0, len);
        a.post(Operation::Read(b.remote(0)), FETCHED, len);
        a.post(Operation::CompareSwap { remote: b.remote(8), compare: 1, swap: 2 }, FETCHED, 8);
        a.post(Operation::FetchAdd { remote: b.remote(8), add: 3 }, FETCHED, 8);
        a.post(Operation::AtomicWrite(b.remote(8)), 0, 8);
        a.post(
            Operation::Flush { remote: b.remote(0), len, feth: Feth::new(Feth::GLOBAL, Feth::RANGE) },
            0,
            0,
        );
        a.succeed(9);
        b.succeed(3);
    }
    // Shorter ones are sent as WRITEs of one packet.
    a.post(Operation::Write(b.remote(0)), 0, 17 * MTU.bytes());
    a.succeed(1);
    b.post_recv(1, 0, 8);
    a.post(Operation::Send, 0, 0);
    a.post(Operation::Read(b.remote(0)), 0, 0);
    a.post(Operation::Write(b.remote(0)), 0, 0);
    a.succeed(3);
    b.succeed(1);
    for len in [8, 700] {
        b.post_recv(1, 0, 700);
        a.post(Operation::SendInvalidate(b.mr.rkey()), 0, len);
        assert_eq!(a.status(), Status::RemoteAccess);
        assert_eq!(b.status(), Status::LocalAccess);
        reconnect(a, b, MTU);
    }
    a.post(Operation::Write(Remote::default()), 0, 8);
    assert_eq!(a.status(), Status::RemoteAccess);
}

/// One, two and three packets over an unreliable connection, and datagrams.
fn say_the_unreliable(a: &mut End, b: &mut End) {
    a.add_uc(None);
    b.add_uc(None);
    connect_uc(a, b, MTU);
    connect_uc(b, a, MTU);
    let receive = |end: &End, len| {
        end.last_qp().post_recv(&RecvRequest { wr_id: 1, sges: &end.sge(0, len) }).unwrap();
    };
    for len in [1, 300, 700] {
        (0..3).for_each(|_| receive(b, 700));
        for op in [
            Operation::Send,
            Operation::SendImmediate(1),
            Operation::Write(b.remote(0)),
            Operation::WriteImmediate(b.remote(0), 2),
        ] {
            a.last_qp().post_send(&SendRequest::new(1, op, &a.sge(0, len))).unwrap();
        }
        a.succeed(4);
        b.succeed(3);
    }
    a.add_ud(None);
    b.add_ud(None);
    for op in [Operation::Send, Operation::SendImmediate(3)] {
        receive(b, 140);
        a.send_to(b, op, 0, 99);
        a.succeed(1);
        b.succeed(1);
    }
}

fn capture(addr: &str, name: &str) {
    let all: BTreeSet<u8> = (0..=255).filter(|byte| Opcode::from_byte(*byte).is_some()).collect();
    // On a busy machine a READ that had to be repeated asks for single packets, and its answer has
    // no middle.
    let found = (0..5).map(|_| record(addr, name)).find(|opcodes| *opcodes == all);
    let found = found.unwrap_or_else(|| record(addr, name));
    assert_eq!(found, all, "every opcode was said");
}

/// The opcodes of a capture, every packet of which is right.
fn record(addr: &str, name: &str) -> BTreeSet<u8> {
    let kept = std::env::var_os("NOBOUNCE_TEST_CAPTURES").map(PathBuf::from);
    let folder = kept.clone().unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let path = folder.join(name);
    // Only the standard's packets.
    let config = Config { retransmit: Retransmit::GoBackN, ..config(addr) };
    let recorded = Config { pcap: Some(path.clone()), ..config.clone() };
    let (mut a, mut b) = pair_with(&recorded, &config, 16_384, MTU);
    say_everything(&a, &b);
    say_the_unreliable(&mut a, &mut b);
    drop((a, b));
    let file = std::fs::read(&path).unwrap();
    let mut opcodes = BTreeSet::new();
    let mut packets = 0;
    for packet in Reader::new(&file).unwrap() {
        let packet = packet.unwrap();
        let verdict = packet.flow.verify(packet.ip_id, packet.packet);
        let expected = if packet.flow.is_ipv4() { Some(packet.ip_id) } else { None };
        assert_eq!(verdict, IcrcCheck::Valid { ip_id: expected }, "packet {packets} of {name}");
        packets += 1;
        // Now and then a sender asks how far the receiver is, in packets of our own.
        if Marker::parse(packet.packet).is_none() {
            opcodes.insert(Header::parse(packet.packet).unwrap().header.opcode.to_byte());
        }
    }
    println!("{packets} packets in {name}");
    if kept.is_none() {
        std::fs::remove_file(path).unwrap();
    }
    opcodes
}

#[test]
fn every_opcode_over_ipv4() {
    capture("127.60.0.1", "v4.pcap");
}

#[test]
fn every_opcode_over_ipv6() {
    capture("::1", "v6.pcap");
}
