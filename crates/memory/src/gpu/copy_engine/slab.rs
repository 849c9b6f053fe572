//! Preallocated resources of a copy engine: streams, pinned memory cut into chunks, and an event
//! for each.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::CopyError;
use super::pinned::PinnedMemory;
use crate::gpu::api::{Api, Context, Event, Stream, consts};
use crate::gpu::context::KeptContext;
use crate::gpu::own_stream::own_stream;
use crate::gpu::{CudaError, Driver, Gpu};
use crate::{ChunkPool, SharedPlace};

/// Chunks start at multiples of this, so that vectors on our side are aligned.
const CHUNK_ALIGN: usize = 4096;

/// Slabs without an engine, kept for the next one: freeing pinned memory or streams may wait for
/// the program's kernels. Bounded by the largest number of engines that were alive at one time.
static IDLE: Mutex<Vec<Parts>> = Mutex::new(Vec::new());

/// The slab of one engine. Lives as long as the engine or one of its chunks; then another engine
/// may reuse its parts.
#[derive(Debug)]
pub(super) struct Slab {
    /// There until the drop.
    parts: Option<Parts>,
}

#[derive(Debug)]
pub(super) struct Parts {
    pub(super) driver: &'static Driver,
    /// With the pinned memory as its witness: streams and events are used only after a check of it.
    pub(super) context: KeptContext,
    /// From the GPU to us.
    pub(super) reads: Stream,
    /// From us to the GPU.
    pub(super) writes: Stream,
    pub(super) slots: Vec<ChunkState>,
    memory: PinnedMemory,
    /// Between the starts of two chunks.
    stride: usize,
    pub(super) chunk_len: usize,
    /// Where the search for a free chunk begins.
    next: AtomicUsize,
}

/// The state of one chunk.
#[derive(Debug)]
pub(super) struct ChunkState {
    pub(super) event: Event,
    /// Number of holders; 0: free.
    pub(super) holders: AtomicUsize,
    /// A copy to or from it was started and not yet seen to be over.
    pub(super) flying: AtomicBool,
}

impl Slab {
    /// Takes an idle slab of this shape, or makes one.
    pub(super) fn take(
        gpu: &Gpu,
        context: Context,
        chunks: usize,
        chunk_len: usize,
    ) -> Result<Arc<Self>, CopyError> {
        let driver = gpu.driver();
        // Also refuses a child of the process that has CUDA.
        driver.context_id(context)?;
        let parts = match take_idle(driver, context, chunks, chunk_len) {
            Some(parts) => parts,
            None => {
                expire_idle();
                driver.in_context(context, |api| Parts::make(driver, api, context, chunks, chunk_len))?
            }
        };
        Ok(Arc::new(Self { parts: Some(parts) }))
    }

    /// Its parts.
    pub(super) fn parts(&self) -> &Parts {
        match &self.parts {
            Some(parts) => parts,
            // Only `drop` takes them.
            None => unreachable!("a slab that is used after its end"),
        }
    }
}

// SAFETY: the memory is unmapped only after the slab is dropped; while a chunk has holders, no copy
// to it starts and `claim` does not hand it out.
unsafe impl ChunkPool for Slab {
    fn hold(&self, index: usize) {
        self.parts().slots[index].holders.fetch_add(1, Ordering::Relaxed);
    }

    fn release(&self, index: usize) {
        self.parts().slots[index].holders.fetch_sub(1, Ordering::Release);
    }

    fn place(&self, index: usize) -> Option<SharedPlace<'_>> {
        self.parts().place_of(index)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // Copies may still be in flight: the next user of the slab checks the events before it
        // reuses a chunk.
        idle().extend(self.parts.take());
    }
}

/// Drops unused slabs whose context is gone: their streams and events went with it, and its handle
/// may be reused by now.
pub(super) fn expire_idle() {
    // They stay in the list meanwhile, for other threads.
    let mut contexts: Vec<_> = idle().iter().map(|parts| (parts.driver, parts.context)).collect();
    contexts.retain(|(driver, context)| context.is_gone(driver));
    if contexts.is_empty() {
        return;
    }
    let is_gone = |parts: &mut Parts| contexts.iter().any(|(_, context)| *context == parts.context);
    let gone: Vec<_> = idle().extract_if(.., is_gone).collect();
    for parts in gone {
        parts.memory.unmap();
    }
}

