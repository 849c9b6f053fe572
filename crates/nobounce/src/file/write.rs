//! From a region into a file.

use std::ops::Range;
use std::os::fd::AsFd;

use nobounce_memory::path::{Mechanism, Path, Require};

use super::FileOptions;
use super::error::FileError;
use super::open::File;
use super::report::FileReport;
use crate::gpu_access;
use crate::region::{Region, RegionPlace};

impl Region {
    /// Writes `range` of this region to the file at `offset`, which grows as needed. The bytes are
    /// in the page cache on return; [`File::sync`] brings them to the disk.
    /// `NOBOUNCE_REQUIRE=direct` applies.
    ///
    /// # Errors
    /// The range is not inside the region, the file is not open for writing, the disk is full, ...:
    /// a part may have been written then.
    pub fn write_file(&self, file: &File, offset: u64, range: Range<usize>) -> Result<FileReport, FileError> {
        self.write_file_with(file, offset, range, FileOptions::from_env())
    }

    /// As [`write_file`](Self::write_file), with options.
    ///
    /// # Errors
    /// As for [`write_file`](Self::write_file).
    pub fn write_file_with(
        &self,
        file: &File,
        offset: u64,
        range: Range<usize>,
        options: FileOptions,
    ) -> Result<FileReport, FileError> {
        self.check_range(&range)?;
        write(self.place(), file, offset, range, options)
    }
}

/// Writes a range that is inside of the memory.
pub(super) fn write(
    place: RegionPlace<'_>,
    file: &File,
    offset: u64,
    range: Range<usize>,
    options: FileOptions,
) -> Result<FileReport, FileError> {
    let mut report = FileReport::default();
    match place {
        RegionPlace::Cpu(window) => {
            report.count(Mechanism::Cpu, range.len());
            let written = window.write_file(range, file.as_fd(), offset);
            written.map_err(|error| FileError::of_io("write", file.name(), offset, error))?;
        }
        RegionPlace::Gpu(memory) => {
            let mut is_staged = false;
            if let Path::Staged(reason) = &memory.paths().outbound {
                if options.require == Require::Direct {
                    return Err(FileError::NotDirect {
                        name: file.name().to_owned(),
                        reason: reason.clone(),
                    });
                }
                is_staged = true;
                report.count_staged(reason, range.len());
            }
            let mut at = offset;
            gpu_access::read_pieces(memory, range.start, range.len(), |bytes, way| {
                if !is_staged {
                    report.count(way.mechanism(), bytes.len());
                }
                file.write_all_at(bytes, at).map_err(|source| file.failed("write", at, source))?;
                at += bytes.len() as u64;
                Ok::<_, FileError>(())
            })?;
        }
    }
    Ok(report.finish(false))
}
