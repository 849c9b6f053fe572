//! `caller` mode: threads that block in a read of a completion channel.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nobounce_nic::soft::{Channel, Config, LinkChoice, Progress, Retransmit};
use nobounce_nic::work::{Mtu, Operation, QpLimits, Status};

use crate::common::{End, config, connect, until};
use crate::idle::engine_threads;

/// An end whose completion queue has a channel.
fn end(at: &Config) -> (End, Channel) {
    let mut end = End::open(at, 4096);
    let channel = end.device.create_channel().unwrap();
    end.cq = end.device.create_cq(64, Some(&channel)).unwrap();
    end.add_qp(QpLimits::default());
    (end, channel)
}

fn pair(at: &Config) -> [(End, Channel); 2] {
    let (a, b) = (end(at), end(at));
    connect(&a.0, 0, &b.0, 0, Mtu::Mtu1024);
    [a, b]
}

/// Blocks until the next event, as `ibv_get_cq_event` does.
fn read_event(channel: &Channel) -> u32 {
    loop {
        let blocked = channel.block();
        let mut count = [0_u8; 8];
        // SAFETY: eight bytes that can be written.
        assert_eq!(unsafe { libc::read(blocked.fd(), count.as_mut_ptr().cast(), 8) }, 8);
        let is_watching = blocked.is_watching();
        drop(blocked);
        if let Some(cq) = if is_watching { channel.next() } else { channel.claim() } {
            return cq;
        }
    }
}

/// Waits for so many completions, by events.
fn completions((end, channel): &(End, Channel), count: usize) {
    let mut got = Vec::new();
    while got.len() < count {
        let left = count - got.len();
        if end.cq.poll(&mut got, left).unwrap() > 0 {
            continue;
        }
        end.cq.request_notify(false);
        if end.cq.poll(&mut got, left).unwrap() == 0 {
            assert_eq!(read_event(channel), end.cq.id());
        }
    }
    got.iter().for_each(|completion| assert_eq!(completion.status, Status::Success));
}

fn callers(addr: &str, link: LinkChoice) -> Config {
    // No peer is asked what it can do: nothing but the test sends.
    Config { progress: Progress::Caller, link, retransmit: Retransmit::GoBackN, ..config(addr) }
}

/// A packet wakes the blocked thread itself. Its engine thread looks once in a millisecond.
#[test]
fn a_packet_wakes_the_blocked_thread_and_no_other() {
    const ROUNDS: u64 = 1000;
    for link in [LinkChoice::Auto, LinkChoice::Udp] {
        let [a, b] = pair(&callers("127.52.7.1", link));
        let turns = |end: &(End, Channel), begins: bool, rounds: u64| {
            for _ in 0..rounds {
                end.0.post_recv(0, 0, 8);
                if begins {
                    std::thread::sleep(Duration::from_micros(50)); // so that the other end blocks
                    end.0.post(Operation::Send, 8, 8);
                    completions(end, 2);
                } else {
                    completions(end, 1);
                    end.0.post(Operation::Send, 8, 8);
                    completions(end, 1);
                }
            }
        };
        let both = |rounds| {
            b.0.post_recv(0, 0, 8);
            std::thread::scope(|scope| {
                scope.spawn(|| turns(&b, false, rounds));
                turns(&a, true, rounds);
            });
        };
        both(20);
        // Where other processes take the CPU, threads are late and engine threads take over.
        let is_quiet = || {
            let (began, before) = (Instant::now(), engine_threads().0);
            both(ROUNDS);
            let (times, passed) = (engine_threads().0 - before, began.elapsed());
            println!("{link:?}: the engine threads woke {times} times in {ROUNDS} rounds, {passed:?}");
            times <= 2 * u64::try_from(passed.as_millis()).unwrap() + ROUNDS / 5
        };
        assert!((0..5).any(|_| is_quiet()), "{link:?}: engine threads wake for packets of a blocked thread");
    }
}

/// A blocked thread that waits for long does not keep its engine thread awake, and its timers run.
#[test]
fn a_blocked_thread_lets_the_engine_thread_sleep() {
    let [a, b] = pair(&callers("127.52.7.2", LinkChoice::Udp));
    b.0.post_recv(0, 0, 8);
    std::thread::scope(|scope| {
        scope.spawn(|| completions(&b, 1));
        std::thread::sleep(Duration::from_millis(100));
        let before = engine_threads().0;
        std::thread::sleep(Duration::from_millis(400));
        let times = engine_threads().0 - before;
        a.0.post(Operation::Send, 0, 8);
        completions(&a, 1);
        assert!(times <= 8, "{times} wake-ups");
    });
    // No answer comes: the blocked thread learns of it by a timer.
    drop(b);
    a.0.post(Operation::Send, 0, 8);
    a.0.cq.request_notify(false);
    assert_eq!(read_event(&a.1), a.0.cq.id());
    let mut got = Vec::new();
    assert_eq!(a.0.cq.poll(&mut got, 1), Ok(1));
    assert_ne!(got[0].status, Status::Success);
}

