//! Shared receive queues: several queue pairs take receives from one.
//!
//! The engine's lock protects the receives: handling a packet takes it anyway.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nobounce_protocol::qp::{PostError, QpState};

use crate::soft::engine::host::PostedReceive;
use crate::soft::engine::srqs::{SrqIndex, SrqState, XrcPart};
use crate::soft::engine::submission::{Submission, WorkQueueSpace};
use crate::soft::events::event::{AsyncEvent, Events};
use crate::soft::limits::{CountGuard, CreateError, DeviceLimits, check};
use crate::soft::objects::cq::Cq;
use crate::soft::objects::device::{Pd, PdUse, Shared};
use crate::soft::objects::xrc::XrcDomain;
use crate::soft::progress::handle::{EngineHandle, Resident};
use crate::soft::progress::set::CqUse;
use crate::work::RecvRequest;

/// Size of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqLimits {
    /// Receives outstanding.
    pub depth: usize,
    /// Elements of a receive's scatter list.
    pub sges: usize,
}

/// Why a shared receive queue could not be created.
pub type CreateSrqError = CreateError;

/// Why a shared receive queue's limit could not be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SrqLimitError {
    /// The limit exceeds the depth.
    #[error("the limit is {asked}; the shared receive queue holds at most {depth} receives")]
    #[allow(missing_docs)]
    Depth { asked: u32, depth: usize },
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

/// Why a shared receive queue could not be resized. It is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SrqResizeError {
    /// The depth is out of range.
    #[error(transparent)]
    Depth(#[from] CreateError),
    /// Receives would be lost.
    #[error(
        "the shared receive queue holds {held} receives, or has that limit, and cannot shrink to {asked}"
    )]
    #[allow(missing_docs)]
    Holds { held: usize, asked: usize },
}

/// A shared receive queue. Queue pairs that still use it after it is dropped find it empty.
#[derive(Debug)]
pub struct Srq {
    shared: Arc<Shared>,
    /// Its engine, which is also that of its queue pairs.
    handle: Resident,
    _taken: CountGuard,
    pub(crate) index: SrqIndex,
    id: u32,
    sges: usize,
    depth: AtomicUsize,
    room: Arc<WorkQueueSpace>,
    _pd: Arc<PdUse>,
    /// Its use of an XRC domain and a completion queue.
    _xrc: Option<(Arc<()>, CqUse)>,
}

impl Srq {
    pub(crate) fn create(pd: &Pd, limits: SrqLimits) -> Result<Self, CreateSrqError> {
        Self::create_in(pd, limits, None)
    }

    /// Creates one, of an XRC domain or not.
    pub(crate) fn create_in(
        pd: &Pd,
        limits: SrqLimits,
        xrc: Option<(&XrcDomain, &Cq)>,
    ) -> Result<Self, CreateSrqError> {
        let most = DeviceLimits::OURS;
        check("the depth of the shared receive queue", limits.depth, most.max_srq_depth)?;
        if limits.sges > most.max_sges {
            let name = "the number of scatter/gather elements";
            return Err(CreateError::Limit { name, asked: limits.sges, max: most.max_sges });
        }
        let shared = pd.device.shared.clone();
        if shared.is_forked() {
            return Err(CreateError::Forked);
        }
        let taken = shared.counts.srqs.take("shared receive queues", most.max_srqs)?;
        let handle = match xrc {
            Some(_) => shared.engines.first().clone(),
            None => shared.engines.choose(false).map_err(|_| CreateError::Forked)?,
        };
        let handle = handle.settle_in(false);
        let id = shared.next_id();
        let room = Arc::<WorkQueueSpace>::default();
        let entry = SrqState {
            id,
            pd: pd.id,
            receives: VecDeque::new(),
            room: room.clone(),
            limit: 0,
            users: 0,
            closed: false,
            xrc: xrc.map(|(domain, cq)| XrcPart { domain: domain.id, cq: cq.inner.clone() }),
        };
        let index = handle.lock().ok_or(CreateError::Forked)?.core.srqs.insert(entry)?;
        let (sges, depth) = (limits.sges, AtomicUsize::new(limits.depth));
        let xrc_uses = xrc.map(|(domain, cq)| (domain.in_use(), cq.users.join(&handle)));
        let _pd = pd.in_use();
        Ok(Self { shared, handle, _taken: taken, index, id, sges, depth, room, _pd, _xrc: xrc_uses })
    }

