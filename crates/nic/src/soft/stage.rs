//! Placement by the copy engine, for GPU memory that has no window (or where staging was asked for): payload is collected in
//! a pinned chunk, copied by the GPU while more arrives, and announced to nobody before the copy is over.
//!
//! Every copy has a *ticket* and belongs to one queue pair; copies are over in the order of their tickets. A queue pair
//! remembers the ticket that its last placed byte depends on, and holds back acknowledgements and completions until that
//! one is over. If a copy fails, so does its queue pair, and no other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{Copy, CopyError, PinnedChunk};

use super::copiers::{CHUNK, CopierIndex, Copiers};
use super::target::Change;

/// How long a packet that must come after a copy, or finds no chunk, is held up by it. Microseconds are usual; a GPU that takes longer
/// than this is stuck, and the queue pair fails. Long enough for large copies of others before ours, and for a busy machine; shorter
/// than the patience of our peers, who hear nothing meanwhile (8 times 268 ms).
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a copy is waited for without a thought for other threads.
const SPIN: Duration = Duration::from_micros(50);
/// How long deregistration waits for copies into the memory: it must not be written afterwards.
const DEREGISTER_PATIENCE: Duration = Duration::from_secs(2);
/// A copy that takes longer than this has failed.
const STUCK: Duration = Duration::from_secs(10);

/// On whose behalf bytes are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The index of the queue pair.
    pub(crate) qp: u32,
    /// The copy that its bytes before wait for.
    pub(crate) after: u64,
}

/// Bytes collected for one copy.
#[derive(Debug)]
struct Run {
    qp: u32,
    memory: Arc<GpuMemory>,
    copier: CopierIndex,
    offset: usize,
    chunk: PinnedChunk,
    filled: usize,
    ticket: u64,
}

#[derive(Debug)]
struct UnderWay {
    qp: u32,
    ticket: u64,
    memory: Arc<GpuMemory>,
    copier: CopierIndex,
    /// None where it could not even be started.
    copy: Option<Copy>,
    since: Instant,
}

/// Why bytes could not be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StageError {
    /// The memory is gone, or the copy engine failed.
    Failed,
    /// No chunk is free, and none becomes so.
    Full,
}

/// The copy engines of a device, and what they are placing.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    pub(crate) copiers: Copiers,
    run: Option<Run>,
    under_way: VecDeque<UnderWay>,
    /// The ticket given out last.
    last: u64,
    /// All tickets up to this one are over.
    done: u64,
    /// Queue pairs with a copy that failed, until they have heard.
    failed: Vec<u32>,
}

impl Stage {
    /// Whether copies are to be started or waited for.
    pub(crate) fn is_busy(&self) -> bool {
        self.run.is_some() || !self.under_way.is_empty() || !self.failed.is_empty()
    }

    /// Whether all bytes that the queue pair placed up to this ticket are where they belong.
    #[inline]
    pub(crate) fn is_settled(&self, owner: Owner) -> bool {
        owner.after <= self.done && (self.failed.is_empty() || !self.failed.contains(&owner.qp))
    }

    /// Collects bytes for `offset` of the memory; returns the ticket of the copy that will place them. `last` ends a message.
    pub(crate) fn put(
        &mut self,
        owner: Owner,
        (memory, copier): (&Arc<GpuMemory>, CopierIndex),
        mut offset: usize,
        mut bytes: &[u8],
        last: bool,
    ) -> Result<u64, StageError> {
        // Copies of one engine are over in the order in which they were started; those of two are not.
        if self.copier_of(owner.after).is_some_and(|other| other != copier) {
            self.wait(owner)?;
        }
        let mut ticket = owner.after;
        while !bytes.is_empty() {
            let joins = self.run.as_ref().is_some_and(|run| {
                let same = run.qp == owner.qp && Arc::ptr_eq(&run.memory, memory);
                same && run.offset + run.filled == offset && run.filled < CHUNK
            });
            if !joins {
                self.flush();
                let chunk = self.free_chunk(copier)?;
                self.last += 1;
                let (qp, memory, ticket) = (owner.qp, memory.clone(), self.last);
                self.run = Some(Run { qp, memory, copier, offset, chunk, filled: 0, ticket });
            }
            let Some(run) = &mut self.run else { return Err(StageError::Failed) };
            let Some(room) = run.chunk.get_mut() else { return Err(StageError::Failed) };
            let len = bytes.len().min(CHUNK - run.filled);
            room[run.filled..run.filled + len].copy_from_slice(&bytes[..len]);
            run.filled += len;
            ticket = run.ticket;
            offset += len;
            bytes = &bytes[len..];
        }
        // Bytes of one copy are placed in any order: the next message must not share it.
        if last {
            self.flush();
        }
        if self.failed.contains(&owner.qp) { Err(StageError::Failed) } else { Ok(ticket) }
    }

