//! One communication: a connection on its way in or out, or a question for a datagram service.

use std::net::IpAddr;

use super::mad::Mad;
use super::message::Ids;
use super::reason;
use crate::timing::{MILLISECOND, Nanos, SECOND};
use crate::wire::{Psn, Qpn};

/// The longest an answer may take by the standard's code: 4.3 s, as the kernel's `rdma_cm` has it.
pub(super) const RESPONSE_TIMEOUT: u8 = 20;
/// The wait before the first repetition; each one after it waits twice as long, up to the time above.
pub(super) const FIRST_TIMEOUT: u8 = 16;
/// Repetitions of a message before the other side counts as unreachable.
pub(super) const MAX_CM_RETRIES: u8 = 15;
/// The longest time an MRA can ask for: 68 s.
const LONGEST_SERVICE: u8 = 24;
/// How often a service that nobody offers is asked for again, ...
const ABSENCES: u8 = 4;
/// ... and one whose side believes our queue pair to be in use, ...
const STALE_ANSWERS: u8 = 6;
/// ... and after which time at first; each time it is twice as long, 1.5 and 6.3 s together.
const FIRST_ABSENCE: Nanos = 100 * MILLISECOND;
/// The most time that a connection is remembered for.
const LONGEST_TIMEWAIT: Nanos = 5 * SECOND;

/// The number by which we know a communication. Its high byte is the slot of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommId(pub u32);

/// A connection to ask for.
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

/// How a connection is accepted.
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

/// Where a communication stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// We asked.
    ReqSent,
    /// We were answered, and our user has not said what it makes of it.
    RepReceived,
    /// We were asked, and our user has not answered.
    ReqReceived,
    /// We accepted.
    RepSent,
    Established,
    /// We want it to end.
    DreqSent,
    /// It ended; packets of it may still be under way.
    TimeWait,
    /// It ended or never stood, and only our user has not let go of it.
    Over,
    /// We asked for a datagram service.
    SidrReqSent,
    /// We were asked for one, and our user has not answered.
    SidrReqReceived,
    /// We answered, and answer again if we are asked again.
    SidrRepSent,
}

#[derive(Clone, Debug)]
pub(super) struct Communication {
    pub(super) peer: IpAddr,
    pub(super) ids: Ids,
    pub(super) state: State,
    /// The number of the exchange under way, which answers repeat.
    pub(super) transaction: u64,
    /// What was said last, to be said again.
    pub(super) said: Option<Mad>,
    retries_left: u8,
    timeout: u8,
    /// How often nobody offered the service, or our queue pair was thought to be in use.
    absences: u8,
    /// When to act if nothing comes.
    pub(super) due: Option<Nanos>,
    pub(super) remote_qpn: Qpn,
    /// The listener's service, while it waits for its user.
    pub(super) pending: Option<u64>,
    /// Its user does not want to hear of it any more.
    pub(super) released: bool,
    /// The ack timeout code of its packets.
    pub(super) local_ack_timeout: u8,
}

impl Communication {
    pub(super) fn new(peer: IpAddr, ids: Ids, state: State, transaction: u64) -> Self {
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

    /// Says something that must be answered.
    pub(super) fn expect_answer(&mut self, now: Nanos, said: Mad) {
        self.said = Some(said);
        self.retries_left = MAX_CM_RETRIES;
        self.timeout = FIRST_TIMEOUT;
        self.due = Some(now + nanos(self.timeout));
    }

    /// The answer did not come in time: whether to say it again.
    pub(super) fn retry(&mut self, now: Nanos) -> bool {
        if self.retries_left == 0 {
            return false;
        }
        self.retries_left -= 1;
        self.timeout = (self.timeout + 1).min(RESPONSE_TIMEOUT);
        self.due = Some(now + nanos(self.timeout));
        true
    }

    /// We are refused: whether to ask again. A program that ends one listener and begins the next (perftest does) is between the two for a
    /// moment, and its clients do not ask twice. A side that believes our queue pair to stand in a connection, one of a process that
    /// died, ends that now and takes us then.
    pub(super) fn may_ask_again(&self, reason: u16) -> bool {
        match reason {
            reason::INVALID_SERVICE_ID => self.absences < ABSENCES,
            reason::STALE_CONNECTION => self.absences < STALE_ANSWERS,
            _ => false,
        }
    }

    /// Asks again a little later.
    pub(super) fn ask_again(&mut self, now: Nanos) {
        self.due = Some(now + (FIRST_ABSENCE << self.absences));
        self.absences += 1;
    }

    /// The other side has it and needs time.
    pub(super) fn be_patient(&mut self, now: Nanos, service_timeout: u8) {
        self.due = Some(now + nanos(service_timeout.min(LONGEST_SERVICE)) + nanos(RESPONSE_TIMEOUT));
    }

    /// Nothing is waited for any more.
    pub(super) fn rest(&mut self, state: State) {
        self.state = state;
        self.said = None;
        self.due = None;
    }

    /// Remembers it for as long as a packet may live, twice.
    pub(super) fn wait_out(&mut self, now: Nanos) {
        self.rest(State::TimeWait);
        let twice = nanos(self.local_ack_timeout.clamp(1, 30) + 1);
        self.due = Some(now + twice.min(LONGEST_TIMEWAIT));
    }
}

/// The time of a code: 4.096 us times 2^code.
fn nanos(code: u8) -> Nanos {
    4096 << code.min(31)
}
