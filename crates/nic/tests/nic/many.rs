//! Many queue pairs, devices and processes on one address.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::{
    ALL_ACCESS, End, MIB, check_write, child, config, connect, engines, pair_with, patterns, resident, role,
    until,
};
use nobounce_nic::soft::{Config, Qp};
use nobounce_nic::work::{
    Mtu, Operation, Psn, QpAttr, QpLimits, Qpn, RecvRequest, Remote, SendRequest, Status,
};

fn next_number(end: &mut End) -> u32 {
    end.add_qp(QpLimits::default());
    end.qps.pop().unwrap().qpn().get()
}

/// Two devices begin at numbers of their own: the one behind gives out numbers until both have
/// arrived at the same.
fn give_equal_numbers(a: &mut End, b: &mut End) {
    let (mut at, mut other) = (next_number(a), next_number(b));
    while at != other {
        if at < other {
            at = next_number(a);
        } else {
            other = next_number(b);
        }
    }
}

#[test]
fn the_next_device_on_an_address_begins_at_another_number() {
    let first = |_| {
        let mut end = End::open(&config("127.59.0.9"), 4096);
        next_number(&mut end)
    };
    let numbers: Vec<_> = (0..4).map(first).collect();
    assert!(numbers.iter().any(|number| *number != numbers[0]), "all begin at {}", numbers[0]);
}

#[test]
fn crossed_numbers_on_one_address_and_equal_numbers_on_two() {
    for addrs in [["127.59.0.1", "127.59.0.1"], ["127.59.0.2", "127.59.0.3"]] {
        // Equal numbers are of equal engines: one is enough to try them.
        let engines = if addrs[0] == addrs[1] { engines() } else { Some(1) };
        let [mut a, mut b] = addrs.map(|addr| End::open(&Config { engines, ..config(addr) }, MIB));
        if addrs[0] != addrs[1] {
            give_equal_numbers(&mut a, &mut b);
        }
        for _ in 0..4 {
            a.add_qp(QpLimits::default());
            b.add_qp(QpLimits::default());
        }
        for i in 0..4 {
            connect(&a, i, &b, 3 - i, Mtu::Mtu1024);
        }
        if addrs[0] != addrs[1] {
            assert_eq!(a.qps[1].qpn(), b.qps[1].qpn(), "the same numbers at both ends");
        }
        for round in 0..20_u8 {
            let (seed_a, seed_b) = (round, round | 0x80);
            a.fill(seed_a);
            b.fill(seed_b);
            let (piece, half) = (100_000_u64, MIB as u64 / 2);
            for i in 0..4_u64 {
                for (from, to) in [(&a, &b), (&b, &a)] {
                    let (sge, remote) = (from.sge(i * piece, piece as u32), to.remote(half + i * piece));
                    let request = SendRequest::new(i, Operation::Write(remote), &sge);
                    from.qps[i as usize].post_send(&request).unwrap();
                }
            }
            a.succeed(4);
            b.succeed(4);
            let all = 4 * piece as usize;
            assert!(b.bytes(MIB / 2, all) == patterns(seed_a, 0, all));
            assert!(a.bytes(MIB / 2, all) == patterns(seed_b, 0, all));
        }
    }
}

/// The kernel steers by the order of the sockets on the port, which changes when a device closes.
/// Packets may then reach any device with a socket there. A device without queue pairs polls none.
#[test]
fn regression_a_device_without_queue_pairs_gets_no_packets_of_others() {
    let addr = config("127.59.3.1");
    let [first, a, b] = [(); 3].map(|()| {
        let mut end = End::open(&addr, MIB);
        end.add_qp(QpLimits::default());
        end
    });
    // Now the second of the remaining two has the third slot, and a third device would get its
    // packets.
    drop(first);
    let idle = End::open(&addr, 4096);
    connect(&a, 0, &b, 0, Mtu::Mtu1024);
    check_write(&a, &b, 1, MIB);
    check_write(&b, &a, 2, MIB);
    drop(idle);
}

