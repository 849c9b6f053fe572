//! Acknowledgements, fences, limits, draining.

use nobounce_protocol::qp::{Mtu, Operation, QpAttr, QpEvent, QpState, WorkRequest};
use nobounce_protocol::sim::{A, B, Conditions, Setup};
use nobounce_protocol::timing::{MICROSECOND, MILLISECOND};

use crate::world::*;

const PLAIN: WorkRequest = WorkRequest {
    wr_id: 0,
    op: Operation::Send,
    len: 0,
    signaled: false,
    solicited: false,
    fence: false,
    xrc_srq: 0,
};

fn small() -> Setup {
    Setup { mtu: Mtu::Mtu256, ..Setup::default() }
}

#[test]
fn sixty_four_packets_are_acknowledged_by_a_handful() {
    let mut sim = pair(&small());
    write(&mut sim, 64 * 256);
    sim.drive();
    let (data, acks) = (sim.pipes[0].counters().sent, sim.pipes[1].counters().sent);
    assert_eq!(data, 64);
    assert!((2..=6).contains(&acks), "{acks} acknowledgements");
}

#[test]
fn unsignalled_requests_are_silent_and_the_signalled_one_speaks_for_them() {
    let mut sim = pair(&Setup { signal_all: false, ..small() });
    let remote = sim.ends[B].remote(THERE);
    for i in 0..10 {
        let request = WorkRequest { op: Operation::Write(remote), len: 100, signaled: i == 9, ..PLAIN };
        sim.ends[A].post_request(request, 0).unwrap();
    }
    sim.drive();
    assert_eq!(sim.ends[A].sends(), [(10, SUCCESS)]);
    assert!(sim.pipes[1].counters().sent <= 2);
}

#[test]
fn a_fenced_request_waits_for_the_reads_before_it() {
    let mut sim = pair(&small());
    sim.start_trace();
    let remote = sim.ends[B].remote(THERE);
    read(&mut sim, 1000);
    let fenced = WorkRequest { op: Operation::Write(remote), len: 10, fence: true, ..PLAIN };
    sim.ends[A].post_request(fenced, 0).unwrap();
    sim.drive();
    let trace = sim.trace();
    let position = |what: &str| trace.lines().position(|l| l.contains(what)).unwrap();
    assert!(position("WriteOnly") > position("ReadResponseLast"), "{trace}");
    assert_eq!(ended(&sim), [SUCCESS; 2]);
}

#[test]
fn an_unfenced_request_does_not_wait() {
    let mut sim = pair(&small());
    sim.start_trace();
    read(&mut sim, 1000);
    write(&mut sim, 10);
    sim.drive();
    let trace = sim.trace();
    let position = |what: &str| trace.lines().position(|l| l.contains(what)).unwrap();
    assert!(position("WriteOnly") < position("ReadResponseFirst"), "{trace}");
    assert_eq!(ended(&sim), [SUCCESS; 2]);
}

#[test]
fn never_more_reads_on_the_wire_than_agreed() {
    for limit in [1_u8, 2, 4] {
        let mut sim = pair(&Setup { max_rd_atomic: limit, max_dest_rd_atomic: limit, ..small() });
        for i in 0..20 {
            if i % 3 == 0 {
                add(&mut sim)
            } else {
                read(&mut sim, 700)
            };
        }
        let mut asked = 0_u64;
        let mut most = 0;
        while sim.step() {
            asked = asked.max(sim.pipes[0].counters().sent);
            let open = asked - sim.ends[A].sends().len() as u64;
            most = most.max(open);
        }
        assert_eq!(ended(&sim), vec![SUCCESS; 20]);
        assert_eq!(most, u64::from(limit));
    }
}

/// The limit of the attributes is a promise of the peer. A peer that is known to keep more is not
/// held to it, also when requests and responses are lost.
#[test]
fn as_many_atomics_on_the_wire_as_the_peer_is_known_to_answer() {
    let setup = Setup { max_rd_atomic: 1, max_dest_rd_atomic: 1, resources: 16, ..small() };
    for loss in [0, 50_000] {
        let mut sim = over(&setup, Conditions { loss, ..Conditions::default() }, 3);
        for _ in 0..100 {
            add(&mut sim);
        }
        let mut most = 0;
        while sim.step() {
            let open = sim.pipes[0].counters().sent - sim.ends[A].sends().len() as u64;
            most = most.max(open);
        }
        assert_eq!(ended(&sim), vec![SUCCESS; 100]);
        assert!(loss > 0 || most == 16, "{most}");
    }
}

#[test]
fn a_large_read_is_asked_for_in_pieces_and_arrives_whole() {
    let mut sim = pair(&Setup { memory: 2 << 20, ..small() });
    let remote = sim.ends[B].remote(1 << 20);
    sim.ends[A].post(Operation::Read(remote), 0, 900_000).unwrap();
    sim.drive();
    let (a, b) = (&sim.ends[A], &sim.ends[B]);
    assert!(bytes(&a.memory, a.addr(0), 900_000) == bytes(&b.memory, b.addr(1 << 20), 900_000));
    assert!(sim.pipes[0].counters().sent >= 7, "128 KiB at a time");
}

