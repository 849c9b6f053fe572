//! Shared receive queues (SRQ): order of receives, limit events, and receives left behind when
//! queue pairs go.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{ALL_ACCESS, End, config, connect, patterns, register, until};
use nobounce_memory::HostBuffer;
use nobounce_nic::soft::{AsyncEvent, CreateError, QpInit, Srq, SrqLimitError, SrqLimits};
use nobounce_nic::work::{
    Mtu, Operation, PostError, QpAttr, QpEvent, QpLimits, QpState, RecvRequest, SendRequest, Service, Sge,
    Status,
};

const MTU: Mtu = Mtu::Mtu1024;
const SMALL: SrqLimits = SrqLimits { depth: 64, sges: 2 };

/// `a` sends by `count` queue pairs to as many of `b`, which share a receive queue.
fn shared(addr: &str, count: usize, limits: SrqLimits) -> (End, End, Srq) {
    let mut a = End::open(&config(addr), 64 << 10);
    let mut b = End::open(&config(addr), 64 << 10);
    let srq = b.pd.create_srq(limits).unwrap();
    for i in 0..count {
        a.add_qp(QpLimits::default());
        add_sharing(&mut b, &srq);
        connect(&a, i, &b, i, MTU);
    }
    (a, b, srq)
}

fn add_sharing(end: &mut End, srq: &Srq) {
    let limits = QpLimits::default();
    let init = QpInit { service: Service::Rc, send_cq: &end.cq, recv_cq: &end.cq, srq: Some(srq), limits };
    let qp = end.pd.create_qp_with(&init).unwrap();
    qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    end.qps.push(qp);
}

fn send(a: &End, qp: usize, offset: u64, len: u32) {
    a.qps[qp].post_send(&SendRequest::new(qp as u64, Operation::Send, &a.sge(offset, len))).unwrap();
}

fn fill_queue(b: &End, srq: &Srq, ids: std::ops::Range<u64>, len: u32) {
    for wr_id in ids {
        let sges = b.sge(wr_id * u64::from(len), len);
        srq.post_recv(&RecvRequest { wr_id, sges: &sges }).unwrap();
    }
}

#[test]
fn queue_pairs_take_receives_in_the_order_they_were_posted() {
    let (a, b, srq) = shared("127.61.0.1", 3, SMALL);
    a.fill(5);
    fill_queue(&b, &srq, 0..6, 4096);
    for (nth, qp) in [2, 0, 1, 1, 0, 2].into_iter().enumerate() {
        send(&a, qp, 4096 * nth as u64, 4096);
        a.succeed(1);
        let got = b.completions(1)[0];
        assert_eq!((got.wr_id, got.status, got.byte_len), (nth as u64, Status::Success, 4096));
        assert_eq!(got.qpn, b.qps[qp].qpn(), "it says by which queue pair the message came");
    }
    assert!(b.bytes(0, 6 * 4096) == patterns(5, 0, 6 * 4096));
    assert_eq!(b.qps[0].limits().recv_depth, 0);
}

#[test]
fn who_finds_it_empty_waits_until_something_is_posted() {
    let (a, b, srq) = shared("127.61.0.2", 2, SMALL);
    send(&a, 0, 0, 8);
    until("the refusal", || {
        a.quiet();
        b.quiet();
        b.counter("send_rnr_err") > 0
    });
    fill_queue(&b, &srq, 0..1, 64);
    a.succeed(1);
    b.succeed(1);
    // WRITE with immediate data takes one too.
    fill_queue(&b, &srq, 0..1, 0);
    a.post(Operation::WriteImmediate(b.remote(128), 9), 0, 8);
    a.succeed(1);
    assert_eq!(b.completions(1)[0].immediate, Some(9));
}

