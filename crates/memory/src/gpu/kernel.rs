//! Our own kernels, for benchmarks and tests that verify data on the GPU. No data path uses them.
//!
//! They are kept as PTX text (`kernel/*.ptx`, made from the `.cu` beside it), which the driver
//! compiles for the GPU at hand. Loading is eager: a kernel's first launch may synchronise the
//! whole context, and would then deadlock with a kernel that spins. So load before anything spins;
//! later launches never block.

mod flag_wait;
mod patterns;
mod pinned_words;
mod spin;

use std::ffi::{CString, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

pub use self::flag_wait::{FlagKernel, FlagWait};
pub use self::patterns::{Finding, Patterns, pattern, pattern_word};
pub use self::pinned_words::PinnedWords;
pub use self::spin::{Spin, SpinKernel};
use super::api::{self, Api, Context, consts};
use super::context::KeptContext;
use super::{CudaError, Gpu};

/// Most arguments that a kernel of ours takes.
const MAX_ARGUMENTS: usize = 8;

/// Why a kernel was not loaded or launched, or did not end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A call of the driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The driver did not take the PTX text.
    #[error("{error}: the driver cannot compile the nobounce kernels; {}", load_advice(.error.code))]
    Load {
        /// The call's error.
        error: CudaError,
    },
    /// A buffer is shorter than the requested range; nothing was launched.
    #[error(
        "{len} bytes at offset {offset:#x} do not fit in a GPU buffer of {buffer} bytes; nothing was launched"
    )]
    OutOfBounds {
        /// Requested offset, in bytes.
        offset: usize,
        /// Requested bytes.
        len: usize,
        /// Length of the buffer.
        buffer: usize,
    },
    /// Work on the GPU did not end in time. It may still be going on.
    #[error("{what} did not finish within {} ms; the GPU is busy with other work, or the kernel waits for an event that does not occur", .limit.as_millis())]
    TooLong {
        /// The work.
        what: &'static str,
        /// Its time limit.
        limit: Duration,
    },
}

/// The remedy for refused PTX.
fn load_advice(code: u32) -> &'static str {
    match code {
        209 | 218 => "the GPU is older than Volta (sm_70), which they require",
        221 => "the compiler library is missing: install libnvidia-ptxjitcompiler.so.1 next to libcuda.so.1",
        222 => "the driver is older than CUDA 9: update it",
        CudaError::NOT_SUPPORTED => "the stand-in driver of the tests runs no kernels",
        _ => "see nvidia-smi and the kernel log",
    }
}

/// Kernels loaded together from one PTX text, in the GPU's primary context.
///
/// Never unloaded: that would wait for every kernel of the context. A process loads the few that it
/// needs once.
#[derive(Debug)]
pub struct Module {
    gpu: Arc<Gpu>,
    context: KeptContext,
    handle: api::Module,
    /// Takes the launches that bring a kernel to the GPU ahead of time.
    warm_up: Stream,
}

impl Module {
    /// Has the driver compile `ptx` for this GPU.
    pub fn load(gpu: &Arc<Gpu>, ptx: &str) -> Result<Self, KernelError> {
        let warm_up = Stream::new(gpu)?;
        // A zero byte ends the text anyway, and PTX has none.
        let text = CString::new(ptx.replace('\0', "")).unwrap_or_default();
        let context = keep(gpu)?;
        let mut handle = api::Module::NULL;
        with(gpu, |api| {
            // SAFETY: the text ends in a zero byte; the call writes one handle.
            unsafe { api.module_load(&raw mut handle, text.as_ptr().cast()) }
        })
        .map_err(|error| KernelError::Load { error })?;
        Ok(Self { gpu: Arc::clone(gpu), context, handle, warm_up })
    }

    /// The kernel called `name`, loaded onto the GPU now by a launch with all arguments zero, which
    /// does nothing.
    pub fn kernel(&self, name: &str) -> Result<Kernel, KernelError> {
        let text = CString::new(name.replace('\0', "")).unwrap_or_default();
        let mut function = api::Function::NULL;
        self.context.run(self.gpu.driver(), |api| {
            // SAFETY: the module is never unloaded, the name ends in a zero byte; the call writes
            // one handle.
            unsafe { api.module_function(&raw mut function, self.handle, text.as_ptr()) }
        })?;
        let kernel =
            Kernel { gpu: Arc::clone(&self.gpu), context: self.context, function, name: name.to_owned() };
        // SAFETY: our kernels touch no memory when their arguments are zero.
        unsafe { kernel.launch(&self.warm_up, 1, 1, &[]) }?;
        Ok(kernel)
    }
}

