//! The receiving half: splits datagrams that the kernel merged (GRO).

use std::fmt;
use std::mem;
use std::ptr;

use super::senders::ECN;
use super::socket::{SockAddr, Socket};
use crate::links::handover::{GroBurst, TAKE_BUFFER};
use crate::links::wire_packets::LEAD;

/// Datagrams per call where the kernel merges packets: a few hundred packets.
const MERGED: usize = 4;
/// Datagrams per call where each is one packet.
const SINGLE: usize = 32;
/// Bytes of a buffer where the kernel may merge: the longest datagram. Memory that no datagram
/// reaches is never touched.
const MERGED_STRIDE: usize = 64 * 1024;
/// Bytes of a buffer where it does not: more than any packet of path MTU 4096.
const SINGLE_STRIDE: usize = 8 * 1024;
/// A merged datagram of at least this many bytes indicates bulk traffic: more is likely queued.
const BULK: usize = 16 * 1024;
/// The same for a single packet, which the smallest path MTUs in use fill.
const BULK_PACKET: usize = 1024;
/// Words of control data: the segment size, and the byte with the congestion mark.
const CONTROL: usize = 6;
/// The mark in the ECN field of that byte.
const CONGESTION_EXPERIENCED: u8 = 3;

/// Receive buffers.
pub(super) struct UdpReceiver {
    buffer: Box<[u8]>,
    stride: usize,
    /// How many datagrams the next call asks for: several, if the last one found several or a long
    /// one. Packets of paths on which the kernel merges nothing come one by one.
    vectors: usize,
    /// Whether the last call found nothing.
    pub(super) is_empty: bool,
    /// Datagrams longer than any packet may be.
    pub(super) too_long: u64,
    pub(super) calls: u64,
}

impl UdpReceiver {
    pub(super) fn new(merged: bool) -> Self {
        let stride = if merged { MERGED_STRIDE } else { SINGLE_STRIDE };
        let room = (SINGLE * stride).max(TAKE_BUFFER);
        let buffer = vec![0; room].into_boxed_slice();
        Self { buffer, stride, vectors: 1, is_empty: true, too_long: 0, calls: 0 }
    }

    /// Room for a handover, between two calls of [`UdpReceiver::receive`].
    pub(super) fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Receives once and gives each datagram to `take`.
    pub(super) fn receive(&mut self, socket: &Socket, take: impl FnMut(GroBurst<'_>)) {
        self.calls += 1;
        // Latency-bound traffic comes one small packet at a time, and one vector is the cheapest
        // call. A full result means that more is queued.
        match self.vectors {
            1 => self.receive_one(socket, take),
            MERGED => self.receive_many::<MERGED>(socket, take),
            _ => self.receive_many::<SINGLE>(socket, take),
        }
    }

    fn receive_one(&mut self, socket: &Socket, mut take: impl FnMut(GroBurst<'_>)) {
        let mut name = SockAddr::empty();
        let mut control = [0_u64; CONTROL];
        let mut part =
            libc::iovec { iov_base: self.buffer[LEAD..].as_mut_ptr().cast(), iov_len: self.stride - LEAD };
        // SAFETY: msghdr is plain integers and pointers; zeros (null, 0) are valid.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        fill(&mut message, &mut name, &mut part, &mut control);
        // Not libc's recvmsg: as a cancellation point it costs two atomic operations in every idle
        // poll.
        // SAFETY: the message points at live room for the name, the control data and one part of
        // the buffer.
        let got =
            unsafe { libc::syscall(libc::SYS_recvmsg, socket.fd(), &raw mut message, libc::MSG_DONTWAIT) };
        self.is_empty = got < 0;
        let Ok(len) = usize::try_from(got) else { return };
        // A long merged datagram indicates bulk traffic; a short one is handled first.
        let Notes { segment, marked } = Notes::of(&message);
        self.vectors = match segment {
            Some(_) if len >= BULK => MERGED,
            None if len >= BULK_PACKET || self.stride == SINGLE_STRIDE => SINGLE,
            _ => 1,
        };
        if message.msg_flags & libc::MSG_TRUNC != 0 {
            self.too_long += 1;
        } else if let (Some((src, src_port)), Some(bytes)) = (name.get(), self.buffer.get(LEAD..LEAD + len)) {
            take(GroBurst { src, src_port, ip_id: 0, segment: segment.unwrap_or(len), marked, bytes });
        }
    }

    fn receive_many<const N: usize>(&mut self, socket: &Socket, mut take: impl FnMut(GroBurst<'_>)) {
        let mut names = [SockAddr::empty(); N];
        let mut controls = [[0_u64; CONTROL]; N];
        let mut parts = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; N];
        // SAFETY: mmsghdr is plain integers and pointers; zeros (null, 0) are valid.
        let mut messages: [libc::mmsghdr; N] = unsafe { mem::zeroed() };
        for (i, room) in self.buffer.chunks_exact_mut(self.stride).take(N).enumerate() {
            let room = &mut room[LEAD..];
            parts[i] = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            fill(&mut messages[i].msg_hdr, &mut names[i], &mut parts[i], &mut controls[i]);
        }
        let vectors = u32::try_from(N).unwrap_or(1);
        // SAFETY: the messages point at live room for names, control data and
        // disjoint parts of the buffer; no time limit is given.
        let got = unsafe {
            libc::recvmmsg(socket.fd(), messages.as_mut_ptr(), vectors, libc::MSG_DONTWAIT, ptr::null_mut())
        };
        let got = usize::try_from(got).unwrap_or(0);
        self.is_empty = got == 0;
        let mut merged = false;
        for i in 0..got.min(N) {
            let header = &messages[i].msg_hdr;
            let len = messages[i].msg_len as usize;
            if header.msg_flags & libc::MSG_TRUNC != 0 {
                self.too_long += 1;
                continue;
            }
            let at = i * self.stride + LEAD;
            if let (Some((src, src_port)), Some(bytes)) = (names[i].get(), self.buffer.get(at..at + len)) {
                let Notes { segment, marked } = Notes::of(header);
                merged |= segment.is_some();
                take(GroBurst { src, src_port, ip_id: 0, segment: segment.unwrap_or(len), marked, bytes });
            }
        }
        self.vectors = match (got, merged) {
            (0 | 1, _) => 1,
            (_, true) => MERGED,
            (_, false) => SINGLE,
        };
    }
}

impl fmt::Debug for UdpReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdpReceiver")
            .field("vectors", &self.vectors)
            .field("stride", &self.stride)
            .finish_non_exhaustive()
    }
}

