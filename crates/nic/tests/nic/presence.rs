//! Keep-alives: a survivor that only receives learns of the end of a peer it reaches by UDP.

use std::time::{Duration, Instant};

use nobounce_nic::soft::{AsyncEvent, Config, LinkChoice, Progress, Retransmit};
use nobounce_nic::work::{Mtu, Operation, Psn, QpAttr, QpEvent, QpLimits, QpState, SendRequest, Status};
use nobounce_protocol::pcap::Reader;
use nobounce_protocol::wire::{Capabilities, Presence};

use crate::common::{End, check_write, config, connect, pair_with, until};

const LEN: usize = 8192;
const INTERVAL: Duration = Duration::from_millis(50);

fn asking(addr: &str) -> Config {
    Config { link: LinkChoice::Udp, keep_alive: Some(INTERVAL), ..config(addr) }
}

fn silent(addr: &str) -> Config {
    Config { keep_alive: None, retransmit: Retransmit::GoBackN, ..asking(addr) }
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

/// The presence packets that the first of two such devices sends and receives.
fn presences(addrs: [&str; 2], set: impl Fn(&str) -> Config) -> Vec<Presence> {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("presence-{}.pcap", addrs[0]));
    let recorded = Config { pcap: Some(path.clone()), ..set(addrs[0]) };
    let (a, b) = pair_with(&recorded, &set(addrs[1]), LEN, Mtu::Mtu1024);
    check_write(&a, &b, 1, LEN);
    poll_for(&[&a, &b], 4 * INTERVAL);
    drop((a, b));
    let file = std::fs::read(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let packets: Vec<_> = Reader::new(&file).unwrap().map(|packet| packet.unwrap()).collect();
    assert!(!packets.is_empty());
    packets.iter().filter_map(|packet| Presence::parse(packet.packet)).collect()
}

/// Without the settings nothing but the standard's packets is sent.
#[test]
fn nothing_is_asked_unless_it_is_wanted() {
    assert_eq!(presences(["127.58.3.1", "127.58.3.2"], silent), []);
}

/// By default each end asks the other what it can do, until it answers.
#[test]
fn a_peer_is_asked_what_it_can_do() {
    let open = |addr: &str| Config { retransmit: Retransmit::Auto, ..silent(addr) };
    let seen = presences(["127.58.4.1", "127.58.4.2"], open);
    let answers = seen.iter().filter(|presence| presence.is_answer).count();
    assert!((2..8).contains(&seen.len()) && answers >= 2, "{seen:?}");
    assert!(seen.iter().all(|presence| presence.capabilities & Capabilities::SELECTIVE != 0));
}

/// Programs connect with a depth of 1 (NCCL does). Both ends know that the other one takes more: by
/// its ring, or by its answer to a keep-alive.
#[test]
fn atomics_to_a_device_of_this_kind_do_not_wait_for_each_other() {
    const COUNT: u64 = 8;
    let caller = |config| Config { progress: Progress::Caller, ..config };
    let shm = |addr| caller(Config { link: LinkChoice::Auto, ..config(addr) });
    for (ours, theirs, is_known) in [
        (shm("127.58.6.1"), shm("127.58.6.2"), true),
        (caller(asking("127.58.6.3")), caller(silent("127.58.6.4")), true),
        (caller(silent("127.58.6.5")), caller(silent("127.58.6.6")), false),
    ] {
        let (mut a, mut b) = (End::open(&ours, LEN), End::open(&theirs, LEN));
        a.add_qp(QpLimits::default());
        b.add_qp(QpLimits::default());
        for (end, peer) in [(&a, &b), (&b, &a)] {
            let (qp, to) = (&end.qps[0], &peer.qps[0]);
            let rtr = QpAttr::to_rtr(peer.device.local(), to.qpn(), Psn::new(7), Mtu::Mtu1024);
            qp.modify(&QpAttr { max_dest_rd_atomic: 1, ..rtr }).unwrap();
            qp.modify(&QpAttr { max_rd_atomic: 1, ..QpAttr::to_rts(Psn::new(7)) }).unwrap();
        }
        poll_for(&[&a, &b], 4 * INTERVAL);
        let before = a.device.counters().sent_pkts;
        let add = Operation::FetchAdd { remote: b.remote(0), add: 1 };
        let sges: Vec<_> = (0..COUNT).map(|at| a.sge(8 * at, 8)).collect();
        let requests: Vec<_> = sges.iter().map(|sges| SendRequest::new(1, add, sges)).collect();
        a.qps[0].post_sends(&requests).unwrap();
        let sent = a.device.counters().sent_pkts - before;
        // The peer is not driven meanwhile.
        assert!(!is_known || sent >= COUNT, "{:?}: {sent} were sent at once", ours.link);
        assert!(is_known || sent <= 2, "{sent} were sent to a device of which nothing is known");
        let (start, mut got) = (Instant::now(), Vec::new());
        while got.len() < requests.len() && start.elapsed() < Duration::from_secs(10) {
            a.cq.poll(&mut got, 16).unwrap();
            b.quiet();
        }
        assert!(
            got.len() == requests.len() && got.iter().all(|one| one.status == Status::Success),
            "{got:?}"
        );
    }
}
