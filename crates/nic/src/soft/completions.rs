//! The queue inside a completion queue: the engine puts completions in, applications take them out and arm it.
//!
//! Everything is done under one lock, but for finding it empty, which whoever polls does all the time. `tests/loom.rs` tries every
//! order.

use std::collections::VecDeque;

use super::channel::Channel;
use super::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

#[derive(Debug)]
struct State<T> {
    queue: VecDeque<T>,
    depth: usize,
    armed: Armed,
    /// Where an armed queue announces itself, until its owner destroys it.
    channel: Option<Channel>,
    /// Its owner has gone, its depth is 0, and nobody asks for what it would hold.
    closed: bool,
}

impl<T> State<T> {
    fn announce(&self, id: u32) {
        if let Some(channel) = &self.channel {
            channel.push(id);
        }
    }
}

#[derive(Debug)]
pub(crate) struct Completions<T> {
    pub(crate) id: u32,
    /// How many completions there are, so that polling an empty queue takes no lock.
    count: AtomicUsize,
    /// Completions are lost. Set after the last one that is not.
    overflowed: AtomicBool,
    state: Mutex<State<T>>,
}

impl<T> Completions<T> {
    pub(crate) fn new(id: u32, depth: usize, channel: Option<Channel>) -> Self {
        let state = State { queue: VecDeque::new(), depth, armed: Armed::No, channel, closed: false };
        Self { id, count: AtomicUsize::new(0), overflowed: AtomicBool::new(false), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn depth(&self) -> usize {
        self.lock().depth
    }

    pub(crate) fn is_overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Acquire)
    }

    /// Adds a completion; false when there was no room, for the first time. An urgent one is announced to those who asked for
    /// solicited ones only.
    #[inline]
    pub(crate) fn push(&self, completion: T, urgent: bool) -> bool {
        let mut state = self.lock();
        // Once one is lost, none follows it: what is taken out would look complete, and the loss would be found out too late.
        if state.queue.len() >= state.depth || self.overflowed.load(Ordering::Relaxed) {
            if state.closed {
                return true;
            }
            let known = self.overflowed.swap(true, Ordering::Release);
            // Whoever sleeps until something comes must learn that it never will.
            if !known {
                state.announce(self.id);
            }
            return known;
        }
        state.queue.push_back(completion);
        self.count.store(state.queue.len(), Ordering::Release);
        if state.armed == Armed::Any || (state.armed == Armed::Solicited && urgent) {
            state.armed = Armed::No;
            state.announce(self.id);
        }
        true
    }

    /// Whether there are none: a look at one number.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Takes at most `max` completions, and returns how many.
    #[inline(always)]
    pub(crate) fn take(&self, max: usize, each: &mut impl FnMut(T)) -> usize {
        if self.is_empty() { 0 } else { self.take_some(max, each) }
    }

    fn take_some(&self, max: usize, each: &mut impl FnMut(T)) -> usize {
        let mut state = self.lock();
        let count = max.min(state.queue.len());
        state.queue.drain(..count).for_each(each);
        self.count.store(state.queue.len(), Ordering::Release);
        count
    }

    /// As [`take`](Self::take); nothing when there are none, and never will be all there should.
    #[inline]
    pub(crate) fn take_unless_lost(&self, max: usize, each: &mut impl FnMut(T)) -> Option<usize> {
        // Looked at first: what was there when it overflowed must be seen by the look after this.
        let overflowed = self.is_overflowed();
        let taken = self.take(max, each);
        (taken > 0 || !overflowed).then_some(taken)
    }

    /// Forgets the completions that `of` picks.
    pub(crate) fn forget(&self, of: impl Fn(&T) -> bool) {
        let mut state = self.lock();
        state.queue.retain(|completion| !of(completion));
        self.count.store(state.queue.len(), Ordering::Release);
    }

    /// The next completion is announced, once (or the next urgent one).
    pub(crate) fn arm(&self, solicited_only: bool) {
        let mut state = self.lock();
        state.armed = if solicited_only && state.armed != Armed::Any { Armed::Solicited } else { Armed::Any };
    }

    /// Holds at most `depth` from now on.
    ///
    /// # Errors
    /// It holds more than that: how many.
    pub(crate) fn resize(&self, depth: usize) -> Result<(), usize> {
        let mut state = self.lock();
        if state.queue.len() > depth {
            return Err(state.queue.len());
        }
        state.depth = depth;
        Ok(())
    }

    /// Its owner goes: it takes and announces nothing any more, and what it announced is forgotten.
    pub(crate) fn close(&self) {
        // Under the lock, so that nothing is announced behind our back.
        let mut state = self.lock();
        if let Some(channel) = state.channel.take() {
            channel.forget(self.id);
        }
        (state.closed, state.depth, state.queue) = (true, 0, VecDeque::new());
        self.count.store(0, Ordering::Release);
    }
}
