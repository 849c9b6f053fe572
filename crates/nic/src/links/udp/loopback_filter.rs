//! Over IPv6 any user may send with a source address that this host does not have
//! (`IPV6_FREEBIND`), as a remote peer would. Such packets arrive by the loopback interface, which
//! is how a socket filter tells them.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

use super::bpf::{self, plain, unless};
use super::socket::Socket;

/// Offset of the source address in an IPv6 header.
const SOURCE: u32 = bpf::IP_HEADER + 8;
/// Addresses, at 9 instructions each: the kernel takes 4096 in all.
const MAX_ADDRESSES: usize = 400;

/// Drops packets that come by loopback and do not have a source address of this host.
pub(super) fn attach(socket: &Socket, host: &[IpAddr]) -> io::Result<()> {
    // SAFETY: the call takes a C string.
    let loopback = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
    if loopback == 0 {
        return Ok(()); // without it no packet of this host arrives
    }
    let accept = plain(bpf::RET_K, u32::MAX);
    let not_loopback = libc::sock_filter { code: bpf::JEQ_K, jt: 1, jf: 0, k: loopback };
    let mut code = vec![plain(bpf::LDW_ABS, bpf::INTERFACE), not_loopback, accept];
    let v6 = host.iter().filter_map(|addr| match addr {
        IpAddr::V6(addr) => Some(*addr),
        IpAddr::V4(_) => None,
    });
    for addr in std::iter::once(Ipv6Addr::LOCALHOST).chain(v6).take(MAX_ADDRESSES) {
        for (at, word) in (0..4_u8).zip(addr.octets().chunks_exact(4)) {
            let word = u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
            code.push(plain(bpf::LDW_ABS, SOURCE + 4 * u32::from(at)));
            code.push(unless(word, 7 - 2 * at)); // to the next address
        }
        code.push(accept);
    }
    code.push(plain(bpf::RET_K, 0));
    socket.attach(libc::SO_ATTACH_FILTER, &mut code)
}