    pub(crate) fn handle(&self) -> &Arc<EngineHandle> {
        &self.handle
    }

    /// Its number in events.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether it belongs to this device.
    pub(crate) fn is_of(&self, device: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, device)
    }

    /// Its limits.
    pub fn limits(&self) -> SrqLimits {
        SrqLimits { depth: self.depth(), sges: self.sges }
    }

    fn depth(&self) -> usize {
        self.depth.load(Ordering::Relaxed)
    }

    /// Changes the depth. Receives in the queue stay.
    ///
    /// # Errors
    /// It holds more receives than that, its armed limit is larger, or the depth is out of range.
    pub fn resize(&self, depth: usize) -> Result<(), SrqResizeError> {
        check("the depth of the shared receive queue", depth, DeviceLimits::OURS.max_srq_depth)?;
        let changed = self.with(|entry, _| {
            // Posters that reserve a place meanwhile use the old depth or the new one.
            let held = entry.receives.len().max(entry.limit as usize);
            if held <= depth {
                self.depth.store(depth, Ordering::Relaxed);
            }
            held
        });
        match changed {
            Some(held) if held > depth => Err(SrqResizeError::Holds { held, asked: depth }),
            Some(_) => Ok(()),
            None => Err(CreateError::Forked.into()),
        }
    }

    /// Whether queue pairs use it: destroying it now is a program error.
    pub fn is_busy(&self) -> bool {
        self.with(|entry, _| entry.users > 0).unwrap_or(false)
    }

    /// The armed limit; 0 if none is armed, or after it was reached.
    pub fn limit(&self) -> u32 {
        self.with(|entry, _| entry.limit).unwrap_or(0)
    }

    /// Arms one [`AsyncEvent::SrqLimitReached`] for when fewer than `limit` receives are left (at
    /// once, if that is so now). 0 disarms it.
    ///
    /// # Errors
    /// The limit is larger than the queue.
    pub fn set_limit(&self, limit: u32) -> Result<(), SrqLimitError> {
        let depth = self.depth();
        if usize::try_from(limit).is_ok_and(|limit| limit > depth) {
            return Err(SrqLimitError::Depth { asked: limit, depth });
        }
        self.with(|entry, events| {
            entry.limit = limit;
            entry.check_limit(events);
        })
        .ok_or(SrqLimitError::Forked)
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// The queue is full, or the list too long.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        if request.sges.len() > self.sges {
            return Err(PostError::TooManySges { given: request.sges.len(), max: self.sges });
        }
        if self.shared.is_forked() {
            return Err(PostError::State(QpState::Error));
        }
        let depth = self.depth();
        if !self.room.take(1, depth) {
            return Err(PostError::QueueFull(depth));
        }
        let mut receive = PostedReceive::of(request);
        if self.handle.has_submissions() {
            match self.handle.submit(Submission::SharedReceive { srq: self.index, receive }) {
                Ok(()) => return Ok(()), // the engine drains the queue when it needs a receive
                Err(Submission::SharedReceive { receive: back, .. }) => receive = back,
                Err(_) => return Err(PostError::State(QpState::Error)),
            }
        }
        self.with(|entry, _| entry.admit(receive)).ok_or(PostError::State(QpState::Error))
    }

    fn with<T>(&self, then: impl FnOnce(&mut SrqState, &Events) -> T) -> Option<T> {
        let mut engine = self.handle.lock()?;
        engine.core.srqs.get(self.index).map(|entry| then(entry, &self.shared.events))
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        let Some(mut engine) = self.handle.lock() else { return };
        engine.core.srqs.close(self.index);
        drop(engine);
        self.shared.events.forget(|event| *event == AsyncEvent::SrqLimitReached { srq: self.id });
    }
}
