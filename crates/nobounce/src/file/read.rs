//! From a file into a region.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use nobounce_memory::gpu::{GpuMemory, GpuWindow};
use nobounce_memory::path::{Mechanism, Reason, Require};
use nobounce_memory::{AccessError, FileMapping};

use super::FileOptions;
use super::error::FileError;
use super::open::File;
use super::pieces::PIECE;
use super::report::FileReport;
use super::staged;
use crate::gpu_access;
use crate::region::{Region, RegionPlace};

/// From here on several threads and the copy engine are faster than one thread through the window: on
/// an H200 106 and 160 us for 1 MiB, 1754 and 1255 us for 16 MiB.
const LONG: usize = 4 << 20;
/// The kernel maps at most so many bytes around a fault; longer ranges are mapped by one call.
const FAULT_AROUND: usize = 64 << 10;

impl Region {
    /// Reads `range.len()` bytes of the file at `offset` into `range` of this region. On return, kernels
    /// see them. `NOBOUNCE_REQUIRE=direct` applies.
    ///
    /// # Errors
    /// The range is not inside the file or the region, a direct path is required and there is none, or
    /// the file or the memory fails; a part may have been read then.
    pub fn read_file(&self, file: &File, offset: u64, range: Range<usize>) -> Result<FileReport, FileError> {
        self.read_file_with(file, offset, range, FileOptions::from_env())
    }

    /// As [`read_file`](Self::read_file), with options.
    ///
    /// # Errors
    /// As for [`read_file`](Self::read_file).
    pub fn read_file_with(
        &self,
        file: &File,
        offset: u64,
        range: Range<usize>,
        options: FileOptions,
    ) -> Result<FileReport, FileError> {
        self.check_range(&range)?;
        read(self.place(), file, offset, range, options)
    }
}

/// Reads into a range that is inside of the memory.
pub(super) fn read(
    place: RegionPlace<'_>,
    file: &File,
    offset: u64,
    range: Range<usize>,
    options: FileOptions,
) -> Result<FileReport, FileError> {
    let len = range.len();
    let size = file.size()?;
    if offset.checked_add(len as u64).is_none_or(|end| end > size) {
        return Err(FileError::OutOfBounds { name: file.name().to_owned(), offset, len, size });
    }
    let mut report = FileReport::default();
    let read = match place {
        RegionPlace::Cpu(window) => {
            report.count(Mechanism::Cpu, len);
            let read = window.read_file(range, file.as_fd(), offset);
            read.map_err(|error| FileError::of_io("read", file.name(), offset, error))
        }
        RegionPlace::Gpu(memory) => {
            GpuRead { memory, file, require: options.require }.run(offset, range, &mut report)
        }
    };
    match read {
        Ok(()) => Ok(report.finish(true)),
        Err(error) => Err(truncated(file, offset + len as u64).unwrap_or(error)),
    }
}

/// An error is explained best by a file that became shorter.
fn truncated(file: &File, end: u64) -> Option<FileError> {
    let size = file.size().ok().filter(|size| *size < end)?;
    Some(FileError::Truncated { name: file.name().to_owned(), size })
}

struct GpuRead<'a> {
    memory: &'a GpuMemory,
    file: &'a File,
    require: Require,
}

impl GpuRead<'_> {
    fn run(&self, offset: u64, range: Range<usize>, report: &mut FileReport) -> Result<(), FileError> {
        let window = self.memory.window();
        let reason = match window {
            None => self.no_window(),
            Some(_) => Reason::new("long read: several threads fill pinned buffers for the copy engine"),
        };
        let Some(window) = window.filter(|_| range.len() < LONG || self.require == Require::Direct) else {
            if self.require == Require::Direct {
                return Err(FileError::NotDirect { name: self.file.name().to_owned(), reason });
            }
            report.count_staged(&reason, range.len());
            return staged::read(self.memory, self.file, offset, range);
        };
        let end = usize::try_from(offset).ok().and_then(|at| at.checked_add(range.len()));
        let overflow = || std::io::Error::from_raw_os_error(libc::EOVERFLOW);
        let end = end.ok_or_else(|| self.file.failed("map", offset, overflow()))?;
        let cache = self.file.mapping(end)?;
        // Both are in memory: the difference fits.
        let start = end - range.len();
        for at in (0..range.len()).step_by(PIECE) {
            let len = PIECE.min(range.len() - at);
            store(window, range.start + at, &cache, start + at..start + at + len, self.file)?;
            report.count(Mechanism::Window, len);
        }
        if range.is_empty() { Ok(()) } else { Ok(gpu_access::finish(window)?) }
    }

    fn no_window(&self) -> Reason {
        match &self.memory.paths().inbound {
            nobounce_memory::path::Path::Staged(reason) => reason.clone(),
            _ => Reason::new("the memory has no window"),
        }
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
        // The next piece is read meanwhile.
        cache.prefetch(from.end..from.end + PIECE);
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
