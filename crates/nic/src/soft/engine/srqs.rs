//! The shared receive queues of an engine. The engine's lock protects the receives: handling a
//! packet takes it anyway.

use std::collections::VecDeque;
use std::sync::Arc;

use nobounce_protocol::qp::Receive;

use crate::soft::engine::cq_state::CqInner;
use crate::soft::engine::host::PostedReceive;
use crate::soft::engine::scatter::RequestBytes;
use crate::soft::engine::submission::WorkQueueSpace;
use crate::soft::events::event::{AsyncEvent, Events};
use crate::soft::limits::{CreateError, DeviceLimits};
use crate::work::RecvRequest;

impl PostedReceive {
    pub(crate) fn of(request: &RecvRequest<'_>) -> Self {
        let capacity = request.sges.iter().map(|sge| u64::from(sge.len)).sum();
        let receive = Receive { wr_id: request.wr_id, capacity };
        Self { receive, bytes: RequestBytes::of(request.sges) }
    }
}

/// Index of a shared receive queue in its engine's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SrqIndex(usize);

#[derive(Debug)]
pub(crate) struct SrqState {
    pub(crate) id: u32,
    /// The protection domain of its receives' memory.
    pub(crate) pd: u32,
    pub(crate) receives: VecDeque<PostedReceive>,
    pub(crate) room: Arc<WorkQueueSpace>,
    pub(crate) limit: u32,
    /// Number of queue pairs that use it.
    pub(crate) users: usize,
    /// Its owner dropped it; it stays for its users, and is empty.
    pub(crate) closed: bool,
    /// Of an XRC domain: queue pairs of the domain use it by its number.
    pub(crate) xrc: Option<XrcPart>,
}

/// What a shared receive queue of an XRC domain has besides.
#[derive(Clone, Debug)]
pub(crate) struct XrcPart {
    pub(crate) domain: u32,
    /// Where its receives are reported.
    pub(crate) cq: Arc<CqInner>,
}

impl SrqState {
    /// A receive with a reserved place has reached the engine.
    pub(crate) fn admit(&mut self, receive: PostedReceive) {
        self.room.admit();
        if !self.closed {
            self.receives.push_back(receive);
        }
    }

    /// Raises the limit event, once, when fewer receives than the limit are left.
    #[inline]
    pub(crate) fn check_limit(&mut self, events: &Events) {
        if self.limit > 0 && self.receives.len() < self.limit as usize {
            self.limit = 0;
            events.push(AsyncEvent::SrqLimitReached { srq: self.id });
        }
    }
}

/// The shared receive queues of an engine.
#[derive(Debug, Default)]
pub(crate) struct Srqs {
    table: Vec<Option<Box<SrqState>>>,
    free: Vec<usize>,
}

impl Srqs {
    pub(crate) fn insert(&mut self, entry: SrqState) -> Result<SrqIndex, CreateError> {
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
    pub(crate) fn get(&mut self, SrqIndex(index): SrqIndex) -> Option<&mut SrqState> {
        self.table.get_mut(index)?.as_deref_mut()
    }

    /// The open queue of that number in an XRC domain.
    pub(crate) fn find_xrc(&self, number: u32, domain: u32) -> Option<SrqIndex> {
        let is_it = |entry: &SrqState| {
            entry.id == number && !entry.closed && entry.xrc.as_ref().is_some_and(|xrc| xrc.domain == domain)
        };
        self.table.iter().position(|entry| entry.as_deref().is_some_and(is_it)).map(SrqIndex)
    }

    /// Attaches a queue pair; returns the protection domain of the receives' memory.
    pub(crate) fn join(&mut self, index: SrqIndex) -> Option<u32> {
        let entry = self.get(index)?;
        entry.users += 1;
        Some(entry.pd)
    }

    /// Detaches a queue pair.
    pub(crate) fn leave(&mut self, index: SrqIndex) {
        if let Some(entry) = self.get(index) {
            entry.users -= 1;
            self.remove_unused(index);
        }
    }

    /// A receive was taken for a message that stays incomplete and has no completion: the next
    /// message may use it.
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

    /// Publishes the free places to posters.
    #[inline]
    pub(crate) fn publish_room(&mut self, index: SrqIndex) {
        if let Some(entry) = self.get(index) {
            entry.room.publish(entry.receives.len());
        }
    }

    /// Its owner drops it.
    pub(crate) fn close(&mut self, index: SrqIndex) {
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
