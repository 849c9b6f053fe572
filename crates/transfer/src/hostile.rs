//! Tests with clients that speak by themselves, as agents do not.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use nobounce::{Config, ConnectOptions, Connection, Device, Region};

use crate::frame::{Frame, VERSION};
use crate::frame_lane::SLOT;
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
    connection: Connection,
    memory: Region,
}

impl Client {
    fn new(agent: &Agent, generation: u64, host: &str, listens: Option<SocketAddr>) -> Self {
        let device = device();
        let connection = device.connect(agent.local_addr().unwrap(), &ConnectOptions::default()).unwrap();
        let memory = device.register(SLOT).unwrap();
        let (stream, _) = connection.side_channel().unwrap();
        let (name, host) = ("client".to_owned(), host.to_owned());
        let silence_ms = 60_000;
        let hello = Frame::Hello { version: VERSION, name, generation, silence_ms, host, listens };
        send(&stream, &[hello]);
        let peer = agent.accept(SOON).unwrap();
        Self { stream, peer, connection, memory }
    }

    /// Sends bytes on the lane; false when the agent takes no more.
    fn send_bytes(&self, bytes: &[u8]) -> bool {
        bytes.chunks(SLOT).all(|chunk| {
            self.memory.write_at(0, chunk).unwrap();
            let sent = self.connection.send(&self.memory, 0..chunk.len());
            sent.is_ok_and(|ticket| self.connection.wait(ticket, SOON).is_ok())
        })
    }

    fn send(&self, frames: &[Frame]) -> bool {
        self.send_bytes(&encoded(frames))
    }
}

fn encoded(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.append(&mut bytes));
    bytes
}

fn send(mut stream: &TcpStream, frames: &[Frame]) {
    stream.write_all(&encoded(frames)).unwrap();
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
    assert!(others[3].send(&[Frame::Version { version: 7 }]));
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
    let mut frames = vec![Frame::Version { version: 1 }];
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
    let frames: Vec<_> = (0..16 * MAX_CREDIT as u64 + 1).map(announce).collect();
    client.send(&frames);
    assert_eq!(gone(&client.peer), Gone::Protocol("more transfers announced than were granted"));
    let mut count = 0;
    // They end with the queue pair, which has frames for a client that takes none.
    while count < 16 * MAX_CREDIT
        && let Some(note) = agent.notification(SOON)
    {
        assert!(matches!(note.outcome, Outcome::Aborted { .. }), "{note:?}");
        count += 1;
    }
    assert_eq!((count, agent.notification(Duration::from_millis(20))), (16 * MAX_CREDIT, None));
}

/// With a key, the side channel is all that an attacker reaches.
#[test]
fn the_side_channel_carries_no_requests() {
    let agent = agent();
    for frame in [Frame::Message { bytes: vec![1] }, Frame::Announce { id: 1, tag: vec![1] }] {
        let client = Client::new(&agent, 1, "host", None);
        send(&client.stream, &[frame]);
        assert_eq!(gone(&client.peer), Gone::Protocol("a frame on the side channel that belongs on a lane"));
    }
    assert_eq!((agent.message(Duration::ZERO).map(|_| ()), agent.try_notification()), (None, None));
}

#[test]
fn a_lane_carries_nothing_but_frames() {
    let agent = agent();
    let client = Client::new(&agent, 1, "host", None);
    assert!(client.send_bytes(&[0xff; 100]));
    assert_eq!(gone(&client.peer), Gone::Protocol("a malformed frame"));
    let client = Client::new(&agent, 2, "host", None);
    client.send(&[Frame::Bye]);
    assert!(matches!(gone(&client.peer), Gone::Protocol(_)));
    // Immediate data, and more bytes than a receive has room for.
    let client = Client::new(&agent, 3, "host", None);
    client.connection.send_imm(&client.memory, 0..4, 7).unwrap();
    let region = client.connection.device().register(2 * SLOT).unwrap();
    client.connection.send(&region, 0..2 * SLOT).unwrap();
    assert!(matches!(gone(&client.peer), Gone::Protocol(_) | Gone::Broken(_)));
    let mut bytes = encoded(&[Frame::Message { bytes: vec![7; 1000] }]);
    let client = Client::new(&agent, 4, "host", None);
    // Frames may be cut anywhere.
    let rest = bytes.split_off(3);
    assert!(client.send_bytes(&bytes) && client.send_bytes(&rest));
    assert_eq!(agent.message(SOON).unwrap().1, [7; 1000]);
}
