//! A range of memory that is not ours alone.

use crate::foreign::{Sink, Source};
use crate::{AccessError, barrier, copy};

/// Bytes at the end of a message that [`Window::store_last`] stores after all others.
const LAST: usize = 64;

/// A range of this process's memory that may be read, written, unmapped or truncated concurrently
/// at any time.
///
/// No reference into it is ever made: every access is a bounds-checked copy or an 8-byte atomic,
/// done by routines that are opaque to the compiler. Unmapped memory returns
/// [`AccessError::Faulted`] (after [`guard::ensure_installed`](crate::guard::ensure_installed);
/// without it such an access kills the process).
///
/// An aligned 8-byte word of the window that lies whole inside a load or store is never torn. The
/// same holds for naturally aligned 1-, 2- and 4-byte units at its ends. (Exception: architectures
/// other than x86_64, see the crate's README.) The bytes of one access move in no guaranteed order,
/// except for [`store_last`](Self::store_last).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    base: *mut u8,
    len: usize,
}

// SAFETY: a window is an address and a length; all accesses use routines that are designed for
// concurrent access, and the promise given to `new` covers all threads.
unsafe impl Send for Window {}
// SAFETY: as above; `&Window` offers nothing that `Window` does not.
unsafe impl Sync for Window {}

impl Window {
    /// A window onto `len` bytes at `base`.
    ///
    /// # Safety
    /// For as long as this window or a copy of it is used, we may read whatever is mapped in the
    /// range and, where stores are made, write it. No Rust reference to it is live meanwhile, and
    /// no code relies on it staying unchanged. The range may be partly or wholly unmapped, now or
    /// later. But once it is, and the address may be reused for something else, the window must not
    /// be used any more.
    #[must_use]
    pub unsafe fn new(base: *mut u8, len: usize) -> Self {
        Self { base, len }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a window of no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of its first byte in this process.
    #[must_use]
    pub fn base_addr(&self) -> u64 {
        self.base.addr() as u64
    }

    /// Its first byte.
    #[must_use]
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Copies `dst.len()` bytes at `offset` out of the window. After a fault, `dst` holds what
    /// could be read before it.
    #[inline]
    pub fn load<'a>(&self, offset: usize, dst: impl Into<Sink<'a>>) -> Result<(), AccessError> {
        let dst = dst.into();
        let from = self.at(offset, dst.len())?;
        // SAFETY: `dst` is ours; the window side is what `new` was promised.
        let rest = unsafe { copy::load(dst.as_mut_ptr(), from, dst.len()) };
        finished(from, dst.len(), rest)
    }

