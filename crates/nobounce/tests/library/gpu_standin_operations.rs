//! Every operation on GPU memory, played by the stand-in driver: direct and staged, at sizes around
//! everything that changes the way.

use std::time::Instant;

use crate::common::{SOON, is_dropin, is_hardware, pair, pattern, waive, waived_on_hardware};
use fake_cuda::client::StandIn;
use nobounce::memory::gpu::Gpu;
use nobounce::memory::gpu::calibration::Calibration;
use nobounce::nic::work::{Operation, Remote, SendRequest, Sge};
use nobounce::{
    ConnectOptions, Connection, GpuOptions, Mechanism, Path, PathCounters, PostError, Region, Status,
    WaitError, WorkKind,
};

const MIB: usize = 1 << 20;
/// What lies around the bytes that a test writes.
const GUARD: u8 = 0xee;

const DIRECT: GpuOptions = GpuOptions {
    window: true,
    require: nobounce::Require::Any,
    staged: false,
    shadow: nobounce::memory::gpu::Shadowed::No,
};
const STAGED: GpuOptions = GpuOptions { staged: true, ..DIRECT };
const NO_WINDOW: GpuOptions = GpuOptions { window: false, ..DIRECT };
const ALL: [GpuOptions; 3] = [DIRECT, STAGED, NO_WINDOW];

/// Two ends, in a process whose driver is the stand-in.
fn ends(addr: &str) -> (&'static StandIn, Connection, Connection) {
    let cuda = StandIn::load();
    let (a, b) = pair(addr, &ConnectOptions::default());
    (cuda, a, b)
}

/// Whether the stand-in's memory is reachable at all. It is not GPU memory, so a real device cannot
/// reach it. Our own NIC, direct or as the drop-in, must.
fn must_be_direct() -> bool {
    !is_hardware() || is_dropin()
}

/// The GPU options under which the peer may use memory. Memory staged for hardware is open to its
/// owner only; the peer gets an error. If none is left, the test says so.
fn reachable(test: &str, a: &Connection, b: &Connection) -> Vec<GpuOptions> {
    let open = |options: &GpuOptions| {
        let (ours, target) = (a.device().register(8).unwrap(), region(b, 4096, *options));
        if target.is_closed() {
            let refused = a.read(&ours, 0..8, &target.remote(), 0).unwrap_err();
            assert!(matches!(refused, PostError::RemoteClosed), "{refused}");
            assert!(is_hardware() && !target.paths().are_direct(), "{}", target.paths());
        }
        !target.is_closed()
    };
    let open: Vec<_> = ALL.into_iter().filter(open).collect();
    if open.is_empty() {
        waive(test, "the device does not reach the stand-in's memory for peers");
    }
    open
}

fn region(conn: &Connection, len: usize, options: GpuOptions) -> Region {
    let region = conn.device().register_gpu_on(0, len, options).unwrap();
    let is_direct = region.paths().are_direct();
    assert!(
        is_direct || options != DIRECT || !must_be_direct(),
        "the direct path is lost: {}",
        region.paths()
    );
    region.fill(0..len, GUARD).unwrap();
    region
}

