//! Every operation, with both ends in one process.

use std::collections::HashSet;
use std::time::Duration;

use crate::common::{SOON, device, is_dropin, is_hardware, pair, pattern, waived_for_ipv6};
use nobounce::{
    Access, AccessError, ConnectOptions, Mechanism, Mtu, Path, Paths, PostError, RegisterError, RemoteRegion,
    Status, WaitError, WorkKind,
};

fn one() -> ConnectOptions {
    ConnectOptions::default()
}

#[test]
fn write_and_read_back() {
    let (a, b) = pair("127.71.0.1", &one());
    let (local, target) = (a.device().register(20_000).unwrap(), b.device().register(20_000).unwrap());
    b.send_region(&target).unwrap();
    let remote = a.recv_region(SOON).unwrap();
    assert_eq!(remote, target.remote());
    let bytes = pattern(9_001, 1);
    local.write_at(3, &bytes).unwrap();
    let write = a.write(&local, 3..9_004, &remote, 77).unwrap();
    let done = a.wait(write, SOON).unwrap();
    assert_eq!((done.ticket, done.lane, done.kind), (write, 0, WorkKind::Write));
    let mut landed = vec![0; 9_001 + 2];
    target.read_at(76, &mut landed).unwrap();
    assert_eq!(landed[1..9_002], bytes);
    assert_eq!((landed[0], landed[9_002]), (0, 0), "nothing outside has changed");
    let read = a.read(&local, 10_000..19_001, &remote, 77).unwrap();
    assert_eq!(a.wait(read, SOON).unwrap().len, 9_001);
    let mut back = vec![0; 9_001];
    local.read_at(10_000, &mut back).unwrap();
    assert_eq!(back, bytes);
    assert!(matches!(a.wait(read, SOON), Err(WaitError::UnknownTicket { .. })), "a result is given out once");
    assert!(matches!(a.wait_any(SOON), Err(WaitError::NothingPending)));
}

#[test]
fn nothing_at_all_can_be_written_too() {
    let (a, b) = pair("127.71.0.2", &one());
    let (local, target) = (a.device().register(8).unwrap(), b.device().register(8).unwrap());
    let ticket = a.write(&local, 8..8, &target.remote(), 8).unwrap();
    a.wait(ticket, SOON).unwrap();
    let ticket = a.read(&local, 0..0, &target.remote(), 0).unwrap();
    assert_eq!(a.wait(ticket, SOON).unwrap().len, 0);
}

#[test]
fn sends_meet_receives_in_order() {
    let (a, b) = pair("127.71.0.3", &one());
    let (local, inbox) = (a.device().register(4096).unwrap(), b.device().register(4096).unwrap());
    let receives: Vec<_> = (0..4).map(|i| b.recv(&inbox, i * 1000..(i + 1) * 1000).unwrap()).collect();
    local.write_at(0, b"first second").unwrap();
    let sends = [
        a.send(&local, 0..5).unwrap(),
        a.send_imm(&local, 6..12, 0xdead_beef).unwrap(),
        a.write_imm(&local, 0..5, &inbox.remote(), 4000, 7).unwrap(),
        a.send_imm(&local, 0..0, 8).unwrap(),
    ];
    for send in sends {
        a.wait(send, SOON).unwrap();
    }
    let got: Vec<_> = receives
        .iter()
        .map(|&ticket| b.wait(ticket, SOON).unwrap())
        .map(|done| (done.kind, done.len, done.immediate))
        .collect();
    assert_eq!(
        got,
        [
            (WorkKind::Receive, 5, None),
            (WorkKind::Receive, 6, Some(0xdead_beef)),
            (WorkKind::ReceiveWriteImmediate, 5, Some(7)),
            (WorkKind::Receive, 0, Some(8)),
        ]
    );
    let mut bytes = [0; 6];
    inbox.read_at(1000, &mut bytes).unwrap();
    assert_eq!(&bytes, b"second");
    inbox.read_at(4000, &mut bytes).unwrap();
    assert_eq!(&bytes, b"first\0");
}

#[test]
fn a_send_waits_for_its_receive() {
    let (a, b) = pair("127.71.0.4", &one());
    let (local, inbox) = (a.device().register(64).unwrap(), b.device().register(64).unwrap());
    local.fill(0..64, 9).unwrap();
    let send = a.send(&local, 0..64).unwrap();
    assert!(matches!(a.wait(send, Duration::from_millis(50)), Err(WaitError::Timeout { pending: 1, .. })));
    let receive = b.recv(&inbox, 0..64).unwrap();
    assert_eq!(b.wait(receive, SOON).unwrap().len, 64);
    a.wait(send, SOON).unwrap();
}

