//! A GPU that is slow, fails, or is contended: on a stand-in driver.
#![allow(clippy::cast_possible_truncation)] // sizes of tests

use std::time::{Duration, Instant};

use crate::common::on_gpu::{GpuMethod, LEN, OnGpu};
use crate::common::{End, MIB, config, connect, patterns};
use fake_cuda::client::StandIn;
use nobounce_nic::soft::{AsyncEvent, Config, QpInit, Retransmit, SrqLimits};
use nobounce_nic::work::{
    Mtu, Operation, QpAttr, QpEvent, QpLimits, QpState, RecvRequest, SendRequest, Service, Sge, Status,
};

fn ends(addr: &str, qps: usize, mtu: Mtu) -> (End, End) {
    let (mut a, mut b) = (End::open(&config(addr), MIB), End::open(&config(addr), MIB));
    for i in 0..qps {
        a.add_qp(QpLimits { send_sges: 30, recv_sges: 30, ..QpLimits::default() });
        b.add_qp(QpLimits { send_sges: 30, recv_sges: 30, ..QpLimits::default() });
        connect(&a, i, &b, i, mtu);
    }
    (a, b)
}

#[test]
fn idle_queue_pairs_keep_no_chunks() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.1.1", 25, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::NoWindow), OnGpu::new(&b, gpu, GpuMethod::Window));
    for (i, qp) in a.qps.iter().enumerate() {
        qp.post_send(&SendRequest::new(i as u64, Operation::Write(at_b.remote(0)), &[at_a.sge(0, 50_000)]))
            .unwrap();
        let done = a.completions(1);
        assert_eq!(done[0].status, Status::Success, "queue pair {i}");
    }
}

#[test]
fn four_pieces_of_gpu_memory_in_one_packet() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.2.1", 1, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::NoWindow), OnGpu::new(&b, gpu, GpuMethod::Window));
    let list: Vec<Sge> = (0..4).map(|i| at_a.sge(i * 5000, 500)).collect();
    a.qps[0].post_send(&SendRequest::new(1, Operation::Write(at_b.remote(0)), &list)).unwrap();
    a.succeed(1);
}

#[test]
fn long_host_piece_then_gpu_piece() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.3.1", 1, Mtu::Mtu1024);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::Window), OnGpu::new(&b, gpu, GpuMethod::Window));
    let [host] = a.sge(0, 5000);
    a.qps[0]
        .post_send(&SendRequest::new(1, Operation::Write(at_b.remote(0)), &[host, at_a.sge(0, 500_000)]))
        .unwrap();
    a.succeed(1);
}

#[test]
fn next_message_from_freed_memory_does_not_harm_this_one() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.4.1", 1, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::Window), OnGpu::new(&b, gpu, GpuMethod::Window));
    let gone = OnGpu::new(&a, gpu, GpuMethod::Staged);
    assert_eq!(gpu.free(gone.addr), 0);
    a.qps[0]
        .post_sends(&[
            SendRequest::new(1, Operation::Write(at_b.remote(0)), &[at_a.sge(0, 100_000)]),
            SendRequest::new(2, Operation::Write(at_b.remote(0)), &[gone.sge(0, 100_000)]),
        ])
        .unwrap();
    let done = a.completions(2);
    assert_eq!((done[1].wr_id, done[1].status), (2, Status::LocalProtection), "blamed the wrong one");
    assert_ne!(done[0].status, Status::LocalProtection);
}

#[test]
fn sender_hears_of_no_success_when_the_copy_cannot_be_started() {
    sender_hears_of_no_success("127.91.5.1", c"cuMemcpyHtoDAsync_v2");
}

#[test]
fn sender_hears_of_no_success_when_the_copy_fails() {
    sender_hears_of_no_success("127.91.5.2", c"cuEventQuery");
}

