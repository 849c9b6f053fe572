//! Test rig: the GPU, memory on it, kernels that fill and check it, and timeouts.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::api::{Api, Context, Stream, consts};
use nobounce_memory::gpu::kernel::{Patterns, pattern};
use nobounce_memory::gpu::{CudaError, Gpu, GpuBuffer, GpuOptions};
use nobounce_nic::soft::Mr;
use nobounce_nic::work::{Remote, Sge, Status, WorkCompletion};

use crate::common::{ALL_ACCESS, End};
use crate::gpu_common::{self, Alone};

/// A test that takes longer hangs.
const WATCHDOG: Duration = Duration::from_secs(20);
/// The same with the stand-in, whose copies need a CPU and wait for it.
const WATCHDOG_OF_STAND_IN: Duration = Duration::from_secs(60);
/// An operation that takes longer never ends.
pub(crate) const KERNEL_TIMEOUT: Duration = Duration::from_secs(10);

/// A GPU, for one test at a time.
pub(crate) struct Rig {
    pub(crate) gpu: Arc<Gpu>,
    patterns: Option<Patterns>,
    _watchdog: Sender<()>,
    _alone: Alone,
}

impl Rig {
    /// `None`, with the waiver printed, where there is no GPU. The process ends should the test,
    /// `name`, not end in time.
    pub(crate) fn new(name: &'static str) -> Option<Self> {
        let (gpu, alone) = gpu_common::gpu(false)?;
        let limit = if gpu.driver().is_stand_in() { WATCHDOG_OF_STAND_IN } else { WATCHDOG };
        let watchdog = watch(name, limit);
        let patterns = (!gpu.driver().is_stand_in()).then(|| Patterns::load(&gpu).unwrap());
        Some(Self { gpu, patterns, _watchdog: watchdog, _alone: alone })
    }

    pub(crate) fn is_stand_in(&self) -> bool {
        self.patterns.is_none()
    }

    pub(crate) fn primary(&self) -> Context {
        self.gpu.primary().unwrap()
    }

    /// Loads the kernels again: the device was reset.
    pub(crate) fn renew(&mut self) {
        if self.patterns.is_some() {
            self.patterns = Some(Patterns::load(&self.gpu).unwrap());
        }
    }

    /// Calls of the driver in the primary context, as other people's programs make them.
    #[track_caller]
    pub(crate) fn cuda<T>(&self, calls: impl FnOnce(&Api) -> Result<T, CudaError>) -> T {
        self.gpu.driver().in_context(self.primary(), calls).unwrap()
    }

    /// Writes the pattern of `seed`, by a kernel.
    pub(crate) fn fill(&self, addr: u64, len: usize, seed: u64) {
        if len == 0 {
            return;
        }
        match &self.patterns {
            // SAFETY: callers name memory of their own in the primary context.
            Some(patterns) => unsafe { patterns.fill_at(addr, len, seed) }.unwrap(),
            None => put(&self.gpu, self.primary(), addr, &pattern_of(seed, len)),
        }
    }

    /// Checks for the pattern of `seed`, by a kernel.
    #[track_caller]
    pub(crate) fn check(&self, addr: u64, len: usize, seed: u64, what: &str) {
        if len == 0 {
            return;
        }
        match &self.patterns {
            // SAFETY: as in `fill`.
            Some(patterns) => match unsafe { patterns.check_at(addr, len, seed) }.unwrap() {
                finding if finding.is_clean() => {}
                finding => panic!("{what}: {len} bytes: {finding}"),
            },
            None => assert!(
                get(&self.gpu, self.primary(), addr, len) == pattern_of(seed, len),
                "{what}: {len} bytes: wrong"
            ),
        }
    }
}

fn pattern_of(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pattern(seed, &mut bytes);
    bytes
}

/// Ends the process when the sender is still there after `limit`: a hang inside the driver cannot
/// be ended otherwise.
fn watch(name: &'static str, limit: Duration) -> Sender<()> {
    let (sender, receiver) = channel::<()>();
    thread::spawn(move || {
        if receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            let mut out = std::io::stdout().lock();
            let _ = writeln!(out, "figure: WATCHDOG: {name} has not ended after {limit:?}");
            let _ = out.flush();
            // SAFETY: ends the process at once; nothing of it can be trusted any more.
            unsafe { libc::_exit(101) };
        }
    });
    sender
}

/// How memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Our own: VMM.
    Buffer,
    /// `cudaMalloc`.
    Malloc,
    /// `cudaMallocAsync`.
    Pool,
}

/// How memory is registered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum GpuMethod {
    Direct,
    Staged,
    WindowOff,
}

impl GpuMethod {
    pub(crate) const ALL: [Self; 3] = [Self::Direct, Self::Staged, Self::WindowOff];

    pub(crate) fn options(self) -> GpuOptions {
        GpuOptions { window: self != Self::WindowOff, staged: self == Self::Staged, ..GpuOptions::default() }
    }
}

/// Memory on the GPU.
pub(crate) struct Memory {
    pub(crate) addr: u64,
    pub(crate) len: usize,
    gpu: Arc<Gpu>,
    context: Context,
    owner: Owner,
}

enum Owner {
    Buffer(#[allow(dead_code, reason = "held, not read")] GpuBuffer),
    /// By `cuMemAlloc` or from a pool, with its number.
    Driver {
        kind: Kind,
        id: u64,
    },
    Freed,
}

impl Memory {
    pub(crate) fn new(rig: &Rig, kind: Kind, len: usize) -> Self {
        Self::new_in(rig, rig.primary(), kind, len)
    }

