//! Dispatch of CM messages where several processes share queue pair 1, and the refusal of a message
//! without a recipient.

use super::mad::{Mad, MessageKind};
use super::message::{About, Ids, Message, Rej, SidrRep};
use super::{reason, sidr_status};
use crate::wire::Qpn;

/// The recipient of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// The listener of this service: the message starts a communication.
    Service(u64),
    /// The process that issued this communication ID: the message continues a communication.
    Communication(u32),
}

impl Route {
    /// Where a message goes.
    pub fn of(message: &Message) -> Self {
        match message {
            Message::Req(req) => Self::Service(req.service),
            Message::SidrReq(req) => Self::Service(req.service),
            Message::SidrRep(rep) => Self::Communication(rep.request),
            Message::Rep(rep) => Self::Communication(rep.ids.remote),
            Message::Rej(rej) => Self::Communication(rej.ids.remote),
            Message::Mra(mra) => Self::Communication(mra.ids.remote),
            Message::Dreq { ids, .. }
            | Message::Rtu(ids)
            | Message::Drep(ids)
            | Message::Lap(ids)
            | Message::Apr(ids) => Self::Communication(ids.remote),
        }
    }
}

/// What to answer to a message whose addressee does not exist; nothing to those that ask for no
/// answer.
pub fn refusal(message: &Message, transaction: &Mad) -> Option<Mad> {
    let transaction = transaction.transaction();
    let rej = |ids: Ids, about, reason| {
        Rej { ids: ids.swapped(), about, reason, private: Vec::new() }.emit(transaction)
    };
    match message {
        Message::Req(req) => {
            Some(rej(Ids { local: req.local_id, remote: 0 }, About::Req, reason::INVALID_SERVICE_ID))
        }
        Message::Rep(rep) => Some(rej(rep.ids, About::Rep, reason::INVALID_COMM_ID)),
        // It has forgotten the connection, which is what was asked for.
        Message::Dreq { ids, .. } => Some(ids.swapped().emit(MessageKind::Drep, transaction)),
        Message::SidrReq(req) => Some(
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
