//! Timers: retransmission timeout, number of retries, and the final failure.

use nobounce_protocol::qp::{Mtu, Operation, Status};
use nobounce_protocol::sim::{A, B, Setup, Sim};
use nobounce_protocol::timing::{MICROSECOND, MILLISECOND, SECOND, ack_timeout, rnr_timer};
use nobounce_protocol::wire::{Header, Opcode, Psn, Syndrome};

use crate::world::*;

#[test]
fn a_probe_finds_a_lost_tail_within_a_few_round_trips_although_the_timeout_is_four_seconds() {
    let mut sim = pair(&Setup { timeout: 20, ..Setup::default() });
    for _ in 0..5 {
        write(&mut sim, 100); // round trips get measured: 10 us
        sim.drive();
    }
    let start = sim.now;
    sim.pipes[0].script(lose(any, &[0]));
    write(&mut sim, 100);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 6]);
    assert!(sim.now - start < 10 * 10 * MICROSECOND, "found after {} ns", sim.now - start);
    assert_eq!(sim.ends[A].qp.counters().local_ack_timeout_err, 0);
}

#[test]
fn a_lost_tail_of_the_very_first_message_is_found_within_milliseconds() {
    let mut sim = pair(&Setup { timeout: 20, ..Setup::default() });
    sim.pipes[0].script(lose(any, &[0]));
    write(&mut sim, 100);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
    assert!(sim.now < 20 * MILLISECOND, "{}", sim.now);
}

#[test]
fn a_peer_that_is_gone_is_given_up_after_exactly_the_agreed_timeouts() {
    for (timeout, retry_cnt) in [(8, 0), (14, 1), (10, 3), (14, 7)] {
        for op in 0..3 {
            let mut sim = pair(&Setup { timeout, retry_cnt, ..Setup::default() });
            sim.pipes[0].conditions.loss = 1_000_000;
            let id = match op {
                0 => write(&mut sim, 5000),
                1 => read(&mut sim, 5000),
                _ => add(&mut sim),
            };
            sim.drive();
            assert_eq!(sim.ends[A].sends(), [(id, Status::RetryExceeded)]);
            let each = ack_timeout(timeout).unwrap();
            assert_eq!(
                sim.now,
                each * (u64::from(retry_cnt) + 1),
                "code {timeout}, {retry_cnt} retries, op {op}"
            );
            assert_eq!(sim.ends[A].qp.counters().local_ack_timeout_err, u64::from(retry_cnt) + 1);
        }
    }
}

#[test]
fn a_peer_that_only_loses_our_acknowledgements_is_given_up_too() {
    let mut sim = pair(&Setup { timeout: 10, retry_cnt: 2, ..Setup::default() });
    sim.pipes[1].conditions.loss = 1_000_000;
    write(&mut sim, 5000);
    sim.drive();
    assert_eq!(ended(&sim), [Status::RetryExceeded]);
    assert_eq!(sim.now, 3 * ack_timeout(10).unwrap());
}

#[test]
fn timeout_code_zero_waits_for_ever_but_keeps_asking() {
    let mut sim = pair(&Setup { timeout: 0, ..Setup::default() });
    sim.pipes[0].conditions.loss = 1_000_000;
    write(&mut sim, 100);
    sim.drive_for(100 * SECOND);
    assert!(sim.ends[A].completions.is_empty());
    let sent = sim.pipes[0].counters().sent;
    assert!((50..500).contains(&sent), "about once a second: {sent}");
    sim.pipes[0].conditions.loss = 0;
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
}

#[test]
fn a_receiver_that_is_not_ready_is_asked_again_after_its_timer() {
    for code in [0, 1, 12, 20, 31] {
        let mut sim = pair(&Setup { min_rnr_timer: code, ..Setup::default() });
        send(&mut sim, 3000);
        let wait = rnr_timer(code);
        sim.drive_for(wait / 2 + 10 * MICROSECOND);
        assert_eq!(sim.ends[A].qp.counters().rcvd_rnr_err, 1);
        sim.ends[B].post_receive(THERE, 3000);
        sim.drive();
        assert_eq!(ended(&sim), [SUCCESS]);
        assert!(same(&sim, 3000));
        assert_eq!(sim.now, wait + 20 * MICROSECOND, "one timer and two round trips, code {code}");
        assert_eq!(sim.ends[A].qp.counters().local_ack_timeout_err, 0, "waiting as told is not silence");
    }
}

#[test]
fn the_receiver_is_not_ready_for_a_write_with_immediate_either() {
    let mut sim = pair(&Setup { mtu: Mtu::Mtu256, ..Setup::default() });
    let remote = sim.ends[B].remote(THERE);
    sim.ends[A].post(Operation::WriteImmediate(remote, 9), HERE, 1000).unwrap();
    sim.drive_for(100 * MICROSECOND);
    assert!(sim.ends[A].completions.is_empty());
    sim.ends[B].post_receive(0, 0);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
    assert_eq!(sim.ends[B].received()[0].immediate, Some(9));
    assert!(same(&sim, 1000));
}

