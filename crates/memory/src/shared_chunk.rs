//! A chunk of host memory whose bytes stay in place while it is referenced, for readers that need
//! not know what filled it.

use std::fmt;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::slice;
use std::sync::Arc;

/// Where a chunk lies in the file that another process can map.
#[derive(Clone, Copy, Debug)]
pub struct SharedPlace<'a> {
    /// The file. One is used for many chunks.
    pub file: BorrowedFd<'a>,
    /// Distinguishes it from all other files of this process, also later ones.
    pub name: u64,
    /// Its length in bytes.
    pub file_len: usize,
    /// Where the chunk begins.
    pub offset: usize,
}

/// The owner of chunks, which counts the references to each.
///
/// # Safety
/// While a reference to a chunk is held, its bytes stay mapped and nothing writes them but
/// [`SharedChunk::write_between`].
pub unsafe trait ChunkPool: fmt::Debug + Send + Sync {
    /// Adds a reference to that chunk.
    fn hold(&self, index: usize);

    /// Drops one.
    fn release(&self, index: usize);

    /// Location of that chunk, for a process that is to read it.
    fn place(&self, index: usize) -> Option<SharedPlace<'_>>;
}

/// A reference to one chunk of a pool. Its memory is reused once all references are gone.
pub struct SharedChunk {
    pool: Arc<dyn ChunkPool>,
    index: usize,
    start: *mut u8,
    len: usize,
}

// SAFETY: the bytes are only read but for `write_between`, whose caller excludes readers; the pool
// is `Send` and `Sync`.
unsafe impl Send for SharedChunk {}
// SAFETY: as above.
unsafe impl Sync for SharedChunk {}

impl SharedChunk {
    /// A new reference to that chunk, whose `len` bytes begin at `start`.
    ///
    /// # Safety
    /// The chunk is held now, and these are its bytes.
    pub unsafe fn new(pool: Arc<dyn ChunkPool>, index: usize, start: *mut u8, len: usize) -> Self {
        pool.hold(index);
        Self { pool, index, start, len }
    }

    /// Writes bytes that no other reference reads, such as the gaps between rows of payload.
    ///
    /// # Safety
    /// No reference to these bytes exists.
    ///
    /// # Panics
    /// They are not all inside the chunk.
    pub unsafe fn write_between(&self, at: usize, bytes: &[u8]) {
        assert!(at.checked_add(bytes.len()).is_some_and(|end| end <= self.len), "outside the chunk");
        // SAFETY: inside the chunk, which this reference keeps alive; the caller promises that no
        // reference to the bytes exists.
        unsafe { self.start.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Location of the chunk, for a process that is to read it. The caller keeps a clone until that
    /// process has read.
    #[must_use]
    pub fn place(&self) -> Option<SharedPlace<'_>> {
        self.pool.place(self.index)
    }
}

impl Deref for SharedChunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pool keeps the bytes mapped and unchanged while this reference is held.
        unsafe { slice::from_raw_parts(self.start, self.len) }
    }
}

impl Clone for SharedChunk {
    fn clone(&self) -> Self {
        self.pool.hold(self.index);
        Self { pool: Arc::clone(&self.pool), index: self.index, start: self.start, len: self.len }
    }
}

impl Drop for SharedChunk {
    fn drop(&mut self) {
        self.pool.release(self.index);
    }
}

impl fmt::Debug for SharedChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedChunk({} of {} bytes)", self.index, self.len)
    }
}
