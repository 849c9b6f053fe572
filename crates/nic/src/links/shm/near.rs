//! The ring to one peer, as those who build packets see it.

use std::cell::UnsafeCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use nobounce_memory::gpu::copy_engine::PinnedChunk;

use super::super::batch::MAX_PACKET;
use super::lent::Lent;
use super::ring::{self, Elsewhere, Label, Memory, Trouble, Writer};
use crate::process::fork::NotInherited;

/// Packets to a peer on this machine are built in the ring that it reads: no copy in between. What the GPU's copy engine fetched does
/// not even go there: the peer reads it from where it lies.
///
/// Whoever writes `hold`s it, for a whole batch: a lock for each packet, and each step of it, would make the processor wait every time
/// until its stores have reached memory that the peer's processor has (70 ns of a message of 8 bytes). Nobody waits for it: those who send hold the engine.
pub struct NearRing {
    held: AtomicBool,
    /// Where the next packet will be written.
    next: AtomicPtr<u8>,
    ends: UnsafeCell<Ends>,
}

// SAFETY: what is inside is reached through a `Hold` only, of which there is one at a time.
unsafe impl Sync for NearRing {}

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
        let ends = Ends { writer: Writer::new(Arc::new(memory)), lent: Lent::new(connection) };
        let next = AtomicPtr::new(ends.writer.next());
        Self { held: AtomicBool::new(false), next, ends: UnsafeCell::new(ends) }
    }

    /// Something is going to be written. The reader has had the lines, a lap ago: they come while packets are thought about.
    #[inline]
    pub(crate) fn expect(&self) {
        ring::fetch_to_write(self.next.load(Ordering::Relaxed));
    }

    /// Its writing end, unless somebody has it.
    pub(in crate::links) fn hold(self: &Arc<Self>) -> Option<Hold> {
        let free = !self.held.swap(true, Ordering::Acquire);
        free.then(|| Hold(Arc::clone(self)))
    }
}

impl fmt::Debug for NearRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NearRing").field("held", &self.held).finish_non_exhaustive()
    }
}

/// The writing end of a ring, until this is dropped.
#[derive(Debug)]
pub(in crate::links) struct Hold(Arc<NearRing>);

impl Hold {
    pub(in crate::links) fn is_of(&self, ring: &Arc<NearRing>) -> bool {
        Arc::ptr_eq(&self.0, ring)
    }

    #[inline]
    fn ends(&mut self) -> &mut Ends {
        // SAFETY: there is no other hold, and this one is borrowed as long as what is inside.
        unsafe { &mut *self.0.ends.get() }
    }

    /// Where a packet of `len` bytes may be written; void after the next call, unless that is [`commit`](Self::commit). None where
    /// there is no room.
    #[inline]
    pub(in crate::links) fn reserve(&mut self, len: usize) -> Option<*mut u8> {
        self.ends().writer.reserve(len).ok()
    }

    /// So many packets have been written there as one. The reader sees them after the next [`show`](Self::show); long ones at once,
    /// so that it copies while the next are written.
    #[inline]
    pub(in crate::links) fn commit(&mut self, len: usize, packets: u16) {
        let writer = &mut self.ends().writer;
        writer.commit(len, Label { number: packets, sealed: false });
        if len >= LONG {
            writer.show();
        }
    }

    /// Lets a reader that looks see what was written.
    #[inline]
    pub(in crate::links) fn show(&mut self) {
        self.ends().writer.show();
    }

    /// The same; whether it wants to be woken.
    pub(super) fn publish(&mut self) -> bool {
        self.ends().writer.publish()
    }

    /// Where the reader finds the byte at `at` of a chunk, if it may be shown that chunk now.
    pub(in crate::links) fn lend(&mut self, chunk: &PinnedChunk, at: usize) -> Option<(u8, u32)> {
        let Ends { writer, lent } = self.ends();
        lent.show(writer, chunk, at)
    }

    /// As [`commit`](Self::commit), for headers of `len` bytes whose payload lies in a chunk that was [lent](Self::lend).
    pub(in crate::links) fn commit_lent(
        &mut self,
        (len, packets): (usize, u16),
        (file, offset): (u8, u32),
        behind: u32,
        chunk: PinnedChunk,
    ) {
        let Ends { writer, lent } = self.ends();
        writer.commit_elsewhere(len, packets, Elsewhere { file, offset, len: behind });
        lent.hold(chunk, writer.position());
        writer.show();
    }

    /// Most bytes of payload that are to travel as one now.
    pub(in crate::links) fn longest_run(&mut self) -> usize {
        let writer = &self.ends().writer;
        // A reader that tells what cannot be gets its packets in other pieces, nothing else.
        let unread = writer.position().saturating_sub(writer.read_up_to());
        if unread < BUSY_READER { MOST_OF_A_RUN } else { MOST_FOR_A_BUSY_READER }
    }

    /// Takes back what the reader has read.
    pub(super) fn take_back(&mut self) {
        let Ends { writer, lent } = self.ends();
        lent.take_back(writer);
    }

    pub(super) fn push(&mut self, parts: [&[u8]; 3], label: Label) -> Result<(), Trouble> {
        self.ends().writer.push(parts, label)
    }
}

impl Drop for Hold {
    #[inline]
    fn drop(&mut self) {
        let next = self.ends().writer.next();
        self.0.next.store(next, Ordering::Relaxed);
        self.0.held.store(false, Ordering::Release);
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.lent.part(&self.writer);
    }
}
