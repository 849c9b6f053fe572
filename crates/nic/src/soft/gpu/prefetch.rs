//! Prefetch by the copy engine: the bytes of a message are fetched ahead into pinned chunks, from
//! which the link takes them.
//!
//! A [`Prefetch`] serves one queue pair and one kind of message: its own requests, or its peer's
//! READs. It holds the message being sent, and the beginning of the next one. It never blocks: a
//! packet waits until its bytes are fetched.

use std::collections::VecDeque;
use std::sync::Arc;

use nobounce_memory::SharedChunk;
use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{CopyError, PinnedChunk, Rows};
use nobounce_protocol::wire::{BTH_LEN, ICRC_LEN};

use crate::links::now_ns;
use crate::soft::gpu::copier::{CHUNK, Copier, CopyWork, Copying, Job};
use crate::soft::gpu::standstill::Standstill;

/// A copy that takes longer than this is blocked: microseconds are usual, milliseconds on a busy
/// machine. CUDA delays all copies of a process while a thread loads a kernel for the first time or
/// frees memory. The delay lasts until the running kernels end, and those may wait for this device.
const LATE_NS: u64 = 20_000_000;
/// A copy that takes longer than this, without an alternative, has failed.
pub(crate) const STUCK_NS: u64 = 10_000_000_000;
/// Fetches in flight or ready.
const AHEAD: usize = 3;
/// The first fetch of a message: short, so that its first packet leaves early; the next ones grow
/// to whole chunks. All path MTUs divide it, so that no payload spans two chunks.
const FIRST: usize = 64 << 10;
const GROWTH: usize = 4;

/// The message that bytes belong to. The bytes of one message may be retransmitted; those of
/// another never match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A posted request.
    Request(u64),
    /// A peer's READ: its key, and the address that PSN 0 would have.
    Read(u32, u64),
}

/// Requested bytes.
#[derive(Debug)]
pub(crate) struct Want<'a> {
    pub(crate) origin: Origin,
    /// Their offset in the message.
    pub(crate) at: u64,
    pub(crate) len: usize,
    /// How many more bytes of the message are contiguous behind them.
    pub(crate) behind: u64,
    pub(crate) memory: &'a Arc<GpuMemory>,
    pub(crate) copier: &'a Arc<Copier>,
    /// Their offset in the memory.
    pub(crate) offset: usize,
    /// Whether loads through the window are possible instead.
    pub(crate) can_load: bool,
    /// Their layout in the chunk.
    pub(crate) rows: Rows,
}

/// The rows of payload in a chunk: each with room for a base transport header before it and an ICRC
/// behind it. So packets from the middle of a message are built in place, one right behind the
/// other.
pub(crate) const fn rows(mtu: usize) -> Rows {
    Rows { width: mtu, pitch: BTH_LEN + mtu + ICRC_LEN, lead: BTH_LEN }
}

/// Contiguous payload, for a same-host peer that reads it in place; before it the most that headers
/// ever take.
pub(crate) const IN_A_ROW: Rows = Rows { width: CHUNK, pitch: CHUNK + 64, lead: 64 };

/// The location of fetched payload.
#[derive(Clone, Debug)]
pub(crate) struct ChunkSlice {
    pub(crate) chunk: SharedChunk,
    /// Its offset in the chunk.
    pub(crate) at: usize,
    /// Contiguous bytes from there: all that were fetched with it, or one packet's payload.
    pub(crate) row: usize,
    /// Whether there is room for the shortest header before it, and for an ICRC behind it.
    pub(crate) has_gaps: bool,
}

/// The result of a request for bytes.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// The bytes are there.
    Ready(ChunkSlice),
    /// Retry.
    Pending,
    /// The copy engine is blocked: load them.
    Late,
    /// They cannot be loaded, and the copy engine has been blocked for too long.
    Stuck(Standstill),
    /// No chunk was free: retry, after chunks were reclaimed from another queue pair.
    Starved,
    /// They cannot be read.
    Failed(CopyError),
    /// The context of their memory was destroyed.
    Gone,
}

#[derive(Debug)]
enum FetchState {
    /// With its start time.
    UnderWay(Copying, u64),
    Here(PinnedChunk),
}

#[derive(Debug)]
struct Fetch {
    origin: Origin,
    at: u64,
    len: usize,
    rows: Rows,
    state: Option<FetchState>,
}

impl Fetch {
    fn end(&self) -> u64 {
        self.at + self.len as u64
    }

    /// How long it has been in flight.
    fn age(&self) -> u64 {
        match self.state {
            Some(FetchState::UnderWay(_, since)) => now_ns().saturating_sub(since),
            _ => 0,
        }
    }

    /// The location of the payload that begins at `at`, in this chunk.
    fn slice(&self, chunk: &PinnedChunk, at: u64) -> ChunkSlice {
        let from = usize::try_from(at - self.at).unwrap_or(0);
        let row = (self.rows.width - from % self.rows.width).min(self.len - from);
        ChunkSlice {
            chunk: chunk.share(),
            at: self.rows.place_of(from),
            row,
            has_gaps: self.rows != IN_A_ROW,
        }
    }

    fn holds(&self, origin: Origin, at: u64) -> bool {
        self.origin == origin && (self.at..self.end()).contains(&at)
    }
}

/// Prefetched bytes of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct Prefetch {
    fetches: VecDeque<Fetch>,
    /// Length of the next fetch.
    next_len: usize,
}

impl Prefetch {
    /// Whether it holds bytes of that message.
    pub(crate) fn is_of(&self, origin: Origin) -> bool {
        self.fetches.iter().any(|fetch| fetch.origin == origin)
    }

