//! A context that goes away under registered memory, by `cuCtxDestroy` or a reset of the device.

use fake_cuda::client::StandIn;
use nobounce_memory::gpu::api::Context;
use nobounce_memory::gpu::{CudaError, Gpu};
use nobounce_nic::soft::Mr;
use nobounce_nic::work::{Mtu, Operation, SendRequest, Status};

use crate::common::{End, pair, reconnect};
use crate::freed::{goes_on, refused};
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};

const LEN: usize = 2 << 20;
const SIZES: [usize; 3] = [64, 20_000, 1 << 20];

/// The stand-in is to be as unforgiving as a real driver: handles of a context that is gone end the
/// process.
fn unforgiving(rig: &Rig) {
    if rig.is_stand_in() {
        StandIn::load().crash_on_dead_handles(1);
    }
}

fn create(gpu: &Gpu) -> Context {
    let mut context = Context::NULL;
    // SAFETY: the calls write one handle; the new context is popped again.
    let made = gpu.driver().relaxed(|api| unsafe {
        api.ctx_create(&raw mut context, 0, gpu.ordinal())?;
        let mut popped = Context::NULL;
        api.ctx_pop(&raw mut popped)
    });
    made.map_err(|error: CudaError| error).unwrap();
    context
}

/// WRITEs, READs and atomics into, and WRITEs out of, memory that is gone: each ends, and none says
/// that it was done.
fn afterwards(a: &End, b: &End, (at_a, at_b): (&Mr, &Mr), way: GpuMethod) {
    if way == GpuMethod::Direct {
        for mr in [at_a, at_b] {
            println!("figure: context gone: noticed after {:.0?}", rig::await_end(mr));
            println!("figure: context gone: {}", mr.gpu_memory().unwrap().ended().unwrap());
        }
        refused(a, b, at_b);
    }
    for size in SIZES {
        let (here, there) = (rig::sge(at_a, 0, size), rig::remote(at_b, 0));
        let host = a.sge(0, size as u32);
        let requests = [
            ("WRITE into it", Operation::Write(there), &host, Status::RemoteAccess),
            ("READ of it", Operation::Read(there), &host, Status::RemoteAccess),
            ("WRITE out of it", Operation::Write(b.remote(0)), &here, Status::LocalProtection),
            ("READ into it", Operation::Read(b.remote(0)), &here, Status::LocalProtection),
        ];
        for (what, op, sges, ended) in requests {
            a.qps[0].post_send(&SendRequest::new(1, op, sges)).unwrap();
            let status = rig::status(a);
            println!("figure: context gone, {way:?}, {what}, {size} bytes: {status:?}");
            assert!(status != Status::Success, "{what}, {size} bytes");
            assert!(way != GpuMethod::Direct || status == ended, "{what}, {size} bytes: {status:?}");
            reconnect(a, b, Mtu::Mtu4096);
        }
    }
    let add = Operation::FetchAdd { remote: rig::remote(at_b, 8), add: 1 };
    a.qps[0].post_send(&SendRequest::new(1, add, &a.sge(0, 8))).unwrap();
    let status = rig::status(a);
    assert!(status != Status::Success, "fetch-and-add: {status:?}");
    reconnect(a, b, Mtu::Mtu4096);
}

/// What memory holds, by the CPU's loads through its window.
fn loaded(mr: &Mr, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mr.gpu_memory().unwrap().window().unwrap().load(0, &mut bytes).unwrap();
    bytes
}

/// VMM memory that outlived the reset: the window reaches it as before, for it needs no context.
/// Copy-engine transfers, whose streams were destroyed with the context, succeed or fail with an
/// error. No request reports success without the bytes.
fn lives_on(a: &End, b: &End, (at_a, at_b): (&Mr, &Mr), way: GpuMethod, held: &[u8]) {
    for (turn, size) in SIZES.into_iter().enumerate() {
        let (seed, half) = (20 + turn as u8, LEN / 2);
        let (here, there) = (rig::sge(at_a, 0, size), rig::remote(at_b, 0));
        let (host, back) = (a.sge(0, size as u32), a.sge(half as u64, size as u32));
        let requests = [
            ("WRITE into it", Operation::Write(there), &host),
            ("READ of it", Operation::Read(there), &back),
            ("WRITE out of it", Operation::Write(b.remote(0)), &here),
        ];
        a.fill(seed);
        let sent = a.bytes(0, size);
        let mut written = false;
        for (what, op, sges) in requests {
            a.qps[0].post_send(&SendRequest::new(1, op, sges)).unwrap();
            let status = rig::status(a);
            println!("figure: VMM memory after a reset, {way:?}, {what}, {size} bytes: {status:?}");
            if status != Status::Success {
                // By stores, and by loads of short messages, nothing of CUDA is needed.
                let needs_cuda = what != "WRITE into it" && size > 64;
                assert!(way != GpuMethod::Direct || needs_cuda, "{what}, {size} bytes: {status:?}");
                reconnect(a, b, Mtu::Mtu4096);
                continue;
            }
            match what {
                "WRITE into it" => {
                    written = true;
                    // A READ of it may end in an error: the written bytes are checked without the
                    // NIC and without CUDA, too.
                    if way == GpuMethod::Direct {
                        assert!(loaded(at_b, size) == sent, "{what}, {size} bytes: other bytes are there");
                    }
                }
                "READ of it" => assert!(!written || a.bytes(half, size) == sent, "{what}, {size} bytes"),
                _ => assert!(b.bytes(0, size) == held[..size], "{what}, {size} bytes"),
            }
        }
    }
}

