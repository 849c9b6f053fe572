//! Application work on the default stream, and threads that wait for it: traffic goes on, because
//! the NIC has its own streams.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fake_cuda::client::StandIn;
use nobounce_memory::gpu::CudaError;
use nobounce_memory::gpu::api::{Function, Module, Stream};
use nobounce_memory::gpu::kernel::PinnedWords;
use nobounce_nic::work::{Mtu, Operation, SendRequest};

use crate::common::{MIB, pair};
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};
use crate::traffic::Plan;

const SIZES: [usize; 5] = [8, 4096, 65_537, 262_145, 2 << 20];
/// The kernel on the default stream ends by itself after this long: a thread that waits for it
/// takes as long.
const SPIN: Duration = Duration::from_secs(2);
/// Application streams: as many as CUDA has hardware queues by default.
const STREAMS: usize = 8;
const STOP: usize = 0;
const STARTED: usize = 16;
const PTX: &str = include_str!("../../../memory/src/gpu/kernel/handshake.ptx");

/// A kernel of one block, for the default stream.
enum Blocker {
    Kernel(Function, PinnedWords),
    StandIn(&'static StandIn),
}

impl Blocker {
    fn new(rig: &Rig) -> Self {
        if rig.is_stand_in() {
            return Self::StandIn(StandIn::load());
        }
        let text = CString::new(PTX).unwrap();
        let (mut module, mut function) = (Module::NULL, Function::NULL);
        // SAFETY: the texts end in a zero byte; the calls write one handle each.
        rig.cuda(|api| unsafe {
            api.module_load(&raw mut module, text.as_ptr().cast())?;
            api.module_function(&raw mut function, module, c"spin".as_ptr())
        });
        let blocker = Self::Kernel(function, PinnedWords::new(&rig.gpu, 32).unwrap());
        // Brings the kernel to the GPU: without arguments it does nothing.
        blocker.launch(rig, [0; 3]);
        // SAFETY: waits.
        rig.cuda(|api| unsafe { api.ctx_synchronize() });
        blocker
    }

    fn launch(&self, rig: &Rig, mut words: [u64; 3]) {
        let Self::Kernel(function, _) = self else { return };
        let mut places = words.each_mut().map(|word| ptr::from_mut(word).cast::<c_void>());
        // SAFETY: the kernel has three words as arguments, copied before the call returns; the
        // words they name are never freed.
        rig.cuda(|api| unsafe {
            let stream = Stream::NULL;
            api.launch_kernel(*function, 1, 1, 1, 32, 1, 1, 0, stream, places.as_mut_ptr(), ptr::null_mut())
        });
    }

    /// The default stream is stuck when this returns, with a memset behind the kernel.
    fn start(&self, rig: &Rig, scratch: &Memory) {
        match self {
            Self::Kernel(_, words) => {
                words.set(STOP, 0);
                words.set(STARTED, 0);
                let limit = SPIN.as_nanos() as u64;
                self.launch(rig, [words.address(STOP), words.address(STARTED), limit]);
                let begin = Instant::now();
                while words.get(STARTED) == 0 {
                    assert!(begin.elapsed() < SPIN, "the kernel does not start");
                }
            }
            Self::StandIn(stand_in) => stand_in.spin(1),
        }
        // SAFETY: the memory outlives the work, which is waited for.
        rig.cuda(|api| unsafe { api.memset_async(scratch.addr, 5, scratch.len, Stream::NULL) });
    }

    /// Whether the default stream is still stuck: had traffic waited for it, the kernel would have
    /// come to its own end. (The stand-in's never does.)
    fn is_stuck(rig: &Rig) -> bool {
        // SAFETY: asks.
        let queried =
            rig.gpu.driver().in_context(rig.primary(), |api| unsafe { api.stream_query(Stream::NULL) });
        queried.is_err_and(|error: CudaError| error.code == CudaError::NOT_READY)
    }

    fn stop(&self) {
        match self {
            Self::Kernel(_, words) => words.set(STOP, 1),
            Self::StandIn(stand_in) => stand_in.spin(0),
        }
    }
}

/// What another application thread does meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Other {
    Nothing,
    WaitsForTheContext,
    WaitsForTheStream,
    CopiesSynchronously,
    Frees,
}

