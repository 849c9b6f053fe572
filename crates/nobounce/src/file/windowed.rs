//! From a file into GPU memory through its window: threads store from the page cache, or from buffers
//! that were read past it.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use nobounce_memory::gpu::GpuWindow;
use nobounce_memory::{AccessError, FileMapping, page_size};

use super::error::FileError;
use super::load::{READERS, Source};
use super::open::File;
use super::pieces::{PIECE, Piece, pieces};
use crate::gpu_access;

/// Threads of a long read. Each stores what it has read, and the drive must not wait for it: of what four
/// threads that only read took from a drive of an H200 machine, 4 took 0.79 to 0.84, 8 and 16 took 0.89.
const THREADS: usize = 2 * READERS;
/// The kernel maps at most so many bytes around a fault; longer ranges are mapped by one call.
const FAULT_AROUND: usize = 64 << 10;

/// Reads `range.len()` bytes of the file at `at` into `range` of the window. On return, kernels see them.
pub(super) fn read(window: &GpuWindow, file: &File, at: u64, range: Range<usize>) -> Result<(), FileError> {
    let end = usize::try_from(at).ok().and_then(|at| at.checked_add(range.len()));
    let overflow = || std::io::Error::from_raw_os_error(libc::EOVERFLOW);
    let end = end.ok_or_else(|| file.failed("map", at, overflow()))?;
    let cache = file.mapping(end)?;
    if range.len() <= PIECE {
        if range.is_empty() {
            return Ok(());
        }
        store(window, range.start, &cache, end - range.len()..end, file)?;
        return Ok(gpu_access::finish(window)?);
    }
    let pieces: Vec<Piece> = pieces(at, range.start, range.len()).collect();
    let read =
        LongRead { window, file, source: Source::of(file, at, range.len()), cache, next: 0.into(), pieces };
    let threads = THREADS.min(read.pieces.len()).min(thread::available_parallelism().map_or(1, usize::from));
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().name("nb-read".to_owned()).spawn_scoped(scope, || read.run());
        // This thread is one of them, and all of them if there can be no others.
        let others: Vec<_> = (1..threads).map_while(|number| start(number).ok()).collect();
        let mut result = read.run();
        for other in others {
            result = result.and(other.join().unwrap_or_else(|panicked| resume_unwind(panicked)));
        }
        result
    })
}

/// A read that several threads share.
struct LongRead<'a> {
    window: &'a GpuWindow,
    file: &'a File,
    source: Source<'a>,
    cache: Arc<FileMapping>,
    pieces: Vec<Piece>,
    /// The piece that the next thread takes.
    next: AtomicUsize,
}

impl LongRead<'_> {
    /// The work of one thread.
    fn run(&self) -> Result<(), FileError> {
        let mut buffer = Vec::new();
        while let Some(piece) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let stored = match self.source.cold(piece) {
                Some(direct) => {
                    // Only a piece that is not cached needs one. It shares no page with other memory,
                    // which a fork during the read would copy.
                    let alignment = direct.alignment.max(page_size());
                    buffer.resize(PIECE + alignment, 0);
                    let lead = buffer.as_ptr().align_offset(alignment).min(alignment);
                    let room = &mut buffer[lead..lead + PIECE];
                    self.source.load(piece, Some(direct), room).and_then(|()| {
                        self.window
                            .store(piece.memory, &room[piece.wanted.clone()])
                            .map_err(|error| FileError::Memory(error.into()))
                    })
                }
                None => {
                    // The file is mapped: its offsets fit.
                    let start = usize::try_from(piece.file).unwrap_or(usize::MAX);
                    let from = start + piece.wanted.start..start + piece.wanted.end;
                    store(self.window, piece.memory, &self.cache, from, self.file)
                }
            };
            if stored.is_err() {
                // The other threads need not go on. A read that is tried again comes after these stores.
                self.next.store(self.pieces.len(), Ordering::Relaxed);
                let _ = gpu_access::finish(self.window);
                return stored;
            }
        }
        // Each thread orders its own stores.
        Ok(gpu_access::finish(self.window)?)
    }
}

/// Stores a range of the page cache through the window.
fn store(
    window: &GpuWindow,
    to: usize,
    cache: &Arc<FileMapping>,
    from: Range<usize>,
    file: &File,
) -> Result<(), FileError> {
    if from.len() > FAULT_AROUND {
        let at = from.start as u64;
        cache.populate(from.clone()).map_err(|source| file.failed("read", at, source))?;
    }
    window.store(to, cache.source(from.clone())).map_err(|error| blame(error, cache, from, file))
}

/// A store fails alike where a page cannot be read from the file and where the memory is gone: only the
/// former can be populated again.
fn blame(error: AccessError, cache: &FileMapping, from: Range<usize>, file: &File) -> FileError {
    let at = from.start as u64;
    match cache.populate(from) {
        Err(source) => file.failed("read", at, source),
        Ok(()) => FileError::Memory(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn pages_that_cannot_be_read_are_errors_of_the_file() {
        let path = std::env::temp_dir().join(format!("nobounce-blame-{}", std::process::id()));
        std::fs::write(&path, [1; 100]).unwrap();
        let file = File::open(&path).unwrap();
        let cache = FileMapping::of(file.as_fd(), 16 << 10).unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = |from| blame(AccessError::Faulted { address: 0 }, &cache, from, &file);
        assert!(matches!(error(8 << 10..9 << 10), FileError::Io { .. }));
        assert!(matches!(error(0..100), FileError::Memory(_)));
    }
}
