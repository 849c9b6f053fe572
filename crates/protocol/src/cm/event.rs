//! What the agent tells its user.

use std::net::IpAddr;

use super::communication::CommId;
use super::message::{Rep, Req, SidrRep, SidrReq};

/// Something happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Event {
    /// Somebody wants a connection with a service that is listened to: accept or reject it.
    Request { id: CommId, from: IpAddr, req: Box<Req> },
    /// Somebody asks for the queue pair of a datagram service.
    SidrRequest { id: CommId, from: IpAddr, req: SidrReq },
    /// The other side accepts: connect the queue pair, and say so by [`establish`](super::Agent::establish).
    Reply { id: CommId, rep: Rep },
    /// The answer to a question for a datagram service; see its status.
    SidrReply { id: CommId, rep: SidrRep },
    /// The other side has what we said: the connection stands.
    Established { id: CommId },
    /// The other side refuses.
    Rejected { id: CommId, reason: u16, private: Vec<u8> },
    /// The other side does not answer.
    Unreachable { id: CommId },
    /// The connection ends: the other side said so, or has answered ours; `silent` if it did not answer.
    Disconnected { id: CommId, silent: bool },
    /// No packet of the connection can be under way any more.
    TimewaitExit { id: CommId },
}

impl Event {
    /// What it is about.
    pub fn id(&self) -> CommId {
        match self {
            Self::Request { id, .. }
            | Self::SidrRequest { id, .. }
            | Self::Reply { id, .. }
            | Self::SidrReply { id, .. }
            | Self::Established { id }
            | Self::Rejected { id, .. }
            | Self::Unreachable { id }
            | Self::Disconnected { id, .. }
            | Self::TimewaitExit { id } => *id,
        }
    }
}
