//! Shared receive queues: receives that several queue pairs take from.
//!
//! The receives lie in the engine, behind the lock that whoever handles a packet holds anyway.

use std::collections::VecDeque;
use std::sync::Arc;

use nobounce_protocol::qp::{PostError, QpState, Receive};

use super::device::{Pd, PdUse, Shared};
use super::event::{AsyncEvent, Events};
use super::host::PostedReceive;
use super::limits::{CreateError, DeviceLimits, Taken, check};
use super::progress::handle::{EngineHandle, Resident};
use super::progress::submission::{Room, Submission};
use super::qp::RecvRequest;
use super::scatter::Bytes;

/// How large a shared receive queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqLimits {
    /// Receives outstanding.
    pub depth: usize,
    /// Elements of a receive's scatter list.
    pub sges: usize,
}

/// Why a shared receive queue could not be made.
pub type CreateSrqError = CreateError;

/// Why a shared receive queue's limit could not be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SrqLimitError {
    /// It could never hold that many.
    #[error("the limit is {asked}; the shared receive queue holds at most {depth} receives")]
    #[allow(missing_docs)]
    Depth { asked: u32, depth: usize },
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

/// A shared receive queue. Queue pairs that use it when it is dropped find it empty from then on.
#[derive(Debug)]
pub struct Srq {
    shared: Arc<Shared>,
    /// Where it lives, and its queue pairs with it.
    handle: Resident,
    _taken: Taken,
    pub(crate) index: SrqIndex,
    id: u32,
    limits: SrqLimits,
    room: Arc<Room>,
    _pd: Arc<PdUse>,
}

