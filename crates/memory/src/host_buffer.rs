//! Memory of our own.

use std::io;
use std::ptr;

use crate::{AccessError, Window, page_size};

/// Zeroed, page-aligned memory, unmapped when dropped. Its bytes are accessed through a [`Window`]
/// only, so that a device may write them at any time.
#[derive(Debug)]
pub struct HostBuffer {
    /// The whole mapping, guard pages included.
    mapping: *mut u8,
    mapping_len: usize,
    base: *mut u8,
    len: usize,
}

// SAFETY: the buffer owns its mapping, and all safe access goes through a `Window`, for which
// concurrent access is expected.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// `len` bytes (at least one page is mapped).
    pub fn new(len: usize) -> io::Result<Self> {
        Self::map(len, 0)
    }

    /// `len` bytes, rounded up to whole pages, between two guard pages: an access just outside
    /// faults.
    pub fn guarded(len: usize) -> io::Result<Self> {
        let page = page_size();
        Self::map(len.checked_next_multiple_of(page).ok_or(io::ErrorKind::OutOfMemory)?, page)
    }

    fn map(len: usize, guard: usize) -> io::Result<Self> {
        let inner = len.max(1).checked_next_multiple_of(page_size()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping_len = inner.checked_add(2 * guard).ok_or(io::ErrorKind::OutOfMemory)?;
        let outer = if guard > 0 { libc::PROT_NONE } else { libc::PROT_READ | libc::PROT_WRITE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing
        // that exists.
        let mapping = unsafe { libc::mmap(ptr::null_mut(), mapping_len, outer, flags, -1, 0) };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = mapping.cast::<u8>();
        let buffer = Self { mapping, mapping_len, base: mapping.wrapping_add(guard), len };
        if guard > 0 {
            // SAFETY: the range lies inside the mapping just made, whose address was not shared
            // yet.
            let opened =
                unsafe { libc::mprotect(buffer.base.cast(), inner, libc::PROT_READ | libc::PROT_WRITE) };
            if opened != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(buffer)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a buffer of no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.base.addr() as u64
    }

    /// Pointer to the first byte.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.base
    }

    /// A window onto the whole buffer.
    ///
    /// # Safety
    /// A window does not keep the buffer alive: do not use it, or a copy of it, after the buffer is
    /// dropped, for its addresses may then belong to something else.
    #[must_use]
    pub unsafe fn window(&self) -> Window {
        self.as_window()
    }

    /// Writes `bytes` at `offset`.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.as_window().store(offset, bytes)
    }

    /// Reads `bytes.len()` bytes at `offset`.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.as_window().load(offset, bytes)
    }

    fn as_window(&self) -> Window {
        // SAFETY: the buffer's own mapping, to which no reference is ever made; callers inside this
        // type use it while `self` lives, callers outside have promised so.
        unsafe { Window::new(self.base, self.len) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and ends with us; windows onto it are no longer used (the
        // promise of `window`). Unmapping a mapping that exists can fail only for lack of kernel
        // memory; then it is leaked.
        unsafe { libc::munmap(self.mapping.cast(), self.mapping_len) };
    }
}
