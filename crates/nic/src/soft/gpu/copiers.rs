//! The copiers of an engine: one for each CUDA context with registered memory.

use std::sync::Arc;

use nobounce_memory::gpu::api::Context;
use nobounce_memory::gpu::{CudaError, Gpu, GpuMemory};

use crate::soft::gpu::copier::Copier;

/// Identifies a copier, in every engine of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopierIndex(usize);

/// A CUDA context, by numbers that are not reused.
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

    /// Its handle, which was valid when the key was made.
    pub(crate) fn handle(&self) -> Context {
        self.handle
    }
}

/// A copier and its context.
#[derive(Clone, Debug)]
pub(crate) struct ContextCopier {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) context: ContextKey,
    pub(crate) copier: Arc<Copier>,
}

/// All copiers, by index; `None` if the context was destroyed. (A region of it may still be
/// registered, and hold the index.)
#[derive(Debug, Default)]
pub(crate) struct Copiers(Vec<Option<ContextCopier>>);

impl Copiers {
    /// The copier for this context, if it exists.
    pub(crate) fn find(&self, context: ContextKey) -> Option<CopierIndex> {
        self.0
            .iter()
            .position(|known| known.as_ref().is_some_and(|one| one.context == context))
            .map(CopierIndex)
    }

    /// Adds a copier, or the empty place of an expired one: each engine of a device in the same
    /// order.
    pub(crate) fn adopt(&mut self, known: Option<ContextCopier>) -> CopierIndex {
        self.0.push(known);
        CopierIndex(self.0.len() - 1)
    }

    /// The copier with that index, unless its context was destroyed.
    pub(crate) fn get(&self, index: CopierIndex) -> Option<&Arc<Copier>> {
        self.0.get(index.0)?.as_ref().map(|known| &known.copier)
    }

    /// All copiers, and the places of expired ones.
    pub(crate) fn all(&self) -> Vec<(CopierIndex, Option<ContextCopier>)> {
        self.0.iter().cloned().enumerate().map(|(at, known)| (CopierIndex(at), known)).collect()
    }

    /// Drops a copier whose context was destroyed.
    pub(crate) fn forget(&mut self, index: CopierIndex) {
        if let Some(known) = self.0.get_mut(index.0) {
            *known = None;
        }
    }
}
