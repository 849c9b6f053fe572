//! Rendezvous of two devices on one host: an abstract Unix socket whose name holds address and
//! slot. The sender connects and passes the ring that it is going to write (SCM_RIGHTS). The
//! connection stays open while both devices live, and carries the doorbell that wakes a sleeping
//! reader.
//!
//! The kernel vouches for the user at the other end (SO_PEERCRED). Abstract names belong to a
//! network namespace, as addresses do.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::super::unix::{self, Listener};
use crate::process::fork::NotInherited;

/// Length of the message that passes a ring: magic 4, version 1, family 1, port 2, address 16.
const HELLO: usize = 24;
const MAGIC: [u8; 4] = *b"nbsm";
const VERSION: u8 = 2;
/// Length of the message that exports a file for packets to refer to: magic 4, file length 8.
const SHOWN: usize = 12;
const SHOWN_MAGIC: [u8; 4] = *b"nbsf";
/// Message before an orderly close.
const GOODBYE: [u8; 3] = *b"bye";
/// Message of a reader that cannot take the ring, and lives on.
const REFUSAL: [u8; 3] = *b"no!";

/// The owner of a ring: its source address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::links) struct RingHello {
    pub(in crate::links) src: IpAddr,
    pub(in crate::links) src_port: u16,
}

impl RingHello {
    fn encode(self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[6..8].copy_from_slice(&self.src_port.to_be_bytes());
        match self.src {
            IpAddr::V4(a) => {
                out[5] = 4;
                out[8..12].copy_from_slice(&a.octets());
            }
            IpAddr::V6(a) => {
                out[5] = 6;
                out[8..24].copy_from_slice(&a.octets());
            }
        }
        out
    }

    /// Decodes one; the bytes are untrusted.
    pub(in crate::links) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO] = bytes.try_into().ok()?;
        let (v6, _) = bytes[8..].split_first_chunk::<16>()?;
        let src = match bytes[5] {
            4 => Ipv4Addr::new(v6[0], v6[1], v6[2], v6[3]).into(),
            6 => Ipv6Addr::from(*v6).into(),
            _ => return None,
        };
        let known = bytes[..4] == MAGIC && bytes[4] == VERSION;
        known.then_some(Self { src, src_port: u16::from_be_bytes([bytes[6], bytes[7]]) })
    }
}

/// The name under which the device of this address and slot listens.
fn name_of(addr: IpAddr, slot: u8) -> String {
    format!("nobounce/shm/{addr}/{slot}")
}

/// Listens under the name of this address and slot.
pub(in crate::links) fn listen(addr: IpAddr, slot: u8) -> io::Result<Listener> {
    Listener::bind(&name_of(addr, slot))?.ok_or_else(|| io::Error::from_raw_os_error(libc::EADDRINUSE))
}

/// Connects to the device of that address and slot.
pub(in crate::links) fn connect(addr: IpAddr, slot: u8) -> io::Result<NotInherited> {
    unix::connect(&name_of(addr, slot))
}

