//! Regions of GPU memory, on a stand-in driver whose device memory is a memfd. The code is the same
//! as on a GPU, but the copy engine is a thread and the window ordinary memory.
#![allow(clippy::cast_possible_truncation)] // sizes of tests

use crate::common::on_gpu::{GpuMethod, LEN, OnGpu, pool, used};
use crate::common::{ALL_ACCESS, End, MIB, config, connect, pair, patterns};
use fake_cuda::client::StandIn;
use nobounce_memory::gpu::GpuOptions;
use nobounce_memory::path::{Mechanism, Path, Require};
use nobounce_nic::soft::{NewMemory, Rereg};
use nobounce_nic::work::{Mtu, Operation, QpLimits, RecvRequest, Remote, SendRequest, Sge, Status};

/// Around packets, the crossover, the first fetch and chunks.
const SIZES: [usize; 14] =
    [1, 8, 63, 4095, 4096, 4097, 20_000, 65_536, 65_537, 200_001, 262_144, 327_680, 700_001, LEN - 64];

#[test]
fn writes_and_reads_of_every_size_take_the_way_they_say() {
    let gpu = StandIn::program();
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let (a, b) = pair(&format!("127.81.1.{}", n + 1), 4096, Mtu::Mtu4096);
        let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
        for (round, size) in SIZES.into_iter().enumerate() {
            let seed = round as u8 + 1;
            at_a.fill(seed);
            at_b.fill(0xee);
            let (from, to) = (round * 3 % 61, round * 7 % 61);
            let write = Operation::Write(at_b.remote(to));
            a.qps[0].post_send(&SendRequest::new(1, write, &[at_a.sge(from, size)])).unwrap();
            a.succeed(1);
            at_b.holds(to, &patterns(seed, from, size));
            at_b.holds(0, &patterns(0xee, 0, to));
            at_b.holds(to + size, &patterns(0xee, to + size, LEN - to - size));

            at_a.fill(0xdd);
            let read = Operation::Read(at_b.remote(to));
            a.qps[0].post_send(&SendRequest::new(2, read, &[at_a.sge(to, size)])).unwrap();
            a.succeed(1);
            at_a.holds(to, &patterns(seed, from, size));
            at_a.holds(to + size, &patterns(0xdd, to + size, LEN - to - size));
        }
        let (out, into) = (a.device.path_counters().outbound, b.device.path_counters().inbound);
        match way {
            GpuMethod::Window => {
                assert_eq!(used(&into), ["window"], "{way:?}");
                assert_eq!(
                    used(&out),
                    ["window", "copy-engine"],
                    "{way:?}: short ones by loads, long ones not"
                );
                assert!(at_a.mr.paths().are_direct());
            }
            GpuMethod::NoWindow => {
                assert_eq!(used(&into), ["staged"], "{way:?}");
                assert_eq!(used(&out), ["copy-engine"], "{way:?}");
                assert!(!at_a.mr.paths().inbound.is_direct());
                assert_eq!(at_a.mr.paths().outbound, Path::Direct(Mechanism::CopyEngine));
            }
            GpuMethod::Staged => {
                assert_eq!((used(&into), used(&out)), (vec!["staged"], vec!["staged"]));
                assert!(at_a.mr.paths().to_string().contains("asked for"), "{}", at_a.mr.paths());
            }
        }
        let moved: u64 = SIZES.iter().map(|size| *size as u64).sum();
        assert_eq!(into.list().iter().map(|(_, tally)| tally.bytes).sum::<u64>(), moved);
        assert_eq!(into.list().iter().map(|(_, tally)| tally.operations).sum::<u64>(), SIZES.len() as u64);
        assert_eq!(b.device.peer_path_counters().len(), 1);
        assert_eq!((a.counter("icrc_errors"), b.counter("icrc_errors")), (0, 0));
    }
}

