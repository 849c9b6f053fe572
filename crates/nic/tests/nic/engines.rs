//! Several engines drive one device: placement of queue pairs, and shared state. The other tests
//! run with several, too: `NOBOUNCE_ENGINES=2` (`make test-engines`).
#![allow(clippy::cast_possible_truncation)] // small constants

use std::collections::BTreeSet;

use crate::common::{ALL_ACCESS, End, MIB, config, connect, patterns, register, unix, until};
use nobounce_memory::HostBuffer;
use nobounce_nic::soft::{AsyncEvent, Config, Device, MwKind, QpInit, SrqLimits};
use nobounce_nic::work::{
    Access, LocalWork, Mtu, Operation, QpAttr, QpEvent, QpLimits, QpState, RecvRequest, Remote, SendRequest,
    Service, Status,
};
use nobounce_protocol::pcap::Reader;

const MTU: Mtu = Mtu::Mtu4096;

fn with_engines(addr: &str, engines: usize) -> Config {
    Config { engines: Some(engines), ..config(addr) }
}

/// Two ends with that many engines each, and that many queue pairs between them.
fn ends(addr: &str, engines: usize, qps: usize, bytes: usize) -> (End, End) {
    let [mut a, mut b] = [(); 2].map(|()| End::open(&with_engines(addr, engines), bytes));
    for i in 0..qps {
        a.add_qp(QpLimits::default());
        b.add_qp(QpLimits::default());
        connect(&a, i, &b, i, MTU);
    }
    (a, b)
}

/// The slots of the queue pairs of an end.
fn slots(end: &End) -> BTreeSet<u32> {
    end.qps.iter().map(|qp| qp.qpn().get() >> 16).collect()
}

fn post(from: &End, qp: usize, op: Operation, offset: u64, len: u32) {
    from.qps[qp].post_send(&SendRequest::new(qp as u64, op, &from.sge(offset, len))).unwrap();
}

#[test]
fn queue_pairs_are_spread_and_one_needs_one_engine() {
    let (mut a, b) = ends("127.95.0.1", 4, 1, MIB);
    assert_eq!((a.device.engines(), b.device.engines()), (1, 1));
    drop(b);
    (0..9).for_each(|_| _ = a.add_qp(QpLimits::default()));
    assert_eq!((a.device.engines(), slots(&a).len()), (4, 4));
    for slot in slots(&a) {
        let there = a.qps.iter().filter(|qp| qp.qpn().get() >> 16 == slot).count();
        assert!((2..=3).contains(&there), "{there} of 10 in one of 4");
    }
    // Where some went, the next come.
    let first = a.qps[0].qpn().get() >> 16;
    a.qps.retain(|qp| qp.qpn().get() >> 16 != first);
    let next = a.add_qp(QpLimits::default()).qpn().get() >> 16;
    assert_eq!(next, first);
}

/// As NCCL creates them: the receive side has one CQ, with a QP for the data and one that is almost
/// idle; the send side has another CQ.
#[test]
fn each_completion_queue_begins_in_another_engine() {
    for order in [[0, 0, 1], [1, 0, 0], [0, 1, 0]] {
        let end = End::open(&with_engines("127.95.9.1", 2), MIB);
        let queues = [(); 2].map(|()| end.device.create_cq(64, None).unwrap());
        let mut first = [None; 2];
        let mut all = Vec::new();
        for queue in order {
            let qp = end.pd.create_qp(&queues[queue], &queues[queue], QpLimits::default()).unwrap();
            first[queue].get_or_insert(qp.qpn().get() >> 16);
            all.push(qp);
        }
        assert_ne!(first[0], first[1], "{order:?}");
    }
}

#[test]
fn all_engines_carry_and_count() {
    let (qps, piece) = (8, 100_000_u64);
    let (a, b) = ends("127.95.0.2", 4, qps, MIB);
    for round in 0..10_u8 {
        a.fill(round);
        for i in 0..qps {
            let at = i as u64 * piece;
            post(&a, i, Operation::Write(b.remote(at)), at, piece as u32);
        }
        a.succeed(qps);
        let all = qps * piece as usize;
        assert!(b.bytes(0, all) == patterns(round, 0, all), "round {round}");
    }
    let bytes = 10 * qps as u64 * piece;
    assert_eq!(a.device.counters().gathered_bytes, bytes);
    assert_eq!(b.device.counters().placed_bytes, bytes);
    assert_eq!(b.device.path_counters().inbound.cpu.bytes, bytes);
    let report = b.device.report().unwrap();
    assert!(report.contains(&format!("\"bytes\": {bytes}, \"operations\": {}", 10 * qps)), "{report}");
}

