//! An allocator with a reserve: a program that has run out of memory gets `ENOMEM` from us, not an
//! abort.
//!
//! Rust aborts the process where an allocation fails. Small allocations are everywhere, so that a
//! failed one takes memory of a reserve instead, and calls that create objects are refused until
//! memory is there again ([`check`]). Where a program's numbers decide the size, the code asks
//! first (`try_reserve`). The reserve is address space that costs nothing until it is used.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use crate::entry::Errno;

/// Bytes of the reserve.
const RESERVE: usize = 16 << 20;
/// Bytes and alignment of a granule: the largest alignment in use.
const GRANULE: usize = 128;
/// The largest block. Larger allocations fail: their callers handle that.
const LARGEST: usize = 64 << 10;
/// Bytes that must be available again before objects are created.
const ENOUGH: usize = 1 << 20;

/// The allocator.
#[derive(Debug)]
pub struct WithReserve;

/// An allocation failed, and memory is not known to be there again.
static SHORT: AtomicBool = AtomicBool::new(false);
/// The reserve, or null before it was mapped.
static START: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
/// Granules taken from its front, and above them the number of blocks in use. When the last one is
/// freed, all of it is free again.
static STATE: AtomicU64 = AtomicU64::new(0);
/// One block, in the number above.
const BLOCK: u64 = 1 << 32;

/// Maps the reserve. Without it, a failed allocation aborts.
fn prepare() {
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(ptr::null_mut(), RESERVE, rights, flags | libc::MAP_NORESERVE, -1, 0) };
    if start == libc::MAP_FAILED {
        return;
    }
    if START.compare_exchange(ptr::null_mut(), start.cast(), Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: mapped just now, and not shared.
        unsafe { libc::munmap(start, RESERVE) };
    }
}

/// Whether objects may be created.
///
/// # Errors
/// ENOMEM, as long as memory has run out.
pub fn check() -> Result<(), Errno> {
    if START.load(Ordering::Relaxed).is_null() {
        prepare();
    }
    if !SHORT.load(Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: a layout of a size that is not zero; what was allocated is freed.
    unsafe {
        let layout = Layout::from_size_align_unchecked(ENOUGH, 16);
        // The compiler leaves out an allocation that is not used.
        let block = std::hint::black_box(System.alloc(layout));
        if block.is_null() {
            return Err(Errno::ENOMEM);
        }
        System.dealloc(block, layout);
    }
    SHORT.store(false, Ordering::Relaxed);
    Ok(())
}

#[cold]
fn from_reserve(layout: Layout) -> *mut u8 {
    SHORT.store(true, Ordering::Relaxed);
    let Some(start) = NonNull::new(START.load(Ordering::Acquire)) else { return ptr::null_mut() };
    if layout.size() > LARGEST || layout.align() > GRANULE {
        return ptr::null_mut();
    }
    let granules = layout.size().div_ceil(GRANULE) as u64;
    let taken = STATE.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
        let end = state % BLOCK + granules;
        (end <= (RESERVE / GRANULE) as u64).then_some(state + granules + BLOCK)
    });
    match taken.map(|state| usize::try_from(state % BLOCK)) {
        // SAFETY: inside the mapping.
        Ok(Ok(first)) => unsafe { start.as_ptr().add(first * GRANULE) },
        _ => ptr::null_mut(),
    }
}

fn release() {
    let freed = |state: u64| Some(if state / BLOCK <= 1 { 0 } else { state - BLOCK });
    let _ = STATE.fetch_update(Ordering::AcqRel, Ordering::Acquire, freed); // it never refuses
}

#[inline]
fn is_reserve(block: *mut u8) -> bool {
    let start = START.load(Ordering::Relaxed);
    !start.is_null() && (start.addr()..start.addr() + RESERVE).contains(&block.addr())
}

// SAFETY: the system's allocator, and where that fails disjoint parts of a mapping that is never
// unmapped.
unsafe impl GlobalAlloc for WithReserve {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as for our caller.
        let block = unsafe { System.alloc(layout) };
        if block.is_null() { from_reserve(layout) } else { block }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as for our caller.
        let block = unsafe { System.alloc_zeroed(layout) };
        if !block.is_null() {
            return block;
        }
        let block = from_reserve(layout);
        if !block.is_null() {
            // SAFETY: a block of that size; it may have been used before.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if is_reserve(block) {
            return release();
        }
        // SAFETY: as for our caller.
        unsafe { System.dealloc(block, layout) };
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !is_reserve(block) {
            // SAFETY: as for our caller.
            let moved = unsafe { System.realloc(block, layout, new_size) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: as for our caller: the new size is not zero and does not overflow.
        unsafe {
            let moved = self.alloc(Layout::from_size_align_unchecked(new_size, layout.align()));
            if !moved.is_null() {
                ptr::copy_nonoverlapping(block, moved, layout.size().min(new_size));
                self.dealloc(block, layout);
            }
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_serves_and_is_whole_again() {
        assert!(check().is_ok());
        let layout = Layout::from_size_align(1000, 16).unwrap();
        let first = from_reserve(layout);
        let second = from_reserve(layout);
        assert!(is_reserve(first) && is_reserve(second));
        assert_eq!(second.addr() - first.addr(), 1024);
        assert!(SHORT.load(Ordering::Relaxed));
        // SAFETY: blocks of this layout, each freed once.
        unsafe {
            first.write_bytes(7, 1000);
            let moved = WithReserve.realloc(first, layout, 5000);
            assert!(!is_reserve(moved) && *moved.add(999) == 7, "memory is there again");
            WithReserve.dealloc(moved, Layout::from_size_align(5000, 16).unwrap());
            WithReserve.dealloc(second, layout);
        }
        assert_eq!(STATE.load(Ordering::Relaxed), 0);
        assert!(from_reserve(Layout::from_size_align(LARGEST + 1, 16).unwrap()).is_null());
        assert!(from_reserve(Layout::from_size_align(64, 256).unwrap()).is_null());
        let padded = Layout::from_size_align(256, 128).unwrap();
        let block = from_reserve(padded);
        assert!(block.addr().is_multiple_of(128));
        // SAFETY: of this layout.
        unsafe { WithReserve.dealloc(block, padded) };
        assert!(check().is_ok() && !SHORT.load(Ordering::Relaxed));
    }
}
