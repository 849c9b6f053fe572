//! The addresses of this network namespace and their interfaces.

use std::ffi::{CStr, CString};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address, and the interface that has it.
#[derive(Clone, Debug)]
pub(crate) struct Here {
    pub(crate) name: String,
    /// The interface's number in this network namespace.
    index: Option<u32>,
    pub(crate) addr: IpAddr,
}

/// Every address.
pub(crate) fn addresses() -> Vec<Here> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the result; it is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let (mut found, mut at) = (Vec::new(), list);
    while !at.is_null() {
        // SAFETY: `at` walks the list that getifaddrs made, whose entries are valid until
        // freeifaddrs.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: not null; its family says which structure it points to.
        let addr: IpAddr = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: the family is AF_INET, so it is a sockaddr_in.
                let v4 = unsafe { &*entry.ifa_addr.cast::<libc::sockaddr_in>() };
                Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into()
            }
            libc::AF_INET6 => {
                // SAFETY: the family is AF_INET6, so it is a sockaddr_in6.
                let v6 = unsafe { &*entry.ifa_addr.cast::<libc::sockaddr_in6>() };
                Ipv6Addr::from(v6.sin6_addr.s6_addr).into()
            }
            _ => continue,
        };
        // SAFETY: ifa_name is a C string of that list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        // SAFETY: as above.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        let index = (index != 0).then_some(index);
        found.push(Here { name: name.to_string_lossy().into_owned(), index, addr });
    }
    // SAFETY: the list came from getifaddrs and is not used any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// The number of the interface that has `addr`.
pub(crate) fn interface_index(addr: IpAddr) -> Option<u32> {
    addresses().into_iter().find(|here| here.addr == addr)?.index
}

/// The name of the interface that has `addr`, as far as the system lists it.
pub fn interface_of(addr: IpAddr) -> Option<String> {
    addresses().into_iter().find(|here| here.addr == addr).map(|here| here.name)
}

/// The number of an interface of this network namespace.
pub fn index_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // SAFETY: a C string.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}

/// The interface that has an address; loopback has its whole network. A GID table entry with an
/// `ifindex` must match that interface: VLANs of one adapter share a link-local address, and
/// another network namespace may have the same addresses.
pub(crate) fn having(addresses: &[Here], addr: IpAddr, ifindex: Option<u32>) -> Option<String> {
    let its_own = |here: &&Here| ifindex.is_none() || here.index.is_none() || here.index == ifindex;
    let exact = addresses.iter().filter(its_own).find(|here| here.addr == addr);
    let loopback =
        || addresses.iter().filter(its_own).find(|here| addr.is_loopback() && here.addr.is_loopback());
    exact.or_else(loopback).map(|here| here.name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vlans_of_one_address_are_told_apart_by_their_number() {
        let here = |name: &str, index, addr: &str| Here {
            name: name.to_owned(),
            index: Some(index),
            addr: addr.parse().unwrap(),
        };
        let all = [
            here("lo", 1, "127.0.0.1"),
            here("eth0", 2, "fe80::1"),
            here("eth0.100", 7, "fe80::1"),
            here("eth0", 2, "10.0.0.7"),
        ];
        let of = |addr: &str, index| having(&all, addr.parse().unwrap(), index);
        assert_eq!(of("fe80::1", Some(7)).as_deref(), Some("eth0.100"));
        assert_eq!(of("fe80::1", Some(2)).as_deref(), Some("eth0"));
        assert_eq!(of("fe80::1", None).as_deref(), Some("eth0"), "the first, without an index");
        assert_eq!(of("10.0.0.7", Some(9)), None, "that of another network namespace");
        assert_eq!(of("127.9.8.7", Some(1)).as_deref(), Some("lo"));
    }

    #[test]
    fn this_machine_has_loopback() {
        let index = index_of("lo").expect("a loopback interface");
        assert_eq!(having(&addresses(), Ipv4Addr::LOCALHOST.into(), Some(index)).as_deref(), Some("lo"));
        assert_eq!(index_of("no such interface"), None);
        assert_eq!(interface_of(Ipv4Addr::LOCALHOST.into()).as_deref(), Some("lo"));
        assert_eq!(interface_of(IpAddr::from([192, 0, 2, 77])), None);
    }
}