fn sender_hears_of_no_success(addr: &str, failing: &std::ffi::CStr) {
    let gpu = StandIn::program();
    let (a, b) = ends(addr, 1, Mtu::Mtu4096);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::Staged);
    gpu.fail_next(failing, 719);
    b.qps[0].post_recv(&RecvRequest { wr_id: 5, sges: &[at_b.sge(0, 100)] }).unwrap();
    a.post(Operation::Send, 0, 8);
    let received = b.completions(1);
    assert_ne!(received[0].status, Status::Success);
    assert_ne!(a.status(), Status::Success);
}

#[test]
fn receiver_hears_of_no_success_when_the_copy_fails_after_the_queue_pair() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.6.1", 1, Mtu::Mtu4096);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::Staged);
    gpu.set_copy_delay_us(200_000);
    b.qps[0].post_recv(&RecvRequest { wr_id: 5, sges: &[at_b.sge(0, 100)] }).unwrap();
    a.post(Operation::Send, 0, 8);
    crate::common::until("arrival", || b.device.path_counters().inbound.staged.bytes == 8);
    b.qps[0].modify(&QpAttr::to_state(QpState::Error)).unwrap();
    gpu.fail_next(c"cuEventQuery", 719);
    let received = b.completions(1);
    gpu.forget_failures();
    gpu.set_copy_delay_us(0);
    assert_ne!(received[0].status, Status::Success, "{received:?}");
}

#[test]
fn a_fenced_write_sends_what_the_read_before_it_brought() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.8.1", 2, Mtu::Mtu4096);
    let at_a = OnGpu::new(&a, gpu, GpuMethod::Staged);
    let other = OnGpu::new(&a, gpu, GpuMethod::Staged);
    gpu.set_copy_delay_us(3000);
    let mut wrong = 0;
    for round in 1..=20_u8 {
        at_a.fill(0xee);
        b.fill(round);
        let remote = b.remote(0);
        let back = b.remote(4096);
        // Keeps the copy engine's stream of a busy.
        let [from] = b.sge(0, 64);
        let busy: Vec<_> = (0..4).map(|i| (Operation::Write(other.remote(i * 8192)), [from])).collect();
        let busy: Vec<_> = busy.iter().map(|(op, s)| SendRequest::new(1, *op, s)).collect();
        b.qps[1].post_sends(&busy).unwrap();
        a.qps[0]
            .post_sends(&[
                SendRequest::new(1, Operation::Read(remote), &[at_a.sge(0, 64)]),
                SendRequest {
                    fence: true,
                    ..SendRequest::new(2, Operation::Write(back), &[at_a.sge(0, 64)])
                },
            ])
            .unwrap();
        a.succeed(2);
        b.succeed(4);
        wrong += i32::from(b.bytes(4096, 64) != patterns(round, 0, 64));
    }
    gpu.set_copy_delay_us(0);
    assert_eq!(wrong, 0, "of 20");
}

#[test]
fn what_the_copy_engine_does_not_get_to_is_loaded() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.15.1", 1, Mtu::Mtu4096);
    let at_a = OnGpu::new(&a, gpu, GpuMethod::Window);
    at_a.fill(3);
    let out = || a.device.path_counters().outbound;
    let write = || {
        let (before, sge) = (out(), [at_a.sge(0, 600_000)]);
        a.qps[0].post_send(&SendRequest::new(1, Operation::Write(b.remote(0)), &sge)).unwrap();
        a.succeed(1);
        (out().window.bytes - before.window.bytes, out().copy_engine.bytes - before.copy_engine.bytes)
    };
    // On a busy machine the stand-in's copies are late by themselves now and then.
    crate::common::until("a message that is fetched", || write() == (0, 600_000));
    // As if a kernel that waits for the network kept the copy engine: nothing but time frees it.
    gpu.set_copy_delay_us(3_000_000);
    let start = Instant::now();
    assert_eq!(write(), (600_000, 0));
    assert_eq!(write(), (600_000, 0));
    let took = start.elapsed();
    gpu.set_copy_delay_us(0);
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(b.bytes(0, 600_000), patterns(3, 0, 600_000));
    crate::common::until("messages to be fetched again", || write() == (0, 600_000));
    // As if another thread kept the driver's lock and waited for that kernel: not even the call
    // comes back.
    gpu.hold_copies(1);
    at_a.fill(4);
    let (first, second) = (write(), write());
    gpu.hold_copies(0);
    assert_eq!((first, second), ((600_000, 0), (600_000, 0)));
    assert_eq!(b.bytes(0, 600_000), patterns(4, 0, 600_000));
    crate::common::until("messages to be fetched once more", || write() == (0, 600_000));
}