#[test]
fn a_region_moves_between_the_host_and_the_gpu() {
    let gpu = StandIn::program();
    let (a, b) = pair("127.81.9.1", LEN, Mtu::Mtu4096);
    let mut there = OnGpu::new(&b, gpu, GpuMethod::Window);
    a.fill(4);
    let write = |remote| {
        a.post(Operation::Write(remote), 0, 100_000);
        a.status()
    };
    let key = there.mr.rkey();
    assert_eq!(write(there.remote(0)), Status::Success);
    there.holds(0, &patterns(4, 0, 100_000));
    let host = NewMemory::Host { addr: b.buffer.as_mut_ptr(), len: LEN };
    // SAFETY: the end's own buffer, which the test touches through windows only, and which goes
    // after the region.
    unsafe { there.mr.rereg(&Rereg { memory: Some(host), ..Rereg::default() }) }.unwrap();
    assert_eq!(there.mr.paths().inbound, Path::Direct(Mechanism::Cpu));
    assert!(there.mr.gpu_memory().is_none());
    assert_eq!(write(Remote { addr: b.buffer.addr(), rkey: key }), Status::Success);
    assert!(b.bytes(0, 100_000) == patterns(4, 0, 100_000));
    // Back, and staged this time.
    let options = GpuMethod::Staged.options();
    let on_gpu = NewMemory::Gpu { addr: there.addr, len: LEN, options: &options };
    there.fill(0);
    // SAFETY: the test touches the memory through the stand-in only.
    unsafe { there.mr.rereg(&Rereg { memory: Some(on_gpu), ..Rereg::default() }) }.unwrap();
    assert!(!there.mr.paths().inbound.is_direct());
    // A change of access rights keeps the memory and its data path.
    // SAFETY: as above.
    unsafe { there.mr.rereg(&Rereg { access: Some(ALL_ACCESS), ..Rereg::default() }) }.unwrap();
    assert_eq!(write(there.remote(0)), Status::Success);
    there.holds(0, &patterns(4, 0, 100_000));
    assert_eq!(used(&b.device.path_counters().inbound), ["cpu", "window", "staged"]);
    // What is no GPU's address changes nothing.
    let wrong = NewMemory::Gpu { addr: b.buffer.addr(), len: LEN, options: &options };
    // SAFETY: refused.
    unsafe { there.mr.rereg(&Rereg { memory: Some(wrong), ..Rereg::default() }) }.unwrap_err();
    assert_eq!(write(there.remote(0)), Status::Success);
}

#[test]
fn sends_from_several_pieces_of_host_and_gpu_arrive_in_several_pieces() {
    let gpu = StandIn::program();
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let (a, b) = pair(&format!("127.81.2.{}", n + 1), MIB, Mtu::Mtu1024);
        let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
        a.fill(7);
        at_a.fill(9);
        let [host] = a.sge(5, 3001);
        // The long piece is fetched in several parts, which end where packets do though it does not
        // begin where one does.
        let from = [at_a.sge(3, 90_001), host, at_a.sge(200_000, 700_007), at_a.sge(1_400_001, 1)];
        let [there] = b.sge(0, 100_003);
        let to = [at_b.sge(1, 50_000), there, at_b.sge(100_000, 643_007)];
        b.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &to }).unwrap();
        a.qps[0].post_send(&SendRequest::new(2, Operation::Send, &from)).unwrap();
        a.succeed(1);
        let received = b.completions(1);
        assert_eq!((received[0].status, received[0].byte_len), (Status::Success, 793_010), "{way:?}");
        let mut sent = patterns(9, 3, 90_001);
        sent.extend(patterns(7, 5, 3001));
        sent.extend(patterns(9, 200_000, 700_007));
        sent.extend(patterns(9, 1_400_001, 1));
        at_b.holds(1, &sent[..50_000]);
        assert!(b.bytes(0, 100_003) == sent[50_000..150_003], "{way:?}");
        at_b.holds(100_000, &sent[150_003..]);
    }
}

