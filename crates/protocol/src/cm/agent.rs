//! One side of the connection manager (CM).

mod ends;
mod incoming;
mod source_limits;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;

use self::source_limits::SourceLimits;
use super::communication::{
    Accept, CommId, Communication, CommunicationState, Connect, MAX_CM_RETRIES, RESPONSE_TIMEOUT,
};
use super::event::Event;
use super::mad::{Mad, MessageKind};
use super::message::{About, Ids, Rej, Rep, Req, SidrRep, SidrReq, private_len};
use super::{reason, sidr_status};
use crate::rng::Rng;
use crate::timing::Nanos;
use crate::wire::{DEFAULT_PKEY, Qpn};

/// Maximum number of communications, including ended ones that are still kept.
const MAX_COMMUNICATIONS: usize = 16_384;
/// Maximum number of connections in TIMEWAIT. Beyond it, the one that would leave first is dropped
/// early.
const MAX_TIMEWAIT: usize = 4_096;
/// Service timeout that our MRA announces while the user decides: 8.6 s at a time.
const SERVICE_TIMEOUT: u8 = 21;
/// How long a SIDR REP is kept for retransmission.
const KEEP_SIDR_ANSWER: Nanos = 4096 << RESPONSE_TIMEOUT;

/// Configuration of an agent.
#[derive(Clone, Copy, Debug)]
pub struct CmConfig {
    /// The high byte of all communication IDs that it issues.
    pub slot: u8,
    /// The GUID of the adapter.
    pub ca_guid: u64,
    /// Seeds the IDs, so that stale messages do not match by accident.
    pub seed: u64,
}

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// The communication does not exist, or has ended.
    #[error("there is no such communication, or it is over")]
    Unknown,
    /// Wrong state.
    #[error("this cannot be done now: the communication is in another state")]
    WrongState,
    /// The private data is longer than the message has room for.
    #[error("{given} bytes of private data do not fit the {room} that this message has room for")]
    #[allow(missing_docs)]
    PrivateData { given: usize, room: usize },
    /// The service already has a listener.
    #[error("this service is listened to already")]
    InUse,
    /// There are too many.
    #[error("there are {MAX_COMMUNICATIONS} communications already")]
    TooMany,
}

/// Message counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct AgentCounters {
    pub sent: u64,
    pub received: u64,
    /// Of those sent: retransmissions.
    pub repeated: u64,
    /// Of those received: duplicates.
    pub duplicates: u64,
    /// Malformed, from the wrong peer, or for no known communication.
    pub dropped: u64,
    /// Requests dropped because the listener's backlog is full.
    pub overrun: u64,
    /// Requests dropped because their source sent too many.
    pub limited: u64,
}

#[derive(Debug)]
struct CmListener {
    backlog: usize,
    pending: usize,
}

/// One side of the connection manager.
///
/// The user calls `listen`, `connect`, `accept`, `establish`, `reject`, `disconnect` and `release`.
/// The network side calls `handle_message` and `handle_timeout`. After each call, poll
/// [`poll_event`](Self::poll_event) and [`poll_transmit`](Self::poll_transmit) until they are
/// empty, then [`poll_timeout`](Self::poll_timeout).
#[derive(Debug)]
pub struct Agent {
    config: CmConfig,
    rng: Rng,
    limits: SourceLimits,
    communications: HashMap<u32, Communication>,
    /// Communications that the peer started, by its communication ID; the flag separates
    /// connections from SIDR.
    asked: HashMap<(IpAddr, u32, bool), u32>,
    /// Connections by the peer's queue pair.
    queue_pairs: HashMap<(IpAddr, Qpn), u32>,
    listeners: HashMap<u64, CmListener>,
    timers: BTreeSet<(Nanos, u32)>,
    timewait: usize,
    /// DREPs sent a short while ago: time, destination, IDs, transaction ID.
    kept_dreps: VecDeque<(Nanos, IpAddr, Ids, u64)>,
    out: VecDeque<(IpAddr, Mad)>,
    events: VecDeque<Event>,
    counters: AgentCounters,
}