#[test]
fn atomics() {
    let (a, b) = pair("127.71.0.5", &one());
    let (local, target) = (a.device().register(64).unwrap(), b.device().register(64).unwrap());
    target.write_u64(16, 100).unwrap();
    let add = a.fetch_add(&local, 0, &target.remote(), 16, 23).unwrap();
    let missed = a.compare_swap(&local, 8, &target.remote(), 16, 100, 1).unwrap();
    let swapped = a.compare_swap(&local, 16, &target.remote(), 16, 123, u64::MAX).unwrap();
    for ticket in [add, missed, swapped] {
        assert_eq!(a.wait(ticket, SOON).unwrap().len, 8);
    }
    let held: Vec<_> = [0, 8, 16].map(|at| local.read_u64(at).unwrap()).into();
    assert_eq!(held, [100, 123, 123]);
    assert_eq!(target.read_u64(16).unwrap(), u64::MAX);
    let odd = a.fetch_add(&local, 0, &target.remote(), 12, 1).unwrap_err();
    assert!(matches!(odd, PostError::Misaligned { .. }), "{odd}");
}

#[test]
fn two_peers_count_together_without_losing_one() {
    let listener = device("127.71.0.6").listen("127.0.0.1:0").unwrap();
    let at = listener.local_addr();
    let counting = || {
        let conn = device("127.71.0.6").connect(at, &one()).unwrap();
        let (local, remote) = (conn.device().register(8).unwrap(), conn.recv_region(SOON).unwrap());
        for _ in 0..500 {
            let ticket = conn.fetch_add(&local, 0, &remote, 0, 1).unwrap();
            conn.wait(ticket, SOON).unwrap();
        }
        conn.send_message(b"done").unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(counting);
        scope.spawn(counting);
        let conns = [listener.accept(SOON).unwrap(), listener.accept(SOON).unwrap()];
        let counter = conns[0].device().register(8).unwrap();
        conns.iter().for_each(|conn| conn.send_region(&counter).unwrap());
        conns.iter().for_each(|conn| assert_eq!(conn.recv_message(SOON).unwrap(), b"done"));
        assert_eq!(counter.read_u64(0).unwrap(), 1000);
    });
}

#[test]
fn a_region_of_another_device_is_not_known_here() {
    let (a, b) = pair("127.71.0.19", &one());
    let target = b.device().register(8).unwrap();
    let ticket = a.write(&target, 0..8, &target.remote(), 0).unwrap();
    let error = a.wait(ticket, SOON).unwrap_err();
    assert!(is_protection_error(&error), "{error}");
}

/// What a device says of local memory that it may not use. The standard has a word for it, which
/// the kernel's rxe does not always use.
fn is_protection_error(error: &WaitError) -> bool {
    let WaitError::Failed { status, .. } = error else { return false };
    *status == Status::LocalProtection || (is_hardware() && !is_dropin())
}

#[test]
fn sixty_four_mebibytes_arrive_whole() {
    const LEN: usize = 64 << 20;
    let (a, b) = pair("127.71.0.7", &one());
    let (local, target) = (a.device().register(LEN).unwrap(), b.device().register(LEN).unwrap());
    let bytes = pattern(LEN, 2);
    local.write_at(0, &bytes).unwrap();
    // At once, where the port carries that; a longer message is refused, and the error says how
    // long it may be.
    let most = a.device().nic().max_message() as usize;
    if most < LEN {
        let refused = a.write(&local, 0..LEN, &target.remote(), 0).unwrap_err().to_string();
        assert!(refused.contains(&format!("at most {most}")), "{refused}");
    }
    let pieces = || (0..LEN).step_by(most).map(|start| start..LEN.min(start + most));
    for piece in pieces() {
        let write = a.write(&local, piece.clone(), &target.remote(), piece.start as u64).unwrap();
        a.wait(write, 3 * SOON).unwrap();
    }
    let mut landed = vec![0; LEN];
    target.read_at(0, &mut landed).unwrap();
    assert!(landed == bytes);
    local.fill(0..LEN, 0).unwrap();
    for piece in pieces() {
        let read = a.read(&local, piece.clone(), &target.remote(), piece.start as u64).unwrap();
        a.wait(read, 3 * SOON).unwrap();
    }
    local.read_at(0, &mut landed).unwrap();
    assert!(landed == bytes);
}

