//! GPU memory that its owner frees, or whose context is destroyed, while it is registered and has a
//! window. Soon after, every request that names it fails with the reason, and other traffic is
//! unaffected. Runs on a stand-in driver; `gpu_traffic` does the same on a GPU.
#![allow(clippy::cast_possible_truncation)] // sizes of tests

use crate::common::on_gpu::{GpuMethod, LEN, OnGpu};
use crate::common::{ALL_ACCESS, End, check_write, connect, pair, reconnect, until};
use fake_cuda::client::StandIn;
use nobounce_memory::gpu::{Gone, GpuOptions};
use nobounce_nic::soft::Mr;
use nobounce_nic::work::{Mtu, Operation, QpLimits, RecvRequest, Remote, SendRequest, Sge, Status};

/// Of one packet, of several by loads, and of many by the copy engine.
const SIZES: [u32; 3] = [64, 20_000, 600_000];

/// Two ends with a second connection, for unaffected traffic.
fn ends(addr: &str) -> (End, End) {
    let (mut a, mut b) = pair(addr, 1 << 20, Mtu::Mtu4096);
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 1, &b, 1, Mtu::Mtu4096);
    (a, b)
}

fn ended(mr: &Mr) -> Gone {
    let memory = mr.gpu_memory().unwrap();
    until("the end of the registration", || memory.ended().is_some());
    memory.ended().unwrap()
}

/// Whatever a peer asks of it is refused; and so is what we would do with it ourselves.
#[track_caller]
fn refused(a: &End, b: &End, mr: &Mr) {
    let there = Remote { addr: mr.addr() + 8, rkey: mr.rkey() };
    let here = |len| [Sge { addr: mr.addr() + 8, len, lkey: mr.lkey() }];
    let atomics = [
        (Operation::FetchAdd { remote: there, add: 1 }, 8),
        (Operation::CompareSwap { remote: there, compare: 0, swap: 1 }, 8),
    ];
    let of_all = |op: Operation| SIZES.map(|size| (op, size));
    let remote = [of_all(Operation::Write(there)), of_all(Operation::Read(there))].concat();
    for (op, size) in remote.into_iter().chain(atomics) {
        a.qps[0].post_send(&SendRequest::new(1, op, &a.sge(0, size))).unwrap();
        assert_eq!(a.status(), Status::RemoteAccess, "{op:?}, {size} bytes");
        reconnect(a, b, Mtu::Mtu4096);
    }
    let host = a.remote(0);
    let local = [
        of_all(Operation::Write(host)).to_vec(),
        of_all(Operation::Read(host)).to_vec(),
        of_all(Operation::Send).to_vec(),
        vec![(Operation::FetchAdd { remote: host, add: 1 }, 8)],
    ];
    for (op, size) in local.concat() {
        b.qps[0].post_send(&SendRequest::new(1, op, &here(size))).unwrap();
        assert_eq!(b.status(), Status::LocalProtection, "{op:?}, {size} bytes of our own");
        reconnect(a, b, Mtu::Mtu4096);
    }
    b.qps[0].post_recv(&RecvRequest { wr_id: 3, sges: &here(4096) }).unwrap();
    a.post(Operation::Send, 0, 512);
    assert_eq!(b.status(), Status::LocalProtection, "a receive into it");
    assert_eq!(a.status(), Status::RemoteOperation, "a SEND to a receive into it");
    reconnect(a, b, Mtu::Mtu4096);
}

/// The second connection, other memory and new memory are as they were.
#[track_caller]
fn others_go_on(a: &End, b: &End, other: &OnGpu) {
    check_write(a, b, 8, 5000);
    for qp in [0, 1] {
        a.qps[qp]
            .post_send(&SendRequest::new(1, Operation::Write(other.remote(0)), &a.sge(0, 5000)))
            .unwrap();
        a.succeed(1);
    }
    other.holds(0, &b.bytes(0, 5000));
}

#[test]
fn freed_memory_is_refused_and_others_go_on() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.82.31.1");
    let (at_b, other) = (OnGpu::new(&b, gpu, GpuMethod::Window), OnGpu::new(&b, gpu, GpuMethod::Window));
    a.post(Operation::Write(at_b.remote(0)), 0, 5000);
    a.succeed(1);
    assert_eq!(gpu.free(at_b.addr), 0);
    let gone = ended(&at_b.mr);
    assert!(gone.to_string().contains("was freed") && gone.to_string().contains("deregister"), "{gone}");
    let refusals = b.counter("refused_access");
    refused(&a, &b, &at_b.mr);
    assert!(b.counter("refused_access") > refusals);
    others_go_on(&a, &b, &other);
    // Silently, as NCCL does it.
    drop(at_b);
    others_go_on(&a, &b, &other);
    others_go_on(&a, &b, &OnGpu::new(&b, gpu, GpuMethod::Window));
}

/// Under traffic: some requests succeed, one fails, those behind it are flushed. Memory of the new
/// owner of the address stays untouched.
#[test]
fn memory_freed_under_traffic_is_refused() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.82.32.1");
    for size in SIZES {
        let at_b = OnGpu::new(&b, gpu, GpuMethod::Window);
        assert_eq!(gpu.free(at_b.addr), 0);
        let again = gpu.malloc(LEN);
        gpu.poke(again, &[3; 4096]);
        let mut posted = 0;
        let status = loop {
            a.post(Operation::Write(at_b.remote(0)), 0, size);
            posted += 1;
            match a.status() {
                Status::Success => {}
                status => break status,
            }
        };
        assert_eq!(status, Status::RemoteAccess, "WRITE {posted} of {size} bytes");
        assert_eq!(again, at_b.addr);
        assert_eq!(gpu.peek(again, 4096), [3; 4096]);
        reconnect(&a, &b, Mtu::Mtu4096);
        assert_eq!(gpu.free(again), 0);
    }
}

#[test]
fn memory_of_a_destroyed_context_is_refused() {
    let gpu = StandIn::program();
    let (a, b) = ends("127.82.33.1");
    let other = OnGpu::new(&b, gpu, GpuMethod::Window);
    let mut context = 0;
    assert_eq!(gpu.create_context(&mut context, 0, 0), 0);
    let addr = gpu.malloc(LEN);
    // SAFETY: the test touches the memory through the stand-in only.
    let mr = unsafe { b.pd.register_gpu(addr, LEN, ALL_ACCESS, &GpuOptions::default()) }.unwrap();
    a.post(Operation::Write(Remote { addr, rkey: mr.rkey() }), 0, 5000);
    a.succeed(1);
    assert_eq!(gpu.destroy_context(context), 0);
    let gone = ended(&mr);
    assert!(matches!(gone, Gone::Context { .. }), "{gone}");
    refused(&a, &b, &mr);
    others_go_on(&a, &b, &other);
}
