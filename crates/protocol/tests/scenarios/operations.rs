//! Every operation, at every size and MTU, across the wrap of the sequence numbers.

use nobounce_protocol::qp::{Mtu, Operation, WorkKind};
use nobounce_protocol::sim::{A, B, Setup};
use nobounce_protocol::wire::Opcode;

use crate::world::*;

fn sizes(mtu: Mtu) -> [u32; 8] {
    let m = mtu.bytes();
    [0, 1, 3, m - 1, m, m + 1, 2 * m, 21 * m + 5]
}

/// Runs `check` at every MTU and size, from a sequence number that wraps inside the longest
/// message.
fn everywhere(check: fn(Setup, u32)) {
    for mtu in Mtu::ALL {
        for len in sizes(mtu) {
            for psn in [[0, 0], [0xff_fff8, 0xff_ffff]] {
                check(Setup { mtu, psn, ..Setup::default() }, len);
            }
        }
    }
}

#[test]
fn a_write_of_any_size_arrives_and_changes_nothing_else() {
    everywhere(|setup, len| {
        let mut sim = pair(&setup);
        let before = sim.ends[B].memory.clone();
        let id = write(&mut sim, len);
        sim.drive();
        assert_eq!(sim.ends[A].sends(), [(id, SUCCESS)], "{len} bytes, {setup:?}");
        assert!(same(&sim, len));
        nothing_else_changed(&before, &sim.ends[B].memory, sim.ends[B].addr(THERE), len);
        assert!(sim.ends[B].completions.is_empty());
    });
}

#[test]
fn a_short_write_that_is_split_is_one_message_for_both_sides() {
    everywhere(|setup, len| {
        let mut sim = pair(&setup);
        sim.ends[A].qp.split_short_writes(true);
        let remote = sim.ends[B].remote(THERE);
        sim.ends[A].post(Operation::Write(remote), HERE, len).unwrap();
        let sent: Vec<_> = std::iter::from_fn(|| sim.ends[A].qp.poll_transmit(0, u64::MAX, true))
            .map(|transmit| transmit.header)
            .collect();
        let packets = len.div_ceil(setup.mtu.bytes()) as usize;
        let is_split = (2..=16).contains(&packets);
        let split = sent.iter().filter(|header| header.is_split()).count();
        assert_eq!(split, if is_split { packets - 1 } else { 0 });
        if is_split {
            let told: u32 = sent.iter().map(|header| header.reth.len).sum();
            assert!(sent.iter().all(|header| header.opcode == Opcode::WriteOnly) && told == len);
        }

        let mut sim = pair(&setup);
        sim.ends[A].qp.split_short_writes(true);
        let id = write(&mut sim, len);
        sim.drive();
        assert_eq!(sim.ends[A].sends(), [(id, SUCCESS)], "{len} bytes, {setup:?}");
        assert!(same(&sim, len));
    });
}

#[test]
fn a_read_of_any_size_arrives_and_changes_nothing_else() {
    everywhere(|setup, len| {
        let mut sim = pair(&setup);
        let before = sim.ends[A].memory.clone();
        let there = sim.ends[B].memory.clone();
        let id = read(&mut sim, len);
        sim.drive();
        let done = sim.ends[A].completions.clone();
        assert_eq!((done.len(), done[0].wr_id, done[0].status, done[0].byte_len), (1, id, SUCCESS, len));
        assert!(same(&sim, len));
        nothing_else_changed(&before, &sim.ends[A].memory, sim.ends[A].addr(HERE), len);
        assert_eq!(there.bytes(), sim.ends[B].memory.bytes());
    });
}

#[test]
fn a_send_of_any_size_completes_both_sides() {
    everywhere(|setup, len| {
        let mut sim = pair(&setup);
        let receive = sim.ends[B].post_receive(THERE, u64::from(len));
        let id = send(&mut sim, len);
        sim.drive();
        assert_eq!(sim.ends[A].sends(), [(id, SUCCESS)]);
        let got = sim.ends[B].received();
        assert_eq!((got.len(), got[0].wr_id, got[0].status, got[0].byte_len), (1, receive, SUCCESS, len));
        assert_eq!((got[0].immediate, got[0].invalidated, got[0].solicited), (None, None, false));
        assert!(same(&sim, len));
    });
}

#[test]
fn immediate_data_comes_with_a_send_and_with_a_write() {
    everywhere(|setup, len| {
        let mut sim = pair(&setup);
        let first = sim.ends[B].post_receive(THERE, u64::from(len));
        let second = sim.ends[B].post_receive(0, 0);
        let remote = sim.ends[B].remote(THERE);
        sim.ends[A].post(Operation::SendImmediate(0xdead_beef), HERE, len).unwrap();
        sim.ends[A].post(Operation::WriteImmediate(remote, 7), HERE, len).unwrap();
        sim.drive();
        assert_eq!(ended(&sim), [SUCCESS; 2]);
        let got = sim.ends[B].received();
        assert_eq!(got.iter().map(|c| c.wr_id).collect::<Vec<_>>(), [first, second]);
        assert_eq!(got.iter().map(|c| c.immediate).collect::<Vec<_>>(), [Some(0xdead_beef), Some(7)]);
        assert_eq!(got.iter().map(|c| c.byte_len).collect::<Vec<_>>(), [len, len]);
        assert_eq!(got[1].kind, WorkKind::ReceiveWriteImmediate);
        assert!(same(&sim, len));
    });
}

