//! Peers that close, die or fall silent in the middle of traffic: an error in bounded time, never a
//! hang.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{SOON, config, device, is_dropin, is_hardware, pair, waive, waived_on_hardware};
use nobounce::{Config, ConnectOptions, Connection, Device, MessageError, PostError, Status, WaitError};

/// Where the child's device is; unset in the parent.
const CHILD: &str = "NOBOUNCE_TEST_VANISH";

/// Not a test of its own: what the second process does. It offers memory, and waits for an end that
/// it does not choose.
#[test]
fn child() {
    let Ok(addr) = std::env::var(CHILD) else { return };
    let listener = device(&addr).listen("127.0.0.1:0").unwrap();
    println!("\nat {}", listener.local_addr());
    let conn = listener.accept(SOON).unwrap();
    let region = conn.device().register(1 << 20).unwrap();
    conn.send_region(&region).unwrap();
    let _ = conn.recv_message(3 * SOON);
}

/// Ends the process whatever the test does. Its output stays open, or the process would die of
/// that.
struct Peer(Child, #[allow(dead_code)] BufReader<ChildStdout>);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn_peer(addr: &str) -> (Peer, Connection) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "vanish::child", "--nocapture"])
        .env(CHILD, addr)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let line = out.by_ref().lines().map(Result::unwrap).find(|line| line.starts_with("at ")).unwrap();
    let peer = Peer(child, out);
    let conn = device(addr).connect(&line[3..], &ConnectOptions::default()).unwrap();
    (peer, conn)
}

/// Writes of 1 MiB until something happens; the kernel's rxe in an emulated machine is slow.
fn enough() -> usize {
    if is_hardware() && !is_dropin() { 10 } else { 40 }
}

/// Keeps the queue full of writes until one of them fails, and tells how and when.
fn write_until_error(conn: &Connection, mut after: impl FnMut(usize)) -> (WaitError, Instant) {
    let local = conn.device().register(1 << 20).unwrap();
    let remote = conn.recv_region(SOON).unwrap();
    let start = Instant::now();
    let mut done = 0;
    loop {
        assert!(start.elapsed() < 3 * SOON, "no error in all this time, {done} writes");
        while conn.pending() < 8 {
            match conn.write(&local, 0..1 << 20, &remote, 0) {
                Ok(_) => {}
                Err(error) if error.is_full() => break,
                Err(error) => panic!("{error}"),
            }
        }
        match conn.wait_any(SOON) {
            Ok(_) => done += 1,
            Err(error) => return (error, Instant::now()),
        }
        after(done);
    }
}

