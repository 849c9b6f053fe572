//! Operations on one queue pair of a connection.

use std::ops::Range;

use nobounce_nic::any::{self, Mr, Qp};
use nobounce_nic::work::{Operation, RecvRequest, Remote, SendRequest, Sge, WorkKind};

use crate::connection::Connection;
use crate::region::{Region, RemoteRegion};
use crate::tickets::Ticket;

/// Bytes of an atomic operation.
const WORD: u64 = 8;
/// Up to this many bytes are sent inline, if the hardware NIC supports it; perftest uses the same
/// limit.
const MOST_INLINE: usize = 220;

/// Why an operation was not posted. The connection is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The local bytes are not inside the region.
    #[error("bytes {}..{} are not inside the local region of {region} bytes", range.start, range.end)]
    LocalRange {
        /// The requested range.
        range: Range<usize>,
        /// Length of the region.
        region: usize,
    },
    /// The remote bytes are not inside the peer's region.
    #[error("{len} bytes at offset {offset} are not inside the peer's region of {region} bytes")]
    RemoteRange {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Length of the peer's region.
        region: u64,
    },
    /// The peer's memory is on a GPU that its NIC cannot reach.
    #[error(
        "the peer's region is staged GPU memory: its hardware NIC cannot access it, so only the peer's own requests may use it. \
         Use SEND, let the peer write or read, or register host memory there (the region's path gives the reason at the peer)"
    )]
    RemoteClosed,
    /// Atomics need an aligned 8-byte word.
    #[error("atomic address {addr:#x} is not 8-byte aligned")]
    Misaligned {
        /// The remote address.
        addr: u64,
    },
    /// Too many operations are in flight or unclaimed.
    #[error(
        "{count} operations are pending or have unclaimed results: call wait, wait_any or poll before posting more"
    )]
    Unclaimed {
        /// How many.
        count: usize,
    },
    /// The device refused; most often because the queue is full.
    #[error(transparent)]
    Device(#[from] any::PostError),
}

impl PostError {
    /// Whether to wait for an earlier operation and try again.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Unclaimed { .. } => true,
            Self::Device(error) => error.is_full(),
            _ => false,
        }
    }
}

/// One queue pair of a connection. Operations of one lane execute in order; lanes are independent.
#[derive(Clone, Copy, Debug)]
pub struct Lane<'a> {
    connection: &'a Connection,
    index: usize,
}

impl<'a> Lane<'a> {
    pub(crate) fn new(connection: &'a Connection, index: usize) -> Self {
        Self { connection, index }
    }

