//! Slots: how several devices share one address.
//!
//! A device's slot is the high byte of all its queue pair numbers. A device claims it by binding an
//! abstract Unix socket named after the address and the slot. A slot is therefore free again the
//! moment its process is gone. The kernel steers packets by that byte to the n-th socket of the
//! port. That is the slot's own socket as long as devices close in reverse order of opening.
//! Otherwise a packet may reach the wrong device, which hands it to its owner through that same
//! Unix socket. The owner then corrects the steering (`udp/steering.rs`).
//!
//! A device with a socket of the port therefore receives for others too, and must poll it. It joins
//! the port when it gets its first queue pair, and with it a thread that polls.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use crate::process::fork::NotInherited;
use crate::process::users;

/// Bytes before the packets of a handover: magic 4, family 1, slot 1, source port 2, first id 2,
/// segment 2, address 16.
const PREFIX: usize = 28;
const MAGIC: [u8; 4] = *b"nbh1";
/// The most packet bytes in one handover: what one receive can hold.
const MAX_BYTES: usize = 65_536;
/// Send buffer requested for handovers; the kernel caps it.
const SEND_BUFFER: i32 = 1 << 20;

/// How long a joining device may block others from joining. It takes microseconds.
const LONGEST_TURN: Duration = Duration::from_millis(50);

/// Several packets of one size (the last may be shorter) from one sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroBurst<'a> {
    pub(super) src: IpAddr,
    pub(super) src_port: u16,
    /// The likeliest IPv4 identification of the first packet.
    pub(super) ip_id: u16,
    /// Bytes of each packet but the last.
    pub(super) segment: usize,
    pub(super) bytes: &'a [u8],
}

impl GroBurst<'_> {
    /// How many packets it holds.
    pub(super) fn packets(&self) -> u64 {
        u64::try_from(self.bytes.len().div_ceil(self.segment.max(1))).unwrap_or(u64::MAX)
    }
}

/// The owner that a handover is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SlotOwner {
    /// The device with this slot.
    Slot(u8),
    /// The device that offers this service of the connection manager.
    Service(u64),
}

impl SlotOwner {
    /// Its socket name.
    fn name(self, addr: IpAddr) -> String {
        match self {
            Self::Slot(slot) => slot_name(addr, slot),
            Self::Service(service) => format!("nobounce/service/{addr}/{service:x}"),
        }
    }

    /// The tag of its handovers.
    fn byte(self) -> u8 {
        match self {
            Self::Slot(slot) => slot,
            Self::Service(_) => 0,
        }
    }
}

/// The socket name of a service at an address, and its handovers.
#[derive(Debug)]
pub(super) struct ServiceName {
    /// Not inherited: a forked child would keep the name taken.
    fd: NotInherited,
    pub(super) service: u64,
    uid: libc::uid_t,
}

impl ServiceName {
    /// Claims the name; `None` if it is taken.
    pub(super) fn bind(addr: IpAddr, service: u64) -> io::Result<Option<Self>> {
        let (mut bound, mut uid) = (false, 0);
        let fd = NotInherited::open(|| {
            let slot = Slot::new(addr)?;
            bound = bind(&slot.fd, &SlotOwner::Service(service).name(addr))?;
            uid = slot.uid;
            Ok(slot.fd)
        })?;
        Ok(bound.then_some(Self { fd, service, uid }))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// As [`Slot::take`].
    pub(super) fn take<'b>(&self, buffer: &'b mut [u8]) -> Option<Option<GroBurst<'b>>> {
        take(&self.fd, self.uid, SlotOwner::Service(self.service), buffer)
    }
}

/// Prefix of the names by which slots publish the kernel's index of their sockets.
pub(super) const PLACES: &str = "nobounce/place";

/// The name by which a slot publishes its socket's index, while that is valid.
#[derive(Debug)]
pub(super) struct SlotPlace {
    _name: NotInherited,
}