#[test]
fn memory_is_deregistered_while_fetches_stand_still() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.16.1", 1, Mtu::Mtu4096);
    let (at_a, other) = (OnGpu::new(&a, gpu, GpuMethod::Window), OnGpu::new(&a, gpu, GpuMethod::Window));
    at_a.fill(5);
    gpu.hold_copies(1);
    let sge = [at_a.sge(0, 600_000)];
    a.qps[0].post_send(&SendRequest::new(1, Operation::Write(b.remote(0)), &sge)).unwrap();
    a.succeed(1);
    // Memory without a copy in flight is released at once; the rest waits for its copy without
    // blocking other traffic.
    let start = Instant::now();
    drop(other);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    std::thread::scope(|scope| {
        let gone = scope.spawn(|| drop(at_a));
        std::thread::sleep(Duration::from_millis(50));
        a.post(Operation::Write(b.remote(0)), 0, 64);
        a.succeed(1);
        assert!(!gone.is_finished(), "the fetch may still read the memory");
        gpu.hold_copies(0);
        gone.join().unwrap();
    });
    assert_eq!(b.bytes(64, 599_936), patterns(5, 64, 599_936));
}

#[test]
fn a_thread_that_sleeps_after_a_post_is_served() {
    let gpu = StandIn::program();
    let (mut a, mut b) = (End::open(&config("127.91.9.1"), MIB), End::open(&config("127.91.9.1"), MIB));
    let channel = a.device.create_channel().unwrap();
    a.cq = a.device.create_cq(64, Some(&channel)).unwrap();
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 0, &b, 0, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::NoWindow), OnGpu::new(&b, gpu, GpuMethod::Window));
    for round in 0..5 {
        std::thread::sleep(Duration::from_millis(50));
        a.cq.request_notify(false);
        a.qps[0]
            .post_send(&SendRequest::new(1, Operation::Write(at_b.remote(0)), &[at_a.sge(0, 50_000)]))
            .unwrap();
        let woken = channel.wait(crate::common::LIMIT);
        assert!(woken, "round {round}");
        let mut got = Vec::new();
        a.cq.poll(&mut got, 8).unwrap();
        assert_eq!(got.len(), 1);
    }
}

#[test]
fn nothing_is_placed_after_deregistration() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.10.1", 1, Mtu::Mtu4096);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::Staged);
    at_b.fill(0xee);
    gpu.set_copy_delay_us(100_000);
    a.fill(1);
    a.post(Operation::Write(at_b.remote(0)), 0, 64);
    crate::common::until("arrival", || b.device.path_counters().inbound.staged.bytes == 64);
    let addr = at_b.addr;
    drop(at_b);
    let after_drop = gpu.peek(addr, 64);
    std::thread::sleep(Duration::from_millis(400));
    let later = gpu.peek(addr, 64);
    gpu.set_copy_delay_us(0);
    assert!(after_drop == later, "the memory changed after it was deregistered");
}

