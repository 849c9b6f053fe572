//! Dispatch of CM messages where several processes share queue pair 1, and the refusal of a message
//! without a recipient.

use super::mad::{Mad, MessageKind};
use super::message::{About, CmMessage, Ids, Rej, SidrRep};
use super::{reason, sidr_status};
use crate::wire::Qpn;

/// The recipient of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CmRoute {
    /// The listener of this service: the message starts a communication.
    Service(u64),
    /// The process that issued this communication ID: the message continues a communication.
    Communication(u32),
}

impl CmRoute {
    /// Where a message goes.
    pub fn of(message: &CmMessage) -> Self {
        match message {
            CmMessage::Req(req) => Self::Service(req.service),
            CmMessage::SidrReq(req) => Self::Service(req.service),
            CmMessage::SidrRep(rep) => Self::Communication(rep.request),
            CmMessage::Rep(rep) => Self::Communication(rep.ids.remote),
            CmMessage::Rej(rej) => Self::Communication(rej.ids.remote),
            CmMessage::Mra(mra) => Self::Communication(mra.ids.remote),
            CmMessage::Dreq { ids, .. }
            | CmMessage::Rtu(ids)
            | CmMessage::Drep(ids)
            | CmMessage::Lap(ids)
            | CmMessage::Apr(ids) => Self::Communication(ids.remote),
        }
    }
}

/// What to answer to a message whose addressee does not exist; nothing to those that ask for no
/// answer.
pub fn refusal(message: &CmMessage, transaction: &Mad) -> Option<Mad> {
    let transaction = transaction.transaction();
    let rej = |ids: Ids, about, reason| {
        Rej { ids: ids.swapped(), about, reason, private: Vec::new() }.emit(transaction)
    };
    match message {
        CmMessage::Req(req) => {
            Some(rej(Ids { local: req.local_id, remote: 0 }, About::Req, reason::INVALID_SERVICE_ID))
        }
        CmMessage::Rep(rep) => Some(rej(rep.ids, About::Rep, reason::INVALID_COMM_ID)),
        // It has forgotten the connection, which is what was asked for.
        CmMessage::Dreq { ids, .. } => Some(ids.swapped().emit(MessageKind::Drep, transaction)),
        CmMessage::SidrReq(req) => Some(
            SidrRep {
                request: req.request,
                status: sidr_status::UNSUPPORTED,
                qpn: Qpn::new(0),
                service: req.service,
                qkey: 0,
                private: Vec::new(),
            }
            .emit(transaction),
        ),
        _ => None,
    }
}
