//! Completion queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nobounce_memory::barrier;
use nobounce_protocol::qp::{Completion, Source, Status, WorkKind};
use nobounce_protocol::wire::Qpn;

use super::channel::Channel;
use super::device::Shared;
use super::event::AsyncEvent;
use super::limits::{CreateError, DeviceLimits, Taken, check};

/// A completion as the application sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// The application's number for the request.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// What it was.
    pub kind: WorkKind,
    /// Bytes received, read or fetched.
    pub byte_len: u32,
    /// Immediate data, as a number.
    pub immediate: Option<u32>,
    /// The key the peer invalidated.
    pub invalidated: Option<u32>,
    /// The queue pair it belongs to.
    pub qpn: Qpn,
    /// Of a received datagram: where it came from.
    pub source: Option<Source>,
}

/// Why a completion queue cannot be polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CqError {
    /// More completed than fits.
    #[error(
        "the completion queue overflowed its {depth} entries: completions are lost; make it deeper or poll more often"
    )]
    Overflow {
        #[allow(missing_docs)]
        depth: usize,
    },
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

/// Why a completion queue could not be resized. It stays as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The depth is out of range.
    #[error(transparent)]
    Depth(#[from] CreateError),
    /// Completions that are there would be lost.
    #[error("the completion queue holds {held} completions and cannot shrink to {asked} entries: poll first")]
    #[allow(missing_docs)]
    Holds { held: usize, asked: usize },
    /// It has lost some already.
    #[error("the completion queue overflowed: completions are lost, destroy it")]
    Overflowed,
}

impl ResizeError {
    /// The error number a verbs program expects.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Depth(error) => error.errno(),
            Self::Holds { .. } | Self::Overflowed => libc::EINVAL,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<WorkCompletion>,
    depth: usize,
    armed: Armed,
    /// Where an armed queue announces itself, until its owner destroys it.
    channel: Option<Channel>,
    /// Its owner has gone, its depth is 0, and nobody asks for what it would hold.
    closed: bool,
}

impl State {
    fn announce(&self, id: u32) {
        if let Some(channel) = &self.channel {
            channel.push(id);
        }
    }
}

#[derive(Debug)]
pub(crate) struct CqInner {
    pub(crate) id: u32,
    /// How many completions there are, so that polling an empty queue takes no lock.
    count: AtomicUsize,
    overflowed: AtomicBool,
    state: Mutex<State>,
}

impl CqInner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a completion; false when there was no room, for the first time.
    pub(crate) fn push(&self, qpn: Qpn, completion: Completion) -> bool {
        // Data first, then the completion that speaks of it.
        barrier::before_completion();
        let mut state = self.lock();
        if state.queue.len() >= state.depth {
            if state.closed {
                return true;
            }
            let known = self.overflowed.swap(true, Ordering::Relaxed);
            // Whoever sleeps until something comes must learn that it never will.
            if !known {
                state.announce(self.id);
            }
            return known;
        }
        let urgent = completion.solicited || completion.status != Status::Success;
        state.queue.push_back(WorkCompletion {
            wr_id: completion.wr_id,
            status: completion.status,
            kind: completion.kind,
            byte_len: completion.byte_len,
            immediate: completion.immediate,
            invalidated: completion.invalidated,
            qpn,
            source: completion.source,
        });
        self.count.store(state.queue.len(), Ordering::Release);
        if state.armed == Armed::Any || (state.armed == Armed::Solicited && urgent) {
            state.armed = Armed::No;
            state.announce(self.id);
        }
        true
    }

    /// Forgets completions of a queue pair that no longer exists.
    pub(crate) fn forget(&self, qpn: Qpn) {
        let mut state = self.lock();
        state.queue.retain(|completion| completion.qpn != qpn);
        self.count.store(state.queue.len(), Ordering::Release);
    }
}

/// A completion queue. Queue pairs that use it when it is dropped go on without anybody to tell.
#[derive(Debug)]
pub struct Cq {
    shared: Arc<Shared>,
    pub(crate) inner: Arc<CqInner>,
    _taken: Taken,
}

