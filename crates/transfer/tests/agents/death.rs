//! A peer in another process that is killed, stopped, or ends in the middle of a transfer.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nobounce_transfer::{Agent, AgentOptions, Gone, Notify, Outcome, Pages, Peer, Piece, TransferError};

use super::{SOON, addr, device};

const ROLE: &str = "TRANSFER_TEST_ADDR";
/// What the other process does beside: "exit" after a transfer, or "fork".
const MODE: &str = "TRANSFER_TEST_MODE";
/// A killed process is seen within this, at least in one of three attempts on a busy machine.
const AT_ONCE: Duration = Duration::from_millis(100);

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
    match std::env::var(MODE).as_deref() {
        Ok("exit") => write_and_exit(&agent, &peer),
        Ok("fork") => fork(),
        _ => {}
    }
    let announcement = peer.announce(b"announced").unwrap();
    println!("ready");
    std::io::stdout().flush().unwrap();
    std::thread::sleep(SOON);
    announcement.complete();
}

/// Ends without any clean-up as soon as the transfer has ended.
fn write_and_exit(agent: &Agent, peer: &Peer) -> ! {
    let (local, remote) = (agent.register(4096).unwrap(), peer.region("kv", SOON).unwrap());
    let list = [Piece { local: 0, remote: 0, len: 4096 }];
    peer.write_list(&local, &remote, &list, Notify::Tag(b"last")).unwrap().wait(SOON).unwrap();
    // SAFETY: no Rust code runs after it.
    unsafe { libc::_exit(0) }
}

/// A child that outlives its parent for a while.
fn fork() {
    // SAFETY: the child makes system calls only.
    unsafe {
        if libc::fork() == 0 {
            (0..3).for_each(|fd| _ = libc::close(fd));
            libc::sleep(4);
            libc::_exit(0);
        }
    }
}

fn other(agent: &Agent, mode: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "death::other_process", "--nocapture"]);
    command.env(ROLE, addr(agent).to_string()).env(MODE, mode);
    command
}

fn start(mode: &str) -> (Agent, Other, Peer) {
    let agent = Agent::listening(&device(), "target", "127.0.0.1:0", options()).unwrap();
    let mut other = Other(other(&agent, mode).stdout(Stdio::piped()).spawn().unwrap());
    let peer = agent.accept(SOON).unwrap();
    peer.region("kv", SOON).unwrap();
    let mut lines = BufReader::new(other.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")));
    (agent, other, peer)
}

/// How long a transfer takes to fail once the signal is sent.
fn time_to_fail(signal: i32, with_transfer: bool, mode: &str) -> (Duration, Gone) {
    let (agent, other, peer) = start(mode);
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
    assert_eq!(aborted.gone, peer.gone());
    assert_eq!(agent.notification(Duration::from_millis(10)), None);
    (took, peer.gone().unwrap())
}

#[test]
fn a_killed_peer_is_gone_at_once() {
    for (with_transfer, mode) in [(false, ""), (true, ""), (false, "fork")] {
        let times = (0..3).map(|_| {
            let (took, reason) = time_to_fail(libc::SIGKILL, with_transfer, mode);
            assert!(matches!(reason, Gone::Ended | Gone::Broken(_)), "{reason:?}");
            took
        });
        let took: Vec<_> = times.collect();
        println!("killed {mode}: seen after {took:?}");
        assert!(took.iter().min().unwrap() < &AT_ONCE && took.iter().all(|took| *took < options().silence));
    }
}

#[test]
fn a_tag_is_complete_when_the_process_exits_behind_its_transfer() {
    for _ in 0..10 {
        let agent = Agent::listening(&device(), "target", "127.0.0.1:0", options()).unwrap();
        agent.export("kv", &agent.register(4096).unwrap()).unwrap();
        let status = other(&agent, "exit").status().unwrap();
        assert!(status.success());
        let note = agent.notification(SOON).unwrap();
        assert_eq!((note.tag.as_slice(), &note.outcome), (&b"last"[..], &Outcome::Complete { bytes: 4096 }));
    }
}

/// Silence limits differ: keep-alives come in time for the shorter one.
#[test]
fn an_idle_peer_with_a_longer_silence_limit_stays() {
    let with = |silence| AgentOptions { silence, ..AgentOptions::default() };
    let (short, long) = (Duration::from_millis(300), Duration::from_secs(20));
    let patient = Agent::listening(&device(), "patient", "127.0.0.1:0", with(long)).unwrap();
    let hasty = Agent::new(&device(), "hasty", with(short)).unwrap();
    let peer = hasty.connect(addr(&patient), SOON).unwrap();
    std::thread::sleep(4 * short);
    assert_eq!((peer.gone(), patient.accept(SOON).unwrap().gone()), (None, None));
}

#[test]
fn a_stopped_peer_is_gone_after_the_silence_limit() {
    for with_transfer in [false, true] {
        let (took, reason) = time_to_fail(libc::SIGSTOP, with_transfer, "");
        assert_eq!(reason, Gone::Silent(Duration::from_millis(1500)));
        assert!(took < Duration::from_secs(3), "{took:?}");
        println!("stopped: seen after {took:?}");
    }
}
