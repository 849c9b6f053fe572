//! Placement by the copy engine, for GPU memory that has no window (or where staging was asked for): payload is collected in
//! a pinned chunk, copied by the GPU while more arrives, and announced to nobody before the copy is over.
//!
//! Every copy has a *ticket*; copies are over in the order of their tickets. A queue pair remembers the ticket that its
//! last placed byte depends on, and holds back acknowledgements and completions until that one is over.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::api::Context;
use nobounce_memory::gpu::copy_engine::{Copy, CopyEngine, CopyError, PinnedChunk};
use nobounce_memory::gpu::{CudaError, GpuMemory};

use super::target::Change;

/// Bytes of a chunk.
pub(crate) const CHUNK: usize = 256 << 10;
/// Chunks to fetch into and to place from, for each GPU. They are apart: a queue pair that cannot send what it fetched must
/// not keep others from receiving.
const FETCH_CHUNKS: usize = 24;
const PLACE_CHUNKS: usize = 16;
/// How long a packet that must come after a copy is held up by it. Microseconds are usual; a GPU that takes longer than
/// this is stuck, and the queue pair fails.
const PATIENCE: Duration = Duration::from_millis(100);

/// Names one of the copy engines of a device.
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

#[derive(Debug)]
struct Copier {
    context: ContextKey,
    engines: CopyEngines,
}

/// One engine for each direction.
#[derive(Debug)]
pub(crate) struct CopyEngines {
    fetch: CopyEngine,
    place: CopyEngine,
}

impl CopyEngines {
    /// Makes them, for memory like this one. Takes milliseconds: not under the engine's lock.
    pub(crate) fn new(memory: &GpuMemory, context: ContextKey) -> Result<Self, CopyError> {
        let make = |chunks| CopyEngine::in_context(memory.gpu(), context.handle, chunks, CHUNK);
        Ok(Self { fetch: make(FETCH_CHUNKS)?, place: make(PLACE_CHUNKS)? })
    }
}

/// Bytes collected for one copy.
#[derive(Debug)]
struct Run {
    memory: Arc<GpuMemory>,
    copier: CopierIndex,
    offset: usize,
    chunk: PinnedChunk,
    filled: usize,
    ticket: u64,
}

#[derive(Debug)]
struct UnderWay {
    ticket: u64,
    copier: CopierIndex,
    copy: Copy,
}

/// Why bytes could not be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StageError {
    /// The memory is gone, or the copy engine failed.
    Failed,
    /// No chunk is free.
    Full,
}

/// The copy engines of a device, and what they are placing.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    copiers: Vec<Copier>,
    run: Option<Run>,
    under_way: VecDeque<UnderWay>,
    /// The ticket given out last.
    last: u64,
    /// All tickets up to this one are over.
    done: u64,
    /// The first ticket whose copy failed, until it is asked for.
    failed: Option<(u64, CopyError)>,
}

impl Stage {
    /// The copy engines for memory of this context, if it was made already.
    pub(crate) fn find(&self, context: ContextKey) -> Option<CopierIndex> {
        self.copiers.iter().position(|copier| copier.context == context).map(CopierIndex)
    }

    /// Takes copy engines that were made, unless somebody else was faster.
    pub(crate) fn adopt(&mut self, context: ContextKey, engines: CopyEngines) -> CopierIndex {
        self.find(context).unwrap_or_else(|| {
            self.copiers.push(Copier { context, engines });
            CopierIndex(self.copiers.len() - 1)
        })
    }

    /// The engine that fetches.
    pub(crate) fn fetcher(&self, index: CopierIndex) -> &CopyEngine {
        &self.copiers[index.0].engines.fetch
    }

    fn placer(&self, index: CopierIndex) -> &CopyEngine {
        &self.copiers[index.0].engines.place
    }

    /// Whether copies are to be started or waited for.
    pub(crate) fn is_busy(&self) -> bool {
        self.run.is_some() || !self.under_way.is_empty()
    }

    /// Whether all copies up to this ticket are over.
    pub(crate) fn is_over(&self, ticket: u64) -> bool {
        ticket <= self.done
    }

