//! Descriptors that become readable when something happened.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// A counter in the kernel that can be polled.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so `fd` is an open descriptor that nobody else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn raise(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: `one` is 8 readable bytes. The only failure is a full counter, which is readable all the same.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), 8) };
    }

    /// Takes what was raised; whether anything was.
    pub(crate) fn take(&self) -> bool {
        let mut count = [0_u8; 8];
        // SAFETY: `count` is 8 writable bytes.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), 8) == 8 }
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A completion channel: readable when a completion queue that was armed on it has something.
#[derive(Clone, Debug)]
pub struct Channel {
    pub(crate) fd: Arc<EventFd>,
}

impl Channel {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { fd: Arc::new(EventFd::new()?) })
    }

    /// Takes the event; whether there was one. Never blocks: poll the descriptor to wait.
    pub fn take(&self) -> bool {
        self.fd.take()
    }

    /// Waits for an event, at most `timeout`; whether one came (it is taken).
    pub fn wait(&self, timeout: std::time::Duration) -> bool {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut poll, 1, ms) };
        self.fd.take()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
