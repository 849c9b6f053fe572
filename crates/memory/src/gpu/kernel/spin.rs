//! A kernel that occupies the whole GPU until it is stopped, like kernels that wait for the
//! network.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use super::{Kernel, KernelError, Module, PinnedWords, Stream};
use crate::gpu::{CudaError, Gpu};

const PTX: &str = include_str!("handshake.ptx");
const STOP: usize = 0;
/// Each block sets its own word when it has started.
const STARTED: usize = 16;
/// Divides the threads that a multiprocessor of any kind can hold: nothing is left over.
const BLOCK: u32 = 512;
const ATTRIBUTE_MULTIPROCESSORS: u32 = 16;
const ATTRIBUTE_THREADS_PER_MULTIPROCESSOR: u32 = 39;
const LIMIT: Duration = Duration::from_secs(5);

/// The spinning kernel, ready to be launched.
#[derive(Debug)]
pub struct SpinKernel {
    gpu: Arc<Gpu>,
    kernel: Kernel,
    blocks: u32,
    words: PinnedWords,
    stream: Stream,
}

impl SpinKernel {
    /// Brings the kernel to the GPU.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        let kernel = Module::load(gpu, PTX)?.kernel("spin")?;
        let blocks = attribute(gpu, ATTRIBUTE_MULTIPROCESSORS)?
            * (attribute(gpu, ATTRIBUTE_THREADS_PER_MULTIPROCESSOR)? / BLOCK).max(1);
        let words = PinnedWords::new(gpu, STARTED + blocks as usize)?;
        Ok(Self { gpu: Arc::clone(gpu), kernel, blocks, words, stream: Stream::new(gpu)? })
    }

    /// Fills every multiprocessor with spinning threads, and returns when all of them spin. Other
    /// work on the GPU must end first. They end when the result is dropped, or after `limit`, in
    /// case the thread that started them is stuck.
    pub fn start(&mut self, limit: Duration) -> Result<Spin<'_>, KernelError> {
        self.words.set(STOP, 0);
        (0..self.blocks as usize).for_each(|block| self.words.set(STARTED + block, 0));
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let arguments = [self.words.address(STOP), self.words.address(STARTED), limit];
        // SAFETY: the kernel's arguments; the words are never freed, and there is one for each
        // block.
        unsafe { self.kernel.launch(&self.stream, self.blocks, BLOCK, &arguments) }?;
        let spin = Spin { kernel: self };
        super::wait_until("starting a kernel on all multiprocessors", LIMIT, || {
            Ok(spin.started() == spin.kernel.blocks)
        })?;
        Ok(spin)
    }

    /// The GPU it runs on.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

/// A fully occupied GPU. Dropping it stops the kernel.
#[derive(Debug)]
pub struct Spin<'a> {
    kernel: &'a SpinKernel,
}

impl Spin<'_> {
    /// Number of spinning blocks.
    #[must_use]
    pub fn started(&self) -> u32 {
        let words = (0..self.kernel.blocks).zip(STARTED..);
        words.fold(0, |sum, (_, word)| sum + u32::from(self.kernel.words.get(word) != 0))
    }

    /// Whether they still spin.
    pub fn goes_on(&self) -> Result<bool, KernelError> {
        Ok(!self.kernel.stream.is_idle()?)
    }
}

impl Drop for Spin<'_> {
    fn drop(&mut self) {
        self.kernel.words.set(STOP, 1);
        // A GPU that does not answer any more is not worth hanging for.
        let _ = self.kernel.stream.wait("the spinning kernel", LIMIT);
    }
}

fn attribute(gpu: &Gpu, which: u32) -> Result<u32, CudaError> {
    let (mut device, mut value): (c_int, c_int) = (0, 0);
    super::with(gpu, |api| {
        // SAFETY: both calls write one int.
        unsafe {
            api.ctx_device(&raw mut device).and_then(|()| api.device_attribute(&raw mut value, which, device))
        }
    })?;
    Ok(u32::try_from(value).unwrap_or(0))
}
