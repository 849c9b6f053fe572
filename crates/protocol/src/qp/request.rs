//! Work requests of the send queue, as the protocol sees them: lengths and remote addresses, no
//! local memory.

use std::net::IpAddr;

use super::attr::{Access, IpOptions};
use super::completion::{Status, WorkKind};
use super::state::Service;
use crate::wire::{Feth, Opcode, Qpn};

/// The longest message.
pub const MAX_MESSAGE: u32 = 1 << 31;

/// A place in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Remote {
    /// Virtual address.
    pub addr: u64,
    /// Key.
    pub rkey: u32,
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The address.
    pub remote: IpAddr,
    /// The queue pair there.
    pub dest_qpn: Qpn,
    /// Its Q_Key. With the highest bit set, the sending queue pair's own Q_Key is used instead, as
    /// the standard says.
    pub qkey: u32,
    /// How it is treated on its way.
    pub ip_options: IpOptions,
}

/// Local work of the send queue: it changes the meaning of a key for peers, in order, and sends
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalWork {
    /// Binds a memory window: `rkey` now names part of a region.
    #[allow(missing_docs)] // the names are the standard's
    Bind { window: u32, rkey: u32, region: u32, addr: u64, len: u64, access: Access },
    /// Invalidates this key of a memory window.
    Invalidate(u32),
}

impl LocalWork {
    /// How it is reported when it cannot be done.
    pub const fn failure(&self) -> Status {
        match self {
            Self::Bind { .. } => Status::WindowBind,
            Self::Invalidate(_) => Status::LocalQpOperation,
        }
    }
}

/// What a send work request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the standard's
pub enum Operation {
    Send,
    SendImmediate(u32),
    SendInvalidate(u32),
    Write(Remote),
    WriteImmediate(Remote, u32),
    Read(Remote),
    CompareSwap {
        remote: Remote,
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        remote: Remote,
        add: u64,
    },
    /// Writes 8 bytes at once, and in order with other requests.
    AtomicWrite(Remote),
    /// Waits until earlier WRITEs to this range (or the whole region) are visible to all.
    Flush {
        remote: Remote,
        len: u32,
        /// Placement type and selectivity level.
        feth: Feth,
    },
    Local(LocalWork),
}

impl Operation {
    /// Whether it has a response of its own, so that it counts against `max_rd_atomic`.
    pub const fn fetches(&self) -> bool {
        self.returns_data() || matches!(self, Self::AtomicWrite(_) | Self::Flush { .. })
    }

