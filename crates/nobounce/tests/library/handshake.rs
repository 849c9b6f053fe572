//! Foreign protocols, old versions and silence on the side channel.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::{SOON, device, pair, waived_for_ipv6};
use nobounce::{AcceptError, ConnectError, ConnectOptions, HANDSHAKE_VERSION, HandshakeError};

const BRIEF: Duration = Duration::from_millis(300);

fn hasty() -> ConnectOptions {
    ConnectOptions { timeout: BRIEF, ..ConnectOptions::default() }
}

/// The listener's error for a client that sends `bytes`. The client keeps the connection open
/// unless `hangs_up`.
fn accept_stranger(bytes: &[u8], hangs_up: bool) -> (HandshakeError, Duration) {
    let listener = device("127.72.0.1").listen_with("127.0.0.1:0", &hasty()).unwrap();
    let mut stranger = TcpStream::connect(listener.local_addr()).unwrap();
    stranger.write_all(bytes).unwrap();
    let line = (!hangs_up).then_some(stranger);
    let start = Instant::now();
    let error = listener.accept(SOON).unwrap_err();
    drop(line);
    let AcceptError::Handshake { source, .. } = error else { panic!("{error}") };
    (source, start.elapsed())
}

/// What a connecting end makes of a listener that says `bytes`.
fn connect_to(bytes: Vec<u8>) -> (HandshakeError, Duration) {
    let (at, other) = fake_listener(bytes);
    let start = Instant::now();
    let error = device("127.72.0.2").connect(at, &hasty()).unwrap_err();
    let took = start.elapsed();
    other.join().unwrap();
    let ConnectError::Handshake { source, .. } = error else { panic!("{error}") };
    (source, took)
}

fn fake_listener(bytes: Vec<u8>) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(&bytes);
        // Until the other end hangs up.
        stream.set_read_timeout(Some(SOON)).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    (at, other)
}

fn greeting(version: u32) -> Vec<u8> {
    [&b"nobounce"[..], &version.to_le_bytes()].concat()
}

fn with_frame(len: u32, body: &[u8]) -> Vec<u8> {
    [greeting(HANDSHAKE_VERSION), len.to_le_bytes().to_vec(), body.to_vec()].concat()
}

#[test]
fn who_speaks_something_else_is_told_apart_at_once() {
    let (error, took) = accept_stranger(b"GET / HTTP/1.1\r\n\r\n", false);
    assert_eq!(
        error.to_string(),
        "the peer does not speak the nobounce protocol: it sent \"GET / HT\"; check the port"
    );
    assert!(took < BRIEF, "{took:?}");
    let (error, _) = connect_to(b"SSH-2.0-whatever\r\n".to_vec());
    assert!(matches!(error, HandshakeError::NotNobounce { .. }), "{error}");
}

#[test]
fn silence_ends_with_the_deadline() {
    for bytes in [&b""[..], b"nobo", &greeting(HANDSHAKE_VERSION), &with_frame(100, b"part")] {
        let (error, took) = accept_stranger(bytes, false);
        assert!(matches!(error, HandshakeError::Timeout { .. }), "{error}");
        assert!(took >= BRIEF && took < BRIEF + Duration::from_secs(2), "{took:?}");
        let (error, took) = connect_to(bytes.to_vec());
        assert!(matches!(error, HandshakeError::Timeout { .. }), "{error}");
        assert!(took < BRIEF + Duration::from_secs(2), "{took:?}");
    }
}

#[test]
fn hanging_up_is_noticed_at_once() {
    for bytes in [&b""[..], b"nobo", &greeting(HANDSHAKE_VERSION), &with_frame(100, b"part")] {
        let (error, took) = accept_stranger(bytes, true);
        assert!(matches!(error, HandshakeError::Closed { .. }), "{error}");
        assert!(took < BRIEF, "{took:?}");
    }
}

#[test]
fn both_ends_name_both_versions() {
    let (error, _) = accept_stranger(&greeting(HANDSHAKE_VERSION + 1), false);
    assert!(matches!(error, HandshakeError::Version { ours: 3, theirs: 4 }), "{error}");
    let (error, _) = connect_to(greeting(7));
    assert!(
        error.to_string().contains("the peer uses 7") && error.to_string().contains("this end 3"),
        "{error}"
    );
    // A newer peer gets our preamble back, to make its own sentence of it.
    let listener = device("127.72.0.3").listen_with("127.0.0.1:0", &hasty()).unwrap();
    let mut newer = TcpStream::connect(listener.local_addr()).unwrap();
    newer.write_all(&greeting(9)).unwrap();
    newer.write_all(&[0; 64]).unwrap();
    listener.accept(SOON).unwrap_err();
    let mut answer = [0; 12];
    newer.set_read_timeout(Some(SOON)).unwrap();
    newer.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..], greeting(HANDSHAKE_VERSION));
}

