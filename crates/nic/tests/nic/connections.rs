//! Unreliable connections between devices over real sockets: whole messages in order, or nothing.
#![allow(clippy::cast_possible_truncation)] // small constants

use crate::common::on_gpu::{GpuMethod, LEN, OnGpu};
use crate::common::unreliable::{connect_uc, uc_pair};
use crate::common::{ALL_ACCESS, End, MIB, config, patterns, register, until};
use fake_cuda::client::StandIn;
use nobounce_memory::HostBuffer;
use nobounce_nic::soft::{Config, SrqLimits};
use nobounce_nic::work::{
    Access, Mtu, Operation, PostError, QpAttr, QpState, RecvRequest, Remote, SendRequest, Service, Status,
    WorkKind,
};

/// Waits until `end` has taken what makes a counter or a byte change: nothing else tells that a
/// WRITE arrived.
#[track_caller]
fn wait_for(end: &End, offset: usize, expected: &[u8]) {
    let mut none = Vec::new();
    until("the bytes of a WRITE", || {
        end.cq.poll(&mut none, 1).unwrap();
        end.bytes(offset, expected.len()) == expected
    });
    assert!(none.is_empty(), "{none:?}");
}

#[test]
fn every_operation_mtu_and_size() {
    for (n, mtu) in Mtu::ALL.into_iter().enumerate() {
        let at = config(&format!("127.62.0.{}", n + 1));
        let (a, b) = uc_pair(&at, &at, 2 * MIB, mtu);
        let m = mtu.bytes() as usize;
        for (round, len) in [1, 3, m - 1, m, m + 1, 10 * m + 5, MIB].into_iter().enumerate() {
            let seed = round as u8 + 1;
            a.fill(seed);
            b.fill(0xee);
            a.post(Operation::Write(b.remote(100)), 5, len as u32);
            a.succeed(1);
            wait_for(&b, 100, &patterns(seed, 5, len));
            assert_eq!(b.bytes(0, 100), patterns(0xee, 0, 100));
            assert_eq!(b.bytes(100 + len, 8), patterns(0xee, 100 + len, 8));
            b.fill(0xee);
            b.post_recv(1, 7, len as u32);
            b.post_recv(2, 0, 0);
            a.post(Operation::SendImmediate(9), 5, len as u32);
            a.post(Operation::WriteImmediate(b.remote(MIB as u64 + 64), 10), 5, len as u32 / 2);
            a.succeed(2);
            let got = b.completions(2);
            assert_eq!((got[0].wr_id, got[0].kind, got[0].byte_len), (1, WorkKind::Receive, len as u32));
            assert_eq!((got[1].wr_id, got[1].kind), (2, WorkKind::ReceiveWriteImmediate));
            assert_eq!((got[0].immediate, got[1].immediate), (Some(9), Some(10)));
            assert!(got.iter().all(|c| c.status == Status::Success && c.source.is_none()));
            assert!(b.bytes(7, len) == patterns(seed, 5, len), "{mtu:?} {len}");
            assert!(b.bytes(MIB + 64, len / 2) == patterns(seed, 5, len / 2), "{mtu:?} {len}");
        }
        b.only_markers_sent(); // nothing is answered
        assert_eq!(b.counter("icrc_errors") + b.counter("dropped_messages"), 0);
    }
}

#[test]
fn over_ipv6_and_to_itself() {
    for addr in ["::1", "127.62.1.1"] {
        let mut a = End::open(&config(addr), 2 * MIB);
        a.add_uc(None);
        connect_uc(&a, &a, Mtu::Mtu4096);
        a.fill(4);
        a.post_recv(1, MIB as u64, 500_000);
        a.post(Operation::Send, 0, 500_000);
        let got = a.completions(2);
        assert!(got.iter().all(|c| c.status == Status::Success), "{got:?}");
        assert!(a.bytes(MIB, 500_000) == patterns(4, 0, 500_000), "{addr}");
    }
}

