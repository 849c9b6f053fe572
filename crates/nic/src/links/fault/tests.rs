//! Each fault has an effect, and no other than its own.

use std::cell::Cell;

use super::*;
use crate::links::stub::{Log, StubLink, is_closed, number_of, numbered};

thread_local! {
    static NOW: Cell<u64> = const { Cell::new(0) };
}

fn virtual_now() -> u64 {
    NOW.get()
}

const PACKETS: u32 = 20_000;
const LEN: usize = 60;

fn link(faults: &str) -> (FaultLink<StubLink>, Log) {
    let (stub, log) = StubLink::new();
    (FaultLink::with_clock(stub, faults.parse().unwrap(), virtual_now), log)
}

/// Sends numbered packets through a link with these faults, waits for all that is held, and returns
/// what came out.
fn through(faults: &str) -> (Vec<(TxPacket, Vec<u8>)>, FaultLink<StubLink>) {
    let (mut link, log) = link(faults);
    let mut batch = TxBatch::new(link.capabilities());
    for n in 0..PACKETS {
        if !numbered(&mut batch, n, LEN) {
            link.send(&mut batch);
            assert!(batch.is_empty());
            NOW.set(NOW.get() + 1000);
            assert!(numbered(&mut batch, n, LEN));
        }
    }
    link.send(&mut batch);
    while let Some(next) = link.next_deadline() {
        NOW.set(next);
        link.receive(&mut |_| {});
    }
    let sent = std::mem::take(&mut *log.lock().unwrap());
    (sent, link)
}

fn numbers(sent: &[(TxPacket, Vec<u8>)]) -> Vec<u32> {
    sent.iter().map(|(_, bytes)| number_of(bytes)).collect()
}

fn all_closed(sent: &[(TxPacket, Vec<u8>)]) {
    let bad = sent.iter().filter(|(p, bytes)| !is_closed(p, bytes)).count();
    assert_eq!(bad, 0, "packets whose ICRC does not fit their place");
}

fn counter(link: &impl Link, name: &str) -> usize {
    let value = link.counters().into_iter().find(|(n, _)| *n == name).unwrap().1;
    usize::try_from(value).unwrap()
}

#[test]
fn without_faults_everything_passes_in_order() {
    let (sent, _) = through("seed=1");
    assert_eq!(numbers(&sent), (0..PACKETS).collect::<Vec<_>>());
    all_closed(&sent);
}

#[test]
fn loss_loses_its_share_and_keeps_the_rest_right() {
    let (sent, link) = through("loss=0.1,seed=7");
    let lost = PACKETS as usize - sent.len();
    assert!((1700..2300).contains(&lost), "{lost} of {PACKETS} lost");
    assert_eq!(counter(&link, "fault_lost"), lost);
    assert!(numbers(&sent).is_sorted());
    all_closed(&sent);
    assert!(through("loss=1").0.is_empty());
}

#[test]
fn duplication_sends_its_share_twice() {
    let (sent, link) = through("dup=0.05,seed=7");
    let extra = sent.len() - PACKETS as usize;
    assert!((850..1150).contains(&extra), "{extra} of {PACKETS} sent twice");
    assert_eq!(counter(&link, "fault_duplicated"), extra);
    let mut seen = numbers(&sent);
    assert!(seen.is_sorted(), "a duplicate follows its packet");
    seen.dedup();
    assert_eq!(seen.len(), PACKETS as usize);
    all_closed(&sent);
}

#[test]
fn reordering_lets_later_packets_overtake_and_loses_none() {
    let (sent, link) = through("reorder=0.02,seed=7");
    let got = numbers(&sent);
    let late = got.windows(2).filter(|w| w[1] < w[0]).count();
    assert!((250..500).contains(&late), "{late} of {PACKETS} late");
    assert!(counter(&link, "fault_reordered") >= late);
    let mut sorted = got.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..PACKETS).collect::<Vec<_>>());
    let behind = got.iter().scan(0, |max, n| {
        *max = (*max).max(*n);
        Some(*max - n)
    });
    assert!(behind.max().unwrap() <= 16, "a packet is overtaken by a few only");
    all_closed(&sent);
}

