//! Objects go in any order, under traffic, and leave nothing behind.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::any::Any;
use std::time::Duration;

use crate::common::{ALL_ACCESS, End, config, connect, register, until};
use nobounce_memory::HostBuffer;
use nobounce_nic::soft::{QpInit, SrqLimits};
use nobounce_nic::work::{Mtu, Operation, QpAttr, QpLimits, RecvRequest, Service};

const LEN: usize = 256 << 10;

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// A small generator: orders need not be good, only many.
fn shuffle<T>(list: &mut [T], seed: &mut u64) {
    for i in (1..list.len()).rev() {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        list.swap(i, (*seed % (i as u64 + 1)) as usize);
    }
}

/// One device with everything there is, and traffic in flight to `peer`; as objects that can be
/// dropped in any order.
fn everything(peer: &End, addr: &str) -> Vec<Box<dyn Any>> {
    let mut end = End::open(&config(addr), LEN);
    let channel = end.device.create_channel().unwrap();
    let send_cq = end.device.create_cq(64, Some(&channel)).unwrap();
    let recv_cq = end.device.create_cq(64, Some(&channel)).unwrap();
    let srq = end.pd.create_srq(SrqLimits { depth: 16, sges: 1 }).unwrap();
    let limits = QpLimits::default();
    let init = QpInit { service: Service::Rc, send_cq: &send_cq, recv_cq: &recv_cq, srq: Some(&srq), limits };
    let qp = end.pd.create_qp_with(&init).unwrap();
    qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    end.qps.push(qp);
    connect(&end, 0, peer, 0, Mtu::Mtu1024);
    for wr_id in 0..8 {
        srq.post_recv(&RecvRequest { wr_id, sges: &end.sge(0, 4096) }).unwrap();
    }
    srq.set_limit(4).unwrap();
    send_cq.request_notify(false);
    recv_cq.request_notify(true);
    for _ in 0..4 {
        end.post(Operation::Write(peer.remote(0)), 0, LEN as u32);
        peer.post(Operation::Send, 0, 4096);
        peer.post(Operation::Read(end.remote(0)), 0, 4096);
    }
    let End { qps, cq, mr, buffer, pd, device, .. } = end;
    // The buffer may go before its region: then what touches it fails.
    vec![
        Box::new(qps),
        Box::new((cq, send_cq)),
        Box::new(recv_cq),
        Box::new(mr),
        Box::new(pd),
        Box::new(device),
        Box::new(srq),
        Box::new(channel),
        Box::new(buffer),
    ]
}

#[test]
fn objects_go_in_any_order_and_leave_nothing() {
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    let mut before = (0, 0);
    for round in 0..120 {
        let mut peer = End::open(&config("127.65.0.1"), LEN);
        peer.add_qp(QpLimits::default());
        let mut objects = everything(&peer, "127.65.0.1");
        shuffle(&mut objects, &mut seed);
        drop(objects);
        drop(peer);
        let now = || (count("/proc/self/fd"), count("/proc/self/task"));
        // The kernel lists a thread that was waited for a little longer.
        if round == 0 {
            std::thread::sleep(Duration::from_millis(100));
            before = now();
        }
        until(&format!("round {round} to leave {before:?} descriptors and threads"), || {
            let now = now();
            now.0 <= before.0 && now.1 <= before.1
        });
    }
}

#[test]
fn a_queue_that_went_before_its_queue_pairs_hinders_no_other() {
    let mut a = End::open(&config("127.65.0.2"), 4096);
    let mut b = End::open(&config("127.65.0.2"), 4096);
    a.add_qp(QpLimits::default());
    let lost = b.device.create_cq(1, None).unwrap();
    let qp = b.pd.create_qp(&b.cq, &lost, QpLimits::default()).unwrap();
    qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    b.qps.push(qp);
    connect(&a, 0, &b, 0, Mtu::Mtu1024);
    drop(lost);
    for wr_id in 0..4 {
        b.post_recv(wr_id, 0, 8);
        a.post(Operation::Send, 0, 8);
        a.succeed(1);
    }
    assert_eq!(b.device.next_event(), None, "a dropped CQ raises no event");
    b.post(Operation::Write(a.remote(0)), 0, 8);
    b.succeed(1);
}

#[test]
fn a_domain_is_busy_while_anything_of_it_exists() {
    let end = End::open(&config("127.65.0.3"), 4096);
    let pd = end.device.alloc_pd().unwrap();
    let clone = pd.clone();
    assert!(!pd.is_busy(), "its own handles do not count");
    let buffer = HostBuffer::new(64).unwrap();
    let mr = register(&pd, &buffer, ALL_ACCESS);
    assert!(pd.is_busy() && clone.is_busy());
    drop(mr);
    let qp = pd.create_qp(&end.cq, &end.cq, QpLimits::default()).unwrap();
    assert!(pd.is_busy() && end.cq.is_busy());
    drop(qp);
    assert!(!end.cq.is_busy());
    let srq = pd.create_srq(SrqLimits { depth: 1, sges: 1 }).unwrap();
    assert!(pd.is_busy());
    drop(srq);
    assert!(!pd.is_busy());
}
