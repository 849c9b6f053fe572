//! A file in memory, mapped into this process and not into its forked children.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::process::fork;

/// The mapping of a whole file, whose length and seals the caller has checked. Its bytes may change
/// at any time: access is by atomics and copies, never by a reference that outlives a call.
#[derive(Debug)]
pub(in crate::links) struct SharedMapping {
    base: *mut u8,
    len: usize,
    generation: u64,
}

// SAFETY: an address of a mapping that lives as long as this; see above for how it is accessed.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps it with these rights (`PROT_READ`, `PROT_WRITE`).
    pub(in crate::links) fn new(file: &OwnedFd, len: usize, rights: libc::c_int) -> io::Result<Self> {
        let (nowhere, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { libc::mmap(nowhere, len, rights, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Not inherited across fork.
        // SAFETY: the range is our mapping; the advice changes what fork does only.
        unsafe { libc::madvise(base, len, libc::MADV_DONTFORK) };
        Ok(Self { base: base.cast(), len, generation: fork::generation() })
    }

    /// The byte at `offset`.
    #[inline]
    pub(in crate::links) fn at(&self, offset: usize) -> *mut u8 {
        self.base.wrapping_add(offset)
    }

    pub(in crate::links) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        if fork::current() != self.generation {
            return; // a child never had it, and may have something else there by now
        }
        // SAFETY: our own mapping, which has no users any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
