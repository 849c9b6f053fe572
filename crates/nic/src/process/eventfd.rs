//! A counter in the kernel.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An eventfd: a kernel counter that can be polled.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A read takes the whole count and never blocks.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn new() -> io::Result<Self> {
        Self::with_flags(libc::EFD_NONBLOCK)
    }

    /// Semaphore mode: a read takes one and blocks while the count is 0, unless `O_NONBLOCK` is
    /// set.
    pub(crate) fn counting() -> io::Result<Self> {
        Self::with_flags(libc::EFD_SEMAPHORE)
    }

    fn with_flags(flags: i32) -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so `fd` is an open descriptor that has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds one.
    pub fn raise(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: `one` is 8 readable bytes. The only failure is a full counter, which is readable
        // all the same.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), 8) };
    }

    /// Takes the count (in semaphore mode, one). Returns whether it was nonzero. Never blocks,
    /// whatever the descriptor's flags.
    pub fn take(&self) -> bool {
        let mut count = [0_u8; 8];
        let io = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: count.len() };
        // SAFETY: one iovec of 8 writable bytes; offset -1 reads as read(2) does.
        let read = unsafe { libc::preadv2(self.0.as_raw_fd(), &raw const io, 1, -1, libc::RWF_NOWAIT) };
        if read >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EOPNOTSUPP) {
            return read == 8;
        }
        // A kernel before 5.8 does not know the flag here.
        // SAFETY: `count` is 8 writable bytes.
        self.is_raised() && unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), 8) == 8 }
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.wait(0)
    }

    /// Waits at most that many milliseconds. Returns whether the count is nonzero.
    pub(crate) fn wait(&self, ms: i32) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut poll, 1, ms) == 1 }
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
