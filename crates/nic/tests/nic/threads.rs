//! Several threads post and poll at once on one device, while others make and destroy.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{ALL_ACCESS, End, LIMIT, config, connect, patterns, register};
use nobounce_memory::HostBuffer;
use nobounce_nic::soft::{Cq, Device, Qp, QpInit, SrqLimits};
use nobounce_nic::work::{
    Mtu, Operation, PostError, QpAttr, QpLimits, QpState, RecvRequest, Remote, SendRequest, Service, Sge,
    Status, WorkCompletion,
};

const THREADS: usize = 4;
const SHARE: usize = 64 << 10;

/// How long: `NOBOUNCE_STRESS_SECONDS`, for a longer look.
fn duration() -> Duration {
    let seconds = std::env::var("NOBOUNCE_STRESS_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(2))
}

fn take(cq: &Cq, count: usize) -> Vec<WorkCompletion> {
    let (mut got, start) = (Vec::new(), Instant::now());
    while got.len() < count {
        let left = count - got.len();
        cq.poll(&mut got, left).unwrap();
        assert!(start.elapsed() < LIMIT, "{got:?}");
    }
    assert!(got.iter().all(|wc| wc.status == Status::Success), "{got:?}");
    got
}

/// One thread's traffic: writes, reads back, sends and checks, in a part of the regions that is its
/// own.
fn work(a: &End, b: &End, index: usize, cqs: &[(Cq, Cq)], until: Instant) -> u64 {
    let (qa, qb) = (&a.qps[index], &b.qps[index]);
    let (cq_a, cq_b) = &cqs[index];
    let (base, half) = ((index * SHARE) as u64, (SHARE / 2) as u64);
    let mut rounds = 0;
    while Instant::now() < until {
        let seed = (rounds as u8).wrapping_mul(7).wrapping_add(index as u8);
        let len = [8, 1000, 5000, SHARE / 2][rounds as usize % 4];
        let bytes = patterns(seed, 0, len);
        a.buffer.write_at(base as usize, &bytes).unwrap();
        let sge = a.sge(base, len as u32);
        let back = a.sge(base + half, len as u32);
        let recv = b.sge(base + half, len as u32);
        qb.post_recv(&RecvRequest { wr_id: rounds, sges: &recv }).unwrap();
        let batch = [
            SendRequest { signaled: false, ..SendRequest::new(1, Operation::Write(b.remote(base)), &sge) },
            SendRequest::new(2, Operation::Read(b.remote(base)), &back),
            SendRequest::new(3, Operation::Send, &sge),
        ];
        qa.post_sends(&batch).unwrap();
        let ids: Vec<u64> = take(cq_a, 2).iter().map(|wc| wc.wr_id).collect();
        assert_eq!(ids, [2, 3], "in the order they were posted");
        assert_eq!(take(cq_b, 1)[0].wr_id, rounds);
        assert!(a.bytes((base + half) as usize, len) == bytes, "read back");
        assert!(b.bytes((base + half) as usize, len) == bytes, "received");
        rounds += 1;
    }
    rounds
}

/// Makes everything, uses it on its own device, and destroys it, again and again.
fn churn(device: &Device, stop: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let pd = device.alloc_pd().unwrap();
        let buffer = HostBuffer::new(4096).unwrap();
        let mr = register(&pd, &buffer, ALL_ACCESS);
        let channel = device.create_channel().unwrap();
        let cq = device.create_cq(16, Some(&channel)).unwrap();
        let srq = pd.create_srq(SrqLimits { depth: 4, sges: 1 }).unwrap();
        let limits = QpLimits::default();
        let init = QpInit { service: Service::Rc, send_cq: &cq, recv_cq: &cq, srq: Some(&srq), limits };
        let qp = pd.create_qp_with(&init).unwrap();
        join_itself(&qp, device);
        cq.request_notify(false);
        let sges = [Sge { addr: mr.addr(), len: 64, lkey: mr.lkey() }];
        srq.post_recv(&RecvRequest { wr_id: 1, sges: &sges }).unwrap();
        qp.post_send(&SendRequest::new(2, Operation::Send, &sges)).unwrap();
        let there = Remote { addr: mr.addr() + 128, rkey: mr.rkey() };
        qp.post_send(&SendRequest::new(3, Operation::Write(there), &sges)).unwrap();
        if rounds % 2 == 0 {
            take(&cq, 3);
            assert_eq!(channel.next(), Some(cq.id()));
            cq.resize(1).unwrap();
        }
        if rounds % 3 == 0 {
            qp.modify(&QpAttr::to_state(QpState::Error)).unwrap();
        }
        rounds += 1;
    }
    rounds
}

