//! From a region into a file.

use std::ops::Range;
use std::os::fd::AsFd;

use nobounce_memory::path::{Mechanism, Reason, Require};

use super::FileOptions;
use super::error::FileError;
use super::open::File;
use super::report::FileReport;
use crate::gpu_access::{self, Way};
use crate::region::{Region, RegionPlace};

impl Region {
    /// Writes `range` of this region to the file at `offset`, which grows as needed. The bytes are in
    /// the page cache on return; [`File::sync`] brings them to the disk. `NOBOUNCE_REQUIRE=direct`
    /// applies.
    ///
    /// # Errors
    /// The range is not inside the region, the file is not open for writing, the disk is full, ...: a
    /// part may have been written then.
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
        let mut report = FileReport::default();
        match self.place() {
            RegionPlace::Cpu(window) => {
                report.count(Mechanism::Cpu, range.len());
                let written = window.write_file(range, file.as_fd(), offset);
                written.map_err(|error| FileError::of_io("write", file.name(), offset, error))?;
            }
            RegionPlace::Gpu(memory) => {
                if let nobounce_memory::path::Path::Staged(reason) = &memory.paths().outbound {
                    let reason: Reason = reason.clone();
                    if options.require == Require::Direct {
                        return Err(FileError::NotDirect { name: file.name().to_owned(), reason });
                    }
                    report.count_staged(&reason, range.len());
                }
                let is_staged = !report.staged.is_empty();
                let mut at = offset;
                gpu_access::read_pieces(memory, range.start, range.len(), |bytes, way| {
                    let mechanism = match way {
                        Way::Window => Mechanism::Window,
                        Way::CopyEngine => Mechanism::CopyEngine,
                    };
                    if !is_staged {
                        report.count(mechanism, bytes.len());
                    }
                    file.write_all_at(bytes, at).map_err(|source| file.failed("write", at, source))?;
                    at += bytes.len() as u64;
                    Ok::<_, FileError>(())
                })?;
            }
        }
        Ok(report.finish(false))
    }
}
