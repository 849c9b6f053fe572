//! GPU memory: the calls to libibverbs and CUDA, their order, and the handling of their results.

use std::sync::{Arc, Mutex};

use fake_cuda::client::StandIn;
use nobounce_memory::HostBuffer;
use nobounce_memory::gpu::GpuOptions;
use nobounce_memory::path::{Mechanism, Path, Require};
use nobounce_protocol::qp::{Access, Operation, Remote, Status};
use nobounce_verbs as verbs;
use tracing::field::Field;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, span};

use super::tests::{ALL, LEN, calls, gpu_memory, open, register};
use super::{Call, Lie, world};
use crate::hard::gpu::METHODS;
use crate::hard::{Cq, Device, Mr, Qp, RegisterError, standin};
use crate::work::{QpLimits, RecvRequest, SendRequest, Sge};

#[test]
fn a_dma_buf_is_registered_by_whole_pages_of_the_export_and_the_address_of_the_memory() {
    let addr = gpu_memory() + 0x2340;
    let pd = open().alloc_pd().unwrap();
    // The stand-in does not export a part of what a window has mapped.
    let options = GpuOptions { window: false, ..GpuOptions::default() };
    let mr = register(&pd, addr, 5000, options).unwrap();
    assert_eq!(mr.paths().inbound, Path::Direct(Mechanism::DmaBuf));
    let Call::RegDmaBuf { offset, len, iova, fd_len, access } =
        calls().into_iter().find(|call| matches!(call, Call::RegDmaBuf { .. })).unwrap()
    else {
        unreachable!()
    };
    assert_eq!((offset, len, iova), (0x340, 5000, addr));
    assert_eq!(offset % 4096, iova % 4096, "the kernel insists on it");
    assert_eq!((fd_len % 4096, fd_len >= offset + 5000), (0, true), "whole pages, and all of the range");
    assert_eq!(access, ALL, "all rights, but for binding windows");
    assert_eq!((mr.addr(), mr.len()), (addr, 5000));
}

#[test]
fn each_method_that_fails_falls_back_to_the_next_and_its_reason_is_kept() {
    let addr = gpu_memory();
    let pd = open().alloc_pd().unwrap();
    for errno in [libc::EOPNOTSUPP, libc::EINVAL, libc::ENOMEM, libc::EPROTONOSUPPORT] {
        world(|world| (world.dmabuf, world.peermem) = (errno, 0));
        let mr = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
        assert_eq!(mr.paths().outbound, Path::Direct(Mechanism::Peermem), "errno {errno}");
        assert!(
            calls().contains(&Call::RegMr { addr, len: LEN, access: ALL, relaxed: false }),
            "on the GPU's own address"
        );
        let [refusal] = mr.refusals() else { panic!("{mr:?}") };
        assert_eq!(refusal.method, Mechanism::DmaBuf);
        let said = format!("ibv_reg_dmabuf_mr: {}", std::io::Error::from_raw_os_error(errno));
        assert!(refusal.reason.starts_with(&said), "{refusal}");
        assert!(format!("{mr:?}").contains(&format!("direct (peermem); not by dma-buf: {said}")), "{mr:?}");
    }
    world(|world| (world.dmabuf, world.peermem) = (libc::EOPNOTSUPP, libc::EFAULT));
    let mr = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
    let Path::Staged(reason) = &mr.paths().inbound else { panic!("{:?}", mr.paths()) };
    for words in [
        "dma-buf: ibv_reg_dmabuf_mr",
        "does not take dma-bufs",
        "peermem: ibv_reg_mr",
        "probably the kernel does not know the GPU's address: nvidia-peermem is not loaded",
    ] {
        assert!(reason.as_str().contains(words), "{reason}");
    }
    assert_eq!(mr.refusals().iter().map(|refusal| refusal.method).collect::<Vec<_>>(), METHODS);
    assert!(!format!("{mr:?}").contains("not by"), "the path has it: {mr:?}");
    // Peers get no access: their writes into the shadow would go unnoticed.
    let shadow = calls().into_iter().rev().find_map(|call| match call {
        Call::RegMr { addr, access, .. } => Some((addr, access)),
        _ => None,
    });
    assert_eq!(shadow.map(|(_, access)| access), Some(verbs::IBV_ACCESS_LOCAL_WRITE));
    let direct = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
    let refused = register(&pd, addr, LEN, direct).unwrap_err();
    assert!(matches!(&refused, RegisterError::NotDirect { why, .. } if why.contains("peermem")), "{refused}");
}

