//! Properties of packets and their ICRC, over random ones.

use std::net::IpAddr;

use nobounce_protocol::pcap::Reader;
use nobounce_protocol::wire::icrc::{Flow, IcrcCheck, IcrcWriter, change_id};
use nobounce_protocol::wire::{
    Aeth, AtomicEth, Deth, Header, ICRC_LEN, MAX_HEADER_LEN, Opcode, Psn, Qpn, Reth, Syndrome,
};
use proptest::prelude::*;
use proptest::sample::select;

/// A header with every field of its opcode random, and all others as [`Header::new`] leaves them.
fn header(opcode: Opcode) -> impl Strategy<Value = Header> {
    let words = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>());
    let longs = (any::<u64>(), any::<u64>(), any::<u64>());
    let bth = (any::<bool>(), any::<bool>(), select(vec![0xffff_u16, 0x7fff]), any::<u32>(), any::<u32>());
    (bth, words, longs, any::<u8>()).prop_map(move |(bth, words, longs, syndrome)| {
        let (solicited, ack_req, pkey, qpn, psn) = bth;
        let mut header =
            Header { solicited, ack_req, pkey, ..Header::new(opcode, Qpn::new(qpn), Psn::new(psn)) };
        if opcode.has_deth() {
            header.deth = Deth { qkey: words.0, source: Qpn::new(words.1) };
        }
        if opcode.has_reth() {
            header.reth = Reth { addr: longs.0, rkey: words.0, len: words.1 };
        }
        if opcode.has_atomic() {
            header.atomic =
                AtomicEth { addr: longs.0, rkey: words.0, swap_or_add: longs.1, compare: longs.2 };
        }
        if opcode.has_aeth() {
            header.aeth = Aeth { syndrome: Syndrome::from_byte(syndrome), msn: words.2 & 0xff_ffff };
        }
        if opcode.has_atomic_ack() {
            header.original = longs.0;
        }
        if opcode.has_immediate() {
            header.immediate = words.3;
        }
        if opcode.has_invalidate() {
            header.invalidate = words.4;
        }
        header
    })
}

fn any_header() -> impl Strategy<Value = Header> {
    select(Opcode::ALL.to_vec()).prop_flat_map(header)
}

fn flow_of<A: Into<IpAddr>>((src, dst, src_port, dst_port): (A, A, u16, u16)) -> Flow {
    Flow { src: src.into(), dst: dst.into(), src_port, dst_port }
}

fn ipv4_flow() -> impl Strategy<Value = Flow> {
    any::<([u8; 4], [u8; 4], u16, u16)>().prop_map(flow_of)
}

fn ipv6_flow() -> impl Strategy<Value = Flow> {
    // The first byte keeps the addresses from being IPv4 ones in disguise.
    any::<([u8; 16], [u8; 16], u16, u16)>().prop_map(|mut flow| {
        flow.0[0] |= 0x20;
        flow_of(flow)
    })
}

fn any_flow() -> impl Strategy<Value = Flow> {
    prop_oneof![ipv4_flow(), ipv6_flow()]
}

fn bytes(len: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), len)
}

