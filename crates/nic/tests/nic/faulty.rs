//! Fault injection: with loss, duplication, reordering, corruption and delay everything still
//! arrives, once and intact.
#![allow(clippy::cast_possible_truncation)] // small constants

use crate::common::{End, config, pair_with, pattern, patterns};
use nobounce_nic::links::fault::FaultConfig;
use nobounce_nic::soft::Config;
use nobounce_nic::work::{Mtu, Operation, QpState, Status};
use nobounce_protocol::wire::Feth;

const LEN: usize = 1 << 20;

/// Every operation, several times, in both directions, all bytes checked; the faults must have
/// happened.
fn survive(addr: &str, fault: &str, exported: &[(&str, &str)]) {
    let fault: FaultConfig = fault.parse().unwrap();
    let faulty = |seed| Config { fault: Some(FaultConfig { seed, ..fault }), ..config(addr) };
    let (a, b) = pair_with(&faulty(7), &faulty(8), LEN, Mtu::Mtu1024);
    write_and_count(&a, &b);
    write_and_count(&b, &a);
    for round in 0..3 {
        exchange(&a, &b, round);
        exchange(&b, &a, round);
    }
    for end in [&a, &b] {
        assert_eq!(end.qps[0].state(), QpState::Rts);
        counted_once(end);
        for (done, consequence) in exported {
            assert!(end.counter(done) > 0, "{done} never happened: {:?}", end.device.link_counters());
            let seen = a.counter(consequence) + b.counter(consequence);
            assert!(seen > 0, "{consequence} shows nothing: {:?}", end.device.counters());
        }
    }
}

/// WRITEs before anything else: what is sent again is not counted again, neither bytes nor
/// operations.
fn write_and_count(a: &End, b: &End) {
    let before = b.device.path_counters().inbound.cpu;
    for _ in 0..20 {
        a.post(Operation::Write(b.remote(0)), 0, 50_000);
    }
    a.succeed(20);
    let (sent, placed) = (a.device.path_counters().outbound.cpu, b.device.path_counters().inbound.cpu);
    assert_eq!((sent.bytes, sent.operations), (1_000_000, 20), "out");
    assert_eq!((placed.bytes - before.bytes, placed.operations - before.operations), (1_000_000, 20), "in");
}

/// The same for all together: the WRITEs above, and in each round three messages, an atomic write
/// and the answer to a READ; 16 atomics came, and 16 came back, too. The answering side of a READ
/// sees more operations: long READs are split.
fn counted_once(end: &End) {
    let moved = end.device.path_counters();
    assert_eq!(moved.outbound.cpu.bytes, 1_000_000 + 3 * 700_008, "out");
    let placed = (moved.inbound.cpu.bytes, moved.inbound.cpu.operations);
    assert_eq!(placed, (1_000_000 + 3 * 700_264, 20 + 3 * 37), "in");
}

fn exchange(a: &End, b: &End, round: u8) {
    let (seed, half) = (round * 2 + 1, LEN as u64 / 2);
    a.fill(seed);
    b.fill(0xe0 + round);
    let len = 200_000;
    // A WRITE, a SEND, a WRITE with immediate data, a READ, and atomics behind them, all in flight
    // at once.
    b.post_recv(1, half, len);
    b.post_recv(2, 0, 0);
    a.post(Operation::Write(b.remote(0)), 0, len);
    a.post(Operation::Send, 1, len);
    a.post(Operation::WriteImmediate(b.remote(200_000), 9), 2, len);
    a.post(Operation::Read(b.remote(LEN as u64 - 100_000)), half, 100_000);
    let counter = b.remote(LEN as u64 - 200_000);
    for i in 0..16 {
        a.post(Operation::FetchAdd { remote: counter, add: 3 }, LEN as u64 - 300_000 + i * 8, 8);
    }
    let word_at = LEN as u64 - 208_000;
    a.post(Operation::Flush { remote: b.remote(0), len, feth: Feth::new(Feth::GLOBAL, round % 2) }, 0, 0);
    a.post(Operation::AtomicWrite(b.remote(word_at)), 8, 8);
    a.succeed(22);
    let got = b.completions(2);
    assert_eq!((got[0].wr_id, got[0].byte_len), (1, len));
    assert_eq!((got[1].wr_id, got[1].byte_len, got[1].immediate), (2, len, Some(9)));
    assert!(got.iter().all(|c| c.status == Status::Success));
    let n = len as usize;
    assert!(b.bytes(0, n) == patterns(seed, 0, n), "WRITE");
    assert!(b.bytes(200_000, n) == patterns(seed, 2, n), "WRITE with immediate data");
    assert!(b.bytes(LEN / 2, n) == patterns(seed, 1, n), "SEND");
    assert!(a.bytes(LEN / 2, 100_000) == patterns(0xe0 + round, LEN - 100_000, 100_000), "READ");
    let word = |bytes: Vec<u8>| u64::from_ne_bytes(bytes.try_into().unwrap());
    let first = word(patterns(0xe0 + round, LEN - 200_000, 8));
    for i in 0..16 {
        let before = word(a.bytes(LEN - 300_000 + i * 8, 8));
        assert_eq!(before, first.wrapping_add(3 * i as u64), "each atomic once and in order");
    }
    assert_eq!(word(b.bytes(LEN - 200_000, 8)), first.wrapping_add(48));
    assert!(b.bytes(LEN - 208_000, 8) == patterns(seed, 8, 8), "ATOMIC WRITE");
    let after = LEN / 2 + n;
    assert_eq!(b.bytes(after, 1)[0], pattern(0xe0 + round, after), "nothing behind the last byte");
}

#[test]
fn loss() {
    survive("127.56.0.1", "loss=0.01", &[("fault_lost", "out_of_seq_request")]);
}

#[test]
fn duplication() {
    survive("127.56.0.2", "dup=0.05", &[("fault_duplicated", "duplicate_request")]);
}

#[test]
fn reordering() {
    survive("127.56.0.3", "reorder=0.02", &[("fault_reordered", "out_of_seq_request")]);
}

#[test]
fn damage() {
    survive("127.56.0.4", "corrupt=0.01", &[("fault_corrupted", "icrc_errors")]);
}

#[test]
fn delay() {
    survive("127.56.0.5", "delay=200us", &[("fault_delayed", "rcvd_pkts")]);
}

#[test]
fn jitter_that_lets_packets_overtake() {
    survive("127.56.0.6", "delay=20us,jitter=60us", &[("fault_delayed", "out_of_seq_request")]);
}

#[test]
fn all_together() {
    let all = "loss=0.01,dup=0.01,reorder=0.01,corrupt=0.01,delay=20us,jitter=30us";
    let exported = [
        ("fault_lost", "out_of_seq_request"),
        ("fault_duplicated", "duplicate_request"),
        ("fault_reordered", "out_of_seq_request"),
        ("fault_corrupted", "icrc_errors"),
        ("fault_delayed", "rcvd_pkts"),
    ];
    survive("127.56.0.7", all, &exported);
}