    /// Collects bytes for `offset` of the memory; returns the ticket of the copy that will place them.
    pub(crate) fn put(
        &mut self,
        memory: &Arc<GpuMemory>,
        copier: CopierIndex,
        mut offset: usize,
        mut bytes: &[u8],
    ) -> Result<u64, StageError> {
        while !bytes.is_empty() {
            let joins = self.run.as_ref().is_some_and(|run| {
                Arc::ptr_eq(&run.memory, memory) && run.offset + run.filled == offset && run.filled < CHUNK
            });
            if !joins {
                self.flush()?;
                let chunk = self.free_chunk(copier)?;
                self.last += 1;
                let (memory, ticket) = (memory.clone(), self.last);
                self.run = Some(Run { memory, copier, offset, chunk, filled: 0, ticket });
            }
            let Some(run) = &mut self.run else { return Err(StageError::Failed) };
            let Some(room) = run.chunk.get_mut() else { return Err(StageError::Failed) };
            let len = bytes.len().min(CHUNK - run.filled);
            room[run.filled..run.filled + len].copy_from_slice(&bytes[..len]);
            run.filled += len;
            offset += len;
            bytes = &bytes[len..];
        }
        Ok(self.last)
    }

    /// A chunk to place from; waits for a copy to be over where all are under way.
    fn free_chunk(&mut self, copier: CopierIndex) -> Result<PinnedChunk, StageError> {
        let begin = Instant::now();
        loop {
            if let Some(chunk) = self.placer(copier).take_chunk() {
                return Ok(chunk);
            }
            self.poll();
            if begin.elapsed() > PATIENCE {
                return Err(StageError::Full);
            }
        }
    }

    /// Starts the copy of what was collected.
    pub(crate) fn flush(&mut self) -> Result<(), StageError> {
        let Some(Run { memory, copier, offset, chunk, filled, ticket }) = self.run.take() else {
            return Ok(());
        };
        match self.placer(copier).start_write(&memory, offset, chunk, filled) {
            Ok(copy) => {
                self.under_way.push_back(UnderWay { ticket, copier, copy });
                Ok(())
            }
            Err(error) => {
                self.fail(ticket, error);
                Err(StageError::Failed)
            }
        }
    }

    /// Looks which copies are over.
    pub(crate) fn poll(&mut self) {
        while let Some(first) = self.under_way.front() {
            match self.placer(first.copier).poll(&first.copy) {
                Ok(false) => return,
                Ok(true) => {
                    self.done = self.done.max(first.ticket);
                    self.under_way.pop_front();
                }
                Err(error) => {
                    let ticket = first.ticket;
                    self.under_way.pop_front();
                    self.fail(ticket, error);
                }
            }
        }
        // Tickets whose copies could not even be started are over too, once all before them are.
        if self.run.is_none() && self.failed.is_none() {
            self.done = self.last;
        }
    }

    /// The first copy that failed since the last call: whoever depends on its ticket has lost bytes.
    pub(crate) fn take_failure(&mut self) -> Option<(u64, CopyError)> {
        self.failed.take()
    }

    /// Waits until the copy of this ticket is over, but not for long: for a packet that must not be placed before it.
    pub(crate) fn wait(&mut self, ticket: u64) -> Result<(), StageError> {
        if self.is_over(ticket) {
            return Ok(());
        }
        self.flush()?;
        let begin = Instant::now();
        loop {
            self.poll();
            if self.is_over(ticket) {
                return Ok(());
            }
            if self.failed.is_some() || begin.elapsed() > PATIENCE {
                return Err(StageError::Failed);
            }
            std::hint::spin_loop();
        }
    }

    /// Changes a word by two copies, one after the other, waiting for both: for atomics on memory without a window.
    pub(crate) fn change(
        &mut self,
        memory: &Arc<GpuMemory>,
        copier: CopierIndex,
        offset: usize,
        change: Change,
    ) -> Result<u64, StageError> {
        self.flush()?;
        self.wait(self.last)?;
        let begin = Instant::now();
        let fetcher = self.fetcher(copier);
        let chunk = fetcher.take_chunk().ok_or(StageError::Full)?;
        let copy = fetcher.start_read(memory, offset, 8, chunk).map_err(|_| StageError::Failed)?;
        while !fetcher.poll(&copy).map_err(|_| StageError::Failed)? {
            if begin.elapsed() > PATIENCE {
                return Err(StageError::Failed);
            }
        }
        let chunk = copy.into_chunk().map_err(|_| StageError::Failed)?;
        let old = chunk.first_chunk().map(|word| u64::from_ne_bytes(*word)).ok_or(StageError::Failed)?;
        if let Some(new) = change.of(old) {
            let ticket = self.put(memory, copier, offset, &new.to_ne_bytes())?;
            self.wait(ticket)?;
        }
        Ok(old)
    }

    fn fail(&mut self, ticket: u64, error: CopyError) {
        tracing::warn!(%error, "GPU memory could not be written by the copy engine");
        self.failed.get_or_insert((ticket, error));
    }
}