#[test]
fn a_provider_that_lies_is_found_out_before_bytes_are_lost() {
    let addr = gpu_memory();
    for lie in [Lie::Swallows, Lie::ForgetsOffset] {
        world(|world| (world.lie, world.peermem) = (Some(lie), libc::EFAULT));
        let pd = open().alloc_pd().unwrap();
        let mr = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
        let words = mr.paths().to_string();
        assert!(
            words.starts_with("staged") && words.contains("promises what it does not do"),
            "{lie:?}: {words}"
        );
        drop(mr);
        world(|world| world.calls.clear());
        let again = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
        assert!(!again.paths().inbound.is_direct());
        assert!(!standin::names().contains(&"create_qp"), "it is proved once for each GPU");
    }
}

#[test]
fn a_lie_about_dma_bufs_is_told_though_peer_memory_works() {
    let addr = gpu_memory();
    for lie in [Lie::Swallows, Lie::ForgetsOffset] {
        world(|world| world.lie = Some(lie));
        let pd = open().alloc_pd().unwrap();
        for _ in 0..2 {
            let mr = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
            assert_eq!(mr.paths().to_string(), "direct (peermem)", "{lie:?}");
            let [refusal] = mr.refusals() else { panic!("{lie:?}: {mr:?}") };
            assert_eq!(refusal.method, Mechanism::DmaBuf);
            assert!(refusal.reason.contains("promises what it does not do"), "{lie:?}: {refusal}");
        }
    }
}

#[test]
fn the_log_names_each_way_that_was_not_taken_once_for_a_device() {
    let addr = gpu_memory();
    let lines = Lines::default();
    // With a single dispatcher, tracing caches the interest of the first thread that reaches a log
    // line: that may be another test's.
    let _second = Dispatch::new(Lines::default());
    tracing::subscriber::with_default(lines.clone(), || {
        for _ in 0..2 {
            let pd = open().alloc_pd().unwrap();
            world(|world| (world.dmabuf, world.peermem) = (0, 0));
            drop(register(&pd, addr, LEN, GpuOptions::default()).unwrap());
            assert_eq!(lines.take(), [""; 0], "the first way is taken");
            world(|world| (world.dmabuf, world.peermem) = (libc::EOPNOTSUPP, 0));
            for expected in [1, 0, 0] {
                drop(register(&pd, addr, LEN, GpuOptions::default()).unwrap());
                let told = lines.take();
                assert_eq!(told.len(), expected, "{told:?}");
                let words = "fake0: GPU memory is not registered by dma-buf: ibv_reg_dmabuf_mr: ";
                assert!(told.iter().all(|line| line.starts_with(words)), "{told:?}");
            }
            world(|world| world.peermem = libc::EFAULT);
            drop(register(&pd, addr, LEN, GpuOptions::default()).unwrap());
            let told = lines.take();
            assert!(told.len() == 1 && told[0].contains("not registered by peermem: "), "{told:?}");
        }
    });
}

/// The warnings of a thread.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = String::new();
        event.record(&mut |field: &Field, value: &dyn std::fmt::Debug| {
            if field.name() == "message" {
                line = format!("{value:?}");
            }
        });
        self.0.lock().unwrap().push(line);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_way_that_cannot_be_tried_is_believed_and_says_so_and_is_asked_once() {
    let addr = gpu_memory();
    world(|world| world.is_deaf = true);
    let pd = open().alloc_pd().unwrap();
    // A required direct path trusts the driver's registration: no staging.
    let direct = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
    let tries = |method| {
        world(|world| world.calls.clear());
        let mr = register(&pd, addr, LEN, direct).unwrap();
        let Path::Believed(by, why) = &mr.paths().inbound else { panic!("{mr:?}") };
        assert!(*by == method && why.as_str().contains("does not talk to itself (RetryExceeded)"), "{why}");
        assert!(mr.paths().are_direct() && !mr.is_staged());
        let words =
            format!("direct ({}), believed, not proved: the device does not talk to itself", method.name());
        assert!(format!("{mr:?}").contains(&words), "{mr:?}");
        standin::names().iter().filter(|name| **name == "create_qp").count()
    };
    assert_eq!([(); 3].map(|()| tries(Mechanism::DmaBuf)), [2, 0, 0], "one connection to itself, once");
    world(|world| world.dmabuf = libc::EOPNOTSUPP);
    assert_eq!([(); 2].map(|()| tries(Mechanism::Peermem)), [2, 0], "each way by itself");
    // Another process, or the device opened again, tries again.
    world(|world| world.is_deaf = false);
    let mr = register(&open().alloc_pd().unwrap(), addr, LEN, direct).unwrap();
    assert_eq!(mr.paths().inbound, Path::Direct(Mechanism::Peermem));
}

