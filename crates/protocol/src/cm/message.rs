//! The messages, field by field. Offsets are those of the standard (volume 1, chapter 12), counted
//! from the end of the header.

use super::mad::{Field, Mad, MessageKind};
use crate::wire::{DEFAULT_PKEY, Psn, Qpn};

const LOCAL_ID: Field = Field(0, 0, 32);
const REMOTE_ID: Field = Field(4, 0, 32);

/// Bytes of private data that each message has room for.
pub mod private_len {
    #![allow(missing_docs)]
    pub const REQ: usize = 92;
    pub const REP: usize = 196;
    pub const REJ: usize = 148;
    pub const RTU: usize = 224;
    pub const DREQ: usize = 220;
    pub const DREP: usize = 224;
    pub const SIDR_REQ: usize = 216;
    pub const SIDR_REP: usize = 136;
}

/// A message, read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum CmMessage {
    Req(Box<Req>),
    Mra(Mra),
    Rej(Rej),
    Rep(Rep),
    Rtu(Ids),
    Dreq {
        ids: Ids,
        remote_qpn: Qpn,
    },
    Drep(Ids),
    SidrReq(SidrReq),
    SidrRep(SidrRep),
    /// Alternate paths are not offered.
    Lap(Ids),
    Apr(Ids),
}

/// The communication IDs of both sides; `local` is the sender's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Ids {
    pub local: u32,
    pub remote: u32,
}

/// A request for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the standard's names
pub struct Req {
    pub local_id: u32,
    pub service: u64,
    pub ca_guid: u64,
    pub qpn: Qpn,
    /// 0 reliable connection, 1 unreliable connection.
    pub transport: u8,
    /// The first PSN that the receiver is to send.
    pub starting_psn: Psn,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    /// Response timeouts of the receiver and of the sender, as codes of 4.096 us times 2^n.
    pub remote_response_timeout: u8,
    pub local_response_timeout: u8,
    pub max_cm_retries: u8,
    pub flow_control: bool,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: bool,
    /// The path MTU as the standard encodes it: 1 is 256, 5 is 4096.
    pub mtu: u8,
    pub pkey: u16,
    pub local_gid: [u8; 16],
    pub remote_gid: [u8; 16],
    pub flow_label: u32,
    pub packet_rate: u8,
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub service_level: u8,
    pub local_ack_timeout: u8,
    pub private: Vec<u8>,
}

mod req {
    use super::Field;
    pub(super) const SERVICE: Field = Field(8, 0, 64);
    pub(super) const CA_GUID: Field = Field(16, 0, 64);
    pub(super) const QPN: Field = Field(32, 0, 24);
    pub(super) const RESPONDER_RESOURCES: Field = Field(35, 0, 8);
    pub(super) const INITIATOR_DEPTH: Field = Field(39, 0, 8);
    pub(super) const REMOTE_TIMEOUT: Field = Field(43, 0, 5);
    pub(super) const TRANSPORT: Field = Field(43, 5, 2);
    pub(super) const FLOW_CONTROL: Field = Field(43, 7, 1);
    pub(super) const PSN: Field = Field(44, 0, 24);
    pub(super) const LOCAL_TIMEOUT: Field = Field(47, 0, 5);
    pub(super) const RETRY_COUNT: Field = Field(47, 5, 3);
    pub(super) const PKEY: Field = Field(48, 0, 16);
    pub(super) const MTU: Field = Field(50, 0, 4);
    pub(super) const RNR_RETRY_COUNT: Field = Field(50, 5, 3);
    pub(super) const MAX_CM_RETRIES: Field = Field(51, 0, 4);
    pub(super) const SRQ: Field = Field(51, 4, 1);
    pub(super) const LOCAL_LID: Field = Field(52, 0, 16);
    pub(super) const REMOTE_LID: Field = Field(54, 0, 16);
    pub(super) const LOCAL_GID: usize = 56;
    pub(super) const REMOTE_GID: usize = 72;
    pub(super) const FLOW_LABEL: Field = Field(88, 0, 20);
    pub(super) const PACKET_RATE: Field = Field(91, 2, 6);
    pub(super) const TRAFFIC_CLASS: Field = Field(92, 0, 8);
    pub(super) const HOP_LIMIT: Field = Field(93, 0, 8);
    pub(super) const SERVICE_LEVEL: Field = Field(94, 0, 4);
    pub(super) const LOCAL_ACK_TIMEOUT: Field = Field(95, 0, 5);
    pub(super) const PRIVATE: usize = 140;
}

