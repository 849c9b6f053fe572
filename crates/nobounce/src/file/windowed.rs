//! From the page cache into GPU memory through its window.

use std::ops::Range;
use std::sync::Arc;

use nobounce_memory::gpu::GpuWindow;
use nobounce_memory::{AccessError, FileMapping};

use super::error::FileError;
use super::open::File;
use super::pieces::Piece;
use crate::gpu_access;

/// The kernel maps at most so many bytes around a fault; longer ranges are mapped by one call.
const FAULT_AROUND: usize = 64 << 10;

/// A file's pages, and the window that they are stored through.
pub(super) struct CacheWindow<'a> {
    window: &'a GpuWindow,
    file: &'a File,
    cache: Arc<FileMapping>,
}

impl<'a> CacheWindow<'a> {
    /// For bytes of the file from `at` on.
    pub(super) fn new(window: &'a GpuWindow, file: &'a File, at: u64, len: usize) -> Result<Self, FileError> {
        let end = usize::try_from(at).ok().and_then(|at| at.checked_add(len));
        let overflow = || std::io::Error::from_raw_os_error(libc::EOVERFLOW);
        let end = end.ok_or_else(|| file.failed("map", at, overflow()))?;
        Ok(Self { window, file, cache: file.mapping(end)? })
    }

    /// Stores a piece of a read.
    pub(super) fn store_piece(&self, piece: &Piece) -> Result<(), FileError> {
        self.store(piece.memory, piece.file + piece.wanted.start as u64, piece.wanted.len())
    }

    /// Stores `len` bytes of the file at `at`. They are inside of the mapping.
    pub(super) fn store(&self, to: usize, at: u64, len: usize) -> Result<(), FileError> {
        let start = usize::try_from(at).unwrap_or(usize::MAX);
        let from = start..start.saturating_add(len);
        if len > FAULT_AROUND {
            self.cache.populate(from.clone()).map_err(|source| self.file.failed("read", at, source))?;
        }
        let stored = self.window.store(to, self.cache.source(from.clone()));
        stored.map_err(|error| blame(error, &self.cache, from, self.file))
    }

    /// Makes the stores of this thread visible to kernels.
    pub(super) fn finish(&self) -> Result<(), FileError> {
        Ok(gpu_access::finish(self.window)?)
    }
}

/// A store fails alike where a page cannot be read from the file and where the memory is gone: only
/// the former can be populated again.
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