impl Other {
    fn run(self, rig: &Rig, scratch: &Memory) {
        let bytes = vec![0_u8; 4096];
        // SAFETY: the memory and the bytes outlive the calls.
        rig.cuda(|api| unsafe {
            match self {
                Self::Nothing => Ok(()),
                Self::WaitsForTheContext => api.ctx_synchronize(),
                Self::WaitsForTheStream => api.stream_synchronize(Stream::NULL),
                Self::CopiesSynchronously => {
                    api.copy_to_device(scratch.addr, bytes.as_ptr().cast(), bytes.len())
                }
                Self::Frees => {
                    let mut addr = 0;
                    api.mem_alloc(&raw mut addr, MIB)?;
                    api.mem_free(addr)
                }
            }
        });
    }
}

/// The default stream is stuck behind a kernel, and another thread waits for it in each of the ways
/// that programs have.
#[test]
fn stuck_behind_a_kernel() {
    let Some(rig) = Rig::new("default_stream::stuck_behind_a_kernel") else { return };
    let blocker = Blocker::new(&rig);
    let scratch = Memory::new(&rig, Kind::Malloc, 16 * MIB);
    let others = [
        Other::Nothing,
        Other::WaitsForTheContext,
        Other::WaitsForTheStream,
        Other::CopiesSynchronously,
        Other::Frees,
    ];
    let (a, b) = pair("127.85.31.1", 4096, Mtu::Mtu4096);
    let mut waited = Vec::new();
    for other in others {
        let plans =
            [GpuMethod::Direct, GpuMethod::Staged].map(|way| (way, Plan::new(&rig, Kind::Malloc, &SIZES)));
        for (_, plan) in &plans {
            plan.fill(&rig);
        }
        blocker.start(&rig, &scratch);
        let begin = Instant::now();
        let (rig, scratch) = (&rig, &scratch);
        let took = thread::scope(|scope| {
            scope.spawn(move || other.run(rig, scratch));
            // There is no way to observe that it waits inside the driver.
            thread::sleep(Duration::from_millis(30));
            let begin_traffic = Instant::now();
            for (way, plan) in &plans {
                let regions = plan.register(&a, &b, *way);
                plan.run(&a, &b, &regions);
            }
            let took = begin_traffic.elapsed();
            let stuck = other != Other::Frees && Blocker::is_stuck(rig);
            blocker.stop();
            // Locks that the driver holds during a free or synchronous copy are beyond our control:
            // on driver 580 all CUDA calls of the context wait. The time is reported below; the
            // traffic must only end.
            if !matches!(other, Other::Frees | Other::CopiesSynchronously) && !stuck {
                waited.push(format!("{other:?}: the default stream was not stuck any more after {took:.1?}"));
            }
            took
        });
        println!(
            "figure: default stream stuck, another thread {other:?}: registered and moved in {took:.1?}, all over after {:.1?}",
            begin.elapsed()
        );
        for (way, plan) in &plans {
            plan.check(rig, &format!("{way:?}, {other:?}"));
        }
    }
    assert!(waited.is_empty(), "traffic waited for the default stream: {waited:?}");
}

/// Application streams on which copies and a memset wait for the default stream.
struct Queued {
    streams: [Stream; STREAMS],
    scratch: Memory,
    host: *mut c_void,
}

impl Queued {
    fn new(rig: &Rig) -> Self {
        let (mut host, mut streams) = (ptr::null_mut(), [Stream::NULL; STREAMS]);
        // SAFETY: the calls write one address and one handle each. The streams wait for the default
        // stream.
        rig.cuda(|api| unsafe {
            api.mem_host_alloc(&raw mut host, STREAMS * 4096, 0)?;
            streams.iter_mut().try_for_each(|stream| api.stream_create(stream, 0))
        });
        Self { streams, scratch: Memory::new(rig, Kind::Malloc, STREAMS * 4096), host }
    }

    /// The default stream is stuck when this returns, and so is all that waits for it.
    fn start(&self, rig: &Rig, blocker: &Blocker) {
        blocker.start(rig, &self.scratch);
        for (nth, stream) in self.streams.iter().enumerate() {
            let (gpu, host) =
                (self.scratch.addr + nth as u64 * 4096, self.host.wrapping_byte_add(nth * 4096));
            // SAFETY: each has 4096 bytes of both for itself, which live until it is over.
            rig.cuda(|api| unsafe {
                api.copy_from_device_async(host, gpu, 4096, *stream)?;
                api.memset_async(gpu, 6, 4096, *stream)?;
                api.copy_to_device_async(gpu, host, 4096, *stream)
            });
        }
    }

    fn free(self, rig: &Rig) {
        // SAFETY: waits for all that uses the memory.
        rig.cuda(|api| unsafe {
            api.ctx_synchronize()?;
            api.mem_host_free(self.host)
        });
    }
}