#[test]
fn the_limit_is_announced_once_each_time_it_is_set() {
    let (a, b, srq) = shared("127.61.0.3", 1, SMALL);
    fill_queue(&b, &srq, 0..4, 8);
    assert_eq!(srq.limit(), 0);
    srq.set_limit(3).unwrap();
    let event = AsyncEvent::SrqLimitReached { srq: srq.id() };
    let go = || {
        send(&a, 0, 0, 8);
        a.succeed(1);
        b.succeed(1);
    };
    go();
    assert_eq!((b.device.next_event(), srq.limit()), (None, 3), "three are left: not fewer than three");
    go();
    assert_eq!((b.event(), srq.limit()), (event, 0));
    go();
    assert_eq!(b.device.next_event(), None, "once");
    srq.set_limit(2).unwrap();
    assert_eq!(b.device.next_event(), Some(event), "it is so already");
    srq.set_limit(1).unwrap();
    srq.set_limit(0).unwrap();
    go();
    assert_eq!(b.device.next_event(), None, "taken back");
    assert_eq!(srq.set_limit(65), Err(SrqLimitError::Depth { asked: 65, depth: 64 }));
}

#[test]
fn what_is_too_much_is_refused() {
    let (_a, b, srq) = shared("127.61.0.4", 1, SrqLimits { depth: 2, sges: 1 });
    let sge = b.sge(0, 8);
    let two = [sge[0], sge[0]];
    let post = |sges: &[Sge]| srq.post_recv(&RecvRequest { wr_id: 1, sges });
    assert_eq!(post(&two), Err(PostError::TooManySges { given: 2, max: 1 }));
    post(&sge).unwrap();
    post(&[]).unwrap();
    assert_eq!(post(&sge), Err(PostError::QueueFull(2)));
    let own = b.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &sge });
    assert_eq!(own, Err(PostError::SharedReceives));
    let most = b.device.limits();
    for limits in [
        SrqLimits { depth: 0, sges: 1 },
        SrqLimits { depth: most.max_srq_depth + 1, sges: 1 },
        SrqLimits { depth: 1, sges: most.max_sges + 1 },
    ] {
        let error = b.pd.create_srq(limits).unwrap_err();
        assert!(matches!(error, CreateError::Limit { .. }), "{error}");
    }
    b.pd.create_srq(SrqLimits { depth: most.max_srq_depth, sges: most.max_sges }).unwrap();
}

#[test]
fn a_failing_user_flushes_its_half_filled_receive_and_leaves_the_others() {
    let (a, b, srq) = shared("127.61.0.5", 2, SMALL);
    fill_queue(&b, &srq, 0..3, 16 << 10);
    // Not acknowledged as a whole: the last bytes come from where there is nothing.
    let sge = [a.sge(0, 8192)[0], Sge { lkey: a.mr.lkey() ^ 1, ..a.sge(0, 4096)[0] }];
    a.qps[0].post_send(&SendRequest::new(0, Operation::Send, &sge)).unwrap();
    assert_eq!(a.status(), Status::LocalProtection);
    until("the first packets", || b.device.counters().placed_bytes > 0);
    b.quiet();
    b.qps[0].modify(&QpAttr::to_state(QpState::Error)).unwrap();
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.status, got.qpn), (0, Status::Flushed, b.qps[0].qpn()));
    assert_eq!(b.event(), AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::LastWqeReached });
    b.quiet();
    send(&a, 1, 0, 8);
    a.succeed(1);
    assert_eq!(b.completions(1)[0].wr_id, 1, "the other takes the next");
    assert_eq!(b.device.next_event(), None);
    // A second life is announced again.
    b.qps[0].modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    b.qps[0].modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    b.qps[0].modify(&QpAttr::to_state(QpState::Error)).unwrap();
    assert_eq!(b.event(), AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::LastWqeReached });
}

#[test]
fn reset_and_destruction_give_a_half_filled_receive_back() {
    let (a, mut b, srq) = shared("127.61.0.6", 3, SMALL);
    fill_queue(&b, &srq, 0..2, 16 << 10);
    let sge = [a.sge(0, 8192)[0], Sge { lkey: a.mr.lkey() ^ 1, ..a.sge(0, 4096)[0] }];
    for qp in [0, 1] {
        a.qps[qp].post_send(&SendRequest::new(0, Operation::Send, &sge)).unwrap();
        assert_eq!(a.status(), Status::LocalProtection);
        b.quiet();
    }
    b.qps[1].modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    drop(b.qps.remove(0));
    b.quiet();
    let mut ids = [9, 9];
    for id in &mut ids {
        send(&a, 2, 0, 8);
        a.succeed(1);
        *id = b.completions(1)[0].wr_id;
    }
    assert_eq!(ids, [0, 1], "both are there again");
    assert_eq!(b.device.next_event(), None);
}

