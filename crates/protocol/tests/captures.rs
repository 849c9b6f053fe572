//! The kernel's own packets (rdma_rxe, Linux 6.1, 6.12 and 7.2): each must parse, and its ICRC must
//! be what we compute.
//!
//! Unreliable connections (opcodes from 0x20 on) and datagrams (from 0x64 on, the connection
//! manager's among them) are in them too.

use std::collections::BTreeMap;

use nobounce_protocol::pcap::{Packet, Reader, Writer};
use nobounce_protocol::wire::icrc::{IcrcCheck, IcrcWriter, change_id};
use nobounce_protocol::wire::{Header, IdPolicy, IdVerdict, MAX_HEADER_LEN, Qpn, Service, Syndrome};

const IPV4: &[u8] = include_bytes!("data/rxe.pcap");
const MTU_4096: &[u8] = include_bytes!("data/rxe-mtu4096.pcap");
const IPV6: &[u8] = include_bytes!("data/rxe-ipv6.pcap");

fn packets(file: &[u8]) -> Vec<Packet<'_>> {
    Reader::new(file).expect("a capture").map(|packet| packet.expect("a whole frame")).collect()
}

fn all() -> impl Iterator<Item = Packet<'static>> {
    [IPV4, MTU_4096, IPV6].into_iter().flat_map(packets)
}

/// How many packets there are of each opcode byte.
fn opcodes(file: &[u8]) -> Vec<(u8, usize)> {
    let mut counts = BTreeMap::new();
    for packet in packets(file) {
        *counts.entry(packet.packet[0]).or_default() += 1;
    }
    counts.into_iter().collect()
}

#[test]
fn the_captures_hold_what_they_are_known_to_hold() {
    assert_eq!([IPV4, MTU_4096, IPV6].map(|file| packets(file).len()), [493, 337, 128]);
    #[rustfmt::skip]
    assert_eq!(opcodes(IPV4), [
        (0, 22), (1, 2), (2, 21), (3, 1), (4, 60), (5, 1), (6, 22), (7, 42), (8, 21), (9, 1), (10, 8), (11, 1),
        (12, 27), (13, 21), (14, 41), (15, 21), (16, 6), (17, 115), (18, 22), (19, 1), (20, 21), (23, 1),
        (32, 1), (33, 1), (35, 1), (36, 1), (38, 1), (39, 1), (40, 1), (43, 1), (100, 6), (101, 1),
    ]);
    #[rustfmt::skip]
    assert_eq!(opcodes(MTU_4096), [
        (4, 80), (5, 2), (10, 29), (11, 2), (12, 27), (16, 27), (17, 114), (18, 22), (19, 1), (20, 21), (23, 1),
        (36, 1), (37, 1), (42, 1), (43, 1), (100, 6), (101, 1),
    ]);
    #[rustfmt::skip]
    assert_eq!(opcodes(IPV6), [
        (0, 2), (1, 2), (2, 1), (3, 1), (4, 40), (5, 1), (6, 2), (7, 2), (8, 1), (9, 1), (10, 3), (11, 1),
        (12, 2), (13, 1), (14, 1), (15, 1), (16, 1), (17, 50), (18, 2), (19, 1), (20, 1), (23, 1),
        (32, 1), (33, 1), (35, 1), (36, 1), (38, 1), (39, 1), (40, 1), (43, 1), (100, 1), (101, 1),
    ]);
}

#[test]
fn every_icrc_is_what_we_compute() {
    for Packet { flow, ip_id, packet, .. } in all() {
        let body = &packet[..packet.len() - 4];
        let sent = u32::from_le_bytes(*packet.last_chunk().unwrap());
        assert_eq!(flow.icrc(ip_id, body), sent);
        let icrc_writer = IcrcWriter::new(flow, packet.len());
        assert_eq!(icrc_writer.icrc(ip_id, body), sent);

        let want = IcrcCheck::Valid { ip_id: flow.is_ipv4().then_some(ip_id) };
        assert_eq!(flow.verify(ip_id, packet), want);
        assert_eq!(icrc_writer.verify(ip_id, packet), want);

        let mut closed = packet.to_vec();
        closed[body.len()..].fill(0);
        icrc_writer.close(ip_id, &mut closed);
        assert_eq!(closed, packet);
    }
}

#[test]
fn the_kernels_identification_is_solved_for() {
    for Packet { flow, ip_id, packet, .. } in [IPV4, MTU_4096].into_iter().flat_map(packets) {
        let want = IcrcCheck::Valid { ip_id: Some(ip_id) };
        for guess in [0, 1, ip_id ^ 1, ip_id ^ 0x8000, !ip_id] {
            assert_eq!(flow.verify(guess, packet), want);
            assert_eq!(IcrcWriter::new(flow, packet.len()).verify(guess, packet), want);
        }
        let body = &packet[..packet.len() - 4];
        assert_eq!(change_id(flow.icrc(ip_id, body), body.len(), ip_id, 5), flow.icrc(5, body));
    }
}

