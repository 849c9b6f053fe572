//! Leased buffers: pinned memory that a peer reads in place. Each file is exported once; each chunk
//! stays unchanged until the peer has read it.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_memory::SharedChunk;

use super::rendezvous::{self, Came};
use super::ring::{RingMemory, RingWriter};
use crate::process::fork::{self, NotInherited};

/// Maximum number of files exported to one peer: one per CUDA context that sends, so more than a
/// few are rare.
pub(in crate::links) const MOST_FILES: usize = 32;
/// Maximum number of chunks leased to one peer. A peer that does not read must not starve others:
/// further payload is copied into its ring.
const MOST_CHUNKS: usize = 8;

/// Leases that outlive their ring, because the peer had not read all chunks. Early reuse would
/// corrupt what the peer reads.
static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Left {
    memory: Arc<RingMemory>,
    position: u64,
    held: VecDeque<(u64, SharedChunk)>,
    connection: Arc<NotInherited>,
}

impl Left {
    /// Whether the peer may still read one of the chunks.
    fn is_read(&mut self) -> bool {
        take_back(&mut self.held, self.memory.read_up_to(), self.position);
        !self.held.is_empty() && matches!(rendezvous::take(&self.connection), Came::Nothing)
    }
}

/// Chunks leased to one peer.
#[derive(Debug)]
pub(in crate::links) struct Leases {
    connection: Arc<NotInherited>,
    /// The files exported to it, in order of export.
    files: Vec<u64>,
    /// Leased chunks, each with the reader position that ends the lease.
    held: VecDeque<(u64, SharedChunk)>,
    generation: u64,
}

impl Leases {
    pub(in crate::links) fn new(connection: Arc<NotInherited>) -> Self {
        Self { connection, files: Vec::new(), held: VecDeque::new(), generation: fork::generation() }
    }

    /// File and offset of byte `at` of this chunk. `None` if the file cannot be exported or the
    /// peer holds too many leases.
    pub(in crate::links) fn show(
        &mut self,
        writer: &RingWriter,
        chunk: &SharedChunk,
        at: usize,
    ) -> Option<(u8, u32)> {
        self.take_back(writer);
        let same = self.held.back().is_some_and(|(_, last)| last.as_ptr() == chunk.as_ptr());
        if !same && self.held.len() >= MOST_CHUNKS {
            return None;
        }
        let place = chunk.place()?;
        let file = match self.files.iter().position(|known| *known == place.name) {
            Some(known) => known,
            None if self.files.len() < MOST_FILES => {
                rendezvous::send_file(&self.connection, place.file_len, place.file.as_raw_fd()).ok()?;
                self.files.push(place.name);
                self.files.len() - 1
            }
            None => return None,
        };
        Some((u8::try_from(file).ok()?, u32::try_from(place.offset + at).ok()?))
    }

    /// Leases a chunk until the peer has read up to that position.
    pub(in crate::links) fn hold(&mut self, chunk: SharedChunk, until: u64) {
        match self.held.back_mut().filter(|(_, last)| last.as_ptr() == chunk.as_ptr()) {
            Some(last) => last.0 = until,
            None => self.held.push_back((until, chunk)),
        }
    }

    pub(in crate::links) fn take_back(&mut self, writer: &RingWriter) {
        if !self.held.is_empty() {
            take_back(&mut self.held, writer.read_up_to(), writer.position());
        }
    }

    /// Closes the ring. Unread chunks stay unchanged until the peer has read them or is gone.
    pub(in crate::links) fn part(&mut self, writer: &RingWriter) {
        if fork::current() != self.generation {
            return std::mem::forget(std::mem::take(&mut self.held));
        }
        self.take_back(writer);
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain_mut(Left::is_read);
        if self.held.is_empty() {
            return;
        }
        // Half-close: the peer learns that nothing will follow, and we learn when it is gone.
        // SAFETY: the call takes a descriptor and a number.
        unsafe { libc::shutdown(self.connection.as_raw_fd(), libc::SHUT_WR) };
        let mut rest = Left {
            memory: Arc::clone(writer.memory()),
            position: writer.position(),
            held: std::mem::take(&mut self.held),
            connection: Arc::clone(&self.connection),
        };
        if rest.is_read() {
            left.push(rest);
        }
    }
}

/// Ends the leases of chunks that were read, if the reported position is plausible.
fn take_back(held: &mut VecDeque<(u64, SharedChunk)>, read: u64, written: u64) {
    while read <= written && held.front().is_some_and(|(until, _)| *until <= read) {
        held.pop_front();
    }
}
