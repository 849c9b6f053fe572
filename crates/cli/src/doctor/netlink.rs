//! One question to the kernel by rtnetlink, and its answer.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// How long the kernel may take; it answers at once.
const TIMEOUT: Duration = Duration::from_millis(200);

/// Sends a message and receives the answer, without privilege.
pub(super) fn exchange(question: &[u8]) -> io::Result<Vec<u8>> {
    // SAFETY: makes a descriptor; no memory is given.
    let fd =
        unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_ROUTE) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let timeout = libc::timeval { tv_sec: 0, tv_usec: TIMEOUT.subsec_micros().into() };
    let length = libc::socklen_t::try_from(size_of_val(&timeout)).map_err(io::Error::other)?;
    // SAFETY: the option is a `timeval`, and lives during the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            (&raw const timeout).cast(),
            length,
        )
    };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the bytes live during the call; without an address the kernel is meant.
    let sent = unsafe { libc::send(socket.as_raw_fd(), question.as_ptr().cast(), question.len(), 0) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut answer = vec![0_u8; 8192];
    // SAFETY: the buffer is as long as we say.
    let received = unsafe { libc::recv(socket.as_raw_fd(), answer.as_mut_ptr().cast(), answer.len(), 0) };
    let Ok(received) = usize::try_from(received) else { return Err(io::Error::last_os_error()) };
    answer.truncate(received);
    Ok(answer)
}
