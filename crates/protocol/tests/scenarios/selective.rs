//! Selective retransmission: only what is lost is sent again, and the order of everything that a
//! program can see stays as it is.

use nobounce_protocol::qp::{Mtu, Operation, QpState, Status};
use nobounce_protocol::sim::{A, B, Conditions, Fate, Setup, Sim};
use nobounce_protocol::timing::{MICROSECOND, MILLISECOND};
use nobounce_protocol::wire::{Header, Psn, SelectiveAck};

use crate::world::*;

const LEN: u32 = 20 * 256;

fn setup() -> Setup {
    Setup { mtu: Mtu::Mtu256, timeout: 20, psn: [0xff_fffa, 7], selective: true, ..Setup::default() }
}

/// Packets sent besides those that are needed.
fn sent_again(sim: &Sim) -> u64 {
    sim.ends[A].qp.counters().retransmitted
}

fn without_probes(sim: &mut Sim, requests: usize) {
    sim.drive();
    assert_eq!(ended(sim), vec![SUCCESS; requests]);
    let counters = *sim.ends[A].qp.counters();
    assert_eq!((counters.probes, counters.local_ack_timeout_err), (0, 0));
}

#[test]
fn one_lost_packet_of_a_write_is_one_packet_sent_again() {
    for which in [&[0][..], &[5], &[5, 6, 9], &[3, 20], &[5, 20, 21]] {
        let mut sim = pair(&setup());
        let lost = which.to_vec();
        sim.pipes[0].script(move |n, _| if lost.contains(&n) { Fate::Drop } else { Fate::Pass });
        write(&mut sim, LEN);
        write(&mut sim, LEN);
        without_probes(&mut sim, 2);
        assert!(same(&sim, LEN));
        assert_eq!(sent_again(&sim), which.len() as u64, "{which:?}");
        assert_eq!(sim.ends[A].qp.counters().rcvd_seq_err, 0);
    }
}

#[test]
fn lost_responses_of_a_read_are_asked_for_alone() {
    let mut sim = pair(&setup());
    sim.pipes[1].script(lose(any, &[4, 5, 11]));
    read(&mut sim, LEN);
    without_probes(&mut sim, 1);
    assert!(same(&sim, LEN));
    assert_eq!(sent_again(&sim), 3);
    assert_eq!(sim.pipes[0].counters().sent, 4);
}

#[test]
fn a_lost_request_of_a_read_is_found_by_the_next_one() {
    let mut sim = pair(&setup());
    sim.pipes[0].script(lose(any, &[0]));
    for _ in 0..5 {
        read(&mut sim, 256);
    }
    without_probes(&mut sim, 5);
    assert!(same(&sim, 256));
    assert_eq!(sent_again(&sim), 1);
}

/// Programs poll the last byte: it comes last, although the middle is placed as it arrives.
#[test]
fn the_last_byte_of_a_write_is_placed_last() {
    let mut sim = pair(&setup());
    sim.pipes[0].script(|n, _| if n == 3 { Fate::Delay(MILLISECOND / 10) } else { Fate::Pass });
    write(&mut sim, LEN);
    sim.drive_for(10 * MICROSECOND);
    let (from, to) = (sim.ends[A].addr(HERE), sim.ends[B].addr(THERE));
    let placed =
        |sim: &Sim, at: u64| sim.ends[A].memory.read(from + at, 1) == sim.ends[B].memory.read(to + at, 1);
    assert!(placed(&sim, 18 * 256) && !placed(&sim, 3 * 256));
    assert!(!placed(&sim, u64::from(LEN) - 1));
    sim.drive();
    assert!(same(&sim, LEN));
}

/// The bytes of later messages wait, too: a flag written behind data must not overtake it.
#[test]
fn later_messages_wait_for_the_gap() {
    let mut sim = pair(&setup());
    sim.pipes[0].script(|n, _| if n == 3 { Fate::Delay(MILLISECOND / 10) } else { Fate::Pass });
    write(&mut sim, LEN);
    let remote = sim.ends[B].remote(THERE + (64 << 10));
    sim.ends[A].post(Operation::Write(remote), HERE, 64).unwrap();
    sim.ends[B].post_receive(THERE + (70 << 10), 64);
    sim.ends[A].post(Operation::Send, HERE, 64).unwrap();
    add(&mut sim);
    let before = bytes(&sim.ends[B].memory, remote.addr, 64);
    sim.drive_for(10 * MICROSECOND);
    assert_eq!(bytes(&sim.ends[B].memory, remote.addr, 64), before);
    assert_eq!((sim.ends[B].completions.len(), sim.ends[B].memory.atomics()), (0, 0));
    sim.drive();
    assert_eq!(ended(&sim), vec![SUCCESS; 4]);
    assert_eq!((sim.ends[B].completions.len(), sim.ends[B].memory.atomics()), (1, 1));
    assert_ne!(bytes(&sim.ends[B].memory, remote.addr, 64), before);
}

/// A SEND that arrived early has been reported, and is refused when its turn comes.
#[test]
fn a_reported_send_without_a_receive_is_sent_again() {
    let mut sim = pair(&setup());
    sim.pipes[0].script(lose(any, &[0]));
    sim.ends[B].post_receive(THERE, 64);
    for _ in 0..4 {
        send(&mut sim, 64);
    }
    sim.drive_for(MILLISECOND / 5);
    assert!(sim.ends[A].qp.counters().rcvd_rnr_err > 0);
    assert_eq!(ended(&sim), vec![SUCCESS; 1]);
    for _ in 0..3 {
        sim.ends[B].post_receive(THERE, 64);
    }
    sim.drive();
    assert_eq!(ended(&sim), vec![SUCCESS; 4]);
    assert_eq!(sim.ends[B].received().len(), 4);
}

