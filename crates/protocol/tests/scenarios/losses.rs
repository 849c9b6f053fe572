//! Packets get lost, doubled, swapped and damaged: the work is done all the same, and once.

use nobounce_protocol::qp::{Mtu, Operation};
use nobounce_protocol::sim::{A, B, Conditions, Fate, Setup, Sim};
use nobounce_protocol::timing::{MICROSECOND, MILLISECOND};
use nobounce_protocol::wire::{Header, Opcode};

use crate::world::*;

/// Ten packets at this MTU.
const LEN: u32 = 10 * 256;

fn small() -> Setup {
    // Long transport timeout: whatever recovers here does so without it.
    Setup { mtu: Mtu::Mtu256, timeout: 20, psn: [0xff_fffa, 7], ..Setup::default() }
}

/// All is done, soon, without one transport timeout, and the bytes are right.
fn recovered(sim: &mut Sim, requests: usize) {
    sim.drive();
    assert_eq!(ended(sim), vec![SUCCESS; requests]);
    assert_eq!(sim.ends[A].qp.counters().local_ack_timeout_err, 0);
    assert!(sim.now < 100 * MILLISECOND, "it took {} us", sim.now / MICROSECOND);
}

fn lost_write_packet(which: &'static [u64]) -> Sim {
    let mut sim = pair(&small());
    let before = sim.ends[B].memory.clone();
    sim.pipes[0].script(lose(any, which));
    write(&mut sim, LEN);
    recovered(&mut sim, 1);
    assert!(same(&sim, LEN));
    nothing_else_changed(&before, &sim.ends[B].memory, sim.ends[B].addr(THERE), LEN);
    sim
}

#[test]
fn the_first_packet_is_lost() {
    let sim = lost_write_packet(&[0]);
    assert_eq!(sim.ends[A].qp.counters().rcvd_seq_err, 1);
    assert_eq!(sim.ends[B].qp.counters().out_of_seq_request, 9);
}

#[test]
fn a_middle_packet_is_lost() {
    let sim = lost_write_packet(&[5]);
    assert_eq!(sim.ends[A].qp.counters().rcvd_seq_err, 1);
    assert_eq!(sim.pipes[0].counters().sent, 10 + 5, "five are sent again");
}

#[test]
fn the_last_packet_is_lost_and_a_probe_finds_it() {
    let sim = lost_write_packet(&[9]);
    assert_eq!(sim.ends[A].qp.counters().probes, 1);
}

#[test]
fn the_same_packet_is_lost_three_times() {
    lost_write_packet(&[2, 10, 18]);
}

#[test]
fn every_acknowledgement_but_the_last_probe_is_lost() {
    let mut sim = pair(&small());
    sim.pipes[1].script(lose(is_ack, &[0, 1]));
    write(&mut sim, LEN);
    recovered(&mut sim, 1);
    assert!(sim.ends[B].qp.counters().duplicate_request > 0);
}

#[test]
fn a_nak_is_lost() {
    let mut sim = pair(&small());
    sim.pipes[0].script(lose(any, &[3]));
    sim.pipes[1].script(lose(is_nak, &[0]));
    write(&mut sim, LEN);
    recovered(&mut sim, 1);
    assert!(same(&sim, LEN));
}

fn lost_read(pipe: usize, kind: fn(&Header) -> bool, which: &'static [u64]) -> Sim {
    let mut sim = pair(&small());
    let before = sim.ends[A].memory.clone();
    sim.pipes[pipe].script(lose(kind, which));
    read(&mut sim, LEN);
    recovered(&mut sim, 1);
    assert!(same(&sim, LEN));
    nothing_else_changed(&before, &sim.ends[A].memory, sim.ends[A].addr(HERE), LEN);
    sim
}

#[test]
fn a_read_request_is_lost() {
    lost_read(0, any, &[0]);
}

#[test]
fn the_first_read_response_is_lost() {
    let sim = lost_read(1, any, &[0]);
    assert_eq!(sim.ends[A].qp.counters().implied_nak_seq_err, 1);
}

#[test]
fn a_middle_read_response_is_lost_and_only_the_rest_is_read_again() {
    let sim = lost_read(1, any, &[4]);
    assert_eq!(sim.pipes[1].counters().sent, 10 + 6);
}

#[test]
fn the_last_read_response_is_lost() {
    let sim = lost_read(1, any, &[9]);
    assert_eq!(sim.pipes[1].counters().sent, 10 + 1);
}

#[test]
fn an_atomic_request_is_lost() {
    let mut sim = pair(&small());
    sim.pipes[0].script(lose(any, &[0]));
    atomics_once(sim, 1);
}

#[test]
fn an_atomic_response_is_lost_and_the_repetition_is_answered_from_memory() {
    let mut sim = pair(&small());
    sim.pipes[1].script(lose(any, &[0]));
    let sim = atomics_once(sim, 1);
    assert_eq!(sim.ends[B].qp.counters().duplicate_request, 1);
}

#[test]
fn many_atomics_happen_once_each_when_every_packet_comes_twice() {
    let twice = Conditions { duplicate: 1_000_000, hold: 30 * MICROSECOND, ..Conditions::default() };
    atomics_once(over(&small(), twice, 3), 100);
}