#[test]
fn it_is_busy_while_it_has_users_and_may_go_before_them_all_the_same() {
    let (a, mut b, srq) = shared("127.61.0.7", 1, SMALL);
    let unused = b.pd.create_srq(SMALL).unwrap();
    assert!(srq.is_busy() && !unused.is_busy());
    drop(unused);
    fill_queue(&b, &srq, 0..2, 8);
    srq.set_limit(1).unwrap();
    drop(srq);
    send(&a, 0, 0, 8);
    a.quiet();
    b.quiet();
    assert_eq!(b.device.next_event(), None);
    // Its place is taken by another only when its last user is gone.
    let next = b.pd.create_srq(SMALL).unwrap();
    fill_queue(&b, &next, 0..1, 8);
    a.quiet();
    b.qps.clear();
    let third = b.pd.create_srq(SMALL).unwrap();
    assert!(!next.is_busy() && !third.is_busy());
    assert_ne!(next.id(), third.id());
}

#[test]
fn receives_lie_in_the_domain_of_the_queue() {
    let mut a = End::open(&config("127.61.0.8"), 4096);
    let mut b = End::open(&config("127.61.0.8"), 4096);
    let pd = b.device.alloc_pd().unwrap();
    let buffer = HostBuffer::new(4096).unwrap();
    let mr = register(&pd, &buffer, ALL_ACCESS);
    let srq = pd.create_srq(SMALL).unwrap();
    assert!(pd.is_busy());
    a.add_qp(QpLimits::default());
    add_sharing(&mut b, &srq);
    connect(&a, 0, &b, 0, MTU);
    a.fill(3);
    let sges = [Sge { addr: mr.addr(), len: 64, lkey: mr.lkey() }];
    srq.post_recv(&RecvRequest { wr_id: 1, sges: &sges }).unwrap();
    // The queue pair's own domain does not help here.
    srq.post_recv(&RecvRequest { wr_id: 2, sges: &b.sge(0, 64) }).unwrap();
    send(&a, 0, 0, 64);
    a.succeed(1);
    b.succeed(1);
    let mut got = [0; 64];
    buffer.read_at(0, &mut got).unwrap();
    assert_eq!(got[..], patterns(3, 0, 64)[..]);
    send(&a, 0, 0, 64);
    assert_eq!(a.status(), Status::RemoteOperation);
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.status), (2, Status::LocalProtection));
    drop((srq, mr));
    assert!(!pd.is_busy());
}

#[test]
fn one_thread_posts_while_others_receive() {
    const EACH: u64 = 3000;
    const QPS: usize = 4;
    let (a, b, srq) = shared("127.61.0.9", QPS, SrqLimits { depth: 32, sges: 1 });
    let (posted, taken) = (AtomicU64::new(0), AtomicU64::new(0));
    let total = EACH * QPS as u64;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for wr_id in 0..total {
                let sges = b.sge(wr_id % 32 * 64, 64);
                until("room", || match srq.post_recv(&RecvRequest { wr_id, sges: &sges }) {
                    Ok(()) => true,
                    Err(PostError::QueueFull(32)) => false,
                    Err(error) => panic!("{error}"),
                });
                posted.fetch_add(1, Ordering::Relaxed);
            }
        });
        scope.spawn(|| {
            let mut seen = vec![false; total as usize];
            while taken.load(Ordering::Relaxed) < total {
                for got in b.completions(1) {
                    assert_eq!(got.status, Status::Success);
                    assert!(!std::mem::replace(&mut seen[got.wr_id as usize], true), "taken twice");
                    taken.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        for _ in 0..EACH / 10 {
            for qp in 0..QPS {
                (0..10).for_each(|_| send(&a, qp, 0, 64));
            }
            a.succeed(10 * QPS);
        }
    });
    assert_eq!((posted.into_inner(), taken.into_inner()), (total, total));
}
