//! The queue pairs of an engine, and the allocation of their numbers.

use std::collections::VecDeque;

use nobounce_protocol::wire::Qpn;

use crate::links::slot_of;
use crate::process::random::random_u32;
use crate::soft::engine::multicast::Groups;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::limits::MAX_QPS;
use crate::soft::qp_index::QpIndex;

/// The first queue pair's index is random among this many: all that a device has, but for the
/// management queue pairs.
const FIRST_INDEXES: u32 = (1 << 16) - 2;

/// The queue pairs of an engine.
#[derive(Debug)]
pub(crate) struct QpTable {
    /// The slot of this device, which all their numbers have.
    slot: u8,
    places: Vec<Option<Box<QueuePair>>>,
    /// Places without a queue pair, the one released last at the end.
    free: VecDeque<QpIndex>,
    /// Those attached to multicast groups.
    pub(crate) groups: Groups,
}

impl QpTable {
    pub(crate) const fn new(slot: u8) -> Self {
        Self { slot, places: Vec::new(), free: VecDeque::new(), groups: Groups::new() }
    }

    /// The link has another slot now.
    pub(crate) const fn set_slot(&mut self, slot: u8) {
        self.slot = slot;
    }

    /// Whether a number is one of this device.
    #[inline]
    pub(crate) const fn owns(&self, qpn: Qpn) -> bool {
        slot_of(qpn) == self.slot
    }

    /// The number of the queue pair with that index.
    pub(crate) const fn qpn(&self, index: QpIndex) -> Qpn {
        index.qpn(self.slot)
    }

    #[inline]
    pub(crate) fn get(&self, index: QpIndex) -> Option<&QueuePair> {
        self.places.get(usize::from(index.get()))?.as_deref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: QpIndex) -> Option<&mut QueuePair> {
        self.places.get_mut(usize::from(index.get()))?.as_deref_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &QueuePair> {
        self.places.iter().filter_map(Option::as_deref)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut QueuePair> {
        self.places.iter_mut().filter_map(Option::as_deref_mut)
    }

    /// The index of every place; it may be free.
    pub(crate) fn indexes(&self) -> impl Iterator<Item = QpIndex> + use<> {
        (0..=u16::MAX).take(self.places.len()).map(QpIndex::new)
    }

    /// The same in round-robin order, beginning behind that one.
    pub(crate) fn indexes_behind(&self, cursor: QpIndex) -> impl Iterator<Item = QpIndex> + use<> {
        let all = self.indexes();
        let behind = self.indexes().skip(usize::from(cursor.get()) + 1);
        behind.chain(all.take(usize::from(cursor.get()) + 1))
    }

    /// A free index, not one that was released just now.
    pub(crate) fn allocate(&mut self) -> Option<QpIndex> {
        if self.places.len() < MAX_QPS {
            if self.places.is_empty() {
                self.skip_indexes();
            }
            let index = QpIndex::new(u16::try_from(self.places.len()).ok()?);
            self.places.push(None);
            return Some(index);
        }
        self.free.pop_front()
    }

    /// The first index of a device is random: forged packets must guess it. Peers of a process that
    /// is gone may go on sending to its queue pairs. (The kernel's RoCE does so forever with a
    /// retry count of 7.) Those packets must not reach the next process's queue pairs. Skipped
    /// indexes are allocated last. Indexes 0 and 1 are the management queue pairs.
    fn skip_indexes(&mut self) {
        let first = 2 + u16::try_from(random_u32() % FIRST_INDEXES).unwrap_or(0);
        self.places.extend((0..first).map(|_| None));
        self.free.extend((2..first).map(QpIndex::new));
    }

    /// Puts a new queue pair at an allocated index.
    pub(crate) fn insert(&mut self, index: QpIndex, entry: QueuePair) {
        if let Some(place) = self.places.get_mut(usize::from(index.get())) {
            *place = Some(Box::new(entry));
        }
    }

    /// Takes out a queue pair; its index is free.
    pub(crate) fn remove(&mut self, index: QpIndex) -> Option<Box<QueuePair>> {
        let entry = self.places.get_mut(usize::from(index.get()))?.take()?;
        self.free.push_back(index);
        Some(entry)
    }
}