#[test]
fn every_engine_knows_what_was_registered_before_it_and_after() {
    let (a, b) = ends("127.95.0.3", 3, 3, MIB);
    let buffer = HostBuffer::new(4096).unwrap();
    let late = register(&b.pd, &buffer, ALL_ACCESS);
    for (i, mr) in (0..3).flat_map(|i| [(i, &b.mr), (i, &late)]) {
        post(&a, i, Operation::Write(Remote { addr: mr.addr(), rkey: mr.rkey() }), 0, 4096);
        a.succeed(1);
    }
    // And none knows what is gone.
    let gone = Remote { addr: late.addr(), rkey: late.rkey() };
    drop(late);
    for i in 0..3 {
        post(&a, i, Operation::Write(gone), 0, 8);
        assert_eq!(a.status(), Status::RemoteAccess, "queue pair {i}");
    }
    assert_eq!(b.device.counters().refused_access, 3);
}

#[test]
fn memory_windows_are_the_device_s_not_an_engine_s() {
    let (a, b) = ends("127.95.0.4", 2, 2, MIB);
    let mw = b.pd.create_window(MwKind::One).unwrap();
    let rkey = mw.rkey() + 1;
    let bind = |len| {
        let (window, region, addr, access) = (mw.rkey(), b.mr.lkey(), b.mr.addr(), Access::REMOTE_WRITE);
        let work = LocalWork::Bind { window, rkey, region, addr, len, access };
        b.qps[0].post_send(&SendRequest::new(9, Operation::Local(work), &[])).unwrap();
        assert_eq!(b.status(), Status::Success);
    };
    bind(4096);
    for i in 0..2 {
        post(&a, i, Operation::Write(Remote { addr: b.mr.addr(), rkey }), 0, 4096);
        a.succeed(1);
    }
    bind(0);
    post(&a, 1, Operation::Write(Remote { addr: b.mr.addr(), rkey }), 0, 8);
    assert_eq!(a.status(), Status::RemoteAccess);
    // Of the second kind, it is for the queue pair that bound it: one of the same place in another
    // engine is another.
    let mw = b.pd.create_window(MwKind::Two).unwrap();
    let rkey = mw.rkey() + 1;
    let (window, region, addr, access) = (mw.rkey(), b.mr.lkey(), b.mr.addr(), Access::REMOTE_WRITE);
    let work = LocalWork::Bind { window, rkey, region, addr, len: 8, access };
    b.qps[0].post_send(&SendRequest::new(9, Operation::Local(work), &[])).unwrap();
    assert_eq!(b.status(), Status::Success);
    post(&a, 0, Operation::Write(Remote { addr, rkey }), 0, 8);
    a.succeed(1);
    drop(mw);
    post(&a, 0, Operation::Write(Remote { addr, rkey }), 0, 8);
    assert_eq!(a.status(), Status::RemoteAccess);
}

#[test]
fn atomics_of_all_engines_add_up() {
    let (a, b) = ends("127.95.0.5", 4, 4, 4096);
    b.buffer.write_at(0, &0_u64.to_ne_bytes()).unwrap();
    for _ in 0..50 {
        for i in 0..4 {
            post(&a, i, Operation::FetchAdd { remote: b.remote(0), add: 1 }, 8 * i as u64, 8);
        }
        a.succeed(4);
    }
    assert_eq!(b.bytes(0, 8), 200_u64.to_ne_bytes());
}