impl Srq {
    pub(crate) fn create(pd: &Pd, limits: SrqLimits) -> Result<Self, CreateSrqError> {
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
        let handle = shared.engines.choose(false).map_err(|_| CreateError::Forked)?.settle_in(false);
        let id = shared.next_id();
        let room = Arc::<Room>::default();
        let entry = SrqEntry {
            id,
            pd: pd.id,
            receives: VecDeque::new(),
            room: room.clone(),
            limit: 0,
            users: 0,
            closed: false,
        };
        let index = handle.lock().ok_or(CreateError::Forked)?.core.srqs.insert(entry)?;
        Ok(Self { shared, handle, _taken: taken, index, id, limits, room, _pd: pd.in_use() })
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
    pub fn limits(&self) -> &SrqLimits {
        &self.limits
    }

    /// Whether queue pairs use it: a program that destroys it now makes a mistake.
    pub fn is_busy(&self) -> bool {
        self.with(|entry, _| entry.users > 0).unwrap_or(false)
    }

    /// The limit that is set; 0 when none is, or when it was reached.
    pub fn limit(&self) -> u32 {
        self.with(|entry, _| entry.limit).unwrap_or(0)
    }

    /// Asks for one [`AsyncEvent::SrqLimitReached`] when fewer than `limit` receives are left (at once, if that is so now); 0
    /// takes it back.
    ///
    /// # Errors
    /// The limit is larger than the queue.
    pub fn set_limit(&self, limit: u32) -> Result<(), SrqLimitError> {
        let depth = self.limits.depth;
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
        if request.sges.len() > self.limits.sges {
            return Err(PostError::TooManySges { given: request.sges.len(), max: self.limits.sges });
        }
        if self.shared.is_forked() {
            return Err(PostError::State(QpState::Error));
        }
        if !self.room.take(1, self.limits.depth) {
            return Err(PostError::QueueFull(self.limits.depth));
        }
        let mut receive = PostedReceive::of(request);
        if self.handle.has_submissions() {
            match self.handle.submit(Submission::SharedReceive { srq: self.index, receive }) {
                Ok(()) => return Ok(()), // no packet waits for it: the engine looks here when it needs one
                Err(Submission::SharedReceive { receive: back, .. }) => receive = back,
                Err(_) => return Err(PostError::State(QpState::Error)),
            }
        }
        self.with(|entry, _| entry.admit(receive)).ok_or(PostError::State(QpState::Error))
    }

    fn with<T>(&self, then: impl FnOnce(&mut SrqEntry, &Events) -> T) -> Option<T> {
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

impl PostedReceive {
    pub(crate) fn of(request: &RecvRequest<'_>) -> Self {
        let capacity = request.sges.iter().map(|sge| u64::from(sge.len)).sum();
        let receive = Receive { wr_id: request.wr_id, capacity };
        Self { receive, bytes: Bytes::of(request.sges) }
    }
}

/// Where a shared receive queue is in the device's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SrqIndex(usize);

#[derive(Debug)]
pub(crate) struct SrqEntry {
    id: u32,
    /// The domain that its receives' memory must belong to.
    pub(crate) pd: u32,
    pub(crate) receives: VecDeque<PostedReceive>,
    room: Arc<Room>,
    limit: u32,
    /// Queue pairs that take from it.
    users: usize,
    /// Its owner has gone; it stays for its users, and is empty.
    closed: bool,
}

impl SrqEntry {
    /// A receive that has a place has reached the engine.
    pub(crate) fn admit(&mut self, receive: PostedReceive) {
        self.room.admit();
        if !self.closed {
            self.receives.push_back(receive);
        }
    }

    /// Announces, once, that fewer receives are left than the limit says.
    #[inline]
    fn check_limit(&mut self, events: &Events) {
        if self.limit > 0 && self.receives.len() < self.limit as usize {
            self.limit = 0;
            events.push(AsyncEvent::SrqLimitReached { srq: self.id });
        }
    }
}

/// The shared receive queues of a device.
#[derive(Debug, Default)]
pub(crate) struct Srqs {
    table: Vec<Option<Box<SrqEntry>>>,
    free: Vec<usize>,
}

impl Srqs {
    fn insert(&mut self, entry: SrqEntry) -> Result<SrqIndex, CreateError> {
        let max = DeviceLimits::OURS.max_srqs;
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.table.len() < max => {
                self.table.push(None);
                self.table.len() - 1
            }
            None => return Err(CreateError::TooMany { name: "shared receive queues", max }),
        };
        self.table[index] = Some(Box::new(entry));
        Ok(SrqIndex(index))
    }

    #[inline]
    pub(crate) fn get(&mut self, SrqIndex(index): SrqIndex) -> Option<&mut SrqEntry> {
        self.table.get_mut(index)?.as_deref_mut()
    }

    /// A queue pair takes its receives there from now on; the domain of their memory.
    pub(crate) fn join(&mut self, index: SrqIndex) -> Option<u32> {
        let entry = self.get(index)?;
        entry.users += 1;
        Some(entry.pd)
    }

    /// A queue pair goes.
    pub(crate) fn leave(&mut self, index: SrqIndex) {
        if let Some(entry) = self.get(index) {
            entry.users -= 1;
            self.remove_unused(index);
        }
    }

    /// A receive was taken for a message that will never be complete, and nobody will hear of it: the next one may have it.
    pub(crate) fn give_back(&mut self, index: SrqIndex, receive: PostedReceive) {
        if let Some(entry) = self.get(index)
            && !entry.closed
        {
            entry.receives.push_front(receive);
        }
    }

    /// Receives were taken.
    #[inline]
    pub(crate) fn check_limit(&mut self, index: SrqIndex, events: &Events) {
        if let Some(entry) = self.get(index) {
            entry.check_limit(events);
        }
    }

    /// Tells posters what room there is.
    #[inline]
    pub(crate) fn publish_room(&mut self, index: SrqIndex) {
        if let Some(entry) = self.get(index) {
            entry.room.publish(entry.receives.len());
        }
    }

    fn close(&mut self, index: SrqIndex) {
        if let Some(entry) = self.get(index) {
            entry.closed = true;
            entry.limit = 0;
            entry.receives = VecDeque::new();
            self.remove_unused(index);
        }
    }

    fn remove_unused(&mut self, SrqIndex(index): SrqIndex) {
        if self.table[index].as_ref().is_some_and(|entry| entry.closed && entry.users == 0) {
            self.table[index] = None;
            self.free.push(index);
        }
    }
}
