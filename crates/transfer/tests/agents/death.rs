//! A peer in another process that is killed, stopped, or ends in the middle of a transfer.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nobounce_transfer::{Agent, AgentOptions, Gone, Notify, Outcome, Pages, Peer, TransferError};

use super::{SOON, addr, device};

const ROLE: &str = "TRANSFER_TEST_ADDR";

/// Another process, which ends with the test.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Other {
    fn signal(&self, signal: i32) {
        // SAFETY: a process of our own that was not waited for.
        unsafe { libc::kill(i32::try_from(self.0.id()).unwrap(), signal) };
    }
}

fn options() -> AgentOptions {
    AgentOptions { silence: Duration::from_millis(1500), ..AgentOptions::default() }
}

/// The other process: connects, exports memory, announces a transfer, and waits for its end.
#[test]
fn other_process() {
    let Ok(target) = std::env::var(ROLE) else { return };
    let agent = Agent::new(&device(), "other", options()).unwrap();
    let view = agent.register(16 << 20).unwrap();
    agent.export("kv", &view).unwrap();
    let peer = agent.connect(target.as_str(), SOON).unwrap();
    let announcement = peer.announce(b"announced").unwrap();
    println!("ready");
    std::io::stdout().flush().unwrap();
    std::thread::sleep(SOON);
    announcement.complete();
}

fn start() -> (Agent, Other, Peer) {
    let agent = Agent::listening(&device(), "target", "127.0.0.1:0", options()).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "death::other_process", "--nocapture"])
        .env(ROLE, addr(&agent).to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut other = Other(child);
    let peer = agent.accept(SOON).unwrap();
    peer.region("kv", SOON).unwrap();
    let mut lines = BufReader::new(other.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")));
    (agent, other, peer)
}

/// How long a transfer takes to fail once the signal is sent.
fn time_to_fail(signal: i32, with_transfer: bool) -> (Duration, Gone) {
    let (agent, other, peer) = start();
    let (local, remote) = (agent.register(16 << 20).unwrap(), peer.region("kv", SOON).unwrap());
    let order = super::shuffled(1 << 12, 1);
    let pages = Pages::whole(&order, &order, 4096);
    let submit = || peer.write_pages(&local, &remote, &pages, Notify::Nothing);
    submit().unwrap().wait(SOON).unwrap();
    let transfers: Vec<_> = (0..if with_transfer { 50 } else { 0 }).map(|_| submit().unwrap()).collect();
    other.signal(signal);
    let sent = Instant::now();
    while peer.gone().is_none() {
        assert!(sent.elapsed() < SOON, "it is not seen");
        std::thread::sleep(Duration::from_millis(1));
    }
    let took = sent.elapsed();
    for transfer in transfers {
        match transfer.wait(SOON) {
            Ok(_) | Err(TransferError::PeerGone { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(submit(), Err(TransferError::PeerGone { .. })));
    let aborted = agent.notification(SOON).unwrap();
    assert_eq!((aborted.tag.as_slice(), aborted.peer.as_str()), (&b"announced"[..], "other"));
    assert!(matches!(aborted.outcome, Outcome::Aborted { .. }), "{aborted:?}");
    assert_eq!(agent.notification(Duration::from_millis(10)), None);
    (took, peer.gone().unwrap())
}

#[test]
fn a_killed_peer_is_gone_at_once() {
    for with_transfer in [false, true] {
        let (took, reason) = time_to_fail(libc::SIGKILL, with_transfer);
        assert!(matches!(reason, Gone::Ended | Gone::Broken(_)), "{reason:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
        println!("killed: seen after {took:?}");
    }
}

#[test]
fn a_stopped_peer_is_gone_after_the_silence_limit() {
    for with_transfer in [false, true] {
        let (took, reason) = time_to_fail(libc::SIGSTOP, with_transfer);
        assert_eq!(reason, Gone::Silent(Duration::from_millis(1500)));
        assert!(took < Duration::from_secs(3), "{took:?}");
        println!("stopped: seen after {took:?}");
    }
}