impl SlotPlace {
    pub(super) fn publish(addr: IpAddr, slot: u8, number: u8) -> io::Result<Self> {
        let name = NotInherited::open(|| {
            let fd = unix_socket()?;
            bind(&fd, &format!("{PLACES}/{addr}/{slot}/{number}"))?;
            Ok(fd)
        })?;
        Ok(Self { _name: name })
    }
}

/// Result of a handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handover {
    Done,
    /// No process owns the slot, or offers the service.
    NoOwner,
    /// The owner's queue is full for now.
    Full,
    /// The packets do not fit a handover.
    Lost,
}

/// A slot of an address, or the socket to claim one with.
#[derive(Debug)]
pub(super) struct Slot {
    fd: OwnedFd,
    addr: IpAddr,
    number: u8,
    uid: libc::uid_t,
}

impl Slot {
    /// The socket alone; its number is not claimed yet.
    pub(super) fn new(addr: IpAddr) -> io::Result<Self> {
        let fd = unix_socket()?;
        // Credentials on every datagram let us drop handovers of other users: a handover claims a
        // source address that UDP would not let them spoof. Only handovers pay for the check.
        set_int(&fd, libc::SO_PASSCRED, 1)?;
        let _ = set_int(&fd, libc::SO_SNDBUF, SEND_BUFFER); // a smaller buffer only queues more
        // SAFETY: geteuid reads one number of this process and cannot fail.
        let uid = unsafe { libc::geteuid() };
        Ok(Self { fd, addr, number: 0, uid })
    }

    /// Claims the lowest free slot of the address; false when all are taken.
    pub(super) fn claim(&mut self) -> io::Result<bool> {
        for number in 0..=u8::MAX {
            if bind(&self.fd, &slot_name(self.addr, number))? {
                self.number = number;
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn number(&self) -> u8 {
        self.number
    }

    pub(super) fn addr(&self) -> IpAddr {
        self.addr
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Hands packets to their owner.
    pub(super) fn hand_over(&self, owner: SlotOwner, run: &GroBurst<'_>) -> Handover {
        let Some(mut prefix) = encode(owner.byte(), run) else { return Handover::Lost };
        let (mut name, len) = unix_name(&owner.name(self.addr));
        let mut parts = [
            libc::iovec { iov_base: prefix.as_mut_ptr().cast(), iov_len: PREFIX },
            libc::iovec { iov_base: run.bytes.as_ptr().cast_mut().cast(), iov_len: run.bytes.len() },
        ];
        // SAFETY: msghdr is plain integers and pointers; zeros (null, 0) are valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = (&raw mut name).cast();
        message.msg_namelen = len;
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len();
        // SAFETY: the message points at a live address and two live buffers, which the kernel only
        // reads.
        let sent =
            unsafe { libc::sendmsg(self.fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        if sent >= 0 {
            return Handover::Done;
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::ECONNREFUSED | libc::ENOENT) => Handover::NoOwner,
            Some(libc::EAGAIN | libc::ENOBUFS) => Handover::Full,
            _ => Handover::Lost,
        }
    }

    /// Receives one handover into `buffer`, if there is one. Inner `None`: it was not for us and is
    /// dropped.
    pub(super) fn take<'b>(&self, buffer: &'b mut [u8]) -> Option<Option<GroBurst<'b>>> {
        take(&self.fd, self.uid, SlotOwner::Slot(self.number), buffer)
    }
}

fn take<'b>(
    fd: &OwnedFd,
    uid: libc::uid_t,
    owner: SlotOwner,
    buffer: &'b mut [u8],
) -> Option<Option<GroBurst<'b>>> {
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // Room for the credentials alone: the kernel drops any attached descriptors.
    let mut control = [0_u64; 4];
    // SAFETY: msghdr is plain integers and pointers; zeros (null, 0) are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message points at one live buffer and one live, aligned control area.
    let got = unsafe {
        libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC)
    };
    let got = usize::try_from(got).ok()?;
    let trusted = sender(&message).is_some_and(|from| from == uid && users::is_ours(from));
    if !trusted || message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Some(None);
    }
    Some(buffer.get(..got).and_then(|bytes| decode(owner.byte(), bytes)))
}

