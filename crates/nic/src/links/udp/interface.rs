//! The path MTU that the interface of an address supports.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::AsRawFd;

use nobounce_protocol::wire::{ICRC_LEN, ROCE_PORT};

use crate::interfaces::interface_of;

/// The longest headers of packets with payload need less (36 bytes); other devices reckon with
/// this.
const HEADERS: usize = 40;
/// Path MTUs, largest first.
const PATH_MTUS: [u32; 5] = [4096, 2048, 1024, 512, 256];
/// Assumed where the interface cannot be found: plain Ethernet.
const ETHERNET_MTU: u32 = 1500;
/// UDP header.
const UDP: usize = 8;

/// The largest path MTU whose packets pass the interface that has `addr` without being fragmented.
/// `added` bytes are added to each of them.
pub(super) fn max_path_mtu(addr: IpAddr, added: usize) -> u32 {
    if addr.is_loopback() {
        return PATH_MTUS[0];
    }
    fitting(addr, mtu_of(addr).unwrap_or(ETHERNET_MTU), added)
}

fn fitting(addr: IpAddr, mtu: u32, added: usize) -> u32 {
    let ip = if addr.is_ipv4() { 20 } else { 40 };
    let overhead = u32::try_from(ip + UDP + HEADERS + ICRC_LEN + added).unwrap_or(u32::MAX);
    PATH_MTUS.into_iter().find(|p| p.saturating_add(overhead) <= mtu).unwrap_or(256)
}

/// The largest path MTU whose packets the route to `remote` takes, as far as this machine knows: by
/// the route itself, and by ICMP messages of the last minutes. `None` without a route.
pub(crate) fn route_path_mtu(local: IpAddr, remote: IpAddr, added: usize) -> Option<u32> {
    if remote.is_loopback() {
        return Some(PATH_MTUS[0]);
    }
    let socket = UdpSocket::bind((local, 0)).ok()?;
    socket.connect((remote, ROCE_PORT)).ok()?;
    let (level, name) = match remote {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
    };
    let (mut mtu, mut len) = (0_i32, libc::socklen_t::try_from(size_of::<i32>()).ok()?);
    // SAFETY: the descriptor is open, and the option is an int of the length we say.
    let failed =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut mtu).cast(), &raw mut len) };
    if failed != 0 {
        return None;
    }
    Some(fitting(remote, u32::try_from(mtu).ok()?, added))
}

/// Queried by ioctl, not from /sys/class/net: that shows the namespace it was mounted in, which
/// need not be ours.
fn mtu_of(addr: IpAddr) -> Option<u32> {
    let name = interface_of(addr)?;
    // SAFETY: an ifreq is plain data, and all zeroes are one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero; a name that leaves no room for it is none of the system's.
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .or_else(|_| UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)))
        .ok()?;
    // SAFETY: the descriptor is open, and SIOCGIFMTU reads a name from the ifreq and writes the MTU
    // into it.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) } != 0 {
        return None;
    }
    // SAFETY: SIOCGIFMTU has filled in this member.
    u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_mtu_leaves_room_for_the_headers() {
        let (v4, v6) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]));
        for (addr, mtu, want) in [
            (v4, 1500, 1024),
            (v4, 9000, 4096),
            (v4, 4168, 4096),
            (v4, 4167, 2048),
            (v6, 4188, 4096),
            (v6, 4187, 2048),
            (v6, 1280, 1024),
            (v4, 100, 256),
        ] {
            assert_eq!(fitting(addr, mtu, 0), want, "{addr} {mtu}");
        }
        assert_eq!((fitting(v4, 4207, 40), fitting(v4, 4208, 40), fitting(v4, 1500, 40)), (2048, 4096, 1024));
        assert_eq!(max_path_mtu(IpAddr::from([127, 9, 9, 9]), 40), 4096);
    }

    #[test]
    fn the_route_to_this_machine_takes_what_its_interface_takes() {
        let here = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(route_path_mtu(here, here, 0), Some(4096));
        assert_eq!(route_path_mtu(IpAddr::from([192, 0, 2, 77]), IpAddr::from([192, 0, 2, 78]), 0), None);
    }

    #[test]
    fn the_mtu_is_what_the_system_says() {
        assert_eq!(mtu_of(IpAddr::from([192, 0, 2, 77])), None, "an unassigned address");
        let listed = std::fs::read_to_string("/sys/class/net/lo/mtu").expect("lo is everywhere");
        assert_eq!(mtu_of(IpAddr::from([127, 0, 0, 1])), listed.trim().parse().ok());
    }
}
