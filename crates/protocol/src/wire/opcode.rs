//! Opcodes of the base transport header.

use super::BTH_LEN;

const DETH_LEN: usize = 8;
const FETH_LEN: usize = 4;
const RETH_LEN: usize = 16;
const ATOMIC_LEN: usize = 28;
const AETH_LEN: usize = 4;
const ATOMIC_ACK_LEN: usize = 8;
/// Immediate data, or the key of a SEND with invalidate.
const WORD_LEN: usize = 4;

/// The opcodes by their numbers.
static BY_NUMBER: [Option<Opcode>; 256] = {
    let mut by_number = [None; 256];
    let mut at = 0;
    while at < Opcode::ALL.len() {
        let opcode = Opcode::ALL[at];
        by_number[opcode as usize] = Some(opcode);
        at += 1;
    }
    by_number
};

/// What [`Opcode::header_len`] says, by number: every packet asks several times.
const HEADER_LENS: [u8; 0x66] = {
    let mut lens = [0; 0x66];
    let mut at = 0;
    while at < Opcode::ALL.len() {
        let opcode = Opcode::ALL[at];
        #[allow(clippy::cast_possible_truncation)] // 40 at most
        let len = opcode.count_header_len() as u8;
        lens[opcode as usize] = len;
        at += 1;
    }
    lens
};

/// Where a packet stands in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PacketPosition {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The whole message.
    Only,
}

impl PacketPosition {
    /// Whether a message begins with this packet.
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends with this packet.
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// The transport service of a queue pair and of its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection: packets to one peer, in order or not at all, never acknowledged.
    Uc,
    /// Unreliable datagrams: each message is one packet, to any peer.
    Ud,
    /// The sending end of an extended reliable connection (XRC): each request names the peer's
    /// shared receive queue.
    XrcInitiator,
    /// The receiving end of it.
    XrcTarget,
}

impl Service {
    /// Every service.
    pub const ALL: [Self; 5] = [Self::Rc, Self::Uc, Self::Ud, Self::XrcInitiator, Self::XrcTarget];

    /// Whether it is one end of an extended reliable connection.
    pub const fn is_xrc(self) -> bool {
        matches!(self, Self::XrcInitiator | Self::XrcTarget)
    }

    /// Whether requests are acknowledged.
    pub const fn is_reliable(self) -> bool {
        matches!(self, Self::Rc) || self.is_xrc()
    }

    /// The high three bits of the opcodes of XRC; the others are those of the reliable connection.
    pub(super) const XRC_BITS: u8 = 0xa0;

    /// The high three bits of its opcodes.
    const fn bits(self) -> u8 {
        match self {
            Self::Rc => 0x00,
            Self::Uc => 0x20,
            Self::Ud => 0x60,
            Self::XrcInitiator | Self::XrcTarget => Self::XRC_BITS,
        }
    }
}

/// The opcodes of all services; those without a prefix are the reliable connection's. Numbers are
/// the wire's.
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
    Flush = 0x1c,
    AtomicWrite = 0x1d,
    UcSendFirst = 0x20,
    UcSendMiddle = 0x21,
    UcSendLast = 0x22,
    UcSendLastImm = 0x23,
    UcSendOnly = 0x24,
    UcSendOnlyImm = 0x25,
    UcWriteFirst = 0x26,
    UcWriteMiddle = 0x27,
    UcWriteLast = 0x28,
    UcWriteLastImm = 0x29,
    UcWriteOnly = 0x2a,
    UcWriteOnlyImm = 0x2b,
    UdSendOnly = 0x64,
    UdSendOnlyImm = 0x65,
}

/// What a packet asks for, or that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum OpcodeKind {
    Send,
    Write,
    Read,
    Atomic,
    AtomicWrite,
    Flush,
    Response,
}