/// Permissive LID: a router fills in the LIDs; Ethernet has none.
const PERMISSIVE_LID: u64 = 0xffff;

impl Req {
    /// Encodes the message with this transaction ID.
    pub fn emit(&self, transaction: u64) -> Mad {
        let mut mad = Mad::new(MessageKind::Req, transaction);
        mad.set(LOCAL_ID, self.local_id.into());
        mad.set(req::SERVICE, self.service);
        mad.set(req::CA_GUID, self.ca_guid);
        mad.set(req::QPN, self.qpn.get().into());
        mad.set(req::RESPONDER_RESOURCES, self.responder_resources.into());
        mad.set(req::INITIATOR_DEPTH, self.initiator_depth.into());
        mad.set(req::REMOTE_TIMEOUT, self.remote_response_timeout.into());
        mad.set(req::TRANSPORT, self.transport.into());
        mad.set(req::FLOW_CONTROL, self.flow_control.into());
        mad.set(req::PSN, self.starting_psn.get().into());
        mad.set(req::LOCAL_TIMEOUT, self.local_response_timeout.into());
        mad.set(req::RETRY_COUNT, self.retry_count.into());
        mad.set(req::PKEY, self.pkey.into());
        mad.set(req::MTU, self.mtu.into());
        mad.set(req::RNR_RETRY_COUNT, self.rnr_retry_count.into());
        mad.set(req::MAX_CM_RETRIES, self.max_cm_retries.into());
        mad.set(req::SRQ, self.srq.into());
        mad.set(req::LOCAL_LID, PERMISSIVE_LID);
        mad.set(req::REMOTE_LID, PERMISSIVE_LID);
        mad.put(req::LOCAL_GID, 16, &self.local_gid);
        mad.put(req::REMOTE_GID, 16, &self.remote_gid);
        mad.set(req::FLOW_LABEL, self.flow_label.into());
        mad.set(req::PACKET_RATE, self.packet_rate.into());
        mad.set(req::TRAFFIC_CLASS, self.traffic_class.into());
        mad.set(req::HOP_LIMIT, self.hop_limit.into());
        mad.set(req::SERVICE_LEVEL, self.service_level.into());
        mad.set(req::LOCAL_ACK_TIMEOUT, self.local_ack_timeout.into());
        mad.put(req::PRIVATE, private_len::REQ, &self.private);
        mad
    }

    fn parse(mad: &Mad) -> Self {
        Self {
            local_id: mad.word(LOCAL_ID),
            service: mad.get(req::SERVICE),
            ca_guid: mad.get(req::CA_GUID),
            qpn: Qpn::new(mad.word(req::QPN)),
            transport: mad.byte(req::TRANSPORT),
            starting_psn: Psn::new(mad.word(req::PSN)),
            responder_resources: mad.byte(req::RESPONDER_RESOURCES),
            initiator_depth: mad.byte(req::INITIATOR_DEPTH),
            remote_response_timeout: mad.byte(req::REMOTE_TIMEOUT),
            local_response_timeout: mad.byte(req::LOCAL_TIMEOUT),
            max_cm_retries: mad.byte(req::MAX_CM_RETRIES),
            flow_control: mad.get(req::FLOW_CONTROL) == 1,
            retry_count: mad.byte(req::RETRY_COUNT),
            rnr_retry_count: mad.byte(req::RNR_RETRY_COUNT),
            srq: mad.get(req::SRQ) == 1,
            mtu: mad.byte(req::MTU),
            pkey: mad.half(req::PKEY),
            local_gid: gid(mad, req::LOCAL_GID),
            remote_gid: gid(mad, req::REMOTE_GID),
            flow_label: mad.word(req::FLOW_LABEL),
            packet_rate: mad.byte(req::PACKET_RATE),
            traffic_class: mad.byte(req::TRAFFIC_CLASS),
            hop_limit: mad.byte(req::HOP_LIMIT),
            service_level: mad.byte(req::SERVICE_LEVEL),
            local_ack_timeout: mad.byte(req::LOCAL_ACK_TIMEOUT),
            private: mad.slice(req::PRIVATE, private_len::REQ).to_vec(),
        }
    }
}

