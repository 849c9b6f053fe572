//! Multicast groups: a socket for each, bound to the group's address.
//!
//! The socket of the device is bound to a unicast address, and the kernel gives it no multicast.
//! Every device that joins has a socket of its own, and the kernel gives each a copy.

use std::io;
use std::net::IpAddr;

use nobounce_protocol::wire::ROCE_PORT;

use super::socket::{SockAddr, Socket};
use crate::interfaces::interface_index;

/// `IPV6_MULTICAST_ALL`, which libc lacks.
const IPV6_MULTICAST_ALL: i32 = 29;

/// One joined group.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) addr: IpAddr,
    pub(super) socket: Socket,
}

impl Group {
    /// Joins a group on the interface of `local`.
    pub(super) fn join(addr: IpAddr, local: IpAddr, scope: u32) -> io::Result<Self> {
        if !addr.is_multicast() || addr.is_ipv4() != local.is_ipv4() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let socket = Socket::new(addr).map_err(io::Error::other)?;
        // Other programs may receive the group, too.
        socket.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        let index = if local.is_ipv6() { index_of(local, scope)? } else { 0 };
        socket.bind(&SockAddr::new(addr, ROCE_PORT, index))?;
        match (addr, local) {
            (IpAddr::V4(group), IpAddr::V4(local)) => {
                // Otherwise groups that other sockets joined on other interfaces arrive as well.
                socket.set(libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
                let request = libc::ip_mreqn {
                    imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(group.octets()) },
                    imr_address: libc::in_addr { s_addr: u32::from_ne_bytes(local.octets()) },
                    imr_ifindex: 0,
                };
                socket.set_value(libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &request)?;
            }
            (IpAddr::V6(group), IpAddr::V6(_)) => {
                socket.set(libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0)?;
                let request = libc::ipv6_mreq {
                    ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
                    ipv6mr_interface: index,
                };
                socket.set_value(libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, &request)?;
            }
            _ => {}
        }
        Ok(Self { addr, socket })
    }
}

/// Lets a socket send multicast by the interface of `local`. Where the system refuses, the routing
/// table names the interface.
pub(super) fn send_by(socket: &Socket, local: IpAddr, scope: u32) {
    let done = match local {
        IpAddr::V4(local) => {
            let local = libc::in_addr { s_addr: u32::from_ne_bytes(local.octets()) };
            socket.set_value(libc::IPPROTO_IP, libc::IP_MULTICAST_IF, &local)
        }
        IpAddr::V6(_) => index_of(local, scope)
            .and_then(|index| socket.set_value(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, &index)),
    };
    if let Err(error) = done {
        tracing::debug!(%error, "multicast leaves by the interface that the routing table names");
    }
}

fn index_of(local: IpAddr, scope: u32) -> io::Result<u32> {
    if scope != 0 {
        return Ok(scope);
    }
    interface_index(local).ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
}
