//! An epoll set: a descriptor that is readable when one of its members is.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The set. Closed descriptors leave it by themselves.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

/// Most members that one call names.
const MOST_READY: usize = 16;

/// Members that are readable.
#[derive(Debug)]
pub(crate) struct Ready {
    fds: [RawFd; MOST_READY],
    count: usize,
}

impl Ready {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether it is among them.
    pub(crate) fn has(&self, fd: RawFd) -> bool {
        self.fds[..self.count].contains(&fd)
    }
}

impl Epoll {
    /// None yet.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes no pointers; the result is checked before it is owned.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just opened and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds a descriptor; it is also readable when its peer is gone.
    pub(crate) fn add(&self, fd: RawFd) -> io::Result<()> {
        let events = (libc::EPOLLIN | libc::EPOLLRDHUP).cast_unsigned();
        let mut event = libc::epoll_event { events, u64: u64::from(fd.cast_unsigned()) };
        // SAFETY: two open descriptors and a valid event, which is copied.
        if unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Removes a descriptor that other owners may keep open.
    pub(crate) fn remove(&self, fd: RawFd) {
        // SAFETY: two descriptors; no event is needed to take one out. One that is not in the set
        // changes nothing.
        unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }

    /// A member that is readable now.
    pub(crate) fn next_ready(&self) -> Option<RawFd> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event.
        let found = unsafe { libc::epoll_wait(self.fd(), &raw mut event, 1, 0) } > 0;
        found.then_some(event.u64).and_then(|fd| RawFd::try_from(fd).ok())
    }

    /// Members that are readable now. Where there are more, the next call names others.
    pub(crate) fn ready(&self) -> Ready {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST_READY];
        let most = i32::try_from(MOST_READY).unwrap_or(1);
        // SAFETY: room for so many events.
        let found = unsafe { libc::epoll_wait(self.fd(), events.as_mut_ptr(), most, 0) };
        let fds = events.map(|event| RawFd::try_from(event.u64).unwrap_or(-1));
        Ready { fds, count: usize::try_from(found).unwrap_or(0) }
    }

    /// The descriptor of the set.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
