//! Sends that the kernel refuses.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use nobounce_protocol::wire::icrc::{Flow, IcrcCheck};

use super::*;
use crate::links::udp::{UdpConfig, UdpLink};
use crate::links::{Link, RxDatagram};

fn pair(last: u8) -> (UdpLink, UdpLink) {
    let open = |net| {
        let mut link = UdpLink::open(&UdpConfig::new(Ipv4Addr::new(127, 31, net, last).into())).unwrap();
        // Until it knows its number.
        while link.next_deadline().is_some() {
            link.receive(&mut |_| {});
        }
        link
    };
    (open(0), open(1))
}

fn fill(batch: &mut TxBatch, dst: IpAddr, packets: u8, len: usize) {
    for n in 0..packets {
        assert!(batch.put(dst, 0, len, |room| {
            room.fill(0);
            room[12] = n;
        }));
    }
}

/// Receives `want` packets; all must have a right ICRC.
fn receive(link: &mut UdpLink, want: usize) -> Vec<u8> {
    let (mut got, local, start) = (Vec::new(), link.local(), Instant::now());
    let mut sink = |d: &RxDatagram<'_>| {
        let flow = Flow { src: d.src, dst: local, src_port: d.src_port, dst_port: ROCE_PORT };
        assert!(matches!(flow.verify(d.ip_id, d.bytes), IcrcCheck::Valid { .. }));
        got.push(d.bytes[12]);
    };
    let mut n = 0;
    while n < want {
        assert!(start.elapsed() < Duration::from_secs(20), "{n} of {want}");
        n += link.receive(&mut sink);
    }
    got
}

#[test]
fn a_full_send_buffer_keeps_the_rest_until_there_is_room() {
    let (mut a, mut b) = pair(1);
    let mut batch = TxBatch::new(a.capabilities());
    a.transmitter.pretend.extend([libc::EAGAIN, libc::EAGAIN]);
    fill(&mut batch, b.local(), 10, 100);
    a.send(&mut batch);
    assert!(batch.is_empty() && a.send_blocked());
    assert!(a.next_deadline().is_some_and(|t| t > now_ns() - 1_000_000_000));
    fill(&mut batch, b.local(), 4, 100);
    a.send(&mut batch);
    assert!(batch.is_empty() && a.send_blocked());
    assert_eq!(a.transmitter.sent.blocked, 4, "one batch is kept, a further one is lost");
    a.receive(&mut |_| {});
    assert!(!a.send_blocked() && a.next_deadline().is_none());
    assert_eq!(receive(&mut b, 10), (0..10).collect::<Vec<_>>());
    a.transmitter.pretend.push_back(libc::EAGAIN);
    fill(&mut batch, b.local(), 3, 100);
    a.send(&mut batch);
    assert!(a.send_blocked());
    a.send(&mut batch); // an empty batch tries again too
    assert_eq!(receive(&mut b, 3), [0, 1, 2]);
}

#[test]
fn a_path_without_segmentation_gets_packets_one_by_one() {
    let (mut a, mut b) = pair(2);
    let mut batch = TxBatch::new(a.capabilities());
    a.transmitter.pretend.push_back(libc::EIO);
    for _ in 0..2 {
        fill(&mut batch, b.local(), 10, 100);
        a.send(&mut batch);
        assert_eq!(receive(&mut b, 10), (0..10).collect::<Vec<_>>());
    }
    assert_eq!(a.transmitter.sent.unsegmented, 18, "the second batch is not even tried");
}

