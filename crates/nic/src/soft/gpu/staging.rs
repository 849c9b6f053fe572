//! Placement by the copy engine, for GPU memory without a BAR1 window (or where staging was
//! requested). Payload is collected in a staging buffer (a pinned chunk). The GPU copies it while
//! more arrives. Completions and ACKs wait until the copy is over.
//!
//! Every placement is a *step* with a *ticket*, and belongs to one queue pair; steps end in the
//! order of their tickets. A queue pair records the ticket that its last placed byte depends on. It
//! holds back ACKs and completions until that step is over. Work that must follow a step becomes a
//! step itself, so nothing here blocks. The copier thread (`copier.rs`) makes CUDA's calls, which
//! may take as long as the application's kernels. If a copy fails, only its queue pair fails.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce_memory::Source;
use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{CopyError, PinnedChunk};
use nobounce_protocol::wire::Psn;

use crate::soft::gpu::copier::{CHUNK, Copier, CopyWork, Job};
use crate::soft::gpu::copiers::{CopierIndex, Copiers};
use crate::soft::gpu::standstill::Standstill;
use crate::soft::gpu::step::{Changing, LateChange, LateCopy, LateStore, Step, What};
use crate::soft::gpu::target::{AtomicChange, Target};
use crate::soft::qp_index::QpIndex;

/// How long to wait for a copy when no chunk is free, before bytes go to the heap: most end sooner.
const SPIN: Duration = Duration::from_micros(50);
/// A copy that takes longer than this has failed.
const STUCK: Duration = Duration::from_secs(10);
/// Bytes kept on the heap until they can be placed. A peer that waits for ACKs has at most 1 MiB in
/// flight.
const MOST_LATE: usize = 64 << 20;

/// The queue pair that bytes are placed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyOwner {
    /// The index of the queue pair.
    pub(crate) qp: QpIndex,
    /// The step that its earlier bytes wait for.
    pub(crate) after: u64,
}

/// Bytes collected for one copy.
#[derive(Debug)]
struct StagedRun {
    qp: Option<QpIndex>,
    memory: Arc<GpuMemory>,
    copier: Arc<Copier>,
    offset: usize,
    room: ChunkSpace,
    filled: usize,
    ticket: u64,
    /// The step that must end before this one begins.
    after: u64,
}

/// Where bytes are collected.
#[derive(Debug)]
enum ChunkSpace {
    Pinned(PinnedChunk),
    /// No chunk was free, or an earlier step is not over.
    Heap(Vec<u8>),
}

/// Why bytes could not be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StagingError {
    /// The memory is gone, or the copy engine failed.
    Failed,
    /// Too many bytes wait for the GPU already.
    Full,
}

/// The original value of an atomic, for its pending response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Changed {
    pub(crate) qp: QpIndex,
    pub(crate) psn: Psn,
    pub(crate) before: u64,
}

/// The copy engines of a device, and the placements in flight.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    pub(crate) copiers: Copiers,
    run: Option<StagedRun>,
    /// Their tickets begin at `done + 1`, without a gap.
    steps: VecDeque<Step>,
    /// Copies among them that are not started.
    late_copies: usize,
    /// Atomics among them.
    changes: usize,
    /// Bytes that steps and the run keep outside of chunks.
    late_bytes: usize,
    /// All tickets up to this one are over.
    done: u64,
    /// Queue pairs with a failed copy that are not notified yet.
    failed: Vec<QpIndex>,
    /// Original values of atomics, until their responses take them.
    changed: Vec<Changed>,
}

impl Staging {
    /// Whether copies are to be started or awaited.
    pub(crate) fn is_busy(&self) -> bool {
        self.run.is_some() || !self.steps.is_empty() || !self.failed.is_empty() || !self.changed.is_empty()
    }

    /// Whether all bytes that the queue pair placed up to this ticket are in their memory.
    #[inline]
    pub(crate) fn is_settled(&self, owner: CopyOwner) -> bool {
        owner.after <= self.done && (self.failed.is_empty() || !self.failed.contains(&owner.qp))
    }

