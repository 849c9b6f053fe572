//! The services of the connection manager that a device offers: their names, and what is handed over to them.

use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;

use super::epoll::Epoll;
use super::slot::ServiceName;

/// Names of services, and one descriptor that is readable when something was handed over to any of them.
///
/// That is an epoll set: a thread that waits for the names themselves would keep them taken, after they were closed, until it wakes.
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

    /// Takes the name of a service; false where somebody has it.
    pub(super) fn bind(&mut self, addr: IpAddr, service: u64) -> io::Result<bool> {
        let Some(name) = ServiceName::bind(addr, service)? else { return Ok(false) };
        self.set.add(name.fd())?;
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
