//! Work requests: lists, inline data, depth, order, and what is refused.
#![allow(clippy::cast_possible_truncation)] // small constants

use crate::common::{End, MIB, check_write, config, connect, pair, patterns, until};
use nobounce_nic::work::{
    Mtu, Operation, PostError, Psn, QpAttr, QpLimits, QpState, RecvRequest, Remote, SendRequest, Sge, Status,
    WorkKind,
};

const MTU: Mtu = Mtu::Mtu1024;

fn with_limits(addr: &str, limits: QpLimits) -> (End, End) {
    let (mut a, mut b) = (End::open(&config(addr), MIB), End::open(&config(addr), MIB));
    a.add_qp(limits);
    b.add_qp(limits);
    connect(&a, 0, &b, 0, MTU);
    (a, b)
}

/// Cuts the range into pieces of these lengths, in reverse order in memory, so that the order of
/// the list counts.
fn list(end: &End, base: u64, lens: &[u32]) -> Vec<Sge> {
    let mut at = base + lens.iter().map(|len| u64::from(*len)).sum::<u64>();
    let piece = |len: &u32| {
        at -= u64::from(*len);
        Sge { addr: end.mr.addr() + at, len: *len, lkey: end.mr.lkey() }
    };
    lens.iter().map(piece).collect()
}

fn listed(end: &End, sges: &[Sge]) -> Vec<u8> {
    let piece = |sge: &Sge| end.bytes((sge.addr - end.mr.addr()) as usize, sge.len as usize);
    sges.iter().flat_map(piece).collect()
}

#[test]
fn lists_are_gathered_and_scattered_whatever_their_pieces() {
    let limits = QpLimits { send_sges: 6, recv_sges: 6, ..QpLimits::default() };
    let (a, b) = with_limits("127.51.0.1", limits);
    let cases: [(&[u32], &[u32]); 6] = [
        (&[1, 2, 3], &[6]),
        (&[0, 5000, 0, 1], &[1, 0, 5000, 0]),
        (&[1024, 1024, 1023], &[3, 3000, 68]),
        (&[7, 0, 0, 0, 0, 2049], &[1, 1, 1, 1, 1, 2051]),
        (&[0, 0], &[0]),
        (&[], &[]),
    ];
    for (n, (from, to)) in cases.into_iter().enumerate() {
        a.fill(n as u8);
        b.fill(0x77);
        let (from, to) = (list(&a, 100, from), list(&b, 5000, to));
        let len: u32 = from.iter().map(|sge| sge.len).sum();
        let bytes = listed(&a, &from);
        b.qps[0].post_recv(&RecvRequest { wr_id: 5, sges: &to }).unwrap();
        a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &from)).unwrap();
        a.succeed(1);
        let got = b.completions(1)[0];
        assert_eq!((got.status, got.byte_len), (Status::Success, len), "case {n}");
        assert!(listed(&b, &to)[..len as usize] == bytes, "SEND, case {n}");
        // A READ scatters what the peer has in one piece.
        let back = list(&a, 200_000, &to.iter().map(|sge| sge.len).collect::<Vec<_>>());
        a.qps[0].post_send(&SendRequest::new(2, Operation::Read(b.remote(300)), &back)).unwrap();
        a.succeed(1);
        assert!(listed(&a, &back) == b.bytes(300, listed(&a, &back).len()), "READ, case {n}");
        // A WRITE gathers.
        a.qps[0].post_send(&SendRequest::new(3, Operation::Write(b.remote(400_000)), &from)).unwrap();
        a.succeed(1);
        assert!(b.bytes(400_000, len as usize) == bytes, "WRITE, case {n}");
        assert!(b.bytes(400_000 + len as usize, 9) == patterns(0x77, 400_000 + len as usize, 9));
    }
}

#[test]
fn lists_that_are_too_long_are_refused() {
    let (a, b) = pair("127.51.0.2", 4096, MTU);
    let five = [a.sge(0, 1)[0]; 5];
    let refused = a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &five)).unwrap_err();
    assert_eq!(refused, PostError::TooManySges { given: 5, max: 4 });
    let refused = b.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &five }).unwrap_err();
    assert_eq!(refused, PostError::TooManySges { given: 5, max: 4 });
    let huge = [Sge { len: 1 << 31, ..five[0] }, five[0]];
    let refused = a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &huge)).unwrap_err();
    assert_eq!(refused, PostError::TooLong((1 << 31) + 1));
    let atomic = Operation::FetchAdd { remote: b.remote(0), add: 1 };
    let refused = a.qps[0].post_send(&SendRequest::new(1, atomic, &a.sge(0, 4))).unwrap_err();
    assert_eq!(refused, PostError::AtomicLength(4));
    a.quiet();
    check_write(&a, &b, 2, 4096);
}

