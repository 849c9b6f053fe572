//! GPU memory mapped into this process.

use std::io;
use std::ptr;

use super::super::dmabuf::whole_pages;
use super::super::driver::Driver;
use super::Refused;
use crate::{Window, page_size};

/// A range of GPU addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Extent {
    pub(in super::super) start: u64,
    pub(in super::super) end: u64,
}

impl Extent {
    /// The pages that `start..end` lies in.
    pub(super) fn whole_pages(start: u64, end: u64) -> Self {
        let (first, len) =
            whole_pages(start, usize::try_from(end - start).unwrap_or(usize::MAX >> 1), page_size());
        Self { start: first, end: first + len as u64 }
    }

    pub(super) fn len(self) -> u64 {
        self.end - self.start
    }

    pub(super) fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// What both have, if anything.
    pub(super) fn overlap(self, other: Self) -> Option<Self> {
        let both = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (both.start < both.end).then_some(both)
    }
}

/// Addresses of this process under which an extent of GPU memory is seen. Not inherited by a child. Unmapped when dropped; what it
/// rests on goes after.
pub(in super::super) struct Mapping {
    base: *mut u8,
    len: usize,
    extent: Extent,
    /// Objects of the driver, dropped after the pages are unmapped.
    rests_on: Vec<Box<dyn Send + Sync>>,
    /// Extents whose place in the driver's object is known only by comparing contents.
    unsure: Vec<Extent>,
}

// SAFETY: an address, a length and owners that may be used from any thread; the memory is accessed through windows only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Addresses for `extent`, with nothing behind them yet.
    pub(super) fn reserve(extent: Extent) -> Result<Self, Refused> {
        let len = usize::try_from(extent.len())
            .map_err(|_| Refused::new("the range is too long for this process"))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            return Err(Refused::passing(format!("no {len} bytes of addresses could be reserved ({error})")));
        }
        Ok(Self { base: base.cast(), len, extent, rests_on: Vec::new(), unsure: Vec::new() })
    }

    pub(in super::super) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(in super::super) fn extent(&self) -> Extent {
        self.extent
    }

    /// Where the GPU address `addr` is seen.
    pub(super) fn at(&self, addr: u64) -> *mut u8 {
        let offset = usize::try_from(addr - self.extent.start).unwrap_or(self.len);
        self.base.wrapping_add(offset.min(self.len))
    }

    /// Keeps `owner` for as long as the pages are mapped.
    pub(super) fn keep(&mut self, owner: impl Send + Sync + 'static) {
        self.rests_on.push(Box::new(owner));
    }

    pub(super) fn mark_unsure(&mut self, extent: Extent) {
        self.unsure.push(extent);
    }

    pub(super) fn unsure(&self) -> &[Extent] {
        &self.unsure
    }

    /// Ends the making: a child would inherit the window otherwise, and go on storing into memory that is not its own.
    pub(super) fn finish(self) -> Result<Self, Refused> {
        // SAFETY: the range is our mapping; the advice changes what fork does only.
        if unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_DONTFORK) } != 0 {
            let error = io::Error::last_os_error();
            return Err(Refused::new(format!("the window cannot be kept from forked children ({error})")));
        }
        Ok(self)
    }

    /// From now on every access faults.
    pub(in super::super) fn cut_off(&self) {
        // SAFETY: the mapping is ours, and whoever accesses it is guarded; nothing else lies there.
        unsafe { libc::mprotect(self.base.cast(), self.len, libc::PROT_NONE) };
    }

    /// A window onto the whole, for the proof and the comparison: not longer used than this lives.
    pub(super) fn window(&self) -> Window {
        // SAFETY: the mapping is ours and no reference to it is ever made; callers inside this module use it while `self` lives, and
        // store only into memory of our own.
        unsafe { Window::new(self.base, self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A child never had the pages, and may have something else there by now.
        if Driver::is_forked() {
            return;
        }
        // SAFETY: the mapping is ours and ends with us.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping")
            .field("base", &self.base)
            .field("len", &self.len)
            .field("gpu_address", &format_args!("{:#x}", self.extent.start))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_overlap_where_both_are() {
        let a = Extent { start: 0x1000, end: 0x3000 };
        assert_eq!(
            a.overlap(Extent { start: 0x2000, end: 0x9000 }),
            Some(Extent { start: 0x2000, end: 0x3000 })
        );
        assert_eq!(a.overlap(Extent { start: 0x3000, end: 0x9000 }), None);
        assert!(a.contains(Extent { start: 0x1000, end: 0x2000 }));
        assert_eq!(Extent::whole_pages(0x1200, 0x1300), Extent { start: 0x1000, end: 0x2000 });
    }

    #[test]
    fn a_reservation_faults_and_is_given_back() {
        crate::guard::ensure_installed().unwrap();
        let mapping =
            Mapping::reserve(Extent { start: 0x7000_0000, end: 0x7001_0000 }).unwrap().finish().unwrap();
        assert!(mapping.window().load_u64(0).is_err_and(|error| error.is_fault()));
        assert_eq!(mapping.at(0x7000_1000).addr() - mapping.base().addr(), 0x1000);
    }
}
