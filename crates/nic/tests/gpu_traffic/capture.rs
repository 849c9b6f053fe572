//! A stream capture in global mode, on this thread or another: registration, traffic and
//! deregistration go on, and it is not broken.

use std::sync::mpsc::channel;
use std::thread;

use nobounce_memory::gpu::api::{Graph, Stream, consts};
use nobounce_memory::gpu::{CudaError, Gpu};
use nobounce_nic::work::Mtu;

use crate::common::pair;
use crate::rig::{GpuMethod, Kind, Memory, Rig};
use crate::traffic::Plan;

const SIZES: [usize; 5] = [8, 4096, 20_000, 262_145, 1 << 20];

/// A capture of a memset, as a program that makes a CUDA graph has it. It ends on the thread that
/// began it.
struct Capture<'a> {
    gpu: &'a Gpu,
    stream: Stream,
}

impl<'a> Capture<'a> {
    fn begin(gpu: &'a Gpu, memory: &Memory) -> Self {
        let mut stream = Stream::NULL;
        // SAFETY: the calls write one handle; the memory lives as long as the capture.
        let begun = gpu.driver().in_context(gpu.primary().unwrap(), |api| unsafe {
            api.stream_create(&raw mut stream, consts::STREAM_NON_BLOCKING)?;
            api.stream_begin_capture(stream, consts::CAPTURE_MODE_GLOBAL)?;
            api.memset_async(memory.addr, 1, 4096, stream)
        });
        begun.map_err(|error: CudaError| error).unwrap();
        Self { gpu, stream }
    }

    /// Ends it; the graph is left to the end of the process.
    fn end(self) -> Result<(), CudaError> {
        let mut graph = Graph::NULL;
        self.gpu.driver().in_context(self.gpu.primary()?, |api| {
            // SAFETY: the stream is ours; the call writes one handle.
            let ended = unsafe { api.stream_end_capture(self.stream, &raw mut graph) };
            // SAFETY: as above; it is not used again.
            unsafe { api.stream_destroy(self.stream) }?;
            ended
        })?;
        assert!(!graph.is_null(), "a capture without a graph");
        Ok(())
    }
}

/// Everything that is to go on during a capture.
fn everything(plan: &Plan, addr: &str, way: GpuMethod) {
    let (a, b) = pair(addr, 4096, Mtu::Mtu4096);
    let regions = plan.register(&a, &b, way);
    plan.run(&a, &b, &regions);
    drop(regions);
    let regions = plan.register(&a, &b, way);
    plan.run(&a, &b, &regions);
    drop((a, b));
    drop(regions);
}

#[test]
fn on_this_thread() {
    let Some(rig) = Rig::new("capture::on_this_thread") else { return };
    let scratch = Memory::new(&rig, Kind::Malloc, 4096);
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let plan = Plan::new(&rig, Kind::Malloc, &SIZES);
        plan.fill(&rig);
        let capture = Capture::begin(&rig.gpu, &scratch);
        everything(&plan, &format!("127.85.21.{}", n + 1), way);
        capture.end().unwrap();
        plan.check(&rig, &format!("{way:?}, during a capture of this thread"));
    }
}

#[test]
fn on_another_thread() {
    let Some(rig) = Rig::new("capture::on_another_thread") else { return };
    let scratch = Memory::new(&rig, Kind::Malloc, 4096);
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let plan = Plan::new(&rig, Kind::Buffer, &SIZES);
        plan.fill(&rig);
        let (begun, has_begun) = channel();
        let (end, is_to_end) = channel::<()>();
        let (gpu, scratch) = (&rig.gpu, &scratch);
        thread::scope(|scope| {
            let capturing = scope.spawn(move || {
                let capture = Capture::begin(gpu, scratch);
                begun.send(()).unwrap();
                // Also where this side has failed.
                let _ = is_to_end.recv();
                capture.end()
            });
            has_begun.recv().unwrap();
            everything(&plan, &format!("127.85.22.{}", n + 1), way);
            drop(end);
            capturing.join().unwrap().unwrap();
        });
        plan.check(&rig, &format!("{way:?}, during another thread's capture"));
    }
}

/// The same capture breaks when a thread is not in relaxed mode: what the tests above rely on.
#[test]
fn would_have_been_broken() {
    let Some(rig) = Rig::new("capture::would_have_been_broken") else { return };
    let scratch = Memory::new(&rig, Kind::Malloc, 4096);
    let capture = Capture::begin(&rig.gpu, &scratch);
    let refused = rig.cuda(|api| {
        let (mut mode, mut host) = (consts::CAPTURE_MODE_GLOBAL, std::ptr::null_mut());
        // SAFETY: the calls read and write one word, and write one address; the mode is put back.
        unsafe {
            api.exchange_capture_mode(&raw mut mode)?;
            let refused = api.mem_host_alloc(&raw mut host, 4096, 0);
            api.exchange_capture_mode(&raw mut mode)?;
            Ok(refused)
        }
    });
    let ended = capture.end();
    println!("figure: a call that is not relaxed, during a capture: {refused:?}; the capture: {ended:?}");
    assert!(refused.is_err() && ended.is_err());
}
