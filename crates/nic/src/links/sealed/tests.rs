//! Sealed links over links in memory.

use super::super::stub::{HERE, Log, StubLink, THERE, is_closed, number_of, numbered};
use super::*;

fn keys(digits: &str) -> SealKeys {
    let ring = KeyRing::parse(&digits.repeat(32)).unwrap();
    SealKeys { source: KeySource::Descriptor(-1), ring, mode: SealMode::Encrypt, version: None }
}

fn end(local: IpAddr, keys: &SealKeys) -> (SealedLink<StubLink>, Log) {
    let (mut stub, log) = StubLink::new();
    stub.caps.local = local;
    (SealedLink::new(stub, keys).unwrap(), log)
}

/// Moves what one end sent to the other; returns the packets that the other one took.
fn pass(log: &Log, to: &mut SealedLink<StubLink>, from: IpAddr) -> Vec<Vec<u8>> {
    to.inner.from = from;
    to.inner.inbox.extend(log.lock().unwrap().drain(..).map(|(_, bytes)| bytes));
    let mut taken = Vec::new();
    to.receive(&mut |datagram| {
        assert!(datagram.has_icrc && datagram.packets == 1);
        taken.push(datagram.bytes.to_vec());
    });
    taken
}

fn count(link: &SealedLink<StubLink>, name: &str) -> u64 {
    link.counters().into_iter().find(|(known, _)| *known == name).map(|(_, count)| count).unwrap()
}

/// The first packets wait for the session, in order; afterwards all leave at once, in groups.
#[test]
fn packets_wait_for_a_session_and_arrive_as_they_were() {
    let ((mut a, from_a), (mut b, from_b)) = (end(HERE, &keys("01")), end(THERE, &keys("01")));
    let mut batch = TxBatch::new(a.capabilities());
    (0..3).for_each(|n| assert!(numbered(&mut batch, n, 60)));
    let sent: Vec<_> = batch.packets().iter().map(|p| (*p, batch.bytes(p).into_owned())).collect();
    a.send(&mut batch);
    assert!(batch.is_empty() && a.next_deadline().is_some());
    assert_eq!(pass(&from_a, &mut b, HERE).len(), 0);
    assert_eq!(pass(&from_b, &mut a, THERE).len(), 0);
    assert_eq!(a.next_deadline(), None);
    let groups: Vec<_> = from_a.lock().unwrap().iter().map(|(packet, _)| packet.ip_id).collect();
    assert_eq!(groups, [0, 1, 2], "one send");
    let arrived = pass(&from_a, &mut b, HERE);
    assert_eq!(arrived, sent.iter().map(|(_, bytes)| bytes.clone()).collect::<Vec<_>>());
    for (packet, bytes) in &sent {
        assert!(is_closed(packet, bytes));
    }
    for n in 3..2000 {
        assert!(numbered(&mut batch, n, 60));
        if n % 500 == 0 || n == 1999 {
            a.send(&mut batch);
        }
    }
    let arrived = pass(&from_a, &mut b, HERE);
    assert!(arrived.iter().map(|bytes| number_of(bytes)).eq(3..2000));
    assert_eq!((count(&a, "sealed_sent"), count(&b, "sealed_received")), (2000, 2000));
}

/// A whole batch fits one send although sealing makes it longer.
#[test]
fn a_full_batch_leaves_at_once() {
    let ((mut a, from_a), (mut b, from_b)) = (end(HERE, &keys("01")), end(THERE, &keys("01")));
    let mut batch = TxBatch::new(a.capabilities());
    for len in [60, 1064, 4136] {
        let mut count = 0;
        while numbered(&mut batch, count, len) {
            count += 1;
        }
        a.send(&mut batch);
        pass(&from_a, &mut b, HERE);
        pass(&from_b, &mut a, THERE);
        let arrived = pass(&from_a, &mut b, HERE);
        assert!(len > 60 || arrived.len() <= MAX_WAITING_OF_PEER);
        let room = SEALED_SLAB - LEAD;
        assert!(room >= usize::try_from(count).unwrap() * (len + OVERHEAD), "{len}");
    }
}

#[test]
fn a_peer_without_the_key_gets_nothing() {
    let ((mut a, from_a), (mut b, from_b)) = (end(HERE, &keys("01")), end(THERE, &keys("02")));
    let mut batch = TxBatch::new(a.capabilities());
    for n in 0..2000 {
        if !numbered(&mut batch, n, 60) {
            a.send(&mut batch);
            numbered(&mut batch, n, 60);
        }
    }
    a.send(&mut batch);
    assert_eq!(a.waiting.len(), MAX_WAITING_OF_PEER);
    assert_eq!(pass(&from_a, &mut b, HERE).len() + pass(&from_b, &mut a, THERE).len(), 0);
    assert!(count(&b, "sealed_drop_unknown_key") > 0);
    while let Some(at) = a.next_deadline() {
        a.pump(at);
    }
    assert_eq!((a.waiting.len(), a.waiting_bytes), (0, 0));
    assert_eq!(count(&a, "sealed_unsent"), 2000);
    assert_eq!((count(&a, "sealed_unanswered"), count(&a, "sealed_sent")), (1, 0));
}

#[test]
fn plain_packets_are_dropped() {
    let (mut b, _) = end(THERE, &keys("01"));
    b.inner.inbox = vec![vec![0x64; 60], Vec::new(), vec![0xf8; 12]];
    assert_eq!(b.receive(&mut |_| panic!("it was not sealed")), 0);
    assert_eq!((count(&b, "sealed_drop_plain"), count(&b, "sealed_drop_malformed")), (2, 1));
}