/// Direct WRITEs from host memory are in flight all the while: they need nothing of CUDA. (A copy
/// in flight when its context is destroyed breaks CUDA's own rule.)
#[track_caller]
fn end_under_traffic((a, b): (&End, &End), at_b: &Mr, way: GpuMethod, end: impl FnOnce()) {
    let write = Operation::Write(rig::remote(at_b, 0));
    let host = a.sge(0, 100_000);
    let posted = if way == GpuMethod::Direct { 64 } else { 1 };
    for _ in 0..posted {
        a.qps[0].post_send(&SendRequest::new(1, write, &host)).unwrap();
    }
    if way != GpuMethod::Direct {
        rig::succeed(a, posted);
    }
    end();
    if way == GpuMethod::Direct {
        let statuses: Vec<_> = rig::completions(a, posted).iter().map(|done| done.status).collect();
        let good = statuses.iter().filter(|status| **status == Status::Success).count();
        println!("figure: context gone under {posted} direct WRITEs: {good} went well");
        if good < posted {
            reconnect(a, b, Mtu::Mtu4096);
        }
    }
}

#[test]
fn destroyed() {
    let Some(rig) = Rig::new("contexts::destroyed") else { return };
    unforgiving(&rig);
    let (a, b) = pair("127.85.71.1", 2 << 20, Mtu::Mtu4096);
    for way in GpuMethod::ALL {
        let context = create(&rig.gpu);
        let memories = [(); 2].map(|()| Memory::new_in(&rig, context, Kind::Malloc, LEN));
        let (at_a, at_b) = (rig::register(&a, &memories[0], way), rig::register(&b, &memories[1], way));
        let bytes = crate::common::patterns(5, 0, LEN);
        memories[0].put(&bytes);
        let write = Operation::Write(rig::remote(&at_b, 0));
        a.qps[0].post_send(&SendRequest::new(1, write, &rig::sge(&at_a, 0, LEN))).unwrap();
        rig::succeed(&a, 1);
        assert!(memories[1].get(0, LEN) == bytes, "{way:?}: from and to memory of a context of its own");
        end_under_traffic((&a, &b), &at_b, way, || {
            let destroyed = rig.gpu.driver().relaxed(|api| {
                // SAFETY: no copy is in flight, and the context has no other users.
                unsafe { api.ctx_destroy(context) }
            });
            destroyed.map_err(|error: CudaError| error).unwrap();
        });
        afterwards(&a, &b, (&at_a, &at_b), way);
        goes_on(&rig, &a, &b);
        drop((at_a, at_b));
        goes_on(&rig, &a, &b);
    }
}

fn reset(rig: &Rig) {
    let reset = rig.gpu.driver().relaxed(|api| {
        // SAFETY: no copy is in flight; objects of the context are used only by the NIC, which
        // checks first.
        unsafe { api.primary_reset(rig.gpu.ordinal()) }
    });
    reset.map_err(|error: CudaError| error).unwrap();
}

