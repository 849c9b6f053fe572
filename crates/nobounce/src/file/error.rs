//! Why a file could not be read or written.

use std::io;
use std::time::Duration;

use nobounce_memory::FileIoError;
use nobounce_memory::gpu::copy_engine::CopyError;
use nobounce_memory::path::Reason;

use crate::access::AccessError;

/// Why bytes of a file did not get into a region, or the other way. A part of them may have.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be opened.
    #[error("cannot open {name}: {source}")]
    Open {
        /// Name of the file.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// It is a directory, a device, a pipe, ...
    #[error("{name} is {what}: only regular files can be read into memory")]
    NotAFile {
        /// Name of the file.
        name: String,
        /// What it is.
        what: &'static str,
    },
    /// The range is not inside the file; nothing was read.
    #[error(
        "{len} bytes at offset {offset} are not inside of {name}, which has {size} bytes; nothing was read"
    )]
    OutOfBounds {
        /// Name of the file.
        name: String,
        /// Requested offset in the file.
        offset: u64,
        /// Requested bytes.
        len: usize,
        /// Size of the file.
        size: u64,
    },
    /// It became shorter while it was read.
    #[error("{name} was truncated to {size} bytes while it was read")]
    Truncated {
        /// Name of the file.
        name: String,
        /// Its size now.
        size: u64,
    },
    /// Reading or writing it failed.
    #[error("cannot {what} {name} at offset {offset}: {source}")]
    Io {
        /// `read` or `write`.
        what: &'static str,
        /// Name of the file.
        name: String,
        /// Offset in the file.
        offset: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// The region's memory could not be accessed.
    #[error(transparent)]
    Memory(#[from] AccessError),
    /// A direct path was required.
    #[error("a direct path is required, but the bytes of {name} would be staged: {reason}")]
    NotDirect {
        /// Name of the file.
        name: String,
        /// Why they would.
        reason: Reason,
    },
    /// No result yet.
    #[error("no result within {0:?}; the job goes on: wait again")]
    Timeout(Duration),
    /// The result of a job was taken before.
    #[error("the result of this job was taken already")]
    Taken,
    /// The queue ended before it came to this job.
    #[error("the queue of file jobs was closed before this one ended")]
    Closed,
}

impl FileError {
    /// An error of a copy between the file `name` and memory.
    pub(super) fn of_io(what: &'static str, name: &str, at: u64, error: FileIoError) -> Self {
        let (offset, source) = match error {
            FileIoError::Memory(error) => return Self::Memory(error.into()),
            FileIoError::End(offset) => (offset, io::ErrorKind::UnexpectedEof.into()),
            FileIoError::Io(source) => (at, source),
            other => (at, io::Error::other(other)),
        };
        Self::Io { what, name: name.to_owned(), offset, source }
    }
}

impl From<CopyError> for FileError {
    fn from(error: CopyError) -> Self {
        Self::Memory(error.into())
    }
}
