//! CUDA calls block, as they do while another application thread is inside the driver behind a
//! kernel: on a stand-in driver. Traffic without copy engine goes on, and the rest completes when
//! CUDA returns.
#![allow(clippy::cast_possible_truncation)] // sizes of tests

use std::time::{Duration, Instant};

use crate::common::on_gpu::{GpuMethod, LEN, OnGpu};
use crate::common::{
    ALL_ACCESS, End, MIB, check_write, config, connect, pair_with, patterns, reconnect, unguarded_udp, until,
};
use crate::forged::{Forger, counted};
use fake_cuda::client::StandIn;
use nobounce_nic::soft::Config;
use nobounce_nic::work::{Mtu, Operation, QpLimits, SendRequest, Status};
use nobounce_protocol::wire::{Header, Opcode, Reth};

/// Far more than anything here takes while CUDA stands still, and less than it takes the peers to
/// give up.
const AT_ONCE: Duration = Duration::from_secs(1);

fn ends(addr: &str, qps: usize) -> (End, End) {
    let (mut a, mut b) = (End::open(&config(addr), MIB), End::open(&config(addr), MIB));
    for i in 0..qps {
        a.add_qp(QpLimits { send_sges: 30, ..QpLimits::default() });
        b.add_qp(QpLimits::default());
        connect(&a, i, &b, i, Mtu::Mtu4096);
    }
    (a, b)
}

/// GPU memory with a window: on a machine that is very busy the proof may take too long now and
/// then.
fn with_window(end: &End, gpu: &'static StandIn) -> OnGpu {
    for _ in 0..20 {
        let memory = OnGpu::new(end, gpu, GpuMethod::Window);
        if memory.mr.paths().are_direct() {
            return memory;
        }
        println!("{}", memory.mr.paths());
    }
    panic!("no window");
}

/// Holds all calls until it is dropped: a test that fails must not leave others hanging.
struct Standstill(&'static StandIn);

impl Standstill {
    fn begin(gpu: &'static StandIn) -> Self {
        gpu.hold_calls(1);
        Self(gpu)
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        self.0.hold_calls(0);
    }
}

#[test]
fn others_go_on_while_placement_stands_still() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.92.1.1", 3);
    let (here, window) = (with_window(&a, gpu), with_window(&b, gpu));
    let staged = OnGpu::new(&b, gpu, GpuMethod::NoWindow);
    gpu.poke(staged.addr + 4096, &40_u64.to_ne_bytes());
    a.fill(1);
    here.fill(2);
    b.buffer.write_at(0, &[0; 64]).unwrap();
    let still = Standstill::begin(gpu);
    let start = Instant::now();
    // More messages than there are chunks, a long one, a flag elsewhere, atomics on both, and one
    // message behind all that. (Few bytes: unacknowledged bytes count against the shared in-flight
    // limit of the path to the peer.)
    let [from] = a.sge(0, 64);
    let [long] = a.sge(0, 30_000);
    let ([first], [second]) = (a.sge(400_000, 8), a.sge(400_008, 8));
    let add = |remote| Operation::FetchAdd { remote, add: 2 };
    let mut list: Vec<_> = (0..20).map(|i| (Operation::Write(staged.remote(i * 128)), from)).collect();
    list.push((Operation::Write(staged.remote(100_000)), long));
    list.push((Operation::Write(b.remote(0)), from));
    list.push((add(staged.remote(4096)), first));
    list.push((add(staged.remote(4096)), second));
    list.push((Operation::Write(window.remote(0)), from));
    list.push((Operation::Write(staged.remote(8192)), from));
    for (i, (op, sge)) in list.iter().enumerate() {
        a.qps[0].post_send(&SendRequest::new(100 + i as u64, *op, std::slice::from_ref(sge))).unwrap();
    }
    // Nothing of that is done; what needs no copy engine is, in both directions and by the same
    // devices.
    for round in 0..20_u64 {
        let [host] = a.sge(0, 64);
        a.qps[1].post_send(&SendRequest::new(1, Operation::Write(b.remote(4096)), &[host])).unwrap();
        a.qps[2]
            .post_send(&SendRequest::new(2, Operation::Write(window.remote(4096)), &[here.sge(0, 512)]))
            .unwrap();
        let done = a.completions(2);
        assert!(
            done.iter().all(|wc| wc.wr_id < 100 && wc.status == Status::Success),
            "round {round}: {done:?}"
        );
        let [back] = b.sge(4096, 64);
        b.qps[1].post_send(&SendRequest::new(1, Operation::Write(a.remote(500_000)), &[back])).unwrap();
        b.succeed(1);
    }
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    assert!(b.bytes(0, 64) == [0; 64], "the flag came before what it tells of");
    window.holds(4096, &patterns(2, 0, 512));
    drop(still);
    let done = a.completions(list.len());
    let order: Vec<_> = done.iter().map(|wc| (wc.wr_id, wc.status)).collect();
    let expected: Vec<_> = (0..list.len()).map(|i| (100 + i as u64, Status::Success)).collect();
    assert_eq!(order, expected);
    (0..20).for_each(|i| staged.holds(i * 128, &patterns(1, 0, 64)));
    staged.holds(100_000, &patterns(1, 0, 30_000));
    staged.holds(8192, &patterns(1, 0, 64));
    staged.holds(4096, &44_u64.to_ne_bytes());
    window.holds(0, &patterns(1, 0, 64));
    assert!(b.bytes(0, 64) == patterns(1, 0, 64));
    let words = a.bytes(400_000, 16);
    assert_eq!(words, [40_u64.to_ne_bytes(), 42_u64.to_ne_bytes()].concat());
}