#[test]
fn rnr_retries_are_counted() {
    for retries in [0_u8, 1, 3, 6] {
        let mut sim = pair(&Setup { rnr_retry: retries, ..Setup::default() });
        send(&mut sim, 10);
        sim.drive();
        assert_eq!(ended(&sim), [Status::RnrRetryExceeded]);
        assert_eq!(sim.ends[B].qp.counters().send_rnr_err, u64::from(retries) + 1);
        let round = 10 * MICROSECOND;
        assert_eq!(sim.now, round + u64::from(retries) * (rnr_timer(12) + round));
    }
}

#[test]
fn rnr_retry_seven_never_gives_up() {
    let mut sim = pair(&Setup { rnr_retry: 7, min_rnr_timer: 1, ..Setup::default() });
    send(&mut sim, 10);
    sim.drive_for(SECOND / 10);
    assert!(sim.ends[A].completions.is_empty());
    assert!(sim.ends[B].qp.counters().send_rnr_err > 1000);
    sim.ends[B].post_receive(THERE, 10);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
}

#[test]
fn a_doubled_rnr_nak_counts_once() {
    let mut sim = pair(&Setup { rnr_retry: 1, ..Setup::default() });
    sim.pipes[1].script(|_, h| match h.aeth.syndrome {
        Syndrome::RnrNak(_) => nobounce_protocol::sim::Fate::Duplicate,
        _ => nobounce_protocol::sim::Fate::Pass,
    });
    send(&mut sim, 10);
    sim.drive_for(100 * MICROSECOND);
    sim.ends[B].post_receive(THERE, 10);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
}

#[test]
fn a_lost_rnr_nak_is_asked_for() {
    let mut sim = pair(&Setup { timeout: 20, ..Setup::default() });
    sim.pipes[1].script(lose(is_nak, &[0]));
    send(&mut sim, 10);
    sim.drive_for(MILLISECOND);
    sim.ends[B].post_receive(THERE, 10);
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS]);
    assert!(sim.now < 100 * MILLISECOND);
}

#[test]
fn progress_refills_the_retries() {
    let mut sim = pair(&Setup { timeout: 8, retry_cnt: 1, ..Setup::default() });
    for _ in 0..5 {
        sim.pipes[0].conditions.loss = 1_000_000;
        write(&mut sim, 10);
        sim.drive_for(ack_timeout(8).unwrap() / 2);
        sim.pipes[0].conditions.loss = 0;
        sim.drive();
    }
    assert_eq!(ended(&sim), [SUCCESS; 5]);
    assert_eq!(sim.ends[B].qp.state(), nobounce_protocol::qp::QpState::Rts);
}

/// The sequence numbers of packets that ask for an acknowledgement when there is room for `window`
/// packets and, after each answer, for those that it freed.
fn asks(rarely: bool, window: u64, answers: &[u32]) -> Vec<u32> {
    let mut sim = pair(&Setup { mtu: Mtu::Mtu256, memory: (1 << 16) + 2 * Setup::GUARD, ..Setup::default() });
    let remote = sim.ends[B].remote(0);
    sim.ends[A].post(Operation::Write(remote), 0, 200 * 256).unwrap();
    sim.ends[A].qp.ask_rarely(rarely);
    let mut asked = Vec::new();
    let mut go = |sim: &mut Sim| {
        let packet = 256 + 512; // what each is taken to cost on the way
        let qp = &mut sim.ends[A].qp;
        while let left = (window * packet).saturating_sub(qp.outstanding())
            && let Some(sent) = qp.poll_transmit(0, left, true)
        {
            asked.extend(sent.header.ack_req.then_some(sent.header.psn.get()));
        }
    };
    go(&mut sim);
    for &psn in answers {
        let mut ack = Header::new(Opcode::Ack, sim.ends[A].qpn, Psn::new(psn));
        ack.aeth.syndrome = Syndrome::Ack(31);
        sim.ends[A].inject(0, &ack, &[]);
        go(&mut sim);
    }
    asked
}

#[test]
fn where_answers_are_dear_none_is_asked_for_beside_one_that_is_on_its_way() {
    // Every 16th asks (a quarter of the window; every 30th, where answers are dear), and the last
    // one that the path has room for, which the next answer frees anew.
    assert_eq!(asks(false, 40, &[13, 31]), [15, 31, 39, 49, 53, 55, 71]);
    assert_eq!(asks(true, 40, &[13]), [13, 43]);
    assert_eq!(asks(true, 40, &[13, 43]), [13, 43, 73]);
    assert_eq!(asks(true, 10, &[9, 19]), [9, 13, 29], "an ACK request must remain");
}

/// A round trip that becomes longer is noticed although each answer comes after one probe, before a
/// second: not each packet is probed from then on.
#[test]
fn a_path_that_becomes_longer_is_not_probed_for_ever() {
    let mut sim = pair(&Setup::default());
    let rounds = |sim: &mut Sim, delay: u64| {
        sim.pipes.iter_mut().for_each(|pipe| pipe.conditions.delay = delay);
        for _ in 0..50 {
            write(sim, 100);
            sim.drive();
        }
        sim.ends[A].qp.counters().probes
    };
    assert_eq!(rounds(&mut sim, 10 * MICROSECOND), 0);
    let probes = rounds(&mut sim, 50 * MICROSECOND);
    assert!((1..5).contains(&probes), "{probes} of 50");
}