/// Long messages of every kind, both ways, over a network with every fault.
#[test]
fn long_messages_survive_any_network() {
    for seed in 0..24 {
        let conditions = Conditions {
            rate: 10_000_000_000,
            loss: 50_000,
            duplicate: 50_000,
            reorder: 100_000,
            corrupt: 10_000,
            ..Conditions::default()
        };
        let runs = seed % 3 == 2;
        let mut sim = over(&Setup { runs, timeout: 17, ..setup() }, conditions, seed);
        let len = 48 << 10;
        let (here, there) = (sim.ends[A].remote(HERE), sim.ends[B].remote(THERE));
        sim.ends[B].post_receive(THERE + (60 << 10), u64::from(len));
        sim.ends[A].post(Operation::Write(there), HERE, len).unwrap();
        sim.ends[A].post(Operation::Send, HERE, len).unwrap();
        sim.ends[A].post(Operation::FetchAdd { remote: there, add: 1 }, HERE + (100 << 10), 8).unwrap();
        sim.ends[A].post(Operation::Read(there), HERE + (50 << 10), len).unwrap();
        sim.ends[B].post(Operation::Read(here), 20 << 10, len).unwrap();
        sim.drive();
        assert_eq!(ended(&sim), vec![SUCCESS; 4], "seed {seed}");
        let at = |end: usize, offset: u64| {
            let end = &sim.ends[end];
            bytes(&end.memory, end.addr(offset + 8), len - 8)
        };
        let sent = at(A, HERE);
        assert_eq!(at(B, THERE), sent, "seed {seed}");
        assert_eq!(at(B, THERE + (60 << 10)), sent, "seed {seed}");
        assert_eq!(at(A, HERE + (50 << 10)), sent, "seed {seed}");
        assert_eq!(at(B, 20 << 10), sent, "seed {seed}");
        assert_eq!(sim.ends[B].memory.atomics(), 1, "seed {seed}");
    }
}

/// One end learns later than the other that both can: a selective acknowledgement proves it.
#[test]
fn the_ends_may_learn_of_it_one_after_the_other() {
    for knows in [A, B] {
        let conditions = Conditions { loss: 50_000, rate: 10_000_000_000, ..Conditions::default() };
        let mut sim = over(&Setup { selective: false, timeout: 17, ..setup() }, conditions, 5);
        write(&mut sim, 100 << 10);
        sim.drive_for(30 * MICROSECOND);
        let now = sim.now;
        sim.ends[knows].qp.retransmit_selectively(now);
        for _ in 0..3 {
            write(&mut sim, 100 << 10);
            read(&mut sim, 100 << 10);
        }
        sim.drive();
        assert_eq!(ended(&sim), vec![SUCCESS; 7]);
        assert!(same(&sim, 100 << 10));
        assert_eq!(sent_again(&sim) > 0, knows == B || sim.ends[A].qp.counters().rcvd_seq_err > 0);
    }
}

fn forged(sim: &mut Sim, missing: u32, ahead: std::ops::Range<u64>) {
    let mut ack = SelectiveAck::new(sim.ends[A].qpn, Psn::new(missing));
    ahead.for_each(|ahead| ack.note(ahead));
    let mut packet = vec![0; ack.len()];
    ack.emit(&mut packet);
    let now = sim.now;
    sim.ends[A].receive_trusted(now, &packet);
}

/// What was falsely reported is sent in the end.
#[test]
fn a_false_report_delays_but_loses_nothing() {
    let mut sim = pair(&setup());
    sim.pipes[0].script(|n, _| if n < 20 { Fate::Drop } else { Fate::Pass });
    write(&mut sim, LEN);
    sim.flush();
    forged(&mut sim, 0xff_fffa, 1..1000);
    sim.drive();
    assert_eq!(ended(&sim), vec![SUCCESS; 1]);
    assert!(same(&sim, LEN));
    let before = sim.ends[A].counters.unsolicited;
    forged(&mut sim, 0x1000, 1..2);
    assert_eq!(sim.ends[A].counters.unsolicited, before + 1, "nothing of that was sent");
}

/// A peer that leaves a gap open fills a bounded buffer.
#[test]
fn what_is_held_is_bounded() {
    let setup = Setup { mtu: Mtu::Mtu4096, memory: 9 << 20, ..setup() };
    let mut sim = pair(&setup);
    sim.pipes[0].script(|n, _| if n == 0 { Fate::Drop } else { Fate::Pass });
    let (now, remote) = (sim.now, sim.ends[B].remote(0));
    let payload = vec![7; 4096];
    for n in 1..2000_u32 {
        let mut header = Header::new(
            nobounce_protocol::wire::Opcode::WriteOnly,
            sim.ends[B].qpn,
            Psn::new(0xff_fffa).plus(n),
        );
        header.reth = nobounce_protocol::wire::Reth { addr: remote.addr, rkey: remote.rkey, len: 4096 };
        sim.ends[B].inject(now, &header, &payload);
    }
    let ack = sim.ends[B].qp.poll_selective_ack(true).unwrap();
    let held = ack.arrived().count();
    assert!((200..256).contains(&held), "{held} packets of 4 KiB in 1 MiB");
    assert_eq!(sim.ends[B].qp.state(), QpState::Rts);
    assert_eq!(sim.ends[B].completions.iter().filter(|c| c.status != Status::Success).count(), 0);
}