#[test]
fn a_refused_group_is_counted_by_cause_and_the_next_one_leaves() {
    type Counter = fn(&SendCounts) -> u64;
    let causes: [(i32, Counter); 5] = [
        (libc::EMSGSIZE, |s| s.too_long),
        (libc::ENOBUFS, |s| s.no_buffers),
        (libc::ENETUNREACH, |s| s.unreachable),
        (libc::EPERM, |s| s.not_permitted),
        (libc::EBADF, |s| s.other),
    ];
    let (mut a, mut b) = pair(3);
    let mut batch = TxBatch::new(a.capabilities());
    for (errno, count) in causes {
        a.transmitter.pretend.push_back(errno);
        fill(&mut batch, b.local(), 3, 60);
        fill(&mut batch, b.local(), 2, 100);
        a.send(&mut batch);
        assert_eq!(count(&a.transmitter.sent), 3, "errno {errno}");
        assert_eq!(receive(&mut b, 2), [0, 1]);
    }
    a.transmitter.pretend.push_back(libc::EINTR);
    fill(&mut batch, b.local(), 3, 60);
    a.send(&mut batch);
    assert_eq!(receive(&mut b, 3), [0, 1, 2]);
}

#[test]
fn what_cannot_be_reached_is_lost_and_harms_no_other_packet() {
    let (mut a, mut b) = pair(4);
    let mut batch = TxBatch::new(a.capabilities());
    // From a loopback address nothing outside can be reached: the kernel refuses each of these.
    fill(&mut batch, Ipv4Addr::new(192, 0, 2, 1).into(), 3, 60);
    fill(&mut batch, b.local(), 1, 60);
    a.send(&mut batch);
    assert_eq!(receive(&mut b, 1), [0]);
    let lost: u64 = a.counters().iter().filter(|(n, _)| n.starts_with("udp_tx_lost")).map(|(_, v)| v).sum();
    assert_eq!(lost, 3, "{:?}", a.counters());
}

/// An explicit hop limit of 64, which hardware sets, must not give every packet control data of its
/// own.
#[test]
fn the_hop_limit_that_packets_have_anyway_needs_no_control_data() {
    let (a, b) = pair(41);
    let usual = a.capabilities().usual_hops;
    assert_ne!(usual, 0, "the kernel says it");
    let mut batch = TxBatch::new(a.capabilities());
    batch.set_ip_options(IpOptions { traffic_class: 0, hop_limit: usual });
    fill(&mut batch, b.local(), 1, 60);
    assert_eq!(batch.packets()[0].ip_options, IpOptions::default());
    batch.set_ip_options(IpOptions { traffic_class: 4, hop_limit: usual - 1 });
    fill(&mut batch, b.local(), 1, 60);
    assert_eq!(batch.packets()[1].ip_options, IpOptions { traffic_class: 4, hop_limit: usual - 1 });
}

/// The ICRC does not cover the IP options, and packets that set them get identifications as others
/// do.
#[test]
fn packets_with_ip_options_arrive_right() {
    let (mut a, mut b) = pair(40);
    let mut batch = TxBatch::new(a.capabilities());
    let ip_options = IpOptions { traffic_class: 0x68, hop_limit: 33 };
    for (round, with) in
        [IpOptions::default(), ip_options, IpOptions::default(), ip_options].into_iter().enumerate()
    {
        batch.set_ip_options(with);
        fill(&mut batch, b.local(), if round < 2 { 5 } else { 1 }, 300);
    }
    a.send(&mut batch);
    assert_eq!(receive(&mut b, 12), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0]);
    let mut packet = {
        batch.set_ip_options(ip_options);
        fill(&mut batch, b.local(), 1, 300);
        batch.packets()[0]
    };
    let told = |packet: &TxPacket, packets| {
        controls_of(packet, packets)
            .into_iter()
            .flatten()
            .map(|c| (c.level, c.kind, c.value[0]))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        told(&packet, 1),
        [(libc::IPPROTO_IP, libc::IP_TOS, 0x68), (libc::IPPROTO_IP, libc::IP_TTL, 33)]
    );
    packet.dst = std::net::Ipv6Addr::LOCALHOST.into();
    packet.ip_options.hop_limit = 0;
    assert_eq!(
        told(&packet, 2),
        [
            (libc::SOL_UDP, libc::UDP_SEGMENT, 300_u16.to_ne_bytes()[0]),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 0x68)
        ]
    );
}
