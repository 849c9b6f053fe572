//! Datagrams between same-host peers through shared memory. (The tests of `datagrams.rs` run on it,
//! too: `NOBOUNCE_LINK=shm`.)
#![allow(clippy::cast_possible_truncation)] // small constants

use crate::common::{End, MIB, config, patterns, until};
use nobounce_nic::soft::{Config, LinkChoice};
use nobounce_nic::work::{DatagramSource, Operation, SendRequest, Status};

const GRH: usize = 40;

fn end(addr: &str, link: LinkChoice) -> End {
    let mut end = End::open(&Config { link, ..config(addr) }, MIB);
    end.add_ud(None);
    end
}

fn near(addr: &str) -> End {
    end(addr, LinkChoice::Auto)
}

fn counter(end: &End, name: &str) -> u64 {
    end.device.link_counters().iter().find(|(n, _)| *n == name).map_or(0, |(_, count)| *count)
}

/// One datagram that arrives, with its source before it.
fn exchange(from: &End, to: &End, seed: u8, len: usize) {
    from.fill(seed);
    to.post_recv(5, 64, (len + GRH) as u32);
    from.send_to(to, Operation::SendImmediate(3), 7, len as u32);
    from.succeed(1);
    let got = to.completions(1)[0];
    assert_eq!((got.wr_id, got.status, got.byte_len), (5, Status::Success, (len + GRH) as u32));
    assert_eq!((got.immediate, got.source), (Some(3), Some(DatagramSource { qpn: from.last_qp().qpn() })));
    let bytes = to.bytes(64, GRH + len);
    assert_eq!((bytes[20], &bytes[32..36]), (0x45, &addr_of(from)[..]), "the source in an IPv4 header");
    assert!(bytes[GRH..] == patterns(seed, 7, len));
}

fn addr_of(end: &End) -> Vec<u8> {
    end.device.local().to_string().split('.').map(|part| part.parse().unwrap()).collect()
}

#[test]
fn datagrams_to_one_who_is_near_take_the_ring() {
    let (a, b) = (near("127.66.3.1"), near("127.66.3.2"));
    let mtu = a.device.max_mtu().bytes() as usize;
    for (round, len) in [0, 1, 256, mtu].into_iter().enumerate() {
        exchange(&a, &b, round as u8, len);
        exchange(&b, &a, round as u8 + 9, len);
    }
    for end in [&a, &b] {
        assert!(counter(end, "shm_tx_packets") >= 4 && counter(end, "shm_rx_packets") >= 4);
        assert_eq!(counter(end, "udp_tx_packets"), 0);
    }
}

/// Pure receivers send markers back, through a ring of their own.
#[test]
fn many_in_one_direction_send_no_datagram_and_lose_none() {
    const MESSAGES: usize = 5000;
    let (a, b) = (near("127.66.3.3"), near("127.66.3.3"));
    let (mut posted, mut received, mut sent, mut got) = (0, 0, Vec::new(), Vec::new());
    (0..1024).for_each(|slot| b.post_recv(slot, slot * 256, 256));
    let sges = a.sge(0, 200);
    until("all have arrived", || {
        while posted < MESSAGES && posted - sent.len() < 500 && posted - received < 1000 {
            let request = SendRequest::new(1, Operation::Send, &sges).to(b.at());
            a.last_qp().post_send(&request).unwrap();
            posted += 1;
        }
        a.cq.poll(&mut sent, 500).unwrap();
        got.clear();
        b.cq.poll(&mut got, 500).unwrap();
        received += got.len();
        got.iter().for_each(|done| b.post_recv(done.wr_id, done.wr_id * 256, 256));
        received >= MESSAGES
    });
    assert_eq!(received, MESSAGES);
    for end in [&a, &b] {
        assert_eq!(counter(end, "udp_tx_packets"), 0);
    }
    assert_eq!((counter(&a, "shm_tx_lost_full"), b.counter("out_of_buffer")), (0, 0));
}

