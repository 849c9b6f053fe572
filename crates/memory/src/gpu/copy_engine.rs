//! Copies by the GPU's copy engine, between GPU memory and pinned chunks of host memory, without
//! ever blocking.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::{mem, ptr};

use thiserror::Error;

use super::api::{Api, Context, RowCopy, Stream};
use super::{CudaError, Gone, Gpu, GpuMemory};
use crate::AccessError;

mod chunk;
mod gather;
mod pinned;
mod slab;

pub use chunk::PinnedChunk;
pub use gather::GatherPart;
use slab::Slab;

/// Copies by one GPU's copy engine.
///
/// Everything is preallocated: pinned chunks, an event for each, and two non-blocking streams, one
/// per direction. So no call waits for kernels. (CUDA itself blocks all calls while another thread
/// frees memory, copies synchronously or loads a kernel for the first time.) Nothing is freed: when
/// the engine and all its chunks are gone, the next engine of the same shape reuses them.
///
/// Order of use: [`take_chunk`](Self::take_chunk), [`start_read`](Self::start_read) or
/// [`start_write`](Self::start_write), [`poll`](Self::poll) until true,
/// [`PendingCopy::into_chunk`]. Copies of one direction complete in the order they were started.
#[derive(Debug)]
pub struct CopyEngine {
    gpu: Arc<Gpu>,
    slab: Arc<Slab>,
}

/// Why a copy was not started, or did not complete.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The requested range is not inside the registered memory, or longer than the chunk; no copy
    /// was started.
    #[error(
        "a copy of {len} bytes at offset {offset:#x} does not fit: the memory has {memory} bytes, the chunk {chunk}; \
         nothing was started"
    )]
    OutOfBounds {
        /// Requested offset.
        offset: usize,
        /// Requested bytes.
        len: usize,
        /// Length of the registered memory.
        memory: usize,
        /// Length of the chunk.
        chunk: usize,
    },
    /// The chunk is still shared, in flight, or another engine's; nothing was started.
    #[error("cannot copy with this chunk: it {state}; nothing was started")]
    ChunkInUse {
        /// Its state.
        state: &'static str,
    },
    /// The memory was freed, or its address belongs to another allocation by now; no copy was
    /// started.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// Stores made through the window before could not be settled.
    #[error("cannot flush stores through the window before the copy: {0}")]
    Window(#[from] AccessError),
    /// The requested size overflows.
    #[error("the chunks of the copy engine exceed the address space; use fewer or smaller ones")]
    TooLarge,
    /// The driver refused, or the copy failed.
    #[error("cannot use the GPU's copy engine: {error}{}", advice(.error))]
    Cuda {
        /// The driver's error.
        error: CudaError,
    },
}

impl From<CudaError> for CopyError {
    fn from(error: CudaError) -> Self {
        Self::Cuda { error }
    }
}

fn advice(error: &CudaError) -> &'static str {
    if error.context_is_gone() {
        "; its context was destroyed (cudaDeviceReset?): register the memory again"
    } else if error.code == 2 {
        "; no space for pinned memory: use fewer chunks"
    } else {
        ""
    }
}

/// A copy in flight, or complete. Dropping it does not cancel it; its chunk is reused only after
/// completion.
#[derive(Debug)]
#[must_use = "a copy is under way, and its chunk is in it"]
pub struct PendingCopy {
    chunk: PinnedChunk,
    len: usize,
}

impl PendingCopy {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a copy of no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its chunk, once [`CopyEngine::poll`] has returned true; the copy itself before that.
    pub fn into_chunk(self) -> Result<PinnedChunk, Self> {
        let slot = &self.chunk.slab().parts().slots[self.chunk.index()];
        if slot.flying.load(Ordering::Acquire) { Err(self) } else { Ok(self.chunk) }
    }
}

impl CopyEngine {
    /// An engine with `chunks` chunks of `chunk_len` bytes, in the GPU's primary context (which it
    /// creates where there is none).
    pub fn new(gpu: &Arc<Gpu>, chunks: usize, chunk_len: usize) -> Result<Self, CopyError> {
        Self::in_context(gpu, gpu.primary()?, chunks, chunk_len)
    }

    /// An engine in another context of the same GPU, for memory that was allocated there. The
    /// context must be alive now; if it is destroyed later, calls return an error.
    pub fn in_context(
        gpu: &Arc<Gpu>,
        context: Context,
        chunks: usize,
        chunk_len: usize,
    ) -> Result<Self, CopyError> {
        Ok(Self { gpu: gpu.clone(), slab: Slab::take(gpu, context, chunks, chunk_len)? })
    }

    /// The GPU whose engine it is.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Length of each chunk, in bytes.
    #[must_use]
    pub fn chunk_len(&self) -> usize {
        self.slab.parts().chunk_len
    }

