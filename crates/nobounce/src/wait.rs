//! Errors of operations.

use std::net::IpAddr;
use std::time::Duration;

use nobounce_nic::any::CqError;
use nobounce_nic::work::{Status, WorkKind};

use crate::tickets::{Completion, Ended, Ticket};

/// Why an operation has no result, or none yet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// It is still in flight.
    #[error("no result within {timeout:?}; {pending} operations are still pending; wait again")]
    Timeout {
        /// The timeout.
        timeout: Duration,
        /// Operations in flight.
        pending: usize,
    },
    /// It failed, and its lane has stopped.
    #[error("{kind:?} on lane {lane} failed: {}; the lane has stopped; connect again", sentence(*status))]
    Failed {
        /// Its ticket.
        ticket: Ticket,
        /// The lane it was posted on.
        lane: usize,
        /// Its kind.
        kind: WorkKind,
        /// Its status.
        status: Status,
    },
    /// The peer closed the connection, or its process ended.
    #[error(
        "the peer is gone: it closed the connection or its process ended, with this {kind:?} on lane {lane} pending"
    )]
    PeerGone {
        /// Its ticket.
        ticket: Ticket,
        /// The lane it was posted on.
        lane: usize,
        /// Its kind.
        kind: WorkKind,
    },
    /// No response ever arrived, and there is evidence for a wrong GID.
    #[error(
        "{kind:?} on lane {lane} failed: {peer} never answered, and {doubt}; the lane has stopped; connect again"
    )]
    WrongGid {
        /// Its ticket.
        ticket: Ticket,
        /// The lane it was posted on.
        lane: usize,
        /// Its kind.
        kind: WorkKind,
        /// The address of the peer's device.
        peer: IpAddr,
        /// The GID, and the evidence against it.
        doubt: String,
    },
    /// Our port went down during the operation.
    #[error(
        "{kind:?} on lane {lane} failed: the port of {device} is down (check the cable and the interface); the lane has stopped; \
         connect again when the port is up"
    )]
    PortDown {
        /// Its ticket.
        ticket: Ticket,
        /// The lane it was posted on.
        lane: usize,
        /// Its kind.
        kind: WorkKind,
        /// The device's name.
        device: String,
    },
    /// Our port is down, and nothing has failed yet. Reported once each time the port goes down.
    #[error(
        "the port of {device} is down (check the cable and the interface), with {pending} operations pending: they continue if \
         it comes up before their retries are exhausted; wait again"
    )]
    PortLost {
        /// The device's name.
        device: String,
        /// Operations in flight.
        pending: usize,
    },
    /// The device lost completions: the outcome of the operations in flight is unknown.
    #[error(
        "a completion queue of {device} failed, with {pending} operations pending: their completions are lost (see dmesg); connect again"
    )]
    QueueFailed {
        /// The device's name.
        device: String,
        /// Operations in flight.
        pending: usize,
    },
    /// The ticket was claimed before, or belongs to another connection.
    #[error("{ticket:?} is not pending on this connection: each result is returned once")]
    UnknownTicket {
        /// The ticket.
        ticket: Ticket,
    },
    /// Nothing is in flight.
    #[error("no operation is pending on this connection")]
    NothingPending,
    /// The device is gone: nothing on this connection will complete any more.
    #[error(
        "{device} is gone, with {pending} operations pending: its driver was unloaded, or it was unplugged or reset (see dmesg); open a device again"
    )]
    DeviceGone {
        /// The device's name.
        device: String,
        /// Operations in flight.
        pending: usize,
    },
    /// The completion queue failed.
    #[error(transparent)]
    Queue(#[from] CqError),
}

impl WaitError {
    /// The operation that this error ended, if any.
    pub fn ticket(&self) -> Option<Ticket> {
        match self {
            Self::Failed { ticket, .. }
            | Self::PeerGone { ticket, .. }
            | Self::WrongGid { ticket, .. }
            | Self::PortDown { ticket, .. } => Some(*ticket),
            _ => None,
        }
    }
}

/// The result of an operation; `peer_gone` checks for a live peer.
pub(crate) fn judge(ended: &Ended, peer_gone: impl Fn() -> bool) -> Result<Completion, WaitError> {
    let Completion { ticket, lane, kind, .. } = ended.completion;
    match ended.status {
        Status::Success => Ok(ended.completion),
        // A dead peer shows as silence, as our own flush, or as a refusal by its NIC.
        Status::Flushed | Status::RetryExceeded if peer_gone() => {
            Err(WaitError::PeerGone { ticket, lane, kind })
        }
        _ if ended.is_refused() && peer_gone() => Err(WaitError::PeerGone { ticket, lane, kind }),
        status => Err(WaitError::Failed { ticket, lane, kind, status }),
    }
}

fn sentence(status: Status) -> &'static str {
    match status {
        Status::Success => "it did not",
        Status::LocalLength => "the message was longer than the posted receive",
        Status::LocalQpOperation => "the queue pair does not allow this operation",
        Status::LocalProtection => {
            "the local region was dropped or its memory was unmapped while the operation was pending"
        }
        Status::Flushed => "an earlier operation on this lane failed",
        Status::BadResponse => "the peer sent an unexpected response",
        Status::LocalAccess => "local memory became inaccessible while data was written to it",
        Status::RemoteInvalidRequest => {
            "the peer rejected the request as invalid (a message longer than its receive, or a misaligned atomic)"
        }
        Status::RemoteAccess => {
            "the peer refused access to its memory (the region was dropped or its process ended, it is too short or does not \
             allow this access; or it is staged GPU memory behind a hardware NIC, which only the peer may use)"
        }
        Status::RemoteOperation => {
            "the peer could not complete it (its memory was unmapped, or its receive failed)"
        }
        Status::RetryExceeded => {
            "no answer after all retries (network down, a firewall that drops UDP port 4791, or a stopped process)"
        }
        Status::WindowBind => "a memory window could not be bound",
        Status::RnrRetryExceeded => "the peer posted no receive before the RNR retries were exhausted",
        Status::Fatal => "the device failed, or is gone (its driver was unloaded, or it was unplugged)",
        Status::General => "the device failed without a reason (see dmesg)",
    }
}