#[test]
fn without_segmented_sends_and_merged_receives() {
    for (n, (gso, gro)) in [(false, true), (true, false), (false, false)].into_iter().enumerate() {
        let addr = format!("127.59.1.{}", n + 1);
        let plain = Config { gso, gro, ..config(&addr) };
        // Towards itself, and towards an end that has everything.
        for other in [plain.clone(), config(&addr)] {
            let (a, b) = pair_with(&plain, &other, MIB, Mtu::Mtu4096);
            for (from, to) in [(&a, &b), (&b, &a)] {
                check_write(from, to, 1, MIB);
                from.fill(9);
                from.post(Operation::Read(to.remote(0)), 0, MIB as u32);
                from.succeed(1);
                assert!(from.bytes(0, MIB) == to.bytes(0, MIB));
                to.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &to.sge(0, 50_000) }).unwrap();
                from.post(Operation::Send, 0, 50_000);
                from.succeed(1);
                to.succeed(1);
            }
        }
    }
}

/// What two processes tell each other.
fn parse(line: &str) -> (Qpn, Remote) {
    let numbers: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    (Qpn::new(numbers[0] as u32), Remote { addr: numbers[1], rkey: numbers[2] as u32 })
}

fn join(qp: &Qp, addr: &str, peer: Qpn) {
    qp.modify(&QpAttr::to_rtr(addr.parse().unwrap(), peer, Psn::new(77), Mtu::Mtu1024)).unwrap();
    qp.modify(&QpAttr { timeout: 14, ..QpAttr::to_rts(Psn::new(77)) }).unwrap();
}

const SHARED_ADDR: &str = "127.59.2.1";
const PIECE: usize = 64 << 10;

/// A child: writes to its part of the hub, reads it back, compares, and says how often it did,
/// until its input ends.
fn guest() {
    let mut end = End::open(&config(SHARED_ADDR), 2 * PIECE);
    let qp = end.add_qp(QpLimits::default());
    let qpn = qp.qpn().get();
    println!("\nhello {qpn} {} {}", end.mr.addr(), end.mr.rkey());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (peer, remote) = parse(&line);
    join(&end.qps[0], SHARED_ADDR, peer);
    let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let asked = over.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_line(&mut String::new());
        asked.store(true, Ordering::Relaxed);
    });
    for round in 0_u32.. {
        let seed = (round ^ qpn) as u8;
        end.fill(seed);
        end.post(Operation::Write(remote), 0, PIECE as u32);
        end.post(Operation::Read(remote), PIECE as u64, PIECE as u32);
        end.succeed(2);
        assert!(end.bytes(PIECE, PIECE) == patterns(seed, 0, PIECE), "round {round}");
        println!("round {round}");
        if over.load(Ordering::Relaxed) {
            return;
        }
    }
}

struct Guest {
    process: Child,
    rounds: Arc<AtomicU32>,
    qp: Qp,
}

impl Guest {
    fn invite(hub: &End, place: usize) -> Self {
        let mut process = child("many::processes_join_and_die_under_traffic", "guest")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let hello = lines.find_map(|line| line.unwrap().strip_prefix("hello ").map(str::to_owned)).unwrap();
        let (peer, _) = parse(&hello);
        let qp = hub.pd.create_qp(&hub.cq, &hub.cq, QpLimits::default()).unwrap();
        qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
        join(&qp, SHARED_ADDR, peer);
        let Remote { addr, rkey } = hub.remote((place * PIECE) as u64);
        writeln!(process.stdin.as_mut().unwrap(), "{} {addr} {rkey}", qp.qpn().get()).unwrap();
        let rounds = Arc::new(AtomicU32::new(0));
        let seen = rounds.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                seen.fetch_add(u32::from(line.starts_with("round")), Ordering::Relaxed);
            }
        });
        Self { process, rounds, qp }
    }

    fn rounds(&self) -> u32 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// In the middle of whatever it does.
    fn kill(mut self) -> Qp {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.qp
    }

    fn dismiss(mut self) {
        drop(self.process.stdin.take());
        assert!(self.process.wait().unwrap().success(), "a guest failed");
    }
}

