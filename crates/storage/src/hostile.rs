//! Tests with clients that send requests by themselves, as [`FileClient`](crate::FileClient) does
//! not.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use nobounce::{Config, Device};
use nobounce_transfer::{Agent, AgentOptions, Gone, Peer};

use crate::request::{FileRange, Kind, MAX_FILES, MAX_REQUESTS, Message, RANGES_PER_MESSAGE};
use crate::{FileClient, FileServer, MAX_RANGES, ServerOptions};

const SOON: Duration = Duration::from_secs(20);

fn device() -> Device {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let addr = [127, 180 + high % 20, low, NEXT.fetch_add(1, Ordering::Relaxed)];
    Device::open_with(&Config { addr: addr.into(), ..Config::from_env().unwrap() }).unwrap()
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

/// Each ends its own connection, and no other one.
#[test]
fn requests_against_the_limits_end_the_connection() {
    let folder = std::env::temp_dir().join(format!("storage-hostile-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("file"), [7; 4096]).unwrap();
    let options = ServerOptions { listen: "127.0.0.1:0".parse().unwrap(), ..ServerOptions::default() };
    let server = FileServer::start(&device(), &folder, options).unwrap();
    let client = FileClient::connect(&device(), server.local_addr(), SOON).unwrap();
    assert_eq!(client.stat("file", SOON).unwrap(), 4096);

    let begin = |id| Message::Begin { id, kind: Kind::Read, export: "memory".to_owned() };
    let file = |id| Message::File { id, path: "file".to_owned() };
    let range = FileRange { offset: 0, len: 1, memory: 0 };
    let ranges = |id| Message::Ranges { id, ranges: vec![range; RANGES_PER_MESSAGE] };
    let many = |message: Message, count: usize| std::iter::repeat_n(message, count);
    let go = |id| Message::Go { id };
    let short = |kind| Message::Short {
        id: 1,
        kind,
        export: "memory".to_owned(),
        path: "file".to_owned(),
        ranges: vec![range],
    };
    let requests: [Vec<Message>; 6] = [
        vec![go(1)],
        vec![begin(1), file(1), go(2)],
        vec![begin(1), ranges(1), go(1)],
        [begin(1)].into_iter().chain(many(file(1), MAX_FILES + 1)).chain([go(1)]).collect(),
        [begin(1), file(1)]
            .into_iter()
            .chain(many(ranges(1), MAX_RANGES / RANGES_PER_MESSAGE + 1))
            .chain([go(1)])
            .collect(),
        // More than are carried out meanwhile.
        many(short(Kind::Stat), 1000 * MAX_REQUESTS).collect(),
    ];
    let mut requests: Vec<Vec<Vec<u8>>> =
        requests.into_iter().map(|request| request.iter().map(Message::encode).collect()).collect();
    requests.push(vec![vec![0xff; 100]]);
    requests.push(vec![Vec::new()]);
    for request in requests {
        let agent = Agent::new(&device(), "hostile", AgentOptions::default()).unwrap();
        let peer = agent.connect(server.local_addr(), SOON).unwrap();
        let _ = request.iter().try_for_each(|message| peer.send_message(message));
        assert_eq!(gone(&peer), Gone::Closed);
    }
    assert_eq!(client.stat("file", SOON).unwrap(), 4096);
    std::fs::remove_dir_all(&folder).unwrap();
}
