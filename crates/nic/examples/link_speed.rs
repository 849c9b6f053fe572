//! Overhead of a [`UdpLink`] against plain sockets. Measures ping-pong and bulk, first with plain
//! sockets and then with two links, between two processes on loopback.
//!
//! `cargo run --release -p nobounce-nic --example link_speed`

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nobounce_nic::links::udp::{UdpConfig, UdpLink};
use nobounce_nic::links::{Link, TxBatch};

const A: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 40, 0, 1));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 40, 0, 2));
/// The bytes of rawudp.c, the yardstick.
const SMALL: usize = 32;
const SEGMENT: usize = 4132;
const BATCH: usize = 15;
const WARM_UP: u32 = 20_000;
const PINGS: u32 = 200_000;
const BULK: Duration = Duration::from_secs(2);
/// Receive timeout: the partner is gone, or the traffic has ended.
const SILENCE: Duration = Duration::from_millis(300);
const GIVE_UP: Duration = Duration::from_secs(20);

fn main() {
    if let Some(role) = std::env::args().nth(1) {
        return partner(&role);
    }
    let rounds = 3;
    let mut best = [f64::MAX, f64::MAX, 0.0, 0.0];
    for _ in 0..rounds {
        best[0] = plain_ping().min(best[0]);
        best[1] = link_ping().min(best[1]);
        best[2] = plain_blast().max(best[2]);
        best[3] = link_blast().max(best[3]);
    }
    println!("best of {rounds}          plain sockets      links");
    println!("half round trip    {:10.2} us {:10.2} us  ({:.2} x)", best[0], best[1], best[1] / best[0]);
    println!("bulk received      {:8.2} GB/s {:8.2} GB/s  ({:.2} x)", best[2], best[3], best[3] / best[2]);
}

/// The other process.
fn partner(role: &str) {
    match role {
        "plain-pong" => {
            let socket = plain(B, A);
            ready();
            let mut buffer = [0; 64];
            for _ in 0..WARM_UP + PINGS {
                spin(|| socket.recv(&mut buffer).is_ok());
                let _ = socket.send(&buffer[..SMALL]);
            }
        }
        "link-pong" => {
            let mut link = UdpLink::open(&UdpConfig::new(B)).expect("open");
            let mut batch = TxBatch::new(link.capabilities());
            ready();
            for _ in 0..WARM_UP + PINGS {
                spin(|| link.receive(&mut |_| {}) > 0);
                fill(&mut batch, A, SMALL);
                link.send(&mut batch);
            }
        }
        "plain-sink" => {
            let socket = plain(B, A);
            set(&socket, libc::UDP_GRO, 1);
            ready();
            let mut buffer = vec![0; 1 << 16];
            report(|| socket.recv(&mut buffer).unwrap_or(0));
        }
        _ => {
            let mut link = UdpLink::open(&UdpConfig::new(B)).expect("open");
            ready();
            report(|| {
                let mut bytes = 0;
                link.receive(&mut |d| bytes += d.bytes.len());
                bytes
            });
        }
    }
}

fn plain_ping() -> f64 {
    let socket = plain(A, B);
    let mut partner = start("plain-pong").0;
    let mut buffer = [0; 64];
    let time = timed(|| {
        let _ = socket.send(&[0; SMALL]);
        spin(|| socket.recv(&mut buffer).is_ok());
    });
    partner.wait().expect("partner");
    time
}

fn link_ping() -> f64 {
    let mut link = UdpLink::open(&UdpConfig::new(A)).expect("open");
    let mut batch = TxBatch::new(link.capabilities());
    let mut partner = start("link-pong").0;
    let time = timed(|| {
        fill(&mut batch, B, SMALL);
        link.send(&mut batch);
        spin(|| link.receive(&mut |_| {}) > 0);
    });
    partner.wait().expect("partner");
    time
}

