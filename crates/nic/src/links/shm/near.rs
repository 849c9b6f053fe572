//! The ring to one peer, as those who build packets see it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nobounce_memory::gpu::copy_engine::PinnedChunk;

use super::super::batch::MAX_PACKET;
use super::lent::Lent;
use super::ring::{Elsewhere, Label, Memory, Trouble, Writer};
use crate::soft::fork::NotInherited;

/// Packets to a peer on this machine are built in the ring that it reads: no copy in between. What the GPU's copy engine fetched does
/// not even go there: the peer reads it from where it lies.
#[derive(Debug)]
pub struct NearRing(Mutex<Ends>);

/// Bytes from which on it is worth while to let the reader know at once.
const LONG: usize = 4096;

/// Most bytes of payload that travel as one: they are read and placed while the next ones are written.
const MOST_OF_A_RUN: usize = 16 << 10;
/// The same for a reader that has so much to read already that it waits for nothing. It is the slower end of a long stream, and pays for each
/// piece: with 16 KiB it spent 25 to 31 % of its time on everything but the copy.
const MOST_FOR_A_BUSY_READER: usize = 60 << 10;
const BUSY_READER: u64 = 64 << 10;

const _: () = assert!(MOST_FOR_A_BUSY_READER + 64 <= MAX_PACKET);

#[derive(Debug)]
pub(super) struct Ends {
    writer: Writer,
    lent: Lent,
}

impl NearRing {
    pub(super) fn new(memory: Memory, connection: Arc<NotInherited>) -> Self {
        Self(Mutex::new(Ends { writer: Writer::new(Arc::new(memory)), lent: Lent::new(connection) }))
    }

    /// Nobody waits here: whoever sends holds the device.
    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a packet of `len` bytes may be written; void after the next call, unless that is [`commit`](Self::commit). None where
    /// there is no room.
    #[inline]
    pub(in crate::links) fn reserve(&self, len: usize) -> Option<*mut u8> {
        self.ends().writer.reserve(len).ok()
    }

    /// So many packets have been written there as one. The reader sees them after the next [`publish`](Writer::publish); long ones at once,
    /// so that it copies while the next are written.
    #[inline]
    pub(in crate::links) fn commit(&self, len: usize, packets: u16) {
        let writer = &mut self.ends().writer;
        writer.commit(len, Label { number: packets, sealed: false });
        if len >= LONG {
            writer.show();
        }
    }

    /// Where the reader finds the byte at `at` of a chunk, if it may be shown that chunk now.
    pub(in crate::links) fn lend(&self, chunk: &PinnedChunk, at: usize) -> Option<(u8, u32)> {
        let Ends { writer, lent } = &mut *self.ends();
        lent.show(writer, chunk, at)
    }

    /// As [`commit`](Self::commit), for headers of `len` bytes whose payload lies in a chunk that was [lent](Self::lend).
    pub(in crate::links) fn commit_lent(
        &self,
        (len, packets): (usize, u16),
        (file, offset): (u8, u32),
        behind: u32,
        chunk: PinnedChunk,
    ) {
        let Ends { writer, lent } = &mut *self.ends();
        writer.commit_elsewhere(len, packets, Elsewhere { file, offset, len: behind });
        lent.hold(chunk, writer.position());
        writer.show();
    }

    /// Most bytes of payload that are to travel as one now.
    pub(crate) fn longest_run(&self) -> usize {
        let writer = &self.ends().writer;
        // A reader that tells what cannot be gets its packets in other pieces, nothing else.
        let unread = writer.position().saturating_sub(writer.read_up_to());
        if unread < BUSY_READER { MOST_OF_A_RUN } else { MOST_FOR_A_BUSY_READER }
    }

    /// Takes back what the reader has read.
    pub(super) fn take_back(&self) {
        let Ends { writer, lent } = &mut *self.ends();
        lent.take_back(writer);
    }

    pub(super) fn push(&self, parts: [&[u8]; 3], label: Label) -> Result<(), Trouble> {
        self.ends().writer.push(parts, label)
    }

    pub(super) fn publish(&self) -> bool {
        self.ends().writer.publish()
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.lent.part(&self.writer);
    }
}
