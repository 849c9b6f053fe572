//! Sockets that are not a device's, and a network of one's own for them.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::Command;

use nobounce_protocol::wire::ROCE_PORT;

/// A socket on RoCE's port. It shares the port, as devices do: their guards exclude others.
pub(crate) fn plain_socket(addr: Ipv4Addr) -> UdpSocket {
    // SAFETY: no pointers are passed; the result is checked before it is owned.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        UdpSocket::from_raw_fd(fd)
    };
    let at = libc::sockaddr_in {
        sin_family: libc::AF_INET.try_into().unwrap(),
        sin_port: ROCE_PORT.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(addr.octets()) },
        sin_zero: [0; 8],
    };
    let on: libc::c_int = 1;
    let (fd, len) = (socket.as_raw_fd(), libc::socklen_t::try_from(size_of_val(&at)).unwrap());
    // SAFETY: the pointers and lengths describe one live integer and one live address.
    unsafe {
        let on = (&raw const on).cast();
        assert_eq!(libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, on, 4), 0);
        assert_eq!(libc::bind(fd, (&raw const at).cast(), len), 0, "{}", std::io::Error::last_os_error());
    }
    socket
}

/// Moves this thread to a network without devices of other tests; false where it may not.
pub(crate) fn own_network() -> bool {
    // SAFETY: unshare moves this thread alone to a new network namespace.
    let is_own = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
    is_own && Command::new("ip").args(["link", "set", "lo", "up"]).status().is_ok_and(|s| s.success())
}
