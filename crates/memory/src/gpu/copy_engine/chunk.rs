//! A piece of pinned memory, held by one or several.

use std::fmt;
use std::ops::Deref;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::slab::Slab;
use crate::SharedChunk;

/// A chunk of pinned host memory: its bytes, shared among its clones. The engine reuses the memory
/// once all of them are gone and its copy is complete.
pub struct PinnedChunk {
    slab: Arc<Slab>,
    index: usize,
}

impl PinnedChunk {
    /// Takes over the one claim that `Parts::claim` made.
    pub(super) fn claimed(slab: Arc<Slab>, index: usize) -> Self {
        Self { slab, index }
    }

    /// Its bytes, to be filled: `None` while there are clones.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        let parts = self.slab.parts();
        if !self.is_unique() || parts.slots[self.index].flying.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: memory of the slab, which we keep alive; we are the only holder of the chunk, and
        // no copy touches it.
        Some(unsafe { slice::from_raw_parts_mut(parts.chunk(self.index), parts.chunk_len) })
    }

    /// A reference to the same chunk for readers that know nothing of GPUs.
    #[must_use]
    pub fn share(&self) -> SharedChunk {
        let parts = self.slab.parts();
        let (start, len) = (parts.chunk(self.index), parts.chunk_len);
        // SAFETY: we hold the chunk, and these are its bytes.
        unsafe { SharedChunk::new(self.slab.clone(), self.index, start, len) }
    }

    /// Whether there are no clones of it.
    pub(super) fn is_unique(&self) -> bool {
        self.slab.parts().slots[self.index].holders.load(Ordering::Acquire) == 1
    }

    pub(super) fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }
}

impl Deref for PinnedChunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let parts = self.slab.parts();
        // SAFETY: memory of the slab, which we keep alive. Writes need exclusive access: `get_mut`,
        // and copies that have taken the only holder of the chunk.
        unsafe { slice::from_raw_parts(parts.chunk(self.index), parts.chunk_len) }
    }
}

impl Clone for PinnedChunk {
    fn clone(&self) -> Self {
        self.slab.parts().slots[self.index].holders.fetch_add(1, Ordering::Relaxed);
        Self { slab: self.slab.clone(), index: self.index }
    }
}

impl Drop for PinnedChunk {
    fn drop(&mut self) {
        self.slab.parts().slots[self.index].holders.fetch_sub(1, Ordering::Release);
    }
}

impl fmt::Debug for PinnedChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedChunk({} of {} bytes)", self.index, self.slab.parts().chunk_len)
    }
}
