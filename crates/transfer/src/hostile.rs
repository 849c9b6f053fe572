//! Tests with clients that speak by themselves, as agents do not.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use nobounce::{Config, ConnectOptions, Connection, Device};

use crate::frame::{Frame, VERSION};
use crate::notification::MAX_CREDIT;
use crate::{Agent, AgentOptions, Gone, Outcome, Peer};

const SOON: Duration = Duration::from_secs(20);

fn device() -> Device {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let addr = [127, 210 + high % 32, low, NEXT.fetch_add(1, Ordering::Relaxed)];
    Device::open_with(&Config { addr: addr.into(), ..Config::from_env().unwrap() }).unwrap()
}

/// A client of this agent, which has said hello, and the agent's peer.
struct Client {
    stream: TcpStream,
    peer: Peer,
    _connection: Connection,
}

impl Client {
    fn new(agent: &Agent, generation: u64, host: &str, listens: Option<SocketAddr>) -> Self {
        let connection = device().connect(agent.local_addr().unwrap(), &ConnectOptions::default()).unwrap();
        let (stream, _) = connection.side_channel().unwrap();
        let (name, host) = ("client".to_owned(), host.to_owned());
        let silence_ms = 60_000;
        let hello = Frame::Hello { version: VERSION, name, generation, silence_ms, host, listens };
        send(&stream, &[hello]);
        let peer = agent.accept(SOON).unwrap();
        Self { stream, peer, _connection: connection }
    }
}

fn send(mut stream: &TcpStream, frames: &[Frame]) {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.append(&mut bytes));
    stream.write_all(&bytes).unwrap();
}

fn agent() -> Agent {
    let options = AgentOptions { silence: Duration::from_secs(30), ..AgentOptions::default() };
    Agent::listening(&device(), "target", "127.0.0.1:0", options).unwrap()
}

fn gone(peer: &Peer) -> Gone {
    let start = Instant::now();
    loop {
        if let Some(gone) = peer.gone() {
            return gone;
        }
        assert!(start.elapsed() < SOON, "it stays");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn only_an_agent_that_listens_at_the_same_place_replaces_another() {
    let agent = agent();
    let place = Some("0.0.0.0:9000".parse().unwrap());
    let first = Client::new(&agent, 1, "host", place);
    let others = [
        Client::new(&agent, 2, "other host", place),
        Client::new(&agent, 3, "host", Some("0.0.0.0:9001".parse().unwrap())),
        Client::new(&agent, 4, "host", None),
        Client::new(&agent, 1, "host", place),
    ];
    // The agent's thread has added them.
    send(&others[3].stream, &[Frame::Version { version: 7 }]);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(first.peer.gone(), None);
    let restarted = Client::new(&agent, 5, "host", place);
    assert_eq!(gone(&first.peer), Gone::Replaced);
    assert!(others[..3].iter().chain([&restarted]).all(|client| client.peer.gone().is_none()));
}

#[test]
fn late_frames_are_dropped_and_counted() {
    const LATE: u64 = 200_000;
    let agent = agent();
    let client = Client::new(&agent, 1, "host", None);
    // The first frame ends the connection; the others are as those of an old generation.
    let mut frames = vec![Frame::Done { id: 1, bytes: 1 }];
    frames.extend((0..LATE).map(|_| Frame::KeepAlive));
    send(&client.stream, &frames);
    assert!(matches!(gone(&client.peer), Gone::Protocol(_)));
    let start = Instant::now();
    while agent.counters().late_frames == 0 {
        assert!(start.elapsed() < SOON, "they are not counted");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(agent.counters().late_frames, LATE);
    assert_eq!(agent.try_notification(), None);
}

#[test]
fn announcements_beyond_the_credit_end_the_connection() {
    let agent = agent();
    let client = Client::new(&agent, 1, "host", None);
    let announce = |id| Frame::Announce { id, tag: vec![1] };
    // Credit is granted anew up to the limit of one peer.
    for id in 0..16 * MAX_CREDIT as u64 + 1 {
        let mut bytes = Vec::new();
        announce(id).append(&mut bytes);
        if (&client.stream).write_all(&bytes).is_err() {
            break;
        }
    }
    assert_eq!(gone(&client.peer), Gone::Protocol("more transfers announced than were granted"));
    let mut count = 0;
    while let Some(note) = agent.notification(Duration::from_millis(200)) {
        assert!(matches!(note.outcome, Outcome::Aborted { .. }), "{note:?}");
        count += 1;
    }
    assert_eq!(count, 16 * MAX_CREDIT);
}