#[test]
fn atomics_do_not_fail_because_others_send() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.11.1", 25, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::NoWindow), OnGpu::new(&b, gpu, GpuMethod::NoWindow));
    for qp in &b.qps[..24] {
        qp.post_send(&SendRequest::new(1, Operation::Write(at_a.remote(0)), &[at_b.sge(0, 50_000)])).unwrap();
        b.succeed(1);
    }
    let add = Operation::FetchAdd { remote: at_b.remote(64), add: 2 };
    let [there] = a.sge(0, 8);
    a.qps[24].post_send(&SendRequest::new(1, add, &[there])).unwrap();
    a.succeed(1);
}

#[test]
fn both_directions_with_many_queue_pairs() {
    let gpu = StandIn::program();
    const N: usize = 20;
    let (a, b) = ends("127.91.12.1", N, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::NoWindow), OnGpu::new(&b, gpu, GpuMethod::NoWindow));
    for i in 0..N {
        let j = (i + N / 2) % N;
        a.qps[i]
            .post_send(&SendRequest::new(i as u64, Operation::Write(at_b.remote(0)), &[at_a.sge(0, LEN)]))
            .unwrap();
        b.qps[j]
            .post_send(&SendRequest::new(j as u64, Operation::Write(at_a.remote(0)), &[at_b.sge(0, LEN)]))
            .unwrap();
    }
    let (mut at, mut bt) = (Vec::new(), Vec::new());
    let end = Instant::now() + crate::common::LIMIT;
    while (at.len() < N || bt.len() < N) && Instant::now() < end {
        a.cq.poll(&mut at, 64).unwrap();
        b.cq.poll(&mut bt, 64).unwrap();
    }
    let bad: Vec<_> = at.iter().chain(&bt).filter(|c| c.status != Status::Success).collect();
    assert!(bad.is_empty() && at.len() == N && bt.len() == N, "{bad:?}");
}

#[test]
fn a_copy_that_fails_harms_no_other_region() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.13.1", 2, Mtu::Mtu4096);
    let (r1, r2) = (OnGpu::new(&b, gpu, GpuMethod::Staged), OnGpu::new(&b, gpu, GpuMethod::Staged));
    a.fill(1);
    gpu.set_copy_delay_us(200_000);
    let [s] = a.sge(0, 8);
    a.qps[0].post_send(&SendRequest::new(1, Operation::Write(r1.remote(0)), &[s])).unwrap();
    a.qps[1].post_send(&SendRequest::new(2, Operation::Write(r2.remote(0)), &[s])).unwrap();
    crate::common::until("arrival", || b.device.path_counters().inbound.staged.bytes == 16);
    gpu.fail_next(c"cuEventQuery", 719);
    let done = a.completions(2);
    gpu.forget_failures();
    gpu.set_copy_delay_us(0);
    // The one whose copy was asked for first: with one engine, that is the first.
    let fine = done.iter().filter(|c| c.status == Status::Success).count();
    assert_eq!(fine, 1, "{done:?}");
}

#[test]
fn a_queue_pair_that_is_destroyed_says_what_it_owes() {
    let gpu = StandIn::program();
    let (a, mut b) = ends("127.91.14.1", 1, Mtu::Mtu4096);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::Staged);
    gpu.set_copy_delay_us(5000);
    a.fill(1);
    a.post(Operation::Write(at_b.remote(0)), 0, 64);
    crate::common::until("arrival", || b.device.path_counters().inbound.staged.bytes == 64);
    drop(b.qps.remove(0));
    let status = a.status();
    gpu.set_copy_delay_us(0);
    assert_eq!(status, Status::Success);
    at_b.holds(0, &patterns(1, 0, 64));
}

