//! The memory behind a region, and the route of bytes into and out of it.

use std::sync::Arc;

use nobounce_memory::gpu::{Gone, GpuMemory, GpuWindow};
use nobounce_memory::path::{Mechanism, Path};
use nobounce_memory::unmap_watch::WatchedRange;
use nobounce_memory::{AccessError, Sink, Source, Window};
use nobounce_protocol::wire::Psn;

use crate::soft::crc::extend_crc;
use crate::soft::gpu::copiers::CopierIndex;
use crate::soft::gpu::staging::{CopyOwner, Staging, StagingError};
use crate::tally::BytePath;

/// Messages up to this many bytes are loaded although others wait behind them. Submitting a copy
/// takes no less time (an H200: 1.4 us to load 1 KiB, 1.8 us to submit).
const LOAD_IN_STREAM: u64 = 1024;

/// The message that bytes are gathered for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatheredMessage {
    /// Its bytes, from the first known one on.
    pub(crate) len: u64,
    /// Whether no message whose bytes are to be sent waits behind it.
    pub(crate) alone: bool,
}

impl GatheredMessage {
    /// A message that is always loaded if possible, whatever its length.
    pub(crate) const LOADED: Self = Self { len: 0, alone: true };
}

/// Memory behind a region.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Host(HostTarget),
    Gpu(GpuTarget),
    /// No memory: reads give zeroes, and what is written is discarded.
    Null,
}

/// Host memory behind a region.
#[derive(Clone, Debug)]
pub(crate) struct HostTarget {
    pub(crate) window: Window,
    /// Tells whether it was unmapped; `None` where that cannot be known.
    pub(crate) watch: Option<Arc<WatchedRange>>,
}

impl Target {
    /// What tells whether host memory was unmapped.
    pub(crate) fn watch(&self) -> Option<&Arc<WatchedRange>> {
        match self {
            Self::Host(host) => host.watch.as_ref(),
            _ => None,
        }
    }
}

impl HostTarget {
    /// The window, unless some of these bytes were unmapped since. What is mapped there now is not
    /// what was registered.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> Result<&Window, AccessError> {
        match &self.watch {
            Some(watch) if watch.is_gone() => self.unless_gone(watch, offset, len),
            _ => Ok(&self.window),
        }
    }

    #[cold]
    fn unless_gone(&self, watch: &WatchedRange, offset: usize, len: usize) -> Result<&Window, AccessError> {
        match watch.first_gone(self.window.base_addr() + offset as u64, len) {
            Some(address) => Err(AccessError::Faulted { address }),
            None => Ok(&self.window),
        }
    }
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
    /// Whether fetched bytes are copied once more.
    pub(crate) staged_out: bool,
}

/// Why bytes could not be loaded right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    Access(AccessError),
    /// Their owner has freed them.
    Ended,
    /// The copy engine must fetch them.
    Fetch,
}

/// Why bytes could not be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlaceError {
    Access(AccessError),
    /// Their owner has freed the memory.
    Ended,
    Staging(StagingError),
}

/// Where bytes were placed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub(crate) route: BytePath,
    /// The step they wait for.
    pub(crate) ticket: Option<u64>,
}