impl Cq {
    pub(crate) fn create(
        shared: &Arc<Shared>,
        depth: usize,
        channel: Option<&Channel>,
    ) -> Result<Self, CreateError> {
        check_depth(depth)?;
        let taken = shared.counts.cqs.take("completion queues", DeviceLimits::OURS.max_cqs)?;
        let (queue, channel) = (VecDeque::new(), channel.cloned());
        let state = State { queue, depth, armed: Armed::No, channel, closed: false };
        let inner = Arc::new(CqInner {
            id: shared.next_id(),
            count: AtomicUsize::new(0),
            overflowed: AtomicBool::new(false),
            state: Mutex::new(state),
        });
        Ok(Self { shared: shared.clone(), inner, _taken: taken })
    }

    /// Its number in events.
    pub fn id(&self) -> u32 {
        self.inner.id
    }

    /// How many completions it holds at most.
    pub fn depth(&self) -> usize {
        if self.shared.is_forked() { 0 } else { self.inner.lock().depth }
    }

    /// Whether queue pairs use it: a program that destroys it now makes a mistake.
    pub fn is_busy(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Changes how many completions it holds at most. Those that are there stay.
    ///
    /// # Errors
    /// It holds more completions than that, it has lost some already, or the depth is out of range.
    pub fn resize(&self, depth: usize) -> Result<(), ResizeError> {
        check_depth(depth)?;
        if self.shared.is_forked() {
            return Err(CreateError::Forked.into());
        }
        let mut state = self.inner.lock();
        if self.inner.overflowed.load(Ordering::Relaxed) {
            return Err(ResizeError::Overflowed);
        }
        if state.queue.len() > depth {
            return Err(ResizeError::Holds { held: state.queue.len(), asked: depth });
        }
        state.depth = depth;
        Ok(())
    }

    /// Takes at most `max` completions, appends them to `out`, and returns how many. An empty queue first
    /// drives the device.
    ///
    /// # Errors
    /// The queue overflowed (after what it still held was taken), or the process forked.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> Result<usize, CqError> {
        self.poll_each(max, |completion| out.push(completion))
    }

    /// As [`poll`](Self::poll), handing each completion to `each`.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    #[inline]
    pub fn poll_each(&self, max: usize, mut each: impl FnMut(WorkCompletion)) -> Result<usize, CqError> {
        // First of all: the thread that held the queue's lock may not exist in a forked child.
        if self.shared.is_forked() {
            return Err(CqError::Forked);
        }
        let taken = self.take(max, &mut each);
        if taken > 0 || max == 0 {
            return Ok(taken);
        }
        self.shared.drive_polled();
        let taken = self.take(max, &mut each);
        if taken == 0 && self.inner.overflowed.load(Ordering::Relaxed) {
            return Err(CqError::Overflow { depth: self.depth() });
        }
        Ok(taken)
    }

    #[inline]
    fn take(&self, max: usize, each: &mut impl FnMut(WorkCompletion)) -> usize {
        if self.inner.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut state = self.inner.lock();
        let count = max.min(state.queue.len());
        state.queue.drain(..count).for_each(each);
        self.inner.count.store(state.queue.len(), Ordering::Release);
        count
    }

    /// Raises the channel once, at the next completion (or the next solicited or failed one).
    ///
    /// As with every NIC, poll once more after arming: what came before is not announced.
    pub fn request_notify(&self, solicited_only: bool) {
        if self.shared.is_forked() {
            return;
        }
        let mut state = self.inner.lock();
        state.armed = if solicited_only && state.armed != Armed::Any { Armed::Solicited } else { Armed::Any };
        drop(state);
        self.shared.expect_sleep();
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            return;
        }
        let id = self.inner.id;
        // Under the queue's lock, so that nothing is announced behind our back.
        let mut state = self.inner.lock();
        if let Some(channel) = state.channel.take() {
            channel.forget(id);
        }
        (state.closed, state.depth, state.queue) = (true, 0, VecDeque::new());
        self.inner.count.store(0, Ordering::Release);
        drop(state);
        self.shared.events.forget(|event| *event == AsyncEvent::CqOverflow { cq: id });
    }
}

fn check_depth(depth: usize) -> Result<(), CreateError> {
    check("the depth of the completion queue", depth, DeviceLimits::OURS.max_cq_depth)
}