#[test]
fn inline_bytes_may_be_reused_at_once_and_need_no_registration() {
    let (a, b) = pair("127.51.0.3", MIB, MTU);
    let mut bytes = vec![0; 256];
    for round in 0..50_u8 {
        bytes.copy_from_slice(&patterns(round, 0, 256));
        let op = Operation::Write(b.remote(u64::from(round) * 256));
        a.qps[0].post_send(&SendRequest::inline(u64::from(round), op, &bytes)).unwrap();
        bytes.fill(0xff);
    }
    b.post_recv(1, 100_000, 10);
    a.qps[0].post_send(&SendRequest::inline(50, Operation::Send, b"hello")).unwrap();
    b.post_recv(2, 100_100, 10);
    a.qps[0].post_send(&SendRequest::inline(51, Operation::SendImmediate(4), b"")).unwrap();
    a.succeed(52);
    for round in 0..50_u8 {
        assert_eq!(b.bytes(usize::from(round) * 256, 256), patterns(round, 0, 256));
    }
    assert_eq!(b.completions(2).iter().map(|c| c.byte_len).collect::<Vec<_>>(), [5, 0]);
    assert_eq!(b.bytes(100_000, 5), b"hello");
}

#[test]
fn inline_bytes_are_refused_where_they_have_no_place() {
    let (a, b) = pair("127.51.0.4", 4096, MTU);
    let post = |request| a.qps[0].post_send(&request).unwrap_err();
    let long = post(SendRequest::inline(1, Operation::Send, &[0; 257]));
    assert_eq!(long, PostError::InlineTooLong { given: 257, max: 256 });
    let read = post(SendRequest::inline(1, Operation::Read(b.remote(0)), &[0; 8]));
    assert_eq!(read, PostError::InlineMisused);
    let both = post(SendRequest { sges: &a.sge(0, 8), ..SendRequest::inline(1, Operation::Send, b"x") });
    assert_eq!(both, PostError::InlineMisused);
    check_write(&a, &b, 3, 4096);
}

#[test]
fn posting_is_refused_in_states_that_take_no_work() {
    let mut end = End::open(&config("127.51.0.5"), 4096);
    let reset = end.pd.create_qp(&end.cq, &end.cq, QpLimits::default()).unwrap();
    let (sge, remote) = (end.sge(0, 8), end.remote(0));
    let send = SendRequest::new(1, Operation::Write(remote), &sge);
    let recv = RecvRequest { wr_id: 1, sges: &sge };
    assert_eq!(reset.post_send(&send), Err(PostError::State(QpState::Reset)));
    assert_eq!(reset.post_recv(&recv), Err(PostError::State(QpState::Reset)));
    let init = end.add_qp(QpLimits::default());
    assert_eq!(init.post_send(&send), Err(PostError::State(QpState::Init)));
    init.post_recv(&recv).unwrap();
    let rtr = QpAttr::to_rtr("127.51.0.5".parse().unwrap(), init.qpn(), Psn::new(0), MTU);
    init.modify(&rtr).unwrap();
    assert_eq!(init.post_send(&send), Err(PostError::State(QpState::Rtr)));
    init.modify(&QpAttr::to_state(QpState::Error)).unwrap();
    // In the error state work is taken, and comes back at once.
    init.post_send(&send).unwrap();
    init.post_recv(&recv).unwrap();
    let got = end.completions(3);
    assert!(got.iter().all(|c| c.status == Status::Flushed), "{got:?}");
    let receives = got.iter().filter(|c| c.kind == WorkKind::Receive).count();
    assert_eq!(receives, 2);
}