    /// Its index in the connection.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The underlying queue pair.
    pub fn qp(&self) -> &'a Qp {
        self.connection.qp(self.index)
    }

    /// Copies the bytes `range` of `local` to `offset` of the peer's region.
    ///
    /// # Errors
    /// See [`PostError`]; the same applies to all operations.
    pub fn write(
        &self,
        local: &Region,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<Ticket, PostError> {
        let sge = local_bytes(local, range)?;
        self.send_out(Operation::Write(remote_bytes(remote, offset, sge.len.into())?), local, sge)
    }

    /// As [`write`](Self::write), and completes one of the peer's receives with `immediate`.
    #[allow(missing_docs)]
    pub fn write_imm(
        &self,
        local: &Region,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
        immediate: u32,
    ) -> Result<Ticket, PostError> {
        let sge = local_bytes(local, range)?;
        let operation = Operation::WriteImmediate(remote_bytes(remote, offset, sge.len.into())?, immediate);
        self.send_out(operation, local, sge)
    }

    /// Fetches bytes at `offset` of the peer's region into `range` of `local`.
    pub fn read(
        &self,
        local: &Region,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<Ticket, PostError> {
        let sge = local_bytes(local, range)?;
        self.post(Operation::Read(remote_bytes(remote, offset, sge.len.into())?), sge)
    }

    /// Sends the bytes `range` of `local` to the next receive that the peer has posted.
    pub fn send(&self, local: &Region, range: Range<usize>) -> Result<Ticket, PostError> {
        self.send_out(Operation::Send, local, local_bytes(local, range)?)
    }

    /// As [`send`](Self::send), with immediate data for the peer.
    pub fn send_imm(&self, local: &Region, range: Range<usize>, immediate: u32) -> Result<Ticket, PostError> {
        self.send_out(Operation::SendImmediate(immediate), local, local_bytes(local, range)?)
    }

    /// Adds to the word at `offset` of the peer's region; its old value goes to `at` of `local`.
    pub fn fetch_add(
        &self,
        local: &Region,
        at: usize,
        remote: &RemoteRegion,
        offset: u64,
        add: u64,
    ) -> Result<Ticket, PostError> {
        let sge = local_word(local, at)?;
        self.post(Operation::FetchAdd { remote: remote_word(remote, offset)?, add }, sge)
    }

    /// Stores `swap` in the word at `offset` of the peer's region if it equals `compare`; its old
    /// value goes to `at` of `local`.
    pub fn compare_swap(
        &self,
        local: &Region,
        at: usize,
        remote: &RemoteRegion,
        offset: u64,
        compare: u64,
        swap: u64,
    ) -> Result<Ticket, PostError> {
        let sge = local_word(local, at)?;
        self.post(Operation::CompareSwap { remote: remote_word(remote, offset)?, compare, swap }, sge)
    }

    /// Posts a receive. The peer's next SEND on this lane goes to `range` of `local`. Its next
    /// WRITE with immediate completes the receive without touching the range (which may be empty).
    pub fn recv(&self, local: &Region, range: Range<usize>) -> Result<Ticket, PostError> {
        let sge = local_bytes(local, range)?;
        let post = |qp: &Qp, wr_id| qp.post_recv(&RecvRequest { wr_id, sges: list(&sge) });
        self.connection.open(self.index, WorkKind::Receive, post)
    }

    /// Posts a request that sends bytes of a region. Short messages go to a hardware NIC inline,
    /// which saves its DMA read.
    fn send_out(&self, op: Operation, local: &Region, sge: Sge) -> Result<Ticket, PostError> {
        let (len, qp) = (sge.len as usize, self.qp());
        let is_short = len > 0 && len <= MOST_INLINE.min(qp.limits().inline);
        // Refuse a region of another device as for longer messages, though inline data needs no
        // key.
        let is_ours = matches!((qp, local.mr()), (Qp::Hard(qp), Mr::Hard(mr)) if mr.is_known_to(qp));
        if is_short && is_ours && !local.is_gpu() {
            let mut room = [0; MOST_INLINE];
            let bytes = &mut room[..len];
            let at = usize::try_from(sge.addr - local.addr()).unwrap_or(usize::MAX);
            // The device reports missing memory.
            if local.read_at(at, bytes).is_ok() {
                let post = |qp: &Qp, wr_id| qp.post_send(&SendRequest::inline(wr_id, op, bytes));
                return self.connection.open(self.index, op.kind(), post);
            }
        }
        self.post(op, sge)
    }

    fn post(&self, op: Operation, sge: Sge) -> Result<Ticket, PostError> {
        let post = |qp: &Qp, wr_id| qp.post_send(&SendRequest::new(wr_id, op, list(&sge)));
        self.connection.open(self.index, op.kind(), post)
    }
}

/// An empty range has no list: then the key is not checked.
fn list(sge: &Sge) -> &[Sge] {
    if sge.len == 0 { &[] } else { std::slice::from_ref(sge) }
}

fn local_bytes(local: &Region, range: Range<usize>) -> Result<Sge, PostError> {
    if range.start > range.end || range.end > local.len() {
        return Err(PostError::LocalRange { range, region: local.len() });
    }
    let len = range.end - range.start;
    let len = u32::try_from(len)
        .map_err(|_| any::PostError::from(nobounce_nic::work::PostError::TooLong(len as u64)))?;
    Ok(Sge { addr: local.addr() + range.start as u64, len, lkey: local.mr().lkey() })
}

fn local_word(local: &Region, at: usize) -> Result<Sge, PostError> {
    local_bytes(local, at..at.saturating_add(8))
}

fn remote_bytes(remote: &RemoteRegion, offset: u64, len: u64) -> Result<Remote, PostError> {
    if remote.closed && len > 0 {
        return Err(PostError::RemoteClosed);
    }
    // The peer's values may be invalid: no sum may overflow.
    let inside = offset.checked_add(len).is_some_and(|end| end <= remote.len);
    match remote.addr.checked_add(offset).filter(|_| inside) {
        Some(addr) => Ok(Remote { addr, rkey: remote.rkey }),
        None => Err(PostError::RemoteRange { offset, len, region: remote.len }),
    }
}

fn remote_word(remote: &RemoteRegion, offset: u64) -> Result<Remote, PostError> {
    let word = remote_bytes(remote, offset, WORD)?;
    if word.addr.is_multiple_of(WORD) { Ok(word) } else { Err(PostError::Misaligned { addr: word.addr }) }
}