/// Threads that block on channels of one device, one of which is away for long after each event.
#[test]
fn the_links_are_watched_while_the_first_blocked_thread_is_away() {
    const ROUNDS: usize = 8;
    const AWAY: Duration = Duration::from_millis(150);
    for link in [LinkChoice::Auto, LinkChoice::Udp] {
        let at = callers("127.52.7.3", link);
        let (mut to, first) = end(&at);
        let second = to.device.create_channel().unwrap();
        let cq = to.device.create_cq(64, Some(&second)).unwrap();
        let [mut from_first, mut from_second] = [End::open(&at, 4096), End::open(&at, 4096)];
        from_first.add_qp(QpLimits::default());
        from_second.add_qp(QpLimits::default());
        connect(&from_first, 0, &to, 0, Mtu::Mtu1024);
        let own = std::mem::replace(&mut to.cq, cq);
        to.add_qp(QpLimits::default());
        connect(&from_second, 0, &to, 1, Mtu::Mtu1024);
        let cq = std::mem::replace(&mut to.cq, own);
        let (arrived, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let sge = to.sge(0, 8);
        let mut times = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    to.post_recv(0, 0, 8);
                    to.cq.request_notify(false);
                    read_event(&first);
                    to.cq.poll(&mut Vec::new(), 16).unwrap();
                    std::thread::sleep(AWAY);
                }
            });
            scope.spawn(|| {
                let mut got = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let request = nobounce_nic::work::RecvRequest { wr_id: 0, sges: &sge };
                    to.qps[1].post_recv(&request).unwrap();
                    cq.request_notify(false);
                    read_event(&second);
                    cq.poll(&mut got, 16).unwrap();
                    arrived.store(true, Ordering::SeqCst);
                }
            });
            for round in 0..ROUNDS {
                std::thread::sleep(Duration::from_millis(5));
                if round == ROUNDS - 1 {
                    is_over.store(true, Ordering::Relaxed);
                }
                from_first.post(Operation::Send, 0, 8); // the first thread leaves its watch
                from_first.succeed(1);
                std::thread::sleep(Duration::from_millis(2));
                let began = Instant::now();
                from_second.post(Operation::Send, 0, 8);
                from_second.succeed(1);
                while !arrived.swap(false, Ordering::SeqCst) {
                    assert!(began.elapsed() < Duration::from_secs(10), "{link:?}: no event in round {round}");
                    std::hint::spin_loop();
                }
                times.push(began.elapsed());
                std::thread::sleep(AWAY);
            }
        });
        times.sort();
        println!("{link:?}: an event takes {:?}, at most {:?}", times[ROUNDS / 2], times[ROUNDS - 1]);
        // Else it waits until the first thread is back.
        assert!(times[ROUNDS / 2] < AWAY / 2, "{link:?}: {times:?}");
    }
}

/// Two threads that block on one channel: every event reaches one of them.
#[test]
fn threads_that_share_a_channel_lose_no_event() {
    const ROUNDS: usize = 500;
    for link in [LinkChoice::Auto, LinkChoice::Udp] {
        let [a, b] = pair(&callers("127.52.7.4", link));
        let (taken, events) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while taken.load(Ordering::SeqCst) < ROUNDS {
                        read_event(&b.1);
                        events.fetch_add(1, Ordering::SeqCst);
                        b.0.cq.request_notify(false);
                        taken.fetch_add(b.0.cq.poll(&mut Vec::new(), 16).unwrap(), Ordering::SeqCst);
                    }
                });
            }
            b.0.cq.request_notify(false);
            for round in 0..ROUNDS {
                b.0.post_recv(0, 0, 8);
                a.0.post(Operation::Send, 0, 8);
                a.0.succeed(1);
                until("the completion", || taken.load(Ordering::SeqCst) > round);
                if round % 16 == 0 {
                    // so that the engine thread sleeps, too
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
            // One more for each thread, which may wait still.
            for _ in 0..2 {
                b.0.post_recv(0, 0, 8);
                a.0.post(Operation::Send, 0, 8);
                a.0.succeed(1);
                std::thread::sleep(Duration::from_millis(5));
                b.0.cq.request_notify(false);
            }
        });
        println!("{link:?}: {} events", events.load(Ordering::SeqCst));
    }
}