#[test]
fn a_long_stream_does_not_overflow_a_receiver_that_is_awake() {
    let at = config("127.62.2.1");
    let (a, b) = uc_pair(&at, &at, MIB, Mtu::Mtu4096);
    let (messages, len) = (256_u64, 256 << 10);
    a.fill(1);
    let mut got = Vec::new();
    let start = std::time::Instant::now();
    for n in 0..messages {
        b.post_recv(n, 0, len);
    }
    let sge = a.sge(0, len);
    for n in 0..messages {
        a.qps[0].post_send(&SendRequest::new(n, Operation::Send, &sge)).unwrap();
    }
    let mut sent = Vec::new();
    until("all messages to leave", || {
        a.cq.poll(&mut sent, 64).unwrap();
        b.cq.poll(&mut got, 64).unwrap();
        sent.len() as u64 == messages
    });
    (0..1000).for_each(|_| _ = b.cq.poll(&mut got, 64).unwrap());
    let rate = messages as f64 * f64::from(len) / start.elapsed().as_secs_f64() / 1e9;
    println!("{rate:.2} GB/s, {} of {messages} arrived", got.len());
    assert!(got.len() as u64 >= messages * 9 / 10, "{} of {messages} arrived", got.len());
}

#[test]
fn over_a_lossy_network_messages_are_whole_or_absent() {
    for (n, fault) in
        ["loss=0.02", "reorder=0.02", "dup=0.05", "corrupt=0.02", "loss=0.01,dup=0.02,reorder=0.01"]
            .into_iter()
            .enumerate()
    {
        let addr = format!("127.62.3.{}", n + 1);
        let faulty = Config { fault: Some(fault.parse().unwrap()), ..config(&addr) };
        let (a, b) = uc_pair(&faulty, &config(&addr), 4 * MIB, Mtu::Mtu1024);
        a.fill(3);
        let (messages, len) = (300_usize, 5000_usize);
        for slot in 0..messages {
            b.post_recv(slot as u64, (slot * len) as u64, len as u32);
        }
        let mut got = Vec::new();
        for number in 0..messages {
            a.post(Operation::SendImmediate(number as u32), number as u64, len as u32);
            a.succeed(1);
            b.cq.poll(&mut got, 64).unwrap();
        }
        let mut quiet = 0;
        until("the last message", || {
            quiet = if b.cq.poll(&mut got, 64).unwrap() == 0 { quiet + 1 } else { 0 };
            quiet > 20_000
        });
        println!("{fault}: {} of {messages} arrived", got.len());
        assert!(got.len() > messages / 2, "{fault}: {}", got.len());
        let mut next = 0;
        for (slot, done) in got.iter().enumerate() {
            let number = done.immediate.unwrap();
            assert!(number >= next, "{fault}: out of order or twice: {number} after {next}");
            next = number + 1;
            assert_eq!((done.status, done.byte_len, done.wr_id), (Status::Success, len as u32, slot as u64));
            assert!(b.bytes(slot * len, len) == patterns(3, number as usize, len), "{fault}: {number}");
        }
        assert_eq!(b.qps[0].state(), QpState::Rts);
    }
}

#[test]
fn what_is_not_allowed_is_refused_here_and_dropped_there() {
    let at = config("127.62.4.1");
    let (a, b) = uc_pair(&at, &at, MIB, Mtu::Mtu1024);
    for op in [Operation::Read(b.remote(0)), Operation::FetchAdd { remote: b.remote(0), add: 1 }] {
        let refused = a.qps[0].post_send(&SendRequest::new(1, op, &a.sge(0, 8))).unwrap_err();
        assert_eq!(refused, PostError::NotOffered { service: Service::Uc, operation: op.kind() });
    }
    let refused = a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &a.sge(0, 8)).to(b.at()));
    assert_eq!(refused, Err(PostError::Destination(Service::Uc)));
    b.fill(0x77);
    let read_only = register(&b.pd, &b.buffer, Access::REMOTE_READ);
    for remote in [
        Remote { addr: b.mr.addr(), rkey: b.mr.rkey() ^ 0x100 },
        Remote { addr: b.mr.addr() + MIB as u64 - 10, rkey: b.mr.rkey() },
        Remote { addr: b.mr.addr(), rkey: read_only.rkey() },
    ] {
        a.post(Operation::Write(remote), 0, 3000);
    }
    a.post(Operation::Send, 0, 3000); // no receive
    a.succeed(4);
    until("four drops", || {
        b.cq.poll(&mut Vec::new(), 1).unwrap();
        b.counter("dropped_messages") == 4
    });
    assert_eq!((b.counter("refused_access"), b.counter("out_of_buffer")), (3, 1));
    assert!(b.bytes(0, MIB) == patterns(0x77, 0, MIB));
    b.quiet();
    b.post_recv(1, 0, 3000);
    a.post(Operation::Send, 0, 3000);
    b.succeed(1);
}