#[test]
fn nonsense_after_the_greeting() {
    for bytes in [
        with_frame(u32::MAX, b""),
        with_frame(1 << 20, b""),
        with_frame(0, b""),
        with_frame(9, &[0xff; 9]),
        // A well-formed hello: 127.0.0.1, no LID, MTU 1024, no READs, no queue pairs.
        with_frame(10, &[0, 127, 0, 0, 1, 0, 0x80, 0x08, 0, 0]),
        // It says that 2^32 queue pairs follow.
        with_frame(15, &[0, 127, 0, 0, 1, 0, 0x80, 0x08, 1, 0x80, 0x80, 0x80, 0x80, 0x10, 2]),
    ] {
        for error in [accept_stranger(&bytes, false).0, connect_to(bytes.clone()).0] {
            assert!(matches!(error, HandshakeError::Malformed { .. }), "{bytes:x?}: {error}");
        }
    }
}

#[test]
fn random_bytes_never_do_harm() {
    for seed in 1..40 {
        let mut bytes = crate::common::pattern(200, seed);
        if seed % 2 == 0 {
            let len = bytes[12] % 100;
            bytes = with_frame(u32::from(len), &bytes[13..13 + usize::from(len)]);
        }
        let (error, took) = accept_stranger(&bytes, true);
        assert!(!error.to_string().is_empty() && took < SOON);
    }
}

#[test]
fn the_listener_goes_on_after_a_stranger() {
    let listener = device("127.72.0.4").listen_with("127.0.0.1:0", &hasty()).unwrap();
    let at = listener.local_addr();
    let mut stranger = TcpStream::connect(at).unwrap();
    stranger.write_all(b"whatever this is").unwrap();
    assert!(listener.accept(SOON).is_err());
    let friend =
        std::thread::spawn(move || device("127.72.0.4").connect(at, &ConnectOptions::default()).unwrap());
    listener.accept(SOON).unwrap();
    friend.join().unwrap();
}

#[test]
fn accept_times_out_and_connect_is_refused() {
    let listener = device("127.72.0.5").listen("127.0.0.1:0").unwrap();
    let at = listener.local_addr();
    let start = Instant::now();
    assert!(matches!(listener.accept(BRIEF), Err(AcceptError::Timeout(_))));
    assert!(start.elapsed() >= BRIEF && start.elapsed() < SOON);
    drop(listener);
    let refused = device("127.72.0.5").connect(at, &hasty()).unwrap_err();
    assert!(
        refused.to_string().contains(&at.to_string()) && refused.to_string().contains("the peer listens"),
        "{refused}"
    );
    let nowhere = device("127.72.0.5").connect("no port here", &hasty()).unwrap_err();
    assert!(matches!(nowhere, ConnectError::Resolve(_)), "{nowhere}");
}

#[test]
fn a_listener_that_never_accepts() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let start = Instant::now();
    let error = device("127.72.0.6").connect(listener.local_addr().unwrap(), &hasty()).unwrap_err();
    assert!(
        matches!(error, ConnectError::Handshake { source: HandshakeError::Timeout { .. }, .. }),
        "{error}"
    );
    assert!(start.elapsed() < BRIEF + Duration::from_secs(2));
}

#[test]
fn options_out_of_range() {
    for qps in [0, nobounce::MAX_QPS + 1] {
        let options = ConnectOptions { qps, ..hasty() };
        let error = device("127.72.0.7").connect("127.0.0.1:1", &options).unwrap_err();
        assert!(matches!(error, ConnectError::Lanes { .. }), "{error}");
    }
    // The listening side cannot create queues that deep, and the connecting side gets the reason.
    let deep = ConnectOptions { depth: 1 << 20, ..ConnectOptions::default() };
    let listener = device("127.72.0.7").listen_with("127.0.0.1:0", &deep).unwrap();
    let at = listener.local_addr();
    let active = std::thread::spawn(move || device("127.72.0.7").connect(at, &ConnectOptions::default()));
    assert!(listener.accept(SOON).is_err());
    let error = active.join().unwrap().unwrap_err();
    let words = error.to_string();
    let why = words.contains("queue depth") || words.contains("are asked for");
    assert!(words.contains("refused") && why, "{words}");
}

#[test]
fn the_families_must_match() {
    if waived_for_ipv6("the_families_must_match") {
        return;
    }
    let listener = device("::1").listen("127.0.0.1:0").unwrap();
    let at = listener.local_addr();
    let active = std::thread::spawn(move || device("127.72.0.8").connect(at, &ConnectOptions::default()));
    assert!(matches!(
        listener.accept(SOON),
        Err(AcceptError::Handshake { source: HandshakeError::Family { .. }, .. })
    ));
    let error = active.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("NOBOUNCE_ADDR"), "{error}");
}

#[test]
fn connections_come_and_go() {
    for _ in 0..20 {
        let (a, b) = pair("127.72.0.9", &ConnectOptions::default());
        drop(a);
        assert!(b.recv_message(SOON).is_err());
    }
}