#[test]
fn device_reset() {
    let Some(mut rig) = Rig::new("contexts::device_reset") else { return };
    unforgiving(&rig);
    for (n, (kind, way)) in [
        (Kind::Malloc, GpuMethod::Direct),
        (Kind::Malloc, GpuMethod::Staged),
        (Kind::Malloc, GpuMethod::WindowOff),
        (Kind::Buffer, GpuMethod::Direct),
        (Kind::Buffer, GpuMethod::Staged),
    ]
    .into_iter()
    .enumerate()
    {
        if rig.is_stand_in() {
            StandIn::load().vmm_survives_reset(1);
        }
        let (a, b) = pair(&format!("127.85.72.{}", n + 1), 2 << 20, Mtu::Mtu4096);
        goes_on(&rig, &a, &b);
        let memories = [(); 2].map(|()| Memory::new(&rig, kind, LEN));
        let (at_a, at_b) = (rig::register(&a, &memories[0], way), rig::register(&b, &memories[1], way));
        let held = crate::common::patterns(6, 0, LEN);
        memories[0].put(&held);
        end_under_traffic((&a, &b), &at_b, way, || {
            reset(&rig);
        });
        // VMM memory belongs to no context: whether a reset ends it is the driver's to say, and we
        // go by that.
        let gone = [&at_a, &at_b].map(|mr| mr.gpu_memory().unwrap().check_alive().is_err());
        println!(
            "figure: after a reset of the device {kind:?} is {}",
            if gone[1] { "gone" } else { "still there" }
        );
        assert!(gone == [true; 2] || kind == Kind::Buffer, "{gone:?}");
        assert_eq!(gone[0], gone[1], "{kind:?}: the one lives on, and the other does not");
        if gone[0] {
            afterwards(&a, &b, (&at_a, &at_b), way);
        } else {
            lives_on(&a, &b, (&at_a, &at_b), way, &held);
        }
        rig.renew();
        goes_on(&rig, &a, &b);
        drop((at_a, at_b));
        goes_on(&rig, &a, &b);
        drop((a, b));
        drop(memories);
    }
}

/// VMM memory that outlived a reset, once there is a context again. CUDA's own copy shows the bytes
/// written through the window meanwhile. The memory is registered and used again, also by the copy
/// engine.
#[test]
fn memory_that_outlived_a_reset_is_used_again() {
    const LONG: usize = 1 << 20;
    let Some(mut rig) = Rig::new("contexts::memory_that_outlived_a_reset_is_used_again") else { return };
    unforgiving(&rig);
    if rig.is_stand_in() {
        StandIn::load().vmm_survives_reset(1);
    }
    let (a, b) = pair("127.85.73.1", 2 << 20, Mtu::Mtu4096);
    let memories = [(); 2].map(|()| Memory::new(&rig, Kind::Buffer, LEN));
    let register = || [(&a, 0), (&b, 1)].map(|(end, n)| rig::register(end, &memories[n], GpuMethod::Direct));
    let old = register();
    memories[0].put(&crate::common::patterns(7, 0, LEN));
    reset(&rig);
    if old.iter().any(|mr| mr.gpu_memory().unwrap().check_alive().is_err()) {
        println!("figure: NOT ENTERED: VMM memory is gone after a reset of the device");
        assert!(!rig.is_stand_in());
        return;
    }
    a.fill(31);
    let (host, sent) = (a.sge(0, LONG as u32), a.bytes(0, LONG));
    let into_old = Operation::Write(rig::remote(&old[1], 0));
    a.qps[0].post_send(&SendRequest::new(1, into_old, &host)).unwrap();
    rig::succeed(&a, 1);

    rig.renew();
    let context = rig.primary();
    let exported = match rig::try_get(&rig.gpu, context, memories[1].addr, LONG) {
        Ok(exported) => exported,
        // It is the driver's to say whether a new context reaches it. The context may be of no more
        // use then.
        Err(error) => {
            println!("figure: NOT ENTERED: CUDA does not copy VMM memory that outlived a reset: {error}");
            assert!(!rig.is_stand_in(), "{error}");
            return;
        }
    };
    assert!(exported == sent, "what was written after the reset is not what CUDA shows");

    // First beside the old registrations, then without them.
    let (new, mut old) = (register(), Some(old));
    for seed in [41, 42] {
        rig.fill(memories[0].addr, LONG, seed);
        let write = Operation::Write(rig::remote(&new[1], 64));
        a.qps[0].post_send(&SendRequest::new(1, write, &rig::sge(&new[0], 0, LONG))).unwrap();
        rig::succeed(&a, 1);
        rig.check(memories[1].addr + 64, LONG, seed, "registered again");
        let read = Operation::Read(rig::remote(&new[1], 64));
        a.qps[0].post_send(&SendRequest::new(1, read, &host)).unwrap();
        rig::succeed(&a, 1);
        let mut expected = vec![0; LONG];
        nobounce_memory::gpu::kernel::pattern(seed, &mut expected);
        assert!(a.bytes(0, LONG) == expected, "READ of memory that was registered again");
        let add = Operation::FetchAdd { remote: rig::remote(&new[1], 64), add: 5 };
        a.qps[0].post_send(&SendRequest::new(1, add, &a.sge(0, 8))).unwrap();
        rig::succeed(&a, 1);
        let before = u64::from_le_bytes(expected[..8].try_into().unwrap());
        assert_eq!(memories[1].get(64, 8), before.wrapping_add(5).to_le_bytes(), "an atomic");
        println!("figure: VMM memory that outlived a reset, registered again: 1 MiB in and out are right");
        old = None;
    }
    drop((old, new));
    goes_on(&rig, &a, &b);
}