impl Agent {
    /// An agent without communications.
    pub fn new(config: CmConfig) -> Self {
        Self {
            config,
            rng: Rng::new(config.seed),
            limits: SourceLimits::default(),
            communications: HashMap::new(),
            asked: HashMap::new(),
            queue_pairs: HashMap::new(),
            listeners: HashMap::new(),
            timers: BTreeSet::new(),
            timewait: 0,
            kept_dreps: VecDeque::new(),
            out: VecDeque::new(),
            events: VecDeque::new(),
            counters: AgentCounters::default(),
        }
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The next message to send, and its destination.
    pub fn poll_transmit(&mut self) -> Option<(IpAddr, Mad)> {
        self.out.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) must be called.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The counters so far.
    pub fn counters(&self) -> AgentCounters {
        self.counters
    }

    /// Number of known communications, including ended ones that are still kept.
    pub fn len(&self) -> usize {
        self.communications.len()
    }

    /// Whether there are no communications.
    pub fn is_empty(&self) -> bool {
        self.communications.is_empty()
    }

    /// Listens for a service; at most `backlog` requests wait for the user.
    ///
    /// # Errors
    /// The service already has a listener.
    pub fn listen(&mut self, service: u64, backlog: usize) -> Result<(), CmError> {
        if self.listeners.contains_key(&service) {
            return Err(CmError::InUse);
        }
        self.listeners.insert(service, CmListener { backlog, pending: 0 });
        Ok(())
    }

    /// Stops listening for a service. Requests that wait for the user stay.
    pub fn unlisten(&mut self, service: u64) {
        self.listeners.remove(&service);
    }

    /// Whether a service has a listener.
    pub fn listens(&self, service: u64) -> bool {
        self.listeners.contains_key(&service)
    }

    /// Requests a connection: sends a REQ.
    ///
    /// # Errors
    /// Too much private data, or too many communications.
    pub fn connect(&mut self, now: Nanos, connect: Connect) -> Result<CommId, CmError> {
        check(&connect.private, private_len::REQ)?;
        let id = self.allocate()?;
        let req = Req {
            local_id: id,
            service: connect.service,
            ca_guid: self.config.ca_guid,
            qpn: connect.qpn,
            transport: connect.transport,
            starting_psn: connect.starting_psn,
            responder_resources: connect.responder_resources,
            initiator_depth: connect.initiator_depth,
            remote_response_timeout: RESPONSE_TIMEOUT,
            local_response_timeout: RESPONSE_TIMEOUT,
            max_cm_retries: MAX_CM_RETRIES,
            flow_control: connect.flow_control,
            retry_count: connect.retry_count,
            rnr_retry_count: connect.rnr_retry_count,
            srq: connect.srq,
            mtu: connect.mtu,
            pkey: DEFAULT_PKEY,
            local_gid: connect.local_gid,
            remote_gid: connect.remote_gid,
            flow_label: 0,
            packet_rate: PACKET_RATE,
            traffic_class: connect.traffic_class,
            hop_limit: HOP_LIMIT,
            service_level: 0,
            local_ack_timeout: connect.local_ack_timeout,
            private: connect.private,
        };
        let transaction = self.rng.next();
        let mut new = Communication::new(
            connect.to,
            Ids { local: id, remote: 0 },
            CommunicationState::ReqSent,
            transaction,
        );
        new.local_ack_timeout = connect.local_ack_timeout;
        self.ask(now, new, req.emit(transaction));
        Ok(CommId(id))
    }

    /// Requests the queue pair of a datagram service: sends a SIDR REQ.
    ///
    /// # Errors
    /// Too much private data, or too many communications.
    pub fn ask_service(
        &mut self,
        now: Nanos,
        to: IpAddr,
        service: u64,
        private: Vec<u8>,
    ) -> Result<CommId, CmError> {
        check(&private, private_len::SIDR_REQ)?;
        let id = self.allocate()?;
        let transaction = self.rng.next();
        let new = Communication::new(
            to,
            Ids { local: id, remote: 0 },
            CommunicationState::SidrReqSent,
            transaction,
        );
        self.ask(now, new, SidrReq::new(id, service, private).emit(transaction));
        Ok(CommId(id))
    }

    fn ask(&mut self, now: Nanos, mut new: Communication, mad: Mad) {
        new.expect_answer(now, mad.clone());
        self.send(new.peer, mad);
        let id = new.ids.local;
        self.communications.insert(id, new);
        self.arm(id);
    }

    /// Accepts a connection request: sends a REP.
    ///
    /// # Errors
    /// Wrong state, or too much private data.
    pub fn accept(&mut self, now: Nanos, id: CommId, accept: Accept) -> Result<(), CmError> {
        check(&accept.private, private_len::REP)?;
        let ca_guid = self.config.ca_guid;
        self.change(id, |this, communication| {
            if communication.state != CommunicationState::ReqReceived {
                return Err(CmError::WrongState);
            }
            let rep = Rep {
                ids: communication.ids,
                qpn: accept.qpn,
                starting_psn: accept.starting_psn,
                responder_resources: accept.responder_resources,
                initiator_depth: accept.initiator_depth,
                target_ack_delay: 0,
                flow_control: accept.flow_control,
                rnr_retry_count: accept.rnr_retry_count,
                srq: accept.srq,
                ca_guid,
                private: accept.private,
            };
            this.answered(communication);
            communication.state = CommunicationState::RepSent;
            let mad = rep.emit(communication.transaction);
            communication.expect_answer(now, mad.clone());
            this.send(communication.peer, mad);
            Ok(())
        })
    }

    /// Answers a SIDR REQ with the service's queue pair, or the reason why there is none.
    ///
    /// # Errors
    /// Wrong state, or too much private data.
    pub fn answer_service(
        &mut self,
        now: Nanos,
        id: CommId,
        status: u8,
        qpn: Qpn,
        qkey: u32,
        private: Vec<u8>,
    ) -> Result<(), CmError> {
        check(&private, private_len::SIDR_REP)?;
        self.change(id, |this, communication| {
            if communication.state != CommunicationState::SidrReqReceived {
                return Err(CmError::WrongState);
            }
            let service = communication.pending.unwrap_or(0);
            this.answered(communication);
            let rep = SidrRep { request: communication.ids.remote, status, qpn, service, qkey, private };
            let mad = rep.emit(communication.transaction);
            communication.rest(CommunicationState::SidrRepSent);
            communication.said = Some(mad.clone());
            communication.due = Some(now + KEEP_SIDR_ANSWER);
            this.send(communication.peer, mad);
            Ok(())
        })
    }

    /// The queue pair is connected: sends an RTU to the accepting side.
    ///
    /// # Errors
    /// Wrong state.
    pub fn establish(&mut self, id: CommId) -> Result<(), CmError> {
        self.change(id, |this, communication| {
            if communication.state != CommunicationState::RepReceived {
                return Err(CmError::WrongState);
            }
            communication.rest(CommunicationState::Established);
            this.send(
                communication.peer,
                communication.ids.emit(MessageKind::Rtu, communication.transaction),
            );
            Ok(())
        })
    }

    /// A packet arrived on the connection before the RTU: it counts as established.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn note_traffic(&mut self, id: CommId) -> Result<(), CmError> {
        self.change(id, |this, communication| {
            if communication.state == CommunicationState::RepSent {
                communication.rest(CommunicationState::Established);
                this.tell(communication, Event::Established { id });
            }
            Ok(())
        })
    }

