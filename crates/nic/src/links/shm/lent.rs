//! Pinned memory of ours that a peer reads: shown once, file by file, and each chunk kept as it is until the peer has read it.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_memory::gpu::copy_engine::PinnedChunk;

use super::meeting::{self, Came};
use super::ring::{Memory, Writer};
use crate::process::fork::{self, NotInherited};

/// Files shown to one peer at most: one for each CUDA context whose memory is sent, so that more than a few are rare.
pub(super) const MOST_FILES: usize = 32;
/// Chunks kept for one peer at most. One that does not read must not keep others from sending: what goes beyond is copied into its ring.
const MOST_CHUNKS: usize = 8;

/// What was left with a peer that had not read all of it when we parted. Used again before, it would be read as something else.
static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Left {
    memory: Arc<Memory>,
    position: u64,
    held: VecDeque<(u64, PinnedChunk)>,
    connection: Arc<NotInherited>,
}

impl Left {
    /// Whether the peer may still read some of it.
    fn is_read(&mut self) -> bool {
        take_back(&mut self.held, self.memory.read_up_to(), self.position);
        !self.held.is_empty() && matches!(meeting::take(&self.connection), Came::Nothing)
    }
}

/// What one peer was lent.
#[derive(Debug)]
pub(super) struct Lent {
    connection: Arc<NotInherited>,
    /// The names of the files it was shown, in that order.
    files: Vec<u64>,
    /// Chunks, and how far the peer must have read before they are ours again.
    held: VecDeque<(u64, PinnedChunk)>,
    generation: u64,
}

impl Lent {
    pub(super) fn new(connection: Arc<NotInherited>) -> Self {
        Self { connection, files: Vec::new(), held: VecDeque::new(), generation: fork::generation() }
    }

    /// Where the peer finds the byte at `at` of this chunk; nothing where it cannot be shown, or has too many already.
    pub(super) fn show(&mut self, writer: &Writer, chunk: &PinnedChunk, at: usize) -> Option<(u8, u32)> {
        self.take_back(writer);
        let same = self.held.back().is_some_and(|(_, last)| last.as_ptr() == chunk.as_ptr());
        if !same && self.held.len() >= MOST_CHUNKS {
            return None;
        }
        let place = chunk.place()?;
        let file = match self.files.iter().position(|known| *known == place.name) {
            Some(known) => known,
            None if self.files.len() < MOST_FILES => {
                meeting::send_file(&self.connection, place.file_len, place.file.as_raw_fd()).ok()?;
                self.files.push(place.name);
                self.files.len() - 1
            }
            None => return None,
        };
        Some((u8::try_from(file).ok()?, u32::try_from(place.offset + at).ok()?))
    }

    /// Keeps a chunk until the peer has read up to there.
    pub(super) fn hold(&mut self, chunk: PinnedChunk, until: u64) {
        match self.held.back_mut().filter(|(_, last)| last.as_ptr() == chunk.as_ptr()) {
            Some(last) => last.0 = until,
            None => self.held.push_back((until, chunk)),
        }
    }

    pub(super) fn take_back(&mut self, writer: &Writer) {
        if !self.held.is_empty() {
            take_back(&mut self.held, writer.read_up_to(), writer.position());
        }
    }

    /// The ring is given up. What the peer has not read stays as it is until it has, or is gone.
    pub(super) fn part(&mut self, writer: &Writer) {
        if fork::current() != self.generation {
            return std::mem::forget(std::mem::take(&mut self.held));
        }
        self.take_back(writer);
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain_mut(Left::is_read);
        if self.held.is_empty() {
            return;
        }
        // The peer learns that nothing will follow, and we when it is gone.
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

/// Lets go of what has been read, if the reader tells what can be.
fn take_back(held: &mut VecDeque<(u64, PinnedChunk)>, read: u64, written: u64) {
    while read <= written && held.front().is_some_and(|(until, _)| *until <= read) {
        held.pop_front();
    }
}