fn gid(mad: &Mad, at: usize) -> [u8; 16] {
    mad.slice(at, 16).first_chunk().copied().unwrap_or_default()
}

/// The answer that accepts a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Rep {
    pub ids: Ids,
    pub qpn: Qpn,
    /// The first PSN that the receiver is to send.
    pub starting_psn: Psn,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub target_ack_delay: u8,
    pub flow_control: bool,
    pub rnr_retry_count: u8,
    pub srq: bool,
    pub ca_guid: u64,
    pub private: Vec<u8>,
}

mod rep {
    use super::Field;
    pub(super) const QPN: Field = Field(12, 0, 24);
    pub(super) const PSN: Field = Field(20, 0, 24);
    pub(super) const RESPONDER_RESOURCES: Field = Field(24, 0, 8);
    pub(super) const INITIATOR_DEPTH: Field = Field(25, 0, 8);
    pub(super) const TARGET_ACK_DELAY: Field = Field(26, 0, 5);
    pub(super) const FAILOVER: Field = Field(26, 5, 2);
    pub(super) const FLOW_CONTROL: Field = Field(26, 7, 1);
    pub(super) const RNR_RETRY_COUNT: Field = Field(27, 0, 3);
    pub(super) const SRQ: Field = Field(27, 3, 1);
    pub(super) const CA_GUID: Field = Field(28, 0, 64);
    pub(super) const PRIVATE: usize = 36;
}

/// There is no second port to fail over to.
const FAILOVER_NOT_SUPPORTED: u64 = 1;

impl Rep {
    /// Encodes the message with this transaction ID.
    pub fn emit(&self, transaction: u64) -> Mad {
        let mut mad = self.ids.emit(MessageKind::Rep, transaction);
        mad.set(rep::QPN, self.qpn.get().into());
        mad.set(rep::PSN, self.starting_psn.get().into());
        mad.set(rep::RESPONDER_RESOURCES, self.responder_resources.into());
        mad.set(rep::INITIATOR_DEPTH, self.initiator_depth.into());
        mad.set(rep::TARGET_ACK_DELAY, self.target_ack_delay.into());
        mad.set(rep::FAILOVER, FAILOVER_NOT_SUPPORTED);
        mad.set(rep::FLOW_CONTROL, self.flow_control.into());
        mad.set(rep::RNR_RETRY_COUNT, self.rnr_retry_count.into());
        mad.set(rep::SRQ, self.srq.into());
        mad.set(rep::CA_GUID, self.ca_guid);
        mad.put(rep::PRIVATE, private_len::REP, &self.private);
        mad
    }

    fn parse(mad: &Mad) -> Self {
        Self {
            ids: Ids::of(mad),
            qpn: Qpn::new(mad.word(rep::QPN)),
            starting_psn: Psn::new(mad.word(rep::PSN)),
            responder_resources: mad.byte(rep::RESPONDER_RESOURCES),
            initiator_depth: mad.byte(rep::INITIATOR_DEPTH),
            target_ack_delay: mad.byte(rep::TARGET_ACK_DELAY),
            flow_control: mad.get(rep::FLOW_CONTROL) == 1,
            rnr_retry_count: mad.byte(rep::RNR_RETRY_COUNT),
            srq: mad.get(rep::SRQ) == 1,
            ca_guid: mad.get(rep::CA_GUID),
            private: mad.slice(rep::PRIVATE, private_len::REP).to_vec(),
        }
    }
}

