//! The sending half: groups leave as GSO sends, several groups per sendmmsg call.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::ptr;

use nobounce_protocol::qp::IpOptions;
use nobounce_protocol::wire::ROCE_PORT;

use super::senders::{ECN, ECT};
use super::socket::{SockAddr, Socket};
use crate::links::wire_packets::WirePackets;
use crate::links::{TxBatch, TxPacket, now_ns};

/// Maximum groups per system call: each costs the zeroing of its headers even if unused.
const GROUPS: usize = 4;
/// Retry interval for a full send buffer, in nanoseconds: about the time a 10 Gb/s interface needs
/// for one group.
const RETRY_NS: u64 = 50_000;

/// Packets that the kernel refused, by cause, and packets sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SendCounts {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) calls: u64,
    pub(super) blocked: u64,
    pub(super) no_buffers: u64,
    pub(super) too_long: u64,
    pub(super) unreachable: u64,
    pub(super) not_permitted: u64,
    pub(super) other: u64,
    /// Packets sent one by one because the path refuses GSO.
    pub(super) unsegmented: u64,
}

impl SendCounts {
    fn refused(&mut self, errno: i32, packets: u64) {
        let class = match errno {
            libc::EMSGSIZE => &mut self.too_long,
            libc::ENOBUFS | libc::ENOMEM => &mut self.no_buffers,
            libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::ECONNREFUSED => {
                &mut self.unreachable
            }
            libc::EPERM | libc::EACCES => &mut self.not_permitted,
            _ => &mut self.other,
        };
        *class += packets;
    }
}

/// Sends batches, and keeps the one that met a full send buffer.
#[derive(Debug)]
pub(super) struct Transmitter {
    scope: u32,
    /// Set when the path refuses GSO although the kernel supports it.
    unsegmented: bool,
    /// A batch that found the send buffer full, and its first packet that has not left.
    waiting: Option<(TxBatch, usize)>,
    /// Spare empty batch, swapped with the next one that must wait.
    spare: Option<TxBatch>,
    retry_at: u64,
    pub(super) sent: SendCounts,
    /// Injected errors of the next system calls (0: none), since loopback never refuses.
    #[cfg(test)]
    pretend: std::collections::VecDeque<i32>,
}

impl Transmitter {
    pub(super) fn new(scope: u32) -> Self {
        Self {
            scope,
            unsegmented: false,
            waiting: None,
            spare: None,
            retry_at: 0,
            sent: SendCounts::default(),
            #[cfg(test)]
            pretend: std::collections::VecDeque::new(),
        }
    }