#[test]
fn a_send_with_invalidate_takes_the_key_away() {
    everywhere(|setup, len| {
        let mut sim = pair(&setup);
        let rkey = sim.ends[B].rkey;
        sim.ends[B].post_receive(THERE, u64::from(len));
        sim.ends[A].post(Operation::SendInvalidate(rkey), HERE, len).unwrap();
        sim.drive();
        assert_eq!(ended(&sim), [SUCCESS]);
        assert_eq!(sim.ends[B].received()[0].invalidated, Some(rkey));
        assert!(sim.ends[B].memory.regions().is_empty());
    });
}

#[test]
fn fetch_and_add_returns_what_was_there() {
    for psn in [0, 0xff_ffff] {
        let mut sim = pair(&Setup { psn: [psn, 0], ..Setup::default() });
        let at = sim.ends[B].addr(THERE);
        set_word(&mut sim.ends[B].memory, at, u64::MAX);
        add(&mut sim);
        add(&mut sim);
        sim.drive();
        assert_eq!(ended(&sim), [SUCCESS; 2]);
        assert_eq!(word(&sim.ends[B].memory, at), 1);
        assert_eq!(
            word(&sim.ends[A].memory, sim.ends[A].addr(HERE)),
            0,
            "the second one saw the first one's sum"
        );
    }
}

#[test]
fn compare_and_swap_swaps_only_what_it_expects() {
    for psn in [0, 0xff_ffff] {
        let mut sim = pair(&Setup { psn: [psn, 0], ..Setup::default() });
        let (at, remote) = (sim.ends[B].addr(THERE), sim.ends[B].remote(THERE));
        set_word(&mut sim.ends[B].memory, at, 5);
        sim.ends[A].post(Operation::CompareSwap { remote, compare: 5, swap: 6 }, 0, 8).unwrap();
        sim.ends[A].post(Operation::CompareSwap { remote, compare: 5, swap: 7 }, 8, 8).unwrap();
        sim.drive();
        assert_eq!(ended(&sim), [SUCCESS; 2]);
        assert_eq!(word(&sim.ends[B].memory, at), 6);
        let a = &sim.ends[A];
        assert_eq!([word(&a.memory, a.addr(0)), word(&a.memory, a.addr(8))], [5, 6]);
    }
}

#[test]
fn the_solicited_bit_reaches_the_receiver() {
    let mut sim = pair(&Setup::default());
    sim.ends[B].post_receive(THERE, 5000);
    let request = nobounce_protocol::qp::WorkRequest {
        wr_id: 0,
        op: Operation::Send,
        len: 5000,
        signaled: true,
        solicited: true,
        fence: false,
        xrc_srq: 0,
    };
    sim.ends[A].post_request(request, HERE).unwrap();
    sim.drive();
    assert!(sim.ends[B].received()[0].solicited);
}

#[test]
fn both_sides_talk_at_once() {
    let mut sim = pair(&Setup::default());
    for i in 0..20 {
        let (to_a, to_b) = (sim.ends[A].remote(40_000 + i * 1000), sim.ends[B].remote(80_000 + i * 1000));
        sim.ends[A].post(Operation::Write(to_b), i * 1000, 999).unwrap();
        sim.ends[B].post(Operation::Read(to_a), 120_000 + i * 1000, 1000).unwrap();
    }
    sim.drive();
    assert_eq!(sim.ends[A].sends().len(), 20);
    assert_eq!(sim.ends[B].sends().len(), 20);
    let (a, b) = (&sim.ends[A], &sim.ends[B]);
    assert_eq!(bytes(&a.memory, a.addr(40_000), 20_000), bytes(&b.memory, b.addr(120_000), 20_000));
}

#[test]
fn zero_bytes_need_no_key() {
    let mut sim = pair(&Setup::default());
    let nowhere = nobounce_protocol::qp::Remote { addr: 0, rkey: 0xbad };
    sim.ends[A].post(Operation::Write(nowhere), HERE, 0).unwrap();
    sim.ends[A].post(Operation::Read(nowhere), HERE, 0).unwrap();
    sim.drive();
    assert_eq!(ended(&sim), [SUCCESS; 2]);
}

#[test]
fn what_goes_over_the_wire() {
    let mut sim = pair(&Setup { mtu: Mtu::Mtu256, psn: [0xff_fffe, 0], ..Setup::default() });
    sim.start_trace();
    sim.ends[B].post_receive(THERE, 1000);
    send(&mut sim, 600);
    read(&mut sim, 600);
    add(&mut sim);
    write(&mut sim, 1);
    sim.drive();
    insta::assert_snapshot!("wire", sim.trace());
}
