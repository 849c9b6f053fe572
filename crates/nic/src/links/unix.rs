//! Unix sockets with abstract names, by which devices of one host find each other.
//!
//! A name needs no file and is free again when its process is gone. Any user can take a free name:
//! ends of a connection check who the other one is ([`is_ours`]).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::process::fork::NotInherited;
use crate::process::users;

/// Pause where a connection can be neither accepted nor refused.
const NO_DESCRIPTOR: Duration = Duration::from_millis(1);
/// Backlog of connections not accepted yet.
const BACKLOG: i32 = 64;

/// A socket that listens under a name.
#[derive(Debug)]
pub(super) struct Listener {
    fd: NotInherited,
    /// A descriptor to give up when there is no other.
    spare: Option<OwnedFd>,
}

/// A connection that came.
#[derive(Debug)]
pub(super) enum Accepted {
    /// It stays.
    Connection(NotInherited),
    /// This process has no descriptor left: it is good for a refusal and must be closed.
    ToRefuse(NotInherited),
}

impl Listener {
    /// Listens under a name; `None` if it is taken.
    pub(super) fn bind(name: &str) -> io::Result<Option<Self>> {
        let fd = NotInherited::open(|| socket(libc::SOCK_SEQPACKET))?;
        if !bind(&fd, name)? {
            return Ok(None);
        }
        // SAFETY: the call takes a descriptor and a number.
        if unsafe { libc::listen(fd.as_raw_fd(), BACKLOG) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Some(Self { fd, spare: spare() }))
    }

    /// Accepts the next connection, if there is one. Without a descriptor left, the spare one
    /// serves to refuse: a connection that stays in the backlog would keep the listener readable.
    pub(super) fn accept(&mut self) -> Option<Accepted> {
        self.restore_spare();
        match accept(&self.fd) {
            Ok(connection) => Some(Accepted::Connection(connection)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                if self.spare.take().is_none() {
                    // Another thread has taken it: the listener stays readable, and is looked at
                    // again and again.
                    std::thread::sleep(NO_DESCRIPTOR);
                }
                let connection = accept(&self.fd).ok();
                if connection.is_none() {
                    // The kernel wants a descriptor before it looks whether there is a connection.
                    self.restore_spare();
                }
                connection.map(Accepted::ToRefuse)
            }
            Err(_) => None,
        }
    }

    /// Opens the spare descriptor again, after a refused connection was closed.
    pub(super) fn restore_spare(&mut self) {
        if self.spare.is_none() {
            self.spare = spare();
        }
    }

    #[cfg(test)]
    pub(super) fn has_spare(&self) -> bool {
        self.spare.is_some()
    }

    /// Refuses new connections; those in the backlog can still be accepted.
    pub(super) fn stop_accepting(&self) {
        // SAFETY: takes no pointer.
        unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_RD) };
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// A descriptor of no use.
fn spare() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(OwnedFd::from)
}

fn accept(listener: &OwnedFd) -> io::Result<NotInherited> {
    NotInherited::open(|| {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let no_address = std::ptr::null_mut();
        // SAFETY: no address is requested.
        let fd = unsafe { libc::accept4(listener.as_raw_fd(), no_address, std::ptr::null_mut(), flags) };
        owned(fd)
    })
}

/// Connects to a listener. It does not block: a connection that the peer has not accepted yet
/// suffices. Not inherited across fork: the peer sees the exit of the parent, not of the child.
pub(super) fn connect(name: &str) -> io::Result<NotInherited> {
    let fd = NotInherited::open(|| socket(libc::SOCK_SEQPACKET))?;
    let (name, len) = unix_name(name);
    // SAFETY: the pointer and length describe a live Unix socket address.
    if unsafe { libc::connect(fd.as_raw_fd(), (&raw const name).cast(), len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// Whether the process at the other end runs as our user, as the kernel vouches. For the end that
/// connected this is the user who called listen.
pub(super) fn is_ours(connection: &OwnedFd) -> bool {
    let mut peer = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    let mut len = libc::socklen_t::try_from(size_of_val(&peer)).unwrap_or(0);
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    let to = (&raw mut peer).cast();
    // SAFETY: the pointers describe one live structure and its length.
    let known = unsafe { libc::getsockopt(connection.as_raw_fd(), level, name, to, &raw mut len) } == 0;
    known && users::is_ours(peer.uid)
}

/// A non-blocking Unix socket without a name.
pub(super) fn socket(kind: i32) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are passed.
    owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just opened and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Binds an abstract name; false if it is taken.
pub(super) fn bind(fd: &OwnedFd, name: &str) -> io::Result<bool> {
    let (name, len) = unix_name(name);
    // SAFETY: the pointer and length describe a live Unix socket address.
    if unsafe { libc::bind(fd.as_raw_fd(), (&raw const name).cast(), len) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EADDRINUSE) { Ok(false) } else { Err(error) }
}

/// An abstract name as system calls take it.
fn unix_name(text: &str) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: sockaddr_un is plain integers; zeros are a valid value.
    let mut name: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a small constant
    {
        name.sun_family = libc::AF_UNIX as libc::sa_family_t;
    }
    // The first byte stays 0: an abstract name, which needs no file and vanishes with its socket.
    for (to, from) in name.sun_path[1..].iter_mut().zip(text.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + text.len();
    (name, libc::socklen_t::try_from(len).unwrap_or(0))
}

/// What follows `prefix` in the abstract names of this network namespace, of any user.
pub(super) fn names_after(prefix: &str) -> Vec<String> {
    std::fs::read_to_string("/proc/self/net/unix").map(|table| after(&table, prefix)).unwrap_or_default()
}

fn after(table: &str, prefix: &str) -> Vec<String> {
    let name = |line: &str| {
        Some(line.split_whitespace().last()?.strip_prefix('@')?.strip_prefix(prefix)?.to_owned())
    };
    table.lines().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_from_the_kernels_table() {
        let table = "Num RefCount Protocol Flags Type St Inode Path\n\
            0: 2 0 0 0002 01 1 @nobounce/place/127.9.1.1/2/0\n\
            0: 2 0 0 0002 01 1 @nobounce/place/127.9.1.11/3/1\n\
            0: 2 0 0 0002 01 1\n\
            0: 2 0 0 0002 01 1 /run/nobounce/place/127.9.1.1/9\n\
            0: 2 0 0 0002 01 1 @nobounce/place/127.9.1.1/255/254\n";
        assert_eq!(after(table, "nobounce/place/127.9.1.1/"), ["2/0", "255/254"]);
    }

    #[test]
    fn a_closed_listener_still_gives_what_came_before() {
        let name = "nobounce/test/doors";
        assert!(connect(name).is_err(), "no listener");
        let mut listener = Listener::bind(name).unwrap().unwrap();
        assert!(Listener::bind(name).unwrap().is_none(), "the name is taken");
        let there = connect(name).unwrap();
        listener.stop_accepting();
        assert_eq!(connect(name).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let Some(Accepted::Connection(here)) = listener.accept() else { panic!("none came") };
        assert!(is_ours(&here) && is_ours(&there) && listener.accept().is_none());
    }
}