#[test]
fn memory_that_vanishes_stops_the_send_queue_only() {
    let at = config("127.62.5.1");
    let (a, b) = uc_pair(&at, &at, MIB, Mtu::Mtu1024);
    let gone = HostBuffer::new(8192).unwrap();
    let mr = register(&a.pd, &gone, ALL_ACCESS);
    let sge = [nobounce_nic::work::Sge { addr: mr.addr(), len: 5000, lkey: mr.lkey() }];
    drop(mr);
    a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &sge)).unwrap();
    assert_eq!(a.status(), Status::LocalProtection);
    assert_eq!(a.qps[0].state(), QpState::Sqe);
    a.post(Operation::Send, 0, 10);
    assert_eq!(a.status(), Status::Flushed);
    a.post_recv(3, 0, 100);
    b.post(Operation::Send, 0, 100);
    b.succeed(1);
    a.succeed(1);
    a.qps[0].modify(&QpAttr::to_state(QpState::Rts)).unwrap();
    b.post_recv(1, 0, 100);
    a.post(Operation::Send, 0, 100);
    a.succeed(1);
    b.succeed(1);
}

#[test]
fn receives_come_from_a_shared_queue_too() {
    let mut a = End::open(&config("127.62.6.1"), MIB);
    let mut b = End::open(&config("127.62.6.1"), MIB);
    let srq = b.pd.create_srq(SrqLimits { depth: 16, sges: 1 }).unwrap();
    a.add_uc(None);
    b.add_uc(Some(&srq));
    connect_uc(&a, &b, Mtu::Mtu1024);
    connect_uc(&b, &a, Mtu::Mtu1024);
    a.fill(8);
    for wr_id in 0..3 {
        srq.post_recv(&RecvRequest { wr_id, sges: &b.sge(wr_id * 4000, 4000) }).unwrap();
        a.post(Operation::Send, wr_id, 4000);
        let got = b.completions(1);
        assert_eq!((got[0].wr_id, got[0].byte_len, got[0].qpn), (wr_id, 4000, b.qps[0].qpn()));
        assert!(b.bytes(wr_id as usize * 4000, 4000) == patterns(8, wr_id as usize, 4000));
    }
    a.succeed(3);
}

#[test]
fn gpu_memory_at_both_ends() {
    let gpu = StandIn::program();
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let at = config(&format!("127.62.7.{}", n + 1));
        let (a, b) = uc_pair(&at, &at, 4096, Mtu::Mtu4096);
        let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
        at_a.fill(5);
        at_b.fill(6);
        for (round, len) in [8, 4097, 200_001, LEN / 2].into_iter().enumerate() {
            // The bytes must have been taken when the request is done, however they are fetched.
            let from = [at_a.sge(round, len)];
            b.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &[at_b.sge(64, len)] }).unwrap();
            a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &from)).unwrap();
            let mut done = Vec::new();
            let mut got = Vec::new();
            until("both sides", || {
                a.cq.poll(&mut done, 1).unwrap();
                b.cq.poll(&mut got, 1).unwrap();
                (done.len(), got.len()) == (1, 1)
            });
            assert_eq!((done[0].status, got[0].status), (Status::Success, Status::Success), "{way:?}");
            assert_eq!(got[0].byte_len as usize, len);
            at_b.holds(64, &patterns(5, round, len));
            at_b.holds(64 + len, &patterns(6, 64 + len, 8));
        }
    }
}