impl Placed {
    fn after(ticket: u64, route: BytePath) -> Self {
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

    /// Whether a message of this length is gathered by loads. Loads have less latency but occupy
    /// the CPU, so with other messages waiting only the shortest are loaded.
    pub(crate) fn loads(&self, message: GatheredMessage) -> bool {
        let most = if message.alone { self.crossover } else { self.crossover.min(LOAD_IN_STREAM) };
        self.can_load() && message.len <= most
    }
}

/// Loads through the window and extends `crc` over the bytes. They go through the stack, because
/// window reads are slow and must not happen twice.
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

/// Zeroes, and the CRC extended over them.
fn zeroes(mut out: Sink<'_>, mut crc: Option<u32>) -> Option<u32> {
    let bytes = [0; 1024];
    let mut done = 0;
    while done < out.len() {
        let piece = &bytes[..(out.len() - done).min(bytes.len())];
        out.put(done, piece);
        crc = extend_crc(crc, piece);
        done += piece.len();
    }
    crc
}

impl Target {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Host(host) => host.window.len() as u64,
            Self::Gpu(gpu) => gpu.memory.len() as u64,
            Self::Null => u64::MAX,
        }
    }

    /// Why its bytes are unreachable, if that is known.
    #[inline]
    pub(crate) fn ended_at(&self, offset: usize, len: u64) -> Option<Gone> {
        match self {
            Self::Host(_) | Self::Null => None,
            Self::Gpu(gpu) => gpu.memory.ended_at(offset, usize::try_from(len).ok()?),
        }
    }

    /// Whether an access failed because its memory was freed meanwhile.
    #[cold]
    fn is_ended(&self, error: AccessError, offset: usize, len: usize) -> bool {
        error.is_fault() && self.ended_at(offset, len as u64).is_some()
    }

    /// Loads bytes of a message, and extends `crc` over them.
    #[inline]
    pub(crate) fn load(
        &self,
        offset: usize,
        out: Sink<'_>,
        message: GatheredMessage,
        crc: Option<u32>,
    ) -> Result<(Option<u32>, BytePath), LoadError> {
        match self {
            Self::Host(host) => match (host.at(offset, out.len()), crc) {
                (Ok(window), Some(crc)) => window.load_crc(offset, out, crc).map(Some),
                (Ok(window), None) => window.load(offset, out).map(|()| None),
                (Err(error), _) => Err(error),
            }
            .map(|crc| (crc, BytePath::Direct(Mechanism::Cpu)))
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
                    Ok((crc, BytePath::Direct(Mechanism::Window)))
                }
                _ => Err(LoadError::Fetch),
            },
            Self::Null => {
                let crc = zeroes(out, crc);
                Ok((crc, BytePath::Direct(Mechanism::Cpu)))
            }
        }
    }

    /// Places bytes of a message, after earlier placements for the same owner; `last` ends the
    /// message.
    #[inline]
    pub(crate) fn place(
        &self,
        staging: &mut Staging,
        owner: CopyOwner,
        offset: usize,
        bytes: Source<'_>,
        last: bool,
    ) -> Result<Placed, PlaceError> {
        let by = match self {
            Self::Host(_) | Self::Null => Mechanism::Cpu,
            Self::Gpu(gpu) if gpu.stores => Mechanism::Window,
            Self::Gpu(gpu) => {
                let ticket = staging.put(owner, (&gpu.memory, gpu.copier), offset, bytes, last);
                return Ok(Placed::after(ticket.map_err(PlaceError::Staging)?, BytePath::Staged));
            }
        };
        if !staging.is_settled(owner) {
            let ticket =
                staging.store_later(owner, self, offset, bytes, last).map_err(PlaceError::Staging)?;
            // It is kept in host memory until then, which is one extra copy for GPU memory.
            let route = if by == Mechanism::Cpu { BytePath::Direct(by) } else { BytePath::Staged };
            return Ok(Placed::after(ticket, route));
        }
        self.store(offset, bytes, last).map_err(|error| self.failed(error, offset, bytes.len()))?;
        Ok(Placed { route: BytePath::Direct(by), ticket: None })
    }

    #[cold]
    fn failed(&self, error: AccessError, offset: usize, len: usize) -> PlaceError {
        if self.is_ended(error, offset, len) { PlaceError::Ended } else { PlaceError::Access(error) }
    }

    /// Stores bytes of a message without a copy engine; `last` ends it, and its completion may
    /// follow at once.
    #[inline]
    pub(crate) fn store(&self, offset: usize, bytes: Source<'_>, last: bool) -> Result<(), AccessError> {
        match (self, last) {
            (Self::Host(host), true) => host.at(offset, bytes.len())?.store_last(offset, bytes),
            (Self::Host(host), false) => host.at(offset, bytes.len())?.store(offset, bytes),
            (Self::Gpu(gpu), _) => match (gpu.window(), last) {
                (Some(window), true) => window.store_last(offset, bytes).and_then(|()| window.complete()),
                (Some(window), false) => window.store(offset, bytes),
                (None, _) => Ok(()), // `stores` implies a window
            },
            (Self::Null, _) => Ok(()),
        }
    }

    /// A message ended in other memory, after bytes placed here: makes them visible before its
    /// completion.
    pub(crate) fn announce(&self) -> Result<(), AccessError> {
        match self {
            Self::Gpu(gpu) if gpu.stores => gpu.window().map_or(Ok(()), GpuWindow::complete),
            _ => Ok(()),
        }
    }

    /// Executes an atomic: returns the original value. If the step is deferred, that value is
    /// arbitrary. [`Staging::take_changed`] then returns the real one under this PSN, and the
    /// response must wait for the ticket. Atomic among all operations of this device.
    pub(crate) fn change(
        &self,
        staging: &mut Staging,
        owner: CopyOwner,
        offset: usize,
        (change, psn): (AtomicChange, Psn),
    ) -> Result<(u64, Placed), PlaceError> {
        if self.changes_at_once() && staging.is_settled(owner) && !staging.is_changing() {
            let changed = self.change_now(offset, change);
            let (before, by) = changed.map_err(|error| self.failed(error, offset, size_of::<u64>()))?;
            return Ok((before, Placed { route: BytePath::Direct(by), ticket: None }));
        }
        let route = match self {
            Self::Host(_) | Self::Null => BytePath::Direct(Mechanism::Cpu),
            Self::Gpu(_) if self.changes_at_once() => BytePath::Direct(Mechanism::Window),
            Self::Gpu(_) => BytePath::Staged,
        };
        let ticket = staging.change_later(owner, self, offset, (change, psn)).map_err(PlaceError::Staging)?;
        Ok((0, Placed::after(ticket, route)))
    }

    /// Whether atomics need no copy engine.
    pub(crate) fn changes_at_once(&self) -> bool {
        match self {
            Self::Host(_) | Self::Null => true,
            Self::Gpu(gpu) => gpu.window().is_some(),
        }
    }

    /// Executes an atomic without a copy engine; returns the original value.
    pub(crate) fn change_now(
        &self,
        offset: usize,
        change: AtomicChange,
    ) -> Result<(u64, Mechanism), AccessError> {
        let (changed, by) = match (self, change) {
            (Self::Host(host), AtomicChange::Add(add)) => {
                (host.at(offset, 8)?.fetch_add(offset, add), Mechanism::Cpu)
            }
            (Self::Host(host), AtomicChange::Swap { compare, swap }) => {
                (host.at(offset, 8)?.compare_swap(offset, compare, swap), Mechanism::Cpu)
            }
            (Self::Null, _) => (Ok(0), Mechanism::Cpu),
            (Self::Gpu(gpu), _) => match (gpu.window(), change) {
                (Some(window), AtomicChange::Add(add)) => (window.fetch_add(offset, add), Mechanism::Window),
                (Some(window), AtomicChange::Swap { compare, swap }) => {
                    (window.compare_swap(offset, compare, swap), Mechanism::Window)
                }
                (None, _) => (Ok(0), Mechanism::Window), // `changes_at_once` was checked
            },
        };
        changed.map(|before| (before, by))
    }

    /// Whether it is the same memory, of the same registration.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(one), Self::Host(other)) => {
                let (one, other) = (one.window, other.window);
                (one.base_addr(), one.len()) == (other.base_addr(), other.len())
            }
            (Self::Gpu(one), Self::Gpu(other)) => Arc::ptr_eq(&one.memory, &other.memory),
            _ => false,
        }
    }

    /// Whether it is this GPU memory.
    pub(crate) fn is_of(&self, memory: &Arc<GpuMemory>) -> bool {
        matches!(self, Self::Gpu(gpu) if Arc::ptr_eq(&gpu.memory, memory))
    }
}

/// An atomic operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AtomicChange {
    Add(u64),
    Swap { compare: u64, swap: u64 },
}

impl AtomicChange {
    /// The new value, if it changes.
    pub(crate) fn of(self, old: u64) -> Option<u64> {
        match self {
            Self::Add(add) => Some(old.wrapping_add(add)),
            Self::Swap { compare, swap } => (old == compare).then_some(swap),
        }
    }
}