/// One queue pair, some of whose receivers are reached by rings and some by UDP, all in one list.
#[test]
fn each_receiver_is_reached_by_its_own_way() {
    let hub = near("127.66.3.4");
    let others: Vec<End> = (0..6)
        .map(|n| {
            let link = if n % 2 == 0 { LinkChoice::Auto } else { LinkChoice::Udp };
            end(&format!("127.66.3.{}", 10 + n), link)
        })
        .collect();
    hub.fill(9);
    for round in 0..20_u64 {
        others.iter().for_each(|other| other.post_recv(round, 0, 300));
        let sges = hub.sge(round, 200);
        let requests: Vec<_> =
            others.iter().map(|other| SendRequest::new(1, Operation::Send, &sges).to(other.at())).collect();
        hub.last_qp().post_sends(&requests).unwrap();
        hub.succeed(requests.len());
        for other in &others {
            assert_eq!(other.completions(1)[0].wr_id, round);
            assert!(other.bytes(GRH, 200) == patterns(9, round as usize, 200));
        }
    }
    for (n, other) in others.iter().enumerate() {
        let by_ring = counter(other, "shm_rx_packets");
        assert_eq!(by_ring >= 20, n % 2 == 0, "receiver {n} had {by_ring} packets by its ring");
        assert_eq!(other.counter("icrc_errors"), 0);
    }
}

/// Without a posted receive a datagram is dropped here, too, and other traffic is unaffected.
#[test]
fn what_finds_no_receive_is_lost_and_counted() {
    let (a, b) = (near("127.66.3.5"), near("127.66.3.5"));
    a.send_to(&b, Operation::Send, 0, 8);
    a.succeed(1);
    until("it was dropped", || {
        b.cq.poll(&mut Vec::new(), 1).unwrap();
        b.counter("out_of_buffer") == 1
    });
    exchange(&a, &b, 1, 100);
    assert_eq!(counter(&a, "udp_tx_packets"), 0);
}

/// The receiver goes, and another one has its slot: what was sent in between is lost, and what
/// follows takes a new ring.
#[test]
fn one_who_goes_is_forgotten_and_its_successor_is_met() {
    let (a, b) = (near("127.66.3.6"), near("127.66.3.7"));
    exchange(&a, &b, 1, 100);
    let (gone, slot) = (b.at(), b.last_qp().qpn().get() >> 16);
    drop(b);
    let send = || {
        a.last_qp().post_send(&SendRequest::new(1, Operation::Send, &a.sge(0, 8)).to(gone)).unwrap();
        a.succeed(1);
    };
    until("packets to a closed device take UDP again", || {
        send();
        counter(&a, "udp_tx_packets") > 0
    });
    let c = near("127.66.3.7");
    assert_eq!(c.last_qp().qpn().get() >> 16, slot, "the slot is free again");
    // The new device is resolved at the latest on the first send after the old one was found gone.
    exchange(&a, &c, 2, 100);
    exchange(&c, &a, 3, 100);
}

/// Fault and capture links wrap it as they wrap UDP: packets then have an ICRC, and corruption is
/// detected.
#[test]
fn faults_are_injected_there_too() {
    let fault = "corrupt=0.1,seed=5".parse().unwrap();
    let auto = |addr: &str| Config { link: LinkChoice::Auto, ..config(addr) };
    let mut a = End::open(&Config { fault: Some(fault), ..auto("127.66.3.8") }, MIB);
    a.add_ud(None);
    let b = near("127.66.3.8");
    a.fill(4);
    (0..400).for_each(|slot| b.post_recv(slot, slot * 256, 256));
    for number in 0..400 {
        a.send_to(&b, Operation::SendImmediate(number), 0, 200);
        a.succeed(1);
    }
    let mut got = Vec::new();
    until("damage is seen, and most arrives", || {
        b.cq.poll(&mut got, 64).unwrap();
        got.len() > 250 && b.counter("icrc_errors") > 5
    });
    for done in &got {
        assert!(b.bytes(done.wr_id as usize * 256 + GRH, 200) == patterns(4, 0, 200));
    }
    assert!(counter(&a, "shm_tx_packets") > 0);
}
