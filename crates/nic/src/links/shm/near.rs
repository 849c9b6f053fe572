//! The ring to one peer, as those who build packets see it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ring::{Label, Memory, Trouble, Writer};

/// Packets to a peer on this machine are built in the ring that it reads: no copy in between.
#[derive(Debug)]
pub struct NearRing(Mutex<Writer>);

impl NearRing {
    pub(super) fn new(memory: Memory) -> Self {
        Self(Mutex::new(Writer::new(Arc::new(memory))))
    }

    /// Nobody waits here: whoever sends holds the device.
    pub(super) fn writer(&self) -> MutexGuard<'_, Writer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a packet of `len` bytes may be written; void after the next call, unless that is [`commit`](Self::commit). None where
    /// there is no room.
    #[inline]
    pub(in crate::links) fn reserve(&self, len: usize) -> Option<*mut u8> {
        self.writer().reserve(len).ok()
    }

    /// So many packets have been written there as one. The reader sees them after the next [`publish`](Writer::publish).
    #[inline]
    pub(in crate::links) fn commit(&self, len: usize, packets: u16) {
        self.writer().commit(len, Label { number: packets, sealed: false });
    }

    pub(super) fn push(&self, parts: [&[u8]; 3], label: Label) -> Result<(), Trouble> {
        self.writer().push(parts, label)
    }

    pub(super) fn publish(&self) -> bool {
        self.writer().publish()
    }
}