proptest! {
    #[test]
    fn what_is_emitted_is_parsed_back(header in any_header(), payload in bytes(0..300)) {
        let payload = if header.opcode.has_payload() { payload } else { Vec::new() };
        let header = Header { pad: u8::try_from(payload.len().wrapping_neg() & 3).unwrap(), ..header };
        let mut packet = vec![0xee; MAX_HEADER_LEN];
        let len = header.emit(&mut packet);
        prop_assert_eq!(len, header.len());
        prop_assert!(packet[len..].iter().all(|byte| *byte == 0xee), "emit wrote past the header");
        packet.truncate(len);
        packet.extend_from_slice(&payload);
        packet.resize(packet.len() + usize::from(header.pad) + ICRC_LEN, 0);

        let parsed = Header::parse(&packet).unwrap();
        prop_assert_eq!(parsed.header, header);
        prop_assert_eq!(&packet[parsed.payload.clone()], &payload[..]);
        // Cut anywhere, it never parses to more than there is.
        for cut in 0..packet.len() {
            if let Ok(parsed) = Header::parse(&packet[..cut]) {
                prop_assert!(parsed.payload.end + ICRC_LEN <= cut);
            }
        }
    }

    #[test]
    fn no_bytes_make_us_panic(flow in any_flow(), id: u16, mut packet in bytes(0..120), opcode in 0_u8..0x68) {
        for _ in 0..2 {
            if let Ok(parsed) = Header::parse(&packet) {
                prop_assert!(parsed.payload.start <= parsed.payload.end);
                prop_assert!(parsed.payload.end + ICRC_LEN <= packet.len());
            }
            let icrc_writer = IcrcWriter::new(flow, packet.len());
            prop_assert_eq!(flow.verify(id, &packet), icrc_writer.verify(id, &packet));
            let mut closed = packet.clone();
            icrc_writer.close(id, &mut closed);
            // The second time as something the parser looks further into.
            if let Some(bth) = packet.first_chunk_mut::<4>() {
                *bth = [opcode, bth[1] & 0xf0, 0xff, 0xff];
            }
        }
    }

    #[test]
    fn no_file_makes_the_reader_panic(mut file in bytes(0..400), magic: bool) {
        if magic && file.len() > 24 {
            file[..4].copy_from_slice(&0xa1b2_c3d4_u32.to_le_bytes());
            file[20..24].copy_from_slice(&1_u32.to_le_bytes());
        }
        if let Ok(reader) = Reader::new(&file) {
            prop_assert!(reader.count() <= file.len());
        }
    }

    #[test]
    fn a_flipped_bit_never_verifies_over_ipv6(flow in ipv6_flow(), mut packet in bytes(16..2000), bit: usize) {
        flow.close(0, &mut packet);
        prop_assert_eq!(flow.verify(0, &packet), IcrcCheck::Valid { ip_id: None });
        let bit = bit % (8 * packet.len());
        packet[bit / 8] ^= 1 << (bit % 8);
        // Byte 4 holds congestion marks, which routers may set.
        let want = if bit / 8 == 4 { IcrcCheck::Valid { ip_id: None } } else { IcrcCheck::Bad };
        prop_assert_eq!(flow.verify(0, &packet), want);
        prop_assert_eq!(IcrcWriter::new(flow, packet.len()).verify(0, &packet), want);
    }

    #[test]
    fn a_flipped_bit_never_verifies_with_the_same_id_over_ipv4(
        flow in ipv4_flow(), id: u16, mut packet in bytes(16..2000), bit: usize,
    ) {
        flow.close(id, &mut packet);
        let bit = bit % (8 * packet.len());
        prop_assume!(bit / 8 != 4);
        packet[bit / 8] ^= 1 << (bit % 8);
        prop_assert_ne!(flow.verify(id, &packet), IcrcCheck::Valid { ip_id: Some(id) });
    }

    #[test]
    fn a_changed_id_is_as_if_computed_anew(flow in ipv4_flow(), body in bytes(12..5000), from: u16, to: u16) {
        let (old, new) = (flow.icrc(from, &body), flow.icrc(to, &body));
        prop_assert_eq!(change_id(old, body.len(), from, to), new);
        let icrc_writer = IcrcWriter::new(flow, body.len() + ICRC_LEN);
        prop_assert_eq!(icrc_writer.change_id(old, from, to), new);
        prop_assert_eq!(icrc_writer.icrc(to, &body), new);
    }

    #[test]
    fn any_id_is_solved_for(flow in ipv4_flow(), mut packet in bytes(16..5000), id: u16, guess: u16) {
        flow.close(id, &mut packet);
        prop_assert_eq!(flow.verify(guess, &packet), IcrcCheck::Valid { ip_id: Some(id) });
        prop_assert_eq!(IcrcWriter::new(flow, packet.len()).verify(guess, &packet), IcrcCheck::Valid { ip_id: Some(id) });
    }
}