#[test]
fn a_full_queue_refuses_and_takes_again_when_it_has_room() {
    let limits = QpLimits { send_depth: 4, recv_depth: 3, ..QpLimits::default() };
    let (a, b) = with_limits("127.51.0.6", limits);
    let (sge, remote) = (a.sge(0, 8), b.remote(0));
    // The peer has no receives posted: these stay outstanding.
    let requests = [SendRequest::new(1, Operation::Send, &sge); 6];
    let (taken, error) = a.qps[0].post_sends(&requests).unwrap_err();
    assert_eq!((taken, error), (4, PostError::QueueFull(4)));
    for wr_id in 0..3 {
        b.post_recv(wr_id, 0, 8);
    }
    let refused = b.qps[0].post_recv(&RecvRequest { wr_id: 9, sges: &b.sge(0, 8) });
    assert!(
        refused.is_err() || b.completions(1)[0].status == Status::Success,
        "full, unless one was used already"
    );
    b.succeed(3 - usize::from(refused.is_ok()));
    b.post_recv(4, 0, 8);
    a.succeed(4);
    for _ in 0..100 {
        a.qps[0].post_send(&SendRequest::new(1, Operation::Write(remote), &sge)).unwrap();
        a.succeed(1);
    }
}

#[test]
fn unsignalled_work_completes_silently_and_in_order() {
    let limits = QpLimits { send_depth: 64, ..QpLimits::default() };
    let (a, b) = with_limits("127.51.0.7", limits);
    a.fill(1);
    let sge = a.sge(0, 700);
    for batch in 0..20_u64 {
        for i in 0..63_u64 {
            let op = Operation::Write(b.remote((batch * 64 + i) % 1000 * 700));
            let request = SendRequest { signaled: false, ..SendRequest::new(i, op, &sge) };
            a.qps[0].post_send(&request).unwrap();
        }
        a.qps[0].post_send(&SendRequest::new(1000 + batch, Operation::Write(b.remote(0)), &sge)).unwrap();
        let got = a.completions(1);
        assert_eq!((got[0].wr_id, got[0].status), (1000 + batch, Status::Success));
    }
    a.quiet();
    // Even alone, and with nothing behind it, unsignalled work is carried out and leaves the queue.
    let request = SendRequest { signaled: false, ..SendRequest::new(1, Operation::Write(b.remote(9)), &sge) };
    for _ in 0..64 {
        a.qps[0].post_send(&request).unwrap();
    }
    until("room in the queue", || {
        a.quiet();
        a.qps[0].post_send(&request).is_ok()
    });
}

#[test]
fn a_failed_unsignalled_request_is_reported() {
    let (a, b) = pair("127.51.0.8", 4096, MTU);
    let op = Operation::Write(Remote { rkey: b.mr.rkey() ^ 1, ..b.remote(0) });
    a.qps[0].post_send(&SendRequest { signaled: false, ..SendRequest::new(77, op, &a.sge(0, 8)) }).unwrap();
    let got = a.completions(1)[0];
    assert_eq!((got.wr_id, got.status), (77, Status::RemoteAccess));
}