#[test]
fn two_hundred_and_fifty_six_lanes() {
    let options = ConnectOptions { qps: 256, depth: 8, ..one() };
    let (a, b) = pair("127.71.0.8", &options);
    assert_eq!((a.lanes(), b.lanes()), (256, 256));
    let (local, target) = (a.device().register(256 * 512).unwrap(), b.device().register(256 * 512).unwrap());
    let bytes = pattern(256 * 512, 3);
    local.write_at(0, &bytes).unwrap();
    let mut open = HashSet::new();
    for (lane, at) in (0..256).zip((0_usize..).step_by(512)) {
        for part in [at..at + 256, at + 256..at + 512] {
            let offset = part.start as u64;
            assert!(open.insert(a.lane(lane).write(&local, part, &target.remote(), offset).unwrap()));
        }
    }
    while !open.is_empty() {
        assert!(open.remove(&a.wait_any(SOON).unwrap().ticket));
    }
    let mut landed = vec![0; bytes.len()];
    target.read_at(0, &mut landed).unwrap();
    assert!(landed == bytes);
    // Each lane is its own: a receive on one of them takes nothing from another.
    let receive = b.lane(200).recv(&target, 0..8).unwrap();
    let send = a.lane(200).send(&local, 0..8).unwrap();
    assert_eq!(b.wait(receive, SOON).unwrap().lane, 200);
    a.wait(send, SOON).unwrap();
}

#[test]
fn over_ipv6() {
    if waived_for_ipv6("over_ipv6") {
        return;
    }
    let (a, b) = pair("::1", &ConnectOptions { qps: 2, ..one() });
    assert!(a.peer().is_ipv6());
    let (local, target) = (a.device().register(100_000).unwrap(), b.device().register(100_000).unwrap());
    let bytes = pattern(100_000, 4);
    local.write_at(0, &bytes).unwrap();
    let ticket = a.lane(1).write(&local, 0..100_000, &target.remote(), 0).unwrap();
    a.wait(ticket, SOON).unwrap();
    let mut landed = vec![0; bytes.len()];
    target.read_at(0, &mut landed).unwrap();
    assert!(landed == bytes);
}

#[test]
fn the_smaller_mtu_counts() {
    let listener = device("127.71.0.9").listen("127.0.0.1:0").unwrap();
    let at = listener.local_addr();
    let options = ConnectOptions { mtu: Some(Mtu::Mtu512), ..one() };
    let active = std::thread::spawn(move || device("127.71.0.9").connect(at, &options).unwrap());
    let passive = listener.accept(SOON).unwrap();
    assert_eq!((passive.mtu(), active.join().unwrap().mtu()), (Mtu::Mtu512, Mtu::Mtu512));
}

#[test]
fn polling_instead_of_waiting() {
    let (a, b) = pair("127.71.0.10", &one());
    let (local, target) = (a.device().register(64).unwrap(), b.device().register(64).unwrap());
    assert!(a.poll().unwrap().is_none());
    let ticket = a.write(&local, 0..64, &target.remote(), 0).unwrap();
    let start = std::time::Instant::now();
    let done = loop {
        assert!(start.elapsed() < SOON);
        if let Some(done) = a.poll().unwrap() {
            break done;
        }
    };
    assert_eq!((done.ticket, a.pending()), (ticket, 0));
}

#[test]
fn a_full_queue_says_so_and_goes_on() {
    let (a, b) = pair("127.71.0.11", &ConnectOptions { depth: 4, ..one() });
    let (local, inbox) = (a.device().register(8).unwrap(), b.device().register(8).unwrap());
    for _ in 0..4 {
        b.recv(&inbox, 0..8).unwrap();
    }
    // Hardware may make queues longer than they were asked for; then the tickets are used up first.
    let more = if is_hardware() { 1000 } else { 1 };
    let full = (0..more).find_map(|_| b.recv(&inbox, 0..8).err()).expect("an end of the queue");
    let used_up = is_hardware() && matches!(full, PostError::Unclaimed { .. });
    assert!(full.is_full() && (full.to_string().contains("full") || used_up), "{full}");
    // Unclaimed results do not accumulate without bound.
    let never = a.recv(&local, 0..8).unwrap();
    let unclaimed = loop {
        match a.write(&local, 0..8, &inbox.remote(), 0) {
            Ok(_) => {}
            Err(PostError::Unclaimed { count }) => break count,
            Err(error) => {
                assert!(error.is_full(), "{error}");
                a.wait(never, Duration::from_millis(1)).unwrap_err();
            }
        }
    };
    assert_eq!(unclaimed, a.cq().depth());
    a.wait_any(SOON).unwrap();
    // The write that was waited for may not be one of those that fill the queue.
    while let Err(error) = a.write(&local, 0..8, &inbox.remote(), 0) {
        assert!(error.is_full(), "{error}");
        a.wait_any(SOON).unwrap();
    }
}