    /// Memory of another context; a buffer is always the primary's.
    pub(crate) fn new_in(rig: &Rig, context: Context, kind: Kind, len: usize) -> Self {
        let gpu = rig.gpu.clone();
        if kind == Kind::Buffer {
            let buffer = GpuBuffer::new(&gpu, len).unwrap();
            return Self { addr: buffer.addr(), len, gpu, context, owner: Owner::Buffer(buffer) };
        }
        let mut addr = 0;
        // SAFETY: the calls write one address; the stream is done before it is used.
        let made = gpu.driver().in_context(context, |api| unsafe {
            if kind == Kind::Malloc {
                return api.mem_alloc(&raw mut addr, len);
            }
            api.mem_alloc_async(&raw mut addr, len, Stream::NULL)?;
            api.ctx_synchronize()
        });
        made.map_err(|error: CudaError| error).unwrap();
        let id = buffer_id(&gpu, addr).unwrap();
        Self { addr, len, gpu, context, owner: Owner::Driver { kind, id } }
    }

    /// Frees it, even while it is in use.
    pub(crate) fn free(&mut self) -> Result<(), CudaError> {
        match std::mem::replace(&mut self.owner, Owner::Freed) {
            // With its context it would be gone, and that must not be asked for then.
            Owner::Driver { kind, id } if buffer_id(&self.gpu, self.addr) == Ok(id) => {
                // SAFETY: the allocation is ours, and freed once.
                self.gpu.driver().in_context(self.context, |api| unsafe {
                    if kind == Kind::Malloc {
                        return api.mem_free(self.addr);
                    }
                    api.mem_free_async(self.addr, Stream::NULL)?;
                    api.ctx_synchronize()
                })
            }
            _ => Ok(()),
        }
    }

    /// Writes all of it by a copy of its own context, and waits.
    pub(crate) fn put(&self, bytes: &[u8]) {
        put(&self.gpu, self.context, self.addr, bytes);
    }

    /// Reads bytes of it by a copy of its own context, and waits.
    pub(crate) fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        get(&self.gpu, self.context, self.addr + offset as u64, len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.free();
    }
}

/// CUDA's number for the memory at an address. Needs no context.
fn buffer_id(gpu: &Gpu, addr: u64) -> Result<u64, CudaError> {
    let mut id = 0u64;
    // SAFETY: the attribute is 8 bytes.
    gpu.driver().relaxed(|api| unsafe {
        api.pointer_attribute((&raw mut id).cast(), consts::POINTER_BUFFER_ID, addr)
    })?;
    Ok(id)
}

fn put(gpu: &Gpu, context: Context, addr: u64, bytes: &[u8]) {
    // A synchronous copy from pageable memory may return before the bytes are there.
    // SAFETY: the vector outlives the copy; callers name memory of their own.
    let copied = gpu.driver().in_context(context, |api| unsafe {
        api.copy_to_device(addr, bytes.as_ptr().cast(), bytes.len())?;
        api.ctx_synchronize()
    });
    copied.map_err(|error: CudaError| error).unwrap();
}

pub(crate) fn get(gpu: &Gpu, context: Context, addr: u64, len: usize) -> Vec<u8> {
    try_get(gpu, context, addr, len).unwrap()
}

/// The same where CUDA may refuse.
pub(crate) fn try_get(gpu: &Gpu, context: Context, addr: u64, len: usize) -> Result<Vec<u8>, CudaError> {
    let mut bytes = vec![0; len];
    gpu.driver().in_context(context, |api| {
        // SAFETY: as above.
        unsafe { api.copy_from_device(bytes.as_mut_ptr().cast(), addr, len) }
    })?;
    Ok(bytes)
}

#[track_caller]
pub(crate) fn register(end: &End, memory: &Memory, way: GpuMethod) -> Mr {
    // SAFETY: tests touch the memory by kernels and copies only.
    unsafe { end.pd.register_gpu(memory.addr, memory.len, ALL_ACCESS, &way.options()) }.unwrap()
}

/// Waits until the device has noticed that the memory behind a region is gone, as it must within
/// [`KERNEL_TIMEOUT`]: how long that took.
#[track_caller]
pub(crate) fn await_end(mr: &Mr) -> Duration {
    let (memory, begin) = (mr.gpu_memory().unwrap(), Instant::now());
    while memory.ended().is_none() {
        assert!(
            begin.elapsed() < KERNEL_TIMEOUT,
            "memory that is gone is still reached; CUDA says: {:?}",
            memory.check_alive()
        );
        thread::sleep(Duration::from_millis(1));
    }
    begin.elapsed()
}

pub(crate) fn sge(mr: &Mr, offset: usize, len: usize) -> [Sge; 1] {
    [Sge { addr: mr.addr() + offset as u64, len: len as u32, lkey: mr.lkey() }]
}

pub(crate) fn remote(mr: &Mr, offset: usize) -> Remote {
    Remote { addr: mr.addr() + offset as u64, rkey: mr.rkey() }
}

/// `count` completions of an end, within [`KERNEL_TIMEOUT`].
#[track_caller]
pub(crate) fn completions(end: &End, count: usize) -> Vec<WorkCompletion> {
    let mut got = Vec::new();
    let begin = Instant::now();
    while got.len() < count {
        let left = count - got.len();
        end.cq.poll(&mut got, left).unwrap();
        assert!(
            begin.elapsed() < KERNEL_TIMEOUT,
            "{} of {count} completions after {KERNEL_TIMEOUT:?}: {got:?}; {:?}",
            got.len(),
            end.device.counters()
        );
    }
    got
}

/// `count` completions, all successes.
#[track_caller]
pub(crate) fn succeed(end: &End, count: usize) {
    for completion in completions(end, count) {
        assert_eq!(completion.status, Status::Success, "{completion:?}; {:?}", end.device.counters());
    }
}

/// One completion's status.
#[track_caller]
pub(crate) fn status(end: &End) -> Status {
    completions(end, 1)[0].status
}