fn join_itself(qp: &Qp, device: &Device) {
    let psn = nobounce_nic::work::Psn::new(5);
    qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    qp.modify(&QpAttr::to_rtr(device.local(), qp.qpn(), psn, Mtu::Mtu1024)).unwrap();
    qp.modify(&QpAttr::to_rts(psn)).unwrap();
}

#[test]
fn threads_share_a_device() {
    let addr = "127.66.0.1";
    let (mut a, mut b) =
        (End::open(&config(addr), THREADS * SHARE), End::open(&config(addr), THREADS * SHARE));
    let limits = QpLimits::default();
    let mut cqs = Vec::new();
    for i in 0..THREADS {
        let pair = (a.device.create_cq(64, None).unwrap(), b.device.create_cq(64, None).unwrap());
        for (end, cq) in [(&mut a, &pair.0), (&mut b, &pair.1)] {
            let qp = end.pd.create_qp(cq, cq, limits).unwrap();
            qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
            end.qps.push(qp);
        }
        connect(&a, i, &b, i, Mtu::Mtu1024);
        cqs.push(pair);
    }
    let (stop, least) = (AtomicBool::new(false), AtomicU64::new(u64::MAX));
    let until = Instant::now() + duration();
    std::thread::scope(|scope| {
        let churns = [&a.device, &b.device].map(|device| scope.spawn(|| churn(device, &stop)));
        let workers: Vec<_> = (0..THREADS)
            .map(|i| {
                let (a, b, cqs, least) = (&a, &b, &cqs, &least);
                scope.spawn(move || least.fetch_min(work(a, b, i, cqs, until), Ordering::Relaxed))
            })
            .collect();
        // A thread that watches, as many programs have.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert!(a.device.counters().dropped() < u64::MAX);
                a.qps.iter().for_each(|qp| assert_eq!(qp.state(), QpState::Rts));
                while a.device.next_event().is_some() {}
                std::thread::yield_now();
            }
        });
        workers.into_iter().for_each(|worker| _ = worker.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        for rounds in churns.map(|thread| thread.join().unwrap()) {
            assert!(rounds > 3, "objects were made {rounds} times");
        }
    });
    assert!(least.into_inner() > 10, "some thread hardly came to work");
}

#[test]
fn one_queue_pair_is_used_by_many_threads() {
    const EACH: u64 = 400;
    let addr = "127.66.0.2";
    let (mut a, mut b) = (End::open(&config(addr), 4096), End::open(&config(addr), 4096));
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 0, &b, 0, Mtu::Mtu1024);
    let seen = AtomicU64::new(0);
    let total = EACH * THREADS as u64;
    std::thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let (a, b) = (&a, &b);
            scope.spawn(move || {
                for i in 0..EACH {
                    let (there, sges) = (b.remote(8 * thread), a.sge(0, 8));
                    let request = SendRequest::new(thread << 32 | i, Operation::Write(there), &sges);
                    crate::common::until("room", || match a.qps[0].post_send(&request) {
                        Ok(()) => true,
                        Err(PostError::QueueFull(_)) => false,
                        Err(error) => panic!("{error}"),
                    });
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                let mut got = Vec::new();
                while seen.load(Ordering::Relaxed) < total {
                    got.clear();
                    let count = a.cq.poll(&mut got, 16).unwrap();
                    assert!(got.iter().all(|wc| wc.status == Status::Success), "{got:?}");
                    seen.fetch_add(count as u64, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(seen.into_inner(), total);
}