    /// Rejects a connection request, or a REP to our own request.
    ///
    /// # Errors
    /// Wrong state, or too much private data.
    pub fn reject(&mut self, id: CommId, reason: u16, private: Vec<u8>) -> Result<(), CmError> {
        check(&private, private_len::REJ)?;
        self.change(id, |this, communication| {
            let about = match communication.state {
                CommunicationState::ReqReceived => About::Req,
                CommunicationState::RepReceived => About::Rep,
                _ => return Err(CmError::WrongState),
            };
            this.answered(communication);
            this.refuse(communication, about, reason, private);
            Ok(())
        })
    }

    fn refuse(&mut self, communication: &mut Communication, about: About, reason: u16, private: Vec<u8>) {
        let rej = Rej { ids: communication.ids, about, reason, private };
        let mad = rej.emit(communication.transaction);
        communication.rest(CommunicationState::Over);
        // If the REJ is lost, the peer's retransmission triggers it again.
        communication.said = Some(mad.clone());
        self.send(communication.peer, mad);
    }

    /// The user drops its handle and gets no more events. An established connection is ended, a
    /// pending request rejected.
    pub fn release(&mut self, now: Nanos, id: CommId) {
        let transaction = self.rng.next();
        let _ = self.change(id, |this, communication| {
            let service = communication.pending.unwrap_or(0);
            this.answered(communication);
            communication.released = true;
            match communication.state {
                CommunicationState::ReqReceived => {
                    this.refuse(communication, About::Req, reason::CONSUMER, Vec::new())
                }
                CommunicationState::RepReceived => {
                    this.refuse(communication, About::Rep, reason::CONSUMER, Vec::new())
                }
                CommunicationState::SidrReqReceived => {
                    let rep = SidrRep {
                        request: communication.ids.remote,
                        status: sidr_status::REJECTED,
                        qpn: Qpn::new(0),
                        service,
                        qkey: 0,
                        private: Vec::new(),
                    };
                    communication.rest(CommunicationState::Over);
                    this.send(communication.peer, rep.emit(communication.transaction));
                }
                CommunicationState::Established | CommunicationState::RepSent => {
                    this.hang_up(now, communication, transaction)
                }
                // A late answer is rejected: its communication no longer exists.
                CommunicationState::ReqSent | CommunicationState::SidrReqSent => {
                    communication.rest(CommunicationState::Over)
                }
                CommunicationState::DreqSent
                | CommunicationState::TimeWait
                | CommunicationState::SidrRepSent
                | CommunicationState::Over => {}
            }
            Ok(())
        });
        self.events.retain(|event| event.id() != id);
    }

