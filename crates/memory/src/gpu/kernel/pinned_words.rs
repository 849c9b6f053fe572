//! Host words that kernels and the CPU share.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::gpu::api::consts;
use crate::gpu::{CudaError, Gpu};

/// Pinned host words, zero at first, that kernels reach by the same addresses as the CPU.
///
/// Never freed: freeing pinned memory waits for every kernel of the context, and a page is little.
#[derive(Clone, Debug)]
pub struct PinnedWords {
    words: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: an address of memory that is never freed, and is only accessed as atomic words.
unsafe impl Send for PinnedWords {}
// SAFETY: as above.
unsafe impl Sync for PinnedWords {}

impl PinnedWords {
    /// `count` words, on pages of their own.
    pub fn new(gpu: &Arc<Gpu>, count: usize) -> Result<Self, CudaError> {
        let count = count.max(1);
        let mut memory: *mut c_void = ptr::null_mut();
        super::with(gpu, |api| {
            // SAFETY: the call writes one address.
            unsafe {
                api.mem_host_alloc(&raw mut memory, count * size_of::<u64>(), consts::MEMHOSTALLOC_PORTABLE)
            }
        })?;
        let words = NonNull::new(memory.cast::<AtomicU64>()).ok_or(CudaError {
            call: "cuMemHostAlloc",
            code: CudaError::INVALID_VALUE,
            name: "success, but no memory",
        })?;
        // SAFETY: `count` words were allocated, and their address was not shared yet. The driver
        // aligns to pages.
        unsafe { ptr::write_bytes(words.as_ptr(), 0, count) };
        Ok(Self { words, count })
    }

    /// The first word, for copies by the driver and for direct reads. It is never freed.
    #[must_use]
    pub fn as_ptr(&self) -> *mut c_void {
        self.words.as_ptr().cast()
    }

    /// The address of word `index`, the same for the GPU and the CPU.
    ///
    /// # Panics
    /// Where there is no such word.
    #[must_use]
    pub fn address(&self, index: usize) -> u64 {
        ptr::from_ref(self.word(index)).addr() as u64
    }

    /// Loads word `index`, with everything that was written before it (acquire).
    ///
    /// # Panics
    /// Where there is no such word.
    #[must_use]
    pub fn get(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    /// Writes word `index` after everything that this thread wrote before (release).
    ///
    /// # Panics
    /// Where there is no such word.
    pub fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count, "word {index} of {}", self.count);
        // SAFETY: within the allocation, which lives as long as the process.
        unsafe { self.words.add(index).as_ref() }
    }
}