/// The unused slabs. CUDA is queried without this lock, which dropping a slab takes. The driver may
/// block a call until kernels end, and those kernels may wait for the thread that drops the slab.
fn idle() -> MutexGuard<'static, Vec<Parts>> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes an unused slab of this shape. The others stay in the list: threads that take slabs at the
/// same time each find one.
fn take_idle(driver: &Driver, context: Context, chunks: usize, chunk_len: usize) -> Option<Parts> {
    let shape = (context, chunks, chunk_len);
    let mut unknown = Vec::new();
    let found = loop {
        let mut idle = idle();
        let place = idle.iter().position(|parts| parts.shape() == shape);
        let Some(parts) = place.map(|index| idle.swap_remove(index)) else { break None };
        drop(idle);
        if parts.context.is_alive(driver) {
            break Some(parts);
        } else if parts.context.is_gone(driver) {
            parts.memory.unmap();
        } else {
            // The driver could not answer.
            unknown.push(parts);
        }
    };
    idle().append(&mut unknown);
    found
}

impl Parts {
    fn make(
        driver: &'static Driver,
        api: &Api,
        context: Context,
        chunks: usize,
        chunk_len: usize,
    ) -> Result<Self, CopyError> {
        let stride = chunk_len.max(1).checked_next_multiple_of(CHUNK_ALIGN).ok_or(CopyError::TooLarge)?;
        let len = stride.checked_mul(chunks).ok_or(CopyError::TooLarge)?;
        // If one of these fails, the earlier ones are left to the context: destroying them could
        // block.
        let (reads, writes) = (own_stream(api)?, own_stream(api)?);
        let slots = (0..chunks).map(|_| ChunkState::new(api)).collect::<Result<_, _>>()?;
        let memory = PinnedMemory::new(api, len)?;
        let context = KeptContext::new(driver, context, Some(memory.at(0).expose_provenance() as u64))?;
        let next = AtomicUsize::new(0);
        Ok(Self { driver, context, reads, writes, slots, memory, stride, chunk_len, next })
    }

    /// What another engine asks for.
    fn shape(&self) -> (Context, usize, usize) {
        (self.context.handle(), self.slots.len(), self.chunk_len)
    }

    /// Claims a chunk without holders and without a copy in flight.
    pub(super) fn claim(&self) -> Option<usize> {
        let count = self.slots.len();
        let first = self.next.load(Ordering::Relaxed);
        let index = (0..count).map(|step| (first + step) % count).find(|&index| self.claim_slot(index))?;
        self.next.store((index + 1) % count, Ordering::Relaxed);
        Some(index)
    }

    fn claim_slot(&self, index: usize) -> bool {
        let slot = &self.slots[index];
        if slot.holders.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // A copy was abandoned before it was over: the GPU owns the memory until then.
        let free = !slot.flying.load(Ordering::Acquire) || self.is_over(index).unwrap_or(false);
        if !free {
            slot.holders.store(0, Ordering::Release);
        }
        free
    }

    /// Whether the copy of this chunk is complete. Does not wait.
    pub(super) fn is_over(&self, index: usize) -> Result<bool, CudaError> {
        let slot = &self.slots[index];
        if !slot.flying.load(Ordering::Acquire) {
            return Ok(true);
        }
        // SAFETY: the event lives as long as the context, which is checked first.
        match self.context.run(self.driver, |api| unsafe { api.event_query(slot.event) }) {
            Ok(()) => {
                slot.flying.store(false, Ordering::Release);
                Ok(true)
            }
            Err(error) if error.code == CudaError::NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Where a chunk lies, for another process.
    pub(super) fn place_of(&self, index: usize) -> Option<SharedPlace<'_>> {
        self.memory.place_of(index * self.stride)
    }

    /// The first byte of a chunk.
    pub(super) fn chunk(&self, index: usize) -> *mut u8 {
        self.memory.at(index * self.stride)
    }
}

impl ChunkState {
    fn new(api: &Api) -> Result<Self, CudaError> {
        let mut event = Event::NULL;
        // SAFETY: the call writes one handle.
        unsafe { api.event_create(&raw mut event, consts::EVENT_DISABLE_TIMING) }?;
        Ok(Self { event, holders: AtomicUsize::new(0), flying: AtomicBool::new(false) })
    }
}
