//! One queue pair, without IO: a reliable or unreliable connection, or datagrams.
//!
//! Methods come in four kinds:
//! - getters: [`Qp::state`], [`Qp::attr`], [`Qp::outstanding`], [`Qp::counters`];
//! - what the world does: [`Qp::handle_packet`], [`Qp::handle_timeout`], [`Qp::handle_gather_fault`];
//! - what the user does: [`Qp::modify`], [`Qp::post`], [`Qp::post_to`];
//! - what comes out: [`Qp::poll_transmit`], [`Qp::poll_completion`], [`Qp::poll_event`], [`Qp::poll_timeout`].
//!
//! After any of the first three, poll in this order: completions and events until none are left, then packets until
//! none may leave, then the timeout. Unreliable services complete what has left, so look for completions after the packets
//! too. Memory is reached only through [`Host`], and only inside `handle_packet`.

mod attr;
mod completion;
mod datagram;
mod host;
mod linger;
mod request;
mod requester;
mod responder;
mod rtt;
mod state;
mod transmit;
mod uc_receiver;
mod unreliable;
mod window;
mod wqe;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

pub use attr::{Access, Mtu, QpAttr, Treatment};
pub use completion::{Completion, Nak, QpEvent, Source, Status, WorkKind};
pub use datagram::GRH_LEN;
pub use host::{Host, LocalFault, Receive};
pub use request::{Datagram, LocalWork, MAX_MESSAGE, Operation, PostError, Remote, SendRequest};
pub use state::{AttrMask, QpState, Service, TransitionError, check_transition};
pub use transmit::{Payload, Transmit};

use crate::timing::Nanos;
use crate::wire::{Header, Opcode, Psn, Qpn, Reth};
use datagram::take_datagram;
use requester::{Answer, Out, Requester};
use responder::{Responder, Taken};

use unreliable::Unreliable;

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// It was for this queue pair, in this state.
    Taken,
    /// The queue pair is in a state in which it takes no such packet.
    WrongState,
    /// An answer to nothing that was asked.
    Unsolicited,
    /// A packet of another transport service than the queue pair's.
    WrongService,
}

/// Counters of one queue pair, named as the kernel names them where it has the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct QpCounters {
    pub duplicate_request: u64,
    pub out_of_seq_request: u64,
    pub rcvd_rnr_err: u64,
    pub send_rnr_err: u64,
    pub rcvd_seq_err: u64,
    pub implied_nak_seq_err: u64,
    pub local_ack_timeout_err: u64,
    /// Questions after a possibly lost tail; not retries.
    pub probes: u64,
    /// Repeated atomics whose result was no longer kept.
    pub lost_atomic_replay: u64,
    /// Unreliable services: messages dropped because no receive was posted.
    pub out_of_buffer: u64,
    /// Datagrams dropped because their key was wrong.
    pub qkey_violations: u64,
    /// Unreliable services: messages dropped because they were not whole, not allowed, or did not fit.
    pub dropped_messages: u64,
}

/// What a connection was agreed to be: the attributes as the two halves use them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    pub(crate) qpn: Qpn,
    pub(crate) qkey: u32,
    pub(crate) dest_qpn: Qpn,
    pub(crate) mtu: u32,
    pub(crate) access: Access,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
}

impl Params {
    fn of(config: &QpConfig, attr: &QpAttr) -> Self {
        Self {
            qpn: config.qpn,
            qkey: attr.qkey,
            dest_qpn: attr.dest_qpn,
            mtu: attr.path_mtu.bytes(),
            access: attr.access,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
        }
    }
}

/// How a queue pair is made.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    /// What it offers.
    pub service: Service,
    /// Its number, which datagrams carry.
    pub qpn: Qpn,
    /// The largest path MTU of the port: that of datagrams.
    pub port_mtu: Mtu,
    /// Send requests that may be outstanding.
    pub send_depth: usize,
    /// Report every success, whatever the request says.
    pub signal_all: bool,
}

/// A queue pair. The module's text gives the order in which to call it.
#[derive(Debug)]
pub struct Qp {
    config: QpConfig,
    attr: QpAttr,
    params: Params,
    requester: Requester,
    responder: Responder,
    /// What does the work of those two where nothing is acknowledged.
    unreliable: Option<Box<Unreliable>>,
    completions: VecDeque<Completion>,
    events: VecDeque<QpEvent>,
    counters: QpCounters,
    established: bool,
    drain_reported: bool,
}