/// Application work waits behind a kernel and fills the hardware queues (CUDA is configured for
/// one): head-of-line blocking for our copies. Memory with a window needs none.
#[test]
fn windows_need_no_hardware_queue() {
    // SAFETY: the first thing of this process's only test, before CUDA or a thread of ours reads
    // it.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "1") };
    let Some(rig) = Rig::new("default_stream::windows_need_no_hardware_queue") else { return };
    if rig.is_stand_in() {
        StandIn::load().few_queues(1);
    }
    let (blocker, others) = (Blocker::new(&rig), Queued::new(&rig));
    let (a, b) = pair("127.85.35.1", 4096, Mtu::Mtu4096);
    let plan = Plan::new(&rig, Kind::Malloc, &SIZES);
    plan.fill(&rig);
    // A window is proved by a copy, so before the queues are full.
    let regions = plan.register(&a, &b, GpuMethod::Direct);
    others.start(&rig, &blocker);
    let begin = Instant::now();
    plan.run(&a, &b, &regions);
    let (took, stuck) = (begin.elapsed(), Blocker::is_stuck(&rig));
    blocker.stop();
    println!("figure: one hardware queue, full: moved in {took:.1?}");
    assert!(stuck, "traffic took {took:.1?}, as long as the kernel that others wait for");
    others.free(&rig);
    plan.check(&rig, "beside work behind a kernel");
}

/// Where there are more hardware queues than streams that wait (`nobounce run` asks for 32 where
/// windows are switched off), registering and copying go on, too. NCCL's kernel and what PyTorch
/// queues behind it are such a case, and the kernel waits for us.
#[test]
fn copies_need_a_hardware_queue_of_their_own() {
    // SAFETY: the first thing of this process's only test, before CUDA or a thread of ours reads
    // it.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    let Some(rig) = Rig::new("default_stream::copies_need_a_hardware_queue_of_their_own") else { return };
    let (blocker, others) = (Blocker::new(&rig), Queued::new(&rig));
    let (a, b) = pair("127.85.36.1", 4096, Mtu::Mtu4096);
    for way in GpuMethod::ALL {
        let plan = Plan::new(&rig, Kind::Malloc, &SIZES);
        plan.fill(&rig);
        others.start(&rig, &blocker);
        let begin = Instant::now();
        let regions = plan.register(&a, &b, way);
        plan.run(&a, &b, &regions);
        let (took, stuck) = (begin.elapsed(), Blocker::is_stuck(&rig));
        blocker.stop();
        // SAFETY: waits.
        rig.cuda(|api| unsafe { api.ctx_synchronize() });
        println!(
            "figure: {STREAMS} streams behind a kernel, 32 hardware queues, {way:?}: registered and moved in {took:.1?}"
        );
        assert!(stuck, "{way:?}: traffic took {took:.1?}, as long as the kernel that others wait for");
        plan.check(&rig, &format!("{way:?}, beside work behind a kernel"));
    }
    others.free(&rig);
}

/// Another thread frees memory or copies synchronously behind a stuck kernel, and the driver blocks
/// all calls of the context. Traffic through windows goes on, in both directions, for messages of
/// any length.
#[test]
fn windows_need_no_calls() {
    let Some(rig) = Rig::new("default_stream::windows_need_no_calls") else { return };
    let blocker = Blocker::new(&rig);
    let scratch = Memory::new(&rig, Kind::Malloc, 16 * MIB);
    let (a, b) = pair("127.85.34.1", 4096, Mtu::Mtu4096);
    for other in [Other::CopiesSynchronously, Other::Frees] {
        let plan = Plan::new(&rig, Kind::Malloc, &SIZES);
        plan.fill(&rig);
        let regions = plan.register(&a, &b, GpuMethod::Direct);
        blocker.start(&rig, &scratch);
        let (rig, scratch) = (&rig, &scratch);
        let took = thread::scope(|scope| {
            scope.spawn(move || other.run(rig, scratch));
            thread::sleep(Duration::from_millis(30));
            let begin = Instant::now();
            plan.run(&a, &b, &regions);
            let took = begin.elapsed();
            blocker.stop();
            took
        });
        println!("figure: another thread {other:?} behind a stuck kernel: moved in {took:.1?}");
        assert!(took < SPIN / 2, "{other:?}: traffic took {took:.1?}, about as long as the kernel");
        plan.check(rig, &format!("{other:?}"));
    }
}

