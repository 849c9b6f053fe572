//! What descriptors name: memory, ranks, counters and signals; and the check of a descriptor.
//!
//! A descriptor that names what does not exist never becomes a work request.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use nobounce::RemoteRegion;

use crate::descriptor::{Action, Descriptor, Malformed, Place, Signal, Transfer};
use crate::words::STRIDE;

/// The longest message of a queue pair, unless the device has less.
const MAX_MESSAGE: u32 = 1 << 31;

/// Memory of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalMemory {
    /// The address in work requests.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The key of the registration.
    pub lkey: u32,
}

/// Why a descriptor was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Refusal {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("rank {rank} does not exist: there are {ranks}")]
    Rank { rank: u32, ranks: usize },
    #[error("memory {handle} is not registered here")]
    LocalHandle { handle: u16 },
    #[error("memory {handle} is not registered at rank {rank}")]
    RemoteHandle { handle: u16, rank: u32 },
    #[error("{len} bytes at offset {offset} leave the {of} bytes of memory {handle}")]
    Range { handle: u16, offset: u64, len: u64, of: u64 },
    #[error("offset {offset} of memory {handle} is not a multiple of 8, as an atomic needs")]
    Misaligned { handle: u16, offset: u64 },
    #[error("{len} bytes are more than a message of this device has: {most}")]
    Length { len: u32, most: u32 },
    #[error("the queue pair refused it: {reason}")]
    Post { reason: String },
    #[error("a value has 1 to 8 bytes, not {len}")]
    ValueLength { len: u32 },
    #[error("counter {index} does not exist: there are {counters}")]
    Counter { index: u16, counters: usize },
    #[error("signal {index} does not exist: there are {signals}")]
    Signal { index: u16, signals: u64 },
    #[error("rank {rank} cannot be reached: {reason}")]
    Unreachable { rank: u32, reason: String },
}

/// Registered memory by handle. Proxies share it, and it may change while they run.
#[derive(Debug)]
pub struct Memory {
    local: Vec<Option<LocalMemory>>,
    /// Of each rank.
    remote: Vec<Vec<Option<RemoteRegion>>>,
}

impl Memory {
    /// Of so many ranks, which have registered nothing yet.
    #[must_use]
    pub fn new(ranks: usize) -> Self {
        Self { local: Vec::new(), remote: vec![Vec::new(); ranks] }
    }

    /// Names memory that all ranks have registered; `remote` is that of each rank.
    pub fn set(&mut self, handle: u16, local: LocalMemory, remote: impl IntoIterator<Item = RemoteRegion>) {
        place(&mut self.local, handle, Some(local));
        for (of_rank, region) in self.remote.iter_mut().zip(remote) {
            place(of_rank, handle, Some(region));
        }
    }

    /// The name stands for nothing from now on.
    pub fn clear(&mut self, handle: u16) {
        place(&mut self.local, handle, None);
        self.remote.iter_mut().for_each(|of_rank| place(of_rank, handle, None));
    }

    /// The lowest name from `first` on that stands for nothing.
    #[must_use]
    pub fn free_handle(&self, first: u16) -> Option<u16> {
        let is_free = |handle: &u16| self.local.get(usize::from(*handle)).is_none_or(Option::is_none);
        (first..=u16::MAX).find(is_free)
    }
}

fn place<T: Copy>(list: &mut Vec<Option<T>>, handle: u16, value: Option<T>) {
    let at = usize::from(handle);
    if list.len() <= at {
        list.resize(at + 1, None);
    }
    list[at] = value;
}

/// What descriptors of one proxy may name.
#[derive(Debug)]
pub struct Table {
    memory: Arc<RwLock<Memory>>,
    ranks: Vec<RankTable>,
    counters: usize,
    max_message: u32,
}

/// A rank, as descriptors name it.
#[derive(Clone, Debug, Default)]
pub struct RankTable {
    /// Its place in [`Memory`].
    pub at: usize,
    /// Its signals: of each channel, or one for all channels.
    pub signals: Vec<RemoteRegion>,
}

/// A checked data movement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Address and key here.
    pub local: (u64, u32),
    /// Address and key there.
    pub remote: (u64, u32),
    /// Bytes.
    pub len: u32,
}

impl Table {
    /// Of so many counters, and these ranks; this rank is one of them.
    #[must_use]
    pub fn new(memory: Arc<RwLock<Memory>>, ranks: Vec<RankTable>, counters: usize) -> Self {
        Self { memory, ranks, counters, max_message: MAX_MESSAGE }
    }

    fn memory(&self) -> RwLockReadGuard<'_, Memory> {
        // A change either happens or does not.
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same for a device whose messages have at most so many bytes.
    #[must_use]
    pub fn with_max_message(self, bytes: u32) -> Self {
        Self { max_message: bytes.min(MAX_MESSAGE), ..self }
    }

