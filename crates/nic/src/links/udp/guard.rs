//! Keeps other users from port 4791 of every address of this host.
//!
//! A user who holds the port of any local address can send with the source address of any other
//! (`IP_PKTINFO`), so a packet's source port tells its user only if one user holds the port
//! everywhere. A socket for all addresses reserves it: the kernel shares it with sockets of the
//! same user only. It receives nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nobounce_protocol::wire::ROCE_PORT;

use super::socket::{SockAddr, Socket};
use crate::links::OpenError;

/// The reservation of the port; ends on drop.
#[derive(Debug)]
pub(super) struct PortGuard {
    _socket: Socket,
}

impl PortGuard {
    /// Reserves the port for this user, for a device at `addr`.
    ///
    /// # Errors
    /// Another user holds it somewhere, or a program that does not share it.
    pub(super) fn take(addr: IpAddr) -> Result<Self, OpenError> {
        let os = |call| move |source| OpenError::Os { addr, call, source };
        // One for both families; without IPv6 no one has the port there.
        let (socket, any) = match Socket::dual() {
            Ok(socket) => (socket, IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
            Err(_) => (Socket::new(addr)?, IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        };
        socket.drop_all().map_err(os("setsockopt(SO_ATTACH_FILTER)"))?;
        // spares copies, which it would drop
        let _ = socket.set(libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0);
        let bound = socket.bind(&SockAddr::new(any, ROCE_PORT, 0));
        // The kernel may overlook older sockets of other addresses, and no newer ones can follow.
        OpenError::if_held_elsewhere(addr)?;
        match bound {
            Ok(()) => Ok(Self { _socket: socket }),
            Err(error) => Err(OpenError::from_guard(addr, error)),
        }
    }
}