    /// Whether there is room for bytes of the next message, because all of this one, which ends at
    /// `end`, were fetched.
    pub(crate) fn has_room_behind(&self, origin: Origin, end: u64) -> bool {
        self.fetches.len() < AHEAD
            && self.fetches.back().is_some_and(|last| last.origin == origin && last.end() >= end)
    }

    /// Whether there is room for bytes of messages behind this one, all of which, up to `end`, were
    /// fetched.
    pub(crate) fn has_room_after(&self, origin: Origin, end: u64) -> bool {
        self.fetches.len() < AHEAD
            && self.fetches.iter().any(|fetch| fetch.origin == origin && fetch.end() >= end)
    }

    /// Whether the byte at `at` of that message was fetched or is being fetched.
    pub(crate) fn covers(&self, origin: Origin, at: u64) -> bool {
        self.fetches.iter().any(|fetch| fetch.holds(origin, at))
    }

    /// How many bytes from `at` on are ready.
    pub(crate) fn ready_from(&self, origin: Origin, at: u64) -> u64 {
        self.fetches
            .iter()
            .find(|fetch| fetch.holds(origin, at))
            .filter(|fetch| matches!(fetch.state, Some(FetchState::Here(_))))
            .map_or(0, |fetch| fetch.end() - at)
    }

    /// The location of the payload at `at` of that message, if it is ready.
    pub(crate) fn here(&self, origin: Origin, at: u64) -> Option<ChunkSlice> {
        let fetch = self.fetches.iter().find(|fetch| fetch.holds(origin, at))?;
        let Some(FetchState::Here(chunk)) = &fetch.state else { return None };
        Some(fetch.slice(chunk, at))
    }

    /// Number of fetches.
    pub(crate) fn len(&self) -> usize {
        self.fetches.len()
    }

    /// Drops the bytes that would be sent last.
    pub(crate) fn give_up_last(&mut self) {
        self.fetches.pop_back();
    }

    /// Drops everything. Copies in flight go on; their chunks are reused when they are over.
    pub(crate) fn clear(&mut self) {
        self.fetches.clear();
    }

    /// All of that message up to `end` is sent. A retransmission fetches its bytes again. (Bytes
    /// behind `end` may be the beginning of the next message: the pieces of a long READ look like
    /// one.)
    pub(crate) fn finish(&mut self, origin: Origin, end: u64) {
        self.fetches.retain(|fetch| fetch.origin != origin || fetch.end() > end);
    }

    /// Starts to prefetch bytes. An error is reported when the bytes are requested.
    pub(crate) fn prefetch(&mut self, want: &Want<'_>) {
        if !(want.can_load && want.copier.is_late()) {
            self.fetch_ahead(want);
        }
    }

    pub(crate) fn get(&mut self, want: &Want<'_>) -> Fetched {
        if want.can_load && want.copier.is_late() {
            return Fetched::Late;
        }
        // Drop earlier messages and packets; a retransmitted packet starts anew.
        while self
            .fetches
            .front()
            .is_some_and(|first| first.origin != want.origin || first.end() <= want.at || want.at < first.at)
        {
            self.fetches.pop_front();
        }
        self.fetch_ahead(want);
        let Some(fetch) = self.fetches.front_mut() else { return Fetched::Starved };
        match settle(&mut fetch.state) {
            Ok(Some(chunk)) => Fetched::Ready(fetch.slice(&chunk, want.at)),
            Ok(None) => match fetch.age() {
                age if want.can_load && age > LATE_NS => {
                    want.copier.found_late();
                    Fetched::Late
                }
                age if age > STUCK_NS => Fetched::Stuck(want.copier.standstill()),
                _ => Fetched::Pending,
            },
            Err(error) => {
                self.clear();
                Fetched::Failed(error)
            }
        }
    }

    /// Starts fetches until enough are in flight, from the first wanted byte that none covers.
    fn fetch_ahead(&mut self, want: &Want<'_>) {
        let end = want.at + want.len as u64 + want.behind;
        let mut at = want.at;
        match self.fetches.iter().rfind(|fetch| fetch.origin == want.origin) {
            Some(last) => at = at.max(last.end()),
            None => self.next_len = FIRST,
        }
        while at < end && self.fetches.len() < AHEAD {
            let Some(chunk) = want.copier.take_fetch_chunk() else { return };
            let len = usize::try_from(end - at).unwrap_or(CHUNK).min(self.next_len);
            let offset = want.offset + usize::try_from(at - want.at).unwrap_or(0);
            let rows = want.rows;
            let (work, memory) = (CopyWork::Fetch(rows), want.memory.clone());
            let fetching = want.copier.start(Job { work, memory, offset, len, chunk });
            let state = Some(FetchState::UnderWay(fetching, now_ns()));
            self.fetches.push_back(Fetch { origin: want.origin, at, len, rows, state });
            self.next_len = (self.next_len * GROWTH).min(CHUNK);
            at += len as u64;
        }
    }
}

/// The chunk of a fetch, if it is over.
fn settle(state: &mut Option<FetchState>) -> Result<Option<PinnedChunk>, CopyError> {
    if let Some(FetchState::UnderWay(fetching, _)) = state {
        match fetching.take() {
            Some(chunk) => *state = Some(FetchState::Here(chunk?)),
            None => return Ok(None),
        }
    }
    Ok(match state {
        Some(FetchState::Here(chunk)) => Some(chunk.clone()),
        _ => None,
    })
}