    /// The request was refused. As far as can be known, the host is up and no process listens.
    pub fn handle_refused(&mut self, id: CommId) {
        let _ = self.change(id, |this, communication| {
            match communication.state {
                CommunicationState::ReqSent => {
                    communication.rest(CommunicationState::Over);
                    let reason = reason::INVALID_SERVICE_ID;
                    this.tell(communication, Event::Rejected { id, reason, private: Vec::new() });
                }
                CommunicationState::SidrReqSent => {
                    communication.rest(CommunicationState::Over);
                    this.tell(communication, Event::Unreachable { id });
                }
                _ => {}
            }
            Ok(())
        });
    }

    /// Communications that wait for the first answer from `peer`.
    pub fn waiting_for(&self, peer: IpAddr) -> Vec<CommId> {
        let waits = |c: &&Communication| {
            c.peer == peer && matches!(c.state, CommunicationState::ReqSent | CommunicationState::SidrReqSent)
        };
        self.communications.values().filter(waits).map(Communication::id).collect()
    }

    /// Handles the deadline that [`poll_timeout`](Self::poll_timeout) returned.
    pub fn handle_timeout(&mut self, now: Nanos) {
        while let Some(&(at, id)) = self.timers.first()
            && at <= now
        {
            self.timers.remove(&(at, id));
            let _ = self.change(CommId(id), |this, communication| {
                communication.due = None;
                this.expire(now, communication);
                Ok(())
            });
        }
    }

    fn expire(&mut self, now: Nanos, communication: &mut Communication) {
        let id = communication.id();
        match communication.state {
            CommunicationState::TimeWait => {
                self.tell(communication, Event::TimewaitExit { id });
                communication.rest(CommunicationState::Over);
            }
            CommunicationState::SidrRepSent => {
                // Keep the last message: the peer may have missed it and may retransmit its request
                // later than this.
                (communication.state, communication.due) = (CommunicationState::Over, None);
            }
            CommunicationState::ReqSent
            | CommunicationState::RepSent
            | CommunicationState::DreqSent
            | CommunicationState::SidrReqSent => {
                if communication.retry(now)
                    && let Some(mad) = communication.said.clone()
                {
                    self.counters.repeated += 1;
                    return self.send(communication.peer, mad);
                }
                match communication.state {
                    CommunicationState::DreqSent => {
                        self.tell(communication, Event::Disconnected { id, silent: true });
                        communication.wait_out(now);
                    }
                    CommunicationState::RepSent => {
                        self.tell(communication, Event::Unreachable { id });
                        self.refuse(communication, About::Other, reason::TIMEOUT, Vec::new());
                    }
                    _ => {
                        self.tell(communication, Event::Unreachable { id });
                        communication.rest(CommunicationState::Over);
                    }
                }
            }
            CommunicationState::ReqReceived
            | CommunicationState::RepReceived
            | CommunicationState::Established
            | CommunicationState::Over
            | CommunicationState::SidrReqReceived => {}
        }
    }

