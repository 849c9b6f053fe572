//! UDP through a real path. Waived where namespaces or the device are missing; without root, too:
//! a process with several threads, as tests are, cannot enter a user namespace.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nobounce_emulator::{Emulator, EmulatorError, End, PathConfig};

fn start(text: &str) -> Option<Emulator> {
    let config: PathConfig = text.parse().unwrap();
    match Emulator::start(&config) {
        Ok(emulator) => Some(emulator),
        Err(error) => {
            waive(&error);
            None
        }
    }
}

fn waive(error: &EmulatorError) {
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(required.split(',').all(|name| name != "path"), "{error}");
    if let Ok(file) = std::env::var("NOBOUNCE_WAIVERS") {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
        writeln!(file, "path: {error}").unwrap();
    }
}

fn socket(emulator: &Emulator, end: End, v6: bool) -> UdpSocket {
    let addr = if v6 { IpAddr::V6(end.v6()) } else { IpAddr::V4(end.v4()) };
    let socket = emulator.run(end, || UdpSocket::bind(SocketAddr::new(addr, 7000))).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    socket
}

fn connected(emulator: &Emulator, v6: bool) -> (UdpSocket, UdpSocket) {
    let (near, far) = (socket(emulator, End::Near, v6), socket(emulator, End::Far, v6));
    near.connect(far.local_addr().unwrap()).unwrap();
    far.connect(near.local_addr().unwrap()).unwrap();
    (near, far)
}

#[test]
fn datagrams_arrive_both_ways_after_the_delay() {
    let Some(emulator) = start("delay=20ms") else { return };
    for v6 in [false, true] {
        let (near, far) = connected(&emulator, v6);
        let (begin, mut got) = (Instant::now(), [0; 100]);
        near.send(b"there").unwrap();
        assert_eq!(far.recv(&mut got).unwrap(), 5);
        far.send(b"back").unwrap();
        assert_eq!(near.recv(&mut got).unwrap(), 4);
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(40), "{took:?}");
        assert!(took < Duration::from_millis(500), "{took:?}");
    }
    let [out, back] = emulator.stop();
    assert!(out.delivered >= 2 && back.delivered >= 2, "{out:?} {back:?}");
    assert_eq!((out.overrun, out.counts.lost), (0, 0));
}

#[test]
fn lost_datagrams_are_counted_and_the_others_arrive() {
    let Some(emulator) = start("loss=20%,seed=3") else { return };
    let (near, far) = connected(&emulator, false);
    let (mut arrived, mut got) = (0, [0; 100]);
    // As many as the default receive buffer holds.
    for _ in 0..200 {
        near.send(&[1; 50]).unwrap();
    }
    far.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    while far.recv(&mut got).is_ok() {
        arrived += 1;
    }
    let [out, _] = emulator.stop();
    assert!((20..60).contains(&out.counts.lost), "{out:?}");
    // The kernel sends some packets of its own through a new IPv6 interface.
    assert!(arrived <= out.delivered && out.delivered - arrived < 20, "{arrived}: {out:?}");
}

/// A path MTU below that of the device: the sender learns of it by ICMP, or not at all.
#[test]
fn a_long_datagram_meets_the_path_mtu() {
    for (icmp, v6) in [("yes", false), ("yes", true), ("no", false)] {
        let Some(emulator) = start(&format!("mtu=9000,path-mtu=1400,icmp={icmp}")) else { return };
        let (near, far) = connected(&emulator, v6);
        let (level, name, value) = if v6 {
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)
        } else {
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)
        };
        // SAFETY: the option is an int.
        let set = unsafe { libc::setsockopt(near.as_raw_fd(), level, name, (&raw const value).cast(), 4) };
        assert_eq!(set, 0);
        near.send(&[0; 4000]).unwrap();
        near.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        // The message arrives as an error of the next call.
        let told = near.recv(&mut [0; 10]).unwrap_err();
        let is_told = told.raw_os_error() == Some(libc::EMSGSIZE);
        assert_eq!(is_told, icmp == "yes", "{told}, IPv6: {v6}");
        near.send(&[0; 1300]).unwrap();
        assert_eq!(far.recv(&mut [0; 2000]).unwrap(), 1300, "IPv6: {v6}");
        let [out, _] = emulator.stop();
        assert_eq!(out.counts.too_long, 1);
    }
}

#[test]
fn a_command_runs_at_an_end_and_nothing_stays() {
    let Some(emulator) = start("mtu=9000") else { return };
    let mut command = std::process::Command::new("cat");
    command.arg("/proc/self/net/dev").stdout(std::process::Stdio::piped());
    emulator.enter(End::Far, &mut command).unwrap();
    let output = command.spawn().and_then(std::process::Child::wait_with_output).unwrap();
    let devices = String::from_utf8(output.stdout).unwrap();
    assert!(devices.contains("path0:") && !devices.contains("eth0:"), "{devices}");
    let before = emulator.run(End::Far, || std::fs::read_link("/proc/thread-self/ns/net")).unwrap();
    drop(emulator);
    let ours = std::fs::read_link("/proc/self/ns/net").unwrap();
    assert_ne!(before, ours, "this process stays where it was");
    let error = UdpSocket::bind((End::Near.v4(), 0)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
}