    /// How many counters a channel has.
    #[must_use]
    pub fn counters(&self) -> usize {
        self.counters
    }

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn rank(&self, rank: u32) -> Result<&RankTable, Refusal> {
        Ok(&self.ranks[self.index_of(rank)?])
    }

    /// Checks what the descriptor names, besides memory.
    pub(crate) fn check(&self, descriptor: &Descriptor) -> Result<(), Refusal> {
        let counters = self.counters;
        let named = match descriptor.action {
            Action::ResetCounter(counted) => Some(counted.index),
            Action::WriteBackCounter { index } => Some(index),
            _ => descriptor.counter.map(|counted| counted.index),
        };
        match named.filter(|index| usize::from(*index) >= counters) {
            Some(index) => Err(Refusal::Counter { index, counters }),
            None => Ok(()),
        }
    }

    /// The rank that the descriptor is about; the one that a failure of it is reported for.
    #[must_use]
    pub fn rank_of(action: &Action) -> Option<u32> {
        match action {
            Action::Get(moved) | Action::Put(moved, _) => Some(moved.remote.rank),
            Action::PutValue { to, .. } | Action::Add { to, .. } => Some(to.rank),
            Action::Flush { rank } => Some(*rank),
            Action::ResetCounter(_) | Action::WriteBackCounter { .. } | Action::ResetSignal { .. } => None,
        }
    }

    /// Address and key of a place with that many bytes.
    pub(crate) fn place(&self, place: Place, len: u64) -> Result<(u64, u32), Refusal> {
        let Place { rank, handle, offset } = place;
        let at = self.rank(rank)?.at;
        let memory = self.memory();
        let memory = memory.remote.get(at).and_then(|of_rank| of_rank.get(usize::from(handle)));
        let memory = memory.copied().flatten().ok_or(Refusal::RemoteHandle { handle, rank })?;
        Ok((inside(handle, offset, len, memory.len, memory.addr)?, memory.rkey))
    }

    /// The same for a word that an atomic changes.
    pub(crate) fn word(&self, place: Place) -> Result<(u64, u32), Refusal> {
        let (addr, key) = self.place(place, 8)?;
        if addr % 8 == 0 {
            return Ok((addr, key));
        }
        Err(Refusal::Misaligned { handle: place.handle, offset: place.offset })
    }

    pub(crate) fn transfer(&self, moved: &Transfer) -> Result<Moved, Refusal> {
        let &Transfer { local_handle: handle, local_offset, remote, len } = moved;
        if len > self.max_message {
            return Err(Refusal::Length { len, most: self.max_message });
        }
        let remote = self.place(remote, u64::from(len))?;
        let local = self.memory().local.get(usize::from(handle)).copied().flatten();
        let local = local.ok_or(Refusal::LocalHandle { handle })?;
        let addr = inside(handle, local_offset, u64::from(len), local.len, local.addr)?;
        Ok(Moved { local: (addr, local.lkey), remote, len })
    }

    /// Address and key of a signal of that rank, for descriptors of a channel.
    pub(crate) fn signal(&self, rank: u32, channel: usize, signal: Signal) -> Result<(u64, u32), Refusal> {
        let all = &self.rank(rank)?.signals;
        let memory = all.get(channel).or(all.last());
        let signals = memory.map_or(0, |memory| memory.len / STRIDE as u64);
        match memory.filter(|_| u64::from(signal.index) < signals) {
            Some(memory) => Ok((memory.addr + STRIDE as u64 * u64::from(signal.index), memory.rkey)),
            None => Err(Refusal::Signal { index: signal.index, signals }),
        }
    }

    /// A registered place of that rank.
    pub(crate) fn any_place(&self, rank: usize) -> Option<(u64, u32)> {
        let rank = self.ranks.get(rank)?;
        let memory = self.memory();
        let registered = memory.remote.get(rank.at)?.iter().copied().flatten().next();
        let region = registered.or(rank.signals.first().copied())?;
        Some((region.addr, region.rkey))
    }

    /// The place of that rank in a list of all.
    pub(crate) fn index_of(&self, rank: u32) -> Result<usize, Refusal> {
        let found = usize::try_from(rank).ok().filter(|at| *at < self.ranks.len());
        found.ok_or(Refusal::Rank { rank, ranks: self.ranks.len() })
    }
}