#[test]
fn others_go_on_while_memory_and_queue_pairs_go() {
    let gpu = StandIn::program();
    let (a, mut b) = ends("127.92.2.1", 3);
    let (first, second) =
        (OnGpu::new(&b, gpu, GpuMethod::NoWindow), OnGpu::new(&b, gpu, GpuMethod::NoWindow));
    a.fill(1);
    let [from] = a.sge(0, 64);
    let still = Standstill::begin(gpu);
    a.qps[0].post_send(&SendRequest::new(1, Operation::Write(first.remote(0)), &[from])).unwrap();
    a.qps[1].post_send(&SendRequest::new(2, Operation::Write(second.remote(0)), &[from])).unwrap();
    until("arrival", || b.device.path_counters().inbound.staged.bytes == 128);
    let doomed = b.qps.remove(0);
    std::thread::scope(|scope| {
        let (memory, queue_pair) = (scope.spawn(|| drop(second)), scope.spawn(|| drop(doomed)));
        std::thread::sleep(Duration::from_millis(20));
        let start = Instant::now();
        for _ in 0..20 {
            a.qps[2].post_send(&SendRequest::new(3, Operation::Write(b.remote(0)), &[from])).unwrap();
            a.succeed(1);
        }
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
        assert!(!memory.is_finished() && !queue_pair.is_finished(), "their copies are not over");
        drop(still);
        memory.join().unwrap();
        queue_pair.join().unwrap();
    });
    // What was given to the copy engine came to its end, and was answered for.
    a.succeed(2);
    first.holds(0, &patterns(1, 0, 64));
}

/// A READ is repeated while its response is in flight. Bytes fetched for the duplicate need never
/// arrive, and memory that is freed meanwhile fails no queue pair.
#[test]
fn memory_that_was_read_may_go_while_it_is_fetched_for_a_repeated_question() {
    let gpu = StandIn::program();
    let (a, b) = pair_with(&unguarded_udp("127.92.6.1"), &unguarded_udp("127.92.6.2"), MIB, Mtu::Mtu4096);
    let memory = OnGpu::new(&b, gpu, GpuMethod::NoWindow);
    memory.fill(3);
    let [to] = a.sge(0, 100_000);
    a.qps[0].post_send(&SendRequest::new(1, Operation::Read(memory.remote(0)), &[to])).unwrap();
    a.succeed(1);
    assert!(a.bytes(0, 100_000) == patterns(3, 0, 100_000));
    gpu.hold_copies(1);
    let peer = Forger::new(a.device.local(), &b);
    let reth = Reth { addr: memory.addr, rkey: memory.mr.rkey(), len: 50_000 };
    let again = Header::new(Opcode::ReadRequest, b.qps[0].qpn(), b.qps[0].attr().rq_psn);
    let again = peer.packet(&Header { reth, ..again }, &[]);
    counted(&peer, &b, "duplicate_request", &again);
    std::thread::scope(|scope| {
        let gone = scope.spawn(|| drop(memory));
        // Refused on arrival: the memory is gone, and the responder that saw it has tried to send
        // the earlier response.
        counted(&peer, &b, "refused_access", &again);
        assert!(!gone.is_finished(), "nothing is being fetched");
        check_write(&a, &b, 4, 1000);
        gpu.hold_copies(0);
        gone.join().unwrap();
    });
    check_write(&a, &b, 5, 1000);
}

#[test]
fn pieces_of_a_packet_are_fetched_without_keeping_others() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.92.3.1", 2);
    let at_a = OnGpu::new(&a, gpu, GpuMethod::NoWindow);
    at_a.fill(3);
    a.fill(4);
    let [host] = a.sge(0, 100);
    let still = Standstill::begin(gpu);
    let list = [at_a.sge(0, 500), host, at_a.sge(9000, 700)];
    a.qps[0].post_send(&SendRequest::new(7, Operation::Write(b.remote(0)), &list)).unwrap();
    let start = Instant::now();
    for _ in 0..10 {
        a.qps[1].post_send(&SendRequest::new(1, Operation::Write(b.remote(4096)), &[host])).unwrap();
        assert_eq!(a.completions(1)[0].wr_id, 1);
    }
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    drop(still);
    a.succeed(1);
    let sent = [patterns(3, 0, 500), patterns(4, 0, 100), patterns(3, 9000, 700)].concat();
    assert!(b.bytes(0, 1300) == sent);
}

