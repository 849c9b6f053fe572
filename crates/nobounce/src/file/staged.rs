//! From a file into GPU memory by pinned buffers: threads read, the copy engine places.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{CopyEngine, PendingCopy, PinnedChunk};

use super::error::FileError;
use super::load::{READERS, Source};
use super::open::File;
use super::pieces::{PIECE, Piece, pieces};
use crate::gpu_access;

/// Pinned buffers: one for each reader, as many on their way to the GPU.
const CHUNKS: usize = 2 * READERS;

/// Reads `range.len()` bytes of the file at `at` into `range` of the memory.
pub(super) fn read(memory: &GpuMemory, file: &File, at: u64, range: Range<usize>) -> Result<(), FileError> {
    let source = Source::of(file, at, range.len());
    let engine = gpu_access::engine_of(memory, CHUNKS, PIECE)?;
    let pieces: VecDeque<Piece> = pieces(at, range.start, range.len()).collect();
    let (filled, filling) = mpsc::channel();
    if let [piece] = pieces.as_slices().0 {
        let mut chunk = gpu_access::patient_chunk(&engine, PIECE)?;
        load(&source, piece, &mut chunk)?;
        return Copies { memory, engine: &engine, under_way: VecDeque::new() }.start_and_wait(piece, chunk);
    }
    let (jobs, waiting) = mpsc::channel::<(Piece, PinnedChunk)>();
    let waiting = Mutex::new(waiting);
    thread::scope(|scope| {
        for _ in 0..READERS.min(pieces.len()) {
            let (waiting, filled, source) = (&waiting, filled.clone(), &source);
            let work = move || {
                while let Ok((piece, mut chunk)) = next(waiting) {
                    // A piece that never came back would be waited for without end.
                    let loaded = catch_unwind(AssertUnwindSafe(|| load(source, &piece, &mut chunk)));
                    let panicked =
                        || file.failed("read", piece.file, io::Error::other("its reader panicked"));
                    let result = loaded.unwrap_or_else(|_| Err(panicked()));
                    if filled.send((piece, chunk, result)).is_err() {
                        break;
                    }
                }
            };
            let started = thread::Builder::new().name("nb-read".to_owned()).spawn_scoped(scope, work);
            started.map_err(|source| file.failed("read", at, source))?;
        }
        // With the readers' ends gone, a wait for them ends.
        drop(filled);
        let copies = Copies { memory, engine: &engine, under_way: VecDeque::new() };
        // Dropping `jobs` at the end lets the readers end.
        copies.run(pieces, jobs, &filling)
    })
}

fn next(
    waiting: &Mutex<mpsc::Receiver<(Piece, PinnedChunk)>>,
) -> Result<(Piece, PinnedChunk), mpsc::RecvError> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner).recv()
}

type Filled = (Piece, PinnedChunk, Result<(), FileError>);

struct Copies<'a> {
    memory: &'a GpuMemory,
    engine: &'a CopyEngine,
    under_way: VecDeque<PendingCopy>,
}

impl Copies<'_> {
    /// Hands out buffers, and starts a copy of each that comes back. After an error it only waits for
    /// what is under way.
    fn run(
        mut self,
        mut pieces: VecDeque<Piece>,
        jobs: mpsc::Sender<(Piece, PinnedChunk)>,
        filled: &mpsc::Receiver<Filled>,
    ) -> Result<(), FileError> {
        let (mut reading, mut result) = (0_usize, Ok(()));
        loop {
            self.retire(false)?;
            while result.is_ok()
                && !pieces.is_empty()
                && let Some(chunk) = self.engine.take_chunk()
                && let Some(piece) = pieces.pop_front()
            {
                // It fails only if all readers have panicked.
                let _ = jobs.send((piece, chunk));
                reading += 1;
            }
            if reading > 0 {
                let Ok((piece, chunk, loaded)) = filled.recv() else { break };
                reading -= 1;
                let started = loaded.and_then(|()| self.start(&piece, chunk));
                result = result.and(started);
            } else if self.under_way.is_empty() && (pieces.is_empty() || result.is_err()) {
                break;
            } else if self.under_way.is_empty() {
                // Earlier reads that failed hold all buffers: their copies are still in flight.
                let chunk = gpu_access::patient_chunk(self.engine, PIECE)?;
                if let Some(piece) = pieces.pop_front() {
                    let _ = jobs.send((piece, chunk));
                    reading += 1;
                }
            } else {
                self.retire(true)?;
            }
        }
        result
    }

    fn start_and_wait(mut self, piece: &Piece, chunk: PinnedChunk) -> Result<(), FileError> {
        self.start(piece, chunk)?;
        self.retire(true)
    }

    fn start(&mut self, piece: &Piece, chunk: PinnedChunk) -> Result<(), FileError> {
        let wanted = piece.wanted.clone();
        self.under_way.push_back(self.engine.start_write_from(self.memory, piece.memory, chunk, wanted)?);
        Ok(())
    }

    /// Releases buffers whose copies are complete; waits for the first if told so.
    fn retire(&mut self, wait: bool) -> Result<(), FileError> {
        let mut wait = wait;
        while let Some(copy) = self.under_way.front() {
            if !wait && !self.engine.poll(copy)? {
                break;
            }
            if let Some(copy) = self.under_way.pop_front() {
                gpu_access::wait(self.engine, copy, PIECE)?;
            }
            wait = false;
        }
        Ok(())
    }
}

fn load(source: &Source<'_>, piece: &Piece, chunk: &mut PinnedChunk) -> Result<(), FileError> {
    // A chunk that was just taken has no clones.
    chunk.get_mut().map_or(Ok(()), |room| source.load(piece, source.cold(piece), room))
}