/// A kernel that is ready to be launched.
#[derive(Clone)]
pub struct Kernel {
    gpu: Arc<Gpu>,
    context: KeptContext,
    function: api::Function,
    name: String,
}

impl Kernel {
    /// Queues a launch of `grid` blocks of `block` threads on `stream`, without blocking. All
    /// arguments of our kernels are 64-bit words; omitted ones are zero. More than eight are an
    /// error of the driver's kind.
    ///
    /// # Safety
    /// The arguments are what the kernel takes, and the memory they name stays valid until the
    /// launch is over.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: u32,
        block: u32,
        arguments: &[u64],
    ) -> Result<(), CudaError> {
        if arguments.len() > MAX_ARGUMENTS {
            return Err(CudaError {
                call: "cuLaunchKernel",
                code: CudaError::INVALID_VALUE,
                name: "more arguments than our kernels take",
            });
        }
        let mut words = [0u64; MAX_ARGUMENTS];
        words[..arguments.len()].copy_from_slice(arguments);
        // The driver reads as many as the kernel has; it ignores the others.
        let mut places = words.each_mut().map(|word| ptr::from_mut(word).cast::<c_void>());
        let (blocks, threads): (c_uint, c_uint) = (grid, block);
        // A reset may have ended the context of either.
        let launch = |api: &Api| {
            // SAFETY: the function's module is never unloaded, `places` names at least as many
            // words as the kernel has parameters, and the driver copies them before it returns.
            // What they mean is the caller's promise.
            unsafe {
                let (function, places) = (self.function, places.as_mut_ptr());
                api.launch_kernel(
                    function,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    stream.handle,
                    places,
                    ptr::null_mut(),
                )
            }
        };
        stream.with(|_, _| self.context.run(self.gpu.driver(), launch))
    }

    /// The GPU it runs on.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({} on {})", self.name, self.gpu)
    }
}

/// A non-blocking stream in the GPU's primary context: it does not synchronise with the default
/// stream.
#[derive(Debug)]
pub struct Stream {
    gpu: Arc<Gpu>,
    context: KeptContext,
    handle: api::Stream,
}

impl Stream {
    /// A new stream without work.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let context = keep(gpu)?;
        let mut handle = api::Stream::NULL;
        with(gpu, |api| {
            // SAFETY: the call writes one handle.
            unsafe { api.stream_create(&raw mut handle, consts::STREAM_NON_BLOCKING) }
        })?;
        Ok(Self { gpu: Arc::clone(gpu), context, handle })
    }

    /// Whether all work queued so far is over. Does not wait.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream is alive for as long as `self` and its context.
        match self.with(|api, stream| unsafe { api.stream_query(stream) }) {
            Ok(()) => Ok(true),
            Err(error) if error.code == CudaError::NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Polls until all work queued so far is complete; times out after `limit`, naming `what`.
    pub fn wait(&self, what: &'static str, limit: Duration) -> Result<(), KernelError> {
        wait_until(what, limit, || Ok(self.is_idle()?))
    }

    /// Driver calls on this stream, in its context, if that is still alive.
    fn with<T>(&self, calls: impl FnOnce(&Api, api::Stream) -> Result<T, CudaError>) -> Result<T, CudaError> {
        self.context.run(self.gpu.driver(), |api| calls(api, self.handle))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Does not wait: the driver destroys the stream when its work is complete.
        // SAFETY: the handle is ours and not used again. A destroyed context has taken the stream
        // with it, and is not called.
        let _ = self.with(|api, stream| unsafe { api.stream_destroy(stream) });
    }
}

/// The GPU's primary context, kept: a reset of the device ends it, with all that was made in it.
fn keep(gpu: &Gpu) -> Result<KeptContext, CudaError> {
    KeptContext::new(gpu.driver(), gpu.primary()?, None)
}

/// Calls of the driver with the GPU's primary context current, for what is made anew.
fn with<T>(gpu: &Gpu, calls: impl FnOnce(&Api) -> Result<T, CudaError>) -> Result<T, CudaError> {
    let context: Context = gpu.primary()?;
    gpu.driver().in_context(context, calls)
}

/// Polls until the answer is yes; times out after `limit`.
fn wait_until(
    what: &'static str,
    limit: Duration,
    mut is_so: impl FnMut() -> Result<bool, KernelError>,
) -> Result<(), KernelError> {
    let started = Instant::now();
    while !is_so()? {
        if started.elapsed() > limit {
            return Err(KernelError::TooLong { what, limit });
        }
        std::thread::yield_now();
    }
    Ok(())
}
