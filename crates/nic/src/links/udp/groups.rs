//! Multicast groups: a socket for each, bound to the group's address.
//!
//! The socket of the device is bound to a unicast address, and the kernel gives it no multicast.
//! Every device that joins has a socket of its own, and the kernel gives each a copy.

use std::io;
use std::net::IpAddr;

use nobounce_protocol::wire::ROCE_PORT;

use super::OpenError;
use super::receive::UdpReceiver;
use super::socket::{SockAddr, Socket};
use crate::interfaces::interface_index;

/// The groups of a device.
#[derive(Debug, Default)]
pub(super) struct JoinedGroups {
    pub(super) joined: Vec<JoinedGroup>,
    /// Apart from that of unicast, whose way to receive depends on what it found last.
    receiver: Option<UdpReceiver>,
}

impl JoinedGroups {
    /// Joins a group on the interface of `local`.
    pub(super) fn join(&mut self, addr: IpAddr, local: IpAddr, scope: u32) -> io::Result<&JoinedGroup> {
        self.receiver.get_or_insert_with(|| UdpReceiver::new(false));
        self.joined.push(JoinedGroup::join(addr, local, scope)?);
        self.joined.last().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Leaves a group.
    pub(super) fn leave(&mut self, addr: IpAddr) -> Option<JoinedGroup> {
        let at = self.joined.iter().position(|group| group.addr == addr)?;
        Some(self.joined.swap_remove(at))
    }

    /// The groups, and what receives for them.
    pub(super) fn parts(&mut self) -> Option<(&[JoinedGroup], &mut UdpReceiver)> {
        Some((&self.joined, self.receiver.as_mut()?))
    }

    /// Datagrams the kernel dropped because a receive buffer was full.
    pub(super) fn drops(&self) -> u64 {
        self.joined.iter().map(|group| group.socket.drops()).sum()
    }
}

/// One joined group.
#[derive(Debug)]
pub(super) struct JoinedGroup {
    pub(super) addr: IpAddr,
    pub(super) socket: Socket,
    membership: Membership,
}

impl JoinedGroup {
    fn join(addr: IpAddr, local: IpAddr, scope: u32) -> io::Result<Self> {
        let membership = Membership::new(addr, local, scope)?;
        let socket = Socket::new(addr).map_err(|error| match error {
            OpenError::Os { source, .. } => source,
            other => io::Error::other(other),
        })?;
        // Other programs may receive the group, too.
        socket.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        membership.confine(&socket)?;
        socket.bind(&SockAddr::new(addr, ROCE_PORT, membership.interface()))?;
        membership.change(&socket, true)?;
        Ok(Self { addr, socket, membership })
    }

    /// Ends the membership, which a forked child's copy of the socket would prolong.
    pub(super) fn end(&self) {
        let _ = self.membership.change(&self.socket, false); // it is gone then
    }
}

/// A group on one interface, as system calls have it.
#[derive(Clone, Copy)]
enum Membership {
    V4(libc::ip_mreqn),
    V6(libc::ipv6_mreq),
}

impl Membership {
    fn new(group: IpAddr, local: IpAddr, scope: u32) -> io::Result<Self> {
        match (group, local) {
            (IpAddr::V4(group), IpAddr::V4(local)) if group.is_multicast() => Ok(Self::V4(libc::ip_mreqn {
                imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(group.octets()) },
                imr_address: libc::in_addr { s_addr: u32::from_ne_bytes(local.octets()) },
                imr_ifindex: 0,
            })),
            (IpAddr::V6(group), IpAddr::V6(_)) if group.is_multicast() => Ok(Self::V6(libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
                ipv6mr_interface: index_of(local, scope)?,
            })),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// The number of the interface; 0 if the address names it.
    fn interface(&self) -> u32 {
        match self {
            Self::V4(_) => 0,
            Self::V6(request) => request.ipv6mr_interface,
        }
    }

    /// Keeps packets of the group away that arrive on other interfaces, where other sockets joined.
    fn confine(&self, socket: &Socket) -> io::Result<()> {
        match self {
            Self::V4(_) => socket.set(libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0),
            // IPV6_MULTICAST_ALL compares the group alone.
            Self::V6(request) => {
                socket.set_value(libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, &request.ipv6mr_interface)
            }
        }
    }

    fn change(&self, socket: &Socket, joins: bool) -> io::Result<()> {
        match self {
            Self::V4(request) => {
                let name = if joins { libc::IP_ADD_MEMBERSHIP } else { libc::IP_DROP_MEMBERSHIP };
                socket.set_value(libc::IPPROTO_IP, name, request)
            }
            Self::V6(request) => {
                let name = if joins { libc::IPV6_ADD_MEMBERSHIP } else { libc::IPV6_DROP_MEMBERSHIP };
                socket.set_value(libc::IPPROTO_IPV6, name, request)
            }
        }
    }
}

impl std::fmt::Debug for Membership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Membership").field("interface", &self.interface()).finish_non_exhaustive()
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