fn plain_blast() -> f64 {
    let socket = plain(A, B);
    set(&socket, libc::UDP_SEGMENT, i32::try_from(SEGMENT).expect("small"));
    let partner = start("plain-sink");
    let buffer = vec![0; SEGMENT * BATCH];
    let begin = Instant::now();
    while begin.elapsed() < BULK {
        let _ = socket.send(&buffer);
    }
    received(partner)
}

fn link_blast() -> f64 {
    let mut link = UdpLink::open(&UdpConfig::new(A)).expect("open");
    let mut batch = TxBatch::new(link.capabilities());
    let partner = start("link-sink");
    let begin = Instant::now();
    while begin.elapsed() < BULK {
        for _ in 0..BATCH {
            fill(&mut batch, B, SEGMENT);
        }
        link.send(&mut batch);
    }
    received(partner)
}

/// Builds a packet, ICRC and all, as the engine does (the payload is whatever was there).
fn fill(batch: &mut TxBatch, dst: IpAddr, len: usize) {
    assert!(batch.put(dst, 0, len, |room| room[..12].fill(0)), "room");
}

/// Half a round trip in microseconds.
fn timed(mut ping: impl FnMut()) -> f64 {
    (0..WARM_UP).for_each(|_| ping());
    let begin = Instant::now();
    (0..PINGS).for_each(|_| ping());
    begin.elapsed().as_secs_f64() / f64::from(PINGS) / 2.0 * 1e6
}

fn spin(mut done: impl FnMut() -> bool) {
    let mut tries = 0_u32;
    let mut begin = None;
    while !done() {
        tries += 1;
        if tries.is_multiple_of(1 << 16) {
            let begin = *begin.get_or_insert_with(Instant::now);
            assert!(begin.elapsed() < GIVE_UP, "a packet was lost");
        }
    }
}

/// Receives until the traffic ends and prints GB/s.
fn report(mut receive: impl FnMut() -> usize) {
    let (mut first, mut last, mut bytes) = (None, Instant::now(), 0.0);
    let mut empty = 0_u32;
    while first.is_none() || empty < 1 << 10 || last.elapsed() < SILENCE {
        let got = receive();
        if got == 0 {
            empty += 1;
            assert!(first.is_some() || last.elapsed() < GIVE_UP, "nothing came");
            continue;
        }
        empty = 0;
        last = Instant::now();
        first.get_or_insert(last);
        bytes += f64::from(u32::try_from(got).unwrap_or(u32::MAX));
    }
    let time = last.duration_since(first.expect("came")).as_secs_f64();
    println!("{:.3}", bytes / time / 1e9);
}

fn ready() {
    println!("ready");
}

fn start(role: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    let me = std::env::current_exe().expect("own name");
    let mut child = Command::new(me).arg(role).stdout(Stdio::piped()).spawn().expect("start");
    let mut output = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    output.read_line(&mut line).expect("partner is ready");
    (child, output)
}

fn received((mut child, mut output): (Child, BufReader<std::process::ChildStdout>)) -> f64 {
    let mut line = String::new();
    output.read_line(&mut line).expect("a figure");
    child.wait().expect("partner");
    line.trim().parse().expect("a figure")
}

fn plain(local: IpAddr, peer: IpAddr) -> UdpSocket {
    let socket = UdpSocket::bind((local, 24791)).expect("bind");
    socket.connect((peer, 24791)).expect("connect");
    socket.set_nonblocking(true).expect("non-blocking");
    for name in [libc::SO_RCVBUF, libc::SO_SNDBUF] {
        set_at(&socket, libc::SOL_SOCKET, name, 4 << 20);
    }
    socket
}

fn set(socket: &UdpSocket, name: i32, value: i32) {
    set_at(socket, libc::SOL_UDP, name, value);
}

fn set_at(socket: &UdpSocket, level: i32, name: i32, value: i32) {
    let len = libc::socklen_t::try_from(size_of::<i32>()).expect("small");
    // SAFETY: the pointer and length describe one live integer.
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    assert_eq!(done, 0, "setsockopt {level} {name}");
}
