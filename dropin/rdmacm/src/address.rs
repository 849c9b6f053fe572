//! Addresses in the form C has them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use nobounce_protocol::cm::ip;
use nobounce_verbs as verbs;

use crate::entry::Errno;

/// Reads an IP address.
///
/// # Safety
/// It points to an address as long as its family says.
pub(crate) unsafe fn read(from: *const libc::sockaddr) -> Result<SocketAddr, Errno> {
    if from.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: every address begins with its family.
    match i32::from(unsafe { (*from).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says what it is; it need not be aligned.
            let v4 = unsafe { from.cast::<libc::sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Ok(SocketAddr::new(ip.into(), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { from.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            // An IPv4 address in IPv6's clothes is one.
            Ok(match ip.to_ipv4_mapped() {
                Some(v4) => SocketAddr::new(v4.into(), u16::from_be(v6.sin6_port)),
                None => SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, v6.sin6_scope_id).into(),
            })
        }
        _ => Err(Errno(libc::EAFNOSUPPORT)),
    }
}

/// The address as C has it.
pub(crate) fn storage(from: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: numbers, for which zeroes are valid.
    let mut to: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    match from {
        SocketAddr::V4(v4) => {
            let name = libc::sockaddr_in {
                sin_family: family(libc::AF_INET),
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is larger than any address and aligned for all of them.
            unsafe { (&raw mut to).cast::<libc::sockaddr_in>().write(name) };
        }
        SocketAddr::V6(v6) => {
            let name = libc::sockaddr_in6 {
                sin6_family: family(libc::AF_INET6),
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut to).cast::<libc::sockaddr_in6>().write(name) };
        }
    }
    to
}

// address families are small positive constants
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
const fn family(af: i32) -> libc::sa_family_t {
    af as libc::sa_family_t
}

/// Its length by its family.
pub(crate) fn len(of: SocketAddr) -> libc::socklen_t {
    let bytes = if of.is_ipv4() { size_of::<libc::sockaddr_in>() } else { size_of::<libc::sockaddr_in6>() };
    libc::socklen_t::try_from(bytes).unwrap_or(0)
}

pub(crate) fn gid(of: IpAddr) -> verbs::Gid {
    verbs::Gid { raw: ip::gid(of) }
}
