//! Work that the copy engine places, or that follows it: one step of a
//! [`Staging`](crate::soft::gpu::staging::Staging).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::CopyError;
use nobounce_protocol::wire::Psn;

use crate::soft::gpu::copier::{Copier, CopyWork, Copying, Job};
use crate::soft::gpu::staging::StepError;
use crate::soft::gpu::standstill::Standstill;
use crate::soft::gpu::target::{AtomicChange, Target};
use crate::soft::qp_index::QpIndex;

/// Stores of one message are joined up to this many bytes.
const MOST_JOINED: usize = 256 << 10;

/// One step.
#[derive(Debug)]
pub(crate) struct Step {
    /// The index of the queue pair, as long as it exists.
    pub(crate) qp: Option<QpIndex>,
    pub(crate) since: Instant,
    pub(crate) what: What,
}

#[derive(Debug)]
pub(crate) enum What {
    /// It was submitted to the copy engine.
    Copy(Copying, Arc<Copier>),
    LateCopy(LateCopy),
    Store(LateStore),
    Change(LateChange),
    /// Nothing is left to do.
    Over,
}

impl What {
    /// How many bytes it keeps on the heap.
    pub(crate) fn kept(&self) -> usize {
        match self {
            Self::LateCopy(copy) => copy.bytes.len(),
            Self::Store(store) => store.bytes.len(),
            Self::Copy(..) | Self::Change(_) | Self::Over => 0,
        }
    }

    /// What blocks it, if it does not end.
    pub(crate) fn standstill(&self) -> Option<Standstill> {
        match self {
            Self::Copy(_, copier) => Some(copier.standstill()),
            Self::LateCopy(copy) => Some(copy.copier.standstill()),
            Self::Change(change) => change.copier.as_ref().map(|copier| copier.standstill()),
            Self::Store(_) | Self::Over => None,
        }
    }

    /// Whether it is for this memory and has not begun.
    pub(crate) fn waits_for(&self, target: &Target) -> bool {
        match self {
            Self::LateCopy(copy) => target.is_of(&copy.memory),
            Self::Store(store) => target.is_same(&store.target),
            Self::Change(change) => target.is_same(&change.target),
            Self::Copy(..) | Self::Over => false,
        }
    }
}

/// A copy without a chunk yet, or one that must not begin yet.
#[derive(Debug)]
pub(crate) struct LateCopy {
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) copier: Arc<Copier>,
    pub(crate) offset: usize,
    pub(crate) bytes: Vec<u8>,
    /// The step that must end before this one begins.
    pub(crate) after: u64,
}

/// Bytes for memory that needs no copy engine; earlier steps are not over.
#[derive(Debug)]
pub(crate) struct LateStore {
    pub(crate) target: Target,
    pub(crate) offset: usize,
    pub(crate) bytes: Vec<u8>,
    pub(crate) last: bool,
}

impl LateStore {
    /// Joins the bytes of another store that lie right behind its own, in the same message.
    pub(crate) fn takes(&mut self, next: &mut Self) -> bool {
        let joins = !self.last
            && self.target.is_same(&next.target)
            && self.offset + self.bytes.len() == next.offset
            && self.bytes.len() + next.bytes.len() <= MOST_JOINED;
        if joins {
            self.bytes.append(&mut next.bytes);
            self.last = next.last;
        }
        joins
    }

    pub(crate) fn carry_out(&self) -> Result<(), StepError> {
        self.target.store(self.offset, (&self.bytes).into(), self.last)?;
        // Later parts of the message may go to other memory, and they do not announce this one.
        if !self.last {
            self.target.announce()?;
        }
        Ok(())
    }
}

/// An atomic.
#[derive(Debug)]
pub(crate) struct LateChange {
    pub(crate) target: Target,
    /// The copier of the word, for GPU memory.
    pub(crate) copier: Option<Arc<Copier>>,
    pub(crate) offset: usize,
    pub(crate) change: AtomicChange,
    /// The request's PSN, which identifies its response.
    pub(crate) psn: Psn,
    pub(crate) state: Changing,
}

/// Progress of an atomic.
#[derive(Debug)]
pub(crate) enum Changing {
    Waits,
    /// The word is being read.
    Looks(Alone, Copying),
    /// The original value; the new one is being written.
    Writes(Alone, u64, Copying),
}

/// Process-wide lock for atomics by copies: each engine of a device has its own
/// [`Staging`](crate::soft::gpu::staging::Staging).
#[derive(Debug)]
pub(crate) struct Alone(());

static IS_ALONE: AtomicBool = AtomicBool::new(false);

impl Alone {
    fn take() -> Option<Self> {
        // Constructed only after the swap succeeded: dropping a spurious one would release another
        // holder's lock.
        (!IS_ALONE.swap(true, Ordering::Acquire)).then(|| Self(()))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        IS_ALONE.store(false, Ordering::Release);
    }
}

impl LateChange {
    /// Runs as far as possible; all earlier steps are over. Returns the request's PSN and the
    /// original value at the end.
    pub(crate) fn go_on(&mut self) -> Option<Result<(Psn, u64), StepError>> {
        let (Target::Gpu(gpu), Some(copier)) = (&self.target, &self.copier) else {
            return Some(self.change_now());
        };
        if self.target.changes_at_once() {
            return Some(self.change_now());
        }
        let (offset, len) = (self.offset, size_of::<u64>());
        let copy = |work, chunk| copier.start(Job { work, memory: gpu.memory.clone(), chunk });
        loop {
            match &mut self.state {
                Changing::Waits => {
                    let (alone, chunk) = (Alone::take()?, copier.take_place_chunk()?);
                    self.state = Changing::Looks(alone, copy(CopyWork::Look { offset, len }, chunk));
                }
                Changing::Looks(_, copying) => {
                    let mut chunk = match copying.take()? {
                        Ok(chunk) => chunk,
                        Err(error) => return Some(Err(error.into())),
                    };
                    let before = chunk.first_chunk().map(|word| u64::from_ne_bytes(*word));
                    let (Some(before), Some(room)) = (before, chunk.get_mut()) else {
                        let state = "takes part in another copy";
                        return Some(Err(CopyError::ChunkInUse { state }.into()));
                    };
                    let Some(new) = self.change.of(before) else { return Some(Ok((self.psn, before))) };
                    room[..8].copy_from_slice(&new.to_ne_bytes());
                    let copying = copy(CopyWork::Place { offset, len }, chunk);
                    let Changing::Looks(alone, _) = std::mem::replace(&mut self.state, Changing::Waits)
                    else {
                        return None;
                    };
                    self.state = Changing::Writes(alone, before, copying);
                }
                Changing::Writes(_, before, copying) => {
                    let written = copying.take()?;
                    return Some(written.map(|_| (self.psn, *before)).map_err(StepError::from));
                }
            }
        }
    }

    fn change_now(&self) -> Result<(Psn, u64), StepError> {
        let (before, _) = self.target.change_now(self.offset, self.change)?;
        Ok((self.psn, before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_is_alone() {
        let first = Alone::take().unwrap();
        assert!(Alone::take().is_none());
        assert!(Alone::take().is_none(), "asking in vain does not give it back");
        drop(first);
        assert!(Alone::take().is_some());
    }
}