#[test]
fn memory_is_exported_before_it_is_registered_and_forgotten_by_the_device_before_it_goes() {
    let addr = gpu_memory();
    let (pd, cuda) = (open().alloc_pd().unwrap(), StandIn::program());
    let files = cuda.live(c"fds");
    standin::record_cuda();
    world(|world| world.calls.clear());
    // A window onto the memory would be exported, too.
    let mr = register(&pd, addr, LEN, GpuOptions { window: false, ..GpuOptions::default() }).unwrap();
    let all = calls();
    assert_eq!(
        orders(&all),
        [
            "cuMemGetHandleForAddressRange",
            "reg_dmabuf", // the memory itself
            "cuMemMap",
            "cuMemGetHandleForAddressRange",
            "reg_dmabuf",
            "reg_mr", // the proof's
            "dereg_mr",
            "dereg_mr",
            "cuMemUnmap",
            "cuMemAddressFree",
        ],
        "the device forgets the proof's memory before it is unmapped"
    );
    assert_eq!(cuda.live(c"fds"), files, "descriptors are closed when the device has the memory");
    drop(mr);
    let with_window = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
    world(|world| (world.dmabuf, world.peermem) = (libc::EOPNOTSUPP, libc::EFAULT));
    let staged = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
    for mr in [with_window, staged] {
        let words = mr.paths().to_string();
        world(|world| world.calls.clear());
        drop(mr);
        let all = calls();
        assert_eq!(
            all.first(),
            Some(&Call::Named("dereg_mr")),
            "{words}: before CUDA is asked for anything: {all:?}"
        );
    }
    assert_eq!(cuda.live(c"fds"), files);
}

/// What was done to memory, in order.
fn orders(calls: &[Call]) -> Vec<&str> {
    let kept =
        ["cuMemGetHandleForAddressRange", "cuMemMap", "cuMemUnmap", "cuMemAddressFree", "cuMemFree_v2"];
    calls
        .iter()
        .filter_map(|call| match call {
            Call::Cuda(name) => kept.into_iter().find(|kept| kept == name),
            Call::RegMr { .. } => Some("reg_mr"),
            Call::RegDmaBuf { .. } => Some("reg_dmabuf"),
            Call::Named("dereg_mr") => Some("dereg_mr"),
            _ => None,
        })
        .collect()
}

/// GPU memory on a device without a direct method, and host memory in the role of the peer's.
struct StagedEnd {
    device: Device,
    staged: Mr,
    cq: Cq,
    qp: Qp,
    far: Mr,
    host: HostBuffer,
}

impl StagedEnd {
    fn new(addr: u64) -> Self {
        world(|world| (world.dmabuf, world.peermem) = (libc::EOPNOTSUPP, libc::EFAULT));
        let device = open();
        let pd = device.alloc_pd().unwrap();
        let staged = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
        let cq = device.create_cq(64, None).unwrap();
        let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
        let host = HostBuffer::new(LEN).unwrap();
        // SAFETY: the buffer outlives the region.
        let far = unsafe { pd.register(host.as_mut_ptr(), LEN, Access::all()) }.unwrap();
        Self { device, staged, cq, qp, far, host }
    }
}

#[test]
fn what_was_read_is_as_long_as_what_was_asked_for_whatever_the_device_says() {
    let (addr, gpu) = (gpu_memory(), StandIn::program());
    let StagedEnd { staged, cq, qp, far, host, .. } = StagedEnd::new(addr);
    let remote = Remote { addr: host.addr(), rkey: far.rkey() };
    let list = [(0, 1000), (2000, 500)].map(|(at, len)| Sge { addr: addr + at, len, lkey: staged.lkey() });
    for (said, byte) in [(0, 1), (700, 2), (1 << 20, 3)] {
        world(|world| world.says_of_reads = Some(said));
        host.write_at(0, &[byte; 1500]).unwrap();
        gpu.poke(addr, &[9; 3000]);
        qp.post_send(&SendRequest::new(1, Operation::Read(remote), &list)).unwrap();
        let mut got = Vec::new();
        cq.poll(&mut got, 64).unwrap();
        assert_eq!((got[0].status, got[0].byte_len), (Status::Success, 1500), "it says {said}");
        let expected = [vec![byte; 1000], vec![9; 1000], vec![byte; 500], vec![9; 500]].concat();
        assert!(gpu.peek(addr, 3000) == expected, "it says {said}");
    }
}

