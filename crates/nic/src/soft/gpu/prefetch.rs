//! Prefetch by the copy engine: the bytes of messages are fetched ahead into pinned chunks, from
//! which the link takes them.
//!
//! A [`Prefetch`] serves one queue pair and one kind of message: its own requests, or its peer's
//! READs. A long message takes several fetches; short ones that wait behind each other share one,
//! because a fetch costs more than the bytes of a page. It never blocks: a packet waits until its
//! bytes are fetched.

use std::collections::VecDeque;
use std::sync::Arc;

use nobounce_memory::SharedChunk;
use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{CopyError, GatherPart, PinnedChunk, Rows};
use nobounce_protocol::wire::{BTH_LEN, ICRC_LEN};

use crate::links::now_ns;
use crate::soft::gpu::copier::{CHUNK, Copier, CopyWork, Copying, FETCH_CHUNK, Job};
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
/// Messages of one fetch. CUDA takes 0.8 us for each of 32, 0.7 us for each of 128 (an H200).
const MOST_PARTS: usize = 32;
/// Parts begin at multiples of this, a cache line: a same-host peer reads them in place.
const PART_ALIGN: usize = 64;

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
    /// The offset of the message's end.
    pub(crate) end: u64,
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

/// Contiguous bytes of one message in a chunk.
#[derive(Clone, Copy, Debug)]
struct Part {
    origin: Origin,
    at: u64,
    len: usize,
    /// Where its rows begin in the chunk.
    base: usize,
    /// Whether the message ends with it.
    is_last: bool,
}

impl Part {
    fn end(&self) -> u64 {
        self.at + self.len as u64
    }

    fn holds(&self, origin: Origin, at: u64) -> bool {
        self.origin == origin && (self.at..self.end()).contains(&at)
    }
}

/// Bytes that are fetched together, into one chunk.
#[derive(Debug)]
struct Fetch {
    /// In the order of the messages; never empty.
    parts: VecDeque<Part>,
    rows: Rows,
    state: Option<FetchState>,
}

impl Fetch {
    /// How long it has been in flight.
    fn age(&self) -> u64 {
        match self.state {
            Some(FetchState::UnderWay(_, since)) => now_ns().saturating_sub(since),
            _ => 0,
        }
    }

    /// The location of the payload that begins at `at` of this part's message.
    fn slice(&self, chunk: &PinnedChunk, part: &Part, at: u64) -> ChunkSlice {
        let from = usize::try_from(at - part.at).unwrap_or(0);
        let row = (self.rows.width - from % self.rows.width).min(part.len - from);
        let (at, has_gaps) = (part.base + self.rows.place_of(from), self.rows != IN_A_ROW);
        ChunkSlice { chunk: chunk.share(), at, row, has_gaps }
    }
}

/// Short messages of one memory, to be fetched together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    parts: VecDeque<Part>,
    sources: Vec<GatherPart>,
    first: Option<(Arc<GpuMemory>, Arc<Copier>, Rows)>,
    filled: usize,
}