#[test]
fn a_flag_in_host_memory_comes_after_the_payload_that_is_staged() {
    let gpu = StandIn::program();
    gpu.set_copy_delay_us(2000);
    let (a, b) = pair("127.81.3.1", MIB, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::Window), OnGpu::new(&b, gpu, GpuMethod::Staged));
    for round in 1..20_u8 {
        at_a.fill(round);
        a.fill(round);
        let [flag] = a.sge(0, 1);
        a.qps[0]
            .post_sends(&[
                SendRequest::new(1, Operation::Write(at_b.remote(0)), &[at_a.sge(0, 100_000)]),
                SendRequest::new(2, Operation::Write(b.remote(0)), &[flag]),
            ])
            .unwrap();
        let expected = patterns(round, 0, 1);
        crate::common::until("the flag", || {
            let mut none = Vec::new();
            a.cq.poll(&mut none, 4).unwrap();
            b.cq.poll(&mut none, 4).unwrap();
            b.bytes(0, 1) == expected
        });
        at_b.holds(0, &patterns(round, 0, 100_000));
        crate::common::until("both writes", || {
            let mut done = Vec::new();
            a.cq.poll(&mut done, 4).unwrap();
            b.device.path_counters().inbound.cpu.operations == u64::from(round)
        });
    }
}

#[test]
fn atomics_on_gpu_memory_happen_once_and_return_the_value_before() {
    let gpu = StandIn::program();
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let (a, b) = pair(&format!("127.81.4.{}", n + 1), 4096, Mtu::Mtu4096);
        let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
        at_b.fill(0);
        gpu.poke(at_b.addr + 64, &40_u64.to_ne_bytes());
        let add = Operation::FetchAdd { remote: at_b.remote(64), add: 2 };
        let swap = |compare, swap| Operation::CompareSwap { remote: at_b.remote(64), compare, swap };
        for (op, before) in [(add, 40), (swap(42, 7), 42), (swap(42, 8), 7), (add, 7)] {
            a.qps[0].post_send(&SendRequest::new(1, op, &[at_a.sge(128, 8)])).unwrap();
            a.succeed(1);
            at_a.holds(128, &u64::to_ne_bytes(before));
        }
        at_b.holds(64, &9_u64.to_ne_bytes());
    }
}

/// A put with its signal: the atomic behind the message does not make it one of a stream, for which
/// the copy engine is better.
#[test]
fn a_message_with_an_atomic_behind_it_is_loaded() {
    const SIZE: usize = 2000;
    let gpu = StandIn::program();
    // The calibration finds loads of this size faster, however busy the machine is.
    gpu.set_copy_delay_us(100);
    let (a, b) = pair("127.81.12.1", 4096, Mtu::Mtu4096);
    let (at_a, at_b) = (OnGpu::new(&a, gpu, GpuMethod::Window), OnGpu::new(&b, gpu, GpuMethod::Window));
    gpu.set_copy_delay_us(0);
    let (write, old) = ([at_a.sge(0, SIZE)], [at_a.sge(4096, 8)]);
    let put = SendRequest::new(1, Operation::Write(at_b.remote(0)), &write);
    let add = Operation::FetchAdd { remote: at_b.remote(8192), add: 1 };
    let signal = SendRequest::new(2, add, &old);
    let loaded = || a.device.path_counters().outbound.window.bytes;
    a.qps[0].post_sends(&[put, signal]).unwrap();
    a.succeed(2);
    assert_eq!(loaded(), SIZE as u64);
    a.qps[0].post_sends(&[put, signal, put]).unwrap();
    a.succeed(3);
    assert_eq!(loaded(), 2 * SIZE as u64, "the first of them has another one behind it");
}

#[test]
fn many_queue_pairs_share_the_chunks() {
    const QPS: usize = 24;
    let gpu = StandIn::program();
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let addr = format!("127.81.5.{}", n + 1);
        let (mut a, mut b) = (End::open(&config(&addr), 4096), End::open(&config(&addr), 4096));
        for i in 0..QPS {
            a.add_qp(QpLimits::default());
            b.add_qp(QpLimits::default());
            connect(&a, i, &b, i, Mtu::Mtu4096);
        }
        let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
        at_a.fill(3);
        let size = LEN / QPS / 64 * 64;
        for (i, qp) in a.qps.iter().enumerate() {
            let write = Operation::Write(at_b.remote(i * size));
            qp.post_send(&SendRequest::new(1, write, &[at_a.sge(i * size, size)])).unwrap();
        }
        a.succeed(QPS);
        at_b.holds(0, &patterns(3, 0, size * QPS));
    }
}