#[test]
fn staged_memory_is_fetched_before_it_leaves_and_placed_before_completions() {
    let (addr, gpu) = (gpu_memory(), StandIn::program());
    let StagedEnd { device, staged, cq, qp, far, host } = StagedEnd::new(addr);
    let remote = Remote { addr: host.addr(), rkey: far.rkey() };
    let sge = |offset: u64, len| Sge { addr: addr + offset, len, lkey: staged.lkey() };
    let bytes: Vec<u8> = (0..700_000_u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
    gpu.poke(addr + 100, &bytes);

    qp.post_send(&SendRequest::new(5, Operation::Write(remote), &[sge(100, 700_000)])).unwrap();
    let mut found = vec![0; bytes.len()];
    host.read_at(0, &mut found).unwrap();
    assert!(found == bytes, "what leaves is what the GPU has");

    host.write_at(0, &vec![9; 2000]).unwrap();
    let quiet = SendRequest { signaled: false, ..SendRequest::new(6, Operation::Read(remote), &[]) };
    qp.post_send(&SendRequest { sges: &[sge(0, 1000)], ..quiet }).unwrap();
    qp.post_send(&SendRequest::new(7, Operation::Read(remote), &[sge(2000, 1000)])).unwrap();
    qp.post_recv(&RecvRequest { wr_id: 8, sges: &[sge(4000, 100), sge(5000, 100)] }).unwrap();
    standin::arrive(&[3; 150]);
    assert_ne!(gpu.peek(addr, 1000), vec![9; 1000], "not before the completion is polled");
    let mut got = Vec::new();
    cq.poll(&mut got, 64).unwrap();
    let told: Vec<_> = got.iter().map(|one| (one.wr_id, one.status, one.byte_len)).collect();
    assert_eq!(told, [(5, Status::Success, 0), (7, Status::Success, 1000), (8, Status::Success, 150)]);
    assert_eq!(gpu.peek(addr, 1000), vec![9; 1000], "also of the one that asked for no completion");
    assert_eq!(gpu.peek(addr + 2000, 1000), vec![9; 1000]);
    assert_eq!((gpu.peek(addr + 4000, 100), gpu.peek(addr + 5000, 50)), (vec![3; 100], vec![3; 50]));
    let counted = device.staged_counters();
    assert_eq!((counted.outbound.staged.bytes, counted.inbound.staged.bytes), (700_000, 2150));
    let outside = qp.post_send(&SendRequest::new(9, Operation::Write(remote), &[sge(LEN as u64 - 10, 20)]));
    assert!(outside.is_err());
}

#[test]
fn what_leaves_behind_a_read_is_what_the_read_brings() {
    let (addr, gpu) = (gpu_memory(), StandIn::program());
    let StagedEnd { staged, cq, qp, far, host, .. } = StagedEnd::new(addr);
    let remote = |at: u64| Remote { addr: host.addr() + at, rkey: far.rkey() };
    let sge = |offset: u64, len| Sge { addr: addr + offset, len, lkey: staged.lkey() };
    host.write_at(0, &[7; 1000]).unwrap();
    gpu.poke(addr, &[1; 3000]);

    // The bytes in the middle are read, and the device would see to the order: the completion is
    // not polled in between.
    qp.post_send(&SendRequest::new(1, Operation::Read(remote(0)), &[sge(1000, 1000)])).unwrap();
    let fenced = SendRequest { fence: true, ..SendRequest::new(2, Operation::Write(remote(0)), &[]) };
    qp.post_send(&SendRequest { sges: &[sge(500, 2000)], ..fenced }).unwrap();
    let mut sent = vec![0; 2000];
    host.read_at(0, &mut sent).unwrap();
    let expected = [vec![1; 500], vec![7; 1000], vec![1; 500]].concat();
    assert!(sent == expected, "the read's bytes, and around them the GPU's");
    let mut got = Vec::new();
    cq.poll(&mut got, 64).unwrap();
    assert_eq!(got.iter().map(|one| one.wr_id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(gpu.peek(addr + 1000, 1000), vec![7; 1000], "no fetch went over what was read");
    // After completion, the bytes on the GPU are valid again.
    gpu.poke(addr + 1000, &[9; 1000]);
    qp.post_send(&SendRequest::new(3, Operation::Write(remote(0)), &[sge(1000, 1000)])).unwrap();
    host.read_at(0, &mut sent[..1000]).unwrap();
    assert_eq!(sent[..1000], [9; 1000]);
}
