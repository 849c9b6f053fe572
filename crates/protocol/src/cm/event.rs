//! What the agent tells its user.

use std::net::IpAddr;

use super::communication::CommId;
use super::message::{Rep, Req, SidrRep, SidrReq};

/// Something happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Event {
    /// A REQ for a service with a listener: accept or reject it.
    Request { id: CommId, from: IpAddr, req: Box<Req> },
    /// A SIDR REQ: a peer asks for the queue pair of a datagram service.
    SidrRequest { id: CommId, from: IpAddr, req: SidrReq },
    /// REP received: connect the queue pair, then call [`establish`](super::Agent::establish).
    Reply { id: CommId, rep: Rep },
    /// SIDR REP received; see its status.
    SidrReply { id: CommId, rep: SidrRep },
    /// RTU received: the connection is established.
    Established { id: CommId },
    /// The other side refuses.
    Rejected { id: CommId, reason: u16, private: Vec<u8> },
    /// The other side does not answer.
    Unreachable { id: CommId },
    /// The connection ended: a DREQ arrived, or a DREP to ours; `silent` if no DREP arrived.
    Disconnected { id: CommId, silent: bool },
    /// End of TIMEWAIT: no packet of the connection can be in flight any more.
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
