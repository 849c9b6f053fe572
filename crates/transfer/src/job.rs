//! A transfer as the agent's thread carries it out.

use std::sync::Arc;

use nobounce::RemoteRegion;
use nobounce_nic::work::{Operation, Remote, SendRequest, Sge};

use crate::error::TransferError;
use crate::memory::View;
use crate::pieces::{MAX_PIECE, Piece};
use crate::transfer::{Summary, TransferState};

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Local memory to the peer's.
    Write,
    /// The peer's memory to local memory.
    Read,
}

/// Pieces between one view and one remote region. All of them are inside both.
#[derive(Debug)]
pub(crate) struct JobPart {
    pub(crate) view: View,
    pub(crate) remote: RemoteRegion,
    pub(crate) pieces: Arc<Vec<Piece>>,
}

/// Says whether a transfer may begin: false means later, an error fails it.
pub type Gate = Box<dyn Fn() -> Result<bool, String> + Send>;

pub(crate) struct Job {
    pub(crate) state: Arc<TransferState>,
    pub(crate) direction: Direction,
    pub(crate) parts: Vec<JobPart>,
    pub(crate) announcement: Option<u64>,
    /// Sent behind its bytes, for the application of the peer.
    pub(crate) message: Option<Vec<u8>>,
    /// What it waits for before its first request.
    gate: Option<Gate>,
    pub(crate) bytes: u64,
    /// The next part, piece of it, and byte of the piece to post.
    next: (usize, usize, u64),
    /// Batches that are posted and not completed.
    pub(crate) posted: usize,
    /// Its end is announced to the peer: all of it is posted, and only the end of the link can stop
    /// it. The frame that announces it, if that was posted with it, ends there.
    pub(crate) counted: Option<Option<u64>>,
    pub(crate) failed: Option<TransferError>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job({}: {:?} of {} bytes)", self.state.id, self.direction, self.bytes)
    }
}

/// One request of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    pub(crate) sge: Sge,
}

impl Request {
    pub(crate) fn as_send(&self, number: u64, is_last: bool) -> SendRequest<'_> {
        SendRequest {
            signaled: is_last,
            ..SendRequest::new(number, self.operation, std::slice::from_ref(&self.sge))
        }
    }
}

impl Job {
    pub(crate) fn new(
        state: Arc<TransferState>,
        direction: Direction,
        parts: Vec<JobPart>,
        bytes: u64,
        announcement: Option<u64>,
        gate: Option<Gate>,
    ) -> Self {
        Self {
            state,
            direction,
            parts,
            announcement,
            gate,
            bytes,
            message: None,
            next: (0, 0, 0),
            posted: 0,
            counted: None,
            failed: None,
        }
    }

    /// Whether it may be posted. One that will never be has failed then.
    pub(crate) fn is_open(&mut self) -> bool {
        let Some(gate) = &self.gate else { return true };
        match gate() {
            Ok(false) if self.failed.is_none() => return false,
            Err(reason) => self.failed = Some(TransferError::Gate(reason)),
            Ok(_) => {}
        }
        self.gate = None;
        true
    }

    /// Whether all pieces are posted, or none will be any more.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.failed.is_some() || self.next.0 >= self.parts.len()
    }

    /// Appends requests for the next pieces, at most so many, until they have so many bytes.
    /// Returns their bytes.
    pub(crate) fn take_requests(&mut self, most: usize, most_bytes: u64, into: &mut Vec<Request>) -> u64 {
        let mut bytes = 0;
        while into.len() < most && bytes < most_bytes {
            let (part, piece, at) = self.next;
            let Some(found) = self.parts.get(part) else { break };
            let Some(&Piece { local, remote, len }) = found.pieces.get(piece) else {
                self.next = (part + 1, 0, 0);
                continue;
            };
            let now = (len - at).min(MAX_PIECE);
            into.push(request(self.direction, found, local + at, remote + at, now));
            bytes += now;
            self.next = if at + now == len { (part, piece + 1, 0) } else { (part, piece, at + now) };
        }
        // An end without pieces behind it is found now, not with an empty batch.
        while self.parts.get(self.next.0).is_some_and(|part| self.next.1 >= part.pieces.len()) {
            self.next = (self.next.0 + 1, 0, 0);
        }
        bytes
    }

    /// The result, for the application.
    pub(crate) fn result(&self) -> Result<Summary, TransferError> {
        let pieces = self.parts.iter().map(|part| part.pieces.len()).sum();
        self.failed.clone().map_or(Ok(Summary { bytes: self.bytes, pieces }), Err)
    }
}

fn request(direction: Direction, part: &JobPart, local: u64, remote: u64, len: u64) -> Request {
    // At most MAX_PIECE bytes.
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    let sge = Sge { addr: part.view.addr() + local, len, lkey: part.view.region().mr().lkey() };
    let remote = Remote { addr: part.remote.addr.wrapping_add(remote), rkey: part.remote.rkey };
    let operation = match direction {
        Direction::Write => Operation::Write(remote),
        Direction::Read => Operation::Read(remote),
    };
    Request { operation, sge }
}
