//! One registration of GPU memory: its location, its paths, and whether it is still the same
//! memory.

use std::env;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use thiserror::Error;

use super::api::Context;
use super::context::KeptContext;
use super::device::Gpu;
use super::ending::Endings;
use super::error::{CudaError, DriverError};
use super::gpu_window::GpuWindow;
use super::range::{self, GpuRange, GpuRangeError, MemoryKind, Segment};
use super::shadow::Shadowed;
use super::watch::{self, WatchGuard};
use super::window::{self, Mapping, MappingOwner, Method, WindowRefusal};
use crate::guard::{self, InstallError};
use crate::path::{Mechanism, Path, Paths, Reason, Require};
use crate::{AccessError, Window, page_size};

const WINDOW: &str = "NOBOUNCE_WINDOW";
const REQUIRE: &str = "NOBOUNCE_REQUIRE";

/// Options of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuOptions {
    /// Map a window. `NOBOUNCE_WINDOW=off` in the environment overrides this.
    pub window: bool,
    /// Required paths. `NOBOUNCE_REQUIRE=direct` in the environment requires direct ones and
    /// overrides this.
    pub require: Require,
    /// Stage on purpose, to compare.
    pub staged: bool,
    /// Atomics use a copy of words in host memory, instead of loads through the window.
    pub shadow: Shadowed,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self { window: true, require: Require::Any, staged: false, shadow: Shadowed::No }
    }
}

impl GpuOptions {
    /// With the environment's settings.
    #[must_use]
    pub fn with_environment(self) -> Self {
        let says =
            |name: &str, word: &str| env::var_os(name).is_some_and(|value| value.eq_ignore_ascii_case(word));
        Self {
            window: self.window && !says(WINDOW, "off"),
            require: if says(REQUIRE, "direct") { Require::Direct } else { self.require },
            ..self
        }
    }
}

/// Why GPU memory could not be registered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GpuRegisterError {
    /// The range is not one.
    #[error(transparent)]
    Range(#[from] GpuRangeError),
    /// A direct path was required, and there is none.
    #[error("a direct path is required for {len} bytes at {addr:#x} ({kind}), but the path is: {paths}")]
    NotDirect {
        /// Requested address.
        addr: u64,
        /// Requested length.
        len: usize,
        /// Kind of memory.
        kind: MemoryKind,
        /// The paths there are.
        paths: Box<Paths>,
        /// Why there is no window.
        refusals: Vec<WindowRefusal>,
    },
    /// The memory was freed while it was registered.
    #[error("the memory at {addr:#x} was freed during registration ({gone})")]
    Gone {
        /// The address.
        addr: u64,
        /// Why it is gone.
        gone: Gone,
    },
    /// Its words could not be copied for atomics.
    #[error("the words at the window cannot be read: {0}")]
    Shadow(#[from] AccessError),
    /// A fault on the window could not be caught.
    #[error(transparent)]
    Guard(#[from] InstallError),
}

impl From<DriverError> for GpuRegisterError {
    fn from(error: DriverError) -> Self {
        Self::Range(error.into())
    }
}

/// The registered memory is not there any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Gone {
    /// Its allocation was freed.
    #[error("the GPU memory at {addr:#x} was freed ({error}); deregister memory before it is freed")]
    Freed {
        /// The first address that is gone.
        addr: u64,
        /// CUDA's error.
        error: CudaError,
    },
    /// Its allocation was freed, and the address belongs to another one.
    #[error(
        "the GPU memory at {addr:#x} was freed and its address reused (buffer {was} is now {now}); \
         deregister memory before it is freed"
    )]
    Reused {
        /// The first address that is gone.
        addr: u64,
        /// CUDA's number of the buffer that was registered.
        was: u64,
        /// CUDA's number of the one that is there.
        now: u64,
    },
    /// CUDA is gone from this process: its context was destroyed, or the process is a forked child.
    #[error("the CUDA context of the GPU memory at {addr:#x} is gone ({error}); allocate and register again")]
    Context {
        /// The address.
        addr: u64,
        /// CUDA's error.
        error: CudaError,
    },
}

