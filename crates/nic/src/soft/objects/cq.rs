//! Completion queues.

use std::sync::Arc;

use crate::soft::engine::cq_state::CqInner;
use crate::soft::events::event::AsyncEvent;
use crate::soft::limits::{CountGuard, CreateError, DeviceLimits, check};
use crate::soft::objects::channel::Channel;
use crate::soft::objects::device::Shared;
use crate::soft::progress::mode::Mode;
use crate::soft::progress::set::CqUsers;
use crate::work::WorkCompletion;

/// Why a completion queue cannot be polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CqError {
    /// More requests completed than fit.
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

/// Why a completion queue could not be resized. It is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The depth is out of range.
    #[error(transparent)]
    Depth(#[from] CreateError),
    /// Existing completions would be lost.
    #[error("the completion queue holds {held} completions and cannot shrink to {asked} entries: poll first")]
    #[allow(missing_docs)]
    Holds { held: usize, asked: usize },
    /// It has already lost some.
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

/// A completion queue. Queue pairs that still use it after it is dropped continue without
/// completions.
#[derive(Debug)]
pub struct Cq {
    shared: Arc<Shared>,
    pub(crate) inner: Arc<CqInner>,
    /// The engines whose queue pairs use it.
    pub(crate) users: Arc<CqUsers>,
    channel: Option<Channel>,
    _taken: CountGuard,
}

impl Cq {
    pub(crate) fn create(
        shared: &Arc<Shared>,
        depth: usize,
        channel: Option<&Channel>,
    ) -> Result<Self, CreateError> {
        check_depth(depth)?;
        let taken = shared.counts.cqs.take("completion queues", DeviceLimits::OURS.max_cqs)?;
        let inner =
            Arc::new(CqInner::new(shared.next_id(), depth, channel.map(|channel| channel.events.clone())));
        Ok(Self {
            shared: shared.clone(),
            inner,
            users: Arc::default(),
            channel: channel.cloned(),
            _taken: taken,
        })
    }

    /// Records when requests complete, from now on ([`WorkCompletion::timestamp`]).
    pub fn record_time(&self) {
        self.inner.record_time();
    }

    /// Its number in events.
    pub fn id(&self) -> u32 {
        self.inner.id
    }

    /// Whether it belongs to this device.
    pub(crate) fn is_of(&self, device: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, device)
    }

    /// How many completions it holds at most.
    pub fn depth(&self) -> usize {
        if self.shared.is_forked() { 0 } else { self.inner.depth() }
    }

    /// Whether queue pairs use it: destroying it now is a program error.
    pub fn is_busy(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Changes the depth. Existing completions stay.
    ///
    /// # Errors
    /// It holds more completions than that, it has lost some already, or the depth is out of range.
    pub fn resize(&self, depth: usize) -> Result<(), ResizeError> {
        check_depth(depth)?;
        if self.shared.is_forked() {
            return Err(CreateError::Forked.into());
        }
        if self.inner.is_overflowed() {
            return Err(ResizeError::Overflowed);
        }
        self.inner.resize(depth).map_err(|held| ResizeError::Holds { held, asked: depth })
    }

    /// Takes at most `max` completions, appends them to `out`, and returns how many. If the caller
    /// drives the device ([`Progress::Caller`](crate::soft::Progress)), an empty queue does so
    /// first. A caller that polls for longer than a round trip sleeps for some microseconds.
    ///
    /// # Errors
    /// The queue overflowed (after all remaining completions were taken), or the process forked.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> Result<usize, CqError> {
        self.poll_each(max, |completion| out.push(completion))
    }

    /// As [`poll`](Self::poll), passing each completion to `each`.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    #[inline]
    pub fn poll_each(&self, max: usize, each: impl FnMut(WorkCompletion)) -> Result<usize, CqError> {
        self.poll_driving(max, each, true)
    }

    /// As [`poll`](Self::poll), for a thread that has more to watch than this queue: it never
    /// sleeps.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    #[inline]
    pub fn poll_awake(&self, out: &mut Vec<WorkCompletion>, max: usize) -> Result<usize, CqError> {
        self.poll_driving(max, |completion| out.push(completion), false)
    }

    #[inline]
    fn poll_driving(
        &self,
        max: usize,
        mut each: impl FnMut(WorkCompletion),
        may_sleep: bool,
    ) -> Result<usize, CqError> {
        if self.shared.is_forked() {
            return Err(CqError::Forked);
        }
        let taken = self.inner.take(max, &mut each);
        if taken > 0 || max == 0 {
            return Ok(taken);
        }
        if self.shared.engines.mode() == Mode::Caller {
            // A caller that has armed the queue polls once more before it sleeps: that poll does
            // not count.
            let is_attention = !self.inner.is_armed();
            let sleeps = self.shared.engines.drive_polled(&self.users, is_attention);
            if let Some(until) = sleeps.filter(|_| may_sleep && is_attention && self.inner.is_empty()) {
                self.shared.engines.sleep_polled(&self.users, until);
            }
        }
        let taken = self.inner.take_unless_lost(max, &mut each);
        taken.ok_or_else(|| CqError::Overflow { depth: self.depth() })
    }

    /// The caller will not poll for a while, and waits for no event: the engine thread drives the
    /// device meanwhile.
    pub fn pause_polling(&self) {
        self.shared.engines.expect_sleep(&self.users);
    }

    /// Raises one event on the channel at the next completion (or the next solicited or failed
    /// one).
    ///
    /// As with every NIC, poll once more after arming: earlier completions raise no event.
    pub fn request_notify(&self, solicited_only: bool) {
        if self.shared.is_forked() {
            return;
        }
        self.inner.arm(solicited_only);
        if !self.channel.as_ref().is_some_and(Channel::will_block) {
            self.shared.engines.expect_sleep(&self.users);
        }
    }
}

impl Cq {
    /// Takes back [`request_notify`](Self::request_notify): the caller polls again. Completions
    /// since may have raised an event.
    pub fn cancel_notify(&self) {
        if !self.shared.is_forked() {
            self.inner.disarm();
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            return;
        }
        let id = self.inner.id;
        self.inner.close();
        self.shared.events.forget(|event| *event == AsyncEvent::CqOverflow { cq: id });
    }
}

fn check_depth(depth: usize) -> Result<(), CreateError> {
    check("the depth of the completion queue", depth, DeviceLimits::OURS.max_cq_depth)
}
