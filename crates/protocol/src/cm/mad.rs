//! Management datagrams (MADs) as bytes: 256 of them, the header first, with bit fields.

use std::fmt;

/// Bytes of every management datagram.
pub const MAD_LEN: usize = 256;
/// The queue pair they go to and come from.
pub const GSI_QPN: u32 = 1;
/// The Q_Key of that queue pair.
pub const GSI_QKEY: u32 = 0x8001_0000;

/// Bytes before the message itself.
const HEADER: usize = 24;
const BASE_VERSION: u8 = 1;
const CLASS: u8 = 7;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 3;

/// What a message of the connection manager is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the standard's names
pub enum MessageKind {
    Req,
    Mra,
    Rej,
    Rep,
    Rtu,
    Dreq,
    Drep,
    SidrReq,
    SidrRep,
    Lap,
    Apr,
}

impl MessageKind {
    /// All of them, with their attribute numbers.
    const ALL: [(Self, u16); 11] = [
        (Self::Req, 0x10),
        (Self::Mra, 0x11),
        (Self::Rej, 0x12),
        (Self::Rep, 0x13),
        (Self::Rtu, 0x14),
        (Self::Dreq, 0x15),
        (Self::Drep, 0x16),
        (Self::SidrReq, 0x17),
        (Self::SidrRep, 0x18),
        (Self::Lap, 0x19),
        (Self::Apr, 0x1a),
    ];

    fn attribute(self) -> u16 {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or(0, |(_, attribute)| *attribute)
    }
}

/// A field of a message: the byte it begins in, the bit of that byte (0 is the highest), how many
/// bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field(pub(super) usize, pub(super) usize, pub(super) usize);

/// One management datagram of the connection manager's class.
#[derive(Clone, PartialEq, Eq)]
pub struct Mad([u8; MAD_LEN]);

impl Mad {
    /// An empty message.
    pub(super) fn new(kind: MessageKind, transaction: u64) -> Self {
        let mut mad = Self([0; MAD_LEN]);
        mad.0[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        mad.0[8..16].copy_from_slice(&transaction.to_be_bytes());
        mad.0[16..18].copy_from_slice(&kind.attribute().to_be_bytes());
        mad
    }

    /// Parses one; `None` if the bytes are not a message of this class and version. Bytes after the
    /// first 256 are ignored.
    pub fn parse(bytes: &[u8]) -> Option<(MessageKind, Self)> {
        let mad = Self(*bytes.first_chunk()?);
        if mad.0[..4] != [BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND] {
            return None;
        }
        let attribute = u16::from_be_bytes([mad.0[16], mad.0[17]]);
        let kind = MessageKind::ALL.iter().find(|(_, number)| *number == attribute).map(|(kind, _)| *kind)?;
        Some((kind, mad))
    }

    /// The bytes on the wire.
    pub fn bytes(&self) -> &[u8; MAD_LEN] {
        &self.0
    }

    /// The number that answers repeat.
    pub fn transaction(&self) -> u64 {
        self.0[8..16].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// The value of a field of at most 64 bits.
    pub(super) fn get(&self, Field(byte, bit, bits): Field) -> u64 {
        (0..bits).fold(0, |value, i| {
            let at = (HEADER + byte) * 8 + bit + i;
            value << 1 | u64::from(self.0[at / 8] >> (7 - at % 8) & 1)
        })
    }

    /// Sets a field of at most 64 bits to the low bits of `value`.
    pub(super) fn set(&mut self, Field(byte, bit, bits): Field, value: u64) {
        for i in 0..bits {
            let at = (HEADER + byte) * 8 + bit + i;
            let mask = 0x80 >> (at % 8);
            if value >> (bits - 1 - i) & 1 == 1 {
                self.0[at / 8] |= mask;
            } else {
                self.0[at / 8] &= !mask;
            }
        }
    }

    /// The low 8, 16 or 32 bits of a field.
    pub(super) fn byte(&self, field: Field) -> u8 {
        u8::try_from(self.get(field) & 0xff).unwrap_or(0)
    }

    pub(super) fn half(&self, field: Field) -> u16 {
        u16::try_from(self.get(field) & 0xffff).unwrap_or(0)
    }

    pub(super) fn word(&self, field: Field) -> u32 {
        u32::try_from(self.get(field) & 0xffff_ffff).unwrap_or(0)
    }

    /// Bytes of the message from `at` on.
    pub(super) fn slice(&self, at: usize, len: usize) -> &[u8] {
        &self.0[HEADER + at..HEADER + at + len]
    }

    /// Puts bytes there, as many as fit `len`; the rest of them is zero.
    pub(super) fn put(&mut self, at: usize, len: usize, bytes: &[u8]) {
        let room = &mut self.0[HEADER + at..HEADER + at + len];
        room.fill(0);
        room.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    }
}

impl fmt::Debug for Mad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = Self::parse(&self.0).map(|(kind, _)| kind);
        f.debug_struct("Mad")
            .field("kind", &kind)
            .field("transaction", &self.transaction())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_any_width_keep_to_their_bits() {
        for field in [
            Field(0, 0, 32),
            Field(35, 0, 8),
            Field(43, 5, 2),
            Field(88, 0, 20),
            Field(8, 0, 64),
            Field(91, 2, 6),
        ] {
            let Field(_, _, bits) = field;
            let all = u64::MAX >> (64 - bits);
            let mut mad = Mad::new(MessageKind::Req, 7);
            let before = mad.clone();
            mad.set(field, all);
            assert_eq!(mad.get(field), all);
            let ones: u32 = mad.0.iter().zip(before.0).map(|(a, b)| (a ^ b).count_ones()).sum();
            assert_eq!(ones as usize, bits, "{field:?}");
            mad.set(field, 0);
            assert_eq!(mad, before);
        }
    }

    #[test]
    fn other_classes_versions_and_attributes_are_refused() {
        let good = Mad::new(MessageKind::Drep, 1);
        assert_eq!(Mad::parse(good.bytes()), Some((MessageKind::Drep, good.clone())));
        assert_eq!(Mad::parse(&good.bytes()[..255]), None);
        for (at, byte) in [(0, 2), (1, 4), (2, 1), (3, 1), (17, 0x09), (16, 1)] {
            let mut bad = *good.bytes();
            bad[at] = byte;
            assert_eq!(Mad::parse(&bad), None, "byte {at}");
        }
    }
}
