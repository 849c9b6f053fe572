use std::net::Ipv4Addr;

use nobounce_protocol::wire::ROCE_PORT;
use nobounce_protocol::wire::icrc::IcrcCheck;

use super::*;
use crate::links::SOURCE_PORTS;
use crate::links::wire_packets::SLOT_BYTE;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const THERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

const FAR: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

fn batch(max_segments: usize) -> TxBatch {
    let caps = Capabilities {
        local: HERE,
        source_ports: [ROCE_PORT; SOURCE_PORTS],
        max_segments,
        receive_offload: true,
        max_path_mtu: 4096,
        usual_hops: 64,
        sealed: false,
        host_addresses: &[],
    };
    TxBatch::new(caps)
}

fn add(batch: &mut TxBatch, dst: IpAddr, len: usize, fill: u8) -> bool {
    batch.put(dst, 7, len, |room| {
        room.fill(fill);
        room[SLOT_BYTE] = 0;
    })
}

fn ids(batch: &TxBatch) -> Vec<u16> {
    batch.packets().iter().map(|p| p.ip_id).collect()
}

fn all_closed(batch: &TxBatch) {
    for p in batch.packets() {
        let verdict = p.flow(HERE).verify(p.ip_id, &batch.bytes(p));
        assert_eq!(verdict, IcrcCheck::Valid { ip_id: Some(p.ip_id) }, "{p:?}");
    }
}

#[test]
fn neighbours_of_one_size_and_one_destination_form_a_group() {
    let mut b = batch(4);
    for (dst, len) in
        [(THERE, 100), (THERE, 100), (THERE, 60), (THERE, 60), (HERE, 60), (HERE, 60), (HERE, 100)]
    {
        assert!(add(&mut b, dst, len, 9));
    }
    assert_eq!(ids(&b), [0, 1, 2, 0, 0, 1, 0], "a shorter one closes the group, a longer one opens another");
    assert_eq!(
        (b.wire().group_end(0), b.wire().group_end(3), b.wire().group_end(4), b.wire().group_end(6)),
        (3, 4, 6, 7)
    );
    all_closed(&b);
}

#[test]
fn a_group_ends_at_the_segment_limit_at_the_byte_limit_and_at_another_slot() {
    let mut b = batch(4);
    (0..6).for_each(|_| assert!(add(&mut b, THERE, 100, 1)));
    assert_eq!(ids(&b), [0, 1, 2, 3, 0, 1]);

    let mut b = batch(64);
    (0..16).for_each(|_| assert!(add(&mut b, THERE, 4112, 1)));
    assert_eq!(b.wire().group_end(0), MAX_GROUP / 4112);
    all_closed(&b);

    let mut b = batch(64);
    for slot in [1, 1, 2] {
        assert!(b.put(THERE, 0, 32, |room| room[SLOT_BYTE] = slot));
    }
    assert_eq!(ids(&b), [0, 1, 0]);
}

#[test]
fn without_segmentation_every_packet_is_alone_with_id_0() {
    let mut b = batch(1);
    (0..5).for_each(|i| assert!(add(&mut b, THERE, 100, i)));
    assert_eq!(ids(&b), [0; 5]);
    all_closed(&b);
}

#[test]
fn source_ports_part_groups_only_where_they_differ() {
    let mut b = batch(64);
    for hint in [0, 1, 9] {
        assert!(b.put(THERE, hint, 32, |_| {}));
    }
    assert_eq!(ids(&b), [0, 1, 2], "all hints lead to one port");

    let mut caps = b.capabilities();
    caps.source_ports = std::array::from_fn(|i| 0xc000 + u16::try_from(i).unwrap());
    let mut b = TxBatch::new(caps);
    for hint in [0, 1, 9] {
        assert!(b.put(FAR, hint, 32, |_| {}));
    }
    assert_eq!(ids(&b), [0, 0, 1]);
    assert_eq!(b.packets().iter().map(|p| p.src_port).collect::<Vec<_>>(), [0xc000, 0xc001, 0xc001]);
    all_closed(&b);
}

#[test]
fn an_aborted_packet_leaves_no_trace() {
    let mut b = batch(64);
    assert!(add(&mut b, THERE, 64, 1));
    let to = PacketDestination { addr: &HERE, port_hint: 0, ecn: false, local: None };
    let mut space = b.begin(&to, PacketShape::single(4000, 12), PayloadSource::Copy).unwrap();
    space.bytes.put(0, &[0xee; 4000]);
    b.abort();
    b.commit(None); // commits nothing
    assert!(add(&mut b, THERE, 64, 2));
    assert_eq!(ids(&b), [0, 1]);
    assert_eq!(b.packets()[1].start as usize, LEAD + 64, "packets are contiguous");
    all_closed(&b);
}

#[test]
fn a_full_batch_says_so_and_takes_packets_again_once_cleared() {
    let mut b = batch(64);
    let mut n = 0;
    while add(&mut b, THERE, 4112, 3) {
        n += 1;
    }
    assert_eq!(n, SLAB / 4112);
    b.clear();
    assert!(b.is_empty() && add(&mut b, THERE, MAX_PACKET, 3));
    b.clear();
    n = 0;
    while add(&mut b, THERE, 16, 3) {
        n += 1;
    }
    assert_eq!(n, MAX_PACKETS);
}

#[test]
fn long_packets_fill_one_segmented_send_and_no_packet_begins_another() {
    let mut b = batch(64);
    assert!(add(&mut b, THERE, 4112, 0));
    assert_eq!((b.room_for(4112), b.ends_with_full_send()), (14, false));
    (0..14).for_each(|i| assert!(add(&mut b, THERE, 4112, i)));
    assert!(b.has_room() && b.ends_with_full_send());
    assert_eq!((b.room_for(4112), b.wire().group_end(0)), (0, 15));
    // Longer by an address, as the first of a message: those behind it make a send of their own.
    b.clear();
    (0..2).for_each(|i| assert!(add(&mut b, THERE, 4128 - 16 * i, 0)));
    assert_eq!((b.room_for(4112), b.ends_with_full_send()), (14, false));
    // Without segmented sends there is nothing to be filled, and short packets fill theirs by their
    // number.
    for (mut b, len) in [(batch(1), 4112), (batch(64), 64)] {
        (0..15).for_each(|_| assert!(add(&mut b, THERE, len, 0)));
        assert!(b.room_for(len) > 0 && !b.ends_with_full_send(), "{len}");
    }
}

#[test]
fn moved_and_ungrouped_packets_keep_a_right_icrc() {
    let mut a = batch(64);
    (0..9).for_each(|i| assert!(add(&mut a, THERE, 300, i)));
    let mut b = batch(64);
    for p in a.packets().iter().step_by(2) {
        assert!(b.push(p, &a.bytes(p)));
    }
    assert_eq!(ids(&b), [0, 1, 2, 3, 4]);
    all_closed(&b);
    b.wire_mut().ungroup(0, 5);
    assert_eq!(ids(&b), [0; 5]);
    all_closed(&b);
}
