//! Two and more UDP links in one process exchange packets through the kernel.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use nobounce_nic::links::udp::{LocalPorts, UdpConfig, UdpLink};
use nobounce_nic::links::{Link, OpenError, TxBatch};
use nobounce_protocol::wire::ROCE_PORT;
use nobounce_protocol::wire::icrc::{Flow, IcrcCheck};

/// Longer than any of these exchanges takes: a test that waits so long has failed.
const LIMIT: Duration = Duration::from_secs(20);

fn open(addr: &str) -> UdpLink {
    let local_ports = LocalPorts::Any; // plain sockets send here, too
    UdpLink::open(&UdpConfig { local_ports, ..UdpConfig::new(addr.parse().unwrap()) }).unwrap()
}

/// Puts a packet for `slot` into the batch; its payload holds `number` and a pattern.
fn put(batch: &mut TxBatch, dst: IpAddr, slot: u8, number: u32, len: usize) -> bool {
    batch.put(dst, 3, len, |room| {
        for (i, byte) in room.iter_mut().enumerate() {
            *byte = u8::try_from((i + number as usize) % 251).unwrap();
        }
        room[4..8].copy_from_slice(&[0, slot, 0, 7]);
        room[8..12].copy_from_slice(&number.to_be_bytes());
    })
}

fn number_of(packet: &[u8]) -> u32 {
    u32::from_be_bytes(packet[8..12].try_into().unwrap())
}

/// Receives until `want` packets came; each must be whole and come from `src`.
fn collect(link: &mut UdpLink, src: IpAddr, want: usize) -> Vec<(u32, usize)> {
    let (mut got, local) = (Vec::new(), link.local());
    let start = Instant::now();
    while got.len() < want {
        assert!(start.elapsed() < LIMIT, "{} of {want} packets; {:?}", got.len(), link.counters());
        link.receive(&mut |d| {
            assert_eq!(d.src, src);
            let flow = Flow { src, dst: local, src_port: d.src_port, dst_port: ROCE_PORT };
            // The guess is right where the kernel keeps the batch together; where it does not, the
            // id is solved for.
            assert!(matches!(flow.verify(d.ip_id, d.bytes), IcrcCheck::Valid { .. }), "ICRC of {d:?}");
            let number = number_of(d.bytes);
            for (i, byte) in d.bytes[..d.bytes.len() - 4].iter().enumerate().skip(12) {
                assert_eq!(usize::from(*byte), (i + number as usize) % 251, "byte {i} of packet {number}");
            }
            got.push((number, d.bytes.len()));
        });
    }
    assert_eq!(link.receive(&mut |_| {}), 0, "more than was sent");
    got
}

fn counter(link: &UdpLink, name: &str) -> u64 {
    link.counters().into_iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no counter {name}")).1
}

fn exchange(a: &str, b: &str, gso: bool, gro: bool) {
    let config = |addr: &str| UdpConfig { gso, gro, ..UdpConfig::new(addr.parse().unwrap()) };
    let mut from = UdpLink::open(&config(a)).unwrap();
    let mut to = UdpLink::open(&config(b)).unwrap();
    assert!(gso || from.capabilities().max_segments == 1);
    assert!(gro || !to.capabilities().receive_offload);
    let mut batch = TxBatch::new(from.capabilities());
    let mut number = 0;
    // Each round stays below the smallest receive buffer, so that nothing may be lost.
    for sizes in
        [vec![16; 40], vec![20, 24, 4112, 4112, 60], (16..200).collect(), vec![1040; 30], vec![4140; 12]]
    {
        let want: Vec<_> = sizes.iter().map(|len| (number + 1, *len)).collect();
        let want: Vec<_> =
            want.iter().enumerate().map(|(i, (n, l))| (n + u32::try_from(i).unwrap(), *l)).collect();
        for (n, len) in &want {
            assert!(put(&mut batch, to.local(), to.slot(), *n, *len));
        }
        number += u32::try_from(want.len()).unwrap();
        from.send(&mut batch);
        assert!(batch.is_empty() && !from.send_blocked());
        assert_eq!(collect(&mut to, from.local(), want.len()), want, "gso {gso} gro {gro}");
    }
    assert_eq!(counter(&from, "udp_tx_packets"), u64::from(number));
    assert_eq!(counter(&to, "udp_rx_packets"), u64::from(number));
    if gso {
        assert!(counter(&from, "udp_tx_calls") < u64::from(number) / 4, "packets leave in groups");
    }
}