fn sleeper(addr: &str, on_gpu: bool, poll_after: bool) {
    let gpu = StandIn::program();
    let (mut a, mut b) = (End::open(&config(addr), MIB), End::open(&config(addr), MIB));
    let channel = a.device.create_channel().unwrap();
    a.cq = a.device.create_cq(64, Some(&channel)).unwrap();
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 0, &b, 0, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::NoWindow), OnGpu::new(&b, gpu, GpuMethod::Window));
    gpu.set_copy_delay_us(300);
    for round in 0..5 {
        std::thread::sleep(Duration::from_millis(50));
        let [host] = a.sge(0, 50_000);
        let from = if on_gpu { at_a.sge(0, 50_000) } else { host };
        a.qps[0].post_send(&SendRequest::new(1, Operation::Write(at_b.remote(0)), &[from])).unwrap();
        a.cq.request_notify(false);
        let mut got = Vec::new();
        if poll_after {
            a.cq.poll(&mut got, 8).unwrap();
        }
        assert!(!got.is_empty() || channel.wait(crate::common::LIMIT), "round {round}");
        while got.is_empty() {
            a.cq.poll(&mut got, 8).unwrap();
        }
    }
}

#[test]
fn a_thread_that_sleeps_after_a_post_from_host_memory_is_served() {
    sleeper("127.91.9.2", false, true);
}

#[test]
fn a_thread_that_polls_once_after_arming_is_served() {
    sleeper("127.91.9.3", true, true);
}

#[test]
fn lossy_link() {
    use nobounce_nic::links::fault::FaultConfig;
    let gpu = StandIn::program();
    let mut n = 0;
    for mtu in [Mtu::Mtu256, Mtu::Mtu4096] {
        for way in GpuMethod::ALL {
            n += 1;
            let fault: FaultConfig = "loss=0.01,dup=0.01,reorder=0.01".parse().unwrap();
            let addr = format!("127.91.15.{n}");
            let faulty = |seed| Config { fault: Some(FaultConfig { seed, ..fault }), ..config(&addr) };
            let (a, b) = crate::common::pair_with(&faulty(1), &faulty(2), MIB, mtu);
            let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
            for round in 0..3_u8 {
                at_a.fill(round + 1);
                at_b.fill(round + 101);
                // Both ends write to and read from each other, on one queue pair.
                let half = LEN / 2;
                let size = 300_001;
                for (x, here, there) in [(&a, &at_a, &at_b), (&b, &at_b, &at_a)] {
                    x.qps[0]
                        .post_sends(&[
                            SendRequest::new(
                                1,
                                Operation::Write(there.remote(half + 3)),
                                &[here.sge(5, size)],
                            ),
                            SendRequest::new(
                                2,
                                Operation::Read(there.remote(7)),
                                &[here.sge(half + 400_000, size)],
                            ),
                            SendRequest::new(
                                3,
                                Operation::Write(there.remote(half + 350_000)),
                                &[here.sge(11, 9001)],
                            ),
                        ])
                        .unwrap();
                }
                let (mut at, mut bt) = (Vec::new(), Vec::new());
                crate::common::until(&format!("{way:?} {mtu:?} round {round}"), || {
                    a.cq.poll(&mut at, 8).unwrap();
                    b.cq.poll(&mut bt, 8).unwrap();
                    at.len() == 3 && bt.len() == 3
                });
                assert!(
                    at.iter().chain(&bt).all(|c| c.status == Status::Success),
                    "{way:?} {mtu:?} {at:?} {bt:?}"
                );
                for (here, mine, theirs) in [(&at_a, round + 1, round + 101), (&at_b, round + 101, round + 1)]
                {
                    let _ = mine;
                    here.holds(half + 3, &patterns(theirs, 5, size));
                    here.holds(half + 400_000, &patterns(theirs, 7, size));
                    here.holds(half + 350_000, &patterns(theirs, 11, 9001));
                }
            }
        }
    }
}

