//! Files into and out of windows, by the kernel's own copy.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{AccessError, Window};

/// Why bytes did not get from a file into memory, or the other way.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileIoError {
    /// The range is not inside the window, or its memory is gone.
    #[error(transparent)]
    Memory(#[from] AccessError),
    /// The file ended, or was truncated meanwhile.
    #[error("the file has no byte {0}")]
    End(u64),
    /// The kernel's error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Window {
    /// Fills `range` with bytes of the file from `at` on.
    ///
    /// # Errors
    /// See [`FileIoError`]; a part may be filled then.
    pub fn read_file(&self, range: Range<usize>, file: BorrowedFd<'_>, at: u64) -> Result<(), FileIoError> {
        // SAFETY: the kernel writes inside of the window, which expects changes by others; it
        // answers EFAULT where the memory is gone.
        self.transfer(range, at, |memory, len, at| unsafe { libc::pread(file.as_raw_fd(), memory, len, at) })
    }

    /// Writes the bytes of `range` to the file, from `at` on.
    ///
    /// # Errors
    /// See [`FileIoError`]; a part may be written then.
    pub fn write_file(&self, range: Range<usize>, file: BorrowedFd<'_>, at: u64) -> Result<(), FileIoError> {
        // SAFETY: as above; the kernel reads there.
        self.transfer(range, at, |memory, len, at| unsafe { libc::pwrite(file.as_raw_fd(), memory, len, at) })
    }

    fn transfer(
        &self,
        range: Range<usize>,
        at: u64,
        call: impl Fn(*mut libc::c_void, usize, libc::off_t) -> isize,
    ) -> Result<(), FileIoError> {
        let len = range.end.saturating_sub(range.start);
        let memory = self.at(range.start, len)?;
        let mut done = 0;
        while done < len {
            let here = at + done as u64;
            let place = libc::off_t::try_from(here).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
            match call(memory.wrapping_add(done).cast(), len - done, place) {
                0 => return Err(FileIoError::End(here)),
                moved if moved > 0 => done += moved.unsigned_abs(),
                _ => {
                    let error = io::Error::last_os_error();
                    match error.raw_os_error() {
                        Some(libc::EINTR) => {}
                        Some(libc::EFAULT) => {
                            let address = memory.wrapping_add(done).addr() as u64;
                            return Err(AccessError::Faulted { address }.into());
                        }
                        _ => return Err(error.into()),
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::{HostBuffer, shared_file};

    #[test]
    fn bytes_come_back_from_a_file() {
        let file = shared_file::create(10_000).unwrap();
        let buffer = HostBuffer::new(8192).unwrap();
        // SAFETY: the buffer outlives the window.
        let window = unsafe { buffer.window() };
        let bytes: Vec<u8> = (0..5000_u32).map(|at| at.to_le_bytes()[0]).collect();
        buffer.write_at(100, &bytes).unwrap();
        window.write_file(100..5100, file.as_fd(), 4000).unwrap();
        window.read_file(0..5000, file.as_fd(), 4000).unwrap();
        let mut back = vec![0; 5000];
        buffer.read_at(0, &mut back).unwrap();
        assert_eq!(back, bytes);
    }

    #[test]
    fn ends_and_bounds_are_errors() {
        let file = shared_file::create(4096).unwrap();
        let buffer = HostBuffer::new(8192).unwrap();
        // SAFETY: as above.
        let window = unsafe { buffer.window() };
        let error = window.read_file(0..8192, file.as_fd(), 0).unwrap_err();
        assert!(matches!(error, FileIoError::End(4096)), "{error}");
        let error = window.read_file(8000..9000, file.as_fd(), 0).unwrap_err();
        assert!(matches!(error, FileIoError::Memory(AccessError::OutOfBounds { .. })), "{error}");
        assert!(window.write_file(0..8, file.as_fd(), 4096).is_err(), "it is sealed");
    }
}