impl Opcode {
    /// What it asks for, or that it answers.
    pub const fn kind(self) -> OpcodeKind {
        match self {
            Self::SendFirst
            | Self::SendMiddle
            | Self::SendLast
            | Self::SendLastImm
            | Self::SendOnly
            | Self::SendOnlyImm
            | Self::SendLastInvalidate
            | Self::SendOnlyInvalidate
            | Self::UcSendFirst
            | Self::UcSendMiddle
            | Self::UcSendLast
            | Self::UcSendLastImm
            | Self::UcSendOnly
            | Self::UcSendOnlyImm
            | Self::UdSendOnly
            | Self::UdSendOnlyImm => OpcodeKind::Send,
            Self::WriteFirst
            | Self::WriteMiddle
            | Self::WriteLast
            | Self::WriteLastImm
            | Self::WriteOnly
            | Self::WriteOnlyImm
            | Self::UcWriteFirst
            | Self::UcWriteMiddle
            | Self::UcWriteLast
            | Self::UcWriteLastImm
            | Self::UcWriteOnly
            | Self::UcWriteOnlyImm => OpcodeKind::Write,
            Self::ReadRequest => OpcodeKind::Read,
            Self::CompareSwap | Self::FetchAdd => OpcodeKind::Atomic,
            Self::AtomicWrite => OpcodeKind::AtomicWrite,
            Self::Flush => OpcodeKind::Flush,
            Self::ReadResponseFirst
            | Self::ReadResponseMiddle
            | Self::ReadResponseLast
            | Self::ReadResponseOnly
            | Self::Ack
            | Self::AtomicAck => OpcodeKind::Response,
        }
    }

    /// Every opcode, in the order of their numbers.
    pub const ALL: [Self; 39] = [
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
        Self::Flush,
        Self::AtomicWrite,
        Self::UcSendFirst,
        Self::UcSendMiddle,
        Self::UcSendLast,
        Self::UcSendLastImm,
        Self::UcSendOnly,
        Self::UcSendOnlyImm,
        Self::UcWriteFirst,
        Self::UcWriteMiddle,
        Self::UcWriteLast,
        Self::UcWriteLastImm,
        Self::UcWriteOnly,
        Self::UcWriteOnlyImm,
        Self::UdSendOnly,
        Self::UdSendOnlyImm,
    ];

    /// The opcode with this number, if we speak it.
    pub fn from_byte(byte: u8) -> Option<Self> {
        BY_NUMBER[usize::from(byte)]
    }

    /// The number on the wire.
    pub const fn to_byte(self) -> u8 {
        self as u8
    }

    /// The service it belongs to.
    pub const fn service(self) -> Service {
        match self.to_byte() {
            0x00..0x20 => Service::Rc,
            0x20..0x60 => Service::Uc,
            _ => Service::Ud,
        }
    }

    /// The opcode that says the same in another service, if that has one.
    pub fn in_service(self, service: Service) -> Option<Self> {
        Self::from_byte(self.to_byte() & 0x1f | service.bits())
    }

    /// Bytes of the base transport header and the extension headers of this opcode.
    #[inline]
    pub const fn header_len(self) -> usize {
        HEADER_LENS[self as usize] as usize
    }