    /// The engine that a copy under way, or one that is being collected, belongs to.
    fn copier_of(&self, ticket: u64) -> Option<CopierIndex> {
        if ticket <= self.done {
            return None;
        }
        let collected = self.run.iter().find(|run| run.ticket == ticket).map(|run| run.copier);
        collected.or_else(|| self.under_way.iter().find(|copy| copy.ticket == ticket).map(|copy| copy.copier))
    }

    /// A chunk to place from; waits for a copy to be over where all are under way.
    fn free_chunk(&mut self, copier: CopierIndex) -> Result<PinnedChunk, StageError> {
        let begin = Instant::now();
        loop {
            if let Some(chunk) = self.copiers.placer(copier).take_chunk() {
                return Ok(chunk);
            }
            self.poll();
            if begin.elapsed() > PATIENCE {
                return Err(StageError::Full);
            }
            pause(begin);
        }
    }

    /// Starts the copy of what was collected.
    pub(crate) fn flush(&mut self) {
        let Some(Run { qp, memory, copier, offset, chunk, filled, ticket }) = self.run.take() else { return };
        let copy = match self.copiers.placer(copier).start_write(&memory, offset, chunk, filled) {
            Ok(copy) => Some(copy),
            Err(error) => {
                self.fail(qp, &error);
                None
            }
        };
        self.under_way.push_back(UnderWay { qp, ticket, memory, copier, copy, since: Instant::now() });
    }

    /// Looks which copies are over.
    pub(crate) fn poll(&mut self) {
        while let Some(first) = self.under_way.front() {
            let over = match &first.copy {
                Some(copy) => self.copiers.placer(first.copier).poll(copy),
                None => Ok(true),
            };
            let (qp, ticket) = (first.qp, first.ticket);
            match over {
                Ok(false) if first.since.elapsed() < STUCK => return,
                Ok(true) => {}
                Ok(false) => {
                    tracing::warn!("the GPU's copy engine has not finished a copy for {STUCK:?}");
                    self.failed.push(qp);
                }
                Err(error) => self.fail(qp, &error),
            }
            self.done = ticket;
            self.under_way.pop_front();
        }
    }

    /// A queue pair whose copy failed: bytes that it took have not arrived.
    pub(crate) fn take_failed(&mut self) -> Option<u32> {
        self.failed.pop()
    }

    /// Waits until the bytes of this owner are where they belong, but not for long: for a packet that must not be placed before.
    pub(crate) fn wait(&mut self, owner: Owner) -> Result<(), StageError> {
        self.wait_until(PATIENCE, |stage| owner.after <= stage.done)?;
        if self.failed.contains(&owner.qp) { Err(StageError::Failed) } else { Ok(()) }
    }

    /// Waits until nothing is under way, but not for long.
    pub(crate) fn drain(&mut self) -> Result<(), StageError> {
        self.wait_until(PATIENCE, |stage| stage.run.is_none() && stage.under_way.is_empty())
    }