    /// Whether its context was destroyed: it is of no use any more.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let parts = self.slab.parts();
        parts.context.is_gone(parts.driver)
    }

    /// Frees the host memory of dropped engines whose context was destroyed. That of live contexts
    /// is kept for the next engine.
    pub fn expire_idle() {
        slab::expire_idle();
    }

    /// A chunk without holders and without a copy in flight, or `None` at the moment.
    #[must_use]
    pub fn take_chunk(&self) -> Option<PinnedChunk> {
        self.slab.parts().claim().map(|index| PinnedChunk::claimed(self.slab.clone(), index))
    }

    /// Starts copying `len` bytes at `offset` of the memory to the start of the chunk.
    ///
    /// Sees earlier stores through the memory's window: unsettled stores cost one load (about 1
    /// us).
    pub fn start_read(
        &self,
        memory: &GpuMemory,
        offset: usize,
        len: usize,
        chunk: PinnedChunk,
    ) -> Result<PendingCopy, CopyError> {
        let address = check(memory, offset, len, &chunk)?;
        if !chunk.is_unique() {
            return Err(CopyError::ChunkInUse { state: "has clones that would see the change" });
        }
        // SAFETY: the memory is alive, the range inside it, and the chunk has no other holder.
        unsafe { self.start(&Direction::Read(address), len, chunk) }
    }

    /// Starts copying `len` bytes at `offset` of the memory into rows of the chunk, with gaps
    /// between them.
    pub fn start_read_rows(
        &self,
        memory: &GpuMemory,
        offset: usize,
        len: usize,
        rows: Rows,
        chunk: PinnedChunk,
    ) -> Result<PendingCopy, CopyError> {
        let address = check(memory, offset, len, &chunk)?;
        if rows.room_for(len).is_none_or(|room| room > chunk.len()) {
            return Err(CopyError::OutOfBounds { offset, len, memory: memory.len(), chunk: chunk.len() });
        }
        if !chunk.is_unique() {
            return Err(CopyError::ChunkInUse { state: "has clones that would see the change" });
        }
        // SAFETY: the memory is alive, the range inside it, all rows inside the chunk, and the
        // chunk has no other holder.
        unsafe { self.start(&Direction::ReadRows(rows, address), len, chunk) }
    }

    /// Starts copying the first `len` bytes of the chunk to `offset` of the memory. Clones of the
    /// chunk may be read meanwhile.
    pub fn start_write(
        &self,
        memory: &GpuMemory,
        offset: usize,
        chunk: PinnedChunk,
        len: usize,
    ) -> Result<PendingCopy, CopyError> {
        self.start_write_from(memory, offset, chunk, 0..len)
    }

    /// Starts copying a range of the chunk to `offset` of the memory.
    pub fn start_write_from(
        &self,
        memory: &GpuMemory,
        offset: usize,
        chunk: PinnedChunk,
        range: Range<usize>,
    ) -> Result<PendingCopy, CopyError> {
        let len = range.end.saturating_sub(range.start);
        let address = check(memory, offset, len, &chunk)?;
        if range.end > chunk.len() {
            return Err(CopyError::OutOfBounds { offset, len, memory: memory.len(), chunk: chunk.len() });
        }
        // SAFETY: the memory is alive, the range inside it, the chunk has the bytes and no writer.
        unsafe { self.start(&Direction::Write(address, range.start), len, chunk) }
    }

    /// Whether no copy is in flight, abandoned ones included. Never waits.
    pub fn is_idle(&self) -> Result<bool, CopyError> {
        let parts = self.slab.parts();
        (0..parts.slots.len()).try_fold(true, |idle, index| Ok(parts.is_over(index)? && idle))
    }

    /// Whether a copy is over. Never waits.
    pub fn poll(&self, copy: &PendingCopy) -> Result<bool, CopyError> {
        Ok(copy.chunk.slab().parts().is_over(copy.chunk.index())?)
    }

    /// # Safety
    /// The direction's addresses are GPU memory of as many bytes as it copies, `len` in all, and
    /// the chunk has room for them; a read requires the chunk's only holder.
    unsafe fn start(
        &self,
        direction: &Direction,
        len: usize,
        chunk: PinnedChunk,
    ) -> Result<PendingCopy, CopyError> {
        if !Arc::ptr_eq(chunk.slab(), &self.slab) {
            return Err(CopyError::ChunkInUse { state: "belongs to another engine" });
        }
        if len == 0 {
            return Ok(PendingCopy { chunk, len });
        }
        let parts = self.slab.parts();
        let slot = &parts.slots[chunk.index()];
        let host = parts.chunk(chunk.index());
        // Clones of a chunk may each start a copy; its one event serves one at a time.
        if slot.flying.swap(true, Ordering::AcqRel) {
            return Err(CopyError::ChunkInUse { state: "is in use by another copy" });
        }
        let mut started = false;
        // The copied memory was found alive, but its context need not be ours: check ours here.
        let outcome = parts.context.run(parts.driver, |api| {
            // SAFETY: the caller's promise about both sides; streams and events live as long as the
            // context.
            unsafe {
                let stream = match *direction {
                    Direction::Read(address) => {
                        api.copy_from_device_async(host.cast(), address, len, parts.reads)?;
                        parts.reads
                    }
                    Direction::ReadRows(rows, address) => {
                        read_rows(api, host, address, len, rows, parts.reads, &mut started)?;
                        parts.reads
                    }
                    Direction::Gather(ref pieces) => {
                        gather::run(api, host, pieces, parts.reads, &mut started)?;
                        parts.reads
                    }
                    Direction::Write(address, from) => {
                        api.copy_to_device_async(address, host.add(from).cast(), len, parts.writes)?;
                        parts.writes
                    }
                };
                started = true;
                api.event_record(slot.event, stream)
            }
        });
        match outcome {
            Ok(()) => Ok(PendingCopy { chunk, len }),
            Err(error) => {
                if started {
                    // The copy may be in flight, without an event for its completion: leak the
                    // chunk.
                    mem::forget(chunk);
                } else {
                    slot.flying.store(false, Ordering::Release);
                }
                Err(error.into())
            }
        }
    }
}

