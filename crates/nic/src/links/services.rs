//! The services of the connection manager that a device offers: their names, and what is handed over to them.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::slot::ServiceName;

/// Names of services, and one descriptor that is readable when something was handed over to any of them.
///
/// That is an epoll set: a thread that waits for the names themselves would keep them taken, after they were closed, until it wakes.
#[derive(Debug)]
pub(super) struct Services {
    set: OwnedFd,
    bound: Vec<ServiceName>,
}

impl Services {
    /// None yet.
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: takes no pointers; the result is checked before it is owned.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just opened and nobody else owns it.
        Ok(Self { set: unsafe { OwnedFd::from_raw_fd(fd) }, bound: Vec::new() })
    }

    /// Takes the name of a service; false where somebody has it.
    pub(super) fn bind(&mut self, addr: IpAddr, service: u64) -> io::Result<bool> {
        let Some(name) = ServiceName::bind(addr, service)? else { return Ok(false) };
        let readable = libc::EPOLLIN.cast_unsigned();
        let mut event = libc::epoll_event { events: readable, u64: service };
        // SAFETY: two open descriptors and a valid event, which is copied.
        let added =
            unsafe { libc::epoll_ctl(self.set.as_raw_fd(), libc::EPOLL_CTL_ADD, name.fd(), &raw mut event) };
        if added < 0 {
            return Err(io::Error::last_os_error());
        }
        self.bound.push(name);
        Ok(true)
    }

    /// Gives a name back, at once: closing it takes it out of the set.
    pub(super) fn unbind(&mut self, service: u64) {
        self.bound.retain(|bound| bound.service != service);
    }

    pub(super) fn bound(&self) -> &[ServiceName] {
        &self.bound
    }

    /// What becomes readable.
    pub(super) fn fd(&self) -> RawFd {
        self.set.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_once_and_free_at_once() {
        let addr = "127.77.2.1".parse().unwrap();
        let (mut one, mut other) = (Services::new().unwrap(), Services::new().unwrap());
        assert!(one.bind(addr, 7).unwrap());
        assert!(!other.bind(addr, 7).unwrap() && !one.bind(addr, 7).unwrap());
        assert!(other.bind(addr, 8).unwrap());
        one.unbind(7);
        assert!(other.bind(addr, 7).unwrap());
    }
}
