//! Keep-alives: a survivor that only receives learns of the end of a peer it reaches by UDP.

use std::time::{Duration, Instant};

use nobounce_nic::soft::{AsyncEvent, Config, LinkChoice, Mtu, QpEvent, QpState, Status};
use nobounce_nic::work::QpLimits;
use nobounce_protocol::pcap::Reader;
use nobounce_protocol::wire::Presence;

use crate::common::{End, check_write, config, connect, pair_with, until};

const LEN: usize = 8192;
const INTERVAL: Duration = Duration::from_millis(50);

fn asking(addr: &str) -> Config {
    Config { link: LinkChoice::Udp, keep_alive: Some(INTERVAL), ..config(addr) }
}

fn silent(addr: &str) -> Config {
    Config { keep_alive: None, ..asking(addr) }
}

/// Drives the end for so long, as a program that polls.
fn poll_for(ends: &[&End], time: Duration) {
    let (start, mut completions) = (Instant::now(), Vec::new());
    while start.elapsed() < time {
        for end in ends {
            end.cq.poll(&mut completions, 16).unwrap();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(completions.is_empty(), "{completions:?}");
}

/// One of the two asks; the other need not.
#[test]
fn a_survivor_that_only_receives_learns_of_the_end() {
    let (a, b) = pair_with(&silent("127.58.0.1"), &asking("127.58.0.2"), LEN, Mtu::Mtu1024);
    check_write(&a, &b, 1, LEN);
    b.post_recv(9, 0, 100);
    poll_for(&[&a, &b], 10 * INTERVAL);
    assert_eq!(b.qps[0].state(), QpState::Rts, "an idle peer lives");
    drop(a);
    let start = Instant::now();
    assert_eq!(b.completions(1)[0].status, Status::Flushed);
    println!("noticed after {:?}", start.elapsed());
    assert_eq!(b.qps[0].state(), QpState::Error);
    assert_eq!(b.event(), AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::Fatal });
}

/// A device at the same address and slot is not the one that was connected.
#[test]
fn a_peer_that_was_started_anew_is_another_one() {
    // Each device has one slot, so that the new one gets that of the old one.
    let single = |config| Config { engines: Some(1), ..config };
    let (a, b) = pair_with(&single(silent("127.58.1.1")), &single(asking("127.58.1.2")), LEN, Mtu::Mtu1024);
    check_write(&a, &b, 1, LEN);
    poll_for(&[&a, &b], 4 * INTERVAL);
    let slot = a.qps[0].qpn().get() >> 16;
    drop(a);
    // It asks us about the same peer at once, and answers for itself.
    let mut again = End::open(&single(silent("127.58.1.1")), LEN);
    assert_eq!(again.add_qp(QpLimits::default()).qpn().get() >> 16, slot);
    let mut other = End::open(&single(silent("127.58.1.2")), LEN);
    other.add_qp(QpLimits::default());
    connect(&again, 0, &other, 0, Mtu::Mtu1024);
    until("the old connection to end", || {
        b.quiet();
        again.quiet();
        b.qps[0].state() == QpState::Error
    });
    check_write(&again, &other, 2, LEN);
    // A queue pair to the new one, on the device that knew the old one, lives.
    let mut b = b;
    b.add_qp(QpLimits::default());
    again.add_qp(QpLimits::default());
    connect(&again, 1, &b, 1, Mtu::Mtu1024);
    poll_for(&[&again, &b], 6 * INTERVAL);
    assert_eq!(b.qps[1].state(), QpState::Rts);
}

/// A peer that never answers is a device of another make: nothing is known of its end.
#[test]
fn a_peer_that_never_answers_is_left_alone() {
    let config = asking("127.58.2.2");
    let mut b = End::open(&config, LEN);
    b.add_qp(QpLimits::default());
    let mut a = End::open(&silent("127.58.2.1"), LEN);
    a.add_qp(QpLimits::default());
    connect(&b, 0, &a, 0, Mtu::Mtu1024);
    drop(a);
    let other = crate::plain::plain_socket([127, 58, 2, 1].into());
    poll_for(&[&b], 20 * INTERVAL);
    assert_eq!(b.qps[0].state(), QpState::Rts);
    let mut asked = 0;
    other.set_nonblocking(true).unwrap();
    let mut packet = [0; 2048];
    while let Ok(len) = other.recv(&mut packet) {
        assert!(Presence::parse(&packet[..len]).is_some_and(|presence| !presence.is_answer));
        asked += 1;
    }
    assert!((1..=10).contains(&asked), "{asked} requests");
}

/// Without the setting nothing but the standard's packets is sent.
#[test]
fn nothing_is_asked_unless_it_is_wanted() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("presence.pcap");
    let recorded = Config { pcap: Some(path.clone()), ..silent("127.58.3.1") };
    let (a, b) = pair_with(&recorded, &silent("127.58.3.2"), LEN, Mtu::Mtu1024);
    check_write(&a, &b, 1, LEN);
    poll_for(&[&a, &b], 4 * INTERVAL);
    drop((a, b));
    let file = std::fs::read(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let mut packets = 0;
    for packet in Reader::new(&file).unwrap() {
        assert_eq!(Presence::parse(packet.unwrap().packet), None);
        packets += 1;
    }
    assert!(packets > 0);
}