    /// Whether the step with this ticket is over, successfully or not.
    pub(crate) fn is_over(&self, ticket: u64) -> bool {
        ticket <= self.done
    }

    /// Whether an atomic is in flight: the next one must see its result.
    pub(crate) fn is_changing(&self) -> bool {
        self.changes > 0
    }

    /// Collects bytes for `offset` of the memory; returns the ticket of the copy that will place
    /// them. `last` ends a message.
    pub(crate) fn put(
        &mut self,
        owner: CopyOwner,
        (memory, copier): (&Arc<GpuMemory>, CopierIndex),
        mut offset: usize,
        mut bytes: Source<'_>,
        last: bool,
    ) -> Result<u64, StagingError> {
        let mut ticket = owner.after;
        while !bytes.is_empty() {
            let joins = self.run.as_ref().is_some_and(|run| {
                let same = run.qp == Some(owner.qp) && Arc::ptr_eq(&run.memory, memory);
                same && run.offset + run.filled == offset && run.filled < CHUNK
            });
            if !joins {
                self.flush();
                let copier = self.copiers.get(copier).cloned().ok_or(StagingError::Failed)?;
                let room = self.room(owner.after.max(ticket), &copier)?;
                let (qp, memory) = (Some(owner.qp), memory.clone());
                let (ticket, after) = (self.next_ticket(), owner.after.max(ticket));
                self.run = Some(StagedRun { qp, memory, copier, offset, room, filled: 0, ticket, after });
            }
            let Some(run) = &mut self.run else { return Err(StagingError::Failed) };
            let len = bytes.len().min(CHUNK - run.filled);
            match &mut run.room {
                ChunkSpace::Pinned(chunk) => {
                    let Some(room) = chunk.get_mut() else { return Err(StagingError::Failed) };
                    bytes.slice(0..len).copy_to(&mut room[run.filled..run.filled + len]);
                }
                ChunkSpace::Heap(kept) => {
                    let begin = kept.len();
                    kept.resize(begin + len, 0);
                    bytes.slice(0..len).copy_to(&mut kept[begin..]);
                    self.late_bytes += len;
                }
            }
            run.filled += len;
            ticket = run.ticket;
            offset += len;
            bytes = bytes.skip(len);
        }
        // One copy places its bytes in any order: the next message must not share it.
        if last {
            self.flush();
        }
        if self.failed.contains(&owner.qp) { Err(StagingError::Failed) } else { Ok(ticket) }
    }

    /// Keeps bytes for memory that needs no copy engine until the earlier steps are over; returns
    /// the ticket of this step.
    pub(crate) fn store_later(
        &mut self,
        owner: CopyOwner,
        target: &Target,
        offset: usize,
        bytes: Source<'_>,
        last: bool,
    ) -> Result<u64, StagingError> {
        let mut store = LateStore { target: target.clone(), offset, bytes: self.keep(bytes)?, last };
        self.flush();
        // Packets of one message are joined into one step.
        if let Some(Step { qp, what: What::Store(before), .. }) = self.steps.back_mut()
            && *qp == Some(owner.qp)
            && before.takes(&mut store)
        {
            return Ok(self.done + self.steps.len() as u64);
        }
        self.push(owner, What::Store(store))
    }

    /// Changes a word after the earlier steps are over. [`Self::take_changed`] returns the original
    /// value under this PSN.
    pub(crate) fn change_later(
        &mut self,
        owner: CopyOwner,
        target: &Target,
        offset: usize,
        (change, psn): (AtomicChange, Psn),
    ) -> Result<u64, StagingError> {
        self.flush();
        let copier = match target {
            Target::Host(_) | Target::Null => None,
            Target::Gpu(gpu) => Some(self.copiers.get(gpu.copier).cloned().ok_or(StagingError::Failed)?),
        };
        let (target, state) = (target.clone(), Changing::Waits);
        let change = LateChange { target, copier, offset, change, psn, state };
        let ticket = self.push(owner, What::Change(change))?;
        self.changes += 1;
        Ok(ticket)
    }