/// Regression: a response that waits for its payload must not block all requests of its queue pair
/// while the peer keeps reading.
#[test]
fn requests_do_not_wait_for_what_the_peer_reads() {
    const READS: usize = 60;
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.16.1", 1, Mtu::Mtu4096);
    let at_a = OnGpu::new(&a, gpu, GpuMethod::NoWindow);
    at_a.fill(1);
    a.fill(2);
    gpu.set_copy_delay_us(20_000);
    let [into] = b.sge(0, 8);
    let reads: Vec<_> = (0..READS)
        .map(|i| {
            SendRequest::new(i as u64, Operation::Read(at_a.remote(i * 64)), std::slice::from_ref(&into))
        })
        .collect();
    b.qps[0].post_sends(&reads).unwrap();
    let mut read = Vec::new();
    crate::common::until("the first answer", || b.cq.poll(&mut read, 1).unwrap() > 0);
    a.post(Operation::Write(b.remote(4096)), 0, 64);
    let mut written = Vec::new();
    crate::common::until("the WRITE", || {
        b.cq.poll(&mut read, READS).unwrap();
        a.cq.poll(&mut written, 1).unwrap() > 0
    });
    let early = read.len();
    gpu.set_copy_delay_us(0);
    assert_eq!(written[0].status, Status::Success);
    assert!(early < READS / 2, "the WRITE waited for {early} of {READS} READs");
    assert!(b.bytes(4096, 64) == patterns(2, 0, 64));
    b.succeed(READS - early);
}

/// Copies of others before ours take time: no queue pair fails for that.
#[test]
fn a_busy_copy_engine_only_costs_time() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.91.17.1", 1, Mtu::Mtu4096);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::Staged);
    a.fill(1);
    gpu.set_copy_delay_us(250_000);
    let [from] = a.sge(0, 64);
    let [word] = a.sge(128, 8);
    let add = Operation::FetchAdd { remote: at_b.remote(0), add: 1 };
    // Neither the second WRITE, elsewhere, nor the atomic may come before the copy.
    a.qps[0]
        .post_sends(&[
            SendRequest::new(1, Operation::Write(at_b.remote(0)), &[from]),
            SendRequest::new(2, Operation::Write(b.remote(0)), &[from]),
            SendRequest::new(3, add, &[word]),
        ])
        .unwrap();
    let done = a.completions(3);
    gpu.set_copy_delay_us(0);
    assert!(done.iter().all(|one| one.status == Status::Success), "{done:?}");
    assert!(b.bytes(0, 64) == patterns(1, 0, 64));
    assert!(a.bytes(128, 8) == patterns(1, 0, 8), "the word before");
}

#[test]
fn the_last_receive_is_announced_after_its_completion() {
    let gpu = StandIn::program();
    // The first packet that arrives is the message.
    let config = Config { retransmit: Retransmit::GoBackN, ..config("127.91.9.1") };
    let mut a = End::open(&config, MIB);
    let mut b = End::open(&config, MIB);
    a.add_qp(QpLimits::default());
    let srq = b.pd.create_srq(SrqLimits { depth: 4, sges: 1 }).unwrap();
    let limits = QpLimits::default();
    let init = QpInit { service: Service::Rc, send_cq: &b.cq, recv_cq: &b.cq, srq: Some(&srq), limits };
    let qp = b.pd.create_qp_with(&init).unwrap();
    qp.modify(&QpAttr::to_init(crate::common::ALL_ACCESS)).unwrap();
    b.qps.push(qp);
    connect(&a, 0, &b, 0, Mtu::Mtu4096);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::NoWindow);
    gpu.set_copy_delay_us(50_000);
    srq.post_recv(&RecvRequest { wr_id: 5, sges: &[at_b.sge(0, 4096)] }).unwrap();
    a.post(Operation::Send, 0, 4096);
    crate::common::until("the message", || b.counter("rcvd_pkts") > 0);
    b.qps[0].modify(&QpAttr::to_state(QpState::Error)).unwrap();
    let event = b.event();
    let mut got = Vec::new();
    b.cq.poll(&mut got, 4).unwrap();
    gpu.set_copy_delay_us(0);
    assert_eq!(event, AsyncEvent::Qp { qpn: b.qps[0].qpn(), event: QpEvent::LastWqeReached });
    assert_eq!(got.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [5], "it was there when the event came");
}
