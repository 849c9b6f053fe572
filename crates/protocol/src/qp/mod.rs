//! One queue pair, without IO: a reliable or unreliable connection, or datagrams.
//!
//! Methods come in four kinds:
//! - getters: [`Qp::state`], [`Qp::attr`], [`Qp::outstanding`], [`Qp::counters`];
//! - inputs from the network and the device: [`Qp::handle_packet`], [`Qp::handle_timeout`],
//!   [`Qp::handle_gather_fault`];
//! - calls of the user: [`Qp::modify`], [`Qp::post`], [`Qp::post_to`];
//! - outputs: [`Qp::poll_transmit`], [`Qp::poll_completion`], [`Qp::poll_event`],
//!   [`Qp::poll_timeout`].
//!
//! After any call of the second or third kind, poll in this order: completions and events until
//! none are left, packets until none may leave, then the timeout. Unreliable services complete
//! requests as packets leave, so poll completions after the packets too. Memory is reached only
//! through [`Host`], and only inside `handle_packet`.

mod attr;
mod completion;
mod config;
mod congestion;
mod datagram;
mod host;
mod linger;
mod pace;
mod reassembly;
mod recovery;
mod request;
mod requester;
mod responder;
mod rtt;
mod scoreboard;
mod selective;
mod state;
mod transmit;
mod uc_receiver;
mod unreliable;
mod wqe;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

pub use attr::{Access, IpOptions, Mtu, QpAttr};
pub use completion::{Completion, DatagramSource, Nak, QpEvent, Status, WorkKind};
pub use config::{QpConfig, QpCounters};
pub use datagram::GRH_LEN;
pub use host::{Host, LocalFault, Receive};
pub use reassembly::HeldPacket;
pub use request::{Datagram, LocalWork, MAX_MESSAGE, Operation, PostError, Remote, WorkRequest};
pub use state::{AttrMask, QpState, Service, TransitionError, check_transition};
pub use transmit::{Payload, Transmit};

use crate::timing::Nanos;
use crate::wire::{Header, Opcode, Psn, Reth};
use config::Params;
use datagram::take_datagram;
use requester::{Out, Requester, ResponseOutcome};
use responder::{RequestOutcome, Responder};

use unreliable::Unreliable;

/// Outcome of a received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// It was for this queue pair, and its state allows it. It may still be a duplicate, refused or
    /// dropped.
    Taken,
    /// The queue pair's state does not allow such a packet.
    WrongState,
    /// A response without an outstanding request.
    Unsolicited,
    /// The packet belongs to another transport service.
    WrongService,
}

/// A queue pair. The module documentation gives the call order.
#[derive(Debug)]
pub struct Qp {
    config: QpConfig,
    attr: QpAttr,
    params: Params,
    requester: Requester,
    responder: Responder,
    /// Replaces requester and responder for unreliable services.
    unreliable: Option<Box<Unreliable>>,
    completions: VecDeque<Completion>,
    events: VecDeque<QpEvent>,
    counters: QpCounters,
    established: bool,
    drain_reported: bool,
    /// The peer is known to retransmit selectively.
    selective: bool,
    notifier: congestion::Notifier,
}

impl Qp {
    /// A queue pair in RESET.
    pub fn new(config: QpConfig) -> Self {
        let mut attr = QpAttr::default();
        if config.service == Service::Ud {
            attr.path_mtu = config.port_mtu;
            attr.remote = IpAddr::V4(Ipv4Addr::UNSPECIFIED); // it has no one peer
        }
        let unreliable = (!config.service.is_reliable())
            .then(|| Box::new(Unreliable::new(config.service, config.send_depth)));
        Self {
            config,
            params: Params::of(&config, &attr),
            attr,
            requester: Requester::new(config.send_depth),
            responder: Responder::new(),
            unreliable,
            completions: VecDeque::new(),
            events: VecDeque::new(),
            counters: QpCounters::default(),
            established: false,
            drain_reported: false,
            selective: false,
            notifier: congestion::Notifier::default(),
        }
    }