/// GPU memory, or pinned host memory, that was registered.
///
/// A window keeps the physical memory alive after its owner has freed it: nothing dangles. But
/// stores to it are lost ([`end_when_freed`](Self::end_when_freed)), and the address may be
/// reallocated. Copies by address must therefore call [`check_alive`](Self::check_alive) first.
#[derive(Debug)]
pub struct GpuMemory {
    range: GpuRange,
    method: Option<Method>,
    window: Option<GpuWindow>,
    mapping: Option<Arc<Mapping>>,
    owner: MappingOwner,
    endings: Endings,
    watch_guard: OnceLock<WatchGuard>,
    /// Shows whether its context is still alive, where that can be known.
    witness: Option<KeptContext>,
    host: Option<Window>,
    paths: Paths,
    refusals: Vec<WindowRefusal>,
    require: Require,
}

impl GpuMemory {
    /// Registers the `len` bytes at `addr`, memory of any kind that CUDA knows.
    ///
    /// It never waits for the GPU, invalidates no stream capture and writes nothing. Without a
    /// window it fails only under [`Require::Direct`].
    pub fn register(addr: u64, len: usize, options: &GpuOptions) -> Result<Self, GpuRegisterError> {
        Self::build(GpuRange::of(addr, len)?, options.with_environment(), MappingOwner::Everybody)
    }

    /// Registers the whole GPU pages that the `len` bytes at `addr` lie in, as kernel modules do:
    /// [`GpuRange::of_gpu_pages`]. The window is a mapping of its own, which can be
    /// [hidden](Self::hide).
    pub fn register_gpu_pages(addr: u64, len: usize, options: &GpuOptions) -> Result<Self, GpuRegisterError> {
        let range = GpuRange::of_gpu_pages(addr, len)?;
        Self::build(range, options.with_environment(), MappingOwner::Registration)
    }

    /// As [`register`](Self::register), for memory that a network adapter accesses by itself. The
    /// window serves this process's own loads and stores only, so that its path is not constrained.
    pub fn reach(addr: u64, len: usize, options: &GpuOptions) -> Result<Self, GpuRegisterError> {
        let window = options.with_environment().window;
        let options = GpuOptions { window, ..GpuOptions::default() };
        Self::build(GpuRange::of(addr, len)?, options, MappingOwner::Everybody)
    }

    fn build(range: GpuRange, options: GpuOptions, owner: MappingOwner) -> Result<Self, GpuRegisterError> {
        let (addr, len) = (range.addr(), range.len());
        guard::ensure_installed()?;
        let mut memory = Self {
            method: None,
            window: None,
            mapping: None,
            owner,
            endings: Endings::default(),
            watch_guard: OnceLock::new(),
            witness: None,
            host: None,
            paths: Paths::both(Path::Direct(Mechanism::Cpu)),
            refusals: Vec::new(),
            require: options.require,
            range,
        };
        if options.staged {
            memory.paths = Paths::both(Path::Staged(Reason::new("staging was asked for")));
        } else if let Some(host) = memory.range.host_addr() {
            memory.host = host_window(host, len);
        } else {
            memory.paths = memory.find_window(options.window);
            if let Some(window) = memory.window.take() {
                memory.window = Some(window.with_shadow(options.shadow)?);
            }
        }
        if options.require == Require::Direct && !memory.paths.are_direct() {
            let Self { range, paths, refusals, .. } = memory;
            return Err(GpuRegisterError::NotDirect {
                addr,
                len,
                kind: range.kind(),
                paths: Box::new(paths),
                refusals,
            });
        }
        // The window was found by address: the memory must have been the same throughout.
        memory.check_alive().map_err(|gone| GpuRegisterError::Gone { addr, gone })?;
        Ok(memory)
    }

    /// What the registration required of the paths.
    #[must_use]
    pub fn require(&self) -> Require {
        self.require
    }

