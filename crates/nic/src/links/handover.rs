//! Handovers: packets that reached the wrong device of an address, as one device gives them to
//! another.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes before the packets of a handover: magic 4, family and mark 1, slot 1, source port 2, first
/// id 2, segment 2, address 16.
pub(super) const PREFIX: usize = 28;
const MAGIC: [u8; 4] = *b"nbh2";
/// Bit of the family: the packets have a congestion mark.
const MARKED: u8 = 0x80;
/// The most packet bytes in one handover: what one receive can hold.
const MAX_BYTES: usize = 65_536;
/// Buffer size that a handover requires.
pub(super) const TAKE_BUFFER: usize = PREFIX + MAX_BYTES;

/// Several packets of one size (the last may be shorter) from one sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroBurst<'a> {
    pub(super) src: IpAddr,
    pub(super) src_port: u16,
    /// The likeliest IPv4 identification of the first packet.
    pub(super) ip_id: u16,
    /// Bytes of each packet but the last.
    pub(super) segment: usize,
    /// They have a congestion mark (ECN CE). The kernel merges none without one.
    pub(super) marked: bool,
    pub(super) bytes: &'a [u8],
}

impl GroBurst<'_> {
    /// How many packets it holds.
    pub(super) fn packets(&self) -> u64 {
        u64::try_from(self.bytes.len().div_ceil(self.segment.max(1))).unwrap_or(u64::MAX)
    }
}

/// Result of a handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handover {
    Done,
    /// No process of our user owns the slot, or offers the service.
    NoOwner,
    /// The owner's queue is full for now.
    Full,
    /// The packets do not fit a handover.
    Lost,
}

impl Handover {
    /// Result of a connection or a send that failed.
    pub(super) fn of_error(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::ENOBUFS) => Self::Full,
            Some(
                libc::ECONNREFUSED
                | libc::ENOENT
                | libc::EPROTOTYPE
                | libc::EACCES
                | libc::EPIPE
                | libc::ECONNRESET
                | libc::ENOTCONN,
            ) => Self::NoOwner,
            _ => Self::Lost,
        }
    }
}

/// Sends packets to the owner at the other end of a connection.
pub(super) fn send(connection: &OwnedFd, slot: u8, run: &GroBurst<'_>) -> Handover {
    let Some(mut prefix) = encode(slot, run) else { return Handover::Lost };
    let mut parts = [
        libc::iovec { iov_base: prefix.as_mut_ptr().cast(), iov_len: PREFIX },
        libc::iovec { iov_base: run.bytes.as_ptr().cast_mut().cast(), iov_len: run.bytes.len() },
    ];
    // SAFETY: msghdr is plain integers and pointers; zeros (null, 0) are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message points at two live buffers, which the kernel only reads.
    if unsafe { libc::sendmsg(connection.as_raw_fd(), &raw const message, flags) } >= 0 {
        return Handover::Done;
    }
    Handover::of_error(&io::Error::last_os_error())
}

pub(super) fn encode(slot: u8, run: &GroBurst<'_>) -> Option<[u8; PREFIX]> {
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
    out[4] |= if run.marked { MARKED } else { 0 };
    Some(out)
}

/// Decodes a handover to that slot; the bytes are untrusted.
pub(super) fn decode(slot: u8, message: &[u8]) -> Option<GroBurst<'_>> {
    let (prefix, bytes) = message.split_first_chunk::<PREFIX>()?;
    let u16_at = |at: usize| u16::from_be_bytes([prefix[at], prefix[at + 1]]);
    let v6: [u8; 16] = prefix.last_chunk().copied()?;
    let marked = prefix[4] & MARKED != 0;
    let src: IpAddr = match prefix[4] & !MARKED {
        4 => Ipv4Addr::new(v6[0], v6[1], v6[2], v6[3]).into(),
        6 => Ipv6Addr::from(v6).into(),
        _ => return None,
    };
    let segment = usize::from(u16_at(10));
    if prefix[..4] != MAGIC || prefix[5] != slot || segment == 0 || bytes.is_empty() {
        return None;
    }
    Some(GroBurst { src, src_port: u16_at(6), ip_id: u16_at(8), segment, marked, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_handovers_are_dropped() {
        let run = GroBurst {
            src: [127, 0, 0, 9].into(),
            src_port: 4791,
            ip_id: 3,
            segment: 40,
            marked: true,
            bytes: &[7; 50],
        };
        let good = [&encode(5, &run).unwrap()[..], &[7; 50]].concat();
        assert_eq!(decode(5, &good), Some(run));
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
