//! The memory behind a region, and the way bytes take into and out of it.

use std::sync::Arc;

use nobounce_memory::gpu::{Gone, GpuMemory, GpuWindow};
use nobounce_memory::path::{Mechanism, Path};
use nobounce_memory::{AccessError, Sink, Source, Window};
use nobounce_protocol::wire::Psn;

use crate::soft::crc::extend_crc;
use crate::soft::gpu::copiers::CopierIndex;
use crate::soft::gpu::staging::{Owner, Stage, StageError};
use crate::soft::tally::Route;

/// Messages up to this many bytes are loaded although others wait behind them: it takes no longer than telling the copy engine
/// (an H200: 1.4 us for 1 KiB, 1.8 us).
const LOAD_IN_STREAM: u64 = 1024;

/// The message that bytes are gathered for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    /// Its bytes, from the first that is known on.
    pub(crate) len: u64,
    /// Whether nothing waits behind it.
    pub(crate) alone: bool,
}

impl Message {
    /// One whose bytes are loaded wherever they can be, however many there are.
    pub(crate) const LOADED: Self = Self { len: 0, alone: true };
}

/// Memory behind a region.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Host(Window),
    Gpu(GpuTarget),
}

/// GPU memory behind a region.
#[derive(Clone, Debug)]
pub(crate) struct GpuTarget {
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) copier: CopierIndex,
    /// Messages up to this many bytes are gathered by loads through the window.
    crossover: u64,
    /// Whether bytes are stored through the window.
    pub(crate) stores: bool,
    /// Whether what the copy engine fetched is copied once more.
    pub(crate) staged_out: bool,
}

/// Why bytes could not be loaded right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    Access(AccessError),
    /// Their owner has freed them.
    Ended,
    /// They must be fetched by the copy engine.
    Fetch,
}

/// Why bytes could not be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlaceError {
    Access(AccessError),
    /// Their owner has freed the memory.
    Ended,
    Stage(StageError),
}

/// Where bytes were placed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub(crate) route: Route,
    /// The step they wait for.
    pub(crate) ticket: Option<u64>,
}

impl Placed {
    fn after(ticket: u64, route: Route) -> Self {
        Self { route, ticket: Some(ticket) }
    }
}

impl GpuTarget {
    pub(crate) fn new(memory: Arc<GpuMemory>, copier: CopierIndex, crossover: usize) -> Self {
        let paths = memory.paths();
        let window = memory.window().is_some();
        Self {
            copier,
            crossover: if window && paths.outbound.is_direct() { crossover as u64 } else { 0 },
            stores: window && paths.inbound.is_direct(),
            staged_out: matches!(paths.outbound, Path::Staged(_)),
            memory,
        }
    }

    fn window(&self) -> Option<&GpuWindow> {
        self.memory.window()
    }

    /// Whether bytes can be gathered by loads.
    pub(crate) fn can_load(&self) -> bool {
        self.crossover > 0
    }

    /// Whether a message of so many bytes is gathered by loads: which is sooner there, but keeps the CPU busy all the while,
    /// so that where others wait behind it only the shortest are.
    pub(crate) fn loads(&self, message: Message) -> bool {
        let most = if message.alone { self.crossover } else { self.crossover.min(LOAD_IN_STREAM) };
        self.can_load() && message.len <= most
    }
}

/// Loads through the window and carries `crc` on over what was loaded: by way of the stack, for a window is not read twice.
fn load_crc(window: &GpuWindow, offset: usize, mut out: Sink<'_>, mut crc: u32) -> Result<u32, AccessError> {
    let mut bytes = [0; 1024];
    let mut done = 0;
    while done < out.len() {
        let piece = &mut bytes[..(out.len() - done).min(1024)];
        window.load(offset + done, &mut *piece)?;
        out.put(done, piece);
        crc = extend_crc(Some(crc), piece).unwrap_or(crc);
        done += piece.len();
    }
    Ok(crc)
}

