//! The addresses of this network namespace, and whose they are.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Every address, and the interface that has it.
pub(crate) fn addresses() -> Vec<(String, IpAddr)> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the result; it is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let (mut found, mut at) = (Vec::new(), list);
    while !at.is_null() {
        // SAFETY: `at` walks the list that getifaddrs made, whose entries are valid until freeifaddrs.
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
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        found.push((name, addr));
    }
    // SAFETY: the list came from getifaddrs and is not used any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// The interface that has an address; loopback has all of its network's.
pub(crate) fn having(addresses: &[(String, IpAddr)], addr: IpAddr) -> Option<String> {
    let exact = addresses.iter().find(|(_, have)| *have == addr);
    let loopback = || addresses.iter().find(|(_, have)| addr.is_loopback() && have.is_loopback());
    exact.or_else(loopback).map(|(name, _)| name.clone())
}
