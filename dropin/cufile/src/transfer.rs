//! Reads and writes.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use nobounce::file::{FileError, FileOptions, LocalMemory};

use crate::abi::Status;
use crate::entry::Errno;
use crate::{log, memory, parameters, report, stats, table};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// One read or write, as the program asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) direction: Direction,
    /// `CUfileHandle_t`.
    pub(crate) handle: *mut c_void,
    pub(crate) base: *mut c_void,
    pub(crate) size: usize,
    pub(crate) file_offset: i64,
    pub(crate) buffer_offset: i64,
}

// SAFETY: the pointers are numbers here; memory is reached through registrations only.
unsafe impl Send for Request {}

/// Why bytes did not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Status(Status),
    System(Errno),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl Failure {
    /// What a read returns: the negative of cuFile's error, or -1 with errno.
    pub(crate) fn returned(self) -> isize {
        match self {
            Self::Status(status) => -(status as isize),
            Self::System(errno) => {
                errno.set();
                -1
            }
        }
    }

    /// The same where errno does not reach the program.
    pub(crate) fn stored(self) -> isize {
        match self {
            Self::Status(status) => -(status as isize),
            Self::System(_) => -(Status::Io as isize),
        }
    }
}

/// Carries out a request; returns the bytes moved, fewer at the end of the file.
pub(crate) fn run(request: &Request) -> Result<usize, Failure> {
    let begun = Instant::now();
    let result = moved(request);
    stats::count(request.direction, result.ok(), begun.elapsed());
    result
}

fn moved(request: &Request) -> Result<usize, Failure> {
    let &Request { direction, handle, base, size, file_offset, buffer_offset } = request;
    let opened = table::file(handle)?;
    let file = &opened.file;
    let offset = u64::try_from(file_offset).map_err(|_| Status::InvalidValue)?;
    let start = u64::try_from(buffer_offset).map_err(|_| Status::InvalidValue)?;
    let addr = (base.addr() as u64).checked_add(start).ok_or(Status::InvalidValue)?;
    let len = match direction {
        Direction::Write => size,
        Direction::Read => {
            let left = file.size().map_err(failed)?.saturating_sub(offset);
            size.min(usize::try_from(left).unwrap_or(usize::MAX))
        }
    };
    if len == 0 {
        return Ok(0);
    }
    let (memory, range, is_registered) = place(addr, len)?;
    let options = FileOptions { require: parameters::require() };
    let done = match direction {
        Direction::Read => memory.read_file(file, offset, range, options),
        Direction::Write => memory.write_file(file, offset, range, options),
    };
    let done = done.map_err(failed)?;
    if !is_registered && done.paths.staged.bytes > 0 {
        report::count_unregistered(direction, len);
    }
    Ok(len)
}

/// The memory of these bytes, where they are in it, and whether the program has registered it.
fn place(addr: u64, len: usize) -> Result<(Arc<LocalMemory>, Range<usize>, bool), Failure> {
    if let Some(table::Buffer { base, memory }) = table::buffer(addr, len) {
        let start = usize::try_from(addr - base).map_err(|_| Status::InvalidValue)?;
        return Ok((memory, start..start + len, true));
    }
    // A window costs more to make than it saves once.
    Ok((Arc::new(memory::at(addr, len, false)?), 0..len, false))
}

fn failed(error: FileError) -> Failure {
    log::warn(|| format!("cufile: {error}"));
    match error {
        FileError::Io { source, .. } | FileError::Open { source, .. } => Failure::System(source.into()),
        FileError::NotDirect { .. } => Failure::Status(Status::IoNotSupported),
        FileError::Memory(_) => Failure::Status(Status::PointerInvalid),
        _ => Failure::System(Errno::EIO),
    }
}
