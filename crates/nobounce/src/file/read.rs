//! From a file into a region.

use std::ops::Range;
use std::os::fd::AsFd;

use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::path::{Mechanism, Reason, Require};

use super::FileOptions;
use super::error::FileError;
use super::load::Source;
use super::long::LongRead;
use super::open::File;
use super::pieces::PIECE;
use super::report::FileReport;
use super::windowed::CacheWindow;
use crate::region::{Region, RegionPlace};

impl Region {
    /// Reads `range.len()` bytes of the file at `offset` into `range` of this region. On return,
    /// kernels see them. `NOBOUNCE_REQUIRE=direct` applies, and what the region required.
    ///
    /// # Errors
    /// The range is not inside the file or the region, a direct path is required and there is none,
    /// or the file or the memory fails; a part may have been read then.
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
            let asked = [options.require, memory.require()];
            let require = if asked.contains(&Require::Direct) { Require::Direct } else { Require::Any };
            GpuRead { memory, file, require }.run(offset, range, &mut report)
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

/// Why bytes of a file are staged for memory that has a window.
const NOT_CACHED: &str = "not in the page cache: read with O_DIRECT into pinned memory";

struct GpuRead<'a> {
    memory: &'a GpuMemory,
    file: &'a File,
    require: Require,
}

impl GpuRead<'_> {
    fn run(&self, offset: u64, range: Range<usize>, report: &mut FileReport) -> Result<(), FileError> {
        let (len, direct) = (range.len(), self.require == Require::Direct);
        let Some(window) = self.memory.window() else {
            let reason = self.no_window();
            if direct {
                return Err(FileError::NotDirect { name: self.file.name().to_owned(), reason });
            }
            let source = Source::of(self.file, offset, len);
            let staged = LongRead::new(self.memory, source, None, offset, range).run()?;
            report.count_staged(&reason, staged);
            return Ok(());
        };
        if len == 0 {
            return Ok(());
        }
        let window = CacheWindow::new(window, self.file, offset, len)?;
        let staged = if len > PIECE {
            // A direct path is the window's: the page cache fills.
            let source = if direct { Source::cached(self.file) } else { Source::of(self.file, offset, len) };
            LongRead::new(self.memory, source, Some(window), offset, range).run()?
        } else {
            window.store(range.start, offset, len)?;
            window.finish()?;
            0
        };
        report.count(Mechanism::Window, len - staged);
        report.count_staged(&Reason::new(NOT_CACHED), staged);
        Ok(())
    }

    fn no_window(&self) -> Reason {
        match &self.memory.paths().inbound {
            nobounce_memory::path::Path::Staged(reason) => reason.clone(),
            _ => Reason::new("the memory has no window"),
        }
    }
}
