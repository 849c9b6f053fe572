//! What the application learns: completions and events.

use crate::wire::{Header, Qpn};

/// How a work request ended. Numbers are those of the verbs interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Success = 0,
    /// The message did not fit the receive buffer.
    LocalLength = 1,
    /// The queue pair was used wrongly.
    LocalQpOperation = 2,
    /// Local memory could not be accessed: no such key, outside the region, or it has vanished.
    LocalProtection = 4,
    /// The queue pair was in, or went into, the error state.
    Flushed = 5,
    /// A memory window could not be bound.
    WindowBind = 6,
    /// The responder sent something that does not belong there.
    BadResponse = 7,
    /// Local memory gave way while the responder placed data into it.
    LocalAccess = 8,
    /// The responder found the request invalid.
    RemoteInvalidRequest = 9,
    /// The responder refused access to its memory.
    RemoteAccess = 10,
    /// The responder could not carry the request out.
    RemoteOperation = 11,
    /// No answer after all retries.
    RetryExceeded = 12,
    /// The receiver never became ready.
    RnrRetryExceeded = 13,
    /// The device failed, or is gone. Hardware devices only.
    Fatal = 19,
    /// The device says no more than that it failed. Hardware devices only.
    General = 21,
}

impl Status {
    /// Every status.
    pub const ALL: [Self; 15] = [
        Self::Success,
        Self::LocalLength,
        Self::LocalQpOperation,
        Self::LocalProtection,
        Self::Flushed,
        Self::WindowBind,
        Self::BadResponse,
        Self::LocalAccess,
        Self::RemoteInvalidRequest,
        Self::RemoteAccess,
        Self::RemoteOperation,
        Self::RetryExceeded,
        Self::RnrRetryExceeded,
        Self::Fatal,
        Self::General,
    ];
}

/// What kind of work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum WorkKind {
    Send,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
    AtomicWrite,
    Flush,
    BindWindow,
    LocalInvalidate,
    Receive,
    /// A receive consumed by a WRITE with immediate data.
    ReceiveWriteImmediate,
}

/// Where a datagram came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DatagramSource {
    /// The queue pair that sent it. The address is in the 40 bytes before the payload.
    pub qpn: Qpn,
}

/// One completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The application's number for the request.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// What it was.
    pub kind: WorkKind,
    /// Bytes received, read, or fetched.
    pub byte_len: u32,
    /// Immediate data that came with it.
    pub immediate: Option<u32>,
    /// The key the peer had invalidated.
    pub invalidated: Option<u32>,
    /// The peer asked for an event.
    pub solicited: bool,
    /// Of a received datagram: where it came from.
    pub source: Option<DatagramSource>,
}

impl Completion {
    /// A request that ended without being carried out.
    pub const fn flushed(wr_id: u64, kind: WorkKind) -> Self {
        Self {
            wr_id,
            status: Status::Flushed,
            kind,
            byte_len: 0,
            immediate: None,
            invalidated: None,
            solicited: false,
            source: None,
        }
    }

    /// A receive that the message ending with this packet used up.
    pub(crate) fn received(wr_id: u64, status: Status, header: &Header, byte_len: u32) -> Self {
        let opcode = header.opcode;
        Self {
            wr_id,
            status,
            kind: if opcode.is_send() { WorkKind::Receive } else { WorkKind::ReceiveWriteImmediate },
            byte_len,
            immediate: opcode.has_immediate().then_some(header.immediate),
            invalidated: opcode.has_invalidate().then_some(header.invalidate),
            solicited: header.solicited,
            source: None,
        }
    }

    /// Whether it belongs to the receive queue.
    pub const fn is_receive(&self) -> bool {
        matches!(self.kind, WorkKind::Receive | WorkKind::ReceiveWriteImmediate)
    }
}

/// Something that happened to a queue pair and belongs to no work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpEvent {
    /// The responder found an invalid request and stopped.
    RequestError,
    /// The responder found a forbidden access and stopped.
    AccessError,
    /// The responder could not carry out a request and stopped.
    Fatal,
    /// The first packet arrived while the queue pair was in RTR.
    CommunicationEstablished,
    /// The send queue has drained.
    SendQueueDrained,
    /// The queue pair is in the error state and takes no more receives from its shared receive
    /// queue. (The owner of that queue reports this.)
    LastWqeReached,
}

/// The negative acknowledgements of the standard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Nak {
    /// A packet is missing before this one.
    PsnSequence = 0,
    /// The request makes no sense here.
    InvalidRequest = 1,
    /// Wrong key, outside the region, or not allowed.
    RemoteAccess = 2,
    /// The responder could not carry it out.
    RemoteOperational = 3,
    /// Only for reliable datagrams, which are not in use.
    InvalidRdRequest = 4,
}

impl Nak {
    /// The status of the refused request; `None` where the peer only misses a packet.
    pub(crate) const fn refusal(self) -> Option<Status> {
        match self {
            Self::PsnSequence => None,
            Self::RemoteAccess => Some(Status::RemoteAccess),
            Self::RemoteOperational => Some(Status::RemoteOperation),
            Self::InvalidRequest | Self::InvalidRdRequest => Some(Status::RemoteInvalidRequest),
        }
    }

    /// The code's meaning, if the standard gives it one.
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Self::PsnSequence,
            1 => Self::InvalidRequest,
            2 => Self::RemoteAccess,
            3 => Self::RemoteOperational,
            4 => Self::InvalidRdRequest,
            _ => return None,
        })
    }
}