fn fill(
    message: &mut libc::msghdr,
    name: &mut SockAddr,
    part: &mut libc::iovec,
    control: &mut [u64; CONTROL],
) {
    message.msg_name = name.as_mut_ptr();
    message.msg_namelen = name.len();
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(control);
}

/// What the kernel tells beside a datagram.
#[derive(Clone, Copy, Debug, Default)]
struct Notes {
    /// The size of the packets that it merged; `None` where it merged none.
    segment: Option<usize>,
    /// They have a congestion mark.
    marked: bool,
}

impl Notes {
    fn of(message: &libc::msghdr) -> Self {
        let mut notes = Self::default();
        // SAFETY: the kernel filled the control area and its length; CMSG_FIRSTHDR gives null or a
        // header inside it.
        let mut at = unsafe { libc::CMSG_FIRSTHDR(message) };
        // SAFETY: it is null or a header inside the control area.
        while let Some(header) = unsafe { at.as_ref() } {
            // SAFETY: the header is one of the message.
            let data = unsafe { libc::CMSG_DATA(header) };
            match (header.cmsg_level, header.cmsg_type) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    // SAFETY: such a message holds one integer, possibly unaligned.
                    let size = unsafe { data.cast::<i32>().read_unaligned() };
                    notes.segment = usize::try_from(size).ok().filter(|n| *n > 0);
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => {
                    // SAFETY: such a message holds one byte.
                    notes.marked = unsafe { data.read() } & ECN == CONGESTION_EXPERIENCED;
                }
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    // SAFETY: such a message holds one integer, possibly unaligned.
                    let class = unsafe { data.cast::<i32>().read_unaligned() };
                    notes.marked = class & i32::from(ECN) == i32::from(CONGESTION_EXPERIENCED);
                }
                _ => {}
            }
            // SAFETY: both belong to the message; the result is null behind the last header.
            at = unsafe { libc::CMSG_NXTHDR(message, at) };
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    /// Marks on single packets and on merged ones, of both families.
    #[test]
    fn congestion_marks_are_read() {
        let sender_of = |addr: &IpAddr| {
            let socket = Socket::new(*addr).unwrap();
            socket.bind(&SockAddr::new(*addr, 0, 0)).unwrap();
            socket
        };
        for (addr, port) in [("127.77.1.1", 47_911), ("::1", 47_912)] {
            let addr: IpAddr = addr.parse().unwrap();
            let to = SockAddr::new(addr, port, 0);
            let socket = Socket::new(addr).unwrap();
            socket.set(libc::SOL_UDP, libc::UDP_GRO, 1).unwrap();
            socket.read_marks(addr);
            socket.bind(&to).unwrap();
            let sender = sender_of(&addr);
            let mut receiver = UdpReceiver::new(true);
            for (class, segment) in [(0, None), (2, None), (3, None), (0x2b, None), (3, Some(40))] {
                sender.set_class(addr, class).unwrap();
                sender.set(libc::SOL_UDP, libc::UDP_SEGMENT, segment.unwrap_or(0)).unwrap();
                sender.send_to(&[7; 100], &to);
                let mut seen = Vec::new();
                while seen.is_empty() {
                    receiver.receive(&socket, |run| seen.push((run.marked, run.segment)));
                }
                let segment = segment.map_or(100, |len| usize::try_from(len).unwrap());
                assert_eq!(seen, [(class & 3 == 3, segment)], "{addr} {class}");
            }
        }
    }

    /// Single packets of a stream come many per call, with and without merging by the kernel; a
    /// small one is taken by the cheapest call.
    #[test]
    fn unmerged_packets_of_a_stream_take_few_calls() {
        let addr: IpAddr = "127.77.1.2".parse().unwrap();
        for (port, merged) in [(47_913, true), (47_914, false)] {
            let to = SockAddr::new(addr, port, 0);
            let socket = Socket::new(addr).unwrap();
            socket.bind(&to).unwrap();
            let sender = Socket::new(addr).unwrap();
            sender.bind(&SockAddr::new(addr, 0, 0)).unwrap();
            let mut receiver = UdpReceiver::new(merged);
            for _ in 0..2 {
                (0..64).for_each(|_| sender.send_to(&[7; 1024], &to));
                let (mut seen, before) = (0, receiver.calls);
                while !receiver.is_empty || seen == 0 {
                    receiver.receive(&socket, |run| seen += run.bytes.len() / 1024);
                }
                assert_eq!((seen, receiver.vectors), (64, 1));
                assert!(receiver.calls - before <= 5, "{} calls", receiver.calls - before);
            }
        }
    }
}
