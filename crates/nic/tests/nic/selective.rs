//! Selective retransmission between two devices that agree on it, and go-back-N otherwise.

use std::time::{Duration, Instant};

use nobounce_nic::soft::{Config, LinkChoice, Retransmit};
use nobounce_nic::work::{Mtu, Operation};
use nobounce_protocol::wire::{CongestionNotification, Feth};

use crate::common::{End, config, pair_with, patterns, unguarded_udp, until};
use crate::forged::Forger;

const LEN: usize = 1 << 20;

fn lossy(addr: &str, retransmit: Retransmit) -> Config {
    let fault = Some("loss=0.02,reorder=0.02,dup=0.02,seed=3".parse().unwrap());
    Config { fault, link: LinkChoice::Udp, retransmit, ..config(addr) }
}

/// Long messages of every kind, all bytes checked.
fn exchange(a: &End, b: &End, round: u8) {
    let (half, len) = (LEN as u64 / 2, 200_000);
    a.fill(round);
    b.fill(0xe0 + round);
    b.post_recv(1, half, len);
    a.post(Operation::Write(b.remote(0)), 0, len);
    a.post(Operation::Send, 1, len);
    a.post(Operation::FetchAdd { remote: b.remote(LEN as u64 - 8), add: 3 }, LEN as u64 - 8, 8);
    a.post(Operation::Flush { remote: b.remote(0), len, feth: Feth::new(Feth::GLOBAL, 0) }, 0, 0);
    a.post(Operation::Read(b.remote(0)), half, len);
    a.succeed(5);
    assert_eq!(b.completions(1)[0].byte_len, len);
    assert!(b.bytes(0, 200_000) == patterns(round, 0, 200_000));
    assert!(b.bytes(LEN / 2, 200_000) == patterns(round, 1, 200_000));
    assert!(a.bytes(LEN / 2, 200_000) == patterns(round, 0, 200_000));
}

fn quiet_for(ends: [&End; 2], time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        ends.iter().for_each(|end| end.quiet());
    }
}

#[test]
fn both_agree_and_send_only_what_is_lost() {
    let auto = |addr| lossy(addr, Retransmit::Auto);
    let (a, b) = pair_with(&auto("127.59.1.1"), &auto("127.59.1.2"), LEN, Mtu::Mtu1024);
    // The questions may be lost, too.
    quiet_for([&a, &b], Duration::from_millis(100));
    let before = a.counter("rcvd_seq_err") + b.counter("rcvd_seq_err");
    for round in 0..4 {
        exchange(&a, &b, 2 * round);
        exchange(&b, &a, 2 * round + 1);
    }
    assert!(a.counter("retransmitted") > 0 && b.counter("retransmitted") > 0);
    assert_eq!(a.counter("rcvd_seq_err") + b.counter("rcvd_seq_err"), before, "no NAK");
}

#[test]
fn one_that_goes_back_is_met_with_the_standards_packets() {
    for (ours, theirs) in
        [(Retransmit::Auto, Retransmit::GoBackN), (Retransmit::GoBackN, Retransmit::GoBackN)]
    {
        let (a, b) = pair_with(&lossy("127.59.2.1", ours), &lossy("127.59.2.2", theirs), LEN, Mtu::Mtu1024);
        quiet_for([&a, &b], Duration::from_millis(50));
        exchange(&a, &b, 1);
        exchange(&b, &a, 2);
        assert_eq!(a.counter("retransmitted") + b.counter("retransmitted"), 0);
        assert!(a.counter("rcvd_seq_err") + b.counter("rcvd_seq_err") > 0);
    }
}

/// A receiver of marked packets, such as a hardware adapter, asks this device to slow down. A
/// packet from another address does not.
#[test]
fn congestion_notifications_of_the_peer_are_obeyed() {
    let config = |addr| unguarded_udp(addr);
    let (a, b) = pair_with(&config("127.59.3.1"), &config("127.59.3.2"), 4096, Mtu::Mtu1024);
    let mut packet = vec![0; CongestionNotification::LEN];
    CongestionNotification { to: a.qps[0].qpn() }.emit(&mut packet);
    Forger::new(b.device.local(), &a).send_closed(packet.clone());
    until("the notification", || {
        a.quiet();
        a.counter("rp_cnp_handled") == 1
    });
    Forger::new([127, 59, 3, 9].into(), &a).send_closed(packet);
    until("the forged one", || {
        a.quiet();
        a.counter("wrong_peer") == 1
    });
    assert_eq!(a.counter("rp_cnp_handled"), 1);
}

/// What arrives with a congestion mark is answered with notifications, at most one in 50 us, and
/// the sender slows down. Where every packet is marked, windows shrink below a packet, and all
/// arrives.
#[test]
fn marks_are_answered_with_notifications() {
    for (addrs, mark) in
        [(["127.59.4.1", "127.59.4.2"], "mark=0.2"), (["127.59.5.1", "127.59.5.2"], "mark=1")]
    {
        let marking =
            |addr| Config { fault: Some(mark.parse().unwrap()), link: LinkChoice::Udp, ..config(addr) };
        let start = Instant::now();
        let (a, b) = pair_with(&marking(addrs[0]), &marking(addrs[1]), LEN, Mtu::Mtu1024);
        exchange(&a, &b, 1);
        exchange(&b, &a, 2);
        quiet_for([&a, &b], Duration::from_millis(10));
        let most = 1 + u64::try_from(start.elapsed().as_micros()).unwrap() / 50;
        for (from, to) in [(&a, &b), (&b, &a)] {
            let sent = from.counter("np_cnp_sent");
            assert!((1..=most).contains(&sent), "{mark}: {sent} of {most}");
            assert!(from.counter("np_ecn_marked_roce_packets") >= sent);
            assert_eq!(to.counter("rp_cnp_handled"), sent);
        }
    }
}
