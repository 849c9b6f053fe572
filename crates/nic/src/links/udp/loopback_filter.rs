//! Over IPv6 any user may send with a source address that this host does not have
//! (`IPV6_FREEBIND`), as a remote peer would. Such packets arrive by the loopback interface, which
//! is how a socket filter tells them.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

use super::socket::{LDW_ABS, RET_K, Socket};

const JEQ_K: u16 = 0x15;
/// Where a filter finds the interface of a packet, and its IP header.
const INTERFACE: u32 = 0xffff_f008; // SKF_AD_OFF + SKF_AD_IFINDEX
const SOURCE: u32 = 0xfff0_0008; // SKF_NET_OFF, and the source address in the header
/// Instructions for each address; the kernel takes 4096 in all.
const MOST: usize = 400;

/// Drops packets that come by loopback and do not have a source address of this host.
pub(super) fn attach(socket: &Socket, host: &[IpAddr]) -> io::Result<()> {
    // SAFETY: the call takes a C string.
    let loopback = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
    if loopback == 0 {
        return Ok(()); // without it no packet of this host arrives
    }
    let accept = instruction(RET_K, 0, 0, u32::MAX);
    let mut code = vec![instruction(LDW_ABS, 0, 0, INTERFACE), instruction(JEQ_K, 1, 0, loopback), accept];
    let v6 = host.iter().filter_map(|addr| match addr {
        IpAddr::V6(addr) => Some(*addr),
        IpAddr::V4(_) => None,
    });
    for addr in std::iter::once(Ipv6Addr::LOCALHOST).chain(v6).take(MOST) {
        for (at, word) in (0..4_u8).zip(addr.octets().chunks_exact(4)) {
            let word = u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
            code.push(instruction(LDW_ABS, 0, 0, SOURCE + 4 * u32::from(at)));
            code.push(instruction(JEQ_K, 0, 7 - 2 * at, word)); // or on to the next address
        }
        code.push(accept);
    }
    code.push(instruction(RET_K, 0, 0, 0));
    socket.attach(libc::SO_ATTACH_FILTER, &mut code)
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}
