//! A pinned buffer: the whole GPU pages it lies in, and the window onto them.

use std::ffi::c_void;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use nobounce_memory::AccessError;
use nobounce_memory::gpu::{
    DriverError, GPU_PAGE, GpuMemory, GpuOptions, GpuRangeError, GpuRegisterError, GpuWindow, MemoryKind,
};
use nobounce_memory::page_size;
use nobounce_memory::path::Require;

use crate::entry::Errno;
use crate::layout::{InfoV1, InfoV2, MAPPING_NONE, MAPPING_WC};
use crate::log;

/// So often a buffer is tried to be pinned while the reason against it may pass.
const ATTEMPTS: usize = 4;

/// A pinned buffer. It has its own window from the start: mapping exposes the address, and
/// unmapping makes it fault.
#[derive(Debug)]
pub(crate) struct Pin {
    /// The pages, with their window.
    memory: GpuMemory,
    /// The requested address.
    addr: u64,
    /// Number of bytes mapped for the program; 0 while it is not mapped.
    mapped: AtomicUsize,
    /// Number of unmaps: a copy that faulted checks whether that was the reason, though it may be
    /// mapped again by then.
    unmaps: AtomicUsize,
    /// Held while the buffer is mapped or unmapped.
    changes: Mutex<()>,
}

impl Pin {
    /// Pins the GPU pages of `size` bytes at `addr`. Pinned memory stays alive, though its owner
    /// may free it.
    pub(crate) fn new(addr: u64, size: usize) -> Result<Self, Errno> {
        let options = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
        let mut memory = GpuMemory::register_gpu_pages(addr, size, &options);
        for _ in 1..ATTEMPTS {
            // The window is compared with its memory by GPU copies, which may time out on a busy
            // GPU.
            if !memory.as_ref().is_err_and(may_pass) {
                break;
            }
            memory = GpuMemory::register_gpu_pages(addr, size, &options);
        }
        let memory = memory.map_err(|error| refused(&error))?;
        if memory.window().is_none() {
            let kind = memory.range().kind();
            log::debug(|| {
                format!("gdrapi: {size} bytes at {addr:#x} are {kind} memory, which cannot be pinned")
            });
            return Err(Errno::EINVAL);
        }
        log::info(|| format!("gdrapi: pinned {memory}"));
        Ok(Self {
            memory,
            addr,
            mapped: AtomicUsize::new(0),
            unmaps: AtomicUsize::new(0),
            changes: Mutex::new(()),
        })
    }

    /// There always is one.
    #[inline]
    fn window(&self) -> Result<&GpuWindow, Errno> {
        self.memory.window().ok_or(Errno::EINVAL)
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.load(Ordering::Acquire) > 0
    }

    pub(crate) fn info(&self) -> InfoV2 {
        let is_mapped = self.is_mapped();
        InfoV2 {
            v1: InfoV1 {
                va: self.memory.addr(),
                mapped_size: self.memory.len() as u64,
                page_size: u32::try_from(GPU_PAGE).unwrap_or(0),
                tm_cycles: 0,
                cycles_per_ms: 0,
                bits: if is_mapped { 0b11 } else { 0 },
            },
            mapping_type: if is_mapped { MAPPING_WC } else { MAPPING_NONE },
        }
    }

    /// The address at which the CPU sees the first page.
    pub(crate) fn map(&self, size: usize) -> Result<*mut c_void, Errno> {
        if !self.addr.is_multiple_of(GPU_PAGE) {
            log::debug(|| {
                format!(
                    "gdrapi: mappings start at a 64 KiB page, and {:#x} does not; pin the whole page",
                    self.addr
                )
            });
            return Err(Errno::EINVAL);
        }
        let len =
            size.checked_next_multiple_of(page_size()).filter(|&len| len > 0 && len <= self.memory.len());
        if len.is_none() {
            let pinned = self.memory.len();
            log::debug(|| {
                format!("gdrapi: cannot map {size} bytes of the {pinned} bytes at {:#x}", self.addr)
            });
            return Err(Errno::EINVAL);
        }
        let (window, len) = (self.window()?, len.unwrap_or(0));
        let _one_at_a_time = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_mapped() {
            log::debug(|| format!("gdrapi: the buffer at {:#x} is already mapped", self.addr));
            return Err(Errno::EAGAIN);
        }
        self.memory.show(len).map_err(|error| {
            log::warn(|| {
                format!(
                    "gdrapi: the kernel cannot map the buffer at {:#x} again ({error}); pin it again",
                    self.addr
                )
            });
            Errno::ENOMEM
        })?;
        self.mapped.store(len, Ordering::Release);
        Ok(window.as_mut_ptr().cast())
    }

    /// Revokes the mapping: later accesses fault. Its addresses stay reserved until the buffer is
    /// unpinned, so that nothing else is mapped there.
    pub(crate) fn unmap(&self, va: *mut c_void, size: usize) -> Result<(), Errno> {
        let is_ours = va.cast() == self.window()?.as_mut_ptr() && (1..=self.memory.len()).contains(&size);
        let _one_at_a_time = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_ours || !self.is_mapped() {
            log::debug(|| {
                format!("gdrapi: the buffer at {:#x} is not mapped at {va:?} with {size} bytes", self.addr)
            });
            return Err(Errno::EINVAL);
        }
        // First, and in this order, so that a copy that faults meanwhile finds the cause: a reader
        // of the new count finds the buffer unmapped, or mapped again.
        self.mapped.store(0, Ordering::Release);
        self.unmaps.fetch_add(1, Ordering::Release);
        self.memory.hide();
        Ok(())
    }