/// Buffer size that [`Slot::take`] requires.
pub(super) const TAKE_BUFFER: usize = PREFIX + MAX_BYTES;

fn encode(slot: u8, run: &GroBurst<'_>) -> Option<[u8; PREFIX]> {
    if run.bytes.len() > MAX_BYTES {
        return None;
    }
    let mut out = [0; PREFIX];
    out[..4].copy_from_slice(&MAGIC);
    out[5] = slot;
    out[6..8].copy_from_slice(&run.src_port.to_be_bytes());
    out[8..10].copy_from_slice(&run.ip_id.to_be_bytes());
    out[10..12].copy_from_slice(&u16::try_from(run.segment).ok()?.to_be_bytes());
    match run.src {
        IpAddr::V4(a) => {
            out[4] = 4;
            out[12..16].copy_from_slice(&a.octets());
        }
        IpAddr::V6(a) => {
            out[4] = 6;
            out[12..28].copy_from_slice(&a.octets());
        }
    }
    Some(out)
}

/// Decodes a handover; the bytes are untrusted.
fn decode(slot: u8, datagram: &[u8]) -> Option<GroBurst<'_>> {
    let (prefix, bytes) = datagram.split_first_chunk::<PREFIX>()?;
    let u16_at = |at: usize| u16::from_be_bytes([prefix[at], prefix[at + 1]]);
    let v6: [u8; 16] = prefix.last_chunk().copied()?;
    let src: IpAddr = match prefix[4] {
        4 => Ipv4Addr::new(v6[0], v6[1], v6[2], v6[3]).into(),
        6 => Ipv6Addr::from(v6).into(),
        _ => return None,
    };
    let segment = usize::from(u16_at(10));
    if prefix[..4] != MAGIC || prefix[5] != slot || segment == 0 || bytes.is_empty() {
        return None;
    }
    Some(GroBurst { src, src_port: u16_at(6), ip_id: u16_at(8), segment, bytes })
}

/// The user whose process sent the message, as the kernel vouches.
fn sender(message: &libc::msghdr) -> Option<libc::uid_t> {
    // SAFETY: the kernel filled the control area and its length; CMSG_FIRSTHDR gives null or a
    // header inside it.
    let header = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    if (header.cmsg_level, header.cmsg_type) != (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) {
        return None;
    }
    // SAFETY: a control message of this type holds one ucred, possibly unaligned.
    let credentials = unsafe { libc::CMSG_DATA(header).cast::<libc::ucred>().read_unaligned() };
    Some(credentials.uid)
}

/// Lock for joining an address. Slots and sockets of the port must be taken in the same order, or
/// the kernel steers wrongly from the start. Released on drop or process exit.
#[derive(Debug)]
pub(super) struct JoinLock {
    _name: Option<OwnedFd>,
}

impl JoinLock {
    /// Acquires it with a timeout: a process stopped while it holds the lock must not block others.
    pub(super) fn wait(addr: IpAddr) -> io::Result<Self> {
        let fd = unix_socket()?;
        let end = Instant::now() + LONGEST_TURN;
        while !bind(&fd, &format!("nobounce/join/{addr}"))? {
            if Instant::now() > end {
                return Ok(Self { _name: None });
            }
            std::thread::sleep(LONGEST_TURN / 500);
        }
        Ok(Self { _name: Some(fd) })
    }
}

fn unix_socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are passed; the result is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just opened and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Binds an abstract name; false if it is taken.
fn bind(fd: &OwnedFd, name: &str) -> io::Result<bool> {
    let (name, len) = unix_name(name);
    // SAFETY: the pointer and length describe a live Unix socket address.
    if unsafe { libc::bind(fd.as_raw_fd(), (&raw const name).cast(), len) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EADDRINUSE) { Ok(false) } else { Err(error) }
}

