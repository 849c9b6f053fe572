//! Open files.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_memory::FileMapping;
use nobounce_memory::path::Reason;

use super::error::FileError;
use super::pieces::PIECE;

/// Alignment of `O_DIRECT` where the kernel does not state it: a page fits all devices.
const USUAL_ALIGNMENT: usize = 4096;

/// An open regular file. Several threads may use it at the same time.
#[derive(Debug)]
pub struct File {
    name: String,
    file: fs::File,
    direct: Result<Direct, Reason>,
    mapping: Mutex<Option<Arc<FileMapping>>>,
}

/// A second descriptor of the file, past the page cache.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) file: fs::File,
    /// What offsets, lengths and addresses are multiples of.
    pub(super) alignment: usize,
}

impl File {
    /// Opens a file to read it.
    ///
    /// # Errors
    /// There is no such file, it may not be read, or it is no regular file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FileError> {
        // A pipe without a writer must not block.
        Self::with(path.as_ref(), fs::File::options().read(true).custom_flags(libc::O_NONBLOCK))
    }

    /// Opens a file to read and write it, and creates it where there is none. Its bytes stay.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn create(path: impl AsRef<Path>) -> Result<Self, FileError> {
        let mut options = fs::File::options();
        options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK);
        Self::with(path.as_ref(), &options)
    }

    fn with(path: &Path, options: &fs::OpenOptions) -> Result<Self, FileError> {
        let name = path.display().to_string();
        match options.open(path) {
            Ok(file) => Self::from_std(file, name),
            Err(source) => Err(FileError::Open { name, source }),
        }
    }

    /// An open file; errors call it by this name.
    ///
    /// # Errors
    /// It is no regular file.
    pub fn from_std(file: fs::File, name: impl Into<String>) -> Result<Self, FileError> {
        let name = name.into();
        let kind = match file.metadata() {
            Ok(metadata) => metadata.file_type(),
            Err(source) => return Err(FileError::Open { name, source }),
        };
        if !kind.is_file() {
            let what = match kind {
                _ if kind.is_dir() => "a directory",
                _ if kind.is_block_device() => "a block device",
                _ if kind.is_char_device() => "a character device",
                _ if kind.is_fifo() => "a pipe",
                _ => "a special file",
            };
            return Err(FileError::NotAFile { name, what });
        }
        let direct = open_direct(&file);
        Ok(Self { name, file, direct, mapping: Mutex::default() })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its size now.
    ///
    /// # Errors
    /// The file system does not say.
    pub fn size(&self) -> Result<u64, FileError> {
        let size = self.file.metadata().map(|metadata| metadata.len());
        size.map_err(|source| self.failed("read", 0, source))
    }

    /// Brings what was written to the disk.
    ///
    /// # Errors
    /// The file system failed.
    pub fn sync(&self) -> Result<(), FileError> {
        self.file.sync_data().map_err(|source| self.failed("write", 0, source))
    }

    pub(super) fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(bytes, at)
    }

    pub(super) fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// Why long reads into GPU memory go through the page cache, where the file system has no
    /// `O_DIRECT`.
    pub fn direct_refused(&self) -> Option<&Reason> {
        self.direct.as_ref().err()
    }

    /// Its page cache from the first byte to `end` at least.
    pub(super) fn mapping(&self, end: usize) -> Result<Arc<FileMapping>, FileError> {
        let mut mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapping) = mapping.as_ref().filter(|mapping| mapping.len() >= end) {
            return Ok(mapping.clone());
        }
        let size = usize::try_from(self.size()?).unwrap_or(usize::MAX).max(end);
        let new = FileMapping::of(self.file.as_fd(), size).map_err(|source| self.failed("map", 0, source))?;
        Ok(mapping.insert(Arc::new(new)).clone())
    }

    pub(super) fn direct(&self) -> Option<&Direct> {
        self.direct.as_ref().ok()
    }

    pub(super) fn failed(&self, what: &'static str, offset: u64, source: io::Error) -> FileError {
        FileError::Io { what, name: self.name.clone(), offset, source }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Opens the same file with `O_DIRECT`: by its descriptor, since its name may be another file's
/// now.
fn open_direct(file: &fs::File) -> Result<Direct, Reason> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(path);
    let file = opened.map_err(|error| Reason::new(format!("open with O_DIRECT: {error}")))?;
    match alignment(&file) {
        Some(0) => Err(Reason::new("the file system has no O_DIRECT for this file")),
        Some(alignment) if !PIECE.is_multiple_of(alignment) => {
            Err(Reason::new(format!("O_DIRECT of this file needs units of {alignment} bytes")))
        }
        stated => Ok(Direct { file, alignment: stated.unwrap_or(USUAL_ALIGNMENT) }),
    }
}

/// The alignment that the kernel states, since Linux 6.1; 0 where `O_DIRECT` is not supported.
#[allow(unsafe_code)] // one system call
fn alignment(file: &fs::File) -> Option<usize> {
    // SAFETY: the structure is plain integers; zeros are a valid value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let (fd, flags) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
    // SAFETY: the path is a C string, and the structure is the one that the call fills.
    let done = unsafe { libc::statx(fd, c"".as_ptr(), flags, libc::STATX_DIOALIGN, &raw mut stat) };
    if done != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    usize::try_from(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align)).ok()
}
