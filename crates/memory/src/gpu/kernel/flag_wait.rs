//! A kernel that polls GPU memory for a flag and answers in host memory: measures GPU-visible
//! latency.

use std::sync::Arc;
use std::time::Duration;

use super::{Kernel, KernelError, Module, PinnedWords, Stream};
use crate::gpu::{Gpu, GpuBuffer};

const PTX: &str = include_str!("handshake.ptx");
/// Words on cache lines of their own: the kernel polls one and writes the other.
const STOP: usize = 0;
const SEEN: usize = 16;
const WORDS: usize = 32;
/// Bound on stopping: the kernel polls the stop word every few milliseconds.
const LIMIT: Duration = Duration::from_secs(5);

/// The polling kernel, ready to be launched.
#[derive(Debug)]
pub struct FlagKernel {
    gpu: Arc<Gpu>,
    kernel: Kernel,
}

impl FlagKernel {
    /// Brings the kernel to the GPU; before anything spins there.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        let kernel = Module::load(gpu, PTX)?.kernel("wait_flag")?;
        Ok(Self { gpu: Arc::clone(gpu), kernel })
    }

    /// Starts one GPU thread that polls the word at `offset` of `buffer` for `first`, then `first +
    /// 1`, and so on for `rounds` rounds. It answers each as soon as it sees it.
    pub fn start<'a>(
        &self,
        buffer: &'a GpuBuffer,
        offset: usize,
        first: u64,
        rounds: u64,
    ) -> Result<FlagWait<'a>, KernelError> {
        if offset.checked_add(8).is_none_or(|end| end > buffer.len()) || !offset.is_multiple_of(8) {
            return Err(KernelError::OutOfBounds { offset, len: 8, buffer: buffer.len() });
        }
        let words = PinnedWords::new(&self.gpu, WORDS)?;
        let stream = Stream::new(&self.gpu)?;
        let arguments =
            [buffer.addr() + offset as u64, words.address(SEEN), words.address(STOP), first, rounds];
        // SAFETY: the kernel's arguments; the flag lies in a buffer that is borrowed until it has
        // stopped, the words are never freed.
        unsafe { self.kernel.launch(&stream, 1, 1, &arguments) }?;
        Ok(FlagWait { words, stream, _buffer: buffer })
    }
}

/// A kernel at work, polling. Dropping it ends it.
#[derive(Debug)]
pub struct FlagWait<'a> {
    words: PinnedWords,
    stream: Stream,
    _buffer: &'a GpuBuffer,
}

impl FlagWait<'_> {
    /// The last value that it saw and answered; 0 before the first.
    #[must_use]
    #[inline]
    pub fn seen(&self) -> u64 {
        self.words.get(SEEN)
    }

    /// Whether it is over: all rounds seen, or ended, or failed.
    pub fn is_over(&self) -> Result<bool, KernelError> {
        Ok(self.stream.is_idle()?)
    }
}

impl Drop for FlagWait<'_> {
    fn drop(&mut self) {
        self.words.set(STOP, 1);
        // A GPU that does not answer any more is not worth hanging for.
        let _ = self.stream.wait("the kernel that polls a flag", LIMIT);
    }
}
