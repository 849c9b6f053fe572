//! From a file into a region.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use nobounce_memory::FileMapping;
use nobounce_memory::gpu::{GpuMemory, GpuWindow};
use nobounce_memory::path::{Mechanism, Reason, Require};

use super::FileOptions;
use super::error::FileError;
use super::open::File;
use super::pieces::PIECE;
use super::report::FileReport;
use super::staged::{self, Fill};
use crate::gpu_access;
use crate::region::{Region, RegionPlace};

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
        let Some(window) = self.memory.window() else {
            let reason = self.no_window();
            if self.require == Require::Direct {
                return Err(FileError::NotDirect { name: self.file.name().to_owned(), reason });
            }
            report.count_staged(&reason, range.len());
            return staged::read(self.memory, self.file, offset, range, self.fill_without_window(offset));
        };
        let end = usize::try_from(offset).ok().and_then(|at| at.checked_add(range.len()));
        let end = end.ok_or_else(|| {
            self.file.failed("map", offset, std::io::Error::from_raw_os_error(libc::EOVERFLOW))
        })?;
        let cache = self.file.mapping(end)?;
        // Both are in memory: the difference fits.
        let start = end - range.len();
        let uncached = Reason::new("long read past the page cache (O_DIRECT)");
        let mut done = 0;
        while done < range.len() {
            let direct = self.file.direct().filter(|_| self.require == Require::Any);
            let cold = direct.map_or(0, |_| cold_run(&cache, start + done..end));
            if let Some(direct) = direct.filter(|_| cold >= PIECE) {
                let part = range.start + done..range.start + done + cold;
                staged::read(self.memory, self.file, offset + done as u64, part, Fill::Direct(direct))?;
                report.count_staged(&uncached, cold);
                done += cold;
                continue;
            }
            let len = PIECE.min(range.len() - done);
            store(window, range.start + done, &cache, start + done..start + done + len, self.file)?;
            report.count(Mechanism::Window, len);
            done += len;
        }
        if report.paths.window.bytes > 0 {
            gpu_access::finish(window)?;
        }
        Ok(())
    }

    /// Whether the beginning of the read is in the page cache decides: the copy engine follows anyway.
    fn fill_without_window(&self, offset: u64) -> Fill<'_> {
        let first = usize::try_from(offset).ok().and_then(|at| Some((self.file.mapping(at + 1).ok()?, at)));
        match (self.file.direct(), first) {
            (Some(direct), Some((cache, at))) if !cache.is_resident(at..at + PIECE) => Fill::Direct(direct),
            _ => Fill::Buffered,
        }
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
    window.store(to, cache.source(from)).map_err(|error| FileError::Memory(error.into()))
}

/// Bytes from the start of `range` on that are not in the page cache, in pieces.
fn cold_run(cache: &FileMapping, range: Range<usize>) -> usize {
    let mut at = range.start;
    while at < range.end {
        let next = range.end.min(at + PIECE);
        if cache.is_resident(at..next) {
            break;
        }
        at = next;
    }
    at - range.start
}