impl Batch {
    /// Adds all bytes of a message; false if it must be fetched separately.
    fn push(&mut self, want: &Want<'_>) -> bool {
        let whole = want.len as u64 + want.behind;
        let Ok(len) = usize::try_from(whole) else { return false };
        let rest = len % want.rows.width;
        let room = len / want.rows.width * want.rows.pitch + if rest > 0 { want.rows.lead + rest } else { 0 };
        let fits = self.filled + room <= FETCH_CHUNK && self.parts.len() < MOST_PARTS;
        let is_whole = want.at + whole == want.end;
        let same = self
            .first
            .as_ref()
            .is_none_or(|(memory, _, rows)| Arc::ptr_eq(memory, want.memory) && *rows == want.rows);
        if len >= FIRST || !fits || !is_whole || !same || (want.can_load && want.copier.is_late()) {
            return false;
        }
        self.first.get_or_insert_with(|| (want.memory.clone(), want.copier.clone(), want.rows));
        let base = self.filled;
        self.parts.push_back(Part { origin: want.origin, at: want.at, len, base, is_last: true });
        self.sources.push(GatherPart { offset: want.offset, len, base });
        self.filled = (base + room).next_multiple_of(PART_ALIGN);
        true
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
    fn parts(&self) -> impl DoubleEndedIterator<Item = &Part> {
        self.fetches.iter().flat_map(|fetch| &fetch.parts)
    }

    fn find(&self, origin: Origin, at: u64) -> Option<(&Fetch, &Part)> {
        self.fetches
            .iter()
            .find_map(|fetch| Some((fetch, fetch.parts.iter().find(|part| part.holds(origin, at))?)))
    }

    /// Whether it holds bytes of that message.
    pub(crate) fn is_of(&self, origin: Origin) -> bool {
        self.parts().any(|part| part.origin == origin)
    }

    /// The last message of which bytes were fetched, and its end, if there is room for bytes of
    /// messages behind it.
    pub(crate) fn room_behind(&self) -> Option<(Origin, u64)> {
        let last = self.parts().next_back()?;
        (self.fetches.len() < AHEAD && last.is_last).then_some((last.origin, last.end()))
    }

    /// Whether the byte at `at` of that message was fetched or is being fetched.
    pub(crate) fn covers(&self, origin: Origin, at: u64) -> bool {
        self.find(origin, at).is_some()
    }

    /// How many bytes from `at` on are ready.
    pub(crate) fn ready_from(&self, origin: Origin, at: u64) -> u64 {
        self.find(origin, at)
            .filter(|(fetch, _)| matches!(fetch.state, Some(FetchState::Here(_))))
            .map_or(0, |(_, part)| part.end() - at)
    }

    /// The location of the payload at `at` of that message, if it is ready.
    pub(crate) fn here(&self, origin: Origin, at: u64) -> Option<ChunkSlice> {
        let (fetch, part) = self.find(origin, at)?;
        let Some(FetchState::Here(chunk)) = &fetch.state else { return None };
        Some(fetch.slice(chunk, part, at))
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
        for fetch in &mut self.fetches {
            fetch.parts.retain(|part| part.origin != origin || part.end() > end);
        }
        self.fetches.retain(|fetch| !fetch.parts.is_empty());
    }

    /// Whether the last message is fetched to its end.
    fn is_complete(&self) -> bool {
        self.parts().next_back().is_none_or(|part| part.is_last)
    }

    /// Prefetches a message behind those of the batch. False if there is no room for more. An error
    /// is reported when the bytes are requested.
    pub(crate) fn prefetch(&mut self, batch: &mut Batch, want: &Want<'_>) -> bool {
        if batch.push(want) {
            return true;
        }
        self.fetch_batch(std::mem::take(batch));
        let late = want.can_load && want.copier.is_late();
        if late || self.fetches.len() >= AHEAD || !self.is_complete() {
            return false;
        }
        if batch.push(want) {
            return true;
        }
        self.fetch_ahead(want);
        self.fetches.len() < AHEAD && self.is_complete()
    }

    /// Starts the fetch of a batch.
    pub(crate) fn fetch_batch(&mut self, batch: Batch) {
        let Batch { parts, sources, first: Some((memory, copier, rows)), .. } = batch else { return };
        if self.fetches.len() >= AHEAD {
            return;
        }
        let Some(chunk) = copier.take_fetch_chunk() else { return };
        let job = Job { work: CopyWork::Gather(rows, sources), memory, chunk };
        self.start(&copier, job, parts, rows);
    }

    fn start(&mut self, copier: &Copier, job: Job, parts: VecDeque<Part>, rows: Rows) {
        let state = Some(FetchState::UnderWay(copier.start(job), now_ns()));
        self.fetches.push_back(Fetch { parts, rows, state });
    }

    pub(crate) fn get(&mut self, want: &Want<'_>) -> Fetched {
        if want.can_load && want.copier.is_late() {
            return Fetched::Late;
        }
        self.drop_before(want.origin, want.at);
        self.fetch_ahead(want);
        let Some(fetch) = self.fetches.front_mut() else { return Fetched::Starved };
        match settle(&mut fetch.state) {
            Ok(Some(chunk)) => match fetch.parts.front() {
                Some(part) => Fetched::Ready(fetch.slice(&chunk, part, want.at)),
                None => Fetched::Pending,
            },
            Ok(None) => match fetch.age() {
                age if want.can_load && age > LATE_NS => {
                    want.copier.found_late();
                    Fetched::Late
                }
                age if age > STUCK_NS => Fetched::Stuck(want.copier.standstill()),
                _ => Fetched::Pending,
            },
            // The bytes of another message may be the reason.
            Err(_) if fetch.parts.len() > 1 => {
                self.clear();
                self.fetch_ahead(want);
                Fetched::Pending
            }
            Err(error) => {
                self.clear();
                Fetched::Failed(error)
            }
        }
    }

    /// Drops earlier messages and packets; a retransmitted packet starts anew.
    fn drop_before(&mut self, origin: Origin, at: u64) {
        while let Some(fetch) = self.fetches.front_mut() {
            while fetch.parts.front().is_some_and(|part| !part.holds(origin, at)) {
                fetch.parts.pop_front();
            }
            if !fetch.parts.is_empty() {
                return;
            }
            self.fetches.pop_front();
        }
    }

    /// Starts fetches until enough are in flight, from the first wanted byte that none covers.
    fn fetch_ahead(&mut self, want: &Want<'_>) {
        let end = want.at + want.len as u64 + want.behind;
        let mut at = want.at;
        let last = self.parts().rfind(|part| part.origin == want.origin).copied();
        match last {
            Some(last) => at = at.max(last.end()),
            None => self.next_len = FIRST,
        }
        while at < end && self.fetches.len() < AHEAD {
            let Some(chunk) = want.copier.take_fetch_chunk() else { return };
            let len = usize::try_from(end - at).unwrap_or(CHUNK).min(self.next_len);
            let offset = want.offset + usize::try_from(at - want.at).unwrap_or(0);
            let is_last = at + len as u64 >= want.end;
            let part = Part { origin: want.origin, at, len, base: 0, is_last };
            let (work, memory) = (CopyWork::Fetch { rows: want.rows, offset, len }, want.memory.clone());
            self.start(want.copier, Job { work, memory, chunk }, VecDeque::from([part]), want.rows);
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
