//! Gathering by the copy engine: the bytes of a message are fetched ahead into pinned chunks, from which the link takes them.
//!
//! A feed serves one queue pair and one kind of message, its own requests or its peer's READs: the message that is being
//! sent, and the beginning of the next one. It never waits: what is not there yet makes the packet wait.

use std::collections::VecDeque;
use std::sync::Arc;

use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{CopyError, PinnedChunk, Rows};
use nobounce_protocol::wire::{BTH_LEN, ICRC_LEN};

use crate::links::now_ns;
use crate::soft::gpu::copier::{CHUNK, Copier, Copying, Job, Work};
use crate::soft::gpu::standstill::Standstill;

/// A copy that is not over after this long waits for something: microseconds are usual, milliseconds on a busy machine. CUDA puts off all copies of a process while one of
/// its threads loads a kernel for the first time or frees memory, until the kernels that run are over; and these may wait for us.
const LATE_NS: u64 = 20_000_000;
/// A copy that takes longer than this, where there is no other way, has failed.
pub(crate) const STUCK_NS: u64 = 10_000_000_000;
/// Fetches under way or at hand.
const AHEAD: usize = 3;
/// The first fetch of a message: short, so that its first packet leaves early; the next ones grow to whole chunks. All path
/// MTUs divide it, so that no payload lies in two chunks.
const FIRST: usize = 64 << 10;
const GROWTH: usize = 4;

/// Which message the bytes belong to. The bytes of one message may be sent again; those of another are never taken for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A posted request.
    Request(u64),
    /// A peer's READ: its key, and the address that packet number 0 would have.
    Read(u32, u64),
}

/// Bytes asked for.
#[derive(Debug)]
pub(crate) struct Want<'a> {
    pub(crate) origin: Origin,
    /// Where they begin in the message.
    pub(crate) at: u64,
    pub(crate) len: usize,
    /// How many more bytes of the message lie right behind them.
    pub(crate) behind: u64,
    pub(crate) memory: &'a Arc<GpuMemory>,
    pub(crate) copier: &'a Arc<Copier>,
    /// Where they lie in the memory.
    pub(crate) offset: usize,
    /// Whether they could be loaded instead.
    pub(crate) can_load: bool,
    /// How they are to lie in the chunk.
    pub(crate) rows: Rows,
}

/// The rows in which payload lies in a chunk: with room for a base transport header before and an ICRC behind each, so that packets
/// from the middle of a message are built in place, one right behind the other.
pub(crate) const fn rows(mtu: usize) -> Rows {
    Rows { width: mtu, pitch: BTH_LEN + mtu + ICRC_LEN, lead: BTH_LEN }
}

/// All payload in a row, for a peer on this machine that reads it where it lies; before it as much as headers ever take.
pub(crate) const IN_A_ROW: Rows = Rows { width: CHUNK, pitch: CHUNK + 64, lead: 64 };

/// Where fetched payload lies.
#[derive(Clone, Debug)]
pub(crate) struct Lies {
    pub(crate) chunk: PinnedChunk,
    /// Where in the chunk it begins.
    pub(crate) at: usize,
    /// So many bytes follow in a row: as many as were fetched with it, or a packet's payload.
    pub(crate) row: usize,
    /// Whether there is room for the shortest header before it, and for an ICRC behind it.
    pub(crate) has_gaps: bool,
}

/// What came of asking.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// Here they are.
    Ready(Lies),
    /// Ask again.
    Pending,
    /// The copy engine does not get to it: load them.
    Late,
    /// They cannot be loaded, and the copy engine has not got to it for so long that it never will.
    Stuck(Standstill),
    /// No chunk was free: ask again, and take one from somebody meanwhile.
    Starved,
    /// They cannot be read.
    Failed(CopyError),
    /// The context of their memory was destroyed.
    Gone,
}

#[derive(Debug)]
enum State {
    /// And since when.
    UnderWay(Copying, u64),
    Here(PinnedChunk),
}

#[derive(Debug)]
struct Fetch {
    origin: Origin,
    at: u64,
    len: usize,
    rows: Rows,
    state: Option<State>,
}

impl Fetch {
    fn end(&self) -> u64 {
        self.at + self.len as u64
    }

    /// For how long it has been under way.
    fn age(&self) -> u64 {
        match self.state {
            Some(State::UnderWay(_, since)) => now_ns().saturating_sub(since),
            _ => 0,
        }
    }

    /// Where the payload lies that begins at `at`, in this chunk.
    fn lies(&self, chunk: &PinnedChunk, at: u64) -> Lies {
        let from = usize::try_from(at - self.at).unwrap_or(0);
        let row = (self.rows.width - from % self.rows.width).min(self.len - from);
        Lies { chunk: chunk.clone(), at: self.rows.place_of(from), row, has_gaps: self.rows != IN_A_ROW }
    }