#[test]
fn a_full_completion_queue_stops_queue_pairs_of_every_engine() {
    let (mut a, mut b) = ends("127.95.0.6", 2, 0, 4096);
    let small = a.device.create_cq(1, None).unwrap();
    for i in 0..2 {
        let qp = a.pd.create_qp(&small, &small, QpLimits::default()).unwrap();
        qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
        a.qps.push(qp);
        b.add_qp(QpLimits::default());
        connect(&a, i, &b, i, MTU);
    }
    assert_eq!(slots(&a).len(), 2);
    // Two completions of the first fill it; the second has nothing to do with that but the queue.
    (0..2).for_each(|_| post(&a, 0, Operation::Write(b.remote(0)), 0, 8));
    until("both to stop", || a.qps.iter().all(|qp| qp.state() == QpState::Error));
    let mut events = Vec::new();
    while let Some(event) = a.device.next_event() {
        events.push(event);
    }
    assert!(events.contains(&AsyncEvent::CqOverflow { cq: small.id() }), "{events:?}");
    for qp in &a.qps {
        let fatal = AsyncEvent::Qp { qpn: qp.qpn(), event: QpEvent::Fatal };
        assert!(events.contains(&fatal), "{events:?}");
    }
}

#[test]
fn those_that_share_receives_live_together() {
    let (mut a, mut b) = ends("127.95.0.7", 3, 0, MIB);
    let srq = b.pd.create_srq(SrqLimits { depth: 64, sges: 1 }).unwrap();
    for i in 0..3 {
        let limits = QpLimits::default();
        let init = QpInit { service: Service::Rc, send_cq: &b.cq, recv_cq: &b.cq, srq: Some(&srq), limits };
        let qp = b.pd.create_qp_with(&init).unwrap();
        qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
        b.qps.push(qp);
        a.add_qp(QpLimits::default());
        connect(&a, i, &b, i, MTU);
    }
    assert_eq!((slots(&a).len(), slots(&b).len()), (3, 1));
    for wr_id in 0..30 {
        srq.post_recv(&RecvRequest { wr_id, sges: &b.sge(1000 * wr_id, 1000) }).unwrap();
        post(&a, wr_id as usize % 3, Operation::Send, 0, 1000);
        a.succeed(1);
        assert_eq!(b.completions(1)[0].wr_id, wr_id);
    }
}

#[test]
fn what_all_engines_say_is_in_one_capture() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("engines.pcap");
    let recorded = Config { pcap: Some(path.clone()), ..with_engines("127.95.0.9", 2) };
    let (mut a, mut b) = (End::open(&recorded, 4096), End::open(&with_engines("127.95.0.9", 2), 4096));
    for i in 0..2 {
        a.add_qp(QpLimits::default());
        b.add_qp(QpLimits::default());
        connect(&a, i, &b, i, MTU);
        post(&a, i, Operation::Write(b.remote(0)), 0, 100);
        a.succeed(1);
    }
    let numbers: BTreeSet<_> = b.qps.iter().map(|qp| qp.qpn().get()).collect();
    let counted = a.counter("pcap_packets");
    drop((a, b));
    let file = std::fs::read(&path).unwrap();
    let packets: Vec<_> = Reader::new(&file).unwrap().map(Result::unwrap).collect();
    let to = |p: &[u8]| u32::from_be_bytes([0, p[5], p[6], p[7]]);
    let seen: BTreeSet<_> = packets.iter().map(|packet| to(packet.packet)).collect();
    assert!(numbers.is_subset(&seen), "{numbers:x?} in {seen:x?}");
    assert!(packets.len() as u64 >= counted && counted >= 4, "{counted} of {}", packets.len());
    std::fs::remove_file(path).unwrap();
}

/// No slot is left for a second engine: the first one does it all.
#[test]
fn without_a_slot_for_more_one_engine_serves_all() {
    let addr = "127.95.0.10";
    let taken: Vec<_> = (2..256).map(|slot| unix::bind(&format!("nobounce/slot/{addr}/{slot}"))).collect();
    let (a, b) = ends(addr, 4, 4, MIB);
    assert_eq!((slots(&a).len(), slots(&b).len()), (1, 1));
    (0..4).for_each(|i| post(&a, i, Operation::Write(b.remote(0)), 0, 100_000));
    a.succeed(4);
    drop(taken);
}

#[test]
fn a_link_of_the_caller_s_has_one_engine() {
    let link = nobounce_nic::links::udp::UdpLink::prepare(&nobounce_nic::links::udp::UdpConfig::new(
        "127.95.0.11".parse().unwrap(),
    ));
    let mut end = End::of(Device::with_link(Box::new(link.unwrap())).unwrap(), 4096);
    (0..3).for_each(|_| _ = end.add_qp(QpLimits::default()));
    assert_eq!((end.device.engines(), slots(&end).len()), (1, 1));
}
