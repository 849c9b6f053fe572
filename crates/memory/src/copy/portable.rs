//! Guarded copies by the kernel: `process_vm_readv` and `process_vm_writev` on this process. For
//! architectures without assembly routines here. About 1 us per copy (64 bytes, virtual machine),
//! without single-copy atomicity of words.
//!
//! 8-byte accesses probe through the kernel first and then use atomics: memory that is unmapped in
//! between kills the process.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{barrier, probe};

/// Copies out of the window.
///
/// # Safety
/// `dst` is valid for writes of `len` bytes. `src` may be anything, but whatever is mapped there
/// may be read.
pub(crate) unsafe fn load(dst: *mut u8, src: *const u8, len: usize) -> usize {
    let (window, private) = (src.cast_mut(), dst);
    // SAFETY: the caller's promise; the kernel checks the window side.
    unsafe { transfer(libc::process_vm_readv, private, window, len) }
}

/// Copies out of the window, and returns the CRC-32 of the copied bytes, continuing from `crc`.
///
/// # Safety
/// As for [`load`].
pub(crate) unsafe fn load_crc(dst: *mut u8, src: *const u8, len: usize, crc: u32) -> (usize, u32) {
    // SAFETY: the caller's promise.
    let rest = unsafe { load(dst, src, len) };
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    // SAFETY: `dst` is valid for `len` bytes, these have just been written, and there is no other
    // writer.
    hasher.update(unsafe { std::slice::from_raw_parts(dst, len - rest) });
    (rest, hasher.finalize())
}

/// Copies into the window.
///
/// # Safety
/// `src` is valid for reads of `len` bytes. `dst` may be anything, but whatever is mapped there may
/// be written.
pub(crate) unsafe fn store(dst: *mut u8, src: *const u8, len: usize) -> usize {
    let (window, private) = (dst, src.cast_mut());
    // SAFETY: the caller's promise; process_vm_writev only reads the private side.
    unsafe { transfer(libc::process_vm_writev, private, window, len) }
}

/// Copies into the window in ascending 8-byte words.
///
/// # Safety
/// As for [`store`].
pub(crate) unsafe fn store_ascending(dst: *mut u8, src: *const u8, len: usize) -> usize {
    let mut done = 0;
    while done < len {
        let to_boundary = 8 - dst.addr().wrapping_add(done) % 8;
        let step = to_boundary.min(len - done);
        // SAFETY: `done + step <= len`, so both sides stay within the caller's promise.
        let rest = unsafe { store(dst.wrapping_add(done), src.add(done), step) };
        if rest > 0 {
            return len - done - step + rest;
        }
        barrier::before_last_bytes();
        done += step;
    }
    0
}

/// # Safety
/// `address` is a multiple of 8; whatever is mapped there may be read.
pub(crate) unsafe fn load_u64(address: *const u64) -> Option<u64> {
    reachable(address, false)?;
    // SAFETY: aligned by the caller's promise, and mapped a moment ago.
    Some(unsafe { AtomicU64::from_ptr(address.cast_mut()) }.load(Ordering::Acquire))
}

/// # Safety
/// `address` is a multiple of 8; whatever is mapped there may be written.
pub(crate) unsafe fn store_u64(address: *mut u64, value: u64) -> bool {
    reachable(address, true)
        // SAFETY: aligned by the caller's promise, and mapped a moment ago.
        .map(|()| unsafe { AtomicU64::from_ptr(address) }.store(value, Ordering::Release))
        .is_some()
}

/// # Safety
/// `address` is a multiple of 8; whatever is mapped there may be written.
pub(crate) unsafe fn fetch_add(address: *mut u64, add: u64) -> Option<u64> {
    reachable(address, true)?;
    // SAFETY: aligned by the caller's promise, and mapped a moment ago.
    Some(unsafe { AtomicU64::from_ptr(address) }.fetch_add(add, Ordering::SeqCst))
}

/// # Safety
/// `address` is a multiple of 8; whatever is mapped there may be written.
pub(crate) unsafe fn compare_swap(address: *mut u64, compare: u64, swap: u64) -> Option<u64> {
    reachable(address, true)?;
    // SAFETY: aligned by the caller's promise, and mapped a moment ago.
    let word = unsafe { AtomicU64::from_ptr(address) };
    Some(word.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|old| old))
}

fn reachable(address: *const u64, write: bool) -> Option<()> {
    probe::check_range(address.addr() as u64, 8, write).ok()
}

type Transfer = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

/// # Safety
/// `private` is valid for `len` bytes in the direction of `call`; whatever is mapped at `window`
/// may be accessed.
unsafe fn transfer(call: Transfer, private: *mut u8, window: *mut u8, len: usize) -> usize {
    let mut done = 0;
    while done < len {
        let local = libc::iovec { iov_base: private.wrapping_add(done).cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: window.wrapping_add(done).cast(), iov_len: len - done };
        // SAFETY: the iovecs live through the call; the private side is valid, the window side is
        // checked by the kernel.
        let moved = unsafe { call(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(moved) {
            Ok(0) | Err(_) => break,
            Ok(moved) => done += moved,
        }
    }
    len - done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostBuffer, page_size};

    #[test]
    fn copies_what_is_there_and_reports_the_rest() {
        let page = page_size();
        let buffer = HostBuffer::guarded(page).unwrap();
        let base = buffer.as_mut_ptr();
        let source: Vec<u8> = (0..=255).cycle().take(page).collect();
        let mut back = vec![0u8; page + 16];
        // SAFETY: the private sides are vectors of sufficient length; beyond the buffer lies its
        // guard page.
        unsafe {
            assert_eq!(store(base, source.as_ptr(), page), 0);
            assert_eq!(load(back.as_mut_ptr(), base, page + 16), 16);
            assert_eq!(back[..page], source);
            back.fill(0);
            assert_eq!(load_crc(back.as_mut_ptr(), base, page, 0), (0, crc32fast::hash(&source)));
            assert_eq!(back[..page], source);
            assert_eq!(load_crc(back.as_mut_ptr(), base, page + 16, 0).0, 16);
            assert_eq!(store(base.add(page - 10), source.as_ptr(), 20), 10);
            assert_eq!(store_ascending(base.add(page - 13), source.as_ptr(), 20), 7);
            assert_eq!(load(back.as_mut_ptr(), base.add(page - 13), 13), 0);
            assert_eq!(back[..13], source[..13]);
        }
    }

    #[test]
    fn words_work_and_refuse_what_is_not_mapped() {
        let buffer = HostBuffer::guarded(page_size()).unwrap();
        let word = buffer.as_mut_ptr().cast::<u64>();
        let beyond = buffer.as_mut_ptr().wrapping_add(page_size()).cast::<u64>();
        // SAFETY: both are aligned; the first is mapped and the second is a guard page of ours.
        unsafe {
            assert!(store_u64(word, 5));
            assert_eq!(fetch_add(word, 3), Some(5));
            assert_eq!(compare_swap(word, 7, 1), Some(8));
            assert_eq!(compare_swap(word, 8, 1), Some(8));
            assert_eq!(load_u64(word), Some(1));
            assert!(!store_u64(beyond, 1));
            assert_eq!(
                (load_u64(beyond), fetch_add(beyond, 1), compare_swap(beyond, 0, 1)),
                (None, None, None)
            );
        }
    }
}
