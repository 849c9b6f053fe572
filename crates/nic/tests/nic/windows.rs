//! Memory windows: remote access, invalidation rights, and ordering.

use crate::common::{End, LIMIT, connect, pair, patterns, reconnect, register};
use nobounce_nic::soft::{Mr, Mw, MwKind};
use nobounce_nic::work::{
    Access, LocalWork, Mtu, Operation, QpLimits, Remote, SendRequest, Status, WorkKind,
};

const MTU: Mtu = Mtu::Mtu1024;
const LEN: usize = 64 << 10;
/// A window is a part in the middle.
const AT: u64 = 8192;
const ROOM: u64 = 4096;
const WRITES: Access = Access::REMOTE_WRITE;

fn bind(mr: &Mr, mw: &Mw, rkey: u32, access: Access) -> Operation {
    let (window, region, addr, len) = (mw.rkey(), mr.lkey(), mr.addr() + AT, ROOM);
    Operation::Local(LocalWork::Bind { window, rkey, region, addr, len, access })
}

/// Posts work that stays on this side.
#[track_caller]
fn local(end: &End, op: Operation) -> Status {
    end.qps[0].post_send(&SendRequest::new(9, op, &[])).unwrap();
    end.status()
}

#[track_caller]
fn write(from: &End, to: &End, rkey: u32, offset: u64, len: u32) -> Status {
    from.post(Operation::Write(Remote { addr: to.mr.addr() + offset, rkey }), 0, len);
    from.status()
}

#[test]
fn a_peer_uses_a_window_until_it_gives_it_back() {
    let (a, b) = pair("127.51.3.1", LEN, MTU);
    let mw = b.pd.create_window(MwKind::Two).unwrap();
    a.fill(3);
    for round in 1..4 {
        let key = mw.rkey() + round;
        assert_eq!(local(&b, bind(&b.mr, &mw, key, WRITES | Access::REMOTE_READ)), Status::Success);
        assert_eq!(write(&a, &b, key, AT, 4096), Status::Success);
        assert!(b.bytes(8192, 4096) == patterns(3, 0, 4096));
        a.post(Operation::Read(Remote { addr: b.mr.addr() + AT + 100, rkey: key }), 32768, 3000);
        a.succeed(1);
        b.post_recv(5, 0, 4096);
        a.post(Operation::SendInvalidate(key), 0, 3000);
        a.succeed(1);
        let got = b.completions(1)[0];
        assert_eq!((got.status, got.invalidated, got.byte_len), (Status::Success, Some(key), 3000));
        assert!(!b.mr.has_windows());
        assert_eq!(write(&a, &b, key, AT, 8), Status::RemoteAccess);
        reconnect(&a, &b, MTU);
    }
}

#[test]
fn a_window_has_bounds_rights_and_one_queue_pair() {
    let (mut a, mut b) = pair("127.51.3.2", LEN, MTU);
    let mw = b.pd.create_window(MwKind::Two).unwrap();
    let key = mw.rkey() + 1;
    let refused = |a: &End, b: &End, op: Operation, len: u32| {
        assert_eq!(local(b, bind(&b.mr, &mw, key, WRITES)), Status::Success);
        a.post(op, 0, len);
        assert_eq!(a.status(), Status::RemoteAccess, "{op:?}");
        reconnect(a, b, MTU);
    };
    let there = |offset: u64| Remote { addr: b.mr.addr() + offset, rkey: key };
    let (first, behind) = (there(AT), there(AT + 1));
    let (before, other) = (there(AT - 1), Remote { rkey: key + 1, ..first });
    refused(&a, &b, Operation::Write(behind), 4096);
    refused(&a, &b, Operation::Write(before), 8);
    refused(&a, &b, Operation::Write(other), 8);
    refused(&a, &b, Operation::Read(first), 8);
    refused(&a, &b, Operation::FetchAdd { remote: first, add: 1 }, 8);
    // It is no key of the program's own, either.
    assert_eq!(local(&b, bind(&b.mr, &mw, key, WRITES)), Status::Success);
    let sge = nobounce_nic::work::Sge { addr: b.mr.addr() + AT, len: 8, lkey: key };
    b.qps[0].post_send(&SendRequest::new(1, Operation::Write(a.remote(0)), &[sge])).unwrap();
    assert_eq!(b.status(), Status::LocalProtection);
    reconnect(&a, &b, MTU);
    // Another connection between the same ends may not use it; one that took it back, as all do
    // that are reset, may bind it anew.
    assert_eq!(local(&b, bind(&b.mr, &mw, key, WRITES)), Status::Success);
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 1, &b, 1, MTU);
    a.qps[1].post_send(&SendRequest::new(1, Operation::Write(first), &a.sge(0, 8))).unwrap();
    assert_eq!(a.status(), Status::RemoteAccess);
    assert_eq!(write(&a, &b, key, AT, 8), Status::Success);
    b.qps.remove(0);
    assert!(!b.mr.has_windows());
}