#[test]
fn many_atomics_happen_once_each_when_a_fifth_of_the_packets_is_lost() {
    let bad = Conditions { loss: 200_000, duplicate: 100_000, ..Conditions::default() };
    atomics_once(over(&small(), bad, 4), 100);
}

fn atomics_once(mut sim: Sim, n: u64) -> Sim {
    let (at, remote) = (sim.ends[B].addr(THERE), sim.ends[B].remote(THERE));
    set_word(&mut sim.ends[B].memory, at, 1000);
    for i in 0..n {
        sim.ends[A].post(Operation::FetchAdd { remote, add: 1 }, 8 * i, 8).unwrap();
    }
    sim.drive();
    assert_eq!(ended(&sim).iter().filter(|s| **s == SUCCESS).count() as u64, n);
    assert_eq!(word(&sim.ends[B].memory, at), 1000 + n);
    assert_eq!(sim.ends[B].memory.atomics(), n);
    let a = &sim.ends[A];
    assert!((0..n).all(|i| word(&a.memory, a.addr(8 * i)) == 1000 + i), "each sees the one before");
    sim
}

/// Some of everything, both ways; all of it arrives.
fn mixture(conditions: Conditions, seed: u64) -> Sim {
    let mut sim = over(&small(), conditions, seed);
    for i in 0..8 {
        sim.ends[B].post_receive(100_000 + i * 1000, 1000);
        let (at, words) = (sim.ends[B].remote(THERE + i * 2000), sim.ends[B].remote(0));
        sim.ends[A].post(Operation::Write(at), i * 2000, 2000).unwrap();
        sim.ends[A].post(Operation::Send, i * 1000, 1000).unwrap();
        sim.ends[A].post(Operation::Read(at), 50_000 + i * 2000, 2000).unwrap();
        sim.ends[A].post(Operation::FetchAdd { remote: words, add: 1 }, 80_000, 8).unwrap();
    }
    let start = word(&sim.ends[B].memory, sim.ends[B].addr(0));
    sim.drive();
    assert_eq!(ended(&sim), vec![SUCCESS; 32], "{:?} {:?}", conditions, sim.ends[A].qp.counters());
    assert_eq!(sim.ends[B].received().len(), 8);
    let (a, b) = (&sim.ends[A], &sim.ends[B]);
    assert_eq!(bytes(&a.memory, a.addr(0), 16_000), bytes(&b.memory, b.addr(THERE), 16_000));
    assert_eq!(bytes(&a.memory, a.addr(0), 8_000), bytes(&b.memory, b.addr(100_000), 8_000));
    assert_eq!(bytes(&a.memory, a.addr(0), 16_000), bytes(&a.memory, a.addr(50_000), 16_000));
    assert_eq!(word(&b.memory, b.addr(0)), start + 8);
    sim
}

#[test]
fn every_packet_comes_twice() {
    let sim = mixture(Conditions { duplicate: 1_000_000, ..Conditions::default() }, 1);
    assert_eq!(sim.ends[A].qp.counters().local_ack_timeout_err, 0);
}

#[test]
fn a_third_of_the_packets_is_overtaken() {
    mixture(Conditions { reorder: 333_000, ..Conditions::default() }, 2);
}

#[test]
fn damaged_packets_are_counted_and_repeated() {
    let sim = mixture(Conditions { corrupt: 50_000, ..Conditions::default() }, 3);
    let damaged: u64 = sim.pipes.iter().map(|p| p.counters().corrupted).sum();
    let found: u64 = sim.ends.iter().map(|e| e.counters.icrc_errors).sum();
    assert!(found > 0 && found == damaged);
}

#[test]
fn everything_goes_wrong_at_once() {
    for seed in 0..20 {
        let all = Conditions {
            loss: 100_000,
            duplicate: 100_000,
            reorder: 100_000,
            corrupt: 50_000,
            ..Conditions::default()
        };
        mixture(all, seed);
    }
}

#[test]
fn an_old_read_request_is_repeated_while_new_ones_wait() {
    // The peer has promised to answer two at a time. The network brings old questions again and
    // again; they must not make it refuse the two new ones.
    let setup = Setup { max_rd_atomic: 2, max_dest_rd_atomic: 2, ..small() };
    let mut sim = pair(&setup);
    let twice = |_, h: &Header| if h.opcode == Opcode::ReadRequest { Fate::Duplicate } else { Fate::Pass };
    sim.pipes[0].conditions.hold = 40 * MICROSECOND;
    sim.pipes[0].script(twice);
    for _ in 0..50 {
        read(&mut sim, 300);
    }
    recovered(&mut sim, 50);
}

#[test]
fn a_blackout_in_the_middle_is_survived() {
    let mut sim = pair(&small());
    for i in 0..100 {
        let remote = sim.ends[B].remote(THERE + i * 1000);
        sim.ends[A].post(Operation::Write(remote), i * 1000, 1000).unwrap();
    }
    sim.drive_for(12 * MICROSECOND);
    sim.pipes[0].conditions.loss = 1_000_000;
    sim.drive_for(5 * MILLISECOND);
    sim.pipes[0].conditions.loss = 0;
    sim.drive();
    assert_eq!(ended(&sim), vec![SUCCESS; 100]);
    assert!(same(&sim, 100_000));
    assert!(sim.now < 50 * MILLISECOND, "{}", sim.now);
}
