//! GPU memory mapped into this process.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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

    /// The intersection, if any.
    pub(super) fn overlap(self, other: Self) -> Option<Self> {
        let both = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (both.start < both.end).then_some(both)
    }
}

/// Addresses of this process that map an extent of GPU memory. Not inherited by a child. Unmapped
/// when dropped; its backing object is released afterwards.
pub(in super::super) struct Mapping {
    base: *mut u8,
    len: usize,
    extent: Extent,
    /// Objects of the driver, dropped after the pages are unmapped.
    rests_on: Mutex<Vec<Box<dyn Send + Sync>>>,
    /// Some of it faults from now on.
    is_cut: AtomicBool,
    /// Extents whose place in the driver's object is known only by comparing contents.
    unsure: Vec<Extent>,
    /// Addresses that may be another mapping's by now.
    lost: Option<Extent>,
}

// SAFETY: an address, a length and owners that may be used from any thread; the memory is accessed
// through windows only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Addresses for `extent`, with nothing behind them yet.
    pub(super) fn reserve(extent: Extent) -> Result<Self, Refused> {
        let len = usize::try_from(extent.len())
            .map_err(|_| Refused::new("the range exceeds the address space of this process"))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            return Err(Refused::passing(format!("cannot reserve {len} bytes of address space ({error})")));
        }
        let (rests_on, is_cut, unsure) = (Mutex::default(), AtomicBool::new(false), Vec::new());
        Ok(Self { base: base.cast(), len, extent, rests_on, is_cut, unsure, lost: None })
    }

    /// Maps the same pages of `of` at other addresses. The kernel supports this for memory files,
    /// not for a device's.
    pub(super) fn twin(of: &Arc<Self>, extent: Extent) -> Result<Self, Refused> {
        let mut twin = Self::reserve(extent)?;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let (from, len) = (of.at(extent.start).cast(), twin.len);
        twin.place(extent, |at| {
            // SAFETY: a length of 0 leaves the old pages in place; the new ones replace our own
            // reservation.
            let doubled = unsafe { libc::mremap(from, 0, len, flags, at) };
            if doubled == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
        })
        .map_err(|error| Refused::new(format!("cannot map the window a second time ({error})")))?;
        twin.unsure.clone_from(&of.unsure);
        twin.keep(Arc::clone(of));
        twin.finish()
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

    /// Maps something at the addresses of `piece`, in place of the reservation.
    pub(super) fn place<T, E>(
        &mut self,
        piece: Extent,
        map: impl FnOnce(*mut u8) -> Result<T, E>,
    ) -> Result<T, E> {
        map(self.at(piece.start)).inspect_err(|_| self.retake(piece))
    }

    /// A mapping with `MAP_FIXED` failed. The kernel may have removed the reservation first, and
    /// another thread may have mapped something into the gap: takes the addresses back, or gives
    /// them up.
    fn retake(&mut self, piece: Extent) {
        let (at, len) = (self.at(piece.start), usize::try_from(piece.len()).unwrap_or(0));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: the flags replace nothing that exists.
        let taken = unsafe { libc::mmap(at.cast(), len, libc::PROT_NONE, flags, -1, 0) };
        if taken == at.cast() {
            return;
        }
        if taken != libc::MAP_FAILED {
            // SAFETY: a kernel that does not know the flag has chosen other addresses, for us.
            unsafe { libc::munmap(taken, len) };
        }
        self.lost = Some(piece);
    }

    /// Keeps `owner` for as long as the pages are mapped.
    pub(super) fn keep(&mut self, owner: impl Send + Sync + 'static) {
        self.rests_on.get_mut().unwrap_or_else(PoisonError::into_inner).push(Box::new(owner));
    }

    pub(super) fn mark_unsure(&mut self, extent: Extent) {
        self.unsure.push(extent);
    }

    pub(super) fn unsure(&self) -> &[Extent] {
        &self.unsure
    }

    /// Excludes the mapping from fork: a child would otherwise inherit the window and store into
    /// memory that is not its own.
    pub(super) fn finish(self) -> Result<Self, Refused> {
        // SAFETY: the range is our mapping; the advice changes what fork does only.
        if unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_DONTFORK) } != 0 {
            let error = io::Error::last_os_error();
            return Err(Refused::new(format!("cannot exclude the window from forked children ({error})")));
        }
        Ok(self)
    }

    /// From now on every access to these GPU addresses faults. Once all of them are revoked, the
    /// driver gets its memory back.
    pub(in super::super) fn cut_off(&self, addresses: &Range<u64>) {
        let part = Extent { start: addresses.start, end: addresses.end }.overlap(self.extent);
        let Some((part, len)) = part.and_then(|part| Some((part, usize::try_from(part.len()).ok()?))) else {
            return;
        };
        self.is_cut.store(true, Ordering::Release);
        let at = self.at(part.start).cast();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the mapping is ours, and every access to it is guarded; nothing else lies there.
        // The addresses stay ours.
        let replaced = unsafe { libc::mmap(at, len, libc::PROT_NONE, flags, -1, 0) } != libc::MAP_FAILED;
        if !replaced {
            // SAFETY: as above.
            unsafe { libc::mprotect(at, len, libc::PROT_NONE) };
        } else if part == self.extent {
            let owners = std::mem::take(&mut *self.rests_on.lock().unwrap_or_else(PoisonError::into_inner));
            // Without the lock: dropping them calls the driver.
            drop(owners);
        }
    }

    /// Lets `len` bytes from `at` on be accessed again.
    ///
    /// # Errors
    /// They were cut off, or the kernel refuses.
    pub(in super::super) fn show(&self, at: *mut u8, len: usize) -> io::Result<()> {
        if self.is_cut() {
            // These pages no longer map GPU memory.
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        self.protect(at, len, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// From now on every access to `len` bytes from `at` on faults, until they are shown again. The
    /// driver's object stays.
    pub(in super::super) fn hide(&self, at: *mut u8, len: usize) {
        // On CPUs with L1TF, a kernel may refuse this to ordinary users: then the pages are revoked
        // for good.
        if self.protect(at, len, libc::PROT_NONE).is_err() {
            let start = self.extent.start + (at.addr() - self.base.addr()) as u64;
            self.cut_off(&(start..start + len as u64));
        }
    }

    fn protect(&self, at: *mut u8, len: usize, protection: libc::c_int) -> io::Result<()> {
        let offset = at.addr().wrapping_sub(self.base.addr());
        if offset > self.len || len > self.len - offset {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the pages are of our mapping. Every access to them is guarded, or comes from the
        // program that we export them to.
        let done = unsafe { libc::mprotect(at.cast(), len, protection) } == 0;
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Whether some of it was cut off.
    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }

    /// A window onto the whole, for verification: not used beyond the life of `self`.
    pub(super) fn window(&self) -> Window {
        // SAFETY: the mapping is ours and no reference to it is ever made; callers inside this
        // module use it while `self` lives, and store only into memory of our own.
        unsafe { Window::new(self.base, self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A child never had the pages, and may have something else there by now.
        if Driver::is_forked() {
            return;
        }
        let lost = self.lost.unwrap_or(Extent { start: self.extent.end, end: self.extent.end });
        for (start, end) in [(self.extent.start, lost.start), (lost.end, self.extent.end)] {
            if let Some(len) = usize::try_from(end - start).ok().filter(|len| *len > 0) {
                // SAFETY: these pages are ours and end with us.
                unsafe { libc::munmap(self.at(start).cast(), len) };
            }
        }
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

    /// Another thread maps something into the gap that a failed mapping has left.
    #[test]
    fn addresses_that_another_mapping_has_taken_stay_its_own() {
        const PAGES: u64 = 4;
        let page = page_size() as u64;
        let extent = Extent { start: 0x7000_0000, end: 0x7000_0000 + PAGES * page };
        let piece = Extent { start: extent.start + page, end: extent.start + 3 * page };
        for is_taken in [false, true] {
            let mut mapping = Mapping::reserve(extent).unwrap();
            let (base, at) = (mapping.base(), mapping.at(piece.start).cast::<libc::c_void>());
            let len = usize::try_from(piece.len()).unwrap();
            // SAFETY: the pages are those of the reservation, which nothing uses.
            assert_eq!(unsafe { libc::munmap(at, len) }, 0);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let foreign = || {
                // SAFETY: nothing that exists is replaced.
                unsafe { libc::mmap(at, page_size(), libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) }
            };
            if is_taken {
                assert_eq!(foreign(), at);
            }
            assert_eq!(mapping.place(piece, |_| Err::<(), _>(1)), Err(1));
            assert_eq!(foreign(), libc::MAP_FAILED, "taken: by us, or by the other");
            drop(mapping);
            // SAFETY: an address of the past; the kernel says whether something is mapped there.
            let is_mapped = |at| unsafe { libc::msync(at, page_size(), libc::MS_ASYNC) } == 0;
            assert_eq!(is_mapped(at), is_taken);
            assert!(!is_mapped(base.cast()) && !is_mapped(base.wrapping_add(3 * page_size()).cast()));
            if is_taken {
                // SAFETY: the test's own mapping.
                unsafe { libc::munmap(at, page_size()) };
            }
        }
    }

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

    /// A part that was freed faults, the rest does not; what it rests on goes with the last of it.
    #[test]
    fn what_is_cut_off_faults() {
        struct DropFlag(Arc<AtomicBool>);
        impl Drop for DropFlag {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        crate::guard::ensure_installed().unwrap();
        let extent = Extent { start: 0x7000_0000, end: 0x7001_0000 };
        let (mut mapping, gone) = (Mapping::reserve(extent).unwrap(), Arc::default());
        mapping.keep(DropFlag(Arc::clone(&gone)));
        // SAFETY: the reservation is ours.
        unsafe { libc::mprotect(mapping.base.cast(), mapping.len, libc::PROT_READ | libc::PROT_WRITE) };
        let (mapping, half) = (mapping.finish().unwrap(), 0x8000);
        let faults = |offset: usize| mapping.window().store(offset, &[1; 64]).is_err();
        assert_eq!((faults(0), faults(half), mapping.is_cut()), (false, false, false));
        mapping.cut_off(&(0x7000_8000..0x7700_0000));
        assert_eq!((faults(0), faults(half), mapping.is_cut()), (false, true, true));
        assert!(!gone.load(Ordering::Relaxed));
        mapping.cut_off(&(0..u64::MAX));
        assert_eq!((faults(0), faults(half), gone.load(Ordering::Relaxed)), (true, true, true));
        mapping.cut_off(&(0..u64::MAX));
    }

    /// Hidden pages fault and come back. Revoked ones do not, though the kernel would allow it: no
    /// GPU memory backs them.
    #[test]
    fn what_is_hidden_faults_until_it_is_shown() {
        crate::guard::ensure_installed().unwrap();
        let mapping =
            Mapping::reserve(Extent { start: 0x7000_0000, end: 0x7001_0000 }).unwrap().finish().unwrap();
        let (base, half) = (mapping.base(), 0x8000);
        let faults = |offset: usize| mapping.window().store(offset, &[1; 64]).is_err();
        mapping.show(base, 2 * half).unwrap();
        mapping.hide(base.wrapping_add(half), half);
        assert_eq!((faults(0), faults(half)), (false, true));
        mapping.hide(base, 2 * half);
        assert_eq!((faults(0), faults(half)), (true, true));
        mapping.show(base, half).unwrap();
        assert_eq!((faults(0), faults(half)), (false, true));
        assert!(mapping.show(base.wrapping_add(half), half + 1).is_err(), "beyond its end");
        assert!(mapping.show(base.wrapping_sub(half), half).is_err(), "before it");
        mapping.cut_off(&(0..u64::MAX));
        assert!(mapping.show(base, half).is_err() && faults(0));
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