/// A copy's direction, and the addresses in the GPU's memory.
#[derive(Debug)]
enum Direction {
    Read(u64),
    ReadRows(Rows, u64),
    Gather(gather::Pieces),
    /// Also where its bytes begin in the chunk.
    Write(u64, usize),
}

/// Layout of a chunk with gaps before and after each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of a row.
    pub width: usize,
    /// Between the starts of two rows.
    pub pitch: usize,
    /// Bytes before the first of a row.
    pub lead: usize,
}

impl Rows {
    /// Where the byte with this number lies.
    #[must_use]
    pub const fn place_of(&self, byte: usize) -> usize {
        byte / self.width * self.pitch + self.lead + byte % self.width
    }

    /// Bytes of a chunk that so many take; `None` where rows overlap.
    #[must_use]
    pub fn room_for(&self, len: usize) -> Option<usize> {
        let fits = self.width > 0 && self.lead.checked_add(self.width)? <= self.pitch;
        if fits { len.div_ceil(self.width).checked_mul(self.pitch) } else { None }
    }
}

/// # Safety
/// `address` is GPU memory of at least `len` bytes, and the rows lie inside pinned memory at
/// `host`.
unsafe fn read_rows(
    api: &Api,
    host: *mut u8,
    address: u64,
    len: usize,
    rows: Rows,
    stream: Stream,
    started: &mut bool,
) -> Result<(), CudaError> {
    let (height, rest) = (len / rows.width, len % rows.width);
    let copy = RowCopy {
        src_x: 0,
        src_y: 0,
        src_kind: RowCopy::DEVICE,
        src_host: ptr::null(),
        src_device: address,
        src_array: ptr::null(),
        src_pitch: rows.width,
        dst_x: 0,
        dst_y: 0,
        dst_kind: RowCopy::HOST,
        dst_host: host.wrapping_add(rows.lead).cast(),
        dst_device: 0,
        dst_array: ptr::null(),
        dst_pitch: rows.pitch,
        width: rows.width,
        height,
    };
    // SAFETY: the caller's promise about both sides; the driver reads the description during the
    // call.
    unsafe {
        if height > 0 {
            api.copy_rows_async(&raw const copy, stream)?;
            *started = true;
        }
        if rest > 0 {
            let done = height * rows.width;
            let to = host.wrapping_add(rows.place_of(done));
            api.copy_from_device_async(to.cast(), address + done as u64, rest, stream)?;
        }
    }
    Ok(())
}

/// The address of a range that may be copied now: within bounds, settled, and still the registered
/// allocation.
fn check(memory: &GpuMemory, offset: usize, len: usize, chunk: &PinnedChunk) -> Result<u64, CopyError> {
    let address = check_bounds(memory, offset, len, chunk)?;
    check_memory(memory, [(offset, len)])?;
    Ok(address)
}

fn check_bounds(
    memory: &GpuMemory,
    offset: usize,
    len: usize,
    chunk: &PinnedChunk,
) -> Result<u64, CopyError> {
    let fits = offset.checked_add(len).is_some_and(|end| end <= memory.len()) && len <= chunk.len();
    if !fits {
        return Err(CopyError::OutOfBounds { offset, len, memory: memory.len(), chunk: chunk.len() });
    }
    Ok(memory.addr() + offset as u64)
}

/// Settles stores, and checks that the parts are still the registered allocation.
fn check_memory(
    memory: &GpuMemory,
    parts: impl IntoIterator<Item = (usize, usize)>,
) -> Result<(), CopyError> {
    if let Some(window) = memory.window() {
        window.settle()?;
    }
    // Last, as close to the copy as possible: a freed address may be reallocated by now.
    Ok(memory.check_alive_in(parts)?)
}