#[test]
fn the_kernel_is_believed_and_mostly_near() {
    let mut near = BTreeMap::<_, (usize, usize)>::new();
    for file in [IPV4, MTU_4096] {
        let mut peers = BTreeMap::<_, IdPolicy>::new();
        for packet in packets(file) {
            let policy = peers.entry(packet.flow.src).or_default();
            let guess = policy.guess(0);
            let IcrcCheck::Valid { ip_id: Some(id) } = packet.flow.verify(guess, packet.packet) else {
                panic!("an ICRC that does not verify")
            };
            let verdict = policy.accept(id);
            assert!(verdict.is_accepted());
            let count = near.entry((file.len(), packet.flow.src)).or_default();
            count.0 += usize::from(verdict == IdVerdict::Near);
            count.1 += 1;
        }
    }
    assert_eq!(near.len(), 4);
    assert!(near.values().all(|(near, all)| near * 10 > all * 9), "{near:?}");
}

#[test]
fn every_packet_parses_and_comes_out_as_the_same_bytes() {
    for Packet { packet, .. } in all() {
        let parsed = Header::parse(packet).unwrap_or_else(|cause| panic!("{cause}: {packet:02x?}"));
        let mut out = [0; MAX_HEADER_LEN];
        let len = parsed.header.emit(&mut out);
        assert_eq!(len, parsed.header.len());
        assert_eq!(out[..len], packet[..len]);
        assert_eq!(parsed.payload.start, len);
        assert_eq!(parsed.payload.end + usize::from(parsed.header.pad) + 4, packet.len());
    }
}

#[test]
fn datagrams_mean_what_the_kernel_meant() {
    let mut seen = BTreeMap::new();
    for Packet { packet, .. } in all() {
        let header = Header::parse(packet).expect("a packet").header;
        if header.opcode.service() != Service::Ud {
            continue;
        }
        // The connection manager speaks from queue pair 1 to queue pair 1 by the standard's
        // well-known key.
        let is_management = header.dest_qpn == Qpn::new(1);
        assert_eq!(is_management, header.deth.source == Qpn::new(1));
        assert_eq!(is_management, header.deth.qkey == 0x8001_0000);
        *seen.entry((is_management, header.opcode.to_byte())).or_insert(0) += 1;
    }
    let seen: Vec<_> = seen.into_iter().collect();
    assert_eq!(seen, [((false, 100), 3), ((false, 101), 3), ((true, 100), 10)]);
}

#[test]
fn acknowledgements_mean_what_the_kernel_meant() {
    let (mut acks, mut rnr, mut access) = (0, 0, 0);
    for Packet { packet, .. } in packets(IPV4) {
        if packet[0] != 0x11 {
            continue;
        }
        match Header::parse(packet).expect("an acknowledgement").header.aeth.syndrome {
            Syndrome::Ack(_) => acks += 1,
            Syndrome::RnrNak(_) => rnr += 1,
            Syndrome::Nak(2) => access += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((acks, rnr, access), (77, 37, 1));
}

#[test]
fn what_the_writer_writes_the_reader_reads() {
    let sent = all().collect::<Vec<_>>();
    let mut writer = Writer::new(Vec::new()).unwrap();
    for Packet { time_ns, flow, ip_id, packet } in &sent {
        writer.write_packet(time_ns + 1, flow, *ip_id, packet).unwrap();
    }
    let file = writer.into_inner();
    let read = packets(&file);
    assert_eq!(read.len(), sent.len());
    for (read, sent) in read.iter().zip(&sent) {
        assert_eq!(*read, Packet { time_ns: sent.time_ns + 1, ..*sent });
    }
}

/// The frames around the kernel's packets, but for the MAC addresses and what we choose otherwise,
/// are those we make.
#[test]
fn the_writers_ip_header_is_the_kernels() {
    let first = packets(IPV4)[0];
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.write_packet(first.time_ns, &first.flow, first.ip_id, first.packet).unwrap();
    let ours = writer.into_inner();
    let (ours, theirs) = (&ours[24 + 16 + 12..], &IPV4[24 + 16 + 12..]);
    assert_eq!(ours[..2 + 20 + 8], theirs[..2 + 20 + 8], "EtherType, IPv4 with its checksum, UDP");
}

#[test]
fn a_packet_no_ip_packet_can_hold_is_refused() {
    let flow = packets(IPV4)[0].flow;
    let mut writer = Writer::new(Vec::new()).unwrap();
    let error = writer.write_packet(0, &flow, 0, &[0; 65_536]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    assert_eq!(writer.into_inner().len(), 24, "nothing of it was written");
}