#[test]
fn signal_all_reports_every_success() {
    let (a, b) = with_limits("127.51.0.9", QpLimits { signal_all: true, ..QpLimits::default() });
    let sge = a.sge(0, 8);
    for i in 0..5 {
        let op = Operation::Write(b.remote(0));
        a.qps[0].post_send(&SendRequest { signaled: false, ..SendRequest::new(i, op, &sge) }).unwrap();
    }
    assert_eq!(a.completions(5).iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
}

/// Without the fence the WRITE would be gathered before the READ brought the bytes that it shall
/// write.
#[test]
fn a_fence_waits_for_what_is_read() {
    let (a, b) = pair("127.51.0.10", 2 * MIB, Mtu::Mtu256);
    for round in 0..10_u8 {
        a.fill(0xcc);
        b.fill(round);
        let len = 300_000;
        a.post(Operation::Read(b.remote(0)), 0, len);
        let (sge, op) = (a.sge(0, len), Operation::Write(b.remote(MIB as u64)));
        let fenced = SendRequest { fence: true, ..SendRequest::new(2, op, &sge) };
        a.qps[0].post_send(&fenced).unwrap();
        a.succeed(2);
        assert!(b.bytes(MIB, len as usize) == patterns(round, 0, len as usize), "round {round}");
    }
}

#[test]
fn a_message_longer_than_the_receive_is_an_error_on_both_sides() {
    let (a, b) = pair("127.51.0.11", 64 << 10, MTU);
    b.fill(0x42);
    b.post_recv(1, 100, 3000);
    b.post_recv(2, 0, 0);
    a.post(Operation::Send, 0, 3001);
    a.post(Operation::Send, 0, 1);
    let (sent, got) = (a.completions(2), b.completions(2));
    assert_eq!((sent[0].status, sent[1].status), (Status::RemoteInvalidRequest, Status::Flushed));
    assert_eq!((got[0].wr_id, got[0].status), (1, Status::LocalLength));
    assert_eq!((got[1].wr_id, got[1].status), (2, Status::Flushed));
    assert_eq!(b.bytes(3100, 100), patterns(0x42, 3100, 100), "nothing is written behind the receive");
    assert_eq!((a.qps[0].state(), b.qps[0].state()), (QpState::Error, QpState::Error));
}

#[test]
fn a_sender_waits_until_the_receiver_is_ready() {
    let (a, b) = pair("127.51.0.12", 64 << 10, MTU);
    a.fill(8);
    a.post(Operation::Send, 0, 5000);
    a.post(Operation::WriteImmediate(b.remote(20_000), 5), 100, 600);
    until("the receiver to say that it is not ready", || {
        a.quiet();
        a.counter("rcvd_rnr_err") > 0
    });
    b.post_recv(1, 0, 5000);
    b.post_recv(2, 0, 0);
    a.succeed(2);
    b.succeed(2);
    assert!(b.bytes(0, 5000) == patterns(8, 0, 5000) && b.bytes(20_000, 600) == patterns(8, 100, 600));
}

#[test]
fn a_receiver_that_is_never_ready_ends_in_an_error() {
    let mut a = End::open(&config("127.51.0.13"), 4096);
    let mut b = End::open(&config("127.51.0.13"), 4096);
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&b, 0, &a, 0, MTU);
    let QpAttr { rq_psn, sq_psn, dest_qpn, .. } = a.qps[0].attr();
    a.qps[0].modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    a.qps[0].modify(&QpAttr::to_init(crate::common::ALL_ACCESS)).unwrap();
    a.qps[0].modify(&QpAttr::to_rtr(b.device.local(), dest_qpn, rq_psn, MTU)).unwrap();
    a.qps[0].modify(&QpAttr { rnr_retry: 2, ..QpAttr::to_rts(sq_psn) }).unwrap();
    a.post(Operation::Send, 0, 8);
    assert_eq!(a.status(), Status::RnrRetryExceeded);
    assert_eq!(a.counter("rcvd_rnr_err"), 3);
}

/// Memory windows may be invalidated (`windows.rs`), and nothing else.
#[test]
fn invalidating_a_region_is_refused() {
    let (a, b) = pair("127.51.0.14", 64 << 10, MTU);
    for key in [b.mr.rkey(), 12345] {
        b.post_recv(1, 0, 8);
        a.post(Operation::SendInvalidate(key), 0, 8);
        assert_eq!(a.status(), Status::RemoteAccess);
        let got = b.completions(1)[0];
        assert_eq!((got.wr_id, got.status), (1, Status::LocalAccess));
        crate::common::reconnect(&a, &b, MTU);
        check_write(&a, &b, 7, 64 << 10);
    }
}

#[test]
fn a_batch_is_posted_whole_or_not_at_all() {
    let (a, b) = with_limits("127.51.0.15", QpLimits { send_depth: 4, send_sges: 1, ..QpLimits::default() });
    let (sge, there) = (a.sge(0, 8), Operation::Write(b.remote(0)));
    let two = [sge[0], sge[0]];
    let right = |wr_id| SendRequest::new(wr_id, there, &sge);
    let wrong = SendRequest::new(9, there, &two);
    let refused = a.qps[0].post_all(&[right(1), right(2), wrong, right(3)]);
    assert_eq!(refused, Err((2, PostError::TooManySges { given: 2, max: 1 })));
    let atomic = SendRequest::new(9, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[]);
    assert_eq!(a.qps[0].post_all(&[right(1), atomic]), Err((1, PostError::AtomicLength(0))));
    let five: Vec<SendRequest<'_>> = (0..5).map(right).collect();
    assert_eq!(a.qps[0].post_all(&five), Err((4, PostError::QueueFull(4))));
    a.quiet();
    // One by one, those before the wrong one are taken.
    let refused = a.qps[0].post_sends(&[right(1), wrong, right(3)]);
    assert_eq!(refused, Err((1, PostError::TooManySges { given: 2, max: 1 })));
    a.succeed(1);
    a.qps[0].post_all(&five[..4]).unwrap();
    assert!(a.completions(4).iter().map(|wc| wc.wr_id).eq(0..4));
    a.qps[0].post_all(&[]).unwrap();
    a.qps[0].modify(&QpAttr::to_state(QpState::Error)).unwrap();
    a.qps[0].post_all(&five[..4]).unwrap();
    assert!(a.completions(4).iter().all(|wc| wc.status == Status::Flushed));
}
