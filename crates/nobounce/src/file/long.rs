//! Long reads into GPU memory, by several threads.
//!
//! A piece in the page cache is stored through the window. Any other piece is read past the page
//! cache (`O_DIRECT`) into pinned memory, from which the copy engine takes it: a store through the
//! window would take longer, and the drive would wait for it.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::CopyEngine;

use super::error::FileError;
use super::load::Source;
use super::open::Direct;
use super::pieces::{PIECE, Piece, pieces};
use super::windowed::CacheWindow;
use crate::gpu_access;

/// Threads of a read, each with one pinned buffer. Of what four threads that only read took from a
/// drive of an H200 machine, 8 threads took 1.23, 16 took 1.20; with a second buffer for each,
/// 4, 8 and 16 took 1.14, 1.06 and 1.01.
const THREADS: usize = 8;

/// Pinned buffers of all reads of this process at one time: eight reads. Pinned memory is kept for
/// the next read and not freed while its context lives, so this bounds what idles, too.
const MAX_BUFFERS: usize = 64;

/// Buffers that reads of this process hold.
static BUFFERS: Buffers = Buffers::new();

/// Counts pinned buffers, up to [`MAX_BUFFERS`].
struct Buffers {
    held: Mutex<usize>,
    released: Condvar,
}

/// The right to one pinned buffer.
struct Permit<'a>(&'a Buffers);

impl Buffers {
    const fn new() -> Self {
        Self { held: Mutex::new(0), released: Condvar::new() }
    }

    fn held(&self) -> MutexGuard<'_, usize> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a buffer is free. Threads that hold one do not wait for another.
    fn permit(&self) -> Permit<'_> {
        let held = self.released.wait_while(self.held(), |held| *held >= MAX_BUFFERS);
        *held.unwrap_or_else(PoisonError::into_inner) += 1;
        Permit(self)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.held() -= 1;
        self.0.released.notify_one();
    }
}

/// A read that several threads share.
pub(super) struct LongRead<'a> {
    memory: &'a GpuMemory,
    source: Source<'a>,
    /// For pieces in the page cache.
    window: Option<CacheWindow<'a>>,
    pieces: Vec<Piece>,
    /// The piece that the next thread takes.
    next: AtomicUsize,
    staged: AtomicUsize,
}

impl<'a> LongRead<'a> {
    /// Of `range.len()` bytes of the file at `at` into `range` of the memory. Without a window, all
    /// bytes are staged.
    pub(super) fn new(
        memory: &'a GpuMemory,
        source: Source<'a>,
        window: Option<CacheWindow<'a>>,
        at: u64,
        range: Range<usize>,
    ) -> Self {
        let pieces = pieces(at, range.start, range.len()).collect();
        Self { memory, source, window, pieces, next: 0.into(), staged: 0.into() }
    }

    /// Reads. On return, kernels see the bytes; returns how many were staged.
    pub(super) fn run(self) -> Result<usize, FileError> {
        let threads = THREADS.min(self.pieces.len());
        thread::scope(|scope| {
            let start =
                |_| thread::Builder::new().name("nb-read".to_owned()).spawn_scoped(scope, || self.work());
            // This thread is one of them, and all of them if there can be no others.
            let others: Vec<_> = (1..threads).map_while(|number| start(number).ok()).collect();
            let mut result = self.work();
            for other in others {
                result = result.and(other.join().unwrap_or_else(|panicked| resume_unwind(panicked)));
            }
            result
        })?;
        Ok(self.staged.into_inner())
    }

    /// The work of one thread.
    fn work(&self) -> Result<(), FileError> {
        let read = self.read_pieces();
        if read.is_err() {
            // The other threads need not go on.
            self.next.store(self.pieces.len(), Ordering::Relaxed);
        }
        // Also after an error: a read that is tried again comes after these stores.
        let stored = self.window.as_ref().map_or(Ok(()), CacheWindow::finish);
        read.and(stored)
    }

    fn read_pieces(&self) -> Result<(), FileError> {
        let mut engine = None;
        while let Some(piece) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let cold = self.source.cold(piece);
            match &self.window {
                Some(window) if cold.is_none() => window.store_piece(piece)?,
                _ => {
                    let (engine, _) = match &mut engine {
                        Some(engine) => engine,
                        none => {
                            let permit = BUFFERS.permit();
                            none.insert((gpu_access::engine_of(self.memory, 1, PIECE)?, permit))
                        }
                    };
                    self.stage(engine, piece, cold)?;
                    self.staged.fetch_add(piece.wanted.len(), Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Reads a piece into the pinned buffer, and copies it to its place.
    fn stage(&self, engine: &CopyEngine, piece: &Piece, cold: Option<&Direct>) -> Result<(), FileError> {
        let mut chunk = gpu_access::wait_for_chunk(engine, PIECE)?;
        let room = chunk.get_mut().ok_or_else(|| self.source.failed(piece, "its pinned buffer is in use"))?;
        self.source.load(piece, cold, room)?;
        let copy = engine.start_write_from(self.memory, piece.memory, chunk, piece.wanted.clone())?;
        gpu_access::wait(engine, copy, PIECE)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_bounded_and_come_back() {
        let (buffers, most) = (Buffers::new(), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..MAX_BUFFERS + 8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let _permit = buffers.permit();
                        most.fetch_max(*buffers.held(), Ordering::Relaxed);
                        thread::yield_now();
                    }
                });
            }
        });
        assert!(most.into_inner() <= MAX_BUFFERS);
        assert_eq!(*buffers.held(), 0);
    }
}