    /// Its state.
    pub const fn state(&self) -> QpState {
        self.attr.state
    }

    /// Its transport service.
    pub const fn service(&self) -> Service {
        self.config.service
    }

    /// Destination of the packet polled last. (By reference: reading an address copied just before
    /// causes a store-forwarding stall.)
    #[inline]
    pub fn destination(&self) -> &IpAddr {
        let datagram = self.unreliable.as_ref().and_then(|unreliable| unreliable.sender.destination());
        datagram.unwrap_or(&self.attr.remote)
    }

    /// IP options (traffic class, hop limit) of the packet polled last.
    pub fn ip_options(&self) -> IpOptions {
        let datagram = self.unreliable.as_ref().and_then(|unreliable| unreliable.sender.ip_options());
        datagram.unwrap_or(self.attr.ip_options)
    }

    /// Its attributes.
    pub const fn attr(&self) -> &QpAttr {
        &self.attr
    }

    /// Its counters.
    pub const fn counters(&self) -> &QpCounters {
        &self.counters
    }

    /// Bytes that may occupy the receiver's socket buffer because of it.
    pub fn outstanding(&self) -> u64 {
        match &self.unreliable {
            None => self.requester.outstanding(),
            Some(unreliable) => unreliable.sender.outstanding(),
        }
    }

    /// Limits ACK requests to one in flight. Use it where an ACK that frees a few packets costs
    /// more than it gains, as where both ends share the CPUs. Otherwise each ACK releases a few
    /// packets, the last of which requests an ACK again.
    pub fn ask_rarely(&mut self, rarely: bool) {
        self.requester.ask_rarely(rarely);
    }

    /// Sends short WRITEs as WRITEs of one packet each. Use it where packets of one length are sent
    /// together: the first packet of a longer message is longer than the next ones.
    pub fn split_short_writes(&mut self, split: bool) {
        self.requester.split_short_writes(split);
    }

    /// Whether the last [`Self::poll_transmit`] held a packet back only for lack of room.
    pub fn is_path_limited(&self) -> bool {
        // A queue pair that failed meanwhile waits for nothing.
        matches!(self.attr.state, QpState::Rts | QpState::Sqd)
            && match &self.unreliable {
                None => self.requester.is_path_limited(),
                Some(unreliable) => unreliable.sender.is_path_limited(),
            }
    }

    /// Whether a receive is in use for a message that is still arriving.
    pub fn has_open_receive(&self) -> bool {
        match &self.unreliable {
            None => self.responder.has_open_receive(),
            Some(unreliable) => unreliable.receiver.has_open_receive(),
        }
    }

    /// All send requests with a smaller serial number are complete.
    pub fn oldest_serial(&self) -> u64 {
        match &self.unreliable {
            None => self.requester.oldest_serial(),
            Some(unreliable) => unreliable.sender.oldest_serial(),
        }
    }

    /// Changes attributes and state.
    ///
    /// # Errors
    /// The transition does not exist, attributes are missing or not allowed, or a value is out of
    /// range.
    pub fn modify(&mut self, new: &QpAttr) -> Result<(), TransitionError> {
        let from = self.attr.state;
        let to = if new.mask.contains(AttrMask::STATE) { new.state } else { from };
        if new.mask.contains(AttrMask::CUR_STATE) && new.cur_state != from {
            return Err(TransitionError::CurrentState { said: new.cur_state, actual: from });
        }
        check_transition(self.config.service, from, to, new.mask)?;
        new.check_values()?;
        if to == QpState::Reset {
            let counters = self.counters;
            *self = Self { counters, ..Self::new(self.config) };
            return Ok(());
        }
        self.attr.merge(new);
        self.attr.state = to;
        self.params = Params::of(&self.config, &self.attr);
        match (from, to) {
            (QpState::Init, QpState::Rtr) => match &mut self.unreliable {
                None => {
                    self.responder.connect(new.rq_psn);
                    if self.selective {
                        self.responder.keep_early();
                    }
                }
                Some(unreliable) => unreliable.receiver.connect(new.rq_psn),
            },
            (QpState::Rtr, QpState::Rts) => match &mut self.unreliable {
                None => {
                    self.requester.connect(new.sq_psn, &self.params);
                    if self.selective {
                        self.requester.retransmit_selectively(0);
                    }
                }
                Some(unreliable) => unreliable.sender.connect(new.sq_psn),
            },
            (QpState::Rts, QpState::Sqd) => {
                self.drain_reported = !self.attr.en_sqd_async_notify;
                self.report_drained();
            }
            (_, QpState::Error) => self.enter_error(None),
            _ => {}
        }
        Ok(())
    }