#[test]
fn a_queue_of_messages_is_fetched_ahead_and_arrives_in_order() {
    let gpu = StandIn::program();
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let (a, b) = pair(&format!("127.81.9.{}", n + 1), 4096, Mtu::Mtu4096);
        let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
        at_a.fill(5);
        // Sizes on both sides of the crossover, each where the one before ended.
        let sizes = [40_000, 8, 100_000, 300_000, 5, 70_001, 65_536, 4096, 131_072, 9_000];
        let mut at = 0;
        let requests: Vec<(Operation, [Sge; 1])> = sizes
            .iter()
            .map(|&size| {
                let request = (Operation::Write(at_b.remote(at)), [at_a.sge(at, size)]);
                at += size;
                request
            })
            .collect();
        let requests: Vec<_> = requests.iter().map(|(op, sges)| SendRequest::new(1, *op, sges)).collect();
        for _ in 0..5 {
            at_b.fill(0xee);
            a.qps[0].post_sends(&requests).unwrap();
            a.succeed(sizes.len());
            at_b.holds(0, &patterns(5, 0, at));
        }
    }
}

#[test]
fn memory_freed_under_traffic_ends_in_an_error_and_not_in_a_crash() {
    let gpu = StandIn::program();
    for (n, way) in [GpuMethod::NoWindow, GpuMethod::Staged].into_iter().enumerate() {
        let (a, b) = pair(&format!("127.81.6.{}", n + 1), MIB, Mtu::Mtu4096);
        let at_b = OnGpu::new(&b, gpu, GpuMethod::Window);
        let at_a = OnGpu::new(&a, gpu, way);
        let stream = gpu.stream(1);
        if way == GpuMethod::NoWindow {
            assert_eq!(gpu.free_async(at_a.addr, stream), 0);
            assert_eq!(gpu.synchronize_stream(stream), 0);
        } else {
            assert_eq!(gpu.free(at_a.addr), 0);
        }
        let write = Operation::Write(at_b.remote(0));
        a.qps[0].post_send(&SendRequest::new(1, write, &[at_a.sge(0, 100_000)])).unwrap();
        assert_eq!(a.status(), Status::LocalProtection, "{way:?}");
        assert!(a.counter("memory_faults") > 0);
    }
}

#[test]
fn a_copy_that_fails_fails_the_queue_pair_and_never_reports_success() {
    let gpu = StandIn::program();
    let (a, b) = pair("127.81.7.1", MIB, Mtu::Mtu4096);
    let at_b = OnGpu::new(&b, gpu, GpuMethod::Staged);
    gpu.fail_next(c"cuMemcpyHtoDAsync_v2", 719);
    b.qps[0].post_recv(&RecvRequest { wr_id: 5, sges: &[at_b.sge(0, 100_000)] }).unwrap();
    a.fill(1);
    a.post(Operation::Send, 0, 100_000);
    let received = b.completions(1);
    assert_ne!(received[0].status, Status::Success);
    assert_ne!(a.status(), Status::Success);
}

#[test]
fn direct_is_required_and_staged_is_refused_with_the_reason() {
    let gpu = StandIn::program();
    let end = End::open(&config("127.81.8.1"), 4096);
    gpu.refuse_dmabuf_mmap(1);
    let addr = pool(gpu);
    let options = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
    // SAFETY: the memory has no users.
    let refused = unsafe { end.pd.register_gpu(addr, LEN, ALL_ACCESS, &options) }.unwrap_err().to_string();
    assert!(refused.contains("direct path is required") && refused.contains("no window"), "{refused}");
    // SAFETY: as above.
    let wrong =
        unsafe { end.pd.register_gpu(addr, LEN + 1, ALL_ACCESS, &GpuOptions::default()) }.unwrap_err();
    assert_eq!(wrong.errno(), libc::EFAULT, "{wrong}");
}