    fn holds(&self, origin: Origin, at: u64) -> bool {
        self.origin == origin && (self.at..self.end()).contains(&at)
    }
}

/// Fetched bytes of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    fetches: VecDeque<Fetch>,
    /// How long the next fetch is.
    next_len: usize,
}

impl Feed {
    /// Whether it holds bytes of that message.
    pub(crate) fn is_of(&self, origin: Origin) -> bool {
        self.fetches.iter().any(|fetch| fetch.origin == origin)
    }

    /// Whether there is room for bytes of the next message, because all of this one, which ends at `end`, were fetched.
    pub(crate) fn has_room_behind(&self, origin: Origin, end: u64) -> bool {
        self.fetches.len() < AHEAD
            && self.fetches.back().is_some_and(|last| last.origin == origin && last.end() >= end)
    }

    /// Whether there is room for bytes of messages behind this one, all of which, up to `end`, were fetched.
    pub(crate) fn has_room_after(&self, origin: Origin, end: u64) -> bool {
        self.fetches.len() < AHEAD
            && self.fetches.iter().any(|fetch| fetch.origin == origin && fetch.end() >= end)
    }

    /// Whether the byte at `at` of that message was fetched or is being fetched.
    pub(crate) fn covers(&self, origin: Origin, at: u64) -> bool {
        self.fetches.iter().any(|fetch| fetch.holds(origin, at))
    }

    /// How many bytes from `at` on can be had at once.
    pub(crate) fn ready_from(&self, origin: Origin, at: u64) -> u64 {
        self.fetches
            .iter()
            .find(|fetch| fetch.holds(origin, at))
            .filter(|fetch| matches!(fetch.state, Some(State::Here(_))))
            .map_or(0, |fetch| fetch.end() - at)
    }

    /// Where the payload lies that begins at `at` of that message, if it is there.
    pub(crate) fn here(&self, origin: Origin, at: u64) -> Option<Lies> {
        let fetch = self.fetches.iter().find(|fetch| fetch.holds(origin, at))?;
        let Some(State::Here(chunk)) = &fetch.state else { return None };
        Some(fetch.lies(chunk, at))
    }

    /// How many fetches it has.
    pub(crate) fn len(&self) -> usize {
        self.fetches.len()
    }

    /// Gives up the bytes that would be sent last.
    pub(crate) fn give_up_last(&mut self) {
        self.fetches.pop_back();
    }

    /// Forgets everything. Copies under way go on; their chunks are used again when they are over.
    pub(crate) fn clear(&mut self) {
        self.fetches.clear();
    }

    /// All of that message up to `end` is sent. Should some of it have to be sent again, it is fetched again. (What lies behind may be the
    /// beginning of the next: the pieces of a long READ look like one.)
    pub(crate) fn finish(&mut self, origin: Origin, end: u64) {
        self.fetches.retain(|fetch| fetch.origin != origin || fetch.end() > end);
    }

    /// Starts to fetch bytes that will be wanted. Whether they can be had is seen when they are.
    pub(crate) fn prefetch(&mut self, want: &Want<'_>) {
        if !(want.can_load && want.copier.is_late()) {
            self.fetch_ahead(want);
        }
    }

    pub(crate) fn get(&mut self, want: &Want<'_>) -> Fetched {
        if want.can_load && want.copier.is_late() {
            return Fetched::Late;
        }
        // What belongs to messages or packets before this one is over; and a packet that is sent again begins anew.
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
            Ok(Some(chunk)) => Fetched::Ready(fetch.lies(&chunk, want.at)),
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

    /// Starts fetches until enough are there, from the first byte wanted that none covers.
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
            let (work, memory) = (Work::Fetch(rows), want.memory.clone());
            let fetching = want.copier.start(Job { work, memory, offset, len, chunk });
            let state = Some(State::UnderWay(fetching, now_ns()));
            self.fetches.push_back(Fetch { origin: want.origin, at, len, rows, state });
            self.next_len = (self.next_len * GROWTH).min(CHUNK);
            at += len as u64;
        }
    }
}

/// The chunk of a fetch, if it is over.
fn settle(state: &mut Option<State>) -> Result<Option<PinnedChunk>, CopyError> {
    if let Some(State::UnderWay(fetching, _)) = state {
        match fetching.take() {
            Some(chunk) => *state = Some(State::Here(chunk?)),
            None => return Ok(None),
        }
    }
    Ok(match state {
        Some(State::Here(chunk)) => Some(chunk.clone()),
        _ => None,
    })
}