/// Whether the connection is open and nothing unread is on it, such as a goodbye.
pub(in crate::links) fn is_quiet(connection: &OwnedFd) -> bool {
    let mut byte = 0_u8;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: one writable byte.
    let got = unsafe { libc::recv(connection.as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
    got < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
}

/// Passes a ring to the peer.
pub(in crate::links) fn send_ring(connection: &OwnedFd, hello: RingHello, ring: RawFd) -> io::Result<()> {
    send_with(connection, &mut hello.encode(), ring)
}

/// Exports a file of `len` bytes. Packets refer to exported files by their order of export.
pub(in crate::links) fn send_file(connection: &OwnedFd, len: usize, file: RawFd) -> io::Result<()> {
    let mut bytes = [0; SHOWN];
    bytes[..4].copy_from_slice(&SHOWN_MAGIC);
    bytes[4..].copy_from_slice(&(len as u64).to_be_bytes());
    send_with(connection, &mut bytes, file)
}

/// Decodes the export message: the length of the file.
fn decode_shown(bytes: &[u8]) -> Option<usize> {
    let bytes: &[u8; SHOWN] = bytes.try_into().ok()?;
    let len = bytes.last_chunk().map(|len| u64::from_be_bytes(*len)).filter(|_| bytes[..4] == SHOWN_MAGIC)?;
    usize::try_from(len).ok()
}

/// Sends bytes and a descriptor as one message.
pub(in crate::links) fn send_with(connection: &OwnedFd, bytes: &mut [u8], file: RawFd) -> io::Result<()> {
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 4];
    // SAFETY: msghdr is plain integers and pointers; zeros (null, 0) are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: CMSG_SPACE and CMSG_LEN compute numbers.
    let (space, len) = unsafe { (libc::CMSG_SPACE(4), libc::CMSG_LEN(4)) };
    message.msg_controllen = usize::try_from(space).unwrap_or(0);
    // SAFETY: the control area has room for one header and one descriptor, and is aligned for both.
    unsafe {
        let header = &mut *libc::CMSG_FIRSTHDR(&raw const message);
        header.cmsg_level = libc::SOL_SOCKET;
        header.cmsg_type = libc::SCM_RIGHTS;
        header.cmsg_len = usize::try_from(len).unwrap_or(0);
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(file);
    }
    // SAFETY: the message points at one live buffer and one live control area.
    let sent = unsafe {
        libc::sendmsg(connection.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What came on a connection.
#[derive(Debug)]
pub(in crate::links) enum Came {
    /// Nothing yet.
    Nothing,
    /// The peer is gone.
    End,
    /// A message that this version does not know, or whose descriptor found no room.
    Invalid,
    /// The peer does not take the ring.
    Refused,
    /// The peer closes in order.
    Goodbye,
    /// A doorbell.
    Doorbell,
    /// A ring, and its owner.
    Ring(RingHello, OwnedFd),
    /// An exported file, with the length that the peer claims.
    File(usize, OwnedFd),
}

/// Receives one message from a connection.
pub(in crate::links) fn take(connection: &OwnedFd) -> Came {
    let mut bytes = [0; HELLO + 1];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // Alignment makes room for two descriptors where one is expected; `descriptor` closes the
    // other.
    let mut control = [0_u64; 3];
    // SAFETY: msghdr is plain integers and pointers; zeros (null, 0) are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message points at one live buffer and one live, aligned control area.
    let got = unsafe { libc::recvmsg(connection.as_raw_fd(), &raw mut message, flags) };
    let file = descriptor(&message);
    match usize::try_from(got) {
        Err(_) => match io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS) => Came::Nothing,
            // The peer closed with a doorbell of ours unread; the kernel reports that once. Its
            // earlier messages, the goodbye above all, are still queued.
            Some(libc::ECONNRESET) => take(connection),
            _ => Came::End,
        },
        Ok(0) => Came::End,
        Ok(1) => Came::Doorbell,
        Ok(3) if bytes.starts_with(&GOODBYE) => Came::Goodbye,
        Ok(3) if bytes.starts_with(&REFUSAL) => Came::Refused,
        Ok(len) => {
            let (said, Some(file)) = (bytes.get(..len).unwrap_or(&[]), file) else { return Came::Invalid };
            match (RingHello::decode(said), decode_shown(said)) {
                (Some(hello), _) => Came::Ring(hello, file),
                (_, Some(len)) => Came::File(len, file),
                _ => Came::Invalid,
            }
        }
    }
}

/// The first descriptor that came with a message; further ones are closed.
fn descriptor(message: &libc::msghdr) -> Option<OwnedFd> {
    // SAFETY: the kernel filled the control area and its length; CMSG_FIRSTHDR gives null or a
    // header inside it.
    let header = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    // SAFETY: CMSG_LEN computes a number.
    let least = usize::try_from(unsafe { libc::CMSG_LEN(4) }).ok()?;
    let is_one = (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    if !is_one || header.cmsg_len < least {
        return None;
    }
    let count = (header.cmsg_len - least) / size_of::<RawFd>() + 1;
    let mut all = (0..count).map(|at| {
        // SAFETY: a control message of this type and length holds so many descriptors, possibly
        // unaligned, which are ours now.
        unsafe { OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().add(at).read_unaligned()) }
    });
    let first = all.next();
    all.for_each(drop);
    first
}

/// Rings the doorbell: wakes the reader of the ring. A full queue means that it is awake already.
pub(in crate::links) fn ring_doorbell(connection: &OwnedFd) {
    say(connection, &[1]);
}

/// Announces an orderly close. (In a forked child the descriptor refers to nothing, and no peer
/// receives it.)
pub(in crate::links) fn shut_down(connection: &OwnedFd) {
    say(connection, &GOODBYE);
}

/// Tells the writer of a ring that it is not read: it goes on by UDP.
pub(in crate::links) fn refuse(connection: &OwnedFd) {
    say(connection, &REFUSAL);
}

fn say(connection: &OwnedFd, bytes: &[u8]) {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: live bytes.
    unsafe { libc::send(connection.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
}

#[cfg(test)]
mod tests {
    use nobounce_memory::shared_file;

    use super::*;
    use crate::links::unix::Accepted;

    fn accept(listener: &mut Listener) -> NotInherited {
        let Some(Accepted::Connection(connection)) = listener.accept() else { panic!("none came") };
        connection
    }

    #[test]
    fn a_hello_is_read_as_it_was_written_and_nothing_else_is() {
        for src in ["127.0.0.9", "fe80::1"] {
            let hello = RingHello { src: src.parse().unwrap(), src_port: 4791 };
            let bytes = hello.encode();
            assert_eq!(RingHello::decode(&bytes), Some(hello));
            for (at, wrong) in [(0, b'x'), (4, 9), (5, 5)] {
                let mut bad = bytes;
                bad[at] = wrong;
                assert_eq!(RingHello::decode(&bad), None, "byte {at}");
            }
            assert_eq!(RingHello::decode(&bytes[..HELLO - 1]), None);
        }
    }

    #[test]
    fn a_ring_is_handed_over_and_the_end_is_seen() {
        let addr = "127.88.1.1".parse().unwrap();
        assert!(connect(addr, 3).is_err(), "no listener");
        let mut listener = listen(addr, 3).unwrap();
        assert!(listen(addr, 3).is_err(), "the name is taken");
        let there = connect(addr, 3).unwrap();
        let ring = shared_file::create(4096).unwrap();
        let hello = RingHello { src: addr, src_port: 7 };
        send_ring(&there, hello, ring.as_raw_fd()).unwrap();
        ring_doorbell(&there);
        let here = accept(&mut listener);
        assert!(listener.accept().is_none());
        let Came::Ring(said, file) = take(&here) else { panic!("no ring came") };
        assert!(said == hello && shared_file::is_sound(&file, 4096));
        assert!(matches!(take(&here), Came::Doorbell));
        send_file(&there, 4096, ring.as_raw_fd()).unwrap();
        assert!(matches!(take(&here), Came::File(4096, file) if shared_file::is_sound(&file, 4096)));
        assert!(matches!(take(&here), Came::Nothing));
        assert!(is_quiet(&here));
        shut_down(&there);
        assert!(!is_quiet(&here), "a goodbye is on it");
        assert!(matches!(take(&here), Came::Goodbye));
        drop(there);
        assert!(!is_quiet(&here), "it is closed");
        assert!(matches!(take(&here), Came::End));
    }

    #[test]
    fn a_peer_that_came_before_the_socket_closed_is_greeted_and_none_comes_later() {
        let addr = "127.88.1.4".parse().unwrap();
        let mut listener = listen(addr, 3).unwrap();
        let there = connect(addr, 3).unwrap();
        listener.stop_accepting();
        let refused = connect(addr, 3).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let here = accept(&mut listener);
        assert!(listener.accept().is_none());
        shut_down(&here);
        drop((here, listener));
        assert!(matches!(take(&there), Came::Goodbye));
    }

    #[test]
    fn a_goodbye_is_heard_of_one_who_went_without_hearing_our_bell() {
        let addr = "127.88.1.3".parse().unwrap();
        let mut listener = listen(addr, 3).unwrap();
        let there = connect(addr, 3).unwrap();
        let here = accept(&mut listener);
        ring_doorbell(&there);
        shut_down(&here);
        drop(here);
        assert!(matches!(take(&there), Came::Goodbye));
        assert!(matches!(take(&there), Came::End));
    }

    #[test]
    fn nonsense_ends_a_connection() {
        let addr = "127.88.1.2".parse().unwrap();
        let mut listener = listen(addr, 0).unwrap();
        for bytes in [&[0_u8; 2][..], &[0; HELLO], &[0; 200]] {
            let there = connect(addr, 0).unwrap();
            // SAFETY: live bytes.
            unsafe { libc::send(there.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
            assert!(matches!(take(&accept(&mut listener)), Came::Invalid), "{} bytes", bytes.len());
        }
    }

    /// Alignment leaves room for a second descriptor in a control message: it must not stay open.
    #[test]
    fn a_surplus_descriptor_is_closed() {
        let addr = "127.88.1.5".parse().unwrap();
        let mut listener = listen(addr, 0).unwrap();
        let there = connect(addr, 0).unwrap();
        let here = accept(&mut listener);
        let ring = shared_file::create(4096).unwrap();
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = open();
        for _ in 0..8 {
            send_two(&there, RingHello { src: addr, src_port: 7 }, ring.as_raw_fd());
            assert!(matches!(take(&here), Came::Ring(..)));
        }
        assert_eq!(open(), before);
    }

    /// As `send_with`, with the same descriptor twice.
    fn send_two(connection: &OwnedFd, hello: RingHello, file: RawFd) {
        let mut bytes = hello.encode();
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = [0_u64; 4];
        // SAFETY: as in `send_with`, with room for two descriptors.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = usize::try_from(libc::CMSG_SPACE(8)).unwrap();
            let header = &mut *libc::CMSG_FIRSTHDR(&raw const message);
            header.cmsg_level = libc::SOL_SOCKET;
            header.cmsg_type = libc::SCM_RIGHTS;
            header.cmsg_len = usize::try_from(libc::CMSG_LEN(8)).unwrap();
            libc::CMSG_DATA(header).cast::<[RawFd; 2]>().write_unaligned([file; 2]);
            assert!(libc::sendmsg(connection.as_raw_fd(), &raw const message, 0) > 0);
        }
    }
}