/// The default stream has work without end: memsets and synchronous copies of another thread.
#[test]
fn busy_without_end() {
    let Some(rig) = Rig::new("default_stream::busy_without_end") else { return };
    let scratch = Memory::new(&rig, Kind::Malloc, 64 * MIB);
    let (over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let (a, b) = pair("127.85.32.1", 4096, Mtu::Mtu4096);
    let plans = GpuMethod::ALL.map(|way| (way, Plan::new(&rig, Kind::Buffer, &SIZES)));
    for (_, plan) in &plans {
        plan.fill(&rig);
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![1_u8; 16 * MIB];
            while !over.load(Ordering::Relaxed) {
                // SAFETY: the memory is ours, and so are the bytes.
                rig.cuda(|api| unsafe {
                    api.memset_async(scratch.addr, 7, scratch.len, Stream::NULL)?;
                    api.copy_to_device(scratch.addr, bytes.as_ptr().cast(), bytes.len())?;
                    api.copy_from_device(bytes.as_mut_ptr().cast(), scratch.addr, bytes.len())
                });
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let end = Over(&over);
        for (way, plan) in &plans {
            let regions = plan.register(&a, &b, *way);
            let before = rounds.load(Ordering::Relaxed);
            let mut times = plan.run(&a, &b, &regions);
            // Until it was side by side.
            let begin = Instant::now();
            while rounds.load(Ordering::Relaxed) < before + 3 && begin.elapsed() < Duration::from_secs(3) {
                times = plan.run(&a, &b, &regions);
            }
            println!("figure: default stream busy, {way:?}: {times}");
        }
        drop(end);
    });
    for (way, plan) in &plans {
        plan.check(&rig, &format!("{way:?}, beside a busy default stream"));
    }
    assert!(rounds.load(Ordering::Relaxed) > 3, "the default stream did nothing");
}

/// The application moves gigabytes through the same copy engines, in both directions: our copies
/// take turns, and nothing fails because of the wait.
#[test]
fn long_copies_of_others() {
    let Some(rig) = Rig::new("default_stream::long_copies_of_others") else { return };
    let (len, copies) = if rig.is_stand_in() { (16 * MIB, 4) } else { (2048 * MIB, 10) };
    let memory = Memory::new(&rig, Kind::Malloc, len);
    let (mut host, mut other) = (ptr::null_mut(), Stream::NULL);
    // SAFETY: the calls write one address and one handle.
    rig.cuda(|api| unsafe {
        api.mem_host_alloc(&raw mut host, len, 0)?;
        api.stream_create(&raw mut other, 0)
    });
    let (a, b) = pair("127.85.33.1", 4096, Mtu::Mtu4096);
    for way in GpuMethod::ALL {
        let plan = Plan::new(&rig, Kind::Malloc, &SIZES);
        plan.fill(&rig);
        let regions = plan.register(&a, &b, way);
        let begin = Instant::now();
        // SAFETY: both sides are `len` bytes, and live until the copies are over; what they hold
        // does not matter.
        rig.cuda(|api| unsafe {
            for _ in 0..copies {
                api.copy_to_device_async(memory.addr, host, len, Stream::NULL)?;
                api.copy_from_device_async(host, memory.addr, len, other)?;
            }
            Ok(())
        });
        let times = plan.run(&a, &b, &regions);
        let begin_atomics = Instant::now();
        for _ in 0..20 {
            let add = Operation::FetchAdd { remote: rig::remote(&regions.sent, 80), add: 0 };
            a.qps[0].post_send(&SendRequest::new(1, add, &a.sge(0, 8))).unwrap();
            rig::succeed(&a, 1);
        }
        let atomics = begin_atomics.elapsed();
        // SAFETY: asks.
        let queried =
            rig.gpu.driver().in_context(rig.primary(), |api| unsafe { api.stream_query(Stream::NULL) });
        let during = queried.is_err_and(|error: CudaError| error.code == CudaError::NOT_READY);
        // SAFETY: waits.
        rig.cuda(|api| unsafe { api.ctx_synchronize() });
        println!(
            "figure: beside {} copies of {} MiB that took {:.1?}, {way:?}: {times}; 20 atomics {atomics:.1?}; all of it beside them: {during}",
            2 * copies,
            len / MIB,
            begin.elapsed(),
        );
        plan.check(&rig, &format!("{way:?}, beside long copies"));
    }
    // SAFETY: the copies are over, and the memory has no users any more.
    rig.cuda(|api| unsafe { api.stream_destroy(other).and(api.mem_host_free(host)) });
}

/// Ends the other thread, also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
