//! Packets: bytes on one side, meaning on the other.
//!
//! [`Header::parse`] and [`Header::emit`] never panic on any input; [`icrc`] closes and checks the
//! invariant CRC.

mod gf;
mod header;
pub mod icrc;
mod id_policy;
mod ids;
mod malformed;
mod marker;
mod opcode;
mod presence;
mod selective_ack;

pub use header::{Aeth, AtomicEth, Deth, Feth, Header, Parsed, Reth, Syndrome};
pub use id_policy::{IdPolicy, IdVerdict};
pub use ids::{Psn, Qpn};
pub use malformed::Malformed;
pub use marker::Marker;
pub use opcode::{Opcode, OpcodeKind, PacketPosition, Service};
pub use presence::{Capabilities, Presence};
pub use selective_ack::SelectiveAck;

/// The UDP port RoCEv2 packets are sent to.
pub const ROCE_PORT: u16 = 4791;
/// The default partition key; we take part in no other partition.
pub const DEFAULT_PKEY: u16 = 0xffff;
/// Bytes of the base transport header.
pub const BTH_LEN: usize = 12;
/// Bytes of the invariant CRC that ends every packet.
pub const ICRC_LEN: usize = 4;
/// The longest run of headers a packet of ours carries: BTH + RETH + immediate, or BTH + AtomicETH.
pub const MAX_HEADER_LEN: usize = 44;