    /// Whether its response carries data.
    pub const fn returns_data(&self) -> bool {
        matches!(self, Self::Read(_) | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Whether it moves one word of 8 bytes.
    pub const fn moves_word(&self) -> bool {
        self.is_atomic() || matches!(self, Self::AtomicWrite(_))
    }

    /// Whether it is an atomic operation.
    pub const fn is_atomic(&self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Whether a queue pair of that service can do it.
    pub const fn is_offered(&self, service: Service) -> bool {
        match service {
            Service::Rc | Service::XrcInitiator => true,
            Service::XrcTarget => false,
            Service::Uc => {
                matches!(
                    self,
                    Self::Send | Self::SendImmediate(_) | Self::Write(_) | Self::WriteImmediate(..)
                )
            }
            Service::Ud => matches!(self, Self::Send | Self::SendImmediate(_)),
        }
    }

    /// What its completion says it was.
    pub const fn kind(&self) -> WorkKind {
        match self {
            Self::Send | Self::SendImmediate(_) | Self::SendInvalidate(_) => WorkKind::Send,
            Self::Write(_) | Self::WriteImmediate(..) => WorkKind::Write,
            Self::Read(_) => WorkKind::Read,
            Self::CompareSwap { .. } => WorkKind::CompareSwap,
            Self::FetchAdd { .. } => WorkKind::FetchAdd,
            Self::AtomicWrite(_) => WorkKind::AtomicWrite,
            Self::Flush { .. } => WorkKind::Flush,
            Self::Local(LocalWork::Bind { .. }) => WorkKind::BindWindow,
            Self::Local(LocalWork::Invalidate(_)) => WorkKind::LocalInvalidate,
        }
    }

    /// What is to be done here, if nothing is sent.
    pub const fn local(&self) -> Option<&LocalWork> {
        if let Self::Local(work) = self { Some(work) } else { None }
    }

    /// The opcode of the packet that is or is not the first and the last of the message.
    pub(crate) const fn opcode(&self, first: bool, last: bool) -> Opcode {
        match (self, first, last) {
            (Self::Read(_), ..) => Opcode::ReadRequest,
            (Self::CompareSwap { .. }, ..) => Opcode::CompareSwap,
            (Self::FetchAdd { .. }, ..) => Opcode::FetchAdd,
            (Self::AtomicWrite(_), ..) => Opcode::AtomicWrite,
            (Self::Flush { .. }, ..) => Opcode::Flush,
            (Self::Send | Self::SendImmediate(_) | Self::SendInvalidate(_) | Self::Local(_), true, false) => {
                Opcode::SendFirst
            }
            (
                Self::Send | Self::SendImmediate(_) | Self::SendInvalidate(_) | Self::Local(_),
                false,
                false,
            ) => Opcode::SendMiddle,
            // Local work has no packets: the result is not used.
            (Self::Send | Self::Local(_), true, true) => Opcode::SendOnly,
            (Self::Send | Self::Local(_), false, true) => Opcode::SendLast,
            (Self::SendImmediate(_), true, true) => Opcode::SendOnlyImm,
            (Self::SendImmediate(_), false, true) => Opcode::SendLastImm,
            (Self::SendInvalidate(_), true, true) => Opcode::SendOnlyInvalidate,
            (Self::SendInvalidate(_), false, true) => Opcode::SendLastInvalidate,
            (Self::Write(_) | Self::WriteImmediate(..), true, false) => Opcode::WriteFirst,
            (Self::Write(_) | Self::WriteImmediate(..), false, false) => Opcode::WriteMiddle,
            (Self::Write(_), true, true) => Opcode::WriteOnly,
            (Self::Write(_), false, true) => Opcode::WriteLast,
            (Self::WriteImmediate(..), true, true) => Opcode::WriteOnlyImm,
            (Self::WriteImmediate(..), false, true) => Opcode::WriteLastImm,
        }
    }
}

/// One send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequest {
    /// The application's number for it.
    pub wr_id: u64,
    /// What to do.
    pub op: Operation,
    /// Bytes of the local scatter/gather list; 8 for atomics.
    pub len: u32,
    /// Whether success is reported. Failure always is.
    pub signaled: bool,
    /// Ask the peer's receive completion to raise an event.
    pub solicited: bool,
    /// Begin only when all earlier READs and atomics are done.
    pub fence: bool,
    /// On XRC: the number of the peer's shared receive queue.
    pub xrc_srq: u32,
}

/// Why a work request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// Sends need RTS, receives INIT.
    #[error("the queue pair is in {0:?}: sends need RTS, receives need INIT or later")]
    State(super::QpState),
    /// Too many requests are outstanding.
    #[error("the queue is full ({0} requests): poll completions first, or create a deeper queue")]
    QueueFull(usize),
    /// The message is too long.
    #[error("message too long: {0} bytes, the maximum is 2^31")]
    TooLong(u64),
    /// An atomic operation moves exactly 8 bytes.
    #[error("an atomic operation moves 8 bytes, not {0}")]
    AtomicLength(u32),
    /// The scatter/gather list is too long.
    #[error("too many scatter/gather elements: {given}, the queue pair was created for {max}")]
    #[allow(missing_docs)]
    TooManySges { given: usize, max: usize },
    /// Inline data is too long.
    #[error("too much inline data: {given} bytes, the queue pair was created for {max}")]
    #[allow(missing_docs)]
    InlineTooLong { given: u64, max: usize },
    /// Inline data where it has no place.
    #[error("inline data replaces the scatter/gather list and is allowed for SEND and WRITE only")]
    InlineMisused,
    /// READs and atomics were switched off.
    #[error("the queue pair was connected with max_rd_atomic 0: READ and atomics are not allowed")]
    NoReads,
    /// Its receives are posted elsewhere.
    #[error("the queue pair uses a shared receive queue: post receives there")]
    SharedReceives,
    /// The service has no such operation.
    #[error(
        "{operation:?} is not supported on {service:?} queue pairs: UC supports SEND and WRITE, UD only SEND without \
         invalidation; window binds need RC"
    )]
    #[allow(missing_docs)]
    NotOffered { service: Service, operation: WorkKind },
    /// A datagram without a destination, or a destination where there is a peer.
    #[error("address handle required for UD sends and not allowed on others: this queue pair is {0:?}")]
    Destination(Service),
    /// The destination is of the other IP version.
    #[error("cannot reach {0}: the device has an address of the other IP version")]
    Unreachable(IpAddr),
    /// A datagram is one packet.
    #[error("datagram too long: {given} bytes; a datagram is one packet, and the port's MTU is {max}")]
    #[allow(missing_docs)]
    DatagramTooLong { given: u32, max: u32 },
}
