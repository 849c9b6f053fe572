//! Unreliable connections: whole messages in order, or nothing, and no answer.

use nobounce_protocol::qp::{
    Mtu, Operation, PostError, QpAttr, QpEvent, QpState, Remote, Service, Status, WorkKind,
};
use nobounce_protocol::sim::{A, B, Fate, Setup, Sim};
use nobounce_protocol::wire::{Header, Opcode, Psn};

use crate::world::*;

fn uc() -> Setup {
    Setup { service: Service::Uc, mtu: Mtu::Mtu256, ..Setup::default() }
}

/// The lengths that B received.
fn lengths(sim: &Sim) -> Vec<u32> {
    sim.ends[B].received().iter().map(|c| c.byte_len).collect()
}

#[test]
fn messages_of_any_size_arrive_and_nothing_is_answered() {
    for mtu in Mtu::ALL {
        let m = mtu.bytes();
        for len in [0, 1, 3, m - 1, m, m + 1, 2 * m, 21 * m + 5] {
            for psn in [[0, 0], [0xff_fff8, 0xff_ffff]] {
                let mut sim = pair(&Setup { mtu, psn, ..uc() });
                let before = sim.ends[B].memory.clone();
                sim.ends[B].post_receive(THERE, u64::from(len));
                let id = send(&mut sim, len);
                sim.drive();
                assert_eq!(sim.ends[A].sends(), [(id, SUCCESS)]);
                assert_eq!(lengths(&sim), [len]);
                assert!(same(&sim, len));
                nothing_else_changed(&before, &sim.ends[B].memory, sim.ends[B].addr(THERE), len);
                sim.ends[B].memory.fill(0xff);
                write(&mut sim, len);
                sim.drive();
                assert!(same(&sim, len));
                nothing_else_changed(&before, &sim.ends[B].memory, sim.ends[B].addr(THERE), len);
                assert_eq!(sim.pipes[1].counters().sent, 0, "a receiver says nothing");
            }
        }
    }
}

#[test]
fn immediate_data_and_the_solicited_bit_arrive() {
    let mut sim = pair(&uc());
    sim.ends[B].post_receive(THERE, 1000);
    sim.ends[B].post_receive(THERE, 0);
    let remote = sim.ends[B].remote(THERE);
    for op in [Operation::SendImmediate(7), Operation::WriteImmediate(remote, 8)] {
        let request = nobounce_protocol::qp::WorkRequest {
            wr_id: 0,
            op,
            len: 700,
            signaled: true,
            solicited: true,
            fence: true,
            xrc_srq: 0,
        };
        sim.ends[A].post_request(request, HERE).unwrap();
    }
    sim.drive();
    let got = sim.ends[B].received();
    assert_eq!((got[0].kind, got[0].immediate, got[0].byte_len), (WorkKind::Receive, Some(7), 700));
    assert_eq!((got[1].kind, got[1].immediate), (WorkKind::ReceiveWriteImmediate, Some(8)));
    assert!(got.iter().all(|c| c.solicited && c.status == SUCCESS));
    assert!(same(&sim, 700));
}

#[test]
fn what_goes_over_the_wire() {
    let mut sim = pair(&Setup { psn: [0xff_fffe, 0], ..uc() });
    sim.start_trace();
    sim.ends[B].post_receive(THERE, 1000);
    send(&mut sim, 600);
    write(&mut sim, 600);
    write(&mut sim, 1);
    sim.drive();
    insta::assert_snapshot!("unreliable_wire", sim.trace());
}

#[test]
fn a_message_with_a_gap_is_dropped_and_its_receive_serves_the_next() {
    for lost in [0, 1, 2, 3] {
        let mut sim = pair(&uc());
        sim.pipes[0].script(move |n, _| if n == lost { Fate::Drop } else { Fate::Pass });
        let first = sim.ends[B].post_receive(THERE, 2000);
        sim.ends[B].post_receive(THERE, 2000);
        send(&mut sim, 1000); // packets 0 to 3
        send(&mut sim, 900);
        sim.drive();
        assert_eq!(ended(&sim), [SUCCESS; 2], "the sender does not know");
        assert_eq!(lengths(&sim), [900]);
        assert_eq!(sim.ends[B].received()[0].wr_id, first, "the receive stayed at the head");
        assert!(same(&sim, 900));
        assert_eq!(sim.ends[B].qp.counters().out_of_seq_request, 1);
        assert_eq!(sim.ends[B].qp.state(), QpState::Rts);
    }
}