    /// The memory is deregistered: what was collected for it is not written any more, and what is under way is waited for, since it may
    /// be freed next. The queue pairs that it was placed for fail.
    pub(crate) fn forget(&mut self, memory: &Arc<GpuMemory>, copier: CopierIndex) {
        if let Some(run) = self.run.take_if(|run| Arc::ptr_eq(&run.memory, memory)) {
            self.failed.push(run.qp);
            let (Run { qp, ticket, memory, copier, .. }, since) = (run, Instant::now());
            self.under_way.push_back(UnderWay { qp, ticket, memory, copier, copy: None, since });
        }
        let over = self.wait_until(DEREGISTER_PATIENCE, |stage| {
            !stage.under_way.iter().any(|copy| copy.copy.is_some() && Arc::ptr_eq(&copy.memory, memory))
                && stage.copiers.placer(copier).is_idle().unwrap_or(true)
        });
        if over.is_err() {
            tracing::warn!("the GPU still copies into memory that is deregistered: it is stuck");
        }
    }

    /// The queue pair is gone: nobody is to hear of its failures.
    pub(crate) fn forget_owner(&mut self, qp: u32) {
        self.failed.retain(|failed| *failed != qp);
    }

    fn wait_until(&mut self, patience: Duration, done: impl Fn(&Self) -> bool) -> Result<(), StageError> {
        if done(self) {
            return Ok(());
        }
        self.flush();
        let begin = Instant::now();
        loop {
            self.poll();
            if done(self) {
                return Ok(());
            }
            if begin.elapsed() > patience {
                return Err(StageError::Failed);
            }
            pause(begin);
        }
    }

    /// Changes a word by two copies, one after the other, waiting for both: for atomics on memory without a window.
    pub(crate) fn change(
        &mut self,
        owner: Owner,
        (memory, copier): (&Arc<GpuMemory>, CopierIndex),
        offset: usize,
        change: Change,
    ) -> Result<u64, StageError> {
        // All of them, whosever: an atomic sees the one before it, of other engines, too.
        static ONE_BY_ONE: Mutex<()> = Mutex::new(());
        let _alone = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
        self.drain()?;
        let chunk = self.free_chunk(copier)?;
        let old = self.read(memory, copier, offset, 8, chunk)?;
        let old = old.first_chunk().map(|word| u64::from_ne_bytes(*word)).ok_or(StageError::Failed)?;
        if let Some(new) = change.of(old) {
            let after = self.put(owner, (memory, copier), offset, &new.to_ne_bytes(), true)?;
            self.wait(Owner { after, ..owner })?;
        }
        Ok(old)
    }

    /// Reads bytes of GPU memory and waits for them, but not for long.
    fn read(
        &self,
        memory: &Arc<GpuMemory>,
        copier: CopierIndex,
        offset: usize,
        len: usize,
        chunk: PinnedChunk,
    ) -> Result<PinnedChunk, StageError> {
        let engine = self.copiers.placer(copier);
        let failed = |error: CopyError| {
            tracing::warn!(%error, "GPU memory could not be read by the copy engine");
            StageError::Failed
        };
        let copy = engine.start_read(memory, offset, len, chunk).map_err(failed)?;
        let begin = Instant::now();
        while !engine.poll(&copy).map_err(failed)? {
            if begin.elapsed() > PATIENCE {
                return Err(StageError::Failed);
            }
            pause(begin);
        }
        copy.into_chunk().map_err(|_| StageError::Failed)
    }

    /// Reads bytes of GPU memory into `out` and waits for them: for the rare packet whose payload comes from several places.
    pub(crate) fn read_now(
        &mut self,
        (memory, copier): (&Arc<GpuMemory>, CopierIndex),
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), StageError> {
        let chunk = self.free_chunk(copier)?;
        let chunk = self.read(memory, copier, offset, out.len(), chunk)?;
        out.copy_from_slice(&chunk[..out.len()]);
        Ok(())
    }

    fn fail(&mut self, qp: u32, error: &CopyError) {
        tracing::warn!(%error, "GPU memory could not be written by the copy engine");
        self.failed.push(qp);
    }
}

/// Between two looks at a copy. Most are over in microseconds; while one takes longer, others may have the processor.
fn pause(since: Instant) {
    if since.elapsed() < SPIN { std::hint::spin_loop() } else { std::thread::yield_now() }
}