/// Room comes back packet by packet, and is asked for in pieces that are worth it all the same.
#[test]
fn a_stream_of_reads_does_not_end_in_questions_for_single_packets() {
    for (mtu, room) in [(Mtu::Mtu4096, 340 << 10), (Mtu::Mtu1024, 340 << 10), (Mtu::Mtu4096, 208 << 10)] {
        let mut sim = pair(&Setup { mtu, room, memory: 2 << 20, ..small() });
        let remote = sim.ends[B].remote(1 << 20);
        for _ in 0..20 {
            sim.ends[A].post(Operation::Read(remote), 0, 7 << 17).unwrap();
        }
        sim.drive();
        assert_eq!(ended(&sim), vec![SUCCESS; 20]);
        let asked = sim.pipes[0].counters().sent;
        assert!((140..170).contains(&asked), "{asked} questions for 140 pieces of 128 KiB, room {room}");
    }
}

/// A READ with a small total window does not wait until nothing is in flight. Otherwise the link
/// would idle for a round trip each time.
#[test]
fn reads_with_little_room_are_asked_for_while_others_are_under_way() {
    let setup = Setup { mtu: Mtu::Mtu4096, room: 113 << 10, memory: 2 << 20, ..small() };
    let mut sim = over(&setup, Conditions { rate: 25_000_000_000, ..Conditions::default() }, 1);
    let remote = sim.ends[B].remote(1 << 20);
    sim.ends[A].post(Operation::Read(remote), 0, 7 << 17).unwrap();
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
    let (took, questions) = (sim.now / MICROSECOND, sim.pipes[0].counters().sent);
    assert!(took < 330, "{took} us where the wire alone takes 300");
    assert!(questions < 32, "{questions}");
}

/// An unsignaled WRITE gets no ACK of its own: a READ behind it does not wait for one.
#[test]
fn a_read_behind_unacknowledged_writes_is_asked_at_once() {
    let mut sim =
        pair(&Setup { mtu: Mtu::Mtu4096, signal_all: false, psn: [14, 0], memory: 1 << 20, ..small() });
    let (write, read) =
        (Operation::Write(sim.ends[B].remote(0)), Operation::Read(sim.ends[B].remote(1 << 19)));
    sim.ends[A].post_request(WorkRequest { op: write, len: 20 * 4096, ..PLAIN }, 0).unwrap();
    sim.ends[A]
        .post_request(WorkRequest { op: read, len: 128 << 10, signaled: true, ..PLAIN }, 1 << 19)
        .unwrap();
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
    assert!(sim.now < MILLISECOND, "{} ns", sim.now);
    let again = sim.ends[A].qp.counters();
    // The first window admits a READ in parts.
    assert_eq!(sim.pipes[0].counters().sent, 24, "nothing was repeated: {again:?}");
}

#[test]
fn a_drained_send_queue_says_so_after_the_last_answer() {
    let mut sim = pair(&small());
    write(&mut sim, 5000);
    sim.flush();
    sim.ends[A].drain();
    write(&mut sim, 1); // taken, but not begun
    assert!(sim.ends[A].events.is_empty());
    sim.drive();
    assert_eq!(sim.ends[A].events, [QpEvent::SendQueueDrained]);
    assert_eq!(sim.ends[A].sends().len(), 1);
    sim.ends[A].modify(&QpAttr::to_state(QpState::Rts));
    sim.drive();
    assert_eq!(sim.ends[A].sends().len(), 2, "and goes on");
}

#[test]
fn draining_an_idle_queue_reports_at_once() {
    let mut sim = pair(&small());
    sim.ends[A].drain();
    sim.drive();
    assert_eq!(sim.ends[A].events, [QpEvent::SendQueueDrained]);
}

#[test]
fn a_draining_queue_still_answers() {
    let mut sim = pair(&small());
    sim.ends[B].drain();
    write(&mut sim, 1000);
    read(&mut sim, 1000);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 2]);
}

#[test]
fn the_first_packet_in_rtr_establishes_communication_once() {
    let mut sim = pair(&small());
    let attr = sim.ends[B].qp.attr().clone();
    let access = attr.access;
    for to in [
        QpAttr::to_state(QpState::Reset),
        QpAttr::to_init(access),
        QpAttr::to_rtr(attr.remote, attr.dest_qpn, nobounce_protocol::wire::Psn::new(0), attr.path_mtu),
    ] {
        sim.ends[B].modify(&to);
    }
    write(&mut sim, 1000);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS], "a responder in RTR answers");
    assert_eq!(sim.ends[B].events, [QpEvent::CommunicationEstablished]);
}

#[test]
fn a_path_with_little_room_is_slow_but_not_stuck() {
    let mut sim = pair(&Setup { room: 5000, ..small() });
    write(&mut sim, 50_000);
    read(&mut sim, 50_000);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 2]);
    assert_eq!(sim.ends[A].qp.outstanding(), 0);
}
