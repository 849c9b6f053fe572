//! The error state: what is flushed, in which order, and that it stays quiet.

use nobounce_protocol::qp::{Mtu, Operation, QpAttr, QpEvent, QpState, Remote, Status};
use nobounce_protocol::sim::{A, B, Setup};

use crate::world::*;

const FLUSHED: Status = Status::Flushed;

#[test]
fn the_failing_request_tells_why_and_the_others_are_flushed_in_order() {
    let mut sim = pair(&Setup { signal_all: false, ..Setup::default() });
    let good = write(&mut sim, 1000);
    let bad = sim.ends[A].post(Operation::Write(Remote { addr: 1, rkey: 1 }), 0, 10).unwrap();
    let rest: Vec<u64> = (0..5).map(|_| write(&mut sim, 2000)).collect();
    let receives: Vec<u64> = (0..3).map(|i| sim.ends[A].post_receive(i * 100, 100)).collect();
    sim.drive();
    let mut want = vec![(good, SUCCESS), (bad, Status::RemoteAccess)];
    want.extend(rest.iter().map(|id| (*id, FLUSHED)));
    assert_eq!(sim.ends[A].sends(), want);
    let flushed: Vec<_> = sim.ends[A].received().iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(flushed, receives.iter().map(|id| (*id, FLUSHED)).collect::<Vec<_>>());
}

#[test]
fn unsignalled_requests_are_flushed_aloud() {
    let mut sim = pair(&Setup { signal_all: false, ..Setup::default() });
    for _ in 0..4 {
        let op = Operation::Write(sim.ends[B].remote(0));
        let request = nobounce_protocol::qp::WorkRequest {
            wr_id: 0,
            op,
            len: 100,
            signaled: false,
            solicited: false,
            fence: false,
            xrc_srq: 0,
        };
        sim.ends[A].post_request(request, 0).unwrap();
    }
    sim.ends[A].modify(&QpAttr::to_state(QpState::Error));
    sim.drive();
    assert_eq!(ended(&sim), [FLUSHED; 4]);
}

#[test]
fn what_is_posted_to_a_dead_queue_pair_is_flushed_at_once() {
    let mut sim = pair(&Setup::default());
    sim.ends[A].modify(&QpAttr::to_state(QpState::Error));
    let sent = write(&mut sim, 10);
    let receive = sim.ends[A].post_receive(0, 10);
    assert_eq!(sim.ends[A].sends(), [(sent, FLUSHED)]);
    assert_eq!(sim.ends[A].received()[0].wr_id, receive);
    sim.drive();
    assert_eq!(sim.pipes[0].counters().sent, 0);
}

#[test]
fn a_dead_queue_pair_has_no_timers_and_does_not_answer() {
    let mut sim = pair(&Setup { timeout: 10, retry_cnt: 1, ..Setup::default() });
    sim.ends[B].modify(&QpAttr::to_state(QpState::Error));
    write(&mut sim, 10);
    sim.drive();
    assert_eq!(ended(&sim), [Status::RetryExceeded]);
    assert_eq!(sim.pipes[1].counters().sent, 0);
    assert!(sim.ends[B].counters.wrong_state > 0);
    assert_eq!([sim.ends[A].qp.poll_timeout(), sim.ends[B].qp.poll_timeout()], [None; 2]);
}

#[test]
fn a_half_received_message_is_flushed() {
    let mut sim = pair(&Setup { mtu: Mtu::Mtu256, ..Setup::default() });
    let receive = sim.ends[B].post_receive(THERE, 1000);
    sim.pipes[0].script(lose(any, &[2]));
    send(&mut sim, 1000);
    sim.drive_for(6_000);
    sim.ends[B].modify(&QpAttr::to_state(QpState::Error));
    sim.drive_for(1);
    let got = sim.ends[B].received();
    assert_eq!((got.len(), got[0].wr_id, got[0].status), (1, receive, FLUSHED));
}

#[test]
fn local_memory_that_is_gone_fails_the_request() {
    let mut sim = pair(&Setup::default());
    let at = sim.ends[A].addr(1000);
    let op = Operation::Write(sim.ends[B].remote(0));
    let bad = sim.ends[A].post(op, 0, 3000).unwrap();
    let next = write(&mut sim, 10);
    sim.ends[A].memory.unmap(at, 1);
    sim.drive();
    assert_eq!(sim.ends[A].sends(), [(bad, Status::LocalProtection), (next, FLUSHED)]);
}

#[test]
fn local_memory_that_is_gone_fails_a_read() {
    let mut sim = pair(&Setup::default());
    let at = sim.ends[A].addr(1000);
    sim.ends[A].memory.unmap(at, 1);
    read(&mut sim, 3000);
    sim.drive();
    assert_eq!(ended(&sim), [Status::LocalProtection]);
    assert_eq!(sim.ends[A].qp.state(), QpState::Error);
}

#[test]
fn remote_memory_that_is_gone_is_a_refusal() {
    for is_write in [true, false] {
        let mut sim = pair(&Setup::default());
        let at = sim.ends[B].addr(THERE + 2000);
        sim.ends[B].memory.unmap(at, 1);
        if is_write {
            write(&mut sim, 5000)
        } else {
            read(&mut sim, 5000)
        };
        sim.drive();
        assert_eq!(ended(&sim), [Status::RemoteAccess]);
        assert_eq!(sim.ends[B].events, [QpEvent::AccessError]);
    }
}

#[test]
fn a_receive_buffer_that_is_gone_is_an_operational_error() {
    let mut sim = pair(&Setup::default());
    let at = sim.ends[B].addr(THERE + 1500);
    sim.ends[B].memory.unmap(at, 1);
    let receive = sim.ends[B].post_receive(THERE, 5000);
    send(&mut sim, 5000);
    sim.drive();
    assert_eq!(ended(&sim), [Status::RemoteOperation]);
    let got = sim.ends[B].received();
    assert_eq!((got.len(), got[0].wr_id, got[0].status), (1, receive, Status::LocalProtection));
    assert_eq!(sim.ends[B].events, [QpEvent::Fatal]);
}

#[test]
fn reset_and_reconnect_starts_afresh() {
    let mut sim = pair(&Setup::default());
    sim.ends[A].post(Operation::Write(Remote { addr: 1, rkey: 1 }), 0, 10).unwrap();
    sim.drive();
    for (end, psn) in [(A, [5, 9]), (B, [9, 5])] {
        let attr = sim.ends[end].qp.attr().clone();
        for to in [
            QpAttr::to_state(QpState::Reset),
            QpAttr::to_init(attr.access),
            QpAttr::to_rtr(
                attr.remote,
                attr.dest_qpn,
                nobounce_protocol::wire::Psn::new(psn[1]),
                attr.path_mtu,
            ),
            QpAttr::to_rts(nobounce_protocol::wire::Psn::new(psn[0])),
        ] {
            sim.ends[end].modify(&to);
        }
    }
    let id = write(&mut sim, 5000);
    sim.drive();
    assert_eq!(sim.ends[A].sends().last(), Some(&(id, SUCCESS)));
    assert!(same(&sim, 5000));
}