#[test]
fn packets_of_all_sizes_arrive_whole_and_in_order() {
    for (i, (gso, gro)) in
        [(true, true), (true, false), (false, true), (false, false)].into_iter().enumerate()
    {
        exchange(&format!("127.21.0.{}", i + 1), &format!("127.21.1.{}", i + 1), gso, gro);
    }
}

/// rdma_rxe sends a zero UDP checksum: over IPv6 a socket drops such datagrams unless it opts in.
#[test]
fn a_udp_checksum_of_zero_is_taken_over_ipv6() {
    use std::os::fd::AsRawFd;
    let Ok(kernel) = std::net::UdpSocket::bind("[::1]:0") else {
        println!("waived (this machine has no IPv6 loopback)");
        return;
    };
    let (one, len) = (1_i32, u32::try_from(size_of::<i32>()).unwrap());
    // SAFETY: the descriptor is open; the pointer and length describe one live integer.
    let set = unsafe {
        libc::setsockopt(
            kernel.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_NO_CHECK6_TX,
            (&raw const one).cast(),
            len,
        )
    };
    assert_eq!(set, 0);
    let mut link = open("::1");
    let mut packet = [0; 16];
    packet[4..8].copy_from_slice(&[0, link.slot(), 0, 7]);
    kernel.send_to(&packet, ("::1", ROCE_PORT)).unwrap();
    let (mut got, start) = (0, Instant::now());
    while got == 0 {
        assert!(start.elapsed() < Duration::from_secs(5), "the datagram was dropped");
        link.receive(&mut |d| got += usize::from(d.bytes == packet));
    }
}

#[test]
fn packets_of_all_sizes_arrive_over_ipv6() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        println!("waived (this machine has no IPv6 loopback)");
        return;
    }
    for (gso, gro) in [(true, true), (true, false), (false, true), (false, false)] {
        exchange("::1", "::1", gso, gro);
    }
}

#[test]
fn the_guessed_identification_is_right_on_loopback() {
    let (mut a, mut b) = (open("127.22.0.1"), open("127.22.0.2"));
    let mut batch = TxBatch::new(a.capabilities());
    (0..20).for_each(|n| assert!(put(&mut batch, b.local(), b.slot(), n, 300)));
    let want: Vec<u16> = batch.packets().iter().map(|p| p.ip_id).collect();
    a.send(&mut batch);
    let mut ids = Vec::new();
    let start = Instant::now();
    while ids.len() < 20 {
        assert!(start.elapsed() < LIMIT);
        b.receive(&mut |d| {
            let flow = Flow {
                src: d.src,
                dst: "127.22.0.2".parse().unwrap(),
                src_port: d.src_port,
                dst_port: ROCE_PORT,
            };
            assert_eq!(flow.verify(d.ip_id, d.bytes), IcrcCheck::Valid { ip_id: Some(d.ip_id) });
            ids.push(d.ip_id);
        });
    }
    assert_eq!(ids, want);
}

/// Sends `each` packets from `from` to every one of `to`, and checks that they and no others arrive
/// there.
fn reach_all(from: &mut UdpLink, to: &mut [UdpLink], each: u32) {
    let mut batch = TxBatch::new(from.capabilities());
    for n in 0..each {
        for link in &*to {
            let number = u32::from(link.slot()) * 1000 + n;
            assert!(put(&mut batch, link.local(), link.slot(), number, 100));
        }
    }
    from.send(&mut batch);
    let mut got: Vec<Vec<u32>> = vec![Vec::new(); to.len()];
    let start = Instant::now();
    while got.iter().any(|g| g.len() < each as usize) {
        assert!(start.elapsed() < LIMIT, "{got:?}");
        for (link, got) in to.iter_mut().zip(&mut got) {
            link.receive(&mut |d| got.push(number_of(d.bytes)));
        }
    }
    for (link, mut got) in to.iter().zip(got) {
        got.sort_unstable(); // a packet handed over may come later than its neighbours
        let base = u32::from(link.slot()) * 1000;
        assert_eq!(got, (base..base + each).collect::<Vec<_>>(), "slot {}", link.slot());
    }
}

#[test]
fn packets_reach_the_slot_they_are_for() {
    let mut from = open("127.23.0.1");
    let mut to: Vec<_> = (0..3).map(|_| open("127.23.0.2")).collect();
    assert_eq!(to.iter().map(Link::slot).collect::<Vec<_>>(), [0, 1, 2]);
    reach_all(&mut from, &mut to, 8);
    assert!(to.iter().all(|l| counter(l, "handed_over") == 0), "the kernel steers, nothing is handed over");
}

