//! Completion queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nobounce_memory::barrier;
use nobounce_protocol::qp::{Completion, Status, WorkKind};
use nobounce_protocol::wire::Qpn;

use super::channel::Channel;
use super::device::Shared;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<WorkCompletion>,
    armed: Armed,
}

#[derive(Debug)]
pub(crate) struct CqInner {
    pub(crate) id: u32,
    depth: usize,
    channel: Option<Channel>,
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
        if state.queue.len() >= self.depth {
            let known = self.overflowed.swap(true, Ordering::Relaxed);
            // Whoever sleeps until something comes must learn that it never will.
            if !known && let Some(channel) = &self.channel {
                channel.fd.raise();
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
        });
        self.count.store(state.queue.len(), Ordering::Release);
        if state.armed == Armed::Any || (state.armed == Armed::Solicited && urgent) {
            state.armed = Armed::No;
            if let Some(channel) = &self.channel {
                channel.fd.raise();
            }
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

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    shared: Arc<Shared>,
    pub(crate) inner: Arc<CqInner>,
}

impl Cq {
    pub(crate) fn new(shared: Arc<Shared>, id: u32, depth: usize, channel: Option<Channel>) -> Self {
        let state = State { queue: VecDeque::new(), armed: Armed::No };
        Self {
            shared,
            inner: Arc::new(CqInner {
                id,
                depth,
                channel,
                count: AtomicUsize::new(0),
                overflowed: AtomicBool::new(false),
                state: Mutex::new(state),
            }),
        }
    }

    /// Its number in events.
    pub fn id(&self) -> u32 {
        self.inner.id
    }

    /// How many completions it holds.
    pub fn depth(&self) -> usize {
        self.inner.depth
    }

    /// Takes at most `max` completions, appends them to `out`, and returns how many. An empty queue first
    /// drives the device.
    ///
    /// # Errors
    /// The queue overflowed (after what it still held was taken), or the process forked.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> Result<usize, CqError> {
        // First of all: the thread that held the queue's lock may not exist in a forked child.
        if self.shared.is_forked() {
            return Err(CqError::Forked);
        }
        let taken = self.take(out, max);
        if taken > 0 || max == 0 {
            return Ok(taken);
        }
        self.shared.drive_polled();
        let taken = self.take(out, max);
        if taken == 0 && self.inner.overflowed.load(Ordering::Relaxed) {
            return Err(CqError::Overflow { depth: self.inner.depth });
        }
        Ok(taken)
    }

    fn take(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        if self.inner.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut state = self.inner.lock();
        let count = max.min(state.queue.len());
        out.extend(state.queue.drain(..count));
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
