//! The ring to one same-host peer, from the side that builds packets.

use std::cell::UnsafeCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use nobounce_memory::SharedChunk;

use super::leases::Leases;
use super::ring::{self, Elsewhere, Label, RingError, RingMemory, RingWriter};
use crate::links::batch::MAX_PACKET;
use crate::process::fork::NotInherited;

/// Packets to a same-host peer are built in the ring that it reads: no copy in between. Payload
/// that the GPU's copy engine fetched stays in its chunk: the peer reads it from there.
///
/// The writer `hold`s the ring for a whole batch. A lock per packet would stall the CPU until its
/// stores reach lines that the peer's CPU owns (70 ns of an 8-byte message). No thread waits for a
/// hold: senders have the engine lock.
pub(in crate::links) struct PeerRing {
    held: AtomicBool,
    /// Where the next packet will be written.
    next: AtomicPtr<u8>,
    ends: UnsafeCell<Ends>,
}

// SAFETY: the contents are reached only through a `Hold`, of which there is one at a time.
unsafe impl Sync for PeerRing {}

/// Packets of this many bytes or more are shown to the reader at once.
const LONG: usize = 4096;

/// Maximum payload of one run: the reader places it while the next run is written.
const MOST_OF_A_RUN: usize = 16 << 10;
/// The same for a reader with a backlog of `BUSY_READER` bytes. It is the slower end of a long
/// stream and pays per run. With 16 KiB runs it spent 25 to 31 % of its time outside the copy.
const MOST_FOR_A_BUSY_READER: usize = 60 << 10;
const BUSY_READER: u64 = 64 << 10;

const _: () = assert!(MOST_FOR_A_BUSY_READER + 64 <= MAX_PACKET);

#[derive(Debug)]
pub(in crate::links) struct Ends {
    writer: RingWriter,
    leased: Leases,
}

impl PeerRing {
    pub(in crate::links) fn new(memory: RingMemory, connection: Arc<NotInherited>) -> Self {
        let ends = Ends { writer: RingWriter::new(Arc::new(memory)), leased: Leases::new(connection) };
        let next = AtomicPtr::new(ends.writer.next());
        Self { held: AtomicBool::new(false), next, ends: UnsafeCell::new(ends) }
    }

    /// Prefetches the lines of the next packet for writing. The reader's cache has them from the
    /// previous lap; they arrive while the packet is prepared.
    #[inline]
    pub(in crate::links) fn expect(&self) {
        ring::fetch_to_write(self.next.load(Ordering::Relaxed));
    }

    /// Takes the writing end, unless it is held.
    pub(in crate::links) fn hold(self: &Arc<Self>) -> Option<Hold> {
        let free = !self.held.swap(true, Ordering::Acquire);
        free.then(|| Hold(Arc::clone(self)))
    }
}

impl fmt::Debug for PeerRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerRing").field("held", &self.held).finish_non_exhaustive()
    }
}

/// Exclusive access to the writing end of a ring, until dropped.
#[derive(Debug)]
pub(in crate::links) struct Hold(Arc<PeerRing>);

impl Hold {
    pub(in crate::links) fn is_of(&self, ring: &Arc<PeerRing>) -> bool {
        Arc::ptr_eq(&self.0, ring)
    }

    #[inline]
    fn ends(&mut self) -> &mut Ends {
        // SAFETY: there is no other hold, and this one is borrowed as long as what is inside.
        unsafe { &mut *self.0.ends.get() }
    }

    /// Reserves room for a packet of `len` bytes; valid until the next call, which may be
    /// [`commit`](Self::commit). `None` if the ring is full.
    #[inline]
    pub(in crate::links) fn reserve(&mut self, len: usize) -> Option<*mut u8> {
        self.ends().writer.reserve(len).ok()
    }

    /// Commits a run of `packets`. The reader sees it after the next [`show`](Self::show), a long
    /// one at once, so that it copies while the next run is written.
    #[inline]
    pub(in crate::links) fn commit(&mut self, len: usize, packets: u16) {
        let writer = &mut self.ends().writer;
        writer.commit(len, Label { number: packets, has_icrc: false });
        if len >= LONG {
            writer.show();
        }
    }

    /// Makes committed packets visible to a reader that polls.
    #[inline]
    pub(in crate::links) fn show(&mut self) {
        self.ends().writer.show();
    }

    /// As [`show`](Self::show); returns whether the reader needs a wake-up.
    pub(in crate::links) fn publish(&mut self) -> bool {
        self.ends().writer.publish()
    }

    /// Exports the chunk: the file and offset of its byte `at`, if the peer may lease that chunk
    /// now.
    pub(in crate::links) fn lease(&mut self, chunk: &SharedChunk, at: usize) -> Option<(u8, u32)> {
        let Ends { writer, leased } = self.ends();
        leased.show(writer, chunk, at)
    }

    /// As [`commit`](Self::commit), for headers of `len` bytes whose payload is in a chunk that was
    /// [leased](Self::lease).
    pub(in crate::links) fn commit_leased(
        &mut self,
        (len, packets): (usize, u16),
        (file, offset): (u8, u32),
        behind: u32,
        chunk: SharedChunk,
    ) {
        let Ends { writer, leased } = self.ends();
        writer.commit_elsewhere(len, packets, Elsewhere { file, offset, len: behind });
        leased.hold(chunk, writer.position());
        writer.show();
    }

    /// Current maximum payload of one run.
    pub(in crate::links) fn longest_run(&mut self) -> usize {
        let writer = &self.ends().writer;
        // A reader that reports an invalid position only changes its own run length.
        let unread = writer.position().saturating_sub(writer.read_up_to());
        if unread < BUSY_READER { MOST_OF_A_RUN } else { MOST_FOR_A_BUSY_READER }
    }

    /// Reclaims leased chunks that the reader has consumed.
    pub(in crate::links) fn take_back(&mut self) {
        let Ends { writer, leased } = self.ends();
        leased.take_back(writer);
    }

    pub(in crate::links) fn push(&mut self, parts: [&[u8]; 3], label: Label) -> Result<(), RingError> {
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
        self.leased.part(&self.writer);
    }
}
