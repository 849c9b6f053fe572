//! Unix sockets of the kind by which devices of one host find each other.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

fn socket() -> OwnedFd {
    // SAFETY: no pointers are passed; the result is checked before it is owned.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

type Call = unsafe extern "C" fn(i32, *const libc::sockaddr, libc::socklen_t) -> i32;

fn with_name(call: Call, name: &str) -> OwnedFd {
    let fd = socket();
    // SAFETY: sockaddr_un is plain integers; zeros are a valid value.
    let mut to: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    to.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in to.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    // SAFETY: the pointer and length describe a live address.
    let done = unsafe { call(fd.as_raw_fd(), (&raw const to).cast(), len as libc::socklen_t) };
    assert_eq!(done, 0, "{name}: {}", io::Error::last_os_error());
    fd
}

/// Takes an abstract name.
pub(crate) fn bind(name: &str) -> OwnedFd {
    with_name(libc::bind, name)
}

/// Connects to an abstract name.
pub(crate) fn connect(name: &str) -> OwnedFd {
    with_name(libc::connect, name)
}

/// Sends one message, unless the queue is full or the other end is closed.
pub(crate) fn send(to: &OwnedFd, bytes: &[u8]) {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: live bytes.
    unsafe { libc::send(to.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
}