#[test]
fn ranges_are_checked_before_anything_is_posted() {
    let (a, b) = pair("127.71.0.12", &one());
    let (local, target) = (a.device().register(16).unwrap(), b.device().register(16).unwrap());
    let remote = target.remote();
    #[allow(clippy::reversed_empty_ranges)]
    for range in [0..17, 17..17, 9..8, usize::MAX..usize::MAX] {
        assert!(matches!(a.write(&local, range, &remote, 0), Err(PostError::LocalRange { .. })));
    }
    for offset in [9, 17, u64::MAX] {
        assert!(matches!(a.read(&local, 0..8, &remote, offset), Err(PostError::RemoteRange { .. })));
    }
    let absurd = RemoteRegion { addr: u64::MAX, len: u64::MAX, rkey: 1, closed: false };
    assert!(matches!(a.read(&local, 0..8, &absurd, 8), Err(PostError::RemoteRange { .. })));
    assert_eq!(a.pending(), 0);
}

#[test]
fn a_wrong_key_stops_the_lane_and_only_the_lane() {
    let (a, b) = pair("127.71.0.13", &ConnectOptions { qps: 2, ..one() });
    let (local, target) = (a.device().register(16).unwrap(), b.device().register(16).unwrap());
    let forged = RemoteRegion { rkey: target.remote().rkey ^ 1, ..target.remote() };
    let bad = a.write(&local, 0..16, &forged, 0).unwrap();
    let after = a.write(&local, 0..16, &target.remote(), 0).unwrap();
    let error = a.wait(bad, SOON).unwrap_err();
    assert!(matches!(error, WaitError::Failed { status: Status::RemoteAccess, lane: 0, .. }), "{error}");
    assert!(error.to_string().contains("refused access"), "{error}");
    assert!(matches!(a.wait(after, SOON), Err(WaitError::Failed { status: Status::Flushed, .. })));
    let other = a.lane(1).write(&local, 0..16, &target.remote(), 0).unwrap();
    a.wait(other, SOON).unwrap();
}

/// Whether the peer died is not waited for on the software NIC, and with hardware once for all that
/// failed together.
#[test]
fn refusals_of_a_peer_that_lives_are_told_at_once() {
    const LANES: usize = 8;
    let took = || {
        let (a, b) = pair("127.71.0.23", &ConnectOptions { qps: LANES, ..one() });
        let (local, target) = (a.device().register(16).unwrap(), b.device().register(16).unwrap());
        let forged = RemoteRegion { rkey: target.remote().rkey ^ 1, ..target.remote() };
        let writes = (0..LANES).map(|lane| a.lane(lane).write(&local, 0..16, &forged, 0).unwrap());
        let writes: Vec<_> = writes.collect();
        let start = std::time::Instant::now();
        for write in writes {
            let error = a.wait(write, SOON).unwrap_err();
            assert!(matches!(error, WaitError::Failed { status: Status::RemoteAccess, .. }), "{error}");
        }
        start.elapsed()
    };
    // The quickest of three: others may have the processor.
    let quickest = (0..3).map(|_| took()).min().unwrap();
    let bound = Duration::from_millis(if is_hardware() { 700 } else { 100 });
    assert!(quickest < bound, "{quickest:?} for {LANES} lanes");
}

#[test]
fn rights_are_kept() {
    let (a, b) = pair("127.71.0.14", &one());
    let local = a.device().register(16).unwrap();
    let readable = b.device().register_with(16, Access::LOCAL_WRITE | Access::REMOTE_READ).unwrap();
    let read = a.read(&local, 0..16, &readable.remote(), 0).unwrap();
    a.wait(read, SOON).unwrap();
    let write = a.write(&local, 0..16, &readable.remote(), 0).unwrap();
    let error = a.wait(write, SOON).unwrap_err();
    assert!(matches!(error, WaitError::Failed { status: Status::RemoteAccess, .. }), "{error}");
    let contradiction = b.device().register_with(16, Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(contradiction, RegisterError::Nic(_)), "{contradiction}");
}