    /// Copies as [`load`](Self::load) does, and returns the CRC-32 (IEEE) of the bytes that `dst`
    /// now holds, continuing from `crc` (0 at the start of a message). The result equals
    /// `crc32fast::Hasher::new_with_initial(crc)` over `dst`, also under concurrent writes to the
    /// window. Costs little more than the load alone.
    #[inline]
    pub fn load_crc<'a>(
        &self,
        offset: usize,
        dst: impl Into<Sink<'a>>,
        crc: u32,
    ) -> Result<u32, AccessError> {
        let dst = dst.into();
        let from = self.at(offset, dst.len())?;
        // SAFETY: `dst` is ours; the window side is what `new` was promised.
        let (rest, crc) = unsafe { copy::load_crc(dst.as_mut_ptr(), from, dst.len(), crc) };
        finished(from, dst.len(), rest).map(|()| crc)
    }

    /// Copies `src` into the window at `offset`. After a fault, all bytes before it have been
    /// stored.
    #[inline]
    pub fn store<'a>(&self, offset: usize, src: impl Into<Source<'a>>) -> Result<(), AccessError> {
        let src = src.into();
        let to = self.at(offset, src.len())?;
        // SAFETY: `src` is ours; the window side is what `new` was promised.
        let rest = unsafe { copy::store(to, src.as_ptr(), src.len()) };
        finished(to, src.len(), rest)
    }

    /// Copies the end of a message into the window: the last (at most 64) bytes go after all
    /// others, in ascending 8-byte words. A reader that sees the last byte therefore sees
    /// everything before it, of this store and of all earlier ones.
    #[inline]
    pub fn store_last<'a>(&self, offset: usize, src: impl Into<Source<'a>>) -> Result<(), AccessError> {
        let src = src.into();
        let to = self.at(offset, src.len())?;
        let first = if src.len() > LAST {
            // The cut lies on a word of the window, else that word would be torn.
            let cut = src.len() - LAST;
            cut + to.wrapping_add(cut).align_offset(8).min(7)
        } else {
            0
        };
        let (body, last) = (src.slice(0..first), src.skip(first));
        // SAFETY: `body` is ours; the window side is what `new` was promised.
        let rest = unsafe { copy::store(to, body.as_ptr(), body.len()) };
        finished(to, body.len(), rest)?;
        barrier::before_last_bytes();
        let to = to.wrapping_add(first);
        // SAFETY: `last` is ours; the window side is what `new` was promised.
        let rest = unsafe { copy::store_ascending(to, last.as_ptr(), last.len()) };
        finished(to, last.len(), rest)
    }

    /// Reads the word at `offset` at once. The address must be a multiple of 8.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64, AccessError> {
        let word = self.word(offset)?;
        // SAFETY: aligned; the rest is what `new` was promised.
        unsafe { copy::load_u64(word) }.ok_or_else(|| faulted(word.cast(), 0))
    }

    /// Writes the word at `offset` at once. The address must be a multiple of 8.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), AccessError> {
        let word = self.word(offset)?;
        // SAFETY: aligned; the rest is what `new` was promised.
        if unsafe { copy::store_u64(word, value) } { Ok(()) } else { Err(faulted(word.cast(), 0)) }
    }

    /// Adds to the word at `offset`, wrapping, and returns the old value: atomic to all processors
    /// of this host. The address must be a multiple of 8.
    #[inline]
    pub fn fetch_add(&self, offset: usize, add: u64) -> Result<u64, AccessError> {
        let word = self.word(offset)?;
        // SAFETY: aligned; the rest is what `new` was promised.
        unsafe { copy::fetch_add(word, add) }.ok_or_else(|| faulted(word.cast(), 0))
    }

    /// Stores `swap` into the word at `offset` if it holds `compare`, and returns the old value:
    /// atomic to all processors of this host. The address must be a multiple of 8. Needs write
    /// permission even where the comparison fails.
    #[inline]
    pub fn compare_swap(&self, offset: usize, compare: u64, swap: u64) -> Result<u64, AccessError> {
        let word = self.word(offset)?;
        // SAFETY: aligned; the rest is what `new` was promised.
        unsafe { copy::compare_swap(word, compare, swap) }.ok_or_else(|| faulted(word.cast(), 0))
    }

    /// Where `len` bytes at `offset` lie.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> Result<*mut u8, AccessError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.base.wrapping_add(offset)),
            _ => Err(AccessError::OutOfBounds { offset, len, window: self.len }),
        }
    }

    /// Where the word at `offset` lies.
    #[inline]
    pub(crate) fn word(&self, offset: usize) -> Result<*mut u64, AccessError> {
        let at = self.at(offset, 8)?;
        if at.addr().is_multiple_of(8) {
            Ok(at.cast())
        } else {
            Err(AccessError::Misaligned { address: at.addr() as u64 })
        }
    }
}

/// Result of a copy of `len` bytes that left `rest` of them.
#[inline]
pub(crate) fn finished(start: *mut u8, len: usize, rest: usize) -> Result<(), AccessError> {
    if rest == 0 { Ok(()) } else { Err(faulted(start, len - rest)) }
}

/// The fault of a copy that had done so many bytes.
#[cold]
fn faulted(start: *mut u8, done: usize) -> AccessError {
    AccessError::Faulted { address: start.wrapping_add(done).addr() as u64 }
}