/// The socket name of a slot of an address.
fn slot_name(addr: IpAddr, slot: u8) -> String {
    format!("nobounce/slot/{addr}/{slot}")
}

/// An abstract name as system calls take it.
pub(super) fn unix_name(text: &str) -> (libc::sockaddr_un, libc::socklen_t) {
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

fn set_int(fd: &OwnedFd, name: i32, value: i32) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or(0);
    // SAFETY: the pointer and length describe one live integer.
    let done =
        unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, (&raw const value).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(last: u8) -> IpAddr {
        Ipv4Addr::new(127, 77, 0, last).into()
    }

    fn claimed(last: u8) -> Slot {
        let mut slot = Slot::new(addr(last)).unwrap();
        assert!(slot.claim().unwrap());
        slot
    }

    fn run(bytes: &[u8]) -> GroBurst<'_> {
        GroBurst { src: addr(9), src_port: 4791, ip_id: 3, segment: 40, bytes }
    }

    #[test]
    fn the_lowest_free_slot_is_claimed_and_freed_on_drop() {
        let claim = || claimed(1);
        let (a, b, c) = (claim(), claim(), claim());
        assert_eq!((a.number(), b.number(), c.number()), (0, 1, 2));
        drop(b);
        assert_eq!(claim().number(), 1);
    }

    #[test]
    fn after_256_claims_no_slot_is_free() {
        let all: Vec<_> = (0..256).map(|_| claimed(2)).collect();
        assert_eq!(all.last().unwrap().number(), 255);
        assert!(!Slot::new(addr(2)).unwrap().claim().unwrap());
    }

    #[test]
    fn a_handover_arrives_as_it_was_given() {
        let (a, b) = (claimed(3), claimed(3));
        let mut buffer = vec![0; TAKE_BUFFER];
        assert!(b.take(&mut buffer).is_none());
        let packets = vec![0xa5; 100];
        assert_eq!(a.hand_over(SlotOwner::Slot(1), &run(&packets)), Handover::Done);
        assert_eq!(b.take(&mut buffer), Some(Some(run(&packets))));
        assert_eq!(run(&packets).packets(), 3);
        let v6 = GroBurst { src: "fe80::1".parse().unwrap(), ..run(&packets) };
        assert_eq!(a.hand_over(SlotOwner::Slot(1), &v6), Handover::Done);
        assert_eq!(b.take(&mut buffer), Some(Some(v6)));
        assert_eq!(a.hand_over(SlotOwner::Slot(7), &run(&packets)), Handover::NoOwner);
    }

    #[test]
    fn a_full_queue_says_so_and_never_blocks() {
        let (a, b) = (claimed(4), claimed(4));
        let packets = vec![1; 60_000];
        let outcomes: Vec<_> = (0..2000).map(|_| a.hand_over(SlotOwner::Slot(1), &run(&packets))).collect();
        assert_eq!(outcomes[0], Handover::Done);
        assert_eq!(outcomes.last(), Some(&Handover::Full));
        let mut buffer = vec![0; TAKE_BUFFER];
        let taken = std::iter::from_fn(|| b.take(&mut buffer).map(|r| r.is_some())).filter(|x| *x).count();
        assert_eq!(taken, outcomes.iter().filter(|o| **o == Handover::Done).count());
    }

    #[test]
    fn malformed_handovers_are_dropped() {
        let good = [&encode(5, &run(&[7; 50])).unwrap()[..], &[7; 50]].concat();
        assert!(decode(5, &good).is_some());
        assert!(decode(6, &good).is_none(), "for another slot");
        for cut in 0..=PREFIX {
            assert!(decode(5, &good[..cut]).is_none(), "cut at {cut}");
        }
        for (at, value) in [(0, b'x'), (4, 5), (5, 4)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(decode(5, &bad).is_none(), "byte {at}");
        }
        let mut bad = good;
        bad[10..12].fill(0);
        assert!(decode(5, &bad).is_none(), "segment 0");
    }
}
