//! From a file into GPU memory by pinned buffers: threads read, the copy engine places.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use nobounce_memory::FileMapping;
use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{CopyEngine, PendingCopy, PinnedChunk};

use super::error::FileError;
use super::open::{Direct, File};
use super::pieces::{PIECE, Piece, pieces};
use crate::gpu_access;

/// Threads that read at the same time: on an H200 machine they took 1.08 to 1.19 of the bandwidth of
/// four threads that only read with `O_DIRECT` (`nobounce bench --files`).
const READERS: usize = 4;
/// Pinned buffers: one for each reader, as many on their way to the GPU.
const CHUNKS: usize = 2 * READERS;

/// Reads `range.len()` bytes of the file at `at` into `range` of the memory.
pub(super) fn read(memory: &GpuMemory, file: &File, at: u64, range: Range<usize>) -> Result<(), FileError> {
    // Only to ask what is in the page cache: no page of it is touched.
    let end = usize::try_from(at).unwrap_or(usize::MAX).saturating_add(range.len());
    let cache = file.direct().and_then(|direct| Some((direct, file.mapping(end).ok()?)));
    let cache = cache.as_ref().map(|(direct, cache)| (*direct, &**cache));
    let engine = gpu_access::engine_of(memory, CHUNKS, PIECE)?;
    let pieces: VecDeque<Piece> = pieces(at, range.start, range.len()).collect();
    let (filled, filling) = mpsc::channel();
    if let [piece] = pieces.as_slices().0 {
        let mut chunk = gpu_access::patient_chunk(&engine, PIECE)?;
        load(file, cache, piece, &mut chunk)?;
        return Copies { memory, engine: &engine, under_way: VecDeque::new() }.start_and_wait(piece, chunk);
    }
    let (jobs, waiting) = mpsc::channel::<(Piece, PinnedChunk)>();
    let waiting = Mutex::new(waiting);
    thread::scope(|scope| {
        for _ in 0..READERS.min(pieces.len()) {
            let (waiting, filled) = (&waiting, filled.clone());
            let work = move || {
                while let Ok((piece, mut chunk)) = next(waiting) {
                    // A piece that never came back would be waited for without end.
                    let loaded = catch_unwind(AssertUnwindSafe(|| load(file, cache, &piece, &mut chunk)));
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

/// Fills a buffer: from the page cache, or from the disk if the bytes are not there.
fn load(
    file: &File,
    cache: Option<(&Direct, &FileMapping)>,
    piece: &Piece,
    chunk: &mut PinnedChunk,
) -> Result<(), FileError> {
    // A chunk that was just taken has no clones.
    let Some(room) = chunk.get_mut() else { return Ok(()) };
    let place = usize::try_from(piece.file).unwrap_or(usize::MAX);
    let is_cold = |cache: &FileMapping| !cache.is_resident(place..place.saturating_add(piece.wanted.end));
    let cold = cache.filter(|(_, cache)| is_cold(cache)).map(|(direct, _)| direct);
    let (source, alignment) = (cold.map(|direct| &direct.file), cold.map_or(1, |direct| direct.alignment));
    let start = piece.wanted.start - piece.wanted.start % alignment;
    let end = piece.aligned_len(alignment);
    let mut done = start;
    while done < piece.wanted.end {
        let at = piece.file + done as u64;
        let room = &mut room[done..end];
        let read = match source {
            Some(direct) => direct.read_at(room, at),
            None => file.read_at(room, at),
        };
        match read {
            Ok(0) => return Err(file.failed("read", at, io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(file.failed("read", at, error)),
        }
    }
    Ok(())
}
