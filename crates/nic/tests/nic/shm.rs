//! Packets between same-host peers through shared memory. The other tests run on it, too:
//! `NOBOUNCE_LINK=shm`.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)] // small constants

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::common::on_gpu::{GpuMethod, OnGpu};
use crate::common::{End, MIB, config, pair_with, patterns, until};
use fake_cuda::client::StandIn;
use nobounce_nic::soft::{Config, LinkChoice};
use nobounce_nic::work::{Mtu, Operation, SendRequest, Status};

fn near(addr: &str) -> Config {
    Config { link: LinkChoice::Auto, ..config(addr) }
}

fn far(addr: &str) -> Config {
    Config { link: LinkChoice::Udp, ..config(addr) }
}

fn counter(end: &End, name: &str) -> u64 {
    end.device.link_counters().iter().find(|(n, _)| *n == name).map_or(0, |(_, count)| *count)
}

fn write(a: &End, b: &End, len: u32) {
    a.fill(7);
    b.fill(0);
    let write = Operation::Write(b.remote(64));
    a.qps[0].post_send(&SendRequest::new(1, write, &a.sge(0, len))).unwrap();
    a.succeed(1);
    assert!(b.bytes(64, len as usize) == a.bytes(0, len as usize));
}

#[test]
fn two_devices_that_are_near_send_no_datagram() {
    let (a, b) = pair_with(&near("127.66.1.1"), &near("127.66.1.1"), MIB, Mtu::Mtu4096);
    for len in [1, 4096, 100_000, 1_000_000] {
        write(&a, &b, len);
    }
    for end in [&a, &b] {
        assert!(counter(end, "shm_tx_packets") > 0 && counter(end, "shm_rx_packets") > 0);
        assert_eq!(counter(end, "udp_tx_packets"), 0);
    }
}

/// Each direction takes the link that its sender selects.
#[test]
fn one_who_knows_no_shared_memory_is_reached_by_udp() {
    let (a, b) = pair_with(&near("127.66.1.2"), &far("127.66.1.2"), MIB, Mtu::Mtu1024);
    write(&a, &b, 100_000);
    write(&b, &a, 100_000);
    for end in [&a, &b] {
        assert_eq!((counter(end, "shm_tx_packets"), counter(end, "shm_rx_packets")), (0, 0));
        assert!(counter(end, "udp_tx_packets") > 0);
        assert_eq!(end.counter("icrc_errors"), 0);
    }
}

/// A socket of the same kind with that abstract name.
fn occupy(name: &str) -> OwnedFd {
    // SAFETY: no pointers are passed; the result is checked.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    // SAFETY: `fd` was just opened and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_un is plain integers; zeros are a valid value.
    let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in addr.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    // SAFETY: the pointer and length describe a live address.
    let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len as libc::socklen_t) };
    assert_eq!(bound, 0, "{name} is free");
    fd
}

/// Without shared memory a device sends by UDP, and reports the reason.
#[test]
fn where_it_cannot_be_had_packets_take_udp_and_the_reason_is_kept() {
    // Occupy all socket names of that address.
    let taken: Vec<OwnedFd> =
        (0..=255).map(|slot| occupy(&format!("nobounce/shm/127.66.1.30/{slot}"))).collect();
    let (a, b) = pair_with(&near("127.66.1.30"), &near("127.66.1.30"), MIB, Mtu::Mtu4096);
    write(&a, &b, 100_000);
    write(&b, &a, 100_000);
    for end in [&a, &b] {
        assert_eq!(counter(end, "shm_tx_packets"), 0);
        assert!(counter(end, "udp_tx_packets") > 0);
        let reasons = end.device.fallbacks();
        assert!(reasons.len() == 1 && reasons[0].contains("all packets take UDP: "), "{reasons:?}");
        assert!(end.device.report().unwrap().contains("\"udp_reason\": [\"no shared memory with any peer"));
    }
    drop(taken);
    let (a, b) = pair_with(&near("127.66.1.31"), &far("127.66.1.31"), MIB, Mtu::Mtu4096);
    assert!(a.device.fallbacks()[0].contains("it offers none"), "{:?}", a.device.fallbacks());
    assert!(b.device.fallbacks().is_empty(), "it was told to take UDP");
}