impl Ids {
    fn of(mad: &Mad) -> Self {
        Self { local: mad.word(LOCAL_ID), remote: mad.word(REMOTE_ID) }
    }

    /// Encodes a message of this kind that carries only these IDs.
    pub fn emit(self, kind: MessageKind, transaction: u64) -> Mad {
        let mut mad = Mad::new(kind, transaction);
        mad.set(LOCAL_ID, self.local.into());
        mad.set(REMOTE_ID, self.remote.into());
        mad
    }

    /// The same as the other side names them.
    #[must_use]
    pub fn swapped(self) -> Self {
        Self { local: self.remote, remote: self.local }
    }
}

/// Which message another one is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum About {
    Req,
    Rep,
    Other,
}

impl About {
    fn code(self) -> u64 {
        match self {
            Self::Req => 0,
            Self::Rep => 1,
            Self::Other => 2,
        }
    }

    fn of(code: u64) -> Self {
        match code {
            0 => Self::Req,
            1 => Self::Rep,
            _ => Self::Other,
        }
    }
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Rej {
    pub ids: Ids,
    pub about: About,
    /// See [`super::reason`].
    pub reason: u16,
    pub private: Vec<u8>,
}

const ABOUT: Field = Field(8, 0, 2);
const REJ_REASON: Field = Field(10, 0, 16);
const REJ_PRIVATE: usize = 84;

impl Rej {
    /// Encodes the message with this transaction ID.
    pub fn emit(&self, transaction: u64) -> Mad {
        let mut mad = self.ids.emit(MessageKind::Rej, transaction);
        mad.set(ABOUT, self.about.code());
        mad.set(REJ_REASON, self.reason.into());
        mad.put(REJ_PRIVATE, private_len::REJ, &self.private);
        mad
    }

    fn parse(mad: &Mad) -> Self {
        Self {
            ids: Ids::of(mad),
            about: About::of(mad.get(ABOUT)),
            reason: mad.half(REJ_REASON),
            private: mad.slice(REJ_PRIVATE, private_len::REJ).to_vec(),
        }
    }
}

/// "I have it, and need more time."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Mra {
    pub ids: Ids,
    pub about: About,
    /// As a code of 4.096 us times 2^n.
    pub service_timeout: u8,
}

const MRA_TIMEOUT: Field = Field(9, 0, 5);

impl Mra {
    /// Encodes the message with this transaction ID.
    pub fn emit(&self, transaction: u64) -> Mad {
        let mut mad = self.ids.emit(MessageKind::Mra, transaction);
        mad.set(ABOUT, self.about.code());
        mad.set(MRA_TIMEOUT, self.service_timeout.into());
        mad
    }

    fn parse(mad: &Mad) -> Self {
        Self { ids: Ids::of(mad), about: About::of(mad.get(ABOUT)), service_timeout: mad.byte(MRA_TIMEOUT) }
    }
}

const DREQ_QPN: Field = Field(8, 0, 24);

/// A DREQ, with the number of the receiver's queue pair.
pub fn emit_dreq(ids: Ids, remote_qpn: Qpn, transaction: u64) -> Mad {
    let mut mad = ids.emit(MessageKind::Dreq, transaction);
    mad.set(DREQ_QPN, remote_qpn.get().into());
    mad
}

/// An APR to a LAP: alternate paths are not supported.
pub(super) fn emit_apr(ids: Ids, transaction: u64) -> Mad {
    const STATUS: Field = Field(9, 0, 8);
    const NOT_SUPPORTED: u64 = 2;
    let mut mad = ids.emit(MessageKind::Apr, transaction);
    mad.set(STATUS, NOT_SUPPORTED);
    mad
}

/// SIDR REQ: asks for the queue pair of a datagram service.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SidrReq {
    pub request: u32,
    pub pkey: u16,
    pub service: u64,
    pub private: Vec<u8>,
}

const SIDR_REQ_PKEY: Field = Field(4, 0, 16);
const SIDR_REQ_SERVICE: Field = Field(8, 0, 64);
const SIDR_REQ_PRIVATE: usize = 16;