#[test]
fn the_receive_of_a_dropped_send_serves_a_write_too_and_is_flushed_with_the_rest() {
    let mut sim = pair(&uc());
    sim.pipes[0].script(lose(any, &[3, 8]));
    let first = sim.ends[B].post_receive(THERE, 2000);
    let second = sim.ends[B].post_receive(THERE, 2000);
    send(&mut sim, 1000);
    let remote = sim.ends[B].remote(THERE);
    sim.ends[A].post(Operation::WriteImmediate(remote, 1), HERE, 300).unwrap();
    send(&mut sim, 1000);
    sim.drive();
    let got = sim.ends[B].received();
    assert_eq!((got.len(), got[0].wr_id, got[0].kind), (1, first, WorkKind::ReceiveWriteImmediate));
    sim.ends[B].modify(&QpAttr::to_state(QpState::Error));
    sim.drive();
    let got = sim.ends[B].received();
    assert_eq!((got.len(), got[1].wr_id, got[1].status), (2, second, Status::Flushed));
}

#[test]
fn late_and_repeated_packets_are_not_taken_twice() {
    let mut sim = pair(&uc());
    // The second message overtakes the last packet of the first; everything comes twice.
    sim.pipes[0].script(|n, _| if n == 3 { Fate::Delay(50_000) } else { Fate::Duplicate });
    for _ in 0..3 {
        sim.ends[B].post_receive(THERE, 2000);
    }
    send(&mut sim, 1000);
    send(&mut sim, 500);
    sim.drive();
    assert_eq!(lengths(&sim), [500]);
    assert!(sim.ends[B].qp.counters().duplicate_request >= 5);
}

#[test]
fn without_a_receive_a_message_is_dropped_silently() {
    let mut sim = pair(&uc());
    send(&mut sim, 1000);
    let remote = sim.ends[B].remote(THERE);
    sim.ends[A].post(Operation::WriteImmediate(remote, 1), HERE, 100).unwrap();
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 2]);
    assert!(sim.ends[B].completions.is_empty() && sim.ends[B].events.is_empty());
    assert_eq!(sim.ends[B].qp.counters().out_of_buffer, 2);
    assert_eq!(sim.ends[B].qp.counters().dropped_messages, 2);
    assert!(!same(&sim, 100), "a WRITE that cannot be told is not placed");
    sim.ends[B].post_receive(THERE, 1000);
    send(&mut sim, 1000);
    sim.drive();
    assert_eq!(lengths(&sim), [1000], "and life goes on");
}

#[test]
fn what_is_not_allowed_is_dropped_silently() {
    let wrong_key = Remote { addr: 0, rkey: 0xbad };
    for (setup, op, len) in [
        (uc(), Operation::Write(wrong_key), 1000),
        (uc(), Operation::WriteImmediate(wrong_key, 1), 10),
        (Setup { access: nobounce_protocol::qp::Access::empty(), ..uc() }, Operation::Write(wrong_key), 0),
        (uc(), Operation::Send, 2001), // longer than the receive
    ] {
        let mut sim = pair(&setup);
        let receive = sim.ends[B].post_receive(THERE, 2000);
        let before = sim.ends[B].memory.clone();
        sim.ends[A].post(op, HERE, len).unwrap();
        sim.drive();
        assert_eq!(ended(&sim), [SUCCESS]);
        assert_eq!(sim.ends[B].qp.counters().dropped_messages, 1, "{op:?}");
        assert!(sim.ends[B].completions.is_empty() && sim.ends[B].events.is_empty());
        if op != Operation::Send {
            assert_eq!(before.bytes(), sim.ends[B].memory.bytes());
        }
        send(&mut sim, 100);
        sim.drive();
        assert_eq!(sim.ends[B].received()[0].wr_id, receive, "the receive was kept");
    }
}

#[test]
fn a_receive_whose_memory_is_gone_ends_the_connection_at_this_side() {
    let mut sim = pair(&uc());
    let addr = sim.ends[B].addr(THERE);
    sim.ends[B].memory.unmap(addr + 300, 10);
    let receive = sim.ends[B].post_receive(THERE, 2000);
    sim.ends[B].post_receive(0, 10);
    send(&mut sim, 1000);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
    let got = sim.ends[B].received();
    assert_eq!((got[0].wr_id, got[0].status), (receive, Status::LocalProtection));
    assert_eq!(got[1].status, Status::Flushed);
    assert_eq!(sim.ends[B].qp.state(), QpState::Error);
}

#[test]
fn a_send_whose_memory_is_gone_stops_the_send_queue_only() {
    let mut sim = pair(&uc());
    for _ in 0..2 {
        sim.ends[B].post_receive(THERE, 2000);
    }
    sim.ends[A].post_receive(THERE, 2000);
    let addr = sim.ends[A].addr(HERE);
    sim.ends[A].memory.unmap(addr + 600, 10);
    send(&mut sim, 100);
    send(&mut sim, 1000);
    send(&mut sim, 100);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS, Status::LocalProtection, Status::Flushed]);
    assert_eq!(sim.ends[A].qp.state(), QpState::Sqe);
    assert_eq!(lengths(&sim), [100]);
    send(&mut sim, 100);
    sim.drive();
    assert_eq!(ended(&sim)[3..], [Status::Flushed]);
    sim.ends[B].post(Operation::Send, 0, 300).unwrap();
    sim.drive();
    assert_eq!(sim.ends[A].received()[0].byte_len, 300, "receives go on");
    sim.ends[A].modify(&QpAttr::to_state(QpState::Rts));
    send(&mut sim, 200);
    sim.drive();
    assert_eq!(ended(&sim)[4..], [SUCCESS]);
    assert_eq!(lengths(&sim), [100, 200], "the half message was dropped");
}