    /// Its first address, as the GPU knows it.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.range.addr()
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Never true: a registration has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The GPU that it lies on.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.range.gpu()
    }

    /// A context in which it could be used at the registration. It may be gone by now: call
    /// [`GpuRange::context_now`] before any use.
    #[must_use]
    pub fn context(&self) -> Context {
        self.range.context()
    }

    /// Its range.
    #[must_use]
    pub fn range(&self) -> &GpuRange {
        &self.range
    }

    /// The CPU's window onto it, if there is one.
    #[must_use]
    pub fn window(&self) -> Option<&GpuWindow> {
        self.window.as_ref()
    }

    /// The method that mapped the window.
    #[must_use]
    pub fn method(&self) -> Option<Method> {
        self.method
    }

    /// Pinned host memory as the CPU sees it: ordinary memory.
    #[must_use]
    pub fn host(&self) -> Option<Window> {
        self.host
    }

    /// The data path, per direction.
    #[must_use]
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Why the earlier methods in the fallback order, or all of them, mapped no window.
    #[must_use]
    pub fn refusals(&self) -> &[WindowRefusal] {
        &self.refusals
    }

    /// Makes the first `len` bytes of a window of its own accessible, and nothing behind them;
    /// `len` is whole pages.
    ///
    /// # Errors
    /// There is no such window, it is shorter than that, or the kernel refuses to restore the
    /// access.
    pub fn show(&self, len: usize) -> io::Result<()> {
        let (mapping, base) = self.own_mapping().ok_or(io::ErrorKind::Unsupported)?;
        let rest = self.len().checked_sub(len).ok_or(io::ErrorKind::InvalidInput)?;
        mapping.show(base, len)?;
        if rest > 0 {
            mapping.hide(base.wrapping_add(len), rest);
        }
        Ok(())
    }

    /// From now on every access through a window of its own faults, by whichever address, until it
    /// is shown again. The memory stays registered.
    pub fn hide(&self) {
        if let Some((mapping, base)) = self.own_mapping() {
            mapping.hide(base, self.len());
        }
    }

    fn own_mapping(&self) -> Option<(&Arc<Mapping>, *mut u8)> {
        let mapping = self.mapping.as_ref().filter(|_| self.owner == MappingOwner::Registration)?;
        Some((mapping, self.window.as_ref()?.as_mut_ptr()))
    }

    /// Starts the watcher for it, if it has a window. Some 20 ms after (a part of) it was freed,
    /// its context destroyed or its device reset, that part of the window is revoked. Every access
    /// through it then fails, and [`ended`](Self::ended) returns the reason.
    ///
    /// # Errors
    /// The watcher thread cannot be started.
    pub fn end_when_freed(self: &Arc<Self>) -> io::Result<()> {
        if self.window.is_some() && self.watch_guard.get().is_none() {
            let _ = self.watch_guard.set(watch::add(self)?);
        }
        Ok(())
    }

    /// Why nothing, or not all of it, can be reached through the window any more, if that is so.
    #[must_use]
    pub fn ended(&self) -> Option<Gone> {
        self.ended_at(0, self.len())
    }

    /// The same for `len` bytes at `offset`. Makes no driver call, so it is cheap enough for every
    /// packet.
    #[inline]
    #[must_use]
    pub fn ended_at(&self, offset: usize, len: usize) -> Option<Gone> {
        let start = self.addr().saturating_add(offset as u64);
        self.endings.among(&(start..start.saturating_add(len as u64)))
    }

    /// Why one of its segments is gone, if CUDA reports so.
    pub(super) fn certainly_gone(&self, segment: usize) -> Option<Gone> {
        self.ask_after(self.range.segments().get(segment)?).err().filter(Gone::is_certain)
    }

    /// Records that a segment is gone. Its window is revoked next: an access that faults then finds
    /// the reason.
    pub(super) fn note_end(&self, segment: usize, gone: Gone) {
        if let Some(part) = self.part(segment) {
            self.endings.add(part.clone(), gone.from(part.start.max(self.addr())));
        }
    }

    /// From now on every access to a segment through the window faults.
    pub(super) fn cut_off(&self, segment: usize) {
        if let (Some(part), Some(mapping)) = (self.part(segment), &self.mapping) {
            mapping.cut_off(&part);
        }
    }

    /// The addresses of a segment: all mapped pages of one allocation, also those around it.
    fn part(&self, segment: usize) -> Option<Range<u64>> {
        let found = self.range.segments().get(segment)?;
        Some(if self.range.segments().len() == 1 { 0..u64::MAX } else { found.base..found.end() })
    }

    /// Whether the memory is still the registered one. One driver query per allocation, well under
    /// 1 us; it needs no context and never blocks.
    pub fn check_alive(&self) -> Result<(), Gone> {
        self.check_alive_at(0, self.len())
    }

    /// The same for `len` bytes at `offset`: of a range of many VMM handles only those touched are
    /// queried.
    pub fn check_alive_at(&self, offset: usize, len: usize) -> Result<(), Gone> {
        self.check_alive_in([(offset, len)])
    }

    /// The same for several offsets and lengths: each handle that they touch is queried once.
    pub fn check_alive_in(&self, parts: impl IntoIterator<Item = (usize, usize)>) -> Result<(), Gone> {
        let segments = self.range.segments();
        let mut asked: Vec<u64> = Vec::new();
        for (offset, len) in parts {
            let start = self.addr().saturating_add(offset as u64);
            let end = start.saturating_add(len as u64);
            let first = segments.partition_point(|segment| segment.end() <= start);
            // Memory without a buffer ID cannot be distinguished from its successor.
            let touched = segments[first..].iter().take_while(|segment| segment.base < end);
            for segment in touched.filter(|segment| segment.buffer_id != 0) {
                if !asked.contains(&segment.base) {
                    self.ask_after(segment)?;
                    asked.push(segment.base);
                }
            }
        }
        Ok(())
    }

    fn ask_after(&self, segment: &Segment) -> Result<(), Gone> {
        let addr = segment.base.max(self.addr());
        match self.gpu().driver().relaxed(|api| range::buffer_id(api, addr)) {
            Ok(now) if now == segment.buffer_id => Ok(()),
            Ok(now) => Err(Gone::Reused { addr, was: segment.buffer_id, now }),
            Err(error) if error.context_is_gone() || error.code == CudaError::NOT_INITIALIZED => {
                Err(Gone::Context { addr, error })
            }
            // CUDA returns the same error for freed memory and for memory whose context was
            // destroyed.
            Err(error) if self.witness.is_some_and(|context| context.is_gone(self.gpu().driver())) => {
                Err(Gone::Context { addr, error })
            }
            Err(error) => Err(Gone::Freed { addr, error }),
        }
    }

    /// Maps a window, and returns the resulting paths.
    fn find_window(&mut self, wanted: bool) -> Paths {
        let copy_engine = Path::Direct(Mechanism::CopyEngine);
        if !wanted {
            // Switching the window off serves to observe staging, so both directions are staged.
            let is_off = env::var_os(WINDOW).is_some_and(|value| value.eq_ignore_ascii_case("off"));
            let reason = if is_off {
                "the window is switched off (NOBOUNCE_WINDOW=off)"
            } else {
                "the window is switched off by an option"
            };
            let reason = Reason::new(reason);
            return Paths::both(Path::Staged(reason));
        }
        let (opened, refusals) = window::open(&self.range, self.owner);
        self.refusals = refusals;
        let Some(opened) = opened else {
            return Paths { inbound: Path::Staged(self.reason()), outbound: copy_engine };
        };
        let flush_by_load = self.gpu().writes_ordering() == 0;
        let base = opened.base();
        self.mapping = Some(opened.mapping.clone());
        self.witness = window::witness_of(self.context());
        self.method = Some(opened.method);
        // SAFETY: the mapping holds the range and the pages around it, was compared with the
        // memory, and lives as long as the window; registration permits us to read and write the
        // memory.
        let window = unsafe { GpuWindow::new(base, self.len(), opened.mapping, flush_by_load) };
        self.window = Some(window.among(self.gpu().unsettled().clone()));
        Paths { inbound: Path::Direct(Mechanism::Window), outbound: copy_engine }
    }

    /// Why there is no window, in one sentence: the refusal of each method.
    fn reason(&self) -> Reason {
        let mut words: Vec<String> = Vec::new();
        for refusal in &self.refusals {
            // Methods with the same reason share one mention.
            if self.refusals.iter().all(|other| other.reason == refusal.reason) {
                words = vec![refusal.reason.clone()];
                break;
            }
            words.push(refusal.to_string());
        }
        Reason::new(format!("no window onto this memory ({}): {}", self.range.kind(), words.join("; ")))
    }
}

impl fmt::Display for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x} on {} ({}): ", self.len(), self.addr(), self.gpu(), self.range.kind())?;
        match self.method {
            Some(method) => write!(f, "{}, window by {method}", self.paths),
            None => write!(f, "{}", self.paths),
        }
    }
}

/// Pinned host memory is already mapped in this process.
fn host_window(addr: u64, len: usize) -> Option<Window> {
    let addr = usize::try_from(addr).ok().filter(|&addr| addr >= page_size())?;
    // SAFETY: the memory is registered with us: its owner lets us read and write it, and it is used
    // as a window only.
    Some(unsafe { Window::new(std::ptr::with_exposed_provenance_mut(addr), len) })
}