    /// Sends the batch, through the socket that `socket` names for each source port, and empties
    /// it.
    pub(super) fn send<'s>(&mut self, batch: &mut TxBatch, socket: impl Fn(u8) -> &'s Socket) {
        self.retry(&socket);
        if batch.is_empty() {
            return;
        }
        if self.waiting.is_some() {
            self.sent.blocked += count(batch.packets().len());
            batch.clear();
            return;
        }
        let left = self.push(batch.wire_mut(), 0, &socket);
        if left < batch.packets().len() {
            let empty = self.spare.take().unwrap_or_else(|| batch.empty_like());
            self.waiting = Some((mem::replace(batch, empty), left));
            self.retry_at = now_ns() + RETRY_NS;
        }
        batch.clear();
    }

    /// Retries the batch that waits.
    pub(super) fn retry<'s>(&mut self, socket: &impl Fn(u8) -> &'s Socket) {
        let Some((mut batch, from)) = self.waiting.take() else { return };
        let left = self.push(batch.wire_mut(), from, socket);
        if left < batch.packets().len() {
            self.waiting = Some((batch, left));
            self.retry_at = now_ns() + RETRY_NS;
        } else {
            batch.clear();
            self.spare = Some(batch);
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    pub(super) fn next_retry(&self) -> Option<u64> {
        self.waiting.as_ref().map(|_| self.retry_at)
    }

    /// Sends from packet `from` on; returns the first packet that found the send buffer full, or
    /// their number.
    fn push<'s>(
        &mut self,
        batch: &mut WirePackets,
        from: usize,
        socket: &impl Fn(u8) -> &'s Socket,
    ) -> usize {
        let total = batch.packets().len();
        if self.unsegmented {
            self.ungroup(batch, from, total);
        }
        let mut at = from;
        while at < total {
            let port = batch.packets()[at].port;
            #[cfg(test)]
            let refusal = self.pretend.pop_front().filter(|errno| *errno != 0);
            #[cfg(not(test))]
            let refusal = None::<i32>;
            let (result, end) = match refusal {
                Some(errno) => (Err(errno), at),
                None if batch.leaves_alone(at, batch.group_end(at)) => {
                    let end = batch.group_end(at);
                    (self.send_alone(batch, at, end, socket(port)), end)
                }
                None if total - at <= 2 && batch.group_end(at) == at + 1 => {
                    (self.send_one(batch, at, socket(port)), at + 1)
                }
                None => self.send_groups(batch, at, socket(port)),
            };
            self.sent.calls += 1;
            match result {
                Ok(()) => {
                    let gone = &batch.packets()[at..end];
                    self.sent.packets += count(gone.len());
                    self.sent.bytes += gone.iter().map(|p| u64::from(p.len)).sum::<u64>();
                    at = end;
                }
                Err(libc::EAGAIN) => return at,
                Err(libc::EINTR) => {}
                // EIO: no checksum offload on the path, permanently. EINVAL: the segment exceeds
                // the path MTU or an older kernel's limit; sent one by one, each packet gets its
                // own result.
                Err(errno @ (libc::EIO | libc::EINVAL)) if batch.group_end(at) > at + 1 => {
                    self.unsegmented |= errno == libc::EIO;
                    let end = if self.unsegmented { total } else { batch.group_end(at) };
                    self.ungroup(batch, at, end);
                }
                Err(errno) => {
                    let end = batch.group_end(at);
                    self.sent.refused(errno, count(end - at));
                    at = end;
                }
            }
        }
        total
    }

    fn ungroup(&mut self, batch: &mut WirePackets, from: usize, end: usize) {
        let grouped = batch.packets()[from..end].iter().filter(|p| p.ip_id != 0).count();
        if grouped > 0 {
            self.sent.unsegmented += count(grouped);
            batch.ungroup(from, end);
        }
    }

    /// Fast path for a single packet: lowest latency, no control data.
    fn send_one(&self, batch: &WirePackets, at: usize, socket: &Socket) -> Result<(), i32> {
        let packet = batch.packets()[at];
        let [bytes, ..] = batch.parts(&packet);
        let to = SockAddr::new(packet.dst, ROCE_PORT, self.scope);
        // Not libc's sendto, for the reason given with the receiver's recvmsg.
        // SAFETY: the pointers and lengths describe the live packet and the live address, which are
        // only read.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_sendto,
                socket.fd(),
                bytes.as_ptr(),
                bytes.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                to.as_ptr(),
                to.len(),
            )
        };
        if sent < 0 { Err(errno()) } else { Ok(()) }
    }

    /// Sends the groups from packet `at` on that leave from one port. Returns the packet after the
    /// last one sent; an error is that of the first group.
    fn send_groups(&self, batch: &WirePackets, at: usize, socket: &Socket) -> (Result<(), i32>, usize) {
        let packets = batch.packets();
        let mut names = [SockAddr::empty(); GROUPS];
        let mut parts = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; GROUPS];
        let mut controls = [SegmentControl::new(0); GROUPS];
        let mut ends = [0_usize; GROUPS];
        // SAFETY: mmsghdr is plain integers and pointers; zeros (null, 0) are valid.
        let mut messages: [libc::mmsghdr; GROUPS] = unsafe { mem::zeroed() };
        let (mut groups, mut first) = (0_usize, at);
        while groups < GROUPS && first < packets.len() && packets[first].port == packets[at].port {
            let end = batch.group_end(first);
            if batch.leaves_alone(first, end) {
                break; // it leaves by itself; the first group is not such a one
            }
            let bytes = &batch.slab()[packets[first].range().start..packets[end - 1].range().end];
            names[groups] = SockAddr::new(packets[first].dst, ROCE_PORT, self.scope);
            parts[groups] = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            let header = &mut messages[groups].msg_hdr;
            header.msg_name = names[groups].as_mut_ptr();
            header.msg_namelen = names[groups].len();
            header.msg_iov = &raw mut parts[groups];
            header.msg_iovlen = 1;
            if end - first > 1 {
                controls[groups] = SegmentControl::new(packets[first].len);
                header.msg_control = (&raw mut controls[groups]).cast();
                header.msg_controllen = size_of::<SegmentControl>();
            }
            ends[groups] = end;
            groups += 1;
            first = end;
        }
        let vectors = u32::try_from(groups).unwrap_or(0);
        // SAFETY: the first `groups` messages point at live names, parts and control data, and the
        // parts at live bytes of the slab, which the kernel only reads.
        let sent = unsafe {
            libc::sendmmsg(
                socket.fd(),
                messages.as_mut_ptr(),
                vectors,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        match usize::try_from(sent) {
            Ok(n) if n > 0 => (Ok(()), ends[n - 1]),
            _ => (Err(errno()), at),
        }
    }
}