    /// Posts a send request and returns its serial number, which [`Payload::Request`] and [`Host`]
    /// use.
    ///
    /// # Errors
    /// See [`PostError`]. In the error state a request is accepted and flushed at once.
    pub fn post(&mut self, request: WorkRequest) -> Result<u64, PostError> {
        self.take(request, None)
    }

    /// Posts a send request to a datagram queue pair; otherwise as [`Self::post`].
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_to(&mut self, request: WorkRequest, to: Datagram) -> Result<u64, PostError> {
        self.take(request, Some(to))
    }

    /// Whether a request, with or without an address, would be accepted if there were room.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn check_post(&self, request: &WorkRequest, has_address: bool) -> Result<(), PostError> {
        let service = self.config.service;
        if (service == Service::Ud) != has_address {
            return Err(PostError::Destination(service));
        }
        match self.attr.state {
            QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Error => {}
            state => return Err(PostError::State(state)),
        }
        if request.len > MAX_MESSAGE {
            return Err(PostError::TooLong(u64::from(request.len)));
        }
        if request.op.moves_word() && request.len != 8 {
            return Err(PostError::AtomicLength(request.len));
        }
        if request.op.fetches() && self.params.max_rd_atomic == 0 {
            return Err(PostError::NoReads);
        }
        if !request.op.is_offered(service) {
            return Err(PostError::NotOffered { service, operation: request.op.kind() });
        }
        if service == Service::Ud && request.len > self.params.mtu {
            return Err(PostError::DatagramTooLong { given: request.len, max: self.params.mtu });
        }
        Ok(())
    }

    /// Free slots of the send queue.
    pub fn send_room(&self) -> usize {
        let posted = match &self.unreliable {
            None => self.requester.posted(),
            Some(unreliable) => unreliable.sender.posted(),
        };
        self.config.send_depth.saturating_sub(posted)
    }

    fn take(&mut self, mut request: WorkRequest, to: Option<Datagram>) -> Result<u64, PostError> {
        self.check_post(&request, to.is_some())?;
        request.signaled |= self.config.signal_all;
        let serial = match &mut self.unreliable {
            None => self.requester.post(request)?,
            Some(unreliable) => unreliable.sender.post(request, to)?,
        };
        match self.attr.state {
            QpState::Error => self.enter_error(None),
            QpState::Sqe => self.enter_send_error(None),
            _ => {}
        }
        Ok(serial)
    }

    /// Handles a packet for this queue pair; its ICRC has been checked.
    pub fn handle_packet(
        &mut self,
        now: Nanos,
        header: &Header,
        payload_len: usize,
        host: &mut dyn Host,
    ) -> Handled {
        self.handle_run(now, (header, 1), payload_len, host)
    }

    /// As [`handle_packet`](Self::handle_packet), for a run of `packets` that were merged. They are
    /// full packets from the middle of a message of a reliable connection. Their PSNs are
    /// consecutive from the header's on, and their payloads are concatenated.
    pub fn handle_run(
        &mut self,
        now: Nanos,
        (header, packets): (&Header, u32),
        payload_len: usize,
        host: &mut dyn Host,
    ) -> Handled {
        if !header.is_for(self.config.service) {
            return Handled::WrongService;
        }
        if packets != 1 && !self.is_run(header, packets, payload_len) {
            return Handled::Unsolicited;
        }
        let run = (header, u64::from(packets));
        if self.unreliable.is_some() {
            return self.handle_unreliable(header, payload_len, host);
        }
        let params = self.params;
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        match self.attr.state {
            QpState::Rtr | QpState::Rts | QpState::Sqd => {}
            QpState::Error if !header.opcode.is_response() => {
                self.responder.repeat_refusal(header);
                return Handled::WrongState;
            }
            _ => return Handled::WrongState,
        }
        if header.opcode.is_response() {
            if self.attr.state == QpState::Rtr {
                return Handled::WrongState;
            }
            let answer = self.requester.handle_answer(now, run, payload_len, &params, host, &mut out);
            self.report_drained();
            return self.settle(answer);
        }
        self.note_established();
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        if let RequestOutcome::Fatal(event) =
            self.responder.handle_request(run, payload_len, &params, host, &mut out)
        {
            self.stop(event);
        }
        Handled::Taken
    }

    /// How many packets at the start of a run are duplicates, if others are new. A retransmission
    /// may begin before the expected PSN and end behind it. The caller must skip the duplicates, or
    /// the whole run counts as one.
    #[inline]
    pub fn taken_of_run(&self, header: &Header, packets: u32, payload_len: usize) -> u32 {
        let is_one = packets < 2 || header.opcode.is_response() || self.unreliable.is_some();
        if is_one || !self.is_run(header, packets, payload_len) {
            return 0;
        }
        self.responder.taken_of(header.psn, packets)
    }

    /// Whether so many packets can form a run.
    fn is_run(&self, header: &Header, packets: u32, payload_len: usize) -> bool {
        let middle =
            matches!(header.opcode, Opcode::SendMiddle | Opcode::WriteMiddle | Opcode::ReadResponseMiddle);
        let want = u64::from(packets) * u64::from(self.params.mtu);
        middle && packets > 0 && payload_len as u64 == want && !header.ack_req
    }

    fn handle_unreliable(&mut self, header: &Header, payload_len: usize, host: &mut dyn Host) -> Handled {
        if matches!(self.attr.state, QpState::Reset | QpState::Init | QpState::Error) {
            return Handled::WrongState;
        }
        let (params, is_datagram) = (self.params, self.config.service == Service::Ud);
        if !is_datagram {
            self.note_established();
        }
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        let taken = match &mut self.unreliable {
            Some(unreliable) if !is_datagram => {
                unreliable.receiver.handle_packet(header, payload_len, &params, host, &mut out)
            }
            _ => take_datagram(header, payload_len, &params, host, &mut out),
        };
        if taken.is_err() {
            self.enter_error(None);
        }
        Handled::Taken
    }

    fn note_established(&mut self) {
        if self.attr.state == QpState::Rtr && !self.established {
            self.established = true;
            self.events.push_back(QpEvent::CommunicationEstablished);
        }
    }

    /// Handles the deadline that [`Self::poll_timeout`] returned.
    pub fn handle_timeout(&mut self, now: Nanos) {
        if let Some(unreliable) = &mut self.unreliable {
            unreliable.sender.handle_timeout(now);
            return;
        }
        if !matches!(self.attr.state, QpState::Rts | QpState::Sqd) {
            return;
        }
        let params = self.params;
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        let answer = self.requester.handle_timeout(now, &params, &mut out);
        self.settle(answer);
    }

    /// Call this instead of [`handle_timeout`](Self::handle_timeout) while the packet polled last
    /// is still [current](Self::is_current) and waits for its payload. That packet has not left, so
    /// its ACK cannot be late. It may have to be polled again.
    pub fn put_off(&mut self, now: Nanos) {
        if self.unreliable.is_some() || !self.requester.put_off(now) {
            self.handle_timeout(now);
        }
    }

    /// The peer process has died, as reported by another channel. It will send no more ACKs and no
    /// more packets. Returns whether that ended the queue pair; unreliable services (UC too) expect
    /// nothing from the peer and go on.
    pub fn handle_peer_death(&mut self) -> bool {
        let connected = matches!(self.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        if !connected || self.unreliable.is_some() {
            return false;
        }
        self.events.push_back(QpEvent::Fatal);
        self.enter_error(Some(Status::RetryExceeded));
        true
    }

    /// READs and atomics that the peer is known to answer at a time, whatever the attributes say; 0
    /// if nothing is known of it.
    pub fn set_peer_resources(&mut self, resources: u8) {
        self.config.peer_resources = resources;
        self.params = Params::of(&self.config, &self.attr);
    }

    /// Whether the receiver of later unreliable packets echoes [`Marker`](crate::wire::Marker)s.
    pub fn set_same_host(&mut self, same_host: bool) {
        if let Some(unreliable) = &mut self.unreliable {
            unreliable.sender.set_same_host(same_host);
        }
    }

    /// The marker to send now, behind everything polled so far. Call it when nothing more may
    /// leave.
    pub fn poll_marker(&mut self, now: Nanos) -> Option<u32> {
        self.unreliable.as_mut()?.sender.poll_marker(now)
    }

    /// A marker came back: the receiver of an unreliable service has processed it.
    pub fn handle_marker(&mut self, number: u32) {
        if let Some(unreliable) = &mut self.unreliable {
            unreliable.sender.handle_marker(number);
        }
    }

    /// Accepted payload of packet `psn`, or of a later one, did not reach its memory. Sends a NAK
    /// and acknowledges nothing from there on.
    pub fn handle_placement_fault(&mut self, psn: Psn) {
        if matches!(self.attr.state, QpState::Reset | QpState::Init) {
            return;
        }
        if self.unreliable.is_some() {
            if self.attr.state != QpState::Error {
                self.stop(QpEvent::Fatal);
            }
            return;
        }
        let taken = self.responder.fail_read(psn, Nak::RemoteOperational, &self.params);
        if let RequestOutcome::Fatal(event) = taken
            && self.attr.state != QpState::Error
        {
            self.stop(event);
        }
    }

    /// The atomic with this PSN is done; `before` is the value before it. [`Host`] had returned a
    /// placeholder, and no response has left until now.
    pub fn handle_changed(&mut self, psn: Psn, before: u64) {
        self.responder.handle_changed(psn, before);
    }

    /// The payload of `transmit` could not be read, and the packet was not sent. `nak` goes to a
    /// peer whose READ this answers.
    pub fn handle_gather_fault(&mut self, transmit: &Transmit, nak: Nak) {
        match transmit.payload {
            Payload::None => {}
            Payload::Request { .. } if self.unreliable.is_some() => {
                self.enter_send_error(Some(Status::LocalProtection));
            }
            Payload::Request { serial, .. } => {
                let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
                self.requester.fail_at(serial, Status::LocalProtection, &mut out);
                self.enter_error(None);
            }
            Payload::Region { again: true, .. } => {
                self.responder.drop_replay(transmit.header.psn, &self.params);
            }
            Payload::Region { again: false, .. } => {
                let taken = self.responder.fail_read(transmit.header.psn, nak, &self.params);
                if let RequestOutcome::Fatal(event) = taken {
                    self.stop(event);
                }
            }
        }
    }

    /// The next packet to send, if one may leave now.
    ///
    /// `room` is how many bytes the path to the peer still takes. Without `flush_acks`, delayed
    /// ACKs stay queued. Call again with it before blocking, and whenever another packet leaves
    /// anyway (piggyback).
    ///
    /// Gather the payload of a packet before the next poll: an unreliable service then retires the
    /// request.
    pub fn poll_transmit(&mut self, now: Nanos, room: u64, flush_acks: bool) -> Option<Transmit> {
        if self.unreliable.is_some() {
            return self.poll_unreliable(now, room);
        }
        let params = self.params;
        match self.attr.state {
            QpState::Reset | QpState::Init | QpState::Sqe => None,
            QpState::Rtr | QpState::Error => self.responder.poll_transmit(&params, flush_acks),
            QpState::Rts | QpState::Sqd => {
                let may_start = self.attr.state == QpState::Rts;
                if self.responder.is_urgent() {
                    return self.responder.poll_transmit(&params, false);
                }
                // Data before delayed ACKs: the peer may be waiting for the data.
                let data = self.requester.poll_transmit(now, &params, may_start, room);
                if data.is_some() || !flush_acks {
                    return data;
                }
                self.responder.poll_transmit(&params, true)
            }
        }
    }

    /// Whether the application knows of a message that is not acknowledged yet, and has sent
    /// something since. That may be the answer. Programs expect the completion of a SEND before the
    /// answer to it: unless the peer's link sees to that, the ACK has to leave first.
    pub fn owes_receipt(&self) -> bool {
        self.responder.owes_receipt() && self.requester.has_more()
    }

    /// The next response to send, if one may leave now. For callers that must hold back requests.
    pub fn poll_answer(&mut self, flush_acks: bool) -> Option<Transmit> {
        let params = self.params;
        match self.attr.state {
            QpState::Reset | QpState::Init | QpState::Sqe => None,
            _ => self.responder.poll_transmit(&params, flush_acks),
        }
    }

    /// The next request packet to send, if one may leave now. For callers that must hold back
    /// responses.
    pub fn poll_request(&mut self, now: Nanos, room: u64) -> Option<Transmit> {
        if self.unreliable.is_some() {
            return self.poll_unreliable(now, room);
        }
        let params = self.params;
        match self.attr.state {
            QpState::Rts | QpState::Sqd => {
                self.requester.poll_transmit(now, &params, self.attr.state == QpState::Rts, room)
            }
            _ => None,
        }
    }

    /// The next request with local work, if its turn has come. Call it when nothing more may leave;
    /// finish with [`Self::handle_local`].
    pub fn poll_local(&self) -> Option<(u64, LocalWork)> {
        if self.attr.state == QpState::Rts { self.requester.poll_local() } else { None }
    }

    /// The request with this serial number, from [`Self::poll_local`], was carried out or failed.
    pub fn handle_local(&mut self, serial: u64, work: &LocalWork, done: bool) {
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        if done {
            self.requester.handle_local(&mut out);
        } else {
            self.requester.fail_at(serial, work.failure(), &mut out);
            self.enter_error(None);
        }
    }

    fn poll_unreliable(&mut self, now: Nanos, room: u64) -> Option<Transmit> {
        let may_start = match self.attr.state {
            QpState::Rts => true,
            QpState::Sqd => false,
            _ => return None,
        };
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        let sender = &mut self.unreliable.as_mut()?.sender;
        let transmit = sender.poll(now, &self.params, may_start, room, &mut out);
        self.report_drained();
        transmit
    }

    /// Whether `transmit` is the request packet polled last and still has to be sent. It does not
    /// after a go-back-N rewind, an ACK for it, or a failure.
    pub fn is_current(&self, transmit: &Transmit) -> bool {
        matches!(self.attr.state, QpState::Rts | QpState::Sqd)
            && match &self.unreliable {
                None => self.requester.sent_last(transmit.header.psn),
                Some(unreliable) => unreliable.sender.sent_last(transmit.header.psn),
            }
    }

    /// How many more packets like the one from [`Self::poll_transmit`] may leave. They come from
    /// the middle of the same message and have consecutive PSNs and consecutive payload. All other
    /// header bits are equal. At most `most`; they count as sent.
    ///
    /// Long messages consist mostly of such packets, and copying a header is cheaper than building
    /// one.
    pub fn poll_repeat(&mut self, now: Nanos, transmit: &Transmit, room: u64, most: u64) -> u64 {
        if transmit.header.opcode == Opcode::ReadResponseMiddle {
            return self.responder.poll_repeat(transmit.header.psn, &self.params, most);
        }
        let middle = matches!(
            transmit.header.opcode,
            Opcode::SendMiddle | Opcode::WriteMiddle | Opcode::UcSendMiddle | Opcode::UcWriteMiddle
        );
        let next = matches!(transmit.payload, Payload::Request { len, .. } if len == self.params.mtu);
        if !middle || !next || transmit.header.ack_req || self.has_urgent_replies() {
            return 0;
        }
        if let Some(unreliable) = &mut self.unreliable {
            return unreliable.sender.poll_repeat(now, room, most);
        }
        let params = self.params;
        self.requester.poll_repeat(now, &params, room, most)
    }

    /// The peer's READs without any response yet, in order: a caller can prefetch memory that is
    /// slow to read.
    pub fn waiting_reads(&self) -> impl Iterator<Item = (Psn, Reth)> {
        self.responder.waiting_reads()
    }

    /// Whether requests may be left to send or are blocked. If not, [`Self::poll_request`] and
    /// [`Self::poll_local`] return nothing until the next post or timeout.
    #[inline]
    pub fn may_send(&self) -> bool {
        self.unreliable.is_some() || self.requester.has_more()
    }

    /// Whether responses are queued (with `flush_acks`).
    pub fn has_replies(&self) -> bool {
        self.responder.has_replies() || self.responder.has_report()
    }

    /// Whether responses are queued that should leave at once.
    pub fn has_urgent_replies(&self) -> bool {
        self.responder.is_urgent() || self.responder.owes_report()
    }

    /// Whether completions are queued.
    pub fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// The next completion, in order.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<QpEvent> {
        self.events.pop_front()
    }

    /// When to call [`Self::handle_timeout`], if nothing happens before.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        if let Some(unreliable) = &self.unreliable {
            return unreliable.sender.poll_timeout();
        }
        matches!(self.attr.state, QpState::Rts | QpState::Sqd)
            .then(|| self.requester.poll_timeout(&self.params))
            .flatten()
    }

    fn settle(&mut self, answer: ResponseOutcome) -> Handled {
        match answer {
            ResponseOutcome::Taken => Handled::Taken,
            ResponseOutcome::Unsolicited => Handled::Unsolicited,
            ResponseOutcome::Failed(status) => {
                self.enter_error(Some(status));
                Handled::Taken
            }
        }
    }

    /// The receiving side failed for good (a fatal NAK is queued, or local memory of an unreliable
    /// service failed): enters the error state.
    fn stop(&mut self, event: QpEvent) {
        self.events.push_back(event);
        self.enter_error(None);
    }

    fn enter_error(&mut self, status: Option<Status>) {
        self.attr.state = QpState::Error;
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        let open = match &mut self.unreliable {
            None => {
                self.requester.fail(status, &mut out);
                self.responder.take_open_receive()
            }
            Some(unreliable) => {
                unreliable.sender.flush(&mut out);
                unreliable.receiver.take_open_receive()
            }
        };
        if let Some(receive) = open {
            self.completions.push_back(Completion::flushed(receive.wr_id, WorkKind::Receive));
        }
    }

    /// The send queue of an unreliable service fails; its receive queue goes on.
    fn enter_send_error(&mut self, status: Option<Status>) {
        let Some(unreliable) = &mut self.unreliable else { return };
        if self.attr.state != QpState::Error {
            self.attr.state = QpState::Sqe;
        }
        let mut out = Out { completions: &mut self.completions, counters: &mut self.counters };
        match status {
            Some(status) => unreliable.sender.fail_front(status, &mut out),
            None => unreliable.sender.flush(&mut out),
        }
    }

    /// Whether the queue pair is draining (SQD) and started work is not complete.
    pub fn is_draining(&self) -> bool {
        let is_drained = match &self.unreliable {
            None => self.requester.is_drained(),
            Some(unreliable) => unreliable.sender.is_drained(),
        };
        self.attr.state == QpState::Sqd && !is_drained
    }

    fn report_drained(&mut self) {
        if self.attr.state == QpState::Sqd && !self.drain_reported && !self.is_draining() {
            self.drain_reported = true;
            self.events.push_back(QpEvent::SendQueueDrained);
        }
    }
}