    /// Where in the window `len` bytes at an address of this process lie.
    #[inline]
    fn offset(&self, window: &GpuWindow, at: usize, len: usize) -> Result<usize, Errno> {
        let mapped = self.mapped.load(Ordering::Acquire);
        if mapped == 0 {
            log::debug(|| {
                format!("gdrapi: copy to or from the buffer at {:#x}, which is not mapped", self.addr)
            });
            return Err(Errno::EINVAL);
        }
        let offset = at.wrapping_sub(window.as_mut_ptr().addr());
        if offset <= mapped && len <= mapped - offset {
            return Ok(offset);
        }
        log::debug(|| {
            format!(
                "gdrapi: {len} bytes at {at:#x} are outside the mapping of the buffer at {:#x}",
                self.addr
            )
        });
        Err(Errno::EINVAL)
    }

    /// Offset in the window of a copy of `len` bytes at `at`, if the program's address lies there;
    /// `None` for an empty copy.
    #[inline]
    fn both_ends(
        &self,
        at: usize,
        program: *const c_void,
        len: usize,
    ) -> Result<Option<(&GpuWindow, usize)>, Errno> {
        let window = self.window()?;
        let offset = self.offset(window, at, len)?;
        match len {
            0 => Ok(None),
            _ if program.is_null() => Err(Errno::EFAULT),
            _ => Ok(Some((window, offset))),
        }
    }

    /// Copies into GPU memory. A notification sent after the return finds the data in place.
    ///
    /// # Safety
    /// `from` is what the program says it is: `len` bytes that may be read.
    #[inline]
    pub(crate) unsafe fn copy_to(
        &self,
        to: *mut c_void,
        from: *const c_void,
        len: usize,
    ) -> Result<(), Errno> {
        let unmaps = self.unmaps.load(Ordering::Acquire);
        let Some((window, offset)) = self.both_ends(to.addr(), from, len)? else { return Ok(()) };
        // SAFETY: the program's memory, used by the copy routine only, which survives a fault on
        // it; `len` is less than the window's length.
        let bytes = unsafe { slice::from_raw_parts(from.cast::<u8>(), len) };
        window
            .store(offset, bytes)
            .and_then(|()| window.complete())
            .map_err(|error| self.failed(error, unmaps))
    }

    /// Copies out of GPU memory.
    ///
    /// # Safety
    /// `to` is what the program says it is: `len` bytes that may be written.
    #[inline]
    pub(crate) unsafe fn copy_from(
        &self,
        to: *mut c_void,
        from: *const c_void,
        len: usize,
    ) -> Result<(), Errno> {
        let unmaps = self.unmaps.load(Ordering::Acquire);
        let Some((window, offset)) = self.both_ends(from.addr(), to, len)? else { return Ok(()) };
        // SAFETY: as in `copy_to`.
        let bytes = unsafe { slice::from_raw_parts_mut(to.cast::<u8>(), len) };
        window.load(offset, bytes).map_err(|error| self.failed(error, unmaps))
    }

    /// `unmaps`: how often it had been unmapped before the copy computed its offset.
    #[cold]
    fn failed(&self, error: AccessError, unmaps: usize) -> Errno {
        log::debug(|| format!("gdrapi: copy failed: {error}"));
        // Another thread may have unmapped it meanwhile, and mapped it again.
        let is_as_it_was = self.unmaps.load(Ordering::Acquire) == unmaps;
        if error.is_fault() && is_as_it_was { Errno::EFAULT } else { Errno::EINVAL }
    }
}

fn may_pass(error: &GpuRegisterError) -> bool {
    matches!(error, GpuRegisterError::NotDirect { refusals, .. } if refusals.iter().any(|refusal| refusal.may_pass))
}

/// Logs why the pin failed, and maps the reason to gdrdrv's errno.
#[cold]
fn refused(error: &GpuRegisterError) -> Errno {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let errno = match error {
        GpuRegisterError::Range(GpuRangeError::Driver(DriverError::Forked)) => Errno::EACCES,
        GpuRegisterError::Range(GpuRangeError::Driver(_)) => Errno::ENODEV,
        GpuRegisterError::NotDirect { kind: MemoryKind::Managed | MemoryKind::PinnedHost, .. } => {
            Errno::EINVAL
        }
        error if may_pass(error) => Errno::ENOMEM,
        GpuRegisterError::NotDirect { .. } => Errno::ENOTSUP,
        GpuRegisterError::Guard(_) => Errno::EIO,
        _ => Errno::EINVAL,
    };
    let line = || format!("gdrapi: cannot pin the buffer: {error}");
    // Programs fall back, or exit, and seldom report why: log the first failure that is not a bad
    // range as an error.
    let is_news = !matches!(error, GpuRegisterError::Range(_)) && !TOLD.swap(true, Ordering::Relaxed);
    if is_news {
        log::error(line)
    } else {
        log::warn(line)
    }
    errno
}
