//! The header of a sealed packet.
//!
//! The slot of the receiver is where other packets have it, so that kernels steer sealed packets
//! alike.

use crate::wire::Qpn;

/// Bytes of the header.
pub const HEADER_LEN: usize = 24;
/// Bytes of the tag that ends a sealed packet.
pub const TAG_LEN: usize = 16;
/// Bytes that sealing adds to a packet.
pub const OVERHEAD: usize = HEADER_LEN + TAG_LEN;

/// First byte, from the manufacturer-specific opcodes of the standard: other devices drop it.
const SEALED: u8 = 0xf8;
/// In the high nibble of the second byte. Not 0: that is the version of RoCE headers there.
const VERSION: u8 = 1;
/// Bit of the second byte.
const ENCRYPTED: u8 = 1 << 3;

/// What follows the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A packet of a session.
    Session,
    /// A packet to any device of an address: a multicast or management datagram.
    Datagram,
    /// A sender asks for a session.
    Hello,
    /// The answer: a session.
    Reply,
    /// The session of a packet is unknown.
    Stale,
    /// As [`Session`](Self::Session): an acknowledgement. Links deliver it before requests that
    /// came with it.
    Acknowledge,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::Session, Self::Datagram, Self::Hello, Self::Reply, Self::Stale, Self::Acknowledge];
}

/// The header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedHeader {
    /// What follows it.
    pub kind: Kind,
    /// Whether the packet is encrypted.
    pub encrypted: bool,
    /// The IPv4 identification that the ICRC of the packet inside covers.
    pub ip_id: u8,
    /// The slot of the sender.
    pub slot: u8,
    /// Which secret: the first byte derived from it.
    pub key_id: u8,
    /// The queue pair that the packet goes to.
    pub to: Qpn,
    /// The number of the session, which its receiver chose; for datagrams the sender's salt.
    pub flow: u64,
    /// The number of the packet, unique under its key.
    pub counter: u64,
}

impl SealedHeader {
    /// Whether a packet claims to be sealed.
    #[inline]
    pub fn is_sealed(packet: &[u8]) -> bool {
        packet.first() == Some(&SEALED)
    }

    /// Whether a packet claims to be a sealed acknowledgement.
    #[inline]
    pub fn is_acknowledge(packet: &[u8]) -> bool {
        const KIND: u8 = 5;
        matches!(packet, [SEALED, second, ..] if second & (ENCRYPTED - 1) == KIND)
    }

    /// Writes it.
    #[inline]
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let kind = Kind::ALL.iter().zip(0_u8..).find(|(kind, _)| **kind == self.kind).map_or(0, |(_, n)| n);
        bytes[0] = SEALED;
        bytes[1] = VERSION << 4 | kind | if self.encrypted { ENCRYPTED } else { 0 };
        bytes[2] = self.ip_id;
        bytes[3] = self.slot;
        bytes[4..8].copy_from_slice(&self.to.get().to_be_bytes());
        bytes[4] = self.key_id;
        bytes[8..16].copy_from_slice(&self.flow.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.counter.to_be_bytes());
        bytes
    }

    /// Reads the header of a packet: any bytes may come.
    #[inline]
    pub fn parse(packet: &[u8]) -> Option<Self> {
        let bytes = packet.first_chunk::<HEADER_LEN>()?;
        let long = |at: usize| u64::from_be_bytes(std::array::from_fn(|i| bytes[at + i]));
        let [first, second, ip_id, slot, key_id, to @ ..] =
            [0, 1, 2, 3, 4, 5, 6, 7].map(|at: usize| bytes[at]);
        if first != SEALED || second >> 4 != VERSION {
            return None;
        }
        Some(Self {
            kind: *Kind::ALL.get(usize::from(second & (ENCRYPTED - 1)))?,
            encrypted: second & ENCRYPTED != 0,
            ip_id,
            slot,
            key_id,
            to: Qpn::new(u32::from_be_bytes([0, to[0], to[1], to[2]])),
            flow: long(8),
            counter: long(16),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Header, Malformed, Marker, Presence};

    #[test]
    fn it_is_read_as_it_was_written_and_is_nothing_else() {
        for kind in Kind::ALL {
            let header = SealedHeader {
                kind,
                encrypted: kind == Kind::Session,
                ip_id: 17,
                slot: 5,
                key_id: 0xfe,
                to: Qpn::new(0x2_0003),
                flow: 0x0123_4567_89ab_cdef,
                counter: u64::MAX - 1,
            };
            let mut packet = [0xee; 80];
            packet[..HEADER_LEN].copy_from_slice(&header.emit());
            assert_eq!(SealedHeader::parse(&packet), Some(header));
            assert_eq!(SealedHeader::is_acknowledge(&packet), kind == Kind::Acknowledge);
            assert_eq!(&packet[5..8], &[2, 0, 3], "it is steered as others are");
            assert_eq!(Header::parse(&packet).map(|p| p.header), Err(Malformed::TransportVersion));
            assert_eq!((Marker::parse(&packet), Presence::parse(&packet)), (None, None));
            for len in 0..HEADER_LEN {
                assert_eq!(SealedHeader::parse(&packet[..len]), None);
            }
            for second in [0x00, 0x05, 0x20, 0x16, 0x17] {
                packet[1] = second;
                assert_eq!(SealedHeader::parse(&packet), None, "{second:#x}");
            }
        }
    }
}
