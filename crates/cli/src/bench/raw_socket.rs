//! The few socket options the raw measurement needs and std does not have.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

use anyhow::Context;

/// Requested in both directions; an ordinary user gets what `rmem_max` and `wmem_max` allow.
const SOCKET_BUFFER: libc::c_int = 4 << 20;

/// A UDP socket on a loopback port of the kernel's choice, with large buffers.
pub(crate) fn open() -> anyhow::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot open a UDP socket on loopback")?;
    // A refusal only costs bandwidth, on both sides of the comparison alike.
    let _ = set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, SOCKET_BUFFER);
    let _ = set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUF, SOCKET_BUFFER);
    Ok(socket)
}

/// UDP GSO: the kernel segments each send into datagrams of this size; 0 turns that off.
pub(crate) fn set_segment(socket: &UdpSocket, bytes: usize) -> anyhow::Result<()> {
    let bytes = libc::c_int::try_from(bytes).context("UDP segment too large")?;
    set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, bytes)
        .context("this kernel cannot batch UDP sends (UDP_SEGMENT needs Linux 4.18)")
}

/// Lets the kernel hand over several datagrams in one receive.
pub(crate) fn receive_coalesced(socket: &UdpSocket) -> anyhow::Result<()> {
    set(socket, libc::SOL_UDP, libc::UDP_GRO, 1)
        .context("this kernel cannot batch UDP receives (UDP_GRO needs Linux 5.0)")
}

fn set(socket: &UdpSocket, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open as long as `socket` is borrowed; the value is an int of the
    // length we say.
    let failed =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length) };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