#[test]
fn a_killed_peer_fails_what_is_under_way() {
    let (mut peer, conn) = spawn_peer("127.73.0.1");
    let mut killed = None;
    let (error, at) = write_until_error(&conn, |done| {
        if done == enough() {
            peer.0.kill().unwrap();
            killed = Some(Instant::now());
        }
    });
    let took = at - killed.unwrap_or_else(|| panic!("it failed before the peer was killed: {error}"));
    assert!(matches!(error, WaitError::PeerGone { .. }), "{error}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    // Everything else that was under way ends too, and so does what is posted now.
    while conn.pending() > 0 {
        assert!(matches!(conn.wait_any(SOON), Err(WaitError::PeerGone { .. })));
    }
    let local = conn.device().register(8).unwrap();
    let late = conn.recv(&local, 0..8).unwrap();
    assert!(matches!(conn.wait(late, SOON), Err(WaitError::PeerGone { .. })));
    assert!(matches!(conn.recv_message(SOON), Err(MessageError::PeerGone)));
    assert!(conn.is_peer_gone());
}

#[test]
fn a_stopped_peer_is_given_up_after_the_retries() {
    if is_hardware() && !is_dropin() {
        waive("a_stopped_peer", "a NIC, or the kernel, answers for a process that is stopped");
        return;
    }
    let (peer, conn) = spawn_peer("127.73.0.2");
    let pid = peer.0.id().to_string();
    let mut stopped = None;
    let (error, at) = write_until_error(&conn, |done| {
        // Again with every write that still ends: some sandboxes let a stopped process go on.
        if done >= enough() {
            assert!(Command::new("kill").args(["-STOP", &pid]).status().unwrap().success());
            stopped = Some(Instant::now());
        }
    });
    let took = at - stopped.unwrap_or_else(|| panic!("it failed before the peer was stopped: {error}"));
    assert!(matches!(error, WaitError::Failed { status: Status::RetryExceeded, .. }), "{error}");
    assert!(took > Duration::from_secs(1) && took < Duration::from_secs(6), "{took:?}");
    assert!(!conn.is_peer_gone(), "it is only silent");
}

#[test]
fn a_network_that_swallows_everything() {
    if waived_on_hardware(
        "a_network_that_swallows_everything",
        "losses are the software NIC's (NOBOUNCE_FAULT)",
    ) {
        return;
    }
    let listener = device("127.73.0.7").listen("127.0.0.1:0").unwrap();
    let at = listener.local_addr();
    let passive = std::thread::spawn(move || listener.accept(SOON).unwrap());
    let deaf = Config { fault: Some("loss=1".parse().unwrap()), ..config("127.73.0.7") };
    let conn = Device::open_with(&deaf).unwrap().connect(at, &ConnectOptions::default()).unwrap();
    let peer = passive.join().unwrap();
    let (local, target) =
        (conn.device().register(1 << 20).unwrap(), peer.device().register(1 << 20).unwrap());
    let start = Instant::now();
    let write = conn.write(&local, 0..1 << 20, &target.remote(), 0).unwrap();
    let read = conn.read(&local, 0..8, &target.remote(), 0).unwrap();
    let error = conn.wait(write, SOON).unwrap_err();
    assert!(matches!(error, WaitError::Failed { status: Status::RetryExceeded, .. }), "{error}");
    assert!(error.to_string().contains("UDP port 4791"), "{error}");
    assert!(matches!(conn.wait(read, SOON), Err(WaitError::Failed { status: Status::Flushed, .. })));
    let took = start.elapsed();
    assert!(took > Duration::from_secs(1) && took < Duration::from_secs(6), "{took:?}");
}

#[test]
fn a_peer_that_closes_fails_our_receives() {
    let (a, b) = pair("127.73.0.3", &ConnectOptions { qps: 3, ..ConnectOptions::default() });
    let inbox = a.device().register(64).unwrap();
    let receives: Vec<_> = (0..3).map(|lane| a.lane(lane).recv(&inbox, 0..64).unwrap()).collect();
    let waiting = std::thread::spawn(move || {
        let start = Instant::now();
        let errors: Vec<_> = receives.iter().map(|&ticket| a.wait(ticket, SOON).unwrap_err()).collect();
        (errors, start.elapsed())
    });
    drop(b);
    let (errors, took) = waiting.join().unwrap();
    assert!(errors.iter().all(|error| matches!(error, WaitError::PeerGone { .. })), "{errors:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    drop(inbox);
}

#[test]
fn what_a_peer_finished_before_it_closed_counts() {
    let (a, b) = pair("127.73.0.4", &ConnectOptions::default());
    let (inbox, source) = (a.device().register(64).unwrap(), b.device().register(64).unwrap());
    let (first, second) = (a.recv(&inbox, 0..8).unwrap(), a.recv(&inbox, 8..16).unwrap());
    source.write_at(0, b"farewell").unwrap();
    let send = b.send(&source, 0..8).unwrap();
    b.wait(send, SOON).unwrap();
    b.send_message(b"and a word").unwrap();
    drop(b);
    assert!(matches!(a.wait(second, SOON), Err(WaitError::PeerGone { .. })));
    assert_eq!(a.wait(first, SOON).unwrap().len, 8);
    assert_eq!(a.recv_message(SOON).unwrap(), b"and a word");
    assert!(matches!(a.recv_message(SOON), Err(MessageError::PeerGone)));
}

#[test]
fn polling_notices_too() {
    let (a, b) = pair("127.73.0.5", &ConnectOptions::default());
    let inbox = a.device().register(64).unwrap();
    let ticket = a.recv(&inbox, 0..64).unwrap();
    drop(b);
    let start = Instant::now();
    let error = loop {
        assert!(start.elapsed() < Duration::from_secs(2));
        if let Err(error) = a.poll() {
            break error;
        }
    };
    assert_eq!(error.ticket(), Some(ticket));
}

#[test]
fn posting_to_a_peer_that_is_gone_never_blocks() {
    let (a, b) = pair("127.73.0.6", &ConnectOptions { depth: 4, ..ConnectOptions::default() });
    let local = a.device().register(64).unwrap();
    let remote = b.device().register(64).unwrap().remote();
    drop(b);
    let start = Instant::now();
    let mut ended = 0;
    while ended < 20 {
        assert!(start.elapsed() < SOON);
        match a.write(&local, 0..64, &remote, 0) {
            Ok(_) => {}
            Err(PostError::Device(_) | PostError::Unclaimed { .. }) => {
                a.wait_any(SOON).unwrap_err();
                ended += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
}