impl SidrReq {
    pub(super) fn new(request: u32, service: u64, private: Vec<u8>) -> Self {
        Self { request, pkey: DEFAULT_PKEY, service, private }
    }

    /// Encodes the message with this transaction ID.
    pub fn emit(&self, transaction: u64) -> Mad {
        let mut mad = Mad::new(MessageKind::SidrReq, transaction);
        mad.set(LOCAL_ID, self.request.into());
        mad.set(SIDR_REQ_PKEY, self.pkey.into());
        mad.set(SIDR_REQ_SERVICE, self.service);
        mad.put(SIDR_REQ_PRIVATE, private_len::SIDR_REQ, &self.private);
        mad
    }

    fn parse(mad: &Mad) -> Self {
        Self {
            request: mad.word(LOCAL_ID),
            pkey: mad.half(SIDR_REQ_PKEY),
            service: mad.get(SIDR_REQ_SERVICE),
            private: mad.slice(SIDR_REQ_PRIVATE, private_len::SIDR_REQ).to_vec(),
        }
    }
}

/// Its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SidrRep {
    pub request: u32,
    /// See [`super::sidr_status`].
    pub status: u8,
    pub qpn: Qpn,
    pub service: u64,
    pub qkey: u32,
    pub private: Vec<u8>,
}

mod sidr_rep {
    use super::Field;
    pub(super) const STATUS: Field = Field(4, 0, 8);
    pub(super) const QPN: Field = Field(8, 0, 24);
    pub(super) const SERVICE: Field = Field(12, 0, 64);
    pub(super) const QKEY: Field = Field(20, 0, 32);
    pub(super) const PRIVATE: usize = 96;
}

impl SidrRep {
    /// Encodes the message with this transaction ID.
    pub fn emit(&self, transaction: u64) -> Mad {
        let mut mad = Mad::new(MessageKind::SidrRep, transaction);
        mad.set(LOCAL_ID, self.request.into());
        mad.set(sidr_rep::STATUS, self.status.into());
        mad.set(sidr_rep::QPN, self.qpn.get().into());
        mad.set(sidr_rep::SERVICE, self.service);
        mad.set(sidr_rep::QKEY, self.qkey.into());
        mad.put(sidr_rep::PRIVATE, private_len::SIDR_REP, &self.private);
        mad
    }

    fn parse(mad: &Mad) -> Self {
        Self {
            request: mad.word(LOCAL_ID),
            status: mad.byte(sidr_rep::STATUS),
            qpn: Qpn::new(mad.word(sidr_rep::QPN)),
            service: mad.get(sidr_rep::SERVICE),
            qkey: mad.word(sidr_rep::QKEY),
            private: mad.slice(sidr_rep::PRIVATE, private_len::SIDR_REP).to_vec(),
        }
    }
}

impl CmMessage {
    /// Decodes a message of this kind; any bytes are valid.
    pub fn read(kind: MessageKind, mad: &Mad) -> Self {
        match kind {
            MessageKind::Req => Self::Req(Box::new(Req::parse(mad))),
            MessageKind::Mra => Self::Mra(Mra::parse(mad)),
            MessageKind::Rej => Self::Rej(Rej::parse(mad)),
            MessageKind::Rep => Self::Rep(Rep::parse(mad)),
            MessageKind::Rtu => Self::Rtu(Ids::of(mad)),
            MessageKind::Dreq => Self::Dreq { ids: Ids::of(mad), remote_qpn: Qpn::new(mad.word(DREQ_QPN)) },
            MessageKind::Drep => Self::Drep(Ids::of(mad)),
            MessageKind::SidrReq => Self::SidrReq(SidrReq::parse(mad)),
            MessageKind::SidrRep => Self::SidrRep(SidrRep::parse(mad)),
            MessageKind::Lap => Self::Lap(Ids::of(mad)),
            MessageKind::Apr => Self::Apr(Ids::of(mad)),
        }
    }
}