/// Lengths on both sides of whatever changes the way: the crossover, a packet, the chunks.
fn lengths() -> Vec<usize> {
    let gpu = Gpu::list().unwrap().remove(0);
    let crossover = Calibration::of(&gpu).unwrap().load_crossover;
    let mut lengths = vec![1, 7, 8, 63, 64, 65];
    for edge in [crossover, 4096, 64 << 10, 256 << 10, 512 << 10] {
        lengths.extend([edge.saturating_sub(1), edge, edge + 1].into_iter().filter(|len| *len > 0));
    }
    lengths.push(MIB + 12_345);
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Whether the bytes are there and their neighbours untouched: as the GPU sees it, and as the
/// application does.
fn check(cuda: &StandIn, region: &Region, at: usize, bytes: &[u8], what: &str) {
    let seen = cuda.peek(region.addr() + at as u64 - 8, bytes.len() + 16);
    assert!(seen[8..8 + bytes.len()] == *bytes, "{what}: the GPU sees other bytes");
    let guards = [&seen[..8], &seen[8 + bytes.len()..]].concat();
    assert!(guards.iter().all(|byte| *byte == GUARD), "{what}: a neighbour was written: {guards:x?}");
    let mut read = vec![0; bytes.len()];
    region.read_at(at, &mut read).unwrap();
    assert!(read == *bytes, "{what}: the application reads other bytes");
}

#[test]
fn write_and_read_at_every_size_and_path() {
    let (cuda, a, b) = ends("127.74.0.1");
    let open = reachable("write_and_read_at_every_size_and_path", &a, &b);
    if open.is_empty() {
        return;
    }
    for (seed, options) in (1..).zip(ALL) {
        // From and to staged memory of ours, and staged memory of the peer's where its device
        // stages for us.
        let target = if open.contains(&options) { options } else { DIRECT };
        let (local, target) = (region(&a, 4 * MIB, options), region(&b, 2 * MIB, target));
        for (i, len) in (0..).zip(lengths()) {
            // Odd offsets, other ones on either side.
            let (from, to, back) = (9 + i % 13, 64 + i % 7, 2 * MIB + 3 + i % 5);
            let what = format!("{len} bytes, {}", target.paths());
            let bytes = pattern(len, seed * 1000 + i as u64);
            target.fill(0..2 * MIB, GUARD).unwrap();
            local.fill(0..4 * MIB, GUARD).unwrap();
            local.write_at(from, &bytes).unwrap();
            check(cuda, &local, from, &bytes, "written by the application");
            let write = a.write(&local, from..from + len, &target.remote(), to as u64).unwrap();
            a.wait(write, SOON).unwrap_or_else(|error| panic!("{what}: {error}"));
            check(cuda, &target, to, &bytes, &what);
            let read = a.read(&local, back..back + len, &target.remote(), to as u64).unwrap();
            a.wait(read, SOON).unwrap_or_else(|error| panic!("{what}: {error}"));
            check(cuda, &local, back, &bytes, &what);
        }
    }
}

/// Memory of ours on a GPU, by every path, and a peer's host memory: what any device can do.
#[test]
fn our_gpu_memory_and_a_peer_s_host_memory() {
    let (cuda, a, b) = ends("127.74.0.11");
    let target = b.device().register(2 * MIB).unwrap();
    for (seed, options) in (1..).zip(ALL) {
        let local = region(&a, 4 * MIB, options);
        for (i, len) in (0..).zip([1, 8, 4095, 64 << 10, (512 << 10) + 1, MIB + 12_345]) {
            let (from, to, back) = (9 + i % 13, 64 + i % 7, 2 * MIB + 3 + i % 5);
            let what = format!("{len} bytes, {}", local.paths());
            let bytes = pattern(len, seed * 100 + i as u64);
            local.fill(0..4 * MIB, GUARD).unwrap();
            local.write_at(from, &bytes).unwrap();
            let write = a.write(&local, from..from + len, &target.remote(), to as u64).unwrap();
            a.wait(write, SOON).unwrap_or_else(|error| panic!("{what}: {error}"));
            let mut found = vec![0; len];
            target.read_at(to, &mut found).unwrap();
            assert!(found == bytes, "{what}: written");
            let read = a.read(&local, back..back + len, &target.remote(), to as u64).unwrap();
            assert_eq!(
                a.wait(read, SOON).unwrap_or_else(|error| panic!("{what}: {error}")).len as usize,
                len
            );
            check(cuda, &local, back, &bytes, &what);
        }
    }
}

#[test]
fn sends_and_immediates() {
    let (cuda, a, b) = ends("127.74.0.2");
    for options in ALL {
        let (local, inbox) = (region(&a, 2 * MIB, options), region(&b, 2 * MIB, options));
        for (i, len) in (0..).zip([1, 100, 5000, 70_000, MIB]) {
            let bytes = pattern(len, i);
            inbox.fill(0..2 * MIB, GUARD).unwrap();
            local.write_at(11, &bytes).unwrap();
            let receive = b.recv(&inbox, 33..33 + len).unwrap();
            let send = a.send_imm(&local, 11..11 + len, 77).unwrap();
            let what = format!("{len} bytes, {}", inbox.paths());
            a.wait(send, SOON).unwrap_or_else(|error| panic!("{what}: {error}"));
            let done = b.wait(receive, SOON).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!((done.kind, done.len as usize, done.immediate), (WorkKind::Receive, len, Some(77)));
            check(cuda, &inbox, 33, &bytes, "a send");
            if inbox.is_closed() {
                continue;
            }
            inbox.fill(0..2 * MIB, GUARD).unwrap();
            let receive = b.recv(&inbox, 0..0).unwrap();
            let write = a.write_imm(&local, 11..11 + len, &inbox.remote(), 70, 78).unwrap();
            a.wait(write, SOON).unwrap();
            check(cuda, &inbox, 70, &bytes, "a write with immediate");
            assert_eq!(b.wait(receive, SOON).unwrap().immediate, Some(78));
        }
    }
}

#[test]
fn atomics() {
    let (cuda, a, b) = ends("127.74.0.3");
    for options in reachable("atomics", &a, &b) {
        let (local, target) = (region(&a, 4096, options), region(&b, 4096, options));
        target.write_u64(16, 100).unwrap();
        let add = a.fetch_add(&local, 0, &target.remote(), 16, 23).unwrap();
        let missed = a.compare_swap(&local, 8, &target.remote(), 16, 100, 1).unwrap();
        let swapped = a.compare_swap(&local, 16, &target.remote(), 16, 123, u64::MAX).unwrap();
        for ticket in [add, missed, swapped] {
            assert_eq!(a.wait(ticket, SOON).unwrap().len, 8);
        }
        assert_eq!([0, 8, 16].map(|at| local.read_u64(at).unwrap()), [100, 123, 123], "{}", target.paths());
        assert_eq!(target.read_u64(16).unwrap(), u64::MAX);
        assert_eq!(cuda.peek(target.addr() + 16, 8), [0xff; 8]);
    }
}

/// One message gathered from a GPU and the host in turns, and scattered in the same way.
#[test]
fn lists_of_several_pieces_of_both_memories() {
    let (cuda, a, b) = ends("127.74.0.4");
    for options in reachable("lists_of_several_pieces_of_both_memories", &a, &b) {
        let (gpu, target) = (region(&a, MIB, options), region(&b, MIB, options));
        let host = a.device().register(MIB).unwrap();
        let pieces = [(&gpu, 5, 3), (&host, 17, 4096), (&gpu, 1001, 150_000), (&host, 9000, 1)];
        let mut whole = Vec::new();
        let sges: Vec<Sge> = (0..)
            .zip(pieces)
            .map(|(i, (region, at, len))| {
                let bytes = pattern(len, 50 + i);
                region.write_at(at, &bytes).unwrap();
                whole.extend(bytes);
                let len = u32::try_from(len).unwrap();
                Sge { addr: region.addr() + at as u64, len, lkey: region.mr().lkey() }
            })
            .collect();
        let remote = Remote { addr: target.addr() + 77, rkey: target.remote().rkey };
        post(&a, &SendRequest::new(1, Operation::Write(remote), &sges));
        check(cuda, &target, 77, &whole, "gathered");
        // And back into the same pieces, which are emptied first.
        pieces.iter().for_each(|&(region, at, len)| region.fill(at..at + len, 0).unwrap());
        post(&a, &SendRequest::new(2, Operation::Read(remote), &sges));
        let mut back = Vec::new();
        for (region, at, len) in pieces {
            let mut bytes = vec![0; len];
            region.read_at(at, &mut bytes).unwrap();
            back.extend(bytes);
        }
        assert!(back == whole, "scattered, {}", target.paths());
    }
}

fn post(conn: &Connection, request: &SendRequest<'_>) {
    conn.qp(0).post_send(request).unwrap();
    let (mut got, start) = (Vec::new(), Instant::now());
    while conn.cq().poll(&mut got, 1).unwrap() == 0 {
        assert!(start.elapsed() < SOON, "{request:?} does not end");
    }
    assert_eq!(got[0].status, Status::Success, "{request:?}");
}

/// Every byte is counted once, by the way it took; nothing is counted as staged on a direct path,
/// and nothing else on a staged one.
#[test]
fn bytes_are_counted_by_path() {
    if waived_on_hardware("bytes_are_counted_by_path", "a hardware NIC moves bytes by itself, uncounted") {
        return;
    }
    let (_cuda, a, b) = ends("127.74.0.5");
    let long = 300_000;
    let counted = |options: GpuOptions| -> (PathCounters, PathCounters) {
        let (local, target) = (region(&a, MIB, options), region(&b, MIB, options));
        let before = (a.device().nic().path_counters(), b.device().nic().path_counters());
        for len in [8, long] {
            let ticket = a.write(&local, 0..len, &target.remote(), 0).unwrap();
            a.wait(ticket, SOON).unwrap();
        }
        let after = (a.device().nic().path_counters(), b.device().nic().path_counters());
        (since(&after.0, &before.0), since(&after.1, &before.1))
    };
    let (sender, receiver) = counted(DIRECT);
    assert_eq!(receiver.inbound.window.bytes, 8 + long as u64);
    assert_eq!(receiver.inbound.window.operations, 2);
    let out = sender.outbound;
    assert_eq!((out.window.bytes, out.window.operations), (8, 1), "{out:?}");
    assert!(out.copy_engine.bytes >= long as u64 && out.copy_engine.operations >= 1, "{out:?}");
    assert_eq!((out.staged.bytes, receiver.inbound.staged.bytes), (0, 0));
    for options in [STAGED, NO_WINDOW] {
        let (sender, receiver) = counted(options);
        assert_eq!(receiver.inbound.staged.bytes, 8 + long as u64);
        assert!(sender.outbound.staged.bytes >= 8 + long as u64, "{sender:?}");
        let others =
            |totals: &nobounce::PathTotals| totals.window.bytes + totals.copy_engine.bytes + totals.cpu.bytes;
        assert_eq!((others(&sender.outbound), others(&receiver.inbound)), (0, 0));
    }
    let peers = b.device().nic().soft().unwrap().peer_path_counters();
    let from_a = peers.iter().find(|(addr, _)| *addr == a.device().nic().local()).unwrap().1;
    assert_eq!(from_a.inbound, b.device().nic().path_counters().inbound, "a is the only peer");
}

fn since(after: &PathCounters, before: &PathCounters) -> PathCounters {
    let mut difference = *after;
    for (now, then) in
        [(&mut difference.inbound, &before.inbound), (&mut difference.outbound, &before.outbound)]
    {
        for (now, then) in [
            (&mut now.cpu, then.cpu),
            (&mut now.window, then.window),
            (&mut now.copy_engine, then.copy_engine),
            (&mut now.staged, then.staged),
        ] {
            now.bytes -= then.bytes;
            now.operations -= then.operations;
        }
    }
    difference
}

#[test]
fn paths_are_told() {
    let (_cuda, a, _b) = ends("127.74.0.6");
    let direct = region(&a, 4096, DIRECT);
    let shown = format!("{direct:?}");
    assert!(shown.contains("stand-in GPU"), "{shown}");
    if is_hardware() {
        match &direct.paths().inbound {
            Path::Direct(mechanism) => assert!(matches!(mechanism, Mechanism::DmaBuf | Mechanism::Peermem)),
            // The stand-in's memory is no GPU's, so that a real device reaches it in no way.
            Path::Believed(_, why) => panic!("a device that talks to itself is believed: {why}"),
            Path::Staged(why) => {
                let each = why.as_str().contains("dma-buf: ") && why.as_str().contains("peermem: ");
                assert!(each && !is_dropin(), "{shown}");
            }
        }
    } else {
        assert_eq!(direct.paths().inbound, Path::Direct(Mechanism::Window));
        assert_eq!(direct.paths().outbound, Path::Direct(Mechanism::CopyEngine));
        assert!(shown.contains("direct (window)"), "{shown}");
    }
    let staged = region(&a, 4096, STAGED);
    assert!(format!("{staged:?}").contains("staged (staging was asked for)"), "{staged:?}");
    assert!(!staged.paths().inbound.is_direct() && !staged.paths().outbound.is_direct());
}

/// A caller that posts and then waits elsewhere is not needed again. The device's own thread
/// completes what the copy engine fetches.
#[test]
fn no_poll_is_needed_after_a_post() {
    let (_cuda, a, b) = ends("127.74.0.7");
    for options in reachable("no_poll_is_needed_after_a_post", &a, &b) {
        let (local, inbox) = (region(&a, MIB, options), region(&b, MIB, options));
        for len in [8, 100_000, MIB] {
            let receive = b.recv(&inbox, 0..0).unwrap();
            let write = a.write_imm(&local, 0..len, &inbox.remote(), 0, 9).unwrap();
            // Only this end looks.
            let ended = b.wait(receive, SOON);
            assert!(ended.is_ok(), "{len} bytes, {}: {ended:?}", local.paths());
            a.wait(write, SOON).unwrap();
        }
    }
}

/// Dropping a region under traffic fails the operation, and nothing else.
#[test]
fn a_region_dropped_under_traffic() {
    for (addr, options) in ["127.74.0.8", "127.74.0.9", "127.74.0.10"].into_iter().zip(ALL) {
        let (_cuda, a, b) = ends(addr);
        let (local, target) = (region(&a, 2 * MIB, options), region(&b, 2 * MIB, options));
        if target.is_closed() {
            continue;
        }
        let remote = target.remote();
        let tickets: Vec<_> = (0..4).map(|_| a.write(&local, 0..2 * MIB, &remote, 0).unwrap()).collect();
        drop(target);
        for ticket in tickets {
            // Done before, or refused: both are right, and one of the two comes.
            let ended = a.wait(ticket, SOON);
            assert!(!matches!(ended, Err(WaitError::Timeout { .. })), "{ended:?}");
        }
        // Both devices go on.
        let next = region(&b, 4096, options);
        next.write_at(0, b"still there").unwrap();
    }
}