#[test]
fn what_the_service_does_not_offer_is_refused_when_posted() {
    let mut sim = pair(&uc());
    let remote = sim.ends[B].remote(THERE);
    for op in [
        Operation::Read(remote),
        Operation::FetchAdd { remote, add: 1 },
        Operation::CompareSwap { remote, compare: 0, swap: 1 },
        Operation::SendInvalidate(1),
    ] {
        let refused = sim.ends[A].post(op, HERE, 8).unwrap_err();
        assert_eq!(refused, PostError::NotOffered { service: Service::Uc, operation: op.kind() });
    }
    let to = sim.ends[A].peer;
    let request = nobounce_protocol::qp::WorkRequest {
        wr_id: 0,
        op: Operation::Send,
        len: 0,
        signaled: true,
        solicited: false,
        fence: false,
        xrc_srq: 0,
    };
    assert_eq!(sim.ends[A].qp.post_to(request, to), Err(PostError::Destination(Service::Uc)));
}

#[test]
fn room_on_the_path_paces_the_sender() {
    let room = 64 << 10;
    let mut sim = pair(&Setup { mtu: Mtu::Mtu1024, room, ..uc() });
    sim.ends[B].post_receive(THERE, 150_000);
    send(&mut sim, 150_000);
    sim.flush();
    let at_once = sim.pipes[0].counters().sent_bytes;
    assert!(at_once > room / 2 && at_once <= room, "{at_once}");
    assert!(ended(&sim).is_empty() && sim.ends[A].qp.is_path_limited());
    sim.drive();
    assert_eq!(lengths(&sim), [150_000]);
    assert!(sim.now >= 2 * 300_000, "three helpings: {} ns", sim.now);
    assert_eq!(sim.ends[A].qp.outstanding(), 0);
}

#[test]
fn a_queue_that_is_drained_ends_the_message_and_begins_no_other() {
    let mut sim = pair(&Setup { room: 10_000, ..uc() });
    for _ in 0..2 {
        sim.ends[B].post_receive(THERE, 100_000);
    }
    send(&mut sim, 100_000);
    send(&mut sim, 100);
    sim.flush();
    sim.ends[A].drain();
    sim.drive();
    assert_eq!(sim.ends[A].events, [QpEvent::SendQueueDrained]);
    assert_eq!(lengths(&sim), [100_000]);
    sim.ends[A].modify(&QpAttr::to_state(QpState::Rts));
    sim.drive();
    assert_eq!(lengths(&sim), [100_000, 100]);
}

#[test]
fn a_peer_that_begins_anew_is_heard() {
    let mut sim = pair(&Setup { psn: [0x50_0000, 0], ..uc() });
    for psn in [0x50_0000, 0x4f_0000, 0, 0xff_ffff, 0x80_0000, 0x10_0000] {
        sim.ends[B].post_receive(THERE, 100);
        let header = Header::new(Opcode::UcSendOnly, sim.ends[B].qpn, Psn::new(psn));
        sim.ends[B].inject(sim.now, &header, &[1; 8]);
        sim.ends[B].inject(sim.now, &header, &[1; 8]);
    }
    assert_eq!(lengths(&sim), [8; 6], "each once");
}

#[test]
fn packets_of_another_service_are_not_taken() {
    for service in Service::ALL {
        let mut sim = pair(&Setup { service, ..uc() });
        sim.ends[B].post_receive(THERE, 1000);
        let mut count = 0;
        for opcode in Opcode::ALL.into_iter().filter(|o| o.service() != service) {
            let header = Header::new(opcode, sim.ends[B].qpn, Psn::new(0));
            sim.ends[B].inject(sim.now, &header, &[]);
            count += 1;
        }
        assert_eq!(sim.ends[B].counters.wrong_service, count);
        assert!(sim.ends[B].completions.is_empty());
        assert_eq!(sim.ends[B].qp.state(), QpState::Rts);
    }
}

#[test]
fn the_first_packet_before_rts_is_told() {
    let mut sim = pair(&uc());
    let (remote, peer) = (sim.ends[B].peer.remote, sim.ends[A].qpn);
    sim.ends[B].modify(&QpAttr::to_state(QpState::Reset));
    sim.ends[B].modify(&QpAttr::to_init(nobounce_protocol::qp::Access::all()));
    sim.ends[B].modify(&QpAttr::uc_to_rtr(remote, peer, Psn::new(0), Mtu::Mtu256));
    sim.ends[B].post_receive(THERE, 100);
    send(&mut sim, 100);
    sim.drive();
    assert_eq!(sim.ends[B].events, [QpEvent::CommunicationEstablished]);
    assert_eq!(lengths(&sim), [100]);
}
