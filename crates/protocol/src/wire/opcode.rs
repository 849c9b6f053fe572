//! Opcodes of the base transport header.

use super::BTH_LEN;

const RETH_LEN: usize = 16;
const ATOMIC_LEN: usize = 28;
const AETH_LEN: usize = 4;
const ATOMIC_ACK_LEN: usize = 8;
/// Immediate data, or the key of a SEND with invalidate.
const WORD_LEN: usize = 4;

/// Where a packet stands in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The whole message.
    Only,
}

impl Place {
    /// Whether a message begins with this packet.
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends with this packet.
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// The opcodes of the reliable connection service. Numbers are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // the names are the standard's
pub enum Opcode {
    SendFirst = 0x00,
    SendMiddle = 0x01,
    SendLast = 0x02,
    SendLastImm = 0x03,
    SendOnly = 0x04,
    SendOnlyImm = 0x05,
    WriteFirst = 0x06,
    WriteMiddle = 0x07,
    WriteLast = 0x08,
    WriteLastImm = 0x09,
    WriteOnly = 0x0a,
    WriteOnlyImm = 0x0b,
    ReadRequest = 0x0c,
    ReadResponseFirst = 0x0d,
    ReadResponseMiddle = 0x0e,
    ReadResponseLast = 0x0f,
    ReadResponseOnly = 0x10,
    Ack = 0x11,
    AtomicAck = 0x12,
    CompareSwap = 0x13,
    FetchAdd = 0x14,
    SendLastInvalidate = 0x16,
    SendOnlyInvalidate = 0x17,
}

impl Opcode {
    /// Every opcode, in the order of their numbers.
    pub const ALL: [Self; 23] = [
        Self::SendFirst,
        Self::SendMiddle,
        Self::SendLast,
        Self::SendLastImm,
        Self::SendOnly,
        Self::SendOnlyImm,
        Self::WriteFirst,
        Self::WriteMiddle,
        Self::WriteLast,
        Self::WriteLastImm,
        Self::WriteOnly,
        Self::WriteOnlyImm,
        Self::ReadRequest,
        Self::ReadResponseFirst,
        Self::ReadResponseMiddle,
        Self::ReadResponseLast,
        Self::ReadResponseOnly,
        Self::Ack,
        Self::AtomicAck,
        Self::CompareSwap,
        Self::FetchAdd,
        Self::SendLastInvalidate,
        Self::SendOnlyInvalidate,
    ];

    /// The opcode with this number, if we speak it.
    pub fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0x00..=0x14 => Some(Self::ALL[usize::from(byte)]),
            0x16 => Some(Self::SendLastInvalidate),
            0x17 => Some(Self::SendOnlyInvalidate),
            _ => None,
        }
    }

    /// The number on the wire.
    pub const fn to_byte(self) -> u8 {
        self as u8
    }

    /// Bytes of the base transport header and the extension headers of this opcode.
    pub const fn header_len(self) -> usize {
        let mut len = BTH_LEN;
        if self.has_reth() {
            len += RETH_LEN;
        }
        if self.has_atomic() {
            len += ATOMIC_LEN;
        }
        if self.has_aeth() {
            len += AETH_LEN;
        }
        if self.has_atomic_ack() {
            len += ATOMIC_ACK_LEN;
        }
        if self.has_immediate() || self.has_invalidate() {
            len += WORD_LEN;
        }
        len
    }

    /// Whether the packet carries a RETH (remote address, key, length).
    pub const fn has_reth(self) -> bool {
        matches!(self, Self::WriteFirst | Self::WriteOnly | Self::WriteOnlyImm | Self::ReadRequest)
    }

    /// Whether the packet carries an AtomicETH.
    pub const fn has_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    /// Whether the packet carries an AETH (syndrome and message number).
    pub const fn has_aeth(self) -> bool {
        matches!(
            self,
            Self::ReadResponseFirst
                | Self::ReadResponseLast
                | Self::ReadResponseOnly
                | Self::Ack
                | Self::AtomicAck
        )
    }

    /// Whether the packet carries the original value of an atomic operation.
    pub const fn has_atomic_ack(self) -> bool {
        matches!(self, Self::AtomicAck)
    }

    /// Whether the packet carries immediate data.
    pub const fn has_immediate(self) -> bool {
        matches!(self, Self::SendLastImm | Self::SendOnlyImm | Self::WriteLastImm | Self::WriteOnlyImm)
    }

    /// Whether the packet carries a key to invalidate.
    pub const fn has_invalidate(self) -> bool {
        matches!(self, Self::SendLastInvalidate | Self::SendOnlyInvalidate)
    }

    /// Whether the packet may carry payload.
    pub const fn has_payload(self) -> bool {
        !matches!(self, Self::ReadRequest | Self::Ack | Self::AtomicAck | Self::CompareSwap | Self::FetchAdd)
    }

    /// Whether a responder sends it (to a requester).
    pub const fn is_response(self) -> bool {
        matches!(
            self,
            Self::ReadResponseFirst
                | Self::ReadResponseMiddle
                | Self::ReadResponseLast
                | Self::ReadResponseOnly
                | Self::Ack
                | Self::AtomicAck
        )
    }

    /// Whether it is a part of a SEND.
    pub const fn is_send(self) -> bool {
        matches!(
            self,
            Self::SendFirst
                | Self::SendMiddle
                | Self::SendLast
                | Self::SendLastImm
                | Self::SendOnly
                | Self::SendOnlyImm
                | Self::SendLastInvalidate
                | Self::SendOnlyInvalidate
        )
    }

    /// Whether it is a part of a WRITE.
    pub const fn is_write(self) -> bool {
        matches!(
            self,
            Self::WriteFirst
                | Self::WriteMiddle
                | Self::WriteLast
                | Self::WriteLastImm
                | Self::WriteOnly
                | Self::WriteOnlyImm
        )
    }

    /// Where the packet stands in its message.
    pub const fn place(self) -> Place {
        match self {
            Self::SendFirst | Self::WriteFirst | Self::ReadResponseFirst => Place::First,
            Self::SendMiddle | Self::WriteMiddle | Self::ReadResponseMiddle => Place::Middle,
            Self::SendLast
            | Self::SendLastImm
            | Self::SendLastInvalidate
            | Self::WriteLast
            | Self::WriteLastImm
            | Self::ReadResponseLast => Place::Last,
            _ => Place::Only,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MAX_HEADER_LEN;

    #[test]
    fn numbers_and_opcodes_are_one_to_one() {
        let known = (0..=u8::MAX).filter_map(Opcode::from_byte).collect::<Vec<_>>();
        assert_eq!(known, Opcode::ALL);
        for byte in 0..=u8::MAX {
            if let Some(opcode) = Opcode::from_byte(byte) {
                assert_eq!(opcode.to_byte(), byte);
            }
        }
    }

    #[test]
    fn no_header_is_longer_than_the_constant_says() {
        assert_eq!(Opcode::ALL.map(Opcode::header_len).into_iter().max(), Some(MAX_HEADER_LEN));
    }
}
