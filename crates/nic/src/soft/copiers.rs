//! The copy engines of a device: one pair for each CUDA context whose memory was registered.

use std::cell::Cell;
use std::sync::Arc;

use nobounce_memory::gpu::api::Context;
use nobounce_memory::gpu::copy_engine::CopyEngine;
use nobounce_memory::gpu::{CudaError, Gpu, GpuMemory};

use super::fetcher::Fetcher;
use super::region::RegisterError;

/// Bytes of payload that a chunk takes.
pub(crate) const CHUNK: usize = 512 << 10;
/// Bytes of a chunk to fetch into: room for headers between the smallest packets.
const FETCH_CHUNK: usize = CHUNK + CHUNK / 16;
/// Chunks to fetch into and to place from, for each context. They are apart: a queue pair that cannot send what it fetched
/// must not keep others from receiving.
const FETCH_CHUNKS: usize = 32;
const PLACE_CHUNKS: usize = 16;

/// Names one of the pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopierIndex(usize);

/// A context of a GPU, by numbers that are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContextKey {
    ordinal: i32,
    handle: Context,
    id: u64,
}

impl ContextKey {
    pub(crate) fn of(memory: &GpuMemory) -> Result<Self, CudaError> {
        let (gpu, handle) = (memory.gpu(), memory.range().context_now()?);
        Ok(Self { ordinal: gpu.ordinal(), handle, id: gpu.driver().context_id(handle)? })
    }
}

/// One engine for each direction.
#[derive(Debug)]
pub(crate) struct CopyEngines {
    fetch: Fetcher,
    place: CopyEngine,
    /// A fetch is late: what can be loaded is not fetched before it is over.
    late: Cell<bool>,
}

impl CopyEngines {
    /// Makes them, for memory of this context. Takes milliseconds: not under the engine's lock.
    pub(crate) fn new(gpu: &Arc<Gpu>, context: ContextKey) -> Result<Self, RegisterError> {
        let make = |chunks, len| CopyEngine::in_context(gpu, context.handle, chunks, len);
        let (fetch, place) = (make(FETCH_CHUNKS, FETCH_CHUNK)?, make(PLACE_CHUNKS, CHUNK)?);
        let fetch = Fetcher::new(fetch).map_err(RegisterError::Thread)?;
        Ok(Self { fetch, place, late: Cell::new(false) })
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Copiers(Vec<Copier>);

#[derive(Debug)]
struct Copier {
    gpu: Arc<Gpu>,
    context: ContextKey,
    engines: CopyEngines,
}

impl Copiers {
    /// Those for memory of this context, if they were made already.
    pub(crate) fn find(&self, context: ContextKey) -> Option<CopierIndex> {
        self.0.iter().position(|known| known.context == context).map(CopierIndex)
    }

    /// Takes those that were made, unless somebody else was faster.
    pub(crate) fn adopt(&mut self, gpu: &Arc<Gpu>, context: ContextKey, engines: CopyEngines) -> CopierIndex {
        self.find(context).unwrap_or_else(|| {
            self.0.push(Copier { gpu: gpu.clone(), context, engines });
            CopierIndex(self.0.len() - 1)
        })
    }

    /// The contexts whose memory was registered, in order.
    pub(crate) fn contexts(&self) -> Vec<(Arc<Gpu>, ContextKey)> {
        self.0.iter().map(|known| (known.gpu.clone(), known.context)).collect()
    }

    /// A fetch is late: the GPU does not get to it.
    pub(crate) fn found_late(&self, index: CopierIndex) {
        self.0[index.0].engines.late.set(true);
    }

    /// Whether a fetch that was found late is still not over.
    pub(crate) fn are_late(&self, index: CopierIndex) -> bool {
        let CopyEngines { fetch, late, .. } = &self.0[index.0].engines;
        if late.get() && fetch.is_idle() {
            late.set(false);
        }
        late.get()
    }

    /// Who fetches.
    pub(crate) fn fetcher(&self, index: CopierIndex) -> &Fetcher {
        &self.0[index.0].engines.fetch
    }

    /// The engine that places.
    pub(crate) fn placer(&self, index: CopierIndex) -> &CopyEngine {
        &self.0[index.0].engines.place
    }
}