#[test]
fn what_cannot_be_bound_fails_and_stops_the_queue() {
    let (a, b) = pair("127.51.3.3", LEN, MTU);
    let mw = b.pd.create_window(MwKind::Two).unwrap();
    let plain = register(&b.pd, &b.buffer, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let read_only = register(&b.pd, &b.buffer, Access::BIND_WINDOW);
    let elsewhere = b.device.alloc_pd().unwrap();
    let foreign = register(&elsewhere, &b.buffer, Access::all());
    let key = mw.rkey() + 1;
    let long = LocalWork::Bind {
        window: key,
        rkey: key,
        region: b.mr.lkey(),
        addr: b.mr.addr() + 1,
        len: LEN as u64,
        access: WRITES,
    };
    let wrong = [
        bind(&plain, &mw, key, WRITES),
        bind(&read_only, &mw, key, WRITES),
        bind(&foreign, &mw, key, WRITES),
        bind(&b.mr, &mw, key, Access::BIND_WINDOW),
        Operation::Local(long),
    ];
    for op in wrong {
        let requests =
            [SendRequest::new(1, op, &[]), SendRequest::new(2, Operation::Write(a.remote(0)), &[])];
        b.qps[0].post_sends(&requests).unwrap();
        let got: Vec<_> = b.completions(2).iter().map(|c| (c.wr_id, c.status, c.kind)).collect();
        let bound = (1, Status::WindowBind, WorkKind::BindWindow);
        assert_eq!(got, [bound, (2, Status::Flushed, WorkKind::Write)], "{op:?}");
        reconnect(&a, &b, MTU);
    }
    // A window that is in use is not bound again, and what is not bound not taken back.
    assert_eq!(local(&b, bind(&b.mr, &mw, key, WRITES)), Status::Success);
    assert_eq!(local(&b, bind(&b.mr, &mw, key, WRITES)), Status::WindowBind);
    reconnect(&a, &b, MTU);
    let invalidate = Operation::Local(LocalWork::Invalidate(key));
    assert_eq!(local(&b, invalidate), Status::LocalQpOperation);
    reconnect(&a, &b, MTU);
    assert_eq!(local(&b, bind(&b.mr, &mw, key, WRITES)), Status::Success);
    assert_eq!(local(&b, invalidate), Status::Success);
    assert_eq!(write(&a, &b, key, AT, 8), Status::RemoteAccess);
    drop((plain, read_only, foreign));
}

/// Local requests execute and complete in order with sends, also when packets are lost and
/// retransmitted.
#[test]
fn local_work_keeps_its_place_in_the_queue() {
    let faulty = nobounce_nic::soft::Config {
        fault: Some("loss=0.1,seed=11".parse().unwrap()),
        ..crate::common::config("127.51.3.4")
    };
    let (a, b) = crate::common::pair_with(&faulty, &faulty, LEN, MTU);
    let mw = a.pd.create_window(MwKind::Two).unwrap();
    a.fill(5);
    let started = std::time::Instant::now();
    for round in 0..50 {
        let key = mw.rkey() + round % 256;
        let sge = a.sge(0, 20_000);
        let small = a.sge(0, 100);
        let there = Operation::Write(b.remote(0));
        let requests = [
            SendRequest::new(1, there, &sge),
            SendRequest::new(2, bind(&a.mr, &mw, key, WRITES), &[]),
            SendRequest::new(3, Operation::Read(b.remote(30_000)), &small),
            SendRequest {
                fence: true,
                ..SendRequest::new(4, Operation::Local(LocalWork::Invalidate(key)), &[])
            },
            SendRequest::new(5, there, &sge),
        ];
        a.qps[0].post_sends(&requests).unwrap();
        let got: Vec<_> = a.completions(5).iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(got, [1, 2, 3, 4, 5].map(|n| (n, Status::Success)));
        assert!(started.elapsed() < LIMIT);
    }
    assert!(b.bytes(100, 19_900) == patterns(5, 100, 19_900));
}

#[test]
fn windows_of_the_first_kind_are_their_owners() {
    let (a, b) = pair("127.51.3.5", LEN, MTU);
    let mw = b.pd.create_window(MwKind::One).unwrap();
    a.fill(6);
    for round in 1..3 {
        let key = mw.rkey() + round;
        assert_eq!(local(&b, bind(&b.mr, &mw, key, WRITES)), Status::Success);
        assert_eq!(write(&a, &b, key, AT, 4096), Status::Success);
    }
    b.post_recv(1, 0, 8);
    a.post(Operation::SendInvalidate(mw.rkey() + 2), 0, 8);
    assert_eq!((a.status(), b.status()), (Status::RemoteAccess, Status::LocalAccess));
    reconnect(&a, &b, MTU);
    assert_eq!(write(&a, &b, mw.rkey() + 2, AT, 8), Status::Success);
    // Bound to nothing, it is free; and so is the region.
    let nothing = LocalWork::Bind {
        window: mw.rkey(),
        rkey: mw.rkey(),
        region: 0,
        addr: 0,
        len: 0,
        access: Access::empty(),
    };
    assert_eq!(local(&b, Operation::Local(nothing)), Status::Success);
    assert!(!b.mr.has_windows());
    assert_eq!(write(&a, &b, mw.rkey() + 2, AT, 8), Status::RemoteAccess);
}

#[test]
fn nothing_is_behind_a_window_whose_region_or_self_is_gone() {
    let (a, mut b) = pair("127.51.3.6", LEN, MTU);
    let buffer = nobounce_memory::HostBuffer::new(LEN).unwrap();
    for region_goes in [true, false] {
        let mw = b.pd.create_window(MwKind::Two).unwrap();
        let mr = std::mem::replace(&mut b.mr, register(&b.pd, &buffer, Access::all()));
        let (key, addr) = (mw.rkey() + 1, mr.addr() + AT);
        assert_eq!(local(&b, bind(&mr, &mw, key, WRITES)), Status::Success);
        a.post(Operation::Write(Remote { addr, rkey: key }), 0, 8);
        a.succeed(1);
        let (mut mw, mut mr) = (Some(mw), Some(mr));
        if region_goes {
            drop(mr.take())
        } else {
            drop(mw.take())
        }
        a.post(Operation::Write(Remote { addr, rkey: key }), 0, 8);
        assert_eq!(a.status(), Status::RemoteAccess);
        reconnect(&a, &b, MTU);
    }
}
