//! What is placed by the copy engine, or after it: one step of a [`Stage`](crate::soft::gpu::staging::Stage).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::CopyError;
use nobounce_protocol::wire::Psn;

use crate::soft::gpu::copier::{Copier, Copying, Job, Work};
use crate::soft::gpu::staging::StepError;
use crate::soft::gpu::standstill::Standstill;
use crate::soft::gpu::target::{Change, Target};

/// Most bytes that stores of one message are joined to.
const MOST_JOINED: usize = 256 << 10;

/// One step.
#[derive(Debug)]
pub(crate) struct Step {
    /// The index of the queue pair, as long as it lives.
    pub(crate) qp: Option<u32>,
    pub(crate) since: Instant,
    pub(crate) what: What,
}

#[derive(Debug)]
pub(crate) enum What {
    /// It was given to the copy engine.
    Copy(Copying, Arc<Copier>),
    LateCopy(LateCopy),
    Store(LateStore),
    Change(LateChange),
    /// Nothing is to be done, or nothing more.
    Over,
}

impl What {
    /// How many bytes it keeps.
    pub(crate) fn kept(&self) -> usize {
        match self {
            Self::LateCopy(copy) => copy.bytes.len(),
            Self::Store(store) => store.bytes.len(),
            Self::Copy(..) | Self::Change(_) | Self::Over => 0,
        }
    }

    /// What it stands behind, where it does not end.
    pub(crate) fn standstill(&self) -> Option<Standstill> {
        match self {
            Self::Copy(_, copier) => Some(copier.standstill()),
            Self::LateCopy(copy) => Some(copy.copier.standstill()),
            Self::Change(change) => change.copier.as_ref().map(|copier| copier.standstill()),
            Self::Store(_) | Self::Over => None,
        }
    }

    /// Whether it has not been begun and is for this memory.
    pub(crate) fn waits_for(&self, target: &Target) -> bool {
        match self {
            Self::LateCopy(copy) => target.is_of(&copy.memory),
            Self::Store(store) => target.is_same(&store.target),
            Self::Change(change) => target.is_same(&change.target),
            Self::Copy(..) | Self::Over => false,
        }
    }
}

/// A copy for which there is no chunk yet, or that must not begin yet.
#[derive(Debug)]
pub(crate) struct LateCopy {
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) copier: Arc<Copier>,
    pub(crate) offset: usize,
    pub(crate) bytes: Vec<u8>,
    /// The step it must not begin before.
    pub(crate) after: u64,
}

/// Bytes for memory that needs no copy engine, whose time has not come.
#[derive(Debug)]
pub(crate) struct LateStore {
    pub(crate) target: Target,
    pub(crate) offset: usize,
    pub(crate) bytes: Vec<u8>,
    pub(crate) last: bool,
}

impl LateStore {
    /// Takes the bytes of another one that lie right behind its own, in the same message.
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
        // A part of a message may be followed by parts elsewhere, which announce nothing of this one.
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
    /// Who copies the word, where it is a GPU's.
    pub(crate) copier: Option<Arc<Copier>>,
    pub(crate) offset: usize,
    pub(crate) change: Change,
    /// The request's, by which its answer is found.
    pub(crate) psn: Psn,
    pub(crate) state: Changing,
}

/// How far an atomic has come.
#[derive(Debug)]
pub(crate) enum Changing {
    Waits,
    /// The word is being read.
    Looks(Alone, Copying),
    /// The word before; the new one is being written.
    Writes(Alone, u64, Copying),
}

/// Whoever has it is the only one in this process who changes a word by copies: other engines of the device have stages of their own.
#[derive(Debug)]
pub(crate) struct Alone(());

static IS_ALONE: AtomicBool = AtomicBool::new(false);

impl Alone {
    fn take() -> Option<Self> {
        // Made only where it was had: one that is made and dropped would give back what is another's.
        (!IS_ALONE.swap(true, Ordering::Acquire)).then(|| Self(()))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        IS_ALONE.store(false, Ordering::Release);
    }
}

impl LateChange {
    /// Does what can be done now, all steps before being over; the request's number and the value before once it is over.
    pub(crate) fn go_on(&mut self) -> Option<Result<(Psn, u64), StepError>> {
        let (Target::Gpu(gpu), Some(copier)) = (&self.target, &self.copier) else {
            return Some(self.change_now());
        };
        if self.target.changes_at_once() {
            return Some(self.change_now());
        }
        let copy = |work, chunk| {
            copier.start(Job { work, memory: gpu.memory.clone(), offset: self.offset, len: 8, chunk })
        };
        loop {
            match &mut self.state {
                Changing::Waits => {
                    let (alone, chunk) = (Alone::take()?, copier.take_place_chunk()?);
                    self.state = Changing::Looks(alone, copy(Work::Look, chunk));
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
                    let copying = copy(Work::Place, chunk);
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