impl Target {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Host(window) => window.len() as u64,
            Self::Gpu(gpu) => gpu.memory.len() as u64,
        }
    }

    /// Why bytes of it cannot be reached any more, where that is known.
    #[inline]
    pub(crate) fn ended_at(&self, offset: usize, len: u64) -> Option<Gone> {
        match self {
            Self::Host(_) => None,
            Self::Gpu(gpu) => gpu.memory.ended_at(offset, usize::try_from(len).ok()?),
        }
    }

    /// Whether an access failed since its memory was freed meanwhile.
    #[cold]
    fn is_ended(&self, error: AccessError, offset: usize, len: usize) -> bool {
        error.is_fault() && self.ended_at(offset, len as u64).is_some()
    }

    /// Loads bytes of a message, and carries `crc` on over them.
    #[inline]
    pub(crate) fn load(
        &self,
        offset: usize,
        out: Sink<'_>,
        message: Message,
        crc: Option<u32>,
    ) -> Result<(Option<u32>, Route), LoadError> {
        match self {
            Self::Host(window) => match crc {
                Some(crc) => window.load_crc(offset, out, crc).map(Some),
                None => window.load(offset, out).map(|()| None),
            }
            .map(|crc| (crc, Route::Direct(Mechanism::Cpu)))
            .map_err(LoadError::Access),
            Self::Gpu(gpu) => match gpu.window() {
                Some(window) if gpu.loads(message) => {
                    let len = out.len();
                    let loaded = match crc {
                        None => window.load(offset, out).map(|()| None),
                        Some(crc) => load_crc(window, offset, out, crc).map(Some),
                    };
                    let crc = loaded.map_err(|error| match self.is_ended(error, offset, len) {
                        true => LoadError::Ended,
                        false => LoadError::Access(error),
                    })?;
                    Ok((crc, Route::Direct(Mechanism::Window)))
                }
                _ => Err(LoadError::Fetch),
            },
        }
    }

    /// Places bytes of a message, after what was placed for the same owner before; `last` ends the message.
    #[inline]
    pub(crate) fn place(
        &self,
        stage: &mut Stage,
        owner: Owner,
        offset: usize,
        bytes: Source<'_>,
        last: bool,
    ) -> Result<Placed, PlaceError> {
        let by = match self {
            Self::Host(_) => Mechanism::Cpu,
            Self::Gpu(gpu) if gpu.stores => Mechanism::Window,
            Self::Gpu(gpu) => {
                let ticket = stage.put(owner, (&gpu.memory, gpu.copier), offset, bytes, last);
                return Ok(Placed::after(ticket.map_err(PlaceError::Stage)?, Route::Staged));
            }
        };
        if !stage.is_settled(owner) {
            let ticket = stage.store_later(owner, self, offset, bytes, last).map_err(PlaceError::Stage)?;
            // It is kept in host memory until then, which for a GPU's is one copy more.
            let route = if by == Mechanism::Cpu { Route::Direct(by) } else { Route::Staged };
            return Ok(Placed::after(ticket, route));
        }
        self.store(offset, bytes, last).map_err(|error| self.failed(error, offset, bytes.len()))?;
        Ok(Placed { route: Route::Direct(by), ticket: None })
    }

    #[cold]
    fn failed(&self, error: AccessError, offset: usize, len: usize) -> PlaceError {
        if self.is_ended(error, offset, len) { PlaceError::Ended } else { PlaceError::Access(error) }
    }

    /// Stores bytes of a message where no copy engine is needed; `last` ends it, and what announces it may follow at once.
    #[inline]
    pub(crate) fn store(&self, offset: usize, bytes: Source<'_>, last: bool) -> Result<(), AccessError> {
        match (self, last) {
            (Self::Host(window), true) => window.store_last(offset, bytes),
            (Self::Host(window), false) => window.store(offset, bytes),
            (Self::Gpu(gpu), _) => match (gpu.window(), last) {
                (Some(window), true) => window.store_last(offset, bytes).and_then(|()| window.complete()),
                (Some(window), false) => window.store(offset, bytes),
                (None, _) => Ok(()), // `stores` says that there is one
            },
        }
    }

    /// A message ended whose bytes before its last were placed here: they are announced next.
    pub(crate) fn announce(&self) -> Result<(), AccessError> {
        match self {
            Self::Gpu(gpu) if gpu.stores => gpu.window().map_or(Ok(()), GpuWindow::complete),
            _ => Ok(()),
        }
    }

    /// Changes a word: the value before, or any value where that is told later ([`Stage::take_changed`]) to the request with this
    /// number, whose answer must wait for the ticket. Atomic among all that arrives at this device.
    pub(crate) fn change(
        &self,
        stage: &mut Stage,
        owner: Owner,
        offset: usize,
        (change, psn): (Change, Psn),
    ) -> Result<(u64, Placed), PlaceError> {
        if self.changes_at_once() && stage.is_settled(owner) && !stage.is_changing() {
            let changed = self.change_now(offset, change);
            let (before, by) = changed.map_err(|error| self.failed(error, offset, size_of::<u64>()))?;
            return Ok((before, Placed { route: Route::Direct(by), ticket: None }));
        }
        let route = match self {
            Self::Host(_) => Route::Direct(Mechanism::Cpu),
            Self::Gpu(_) if self.changes_at_once() => Route::Direct(Mechanism::Window),
            Self::Gpu(_) => Route::Staged,
        };
        let ticket = stage.change_later(owner, self, offset, (change, psn)).map_err(PlaceError::Stage)?;
        Ok((0, Placed::after(ticket, route)))
    }

    /// Whether atomics need no copy engine.
    pub(crate) fn changes_at_once(&self) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Gpu(gpu) => gpu.window().is_some(),
        }
    }

    /// Changes a word where that needs no copy engine: the value before.
    pub(crate) fn change_now(&self, offset: usize, change: Change) -> Result<(u64, Mechanism), AccessError> {
        let (changed, by) = match (self, change) {
            (Self::Host(window), Change::Add(add)) => (window.fetch_add(offset, add), Mechanism::Cpu),
            (Self::Host(window), Change::Swap { compare, swap }) => {
                (window.compare_swap(offset, compare, swap), Mechanism::Cpu)
            }
            (Self::Gpu(gpu), _) => match (gpu.window(), change) {
                (Some(window), Change::Add(add)) => (window.fetch_add(offset, add), Mechanism::Window),
                (Some(window), Change::Swap { compare, swap }) => {
                    (window.compare_swap(offset, compare, swap), Mechanism::Window)
                }
                (None, _) => (Ok(0), Mechanism::Window), // `changes_at_once` was asked
            },
        };
        changed.map(|before| (before, by))
    }

    /// Whether it is the same memory, of the same registration.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(one), Self::Host(other)) => {
                (one.base_addr(), one.len()) == (other.base_addr(), other.len())
            }
            (Self::Gpu(one), Self::Gpu(other)) => Arc::ptr_eq(&one.memory, &other.memory),
            _ => false,
        }
    }

    /// Whether it is this memory of a GPU.
    pub(crate) fn is_of(&self, memory: &Arc<GpuMemory>) -> bool {
        matches!(self, Self::Gpu(gpu) if Arc::ptr_eq(&gpu.memory, memory))
    }
}

/// What an atomic does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Add(u64),
    Swap { compare: u64, swap: u64 },
}

impl Change {
    /// The value after, if it changes.
    pub(crate) fn of(self, old: u64) -> Option<u64> {
        match self {
            Self::Add(add) => Some(old.wrapping_add(add)),
            Self::Swap { compare, swap } => (old == compare).then_some(swap),
        }
    }
}
