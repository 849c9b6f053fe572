//! Handling of received messages.

use std::net::IpAddr;

use super::{Agent, MAX_COMMUNICATIONS, SERVICE_TIMEOUT};
use crate::cm::communication::{CommId, Communication, CommunicationState};
use crate::cm::event::Event;
use crate::cm::mad::{Mad, MessageKind};
use crate::cm::message::{About, CmMessage, Ids, Mra, Rej, Rep, Req, SidrReq, emit_apr};
use crate::cm::reason;
use crate::cm::route::refusal;
use crate::timing::Nanos;

impl Agent {
    /// Handles a message.
    pub fn handle_message(&mut self, now: Nanos, from: IpAddr, message: &CmMessage, mad: &Mad) {
        self.counters.received += 1;
        match message {
            CmMessage::Req(req) => self.take_req(now, from, req, mad),
            CmMessage::SidrReq(req) => self.take_sidr_req(now, from, req, mad),
            CmMessage::Rep(rep) => self.take_rep(now, from, rep, message, mad),
            CmMessage::Rtu(ids) => self.about(from, *ids, |this, communication| {
                if communication.state != CommunicationState::RepSent {
                    this.counters.duplicates += 1;
                    return;
                }
                communication.rest(CommunicationState::Established);
                this.tell(communication, Event::Established { id: communication.id() });
            }),
            CmMessage::Rej(rej) => self.take_rej(now, from, rej),
            CmMessage::Mra(mra) => self.about(from, mra.ids, |_, communication| {
                let waits = match mra.about {
                    About::Req => communication.state == CommunicationState::ReqSent,
                    About::Rep => communication.state == CommunicationState::RepSent,
                    About::Other => false,
                };
                if waits {
                    communication.extend_deadline(now, mra.service_timeout);
                }
            }),
            CmMessage::Dreq { ids, .. } => self.take_dreq(now, from, *ids, message, mad),
            CmMessage::Drep(ids) => self.about(from, *ids, |this, communication| {
                if communication.state == CommunicationState::DreqSent {
                    this.tell(communication, Event::Disconnected { id: communication.id(), silent: false });
                    communication.wait_out(now);
                }
            }),
            CmMessage::SidrRep(rep) => {
                let ids = Ids { local: 0, remote: rep.request };
                self.about(from, ids, |this, communication| {
                    if communication.state == CommunicationState::SidrReqSent {
                        communication.rest(CommunicationState::Over);
                        this.tell(
                            communication,
                            Event::SidrReply { id: communication.id(), rep: rep.clone() },
                        );
                    }
                });
            }
            CmMessage::Lap(ids) => self.send(from, emit_apr(ids.swapped(), mad.transaction())),
            CmMessage::Apr(_) => self.counters.dropped += 1, // an answer to what we never ask
        }
    }

    fn take_req(&mut self, now: Nanos, from: IpAddr, req: &Req, mad: &Mad) {
        if let Some(&known) = self.asked.get(&(from, req.local_id, false)) {
            self.counters.duplicates += 1;
            let Some(communication) = self.communications.get(&known) else { return };
            let again = match communication.state {
                CommunicationState::ReqReceived => {
                    let ids = communication.ids;
                    let mra = Mra { ids, about: About::Req, service_timeout: SERVICE_TIMEOUT };
                    Some(mra.emit(communication.transaction))
                }
                CommunicationState::RepSent | CommunicationState::Over => communication.said.clone(),
                _ => None,
            };
            if let Some(again) = again {
                self.counters.repeated += 1;
                self.send(from, again);
            }
            return;
        }
        let Some(listener) = self.listeners.get_mut(&req.service) else {
            let message = CmMessage::Req(Box::new(req.clone()));
            return refusal(&message, mad).into_iter().for_each(|rej| self.send(from, rej));
        };
        if !self.limits.allow(now, from) {
            self.counters.limited += 1;
            return;
        }
        if listener.pending >= listener.backlog || self.communications.len() >= MAX_COMMUNICATIONS {
            self.counters.overrun += 1; // it will be asked again
            return;
        }
        let refused = |reason| {
            let ids = Ids { local: 0, remote: req.local_id };
            Rej { ids, about: About::Req, reason, private: Vec::new() }.emit(mad.transaction())
        };
        // Only reliable connections are connected by address.
        if req.transport != 0 {
            return self.send(from, refused(reason::INVALID_TRANSPORT_TYPE));
        }
        if let Some(old) = self.standing_with(from, req.qpn) {
            self.send(from, refused(reason::STALE_CONNECTION));
            return self.end_stale(now, old);
        }
        let Ok(local) = self.allocate() else { return };
        if let Some(listener) = self.listeners.get_mut(&req.service) {
            listener.pending += 1;
        }
        let ids = Ids { local, remote: req.local_id };
        let mut new = Communication::new(from, ids, CommunicationState::ReqReceived, mad.transaction());
        new.remote_qpn = req.qpn;
        new.pending = Some(req.service);
        new.local_ack_timeout = req.local_ack_timeout;
        self.asked.insert((from, req.local_id, false), local);
        self.queue_pairs.insert((from, req.qpn), local);
        self.communications.insert(local, new);
        self.events.push_back(Event::Request { id: CommId(local), from, req: Box::new(req.clone()) });
    }