#[test]
fn packets_reach_their_slot_after_another_device_closed() {
    let sum = |to: &[UdpLink], name| to.iter().map(|l| counter(l, name)).sum::<u64>();
    // Where no socket has the number of a slot, the kernel picks one by address hash: every other
    // sender reaches the right one. The devices then correct the numbers.
    let handed_over = (1..=30).find_map(|net| {
        let mut to: Vec<_> = (0..3).map(|_| open(&format!("127.24.{net}.2"))).collect();
        // The kernel's numbers of the remaining sockets now differ from their slots.
        drop(to.remove(0));
        let mut from = open(&format!("127.24.{net}.1"));
        reach_all(&mut from, &mut to, 8);
        (sum(&to, "handed_over") > 0).then_some((net, from, to))
    });
    let (net, mut from, mut to) = handed_over.expect("this test is about packets that were steered wrongly");
    assert_eq!(sum(&to, "handed_over"), sum(&to, "steered_in"));
    // The next device to open takes the free slot, and packets still reach all devices.
    to.push(open(&format!("127.24.{net}.2")));
    assert_eq!(to.iter().map(Link::slot).collect::<Vec<_>>(), [1, 2, 0]);
    reach_all(&mut from, &mut to, 8);
}

/// Where no socket has the number of a slot, the kernel picks one by address hash. Its process may
/// be stopped and hand nothing over: the device that moved corrects the steering.
#[test]
fn packets_reach_their_slot_while_others_are_stopped_and_one_has_died() {
    let (dies, stopped, mut to) =
        (open("127.24.3.2"), [open("127.24.3.2"), open("127.24.3.2")], open("127.24.3.2"));
    while to.next_deadline().is_some() {
        to.receive(&mut |d| panic!("{d:?}"));
    }
    drop(dies);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(20) {
        to.receive(&mut |d| panic!("{d:?}"));
    }
    for sender in 1..=8 {
        let mut from = open(&format!("127.24.4.{sender}"));
        let mut batch = TxBatch::new(from.capabilities());
        (0..20).for_each(|n| assert!(put(&mut batch, to.local(), to.slot(), n, 60)));
        from.send(&mut batch);
        let (start, mut got) = (Instant::now(), 0);
        while got < 20 {
            assert!(start.elapsed() < Duration::from_secs(5), "{got} of 20 packets of sender {sender}");
            got += to.receive(&mut |_| {});
        }
    }
    assert_eq!(counter(&to, "steered_in"), 0);
    drop(stopped);
}

/// Devices that see another one go correct the steering, each for itself.
#[test]
fn a_device_that_closes_before_a_younger_one_leaves_no_packets_to_the_wrong_one() {
    let mut from = open("127.24.2.1");
    let mut to: Vec<_> = (0..4).map(|_| open("127.24.2.2")).collect();
    for (closes, opens) in [(true, true), (true, false), (true, true), (false, true)] {
        if closes {
            drop(to.remove(0));
        }
        if opens {
            to.push(open("127.24.2.2"));
        }
        let handed = |to: &[UdpLink]| to.iter().map(|l| counter(l, "steered_in")).sum::<u64>();
        let start = Instant::now();
        let (mut rounds, mut quiet) = (0, 0);
        while quiet < 20 {
            assert!(start.elapsed() < LIMIT, "still handed over after {rounds} rounds");
            let before = handed(&to);
            reach_all(&mut from, &mut to, 40);
            rounds += 1;
            quiet = if handed(&to) == before { quiet + 1 } else { 0 };
        }
    }
}

#[test]
fn packets_that_lie_with_a_device_that_closes_reach_their_slot() {
    let mut from = open("127.24.1.1");
    let (first, mut owner) = (open("127.24.1.2"), open("127.24.1.2"));
    drop(first);
    let thief = open("127.24.1.2");
    let mut batch = TxBatch::new(from.capabilities());
    (0..40).for_each(|n| assert!(put(&mut batch, owner.local(), owner.slot(), n, 60)));
    from.send(&mut batch);
    drop(thief);
    let numbers: Vec<_> = collect(&mut owner, from.local(), 40).into_iter().map(|(n, _)| n).collect();
    assert_eq!(numbers, (0..40).collect::<Vec<_>>());
    assert_eq!(counter(&owner, "steered_in"), 40, "this test is about packets that were steered wrongly");
}

