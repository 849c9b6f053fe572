//! Host memory that the GPU's copy engine reads and writes by itself.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use super::CopyError;
use crate::gpu::api::{Api, consts::MEMHOSTALLOC_PORTABLE};
use crate::{SharedPlace, page_size, shared_file};

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for all contexts.
const REGISTER_PORTABLE: u32 = 1;

static NEXT_NAME: AtomicU64 = AtomicU64::new(0);

/// A range of pinned host memory.
///
/// Preferably our own memory, pinned by the driver. It stays mapped when the context is destroyed
/// (`cudaDeviceReset`), so late readers of a chunk do not crash. It is a memfd, so that another
/// process can read it. The fallback is memory from `cuMemHostAlloc`, which goes with its context.
///
/// Never freed while its context lives: freeing it would wait for running kernels of the program.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    base: *mut u8,
    len: usize,
    /// The mapped file, where it is ours, and its unique number.
    file: Option<(OwnedFd, u64)>,
}

// SAFETY: an address range; the slab controls access to each part of it.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// `len` bytes, rounded up to whole pages. The context is current.
    pub(super) fn new(api: &Api, len: usize) -> Result<Self, CopyError> {
        let len = len.max(1).checked_next_multiple_of(page_size()).ok_or(CopyError::TooLarge)?;
        if let Some(own) = Self::map(len) {
            // SAFETY: the range is a fresh mapping of ours, which stays until the context is gone.
            if unsafe { api.mem_host_register(own.base.cast(), len, REGISTER_PORTABLE) }.is_ok() {
                return Ok(own);
            }
            own.unmap();
        }
        let mut base = ptr::null_mut();
        // SAFETY: the call writes one pointer.
        unsafe { api.mem_host_alloc(&raw mut base, len, MEMHOSTALLOC_PORTABLE) }?;
        Ok(Self { base: base.cast(), len, file: None })
    }

    fn map(len: usize) -> Option<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let file = shared_file::create(len).ok()?;
        let fd = file.as_raw_fd();
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, rights, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let name = NEXT_NAME.fetch_add(1, Ordering::Relaxed);
        let own = Self { base: base.cast(), len, file: Some((file, name)) };
        // A forked child does not inherit the mapping.
        // SAFETY: advice about our own mapping.
        let kept = unsafe { libc::madvise(base, len, libc::MADV_DONTFORK) } == 0;
        if kept {
            Some(own)
        } else {
            own.unmap();
            None
        }
    }

    /// Unmaps the memory once its context, and with it the driver's pinning, is gone or never
    /// existed.
    pub(super) fn unmap(self) {
        if self.file.is_some() {
            // SAFETY: our own mapping, which is no longer in use.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }

    /// Where the part that begins at `offset` lies, for another process.
    pub(super) fn place_of(&self, offset: usize) -> Option<SharedPlace<'_>> {
        let (file, name) = self.file.as_ref()?;
        Some(SharedPlace { file: file.as_fd(), name: *name, file_len: self.len, offset })
    }

    /// The first byte of the part that begins at `offset`.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.len);
        self.base.wrapping_add(offset)
    }
}