#[test]
fn a_region_dropped_under_traffic_fails_the_operation() {
    let (a, b) = pair("127.71.0.15", &one());
    let local = a.device().register(16).unwrap();
    let gone = b.device().register(16).unwrap();
    let remote = gone.remote();
    drop(gone);
    let write = a.write(&local, 0..16, &remote, 0).unwrap();
    assert!(matches!(a.wait(write, SOON), Err(WaitError::Failed { status: Status::RemoteAccess, .. })));

    let (a, b) = pair("127.71.0.15", &one());
    let inbox = b.device().register(16).unwrap();
    let receive = b.recv(&inbox, 0..16).unwrap();
    drop(inbox);
    let local = a.device().register(16).unwrap();
    let send = a.send(&local, 0..16).unwrap();
    let error = b.wait(receive, SOON).unwrap_err();
    assert!(is_protection_error(&error), "{error}");
    assert!(matches!(a.wait(send, SOON), Err(WaitError::Failed { .. })));
}

#[test]
fn memory_of_the_callers() {
    let (a, b) = pair("127.71.0.16", &one());
    let memory = nobounce_memory::HostBuffer::new(8192).unwrap();
    // SAFETY: the buffer outlives the region and is touched through windows only.
    let target = unsafe { b.device().register_raw(memory.as_mut_ptr(), 8192, Access::all()) }.unwrap();
    assert_eq!((target.addr(), target.len(), target.owns_memory()), (memory.addr(), 8192, false));
    assert_eq!(*target.paths(), Paths::both(Path::Direct(Mechanism::Cpu)));
    let local = a.device().register(8).unwrap();
    local.write_at(0, b"to there").unwrap();
    let ticket = a.write(&local, 0..8, &target.remote(), 8184).unwrap();
    a.wait(ticket, SOON).unwrap();
    drop(target);
    let mut bytes = [0; 8];
    memory.read_at(8184, &mut bytes).unwrap();
    assert_eq!(&bytes, b"to there");
    // SAFETY: the range is checked and refused.
    let nowhere =
        unsafe { b.device().register_raw(std::ptr::without_provenance_mut(4096), 8, Access::all()) };
    assert!(matches!(nowhere, Err(RegisterError::Nic(_))), "{nowhere:?}");
}

#[test]
fn regions_are_copied_in_and_out_within_bounds() {
    let region = device("127.71.0.17").register(10_000).unwrap();
    assert_eq!(region.addr() % 4096, 0);
    region.fill(5..9_999, 7).unwrap();
    let mut bytes = vec![1; 10_000];
    region.read_at(0, &mut bytes).unwrap();
    assert!(bytes[5..9_999].iter().all(|&byte| byte == 7));
    assert_eq!((&bytes[..5], bytes[9_999]), (&[0; 5][..], 0));
    assert!(matches!(region.fill(0..10_001, 1), Err(AccessError::OutOfBounds { .. })));
    assert!(matches!(region.write_at(9_999, &[0; 2]), Err(AccessError::OutOfBounds { .. })));
    assert!(matches!(region.read_u64(4), Err(AccessError::Misaligned { .. })));
    assert_eq!(region.paths().to_string(), "direct (cpu)");
    assert!(!format!("{:?}", region.remote()).contains("rkey"), "keys do not belong into logs");
}

#[test]
fn messages_go_both_ways_in_order() {
    let (a, b) = pair("127.71.0.18", &one());
    let region = a.device().register(8).unwrap();
    let large = pattern(nobounce::Connection::MAX_MESSAGE, 5);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for message in [&b"one"[..], b"", &large] {
                a.send_message(message).unwrap();
            }
            a.send_region(&region).unwrap();
        });
        assert!(b.recv_message(SOON).unwrap() == b"one");
        assert!(b.recv_message(SOON).unwrap().is_empty());
        assert!(b.recv_message(SOON).unwrap() == large);
        let order = b.recv_message(SOON).unwrap_err();
        assert!(order.to_string().contains("a region where a message"), "{order}");
        assert_eq!(b.recv_region(SOON).unwrap(), region.remote());
    });
    assert!(a.send_message(&vec![0; (1 << 20) + 1]).is_err());
    assert!(matches!(b.recv_message(Duration::from_millis(20)), Err(nobounce::MessageError::Timeout(_))));
    b.send_message(b"still here").unwrap();
    assert!(a.recv_message(SOON).unwrap() == b"still here");
}