/// The address of a range inside memory.
fn inside(handle: u16, offset: u64, len: u64, of: u64, addr: u64) -> Result<u64, Refusal> {
    let end = offset.checked_add(len).filter(|end| *end <= of);
    end.and_then(|_| addr.checked_add(offset)).ok_or(Refusal::Range { handle, offset, len, of })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::Counted;

    const LOCAL: LocalMemory = LocalMemory { addr: 0x2000, len: 50, lkey: 9 };
    const REMOTE: RemoteRegion = RemoteRegion { addr: 0x1000, len: 100, rkey: 7, closed: false };

    /// Memory 0 is registered here only, and memory 1 there only.
    fn table() -> Table {
        let signals = RemoteRegion { addr: 0x9000, len: 4 * STRIDE as u64, rkey: 8, closed: false };
        let memory = Memory { local: vec![Some(LOCAL)], remote: vec![Vec::new(), vec![None, Some(REMOTE)]] };
        let other = RankTable { at: 1, signals: vec![signals] };
        Table::new(Arc::new(RwLock::new(memory)), vec![RankTable::default(), other], 3)
    }

    #[test]
    fn memory_is_named_until_it_is_cleared() {
        let memory = Arc::new(RwLock::new(Memory::new(2)));
        let table = Table::new(memory.clone(), vec![RankTable { at: 1, signals: Vec::new() }], 0);
        let to = Place { rank: 0, handle: 3, offset: 4 };
        let missing = Err(Refusal::RemoteHandle { handle: 3, rank: 0 });
        assert_eq!(table.place(to, 8), missing);
        let other = RemoteRegion { addr: 0x5000, ..REMOTE };
        memory.write().unwrap().set(3, LOCAL, [other, REMOTE]);
        assert_eq!(table.place(to, 8), Ok((0x1004, 7)));
        assert_eq!(memory.read().unwrap().free_handle(3), Some(4));
        memory.write().unwrap().clear(3);
        assert_eq!(table.place(to, 8), missing);
        assert_eq!(memory.read().unwrap().free_handle(3), Some(3));
    }

    #[test]
    fn ranges_and_handles_are_checked() {
        let table = table();
        let to = |offset| Place { rank: 1, handle: 1, offset };
        assert_eq!(table.place(to(60), 40), Ok((0x103c, 7)));
        for (offset, len) in [(60, 41), (101, 0), (u64::MAX, 2), (1, u64::MAX)] {
            assert_eq!(table.place(to(offset), len), Err(Refusal::Range { handle: 1, offset, len, of: 100 }));
        }
        assert_eq!(table.place(Place { rank: 2, ..to(0) }, 1), Err(Refusal::Rank { rank: 2, ranks: 2 }));
        assert_eq!(
            table.place(Place { handle: 0, ..to(0) }, 1),
            Err(Refusal::RemoteHandle { handle: 0, rank: 1 })
        );
        assert_eq!(
            table.place(Place { rank: 0, ..to(0) }, 1),
            Err(Refusal::RemoteHandle { handle: 1, rank: 0 })
        );
        assert_eq!(table.word(to(8)), Ok((0x1008, 7)));
        assert_eq!(table.word(to(9)), Err(Refusal::Misaligned { handle: 1, offset: 9 }));
        let moved = Transfer { local_handle: 0, local_offset: 10, remote: to(0), len: 40 };
        let checked = Moved { local: (0x200a, 9), remote: (0x1000, 7), len: 40 };
        assert_eq!(table.transfer(&moved), Ok(checked));
        let long = Transfer { local_offset: 11, ..moved };
        assert_eq!(table.transfer(&long), Err(Refusal::Range { handle: 0, offset: 11, len: 40, of: 50 }));
        let unknown = Transfer { local_handle: 1, ..moved };
        assert_eq!(table.transfer(&unknown), Err(Refusal::LocalHandle { handle: 1 }));
        let table = table.with_max_message(39);
        assert_eq!(table.transfer(&moved), Err(Refusal::Length { len: 40, most: 39 }));
    }

    #[test]
    fn counters_and_signals_are_checked() {
        let table = table();
        let signal = |index| Signal { index, add: 1 };
        assert_eq!(table.signal(1, 0, signal(3)), Ok((0x9000 + 192, 8)));
        assert_eq!(table.signal(1, 0, signal(4)), Err(Refusal::Signal { index: 4, signals: 4 }));
        assert_eq!(table.signal(0, 0, signal(0)), Err(Refusal::Signal { index: 0, signals: 0 }));
        // One region serves all channels; otherwise each has its own.
        assert_eq!(table.signal(1, 2, signal(3)), Ok((0x9000 + 192, 8)));
        let second = RemoteRegion { addr: 0xa000, len: STRIDE as u64, rkey: 6, closed: false };
        let mut table = table;
        table.ranks[1].signals.push(second);
        assert_eq!(table.signal(1, 1, signal(0)), Ok((0xa000, 6)));
        assert_eq!(table.signal(1, 1, signal(1)), Err(Refusal::Signal { index: 1, signals: 1 }));
        let counted = |index| Counted { index, is_written_back: true };
        for action in [Action::ResetCounter(counted(3)), Action::WriteBackCounter { index: 3 }] {
            let refused = table.check(&Descriptor { action, counter: None });
            assert_eq!(refused, Err(Refusal::Counter { index: 3, counters: 3 }));
        }
        let flush = |counter| Descriptor { action: Action::Flush { rank: 1 }, counter };
        assert_eq!(table.check(&flush(Some(counted(2)))), Ok(()));
        assert!(table.check(&flush(Some(counted(3)))).is_err());
    }
}