    /// Starts the copy of the collected bytes.
    pub(crate) fn flush(&mut self) {
        let Some(StagedRun { qp, memory, copier, offset, room, filled, after, .. }) = self.run.take() else {
            return;
        };
        let what = match room {
            ChunkSpace::Pinned(chunk) => {
                let job = Job { work: CopyWork::Place { offset, len: filled }, memory, chunk };
                What::Copy(copier.start(job), copier)
            }
            ChunkSpace::Heap(bytes) => {
                self.late_copies += 1;
                What::LateCopy(LateCopy { memory, copier, offset, bytes, after })
            }
        };
        self.steps.push_back(Step { qp, since: Instant::now(), what });
    }

    /// Retires finished steps, and runs those that are due.
    pub(crate) fn poll(&mut self) {
        loop {
            self.start_late_copies();
            let Some(first) = self.steps.front_mut() else { return };
            let over = match &mut first.what {
                What::Copy(copying, _) => {
                    copying.take().map(|chunk| chunk.map(|_| None).map_err(StepError::from))
                }
                What::LateCopy(_) => None,
                What::Store(store) => Some(store.carry_out().map(|()| None)),
                What::Change(change) => change.go_on().map(|changed| changed.map(Some)),
                What::Over => Some(Ok(None)),
            };
            match over {
                None if first.since.elapsed() < STUCK => return,
                None => {
                    let why = first.what.standstill().unwrap_or(Standstill::Queue);
                    tracing::warn!("bytes that arrived were not placed in the GPU in {STUCK:?}: {why}");
                    let qp = first.qp;
                    self.fail(qp);
                }
                Some(Ok(None)) => {}
                Some(Ok(Some((psn, before)))) => {
                    self.changed.extend(first.qp.map(|qp| Changed { qp, psn, before }));
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "bytes that arrived could not be placed");
                    let qp = first.qp;
                    self.fail(qp);
                }
            }
            if let Some(step) = self.steps.pop_front() {
                self.let_go(&step.what);
            }
            self.done += 1;
            // An atomic begins when it is at the front.
            if let Some(Step { since, what: What::Change(_), .. }) = self.steps.front_mut() {
                *since = Instant::now();
            }
        }
    }

    /// A queue pair whose copy failed: bytes that it accepted have not arrived.
    pub(crate) fn take_failed(&mut self) -> Option<QpIndex> {
        self.failed.pop()
    }

    /// The original value of an atomic.
    pub(crate) fn take_changed(&mut self) -> Option<Changed> {
        self.changed.pop()
    }

    /// The memory is deregistered: collected bytes for it are discarded, and their queue pairs
    /// fail. The caller waits for copies in flight ([`Copier::copies_of`]).
    pub(crate) fn forget(&mut self, target: &Target) {
        if let Some(run) = self.run.take_if(|run| target.is_of(&run.memory)) {
            if let ChunkSpace::Heap(bytes) = &run.room {
                self.late_bytes -= bytes.len();
            }
            self.steps.push_back(Step { qp: run.qp, since: Instant::now(), what: What::Over });
            self.fail(run.qp);
        }
        for at in 0..self.steps.len() {
            if self.steps[at].what.waits_for(target) {
                self.cancel(at);
                self.fail(self.steps[at].qp);
            }
        }
    }

    /// The queue pair is destroyed or reset: its failures are not reported, and its pending steps
    /// are cancelled.
    pub(crate) fn forget_owner(&mut self, qp: QpIndex) {
        self.flush();
        self.cancel_all_of(qp);
        self.steps.iter_mut().filter(|step| step.qp == Some(qp)).for_each(|step| step.qp = None);
        self.failed.retain(|failed| *failed != qp);
        self.changed.retain(|changed| changed.qp != qp);
    }

    /// Waits until nothing is in flight, with a timeout: for a device that closes.
    pub(crate) fn drain(&mut self, timeout: Duration) {
        self.flush();
        let begin = Instant::now();
        loop {
            self.poll();
            if self.steps.is_empty() || begin.elapsed() > timeout {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// A buffer to collect bytes in that are copied after this step.
    fn room(&mut self, after: u64, copier: &Arc<Copier>) -> Result<ChunkSpace, StagingError> {
        let begin = Instant::now();
        while self.late_copies == 0 && self.may_follow(after, copier) {
            if let Some(chunk) = copier.take_place_chunk() {
                return Ok(ChunkSpace::Pinned(chunk));
            }
            if begin.elapsed() > SPIN {
                break;
            }
            self.poll();
            std::hint::spin_loop();
        }
        self.keep((&[]).into()).map(ChunkSpace::Heap)
    }

    /// Whether a copy by this copier may start although the step before it is not over. Copies of
    /// one copier end in the order in which they were started; those of two do not.
    fn may_follow(&self, after: u64, copier: &Arc<Copier>) -> bool {
        match self.step(after).map(|step| &step.what) {
            None | Some(What::Over) => true,
            Some(What::Copy(_, other)) => Arc::ptr_eq(other, copier),
            Some(_) => false,
        }
    }

    fn step(&self, ticket: u64) -> Option<&Step> {
        self.steps.get(usize::try_from(ticket.checked_sub(self.done + 1)?).ok()?)
    }

    /// Starts copies that waited for a chunk or an earlier step, in order.
    fn start_late_copies(&mut self) {
        let mut at = 0;
        while self.late_copies > 0 && at < self.steps.len() {
            if let What::LateCopy(copy) = &self.steps[at].what {
                if !self.may_follow(copy.after, &copy.copier) {
                    return;
                }
                let Some(mut chunk) = copy.copier.take_place_chunk() else { return };
                let (copier, len) = (copy.copier.clone(), copy.bytes.len());
                let (memory, offset) = (copy.memory.clone(), copy.offset);
                if let Some(room) = chunk.get_mut() {
                    room[..len].copy_from_slice(&copy.bytes);
                }
                let job = Job { work: CopyWork::Place { offset, len }, memory, chunk };
                let started = What::Copy(copier.start(job), copier);
                self.steps[at].since = Instant::now();
                let late = std::mem::replace(&mut self.steps[at].what, started);
                self.let_go(&late);
            }
            at += 1;
        }
    }

    /// The ticket of the next step, which is pushed next, or collected first.
    fn next_ticket(&self) -> u64 {
        self.done + self.steps.len() as u64 + 1
    }

    fn push(&mut self, owner: CopyOwner, what: What) -> Result<u64, StagingError> {
        let ticket = self.next_ticket();
        self.steps.push_back(Step { qp: Some(owner.qp), since: Instant::now(), what });
        if self.failed.contains(&owner.qp) { Err(StagingError::Failed) } else { Ok(ticket) }
    }

    /// A heap copy of bytes that cannot be placed yet.
    fn keep(&mut self, bytes: Source<'_>) -> Result<Vec<u8>, StagingError> {
        if self.late_bytes + bytes.len() > MOST_LATE {
            return Err(StagingError::Full);
        }
        self.late_bytes += bytes.len();
        Ok(bytes.to_vec())
    }

    /// The queue pair's bytes have not arrived. The steps behind them, which signal them, must not
    /// run either.
    fn fail(&mut self, qp: Option<QpIndex>) {
        let Some(qp) = qp else { return };
        self.failed.push(qp);
        self.cancel_all_of(qp);
    }

    fn cancel_all_of(&mut self, qp: QpIndex) {
        for at in 0..self.steps.len() {
            if self.steps[at].qp == Some(qp) {
                self.cancel(at);
            }
        }
    }

    /// Cancels a step, unless it was submitted to the copy engine.
    fn cancel(&mut self, at: usize) {
        if !matches!(self.steps[at].what, What::Copy(..)) {
            let what = std::mem::replace(&mut self.steps[at].what, What::Over);
            self.let_go(&what);
        }
    }

    /// A step ended or was cancelled: updates the accounts.
    fn let_go(&mut self, what: &What) {
        self.late_bytes -= what.kept();
        self.late_copies -= usize::from(matches!(what, What::LateCopy(_)));
        self.changes -= usize::from(matches!(what, What::Change(_)));
    }
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Access(#[from] nobounce_memory::AccessError),
}