    /// Applies `what` to the communication that a message from `from` names, if it exists.
    fn about(&mut self, from: IpAddr, ids: Ids, what: impl FnOnce(&mut Self, &mut Communication)) {
        let known = self.communications.get(&ids.remote).is_some_and(|communication| {
            // The peer's communication ID is unknown before its first answer.
            let named =
                ids.local == communication.ids.remote || communication.ids.remote == 0 || ids.local == 0;
            communication.peer == from && named
        });
        if !known {
            self.counters.dropped += 1;
            return;
        }
        let _ = self.change(CommId(ids.remote), |this, communication| {
            what(this, communication);
            Ok(())
        });
    }

    /// Takes the communication out, changes it, and puts it back with its timer, unless it is
    /// over and the user has released it.
    fn change(
        &mut self,
        id: CommId,
        what: impl FnOnce(&mut Self, &mut Communication) -> Result<(), CmError>,
    ) -> Result<(), CmError> {
        let Some(mut communication) = self.communications.remove(&id.0) else {
            return Err(CmError::Unknown);
        };
        let (due, waited) = (communication.due, communication.state == CommunicationState::TimeWait);
        let result = what(self, &mut communication);
        match (waited, communication.state == CommunicationState::TimeWait) {
            (false, true) => self.timewait += 1,
            (true, false) => self.timewait -= 1,
            _ => {}
        }
        if let Some(at) = due {
            self.timers.remove(&(at, id.0));
        }
        if communication.state == CommunicationState::Over && communication.released {
            self.forget(&communication);
            return result;
        }
        self.communications.insert(id.0, communication);
        self.arm(id.0);
        if self.timewait > MAX_TIMEWAIT {
            self.shorten_timewait();
        }
        result
    }

    /// Drops the connection that would leave TIMEWAIT first.
    fn shorten_timewait(&mut self) {
        let oldest = self.timers.iter().find(|(_, id)| {
            self.communications
                .get(id)
                .is_some_and(|communication| communication.state == CommunicationState::TimeWait)
        });
        if let Some(&(_, id)) = oldest {
            let _ = self.change(CommId(id), |this, communication| {
                this.tell(communication, Event::TimewaitExit { id: CommId(id) });
                communication.rest(CommunicationState::Over);
                Ok(())
            });
        }
    }

    fn forget(&mut self, communication: &Communication) {
        let Ids { local, remote } = communication.ids;
        for service in [false, true] {
            if self.asked.get(&(communication.peer, remote, service)) == Some(&local) {
                self.asked.remove(&(communication.peer, remote, service));
            }
        }
        let queue_pair = (communication.peer, communication.remote_qpn);
        if self.queue_pairs.get(&queue_pair) == Some(&local) {
            self.queue_pairs.remove(&queue_pair);
        }
    }

    /// The user has answered: frees a backlog slot of the listener.
    fn answered(&mut self, communication: &mut Communication) {
        if let Some(listener) = communication.pending.take().and_then(|s| self.listeners.get_mut(&s)) {
            listener.pending = listener.pending.saturating_sub(1);
        }
    }

    fn arm(&mut self, id: u32) {
        if let Some(at) = self.communications.get(&id).and_then(|communication| communication.due) {
            self.timers.insert((at, id));
        }
    }

    fn tell(&mut self, communication: &Communication, event: Event) {
        if !communication.released {
            self.events.push_back(event);
        }
    }

    fn send(&mut self, to: IpAddr, mad: Mad) {
        self.counters.sent += 1;
        self.out.push_back((to, mad));
    }

    fn allocate(&mut self) -> Result<u32, CmError> {
        if self.communications.len() >= MAX_COMMUNICATIONS {
            return Err(CmError::TooMany);
        }
        // Random: a message that names a communication must have seen its ID.
        loop {
            let number = u32::try_from(self.rng.below(1 << 24)).unwrap_or(0);
            let id = u32::from(self.config.slot) << 24 | number;
            if number != 0 && !self.communications.contains_key(&id) {
                return Ok(id);
            }
        }
    }
}

/// The standard's code for 400 Gb/s: no throttling.
const PACKET_RATE: u8 = 18;
/// More than one hop, so that LIDs are ignored.
const HOP_LIMIT: u8 = 64;

fn check(private: &[u8], room: usize) -> Result<(), CmError> {
    let given = private.len();
    if given > room { Err(CmError::PrivateData { given, room }) } else { Ok(()) }
}