    const fn count_header_len(self) -> usize {
        let mut len = BTH_LEN;
        if self.has_deth() {
            len += DETH_LEN;
        }
        if self.has_feth() {
            len += FETH_LEN;
        }
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

    /// Whether the packet carries a DETH (queue key and source).
    pub const fn has_deth(self) -> bool {
        matches!(self, Self::UdSendOnly | Self::UdSendOnlyImm)
    }

    /// Whether the packet carries a FETH (what a FLUSH covers).
    pub const fn has_feth(self) -> bool {
        matches!(self, Self::Flush)
    }

    /// Whether the packet carries a RETH (remote address, key, length).
    pub const fn has_reth(self) -> bool {
        matches!(
            self,
            Self::WriteFirst
                | Self::WriteOnly
                | Self::WriteOnlyImm
                | Self::ReadRequest
                | Self::Flush
                | Self::AtomicWrite
                | Self::UcWriteFirst
                | Self::UcWriteOnly
                | Self::UcWriteOnlyImm
        )
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
        matches!(
            self,
            Self::SendLastImm
                | Self::SendOnlyImm
                | Self::WriteLastImm
                | Self::WriteOnlyImm
                | Self::UcSendLastImm
                | Self::UcSendOnlyImm
                | Self::UcWriteLastImm
                | Self::UcWriteOnlyImm
                | Self::UdSendOnlyImm
        )
    }

    /// Whether the packet carries a key to invalidate.
    pub const fn has_invalidate(self) -> bool {
        matches!(self, Self::SendLastInvalidate | Self::SendOnlyInvalidate)
    }

    /// Whether the packet may carry payload.
    pub const fn has_payload(self) -> bool {
        !matches!(
            self,
            Self::ReadRequest
                | Self::Ack
                | Self::AtomicAck
                | Self::CompareSwap
                | Self::FetchAdd
                | Self::Flush
        )
    }

    /// Whether an XRC packet with this opcode names the shared receive queue: the first packets of
    /// requests do.
    pub(super) const fn names_srq(self) -> bool {
        !self.is_response() && self.place().starts()
    }

    /// Whether a responder sends it (to a requester).
    pub const fn is_response(self) -> bool {
        matches!(self.kind(), OpcodeKind::Response)
    }

    /// Whether it is a request that is acknowledged.
    pub const fn is_acknowledged(self) -> bool {
        !self.is_response() && matches!(self.service(), Service::Rc)
    }

    /// Whether it is a part of a SEND.
    pub const fn is_send(self) -> bool {
        matches!(self.kind(), OpcodeKind::Send)
    }

    /// Whether it is a part of a WRITE.
    pub const fn is_write(self) -> bool {
        matches!(self.kind(), OpcodeKind::Write)
    }

    /// Where the packet stands in its message.
    pub const fn place(self) -> PacketPosition {
        match self {
            Self::SendFirst
            | Self::WriteFirst
            | Self::ReadResponseFirst
            | Self::UcSendFirst
            | Self::UcWriteFirst => PacketPosition::First,
            Self::SendMiddle
            | Self::WriteMiddle
            | Self::ReadResponseMiddle
            | Self::UcSendMiddle
            | Self::UcWriteMiddle => PacketPosition::Middle,
            Self::SendLast
            | Self::SendLastImm
            | Self::SendLastInvalidate
            | Self::WriteLast
            | Self::WriteLastImm
            | Self::ReadResponseLast
            | Self::UcSendLast
            | Self::UcSendLastImm
            | Self::UcWriteLast
            | Self::UcWriteLastImm => PacketPosition::Last,
            _ => PacketPosition::Only,
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
    fn the_same_in_another_service_has_the_same_shape() {
        for opcode in Opcode::ALL {
            assert_eq!(opcode.in_service(opcode.service()), Some(opcode));
            for service in Service::ALL {
                let Some(other) = opcode.in_service(service) else { continue };
                assert_eq!(other.service(), service);
                let shape = |o: Opcode| {
                    (o.place(), o.is_send(), o.is_write(), o.has_reth(), o.has_immediate(), o.is_response())
                };
                assert_eq!(shape(other), shape(opcode), "{opcode:?} {other:?}");
            }
        }
        assert_eq!(Opcode::ReadRequest.in_service(Service::Uc), None);
        assert_eq!(Opcode::SendOnlyInvalidate.in_service(Service::Uc), None);
        assert_eq!(Opcode::WriteOnly.in_service(Service::Ud), None);
    }

    #[test]
    fn no_header_is_longer_than_the_constant_says() {
        // XRC adds the number of a shared receive queue.
        assert_eq!(Opcode::ALL.map(Opcode::header_len).into_iter().max(), Some(MAX_HEADER_LEN - 4));
    }
}