    fn take_sidr_req(&mut self, now: Nanos, from: IpAddr, req: &SidrReq, mad: &Mad) {
        if let Some(&known) = self.asked.get(&(from, req.request, true)) {
            self.counters.duplicates += 1;
            let said = self.communications.get(&known).and_then(|communication| communication.said.clone());
            if let Some(said) = said {
                self.counters.repeated += 1;
                self.send(from, said);
            }
            return;
        }
        let Some(listener) = self.listeners.get_mut(&req.service) else {
            let message = CmMessage::SidrReq(req.clone());
            return refusal(&message, mad).into_iter().for_each(|rep| self.send(from, rep));
        };
        if !self.limits.allow(now, from) {
            self.counters.limited += 1;
            return;
        }
        if listener.pending >= listener.backlog || self.communications.len() >= MAX_COMMUNICATIONS {
            self.counters.overrun += 1;
            return;
        }
        listener.pending += 1;
        let Ok(local) = self.allocate() else { return };
        let ids = Ids { local, remote: req.request };
        let mut new = Communication::new(from, ids, CommunicationState::SidrReqReceived, mad.transaction());
        new.pending = Some(req.service);
        self.asked.insert((from, req.request, true), local);
        self.communications.insert(local, new);
        self.events.push_back(Event::SidrRequest { id: CommId(local), from, req: req.clone() });
    }

    fn take_rep(&mut self, now: Nanos, from: IpAddr, rep: &Rep, message: &CmMessage, mad: &Mad) {
        let known = self.communications.get(&rep.ids.remote).filter(|c| c.peer == from);
        if known.is_none_or(|c| c.state == CommunicationState::Over) {
            self.counters.dropped += 1;
            return refusal(message, mad).into_iter().for_each(|rej| self.send(from, rej));
        }
        let asked = known.is_some_and(|c| c.state == CommunicationState::ReqSent);
        let stale = self.standing_with(from, rep.qpn).filter(|_| asked);
        self.about(from, rep.ids, |this, communication| match communication.state {
            CommunicationState::ReqSent if stale.is_some() => {
                let (id, reason) = (communication.id(), reason::STALE_CONNECTION);
                communication.ids.remote = rep.ids.local;
                this.refuse(communication, About::Rep, reason, Vec::new());
                this.tell(communication, Event::Rejected { id, reason, private: Vec::new() });
            }
            CommunicationState::ReqSent => {
                communication.rest(CommunicationState::RepReceived);
                communication.ids.remote = rep.ids.local;
                communication.remote_qpn = rep.qpn;
                this.queue_pairs.insert((from, rep.qpn), communication.ids.local);
                this.tell(communication, Event::Reply { id: communication.id(), rep: rep.clone() });
            }
            CommunicationState::RepReceived => {
                this.counters.duplicates += 1;
                let ids = communication.ids;
                let mra = Mra { ids, about: About::Rep, service_timeout: SERVICE_TIMEOUT };
                this.send(from, mra.emit(communication.transaction));
            }
            CommunicationState::Established => {
                this.counters.duplicates += 1;
                this.counters.repeated += 1;
                this.send(from, communication.ids.emit(MessageKind::Rtu, communication.transaction));
            }
            _ => this.counters.duplicates += 1,
        });
        stale.into_iter().for_each(|old| self.end_stale(now, old));
    }

    fn take_rej(&mut self, now: Nanos, from: IpAddr, rej: &Rej) {
        self.about(from, rej.ids, |this, communication| match communication.state {
            CommunicationState::ReqSent if communication.may_ask_again(rej.reason) => {
                communication.ask_again(now)
            }
            CommunicationState::ReqSent | CommunicationState::RepReceived | CommunicationState::RepSent => {
                communication.rest(CommunicationState::Over);
                let Rej { reason, private, .. } = rej.clone();
                this.tell(communication, Event::Rejected { id: communication.id(), reason, private });
            }
            CommunicationState::DreqSent => {
                this.tell(communication, Event::Disconnected { id: communication.id(), silent: false });
                communication.rest(CommunicationState::Over);
            }
            _ => this.counters.dropped += 1,
        });
    }

    fn take_dreq(&mut self, now: Nanos, from: IpAddr, ids: Ids, message: &CmMessage, mad: &Mad) {
        // Answer every DREQ, known or not: the peer wants the connection to end. The user adds
        // nothing to a DREP, so send it at once.
        let known = self.communications.get(&ids.remote).is_some_and(|c| c.peer == from);
        if !known {
            self.counters.dropped += 1;
        }
        refusal(message, mad).into_iter().for_each(|drep| self.send(from, drep));
        self.keep_drep(now, from, ids.swapped(), mad.transaction(), known);
        if !known {
            return;
        }
        self.about(from, ids, |this, communication| match communication.state {
            // Also before the user has seen the REP: the accepting process may be gone by then.
            CommunicationState::RepReceived
            | CommunicationState::Established
            | CommunicationState::RepSent
            | CommunicationState::DreqSent => {
                this.tell(communication, Event::Disconnected { id: communication.id(), silent: false });
                communication.wait_out(now);
            }
            _ => this.counters.duplicates += 1,
        });
    }
}