/// No CPU copy on the sender's side: the receiver reads the chunk that the copy engine filled.
#[test]
fn what_the_copy_engine_fetched_is_read_where_it_lies() {
    let gpu = StandIn::program();
    for (n, mtu) in [Mtu::Mtu4096, Mtu::Mtu256].into_iter().enumerate() {
        let addr = format!("127.66.1.{}", 20 + n);
        let (a, b) = pair_with(&near(&addr), &near(&addr), 4096, mtu);
        // Without a window at the sender, all of it must be fetched.
        let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::NoWindow), OnGpu::new(&b, gpu, GpuMethod::Window));
        for (round, len) in [20_001, 65_537, 700_003, 1_500_000].into_iter().enumerate() {
            at_a.fill(u8::try_from(round).unwrap() + 1);
            let before = counter(&a, "shm_leased_bytes");
            let write = Operation::Write(at_b.remote(3));
            a.qps[0].post_send(&SendRequest::new(1, write, &[at_a.sge(5, len)])).unwrap();
            a.succeed(1);
            at_b.holds(3, &patterns(u8::try_from(round).unwrap() + 1, 5, len));
            let leased = counter(&a, "shm_leased_bytes") - before;
            assert!(leased >= len as u64 / 2, "{leased} of {len} bytes");
        }
        assert_eq!(counter(&a, "udp_tx_packets"), 0);
    }
}

/// The same for READs of a peer: several packets travel as one run. The next pieces of a long READ
/// are prefetched while this one is answered. (Without that, each piece of 128 KiB begins with a
/// short fetch of its own.)
#[test]
fn what_is_read_from_a_gpu_is_fetched_ahead_and_answered_in_runs() {
    let gpu = StandIn::program();
    let (a, b) = pair_with(&near("127.66.1.22"), &near("127.66.1.22"), 2 * MIB, Mtu::Mtu4096);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::NoWindow);
    at_b.fill(9);
    const LEN: usize = 1_500_000;
    until("a READ that is fetched ahead", || {
        let before = (gpu.calls(c"cuMemcpyDtoHAsync_v2"), counter(&b, "shm_tx_bytes"));
        a.buffer.write_at(0, &[0; LEN]).unwrap();
        let to = a.sge(0, u32::try_from(LEN).unwrap());
        a.qps[0].post_send(&SendRequest::new(1, Operation::Read(at_b.remote(5)), &to)).unwrap();
        a.succeed(1);
        assert!(a.bytes(0, LEN) == patterns(9, 5, LEN));
        let fetches = gpu.calls(c"cuMemcpyDtoHAsync_v2") - before.0;
        // Packets that go as one have one header: alone they have 16 bytes each.
        let headers = counter(&b, "shm_tx_bytes") - before.1 - LEN as u64;
        println!("{fetches} fetches, {headers} bytes of headers for {} packets", LEN.div_ceil(4096));
        fetches <= 18 && headers < 4000
    });
    assert!(counter(&b, "shm_leased_bytes") > 0);
}

/// The other application does not poll: the doorbell wakes its engine thread.
#[test]
fn one_who_sleeps_is_woken() {
    let (a, b) = pair_with(&near("127.66.1.3"), &near("127.66.1.3"), 8192, Mtu::Mtu4096);
    for _ in 0..200 {
        write(&a, &b, 5000);
        std::thread::sleep(Duration::from_micros(300));
    }
    assert!(counter(&a, "shm_wakeups") > 0);
}

/// The other device closes: the ring is dropped, and the protocol detects that the peer does not
/// answer.
#[test]
fn one_who_goes_is_missed_in_time_and_replaced() {
    let (a, b) = pair_with(&near("127.66.1.4"), &near("127.66.1.4"), MIB, Mtu::Mtu4096);
    write(&a, &b, 5000);
    let gone = Operation::Write(b.remote(64));
    drop(b);
    let begin = Instant::now();
    a.qps[0].post_send(&SendRequest::new(1, gone, &a.sge(0, 5000))).unwrap();
    assert_eq!(a.status(), Status::RetryExceeded);
    assert!(begin.elapsed() < Duration::from_secs(20));
    // Another device takes its slot, with a ring of its own.
    let (c, d) = pair_with(&near("127.66.1.4"), &near("127.66.1.4"), MIB, Mtu::Mtu4096);
    write(&c, &d, 5000);
    assert_eq!(counter(&c, "udp_tx_packets"), 0);
}

/// Injected loss and corruption are detected there, too.
#[test]
fn faults_are_survived() {
    let fault = "loss=0.02,corrupt=0.02,dup=0.02,reorder=0.02,seed=3".parse().unwrap();
    let bad = Config { fault: Some(fault), ..near("127.66.1.5") };
    let (a, b) = pair_with(&bad, &bad, MIB, Mtu::Mtu1024);
    for _ in 0..5 {
        write(&a, &b, 300_000);
    }
    assert!(counter(&a, "shm_tx_packets") > 0);
    until("damage is seen", || a.counter("icrc_errors") + b.counter("icrc_errors") > 0);
}