#[test]
fn packets_for_a_slot_without_a_process_are_counted() {
    let (mut from, mut to) = (open("127.25.0.1"), open("127.25.0.2"));
    let mut batch = TxBatch::new(from.capabilities());
    (0..5).for_each(|n| assert!(put(&mut batch, to.local(), 77, n, 60)));
    from.send(&mut batch);
    let start = Instant::now();
    while counter(&to, "no_such_slot") < 5 {
        assert!(start.elapsed() < LIMIT);
        assert_eq!(to.receive(&mut |d| panic!("{d:?}")), 0);
    }
}

#[test]
fn short_and_odd_datagrams_are_delivered_or_dropped_but_harm_nothing() {
    let mut to = open("127.26.0.2");
    let socket = std::net::UdpSocket::bind("127.26.0.1:0").unwrap();
    for len in [0, 1, 5, 6, 11, 60_000] {
        socket.send_to(&vec![0; len], ("127.26.0.2", ROCE_PORT)).unwrap();
    }
    let mut lens = Vec::new();
    let start = Instant::now();
    while lens.len() < 6 {
        assert!(start.elapsed() < LIMIT, "{lens:?}");
        to.receive(&mut |d| lens.push(d.bytes.len()));
    }
    assert_eq!(lens, [0, 1, 5, 6, 11, 60_000]);
    let mut small = UdpLink::open(&UdpConfig {
        gro: false,
        local_ports: LocalPorts::Any,
        ..UdpConfig::new("127.26.0.3".parse().unwrap())
    })
    .unwrap();
    socket.send_to(&[0; 60_000], ("127.26.0.3", ROCE_PORT)).unwrap();
    let start = Instant::now();
    while counter(&small, "udp_rx_too_long") == 0 {
        assert!(start.elapsed() < LIMIT);
        small.receive(&mut |d| panic!("{d:?}"));
    }
}

#[test]
fn a_handed_packet_wakes_the_owner() {
    let mut from = open("127.27.0.1");
    let first = open("127.27.0.2");
    let mut owner = open("127.27.0.2");
    drop(first);
    // Slot 0 again, but second in the kernel's list: it gets packets for slot 1.
    let mut thief = open("127.27.0.2");
    let mut batch = TxBatch::new(from.capabilities());
    assert!(put(&mut batch, owner.local(), owner.slot(), 5, 60));
    from.send(&mut batch);
    let start = Instant::now();
    while counter(&thief, "handed_over") == 0 {
        assert!(start.elapsed() < LIMIT);
        thief.receive(&mut |d| panic!("{d:?}"));
    }
    let mut fds: Vec<_> = owner
        .wake_fds()
        .iter()
        .map(|fd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 })
        .collect();
    // SAFETY: the pointer and number describe the live list.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), libc::nfds_t::try_from(fds.len()).unwrap(), 5000) };
    assert!(ready > 0 && fds[1].revents != 0, "{ready}");
    assert_eq!(collect(&mut owner, from.local(), 1), [(5, 60)]);
}

#[test]
fn to_other_hosts_packets_leave_from_several_ports() {
    // A local address that is not loopback. Connecting a UDP socket sends nothing, and packets to
    // our own address stay inside the kernel.
    let own = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|s| {
        s.connect("192.0.2.1:9")?;
        s.local_addr()
    });
    let addr = match own {
        Ok(own) if !own.ip().is_loopback() => own.ip(),
        _ => {
            println!("waived (this machine has no address but loopback)");
            return;
        }
    };
    let from = UdpLink::open(&UdpConfig::new(addr)).unwrap();
    let mut batch = TxBatch::new(from.capabilities());
    let mut ports_to = |dst: IpAddr| {
        batch.clear();
        (0..64).for_each(|hint| assert!(batch.put(dst, hint, 80, |room| room.fill(0))));
        batch.packets().iter().map(|packet| packet.src_port).collect::<std::collections::BTreeSet<_>>()
    };
    let far = ports_to("192.0.2.1".parse().unwrap());
    assert!(far.len() == 8 && far.iter().all(|port| *port >= 0xc000), "{far:?}");
    assert_eq!(ports_to(addr).into_iter().collect::<Vec<_>>(), [ROCE_PORT], "to this host");
}

#[test]
fn an_address_that_is_not_ours_gives_a_sentence() {
    let error = UdpLink::open(&UdpConfig::new("192.0.2.1".parse().unwrap())).unwrap_err();
    assert!(matches!(error, OpenError::NotLocal { .. }), "{error:?}");
    assert!(error.to_string().contains("192.0.2.1 is not an address of this machine"), "{error}");
    let error = UdpLink::open(&UdpConfig::new("0.0.0.0".parse().unwrap())).unwrap_err();
    assert!(error.to_string().contains("specify one address"), "{error}");
}
