//! Memory regions as objects.

use std::sync::Arc;

use nobounce_memory::gpu;
use nobounce_memory::path::Paths;
use nobounce_memory::unmap_watch::WatchedRange;

use crate::soft::objects::device::{Pd, PdUse, Shared};

/// A registered memory region. Dropping it deregisters: from then on no packet accesses the memory.
#[derive(Debug)]
pub struct Mr {
    pub(crate) shared: Arc<Shared>,
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) paths: Paths,
    pub(crate) gpu: Option<Arc<gpu::GpuMemory>>,
    pub(crate) watch: Option<Arc<WatchedRange>>,
    /// Keeps its domain in use.
    pub(crate) pd: Arc<PdUse>,
}

impl Mr {
    /// The path of its bytes, per direction.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Whether it is a region of this domain.
    pub fn is_of(&self, pd: &Pd) -> bool {
        Arc::ptr_eq(&self.pd, &pd.in_use())
    }

    /// The CUDA memory behind a region, as the device accesses it.
    pub fn gpu_memory(&self) -> Option<&Arc<gpu::GpuMemory>> {
        self.gpu.as_ref()
    }

    /// Whether any of `len` bytes at `offset` is known to have been freed or unmapped since it was
    /// registered. What is at its address now is not what was registered.
    pub fn is_gone_at(&self, offset: usize, len: usize) -> bool {
        let start = self.addr.saturating_add(offset as u64);
        let is_unmapped =
            |watch: &Arc<WatchedRange>| watch.is_gone() && watch.first_gone(start, len).is_some();
        self.watch.as_ref().is_some_and(is_unmapped)
            || self.gpu.as_ref().is_some_and(|memory| memory.check_alive_at(offset, len).is_err())
    }

    /// The key for local scatter/gather lists.
    pub fn lkey(&self) -> u32 {
        self.key
    }

    /// The key for the peer.
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// The address of its first byte in requests.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
