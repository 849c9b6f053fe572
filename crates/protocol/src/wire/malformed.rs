//! Why a datagram is not a packet.

/// Why a datagram is not a packet of ours. Each is counted under its [`name`](Malformed::name) and
/// dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum Malformed {
    /// Fewer bytes than a base transport header and an ICRC.
    #[error(
        "the datagram is shorter than 16 bytes (base transport header and ICRC): it is not RoCEv2, or was cut"
    )]
    TooShort,
    /// The transport header version is not 0.
    #[error(
        "the transport header version is not 0: the datagram is not RoCEv2, or from a later version of it"
    )]
    TransportVersion,
    /// An opcode we do not speak.
    #[error("the opcode is none of the services RC, UC and UD: the sender uses a service we do not offer")]
    UnknownOpcode,
    /// Not the default partition.
    #[error("the partition key is not the default one: configure the sender for partition 0x7fff / 0xffff")]
    PartitionKey,
    /// The datagram ends inside the extension headers.
    #[error("the datagram ends inside the extension headers its opcode asks for: it was cut or forged")]
    TruncatedHeaders,
    /// More padding than bytes.
    #[error("the pad count is larger than what follows the headers: the packet was forged or damaged")]
    Padding,
    /// Payload after an opcode that has none.
    #[error(
        "bytes follow the headers of an opcode that carries no payload: the packet was forged or damaged"
    )]
    UnexpectedPayload,
}

impl Malformed {
    /// Every cause, in the order of [`Malformed::index`].
    pub const ALL: [Self; 7] = [
        Self::TooShort,
        Self::TransportVersion,
        Self::UnknownOpcode,
        Self::PartitionKey,
        Self::TruncatedHeaders,
        Self::Padding,
        Self::UnexpectedPayload,
    ];

    /// The place of this cause in [`Malformed::ALL`], for an array of counters.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name its counter has.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TooShort => "malformed_too_short",
            Self::TransportVersion => "malformed_transport_version",
            Self::UnknownOpcode => "malformed_unknown_opcode",
            Self::PartitionKey => "malformed_partition_key",
            Self::TruncatedHeaders => "malformed_truncated_headers",
            Self::Padding => "malformed_padding",
            Self::UnexpectedPayload => "malformed_unexpected_payload",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_have_their_own_index_and_name() {
        for (index, cause) in Malformed::ALL.into_iter().enumerate() {
            assert_eq!(cause.index(), index);
            assert_eq!(Malformed::ALL.iter().filter(|other| other.name() == cause.name()).count(), 1);
        }
    }
}
