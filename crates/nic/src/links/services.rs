//! Connection-manager services that a device offers: their socket names, and handovers to them.

use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;

use super::slot::ServiceName;
use crate::process::epoll::Epoll;

/// Service names, and one descriptor that is readable on a handover to any of them.
///
/// That descriptor is an epoll set: a thread that polls the sockets themselves would keep closed
/// names taken until it wakes.
#[derive(Debug)]
pub(super) struct Services {
    set: Epoll,
    bound: Vec<ServiceName>,
}

impl Services {
    /// None yet.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { set: Epoll::new()?, bound: Vec::new() })
    }

    /// Claims the name of a service; false if it is taken.
    pub(super) fn bind(&mut self, addr: IpAddr, service: u64) -> io::Result<bool> {
        let Some(name) = ServiceName::bind(addr, service)? else { return Ok(false) };
        self.set.add(name.fd())?;
        self.bound.push(name);
        Ok(true)
    }

    /// Releases a name at once: closing it removes it from the set.
    pub(super) fn unbind(&mut self, service: u64) {
        self.bound.retain(|bound| bound.service != service);
    }

    pub(super) fn bound(&self) -> &[ServiceName] {
        &self.bound
    }

    pub(super) fn bound_mut(&mut self) -> &mut [ServiceName] {
        &mut self.bound
    }

    /// Makes that descriptor readable with another one, until it is closed.
    pub(super) fn watch(&self, fd: RawFd) -> io::Result<()> {
        self.set.add(fd)
    }

    /// It is readable with that one no more.
    pub(super) fn unwatch(&self, fd: RawFd) {
        self.set.remove(fd);
    }

    /// The descriptor that becomes readable.
    pub(super) fn fd(&self) -> RawFd {
        self.set.fd()
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