#[test]
fn a_copy_that_fails_late_harms_no_later_life_of_its_queue_pair() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.92.4.1", 1);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::Staged);
    a.fill(1);
    gpu.set_copy_delay_us(200_000);
    a.post(Operation::Write(at_b.remote(0)), 0, 64);
    until("arrival", || b.device.path_counters().inbound.staged.bytes == 64);
    reconnect(&a, &b, Mtu::Mtu4096);
    gpu.fail_next(c"cuEventQuery", 719);
    until("the failure", || {
        b.cq.poll(&mut Vec::new(), 1).unwrap();
        gpu.failures() == 0
    });
    gpu.set_copy_delay_us(0);
    a.post(Operation::Write(at_b.remote(0)), 0, 64);
    a.succeed(1);
    at_b.holds(0, &patterns(1, 0, 64));
}

#[test]
fn threads_and_chunks_of_destroyed_contexts_go() {
    let gpu = StandIn::program();
    let end = End::open(&config("127.92.5.1"), MIB);
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| name.trim() == "nobounce-copy").count()
    };
    let pinned = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("/memfd:nobounce ").count();
    let life = || {
        let mut context = 0;
        assert_eq!(gpu.create_context(&mut context, 0, 0), 0);
        let addr = gpu.malloc(LEN);
        // SAFETY: the memory has no users.
        let mr = unsafe { end.pd.register_gpu(addr, LEN, ALL_ACCESS, &GpuMethod::Staged.options()) }.unwrap();
        drop(mr);
        assert_eq!(gpu.destroy_context(context), 0);
    };
    life();
    let one = pinned();
    assert!(one > 0, "chunks are not found by this name");
    (0..6).for_each(|_| life());
    // The last one's is found out by the next registration.
    until("threads to end and their chunks to go", || (threads(), pinned()) == (1, one));
}

/// An unsignalled WRITE from host memory, which requests no ACK, followed by one from GPU memory
/// whose bytes are not fetched yet.
fn post_late(a: &End, b: &End, here: &OnGpu) {
    let [from] = a.sge(0, 100_000);
    let first = SendRequest::new(1, Operation::Write(b.remote(0)), std::slice::from_ref(&from));
    a.qps[0].post_send(&SendRequest { signaled: false, ..first }).unwrap();
    let late = [here.sge(0, 50_000)];
    a.qps[0].post_send(&SendRequest::new(2, Operation::Write(b.remote(200_000)), &late)).unwrap();
}

/// A sender that waits for its own bytes spends no retries and retransmits nothing: the peer is not
/// late.
#[test]
fn a_sender_waits_for_its_own_bytes_without_blaming_the_peer() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.92.9.1", 1);
    let here = OnGpu::new(&a, gpu, GpuMethod::NoWindow);
    here.fill(2);
    // Known to each other, so that questions come soon.
    (0..20).for_each(|_| check_write(&a, &b, 1, 64));
    let asked = || a.counter("probes");
    let repeated = || b.counter("duplicate_request");
    let before = (asked(), repeated());
    let still = Standstill::begin(gpu);
    post_late(&a, &b, &here);
    let end = Instant::now() + Duration::from_millis(900);
    while Instant::now() < end {
        a.quiet();
        b.quiet();
    }
    drop(still);
    a.succeed(1);
    assert!(b.bytes(200_000, 50_000) == patterns(2, 0, 50_000));
    assert_eq!(["rcvd_seq_err", "local_ack_timeout_err"].map(|name| a.counter(name)), [0, 0]);
    let (asked, repeated) = (asked() - before.0, repeated() - before.1);
    assert!(repeated <= asked && asked < 40, "{repeated} packets came twice, {asked} questions");
}

/// Packets sent before late bytes arrive even if the last of them was lost, which only the sender
/// can detect.
#[test]
fn what_left_before_late_bytes_is_asked_after() {
    let gpu = StandIn::program();
    let lossy = Config { fault: Some("loss=0.05,seed=5".parse().unwrap()), ..config("127.92.9.2") };
    let (a, b) = pair_with(&lossy, &lossy, MIB, Mtu::Mtu1024);
    let here = OnGpu::new(&a, gpu, GpuMethod::NoWindow);
    for round in 0..12 {
        here.fill(round);
        a.fill(round);
        let still = Standstill::begin(gpu);
        post_late(&a, &b, &here);
        until("what was lost before the late one", || {
            a.quiet();
            b.quiet();
            b.bytes(0, 100_000) == patterns(round, 0, 100_000)
        });
        drop(still);
        a.succeed(1);
        assert!(b.bytes(200_000, 50_000) == patterns(round, 0, 50_000));
    }
}