#[test]
fn a_reordered_packet_that_none_overtakes_leaves_after_a_while() {
    let (mut link, log) = link("reorder=1,seed=7");
    let mut batch = TxBatch::new(link.capabilities());
    assert!(numbered(&mut batch, 1, LEN));
    link.send(&mut batch);
    let due = link.next_deadline().expect("it is held");
    NOW.set(due - 1);
    link.receive(&mut |_| {});
    assert!(log.lock().unwrap().is_empty());
    NOW.set(due);
    link.receive(&mut |_| {});
    assert_eq!(numbers(&log.lock().unwrap()), [1]);
    assert_eq!(link.next_deadline(), None);
}

#[test]
fn delay_holds_every_packet_for_its_time() {
    let (mut link, log) = link("delay=50us,seed=7");
    let mut batch = TxBatch::new(link.capabilities());
    let start = virtual_now();
    (0..3).for_each(|n| assert!(numbered(&mut batch, n, LEN)));
    link.send(&mut batch);
    assert_eq!(link.next_deadline(), Some(start + 50_000));
    NOW.set(start + 49_999);
    link.receive(&mut |_| {});
    assert!(log.lock().unwrap().is_empty());
    NOW.set(start + 50_000);
    link.receive(&mut |_| {});
    assert_eq!(numbers(&log.lock().unwrap()), [0, 1, 2]);
    all_closed(&log.lock().unwrap());
    assert_eq!(counter(&link, "fault_delayed"), 3);
}

#[test]
fn jitter_spreads_the_delay() {
    let (mut link, log) = link("delay=50us,jitter=20us,seed=7");
    let mut batch = TxBatch::new(link.capabilities());
    let start = virtual_now();
    (0..100).for_each(|n| assert!(numbered(&mut batch, n, LEN)));
    link.send(&mut batch);
    let mut times = Vec::new();
    while let Some(next) = link.next_deadline() {
        NOW.set(next);
        times.push(next - start);
        link.receive(&mut |_| {});
    }
    assert!(times.first().unwrap() >= &50_000 && times.last().unwrap() <= &70_000, "{times:?}");
    assert!(times.len() > 80, "times differ");
    assert_eq!(log.lock().unwrap().len(), 100);
    all_closed(&log.lock().unwrap());
}

#[test]
fn corruption_flips_one_bit_in_its_share_and_the_icrc_notices() {
    let (sent, link) = through("corrupt=0.05,seed=7");
    assert_eq!(sent.len(), PACKETS as usize);
    let bad: Vec<_> = sent.iter().filter(|(p, bytes)| !is_closed(p, bytes)).collect();
    assert!((850..1150).contains(&bad.len()), "{} of {PACKETS} corrupted", bad.len());
    assert_eq!(counter(&link, "fault_corrupted"), bad.len(), "every flip is seen");
}

#[test]
fn the_same_seed_does_the_same_and_another_seed_another() {
    let all = "loss=0.01,dup=0.01,reorder=0.01,corrupt=0.01,delay=5us,jitter=5us";
    NOW.set(0);
    let a = through(&format!("{all},seed=7")).0;
    NOW.set(0);
    let b = through(&format!("{all},seed=7")).0;
    NOW.set(0);
    let c = through(&format!("{all},seed=8")).0;
    assert!(a == b && a != c);
}

#[test]
fn what_is_held_is_bounded() {
    for faults in ["delay=10s", "reorder=1"] {
        let (mut link, log) = link(faults);
        let mut batch = TxBatch::new(link.capabilities());
        for n in 0..3 * u32::try_from(MAX_HELD).unwrap() {
            assert!(numbered(&mut batch, n, LEN));
            link.send(&mut batch);
        }
        assert_eq!(log.lock().unwrap().len(), 2 * MAX_HELD, "{faults}: the oldest left early");
    }
}