/// Maximum iovecs of a GSO send of scattered packets: three per packet.
const PIECES: usize = 3 * 64;

impl Transmitter {
    /// Sends one group with scattered payloads, which the kernel gathers, or with IP options of its
    /// own.
    fn send_alone(&self, batch: &WirePackets, at: usize, end: usize, socket: &Socket) -> Result<(), i32> {
        let packets = &batch.packets()[at..end];
        let mut pieces = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; PIECES];
        let mut used = 0_usize;
        for part in packets.iter().flat_map(|packet| batch.parts(packet)).filter(|part| !part.is_empty()) {
            // The trailer of one packet and the headers of the next are adjacent in the slab.
            if let Some(before) = used.checked_sub(1).map(|last| &mut pieces[last])
                && before.iov_base.cast::<u8>().wrapping_add(before.iov_len).cast_const() == part.as_ptr()
            {
                before.iov_len += part.len();
                continue;
            }
            let Some(piece) = pieces.get_mut(used) else { return Err(libc::EMSGSIZE) };
            *piece = libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
            used += 1;
        }
        let Some(first) = packets.first() else { return Ok(()) };
        let mut name = SockAddr::new(first.dst, ROCE_PORT, self.scope);
        let mut controls = [ControlMessage::EMPTY; 3];
        let wanted = controls_of(first, packets.len());
        let mut given = 0;
        for (control, wanted) in controls.iter_mut().zip(wanted.into_iter().flatten()) {
            *control = wanted;
            given += size_of::<ControlMessage>();
        }
        // SAFETY: msghdr is plain integers and pointers; zeros (null, 0) are valid.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_namelen = name.len();
        message.msg_name = name.as_mut_ptr();
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = used;
        if given > 0 {
            message.msg_control = controls.as_mut_ptr().cast();
            message.msg_controllen = given;
        }
        // SAFETY: the message points at a live name and control data, and its pieces at live bytes
        // of the batch, which the kernel only reads.
        let sent = unsafe {
            libc::sendmsg(socket.fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        };
        if sent < 0 { Err(errno()) } else { Ok(()) }
    }
}

/// The UDP_SEGMENT control message.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct SegmentControl {
    len: usize,
    level: i32,
    kind: i32,
    segment: u16,
    /// Padding: the kernel ignores it; memory checkers do not.
    padding: [u16; 3],
}

impl SegmentControl {
    fn new(segment: u32) -> Self {
        Self {
            // The kernel's cmsghdr: its length counts header and data without the padding after
            // them.
            len: mem::offset_of!(Self, segment) + size_of::<u16>(),
            level: libc::SOL_UDP,
            kind: libc::UDP_SEGMENT,
            segment: u16::try_from(segment).unwrap_or(u16::MAX),
            padding: [0; 3],
        }
    }
}

/// A control message with an integer, for groups that leave alone; in the kernel's layout, padding
/// included.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct ControlMessage {
    len: usize,
    level: i32,
    kind: i32,
    value: [u8; 8],
}

impl ControlMessage {
    const EMPTY: Self = Self { len: 0, level: 0, kind: 0, value: [0; 8] };

    fn new<const N: usize>(level: i32, kind: i32, number: [u8; N]) -> Self {
        let mut value = [0; 8];
        value[..N].copy_from_slice(&number);
        Self { len: mem::offset_of!(Self, value) + N, level, kind, value }
    }
}

/// The control data of a group of that many packets like `first`.
fn controls_of(first: &TxPacket, packets: usize) -> [Option<ControlMessage>; 3] {
    let (level, class, hops) = match first.dst {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
    };
    let IpOptions { traffic_class, hop_limit } = first.ip_options;
    // It replaces that of the socket.
    let capable = first.is_ecn_capable() && traffic_class != 0 && traffic_class & ECN == 0;
    let traffic_class = if capable { traffic_class | ECT } else { traffic_class };
    let byte = |kind, value: u8| {
        (value != 0).then(|| ControlMessage::new(level, kind, i32::from(value).to_ne_bytes()))
    };
    let segment = u16::try_from(first.len).unwrap_or(u16::MAX).to_ne_bytes();
    let segments = (packets > 1).then(|| ControlMessage::new(libc::SOL_UDP, libc::UDP_SEGMENT, segment));
    [segments, byte(class, traffic_class), byte(hops, hop_limit)]
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
