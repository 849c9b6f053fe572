//! One communication: an outgoing or incoming connection, or a SIDR exchange.

use std::net::IpAddr;

use super::mad::Mad;
use super::message::Ids;
use super::reason;
use crate::timing::{MILLISECOND, Nanos, SECOND};
use crate::wire::{Psn, Qpn};

/// CM response timeout, as the standard's code: 4.3 s, as in the kernel's `rdma_cm`.
pub(super) const RESPONSE_TIMEOUT: u8 = 20;
/// Timeout before the first retransmission. Exponential backoff doubles it up to
/// [`RESPONSE_TIMEOUT`].
pub(super) const FIRST_TIMEOUT: u8 = 16;
/// Retransmissions of a message before the peer counts as unreachable.
pub(super) const MAX_CM_RETRIES: u8 = 15;
/// The longest service timeout of an MRA: 68 s.
const LONGEST_SERVICE: u8 = 24;
/// How often a REQ is repeated to a service without a listener, ...
const ABSENCES: u8 = 4;
/// ... and to a peer that takes our queue pair for one in use (stale connection), ...
const STALE_ANSWERS: u8 = 6;
/// ... and the first delay. It doubles each time: 1.5 s and 6.3 s in total.
const FIRST_ABSENCE: Nanos = 100 * MILLISECOND;
/// The longest time that a connection stays in TIMEWAIT.
const LONGEST_TIMEWAIT: Nanos = 5 * SECOND;

/// Local communication ID. Its high byte is the slot of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommId(pub u32);

/// Parameters of a REQ.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the fields of a REQ
pub struct Connect {
    pub to: IpAddr,
    pub service: u64,
    pub qpn: Qpn,
    pub transport: u8,
    pub starting_psn: Psn,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: bool,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: bool,
    pub mtu: u8,
    pub local_gid: [u8; 16],
    pub remote_gid: [u8; 16],
    pub traffic_class: u8,
    pub local_ack_timeout: u8,
    pub private: Vec<u8>,
}

/// Parameters of a REP.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the fields of a REP
pub struct Accept {
    pub qpn: Qpn,
    pub starting_psn: Psn,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: bool,
    pub rnr_retry_count: u8,
    pub srq: bool,
    pub private: Vec<u8>,
}

/// State of a communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommunicationState {
    /// REQ sent.
    ReqSent,
    /// REP received; the user has not decided yet.
    RepReceived,
    /// REQ received; the user has not answered yet.
    ReqReceived,
    /// REP sent.
    RepSent,
    Established,
    /// DREQ sent.
    DreqSent,
    /// Ended; packets of the connection may still be in flight.
    TimeWait,
    /// Ended or never established; only the user's handle remains.
    Over,
    /// SIDR REQ sent.
    SidrReqSent,
    /// SIDR REQ received; the user has not answered yet.
    SidrReqReceived,
    /// SIDR REP sent, and kept for retransmission.
    SidrRepSent,
}

#[derive(Clone, Debug)]
pub(super) struct Communication {
    pub(super) peer: IpAddr,
    pub(super) ids: Ids,
    pub(super) state: CommunicationState,
    /// Transaction ID of the current exchange; answers repeat it.
    pub(super) transaction: u64,
    /// The last message, kept for retransmission.
    pub(super) said: Option<Mad>,
    retries_left: u8,
    timeout: u8,
    /// How often the service had no listener, or the peer took our queue pair for one in use.
    absences: u8,
    /// Deadline without an answer.
    pub(super) due: Option<Nanos>,
    pub(super) remote_qpn: Qpn,
    /// The listener's service, while the request occupies a backlog slot.
    pub(super) pending: Option<u64>,
    /// The user has dropped its handle.
    pub(super) released: bool,
    /// The local ACK timeout code of its packets.
    pub(super) local_ack_timeout: u8,
}

impl Communication {
    pub(super) fn new(peer: IpAddr, ids: Ids, state: CommunicationState, transaction: u64) -> Self {
        Self {
            peer,
            ids,
            state,
            transaction,
            said: None,
            retries_left: 0,
            timeout: 0,
            absences: 0,
            due: None,
            remote_qpn: Qpn::new(0),
            pending: None,
            released: false,
            local_ack_timeout: 0,
        }
    }

    pub(super) fn id(&self) -> CommId {
        CommId(self.ids.local)
    }

    /// Records a message that needs an answer, and arms the retransmission timer.
    pub(super) fn expect_answer(&mut self, now: Nanos, said: Mad) {
        self.said = Some(said);
        self.retries_left = MAX_CM_RETRIES;
        self.timeout = FIRST_TIMEOUT;
        self.due = Some(now + nanos(self.timeout));
    }

    /// The answer is late: whether to retransmit.
    pub(super) fn retry(&mut self, now: Nanos) -> bool {
        if self.retries_left == 0 {
            return false;
        }
        self.retries_left -= 1;
        self.timeout = (self.timeout + 1).min(RESPONSE_TIMEOUT);
        self.due = Some(now + nanos(self.timeout));
        true
    }

    /// Whether to repeat a rejected REQ. A program that closes one listener and opens the next
    /// (perftest does) briefly has none, and its clients do not retry. A peer may hold a stale
    /// connection of a dead process on our queue pair number. It ends that one on the first REQ and
    /// accepts a later one.
    pub(super) fn may_ask_again(&self, reason: u16) -> bool {
        match reason {
            reason::INVALID_SERVICE_ID => self.absences < ABSENCES,
            reason::STALE_CONNECTION => self.absences < STALE_ANSWERS,
            _ => false,
        }
    }

    /// Repeats the REQ after a delay.
    pub(super) fn ask_again(&mut self, now: Nanos) {
        self.due = Some(now + (FIRST_ABSENCE << self.absences));
        self.absences += 1;
    }

    /// The peer sent an MRA: extend the deadline.
    pub(super) fn extend_deadline(&mut self, now: Nanos, service_timeout: u8) {
        self.due = Some(now + nanos(service_timeout.min(LONGEST_SERVICE)) + nanos(RESPONSE_TIMEOUT));
    }

    /// Enters `state`: stops the timer and drops the message kept for retransmission.
    pub(super) fn rest(&mut self, state: CommunicationState) {
        self.state = state;
        self.said = None;
        self.due = None;
    }

    /// Enters TIMEWAIT for twice the local ACK timeout, at most [`LONGEST_TIMEWAIT`].
    pub(super) fn wait_out(&mut self, now: Nanos) {
        self.rest(CommunicationState::TimeWait);
        let twice = nanos(self.local_ack_timeout.clamp(1, 30) + 1);
        self.due = Some(now + twice.min(LONGEST_TIMEWAIT));
    }
}

/// Decodes a timeout: 4.096 us times 2^code.
fn nanos(code: u8) -> Nanos {
    4096 << code.min(31)
}