impl Qp {
    /// A queue pair in RESET.
    pub fn new(config: QpConfig) -> Self {
        let mut attr = QpAttr::default();
        if config.service == Service::Ud {
            attr.path_mtu = config.port_mtu;
            attr.remote = IpAddr::V4(Ipv4Addr::UNSPECIFIED); // it has no one peer
        }
        let unreliable = (config.service != Service::Rc)
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
        }
    }

    /// The state it is in.
    pub const fn state(&self) -> QpState {
        self.attr.state
    }

    /// What it offers.
    pub const fn service(&self) -> Service {
        self.config.service
    }

    /// Where the packet polled last goes. (By reference: an address that was copied just before is slow to read.)
    #[inline]
    pub fn destination(&self) -> &IpAddr {
        let datagram = self.unreliable.as_ref().and_then(|unreliable| unreliable.sender.destination());
        datagram.unwrap_or(&self.attr.remote)
    }

    /// How the packet polled last is treated on its way.
    pub fn treatment(&self) -> Treatment {
        let datagram = self.unreliable.as_ref().and_then(|unreliable| unreliable.sender.treatment());
        datagram.unwrap_or(self.attr.treatment)
    }

    /// Its attributes.
    pub const fn attr(&self) -> &QpAttr {
        &self.attr
    }

    /// What it counted.
    pub const fn counters(&self) -> &QpCounters {
        &self.counters
    }

    /// Bytes that may lie in a socket buffer because of it.
    pub fn outstanding(&self) -> u64 {
        match &self.unreliable {
            None => self.requester.outstanding(),
            Some(unreliable) => unreliable.sender.outstanding(),
        }
    }

    /// Whether an answer that frees a few packets costs more than it brings, as where both ends share the processors: then nobody asks for one
    /// while another is on its way. Otherwise each one that comes lets the next few packets leave, the last of which asks again.
    pub fn ask_rarely(&mut self, rarely: bool) {
        self.requester.ask_rarely(rarely);
    }

    /// Whether the last [`Self::poll_transmit`] held a packet back only because there was no room.
    pub fn is_path_limited(&self) -> bool {
        // One that failed meanwhile waits for nothing any more.
        matches!(self.attr.state, QpState::Rts | QpState::Sqd)
            && match &self.unreliable {
                None => self.requester.is_path_limited(),
                Some(unreliable) => unreliable.sender.is_path_limited(),
            }
    }

    /// Whether a receive was taken for a message that is still coming in.
    pub fn has_open_receive(&self) -> bool {
        match &self.unreliable {
            None => self.responder.has_open_receive(),
            Some(unreliable) => unreliable.receiver.has_open_receive(),
        }
    }

    /// Every send request with a smaller serial number is over.
    pub fn oldest_serial(&self) -> u64 {
        match &self.unreliable {
            None => self.requester.oldest_serial(),
            Some(unreliable) => unreliable.sender.oldest_serial(),
        }
    }

    /// Changes attributes and state.
    ///
    /// # Errors
    /// The transition does not exist, attributes are missing or not allowed, or a value is out of range.
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
                None => self.responder.connect(new.rq_psn),
                Some(unreliable) => unreliable.receiver.connect(new.rq_psn),
            },
            (QpState::Rtr, QpState::Rts) => match &mut self.unreliable {
                None => self.requester.connect(new.sq_psn, &self.params),
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

    /// Takes a send request; returns its serial number, by which [`Payload::Request`] and [`Host`] name it.
    ///
    /// # Errors
    /// See [`PostError`]. In the error state a request is taken and flushed at once.
    pub fn post(&mut self, request: SendRequest) -> Result<u64, PostError> {
        self.take(request, None)
    }

    /// Takes a send request of a datagram queue pair; otherwise as [`Self::post`].
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_to(&mut self, request: SendRequest, to: Datagram) -> Result<u64, PostError> {
        self.take(request, Some(to))
    }

    /// Whether a request, with an address or without one, would be taken if there were room.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn check_post(&self, request: &SendRequest, has_address: bool) -> Result<(), PostError> {
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
        if request.op.is_atomic() && request.len != 8 {
            return Err(PostError::AtomicLength(request.len));
        }
        if request.op.fetches() && self.params.max_rd_atomic == 0 {
            return Err(PostError::NoReads);
        }
        if service != Service::Rc && !request.op.is_offered(service) {
            return Err(PostError::NotOffered { service, operation: request.op.kind() });
        }
        if service == Service::Ud && request.len > self.params.mtu {
            return Err(PostError::DatagramTooLong { given: request.len, max: self.params.mtu });
        }
        Ok(())
    }

    /// How many send requests there is room for.
    pub fn send_room(&self) -> usize {
        let posted = match &self.unreliable {
            None => self.requester.posted(),
            Some(unreliable) => unreliable.sender.posted(),
        };
        self.config.send_depth.saturating_sub(posted)
    }

    fn take(&mut self, mut request: SendRequest, to: Option<Datagram>) -> Result<u64, PostError> {
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

    /// A packet for this queue pair arrived; its ICRC was right.
    pub fn handle_packet(
        &mut self,
        now: Nanos,
        header: &Header,
        payload_len: usize,
        host: &mut dyn Host,
    ) -> Handled {
        self.handle_run(now, (header, 1), payload_len, host)
    }

    /// As [`handle_packet`](Self::handle_packet), for `packets` of them that have become one: full ones from the middle of a message
    /// of a reliable connection, with sequence numbers in a row from the header's on, and their payload behind each other.
    pub fn handle_run(
        &mut self,
        now: Nanos,
        (header, packets): (&Header, u32),
        payload_len: usize,
        host: &mut dyn Host,
    ) -> Handled {
        if header.opcode.service() != self.config.service {
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
        if let Taken::Fatal(event) = self.responder.handle_request(run, payload_len, &params, host, &mut out)
        {
            self.stop(event);
        }
        Handled::Taken
    }

    /// How many packets of such a run were taken before, where others of it were not: what is sent again may begin before that which is awaited, and end
    /// behind it. They are to be left out, or all of it counts as a duplicate.
    #[inline]
    pub fn taken_of_run(&self, header: &Header, packets: u32, payload_len: usize) -> u32 {
        let is_one = packets < 2 || header.opcode.is_response() || self.unreliable.is_some();
        if is_one || !self.is_run(header, packets, payload_len) {
            return 0;
        }
        self.responder.taken_of(header.psn, packets)
    }

    /// Whether so many packets can have become one.
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

    /// The time of [`Self::poll_timeout`] has come.
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

    /// To be called instead of [`handle_timeout`](Self::handle_timeout) while the packet that was polled last, which is still
    /// [current](Self::is_current), waits for its payload and has not left: nobody can be late in answering that one. It may have to be polled again.
    pub fn put_off(&mut self, now: Nanos) {
        if self.unreliable.is_some() || !self.requester.put_off(now) {
            self.handle_timeout(now);
        }
    }

    /// The process at the other end is no more, as is known from elsewhere: nothing it has not acknowledged by now ever will be, and nothing
    /// more will come. Whether that ended the queue pair; unreliable services do not know of ends.
    pub fn handle_peer_death(&mut self) -> bool {
        let connected = matches!(self.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        if !connected || self.unreliable.is_some() {
            return false;
        }
        self.events.push_back(QpEvent::Fatal);
        self.enter_error(Some(Status::RetryExceeded));
        true
    }

    /// Whether the receiver of what an unreliable service sends from now on sends [`Marker`](crate::wire::Marker)s back.
    pub fn set_near(&mut self, near: bool) {
        if let Some(unreliable) = &mut self.unreliable {
            unreliable.sender.set_near(near);
        }
    }

    /// The number of a marker to be sent now, behind everything that was polled. To be asked when nothing more may leave.
    pub fn poll_marker(&mut self, now: Nanos) -> Option<u32> {
        self.unreliable.as_mut()?.sender.poll_marker(now)
    }

    /// A marker came back: the receiver of an unreliable service has come to it.
    pub fn handle_marker(&mut self, number: u32) {
        if let Some(unreliable) = &mut self.unreliable {
            unreliable.sender.handle_marker(number);
        }
    }

    /// Payload that was taken did not reach its memory after all: that of packet `psn`, or of one behind it. The peer is told,
    /// and nothing from there on is acknowledged.
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
        if let Taken::Fatal(event) = taken
            && self.attr.state != QpState::Error
        {
            self.stop(event);
        }
    }

    /// The atomic with this number, for which [`Host`] had given any value, was carried out: the value before. No answer to it may have
    /// left until now.
    pub fn handle_changed(&mut self, psn: Psn, before: u64) {
        self.responder.handle_changed(psn, before);
    }

    /// The payload of `transmit` could not be read; the packet was not sent. `nak` is what a peer that READs is told.
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
                if let Taken::Fatal(event) = taken {
                    self.stop(event);
                }
            }
        }
    }

    /// The next packet to send, if one may leave now.
    ///
    /// `room` is how many bytes the path to the peer still takes. Without `flush_acks`, acknowledgements that can
    /// wait do: call again with it before blocking, and whenever something else leaves anyway.
    ///
    /// Gather the payload of a packet before asking for the next: an unreliable service is then done with it.
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
                // Data before deferred acknowledgements: somebody may be waiting for the data.
                let data = self.requester.poll_transmit(now, &params, may_start, room);
                if data.is_some() || !flush_acks {
                    return data;
                }
                self.responder.poll_transmit(&params, true)
            }
        }
    }

    /// The next answer to send, if one may leave now: for a caller whose requests have to wait for something else.
    pub fn poll_answer(&mut self, flush_acks: bool) -> Option<Transmit> {
        let params = self.params;
        match self.attr.state {
            QpState::Reset | QpState::Init | QpState::Sqe => None,
            _ => self.responder.poll_transmit(&params, flush_acks),
        }
    }

    /// The next request packet to send, if one may leave now: for a caller whose answers have to wait for something else.
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

    /// The next request whose work stays on this side, if its turn has come: to be asked when nothing more may leave, and answered by
    /// [`Self::handle_local`].
    pub fn poll_local(&self) -> Option<(u64, LocalWork)> {
        if self.attr.state == QpState::Rts { self.requester.poll_local() } else { None }
    }

    /// The request with this serial number, which [`Self::poll_local`] gave, was carried out, or could not be.
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

    /// Whether `transmit` is the request packet that was polled last and is still to be sent: it is not once the queue pair has
    /// gone back to an earlier packet, has heard of its arrival, or has failed.
    pub fn is_current(&self, transmit: &Transmit) -> bool {
        matches!(self.attr.state, QpState::Rts | QpState::Sqd)
            && match &self.unreliable {
                None => self.requester.sent_last(transmit.header.psn),
                Some(unreliable) => unreliable.sender.sent_last(transmit.header.psn),
            }
    }

    /// How many more packets may leave that are like the one that [`Self::poll_transmit`] just gave: from the middle
    /// of the same message, each with the next sequence number and the next piece of the payload, and otherwise the
    /// same in every bit of their headers. At most `most`; they count as sent.
    ///
    /// Long messages are made of little else, and a header that is copied is cheaper than one that is thought about.
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

    /// The peer's READs of which nothing has been answered yet, in the order in which they will be: what is slow to read can be read ahead.
    pub fn waiting_reads(&self) -> impl Iterator<Item = (Psn, Reth)> {
        self.responder.waiting_reads()
    }

    /// Whether requests may be left to send, or wait for something; if not, [`Self::poll_request`] and [`Self::poll_local`] give nothing until more is
    /// posted, or a timeout is handled.
    #[inline]
    pub fn may_send(&self) -> bool {
        self.unreliable.is_some() || self.requester.has_more()
    }

    /// Whether answers wait to be sent (with `flush_acks`).
    pub fn has_replies(&self) -> bool {
        self.responder.has_replies()
    }

    /// Whether answers wait that should leave at once.
    pub fn has_urgent_replies(&self) -> bool {
        self.responder.is_urgent()
    }

    /// Whether completions wait.
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

    /// When [`Self::handle_timeout`] must be called, if nothing happens before.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        if let Some(unreliable) = &self.unreliable {
            return unreliable.sender.poll_timeout();
        }
        matches!(self.attr.state, QpState::Rts | QpState::Sqd)
            .then(|| self.requester.poll_timeout(&self.params))
            .flatten()
    }

    fn settle(&mut self, answer: Answer) -> Handled {
        match answer {
            Answer::Taken => Handled::Taken,
            Answer::Unsolicited => Handled::Unsolicited,
            Answer::Failed(status) => {
                self.enter_error(Some(status));
                Handled::Taken
            }
        }
    }

    /// The responder refused something for good.
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

    /// Whether it is to be drained, and work that was begun is not over yet.
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
