//! A named socket to which other devices of our user connect, and what they send.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use super::unix::{self, Accepted, Listener};
use crate::process::epoll::Epoll;
use crate::process::fork::NotInherited;

/// Maximum open connections: more than an address has slots.
const MAX_CONNECTIONS: usize = 1024;
/// Send buffer requested for a connection; the kernel caps it.
const SEND_BUFFER: i32 = 1 << 20;

/// A connection to another device.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) fd: NotInherited,
    /// The slot at its other end, once known.
    pub(super) slot: Option<u8>,
}

/// The socket and its connections.
#[derive(Debug)]
pub(super) struct Inbox {
    /// Readable when there is something to take.
    set: Epoll,
    listener: Option<Listener>,
    pub(super) connections: Vec<Connection>,
}

/// What was there to take.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// A message of so many bytes, on the connection of that index.
    Message(usize, usize),
    /// A connection of another user, or one too many; or a message that is too long.
    Refused,
    /// The other end closed a connection.
    Gone,
}

impl Inbox {
    /// Without a name yet.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { set: Epoll::new()?, listener: None, connections: Vec::new() })
    }

    /// Listens under a name; false if it is taken.
    pub(super) fn bind(&mut self, name: &str) -> io::Result<bool> {
        let Some(listener) = Listener::bind(name)? else { return Ok(false) };
        self.set.add(listener.fd())?;
        self.listener = Some(listener);
        Ok(true)
    }

    /// Connects to a device of our user; returns the index of the connection.
    pub(super) fn connect(&mut self, name: &str, slot: Option<u8>) -> io::Result<usize> {
        let fd = connect_ours(name)?;
        self.add(Connection { fd, slot })
    }

    fn add(&mut self, connection: Connection) -> io::Result<usize> {
        self.set.add(connection.fd.as_raw_fd())?;
        self.connections.push(connection);
        Ok(self.connections.len() - 1)
    }

    /// Closes a connection.
    pub(super) fn remove(&mut self, at: usize) {
        let connection = self.connections.swap_remove(at);
        // A copy in another process would keep it in the set.
        self.set.remove(connection.fd.as_raw_fd());
    }

    /// Takes what is next, a message into `buffer`; `None` when there is nothing.
    pub(super) fn take(&mut self, buffer: &mut [u8]) -> Option<Taken> {
        loop {
            let ready = self.set.next_ready()?;
            let Some(at) = self.connections.iter().position(|one| one.fd.as_raw_fd() == ready) else {
                match self.admit() {
                    Some(true) => continue,
                    Some(false) => return Some(Taken::Refused),
                    None => return None,
                }
            };
            // SAFETY: the pointer and length describe a live buffer. With MSG_TRUNC the result is
            // the length of the message.
            let got = unsafe {
                libc::recv(
                    ready,
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    libc::MSG_DONTWAIT | libc::MSG_TRUNC,
                )
            };
            match usize::try_from(got) {
                Ok(0) => {
                    self.remove(at);
                    return Some(Taken::Gone);
                }
                Ok(len) if len > buffer.len() => return Some(Taken::Refused),
                Ok(len) => return Some(Taken::Message(len, at)),
                Err(_) => match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => return None,
                    // Reported once where the peer closed with messages of ours unread. What it
                    // sent before is still queued.
                    Some(libc::ECONNRESET) => {}
                    _ => {
                        self.remove(at);
                        return Some(Taken::Gone);
                    }
                },
            }
        }
    }

    /// Accepts a connection, if there is one; false when it is refused.
    fn admit(&mut self) -> Option<bool> {
        let listener = self.listener.as_mut()?;
        match listener.accept()? {
            Accepted::Connection(fd) => {
                let admitted = unix::is_ours(&fd) && self.connections.len() < MAX_CONNECTIONS;
                Some(admitted && self.add(Connection { fd, slot: None }).is_ok())
            }
            Accepted::ToRefuse(fd) => {
                drop(fd);
                listener.restore_spare();
                Some(false)
            }
        }
    }

    /// The descriptor that becomes readable.
    pub(super) fn fd(&self) -> RawFd {
        self.set.fd()
    }
}

/// Connects to a device of our user.
pub(super) fn connect_ours(name: &str) -> io::Result<NotInherited> {
    let fd = unix::connect(name)?;
    if !unix::is_ours(&fd) {
        return Err(io::Error::from_raw_os_error(libc::EACCES));
    }
    let (level, option, bytes) = (libc::SOL_SOCKET, libc::SO_SNDBUF, SEND_BUFFER);
    let len = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or(0);
    // A smaller buffer only queues less.
    // SAFETY: the pointer and length describe one live integer.
    unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, (&raw const bytes).cast(), len) };
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(connection: &NotInherited, bytes: &[u8]) {
        // SAFETY: live bytes.
        let sent = unsafe { libc::send(connection.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
        assert_eq!(usize::try_from(sent), Ok(bytes.len()));
    }

    #[test]
    fn messages_arrive_after_their_sender_has_closed() {
        let mut inbox = Inbox::new().unwrap();
        assert!(inbox.bind("nobounce/test/inbox").unwrap());
        let mut buffer = [0; 8];
        assert!(inbox.take(&mut buffer).is_none());
        let from = connect_ours("nobounce/test/inbox").unwrap();
        send(&from, b"one");
        send(&from, b"much too long");
        send(&from, b"three");
        drop(from);
        assert_eq!(inbox.take(&mut buffer), Some(Taken::Message(3, 0)));
        assert_eq!(&buffer[..3], b"one");
        assert_eq!(inbox.take(&mut buffer), Some(Taken::Refused));
        assert_eq!(inbox.take(&mut buffer), Some(Taken::Message(5, 0)));
        assert_eq!(inbox.take(&mut buffer), Some(Taken::Gone));
        assert!(inbox.take(&mut buffer).is_none() && inbox.connections.is_empty());
    }

    #[test]
    fn a_name_is_taken_once_and_free_when_dropped() {
        let (mut one, mut other) = (Inbox::new().unwrap(), Inbox::new().unwrap());
        assert!(one.bind("nobounce/test/once").unwrap());
        assert!(!other.bind("nobounce/test/once").unwrap());
        drop(one);
        assert!(other.bind("nobounce/test/once").unwrap());
    }
}
