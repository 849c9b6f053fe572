//! Memory of the caller, without a NIC.

use std::ops::Range;

use nobounce_memory::gpu::copy_engine::CopyError;
use nobounce_memory::gpu::{GpuMemory, GpuOptions, GpuRegisterError};
use nobounce_memory::path::Paths;
use nobounce_memory::{AccessError, Window, guard};

use super::error::FileError;
use super::open::File;
use super::report::FileReport;
use super::{FileOptions, read, write};
use crate::region::RegionPlace;

/// Why memory cannot be used for files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalMemoryError {
    /// Without the guard a truncated file would kill the process.
    #[error(transparent)]
    Guard(#[from] guard::InstallError),
    /// It is no GPU memory, or a direct path is required and there is none.
    #[error(transparent)]
    Gpu(#[from] GpuRegisterError),
}

/// Host or GPU memory that files are read into or written from. No device is opened, and peers
/// cannot reach it.
#[derive(Debug)]
pub struct LocalMemory(Place);

#[derive(Debug)]
enum Place {
    Host(Window),
    Gpu(Box<GpuMemory>),
}

impl LocalMemory {
    /// Host memory.
    ///
    /// # Errors
    /// The fault guard cannot be installed.
    ///
    /// # Safety
    /// While this object lives, files may be read into the memory; no Rust reference to it is live
    /// meanwhile, and its addresses are not reused for something else.
    pub unsafe fn host(base: *mut u8, len: usize) -> Result<Self, LocalMemoryError> {
        guard::ensure_installed()?;
        // SAFETY: the caller's promise is the same.
        Ok(Self(Place::Host(unsafe { Window::new(base, len) })))
    }

    /// Memory that CUDA knows.
    ///
    /// # Errors
    /// It is no GPU memory, a direct path is required and there is none, or as for
    /// [`host`](Self::host).
    ///
    /// # Safety
    /// As for [`host`](Self::host); free it after this object.
    pub unsafe fn gpu(addr: u64, len: usize, options: &GpuOptions) -> Result<Self, LocalMemoryError> {
        guard::ensure_installed()?;
        Ok(Self(Place::Gpu(Box::new(GpuMemory::register(addr, len, &options.with_environment())?))))
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Place::Host(window) => window.len(),
            Place::Gpu(memory) => memory.len(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether GPU memory is still the registered one; host memory cannot be told from its
    /// successor.
    pub fn is_live(&self) -> bool {
        match &self.0 {
            Place::Host(_) => true,
            Place::Gpu(memory) => memory.check_alive().is_ok(),
        }
    }

    /// The path of its bytes; `None` for host memory.
    pub fn paths(&self) -> Option<&Paths> {
        match &self.0 {
            Place::Host(_) => None,
            Place::Gpu(memory) => Some(memory.paths()),
        }
    }

    /// As [`Region::read_file_with`](crate::Region::read_file_with).
    ///
    /// # Errors
    /// The same.
    pub fn read_file(
        &self,
        file: &File,
        offset: u64,
        range: Range<usize>,
        options: FileOptions,
    ) -> Result<FileReport, FileError> {
        self.check(&range)?;
        read::read(self.place(), file, offset, range, options)
    }

    /// As [`Region::write_file_with`](crate::Region::write_file_with).
    ///
    /// # Errors
    /// The same.
    pub fn write_file(
        &self,
        file: &File,
        offset: u64,
        range: Range<usize>,
        options: FileOptions,
    ) -> Result<FileReport, FileError> {
        self.check(&range)?;
        write::write(self.place(), file, offset, range, options)
    }

    fn check(&self, range: &Range<usize>) -> Result<(), FileError> {
        if range.start <= range.end && range.end <= self.len() {
            // A window keeps freed memory alive, and the bytes would go there.
            let Place::Gpu(memory) = &self.0 else { return Ok(()) };
            let alive = memory.check_alive_at(range.start, range.len());
            return alive.map_err(|gone| FileError::from(CopyError::from(gone)));
        }
        let len = range.end.saturating_sub(range.start);
        let outside = AccessError::OutOfBounds { offset: range.start, len, window: self.len() };
        Err(FileError::Memory(outside.into()))
    }

    fn place(&self) -> RegionPlace<'_> {
        match &self.0 {
            Place::Host(window) => RegionPlace::Cpu(*window),
            Place::Gpu(memory) => memory.host().map_or(RegionPlace::Gpu(memory), RegionPlace::Cpu),
        }
    }
}