#[test]
fn processes_join_and_die_under_traffic() {
    if role().is_some() {
        return guest();
    }
    let hub = End::open(&config(SHARED_ADDR), 8 * PIECE);
    let mut guests: Vec<Guest> = (0..3).map(|place| Guest::invite(&hub, place)).collect();
    let mut dead = Vec::new();
    for turn in 0..6 {
        let before: Vec<u32> = guests.iter().map(Guest::rounds).collect();
        until("every guest to go on", || guests.iter().zip(&before).all(|(g, was)| g.rounds() > was + 10));
        // The oldest and the youngest in turn: slots become free in any order.
        let place = if turn % 2 == 0 { 0 } else { 2 };
        dead.push(guests.remove(place).kill());
        let before: Vec<u32> = guests.iter().map(Guest::rounds).collect();
        until("the others to go on", || guests.iter().zip(&before).all(|(g, was)| g.rounds() > was + 10));
        guests.push(Guest::invite(&hub, 3 + turn % 5));
        dead.truncate(turn % 3); // some queue pairs of the dead stay for a while
    }
    let rounds: Vec<u32> = guests.iter().map(Guest::rounds).collect();
    guests.into_iter().for_each(Guest::dismiss);
    println!("rounds of the last three: {rounds:?}; {:?}", hub.device.link_counters());
}

/// Runs in a process of its own, which has few descriptors and no other memory.
fn thousand() {
    const QPS: usize = 1000;
    const EACH: usize = 4096;
    let few = libc::rlimit { rlim_cur: 256, rlim_max: 256 };
    // SAFETY: a valid limit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few) }, 0);
    let (mut a, mut b) =
        (End::open(&config("127.59.3.1"), QPS * EACH), End::open(&config("127.59.3.1"), QPS * EACH));
    let pattern = patterns(1, 0, QPS * EACH);
    let add = |a: &mut End, b: &mut End| {
        a.add_qp(QpLimits::default());
        b.add_qp(QpLimits::default());
        let last = a.qps.len() - 1;
        connect(a, last, b, last, Mtu::Mtu4096);
    };
    let exchange = |a: &End, b: &End, from: usize| {
        for (i, qp) in a.qps.iter().enumerate().skip(from) {
            let (sge, at) = (a.sge((i * EACH) as u64, EACH as u32), (i * EACH) as u64);
            qp.post_send(&SendRequest::new(i as u64, Operation::Write(b.remote(at)), &sge)).unwrap();
        }
        let got = a.completions(a.qps.len() - from);
        assert!(got.iter().all(|c| c.status == Status::Success));
    };
    a.buffer.write_at(0, &pattern).unwrap();
    add(&mut a, &mut b);
    exchange(&a, &b, 0);
    let registered = 2 * QPS * EACH + pattern.len();
    let base = resident() - registered as u64;
    (1..QPS).for_each(|_| add(&mut a, &mut b));
    let idle = resident() - registered as u64;
    exchange(&a, &b, 1);
    assert!(b.bytes(0, QPS * EACH) == pattern, "each queue pair moved its own bytes");
    let used = resident() - registered as u64;
    let each = (idle - base) / (2 * QPS as u64 - 2);
    println!(
        "two devices: {} KiB resident besides registered memory; {each} bytes for each further idle queue pair; \
         {} KiB after all {} moved data",
        base >> 10,
        used >> 10,
        2 * QPS
    );
    assert!(base < 64 << 20, "{base} bytes");
    assert!(each < 32 << 10, "{each} bytes");
    assert!((used - base) / (2 * QPS as u64) < 32 << 10, "{used} bytes after traffic");
}

#[test]
fn a_thousand_queue_pairs_with_256_descriptors() {
    if role().is_some() {
        return thousand();
    }
    let output = child("many::a_thousand_queue_pairs_with_256_descriptors", "thousand").output().unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
