//! GPU memory as the CPU sees it: a write-combined window through BAR1.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::shadow::{Shadow, Shadowed};
use crate::copy::wc::{self, Isa};
use crate::foreign::{Sink, Source};
use crate::window::finished;
use crate::{AccessError, Window, barrier};

/// Bytes at the end of a message that [`GpuWindow::store_last`] stores after all others.
const LAST: usize = 64;

/// Serialises atomics in this process, across all windows: two devices may have windows onto the
/// same bytes, and the bus offers no atomic read-modify-write.
static ATOMICS: Mutex<()> = Mutex::new(());

/// A registered range of GPU memory, mapped through BAR1.
///
/// Like [`Window`] it never makes a reference into the range, checks bounds, and returns
/// [`AccessError::Faulted`] where the mapping is gone. Aligned 8-byte words are never torn.
/// Otherwise its memory type differs (write-combining), with rules of its own:
///
/// * *Stores* reach the GPU in any order. [`store_last`](Self::store_last) orders all other bytes
///   before the last 64. Call [`complete`](Self::complete) between the stores of a message and its
///   notification.
/// * *Loads* take about 1 us for each 64 bytes at a time and see what the GPU wrote before they
///   were issued.
/// * *Other routes* into the same memory, such as the copy engine, see our stores after
///   [`settle`](Self::settle). That covers stores of another window onto the same GPU once they
///   were [completed](Self::complete).
/// * *Atomics* are atomic among those that go through windows of this process, not against the GPU.
///
/// It never writes outside its range. Loads fetch whole 64-byte lines, which may reach beyond it on
/// either side.
pub struct GpuWindow {
    /// The range as ordinary memory: its bounds, and single words.
    range: Window,
    /// Attribute 118 is 0: stores are visible to the GPU only after a load through the same window.
    flush_by_load: bool,
    /// Stores through this window that no load has settled yet.
    unsettled: Unsettled,
    /// Those through all windows onto this GPU: a load through any of them flushes the stores
    /// through all, which share the route.
    on_gpu: Arc<Unsettled>,
    /// A copy of its words, for atomics.
    shadow: Option<Shadow>,
    /// Keeps the range mapped.
    _mapping: Arc<dyn Any + Send + Sync>,
}

/// Whether there are stores that other routes into the memory may not see yet.
#[derive(Debug, Default)]
pub(super) struct Unsettled {
    /// Stored to since the last load was begun.
    dirty: AtomicBool,
    /// Loads that were begun and are not back yet.
    loading: AtomicUsize,
}

impl Unsettled {
    #[inline]
    fn stored(&self) {
        self.dirty.store(true, Ordering::Release);
    }

    #[inline]
    fn is_dirty(&self) -> bool {
        // In this order: a load increments `loading` before it clears `dirty`.
        self.dirty.load(Ordering::Acquire) || self.loading.load(Ordering::Acquire) > 0
    }

    fn begin_load(&self) -> bool {
        self.loading.fetch_add(1, Ordering::AcqRel);
        self.dirty.swap(false, Ordering::AcqRel)
    }

    fn end_load(&self, failed: bool) {
        if failed {
            self.stored();
        }
        // Not before the load is back: another thread must not treat stores as settled that this
        // load is still flushing.
        self.loading.fetch_sub(1, Ordering::AcqRel);
    }
}

impl GpuWindow {
    /// A window onto `len` bytes at `base`, which stay mapped for as long as `mapping` lives.
    /// `flush_by_load` where the GPU sees stores only after a load through the same window
    /// (attribute 118 is 0).
    ///
    /// # Safety
    /// The range may be read and written by us while the window is used, and the 64-byte lines it
    /// begins and ends in may be read; no Rust reference to it is live. Should the mapping vanish,
    /// its addresses are not reused while `mapping` lives.
    #[must_use]
    pub unsafe fn new(
        base: *mut u8,
        len: usize,
        mapping: Arc<dyn Any + Send + Sync>,
        flush_by_load: bool,
    ) -> Self {
        // SAFETY: the caller promises what a window requires.
        let range = unsafe { Window::new(base, len) };
        let (unsettled, on_gpu) = (Unsettled::default(), Arc::default());
        Self { range, flush_by_load, unsettled, on_gpu, shadow: None, _mapping: mapping }
    }

    /// The same, with atomics that use a copy of its words in host memory, instead of loads.
    /// Nothing but these atomics may change the memory, other than [`Shadowed`] says.
    ///
    /// # Errors
    /// The window does not begin at a multiple of 8 bytes, or cannot be loaded.
    pub fn with_shadow(self, shadowed: Shadowed) -> Result<Self, AccessError> {
        if shadowed == Shadowed::No {
            return Ok(self);
        }
        if self.len() >= 8 {
            self.range.word(0)?;
        }
        let mut bytes = vec![0; self.len()];
        self.load(0, &mut bytes[..])?;
        Ok(Self { shadow: Some(Shadow::new(&bytes, shadowed == Shadowed::Signals)), ..self })
    }

    /// The same, as one of several windows onto a GPU.
    pub(super) fn among(self, on_gpu: Arc<Unsettled>) -> Self {
        Self { on_gpu, ..self }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// True for a window of no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Where its first byte is mapped in this process: not the address that the GPU knows it by.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.range.as_mut_ptr()
    }

    /// Copies `src` into the window at `offset`. After a fault, all bytes before it have been
    /// stored.
    #[inline]
    pub fn store<'a>(&self, offset: usize, src: impl Into<Source<'a>>) -> Result<(), AccessError> {
        let src = src.into();
        let to = self.range.at(offset, src.len())?;
        self.put(Isa::best(), to, src)
    }

    /// Copies the end of a message into the window. The last (at most 64) bytes of `src` reach the
    /// GPU after all its other bytes, and after all earlier stores of this thread.
    #[inline]
    pub fn store_last<'a>(&self, offset: usize, src: impl Into<Source<'a>>) -> Result<(), AccessError> {
        let src = src.into();
        let to = self.range.at(offset, src.len())?;
        // The cut lies on a word of the window, else that word would be torn.
        let first = match src.len().checked_sub(LAST) {
            Some(cut) => cut + to.wrapping_add(cut).addr().wrapping_neg() % 8,
            None => 0,
        };
        let (body, last) = (src.slice(0..first), src.skip(first));
        self.put(Isa::best(), to, body)?;
        barrier::before_last_bytes();
        self.put(Isa::best(), to.wrapping_add(first), last)
    }

    /// Call it between the stores of a message and its notification (an acknowledgement, a
    /// completion, an event): afterwards the GPU sees them. Costs a fence, and a load where the GPU
    /// needs one.
    #[inline]
    pub fn complete(&self) -> Result<(), AccessError> {
        barrier::before_completion();
        if self.flush_by_load {
            return self.read_back();
        }
        // Again, now that the stores have left: a settling load by another thread may have been too
        // early for them.
        self.unsettled.stored();
        self.on_gpu.stored();
        Ok(())
    }

    /// Copies `dst.len()` bytes at `offset` out of the window. After a fault, `dst` holds what
    /// could be read before it.
    pub fn load<'a>(&self, offset: usize, dst: impl Into<Sink<'a>>) -> Result<(), AccessError> {
        self.load_by(Isa::best(), offset, dst)
    }

    /// Reads the word at `offset` at once. The address must be a multiple of 8.
    pub fn load_u64(&self, offset: usize) -> Result<u64, AccessError> {
        self.range.word(offset)?;
        self.settled(|| self.range.load_u64(offset))
    }

    /// Writes the word at `offset` at once. The address must be a multiple of 8.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), AccessError> {
        // A refused store leaves nothing to settle.
        self.range.word(offset)?;
        let stored = self.range.store_u64(offset, value);
        self.unsettled.stored();
        stored
    }

    /// Adds to the word at `offset`, wrapping, and returns what it held. The address must be a
    /// multiple of 8.
    ///
    /// Atomic among the atomics of all windows of this process (as `IBV_ATOMIC_HCA` promises for
    /// one device), not against the GPU.
    pub fn fetch_add(&self, offset: usize, add: u64) -> Result<u64, AccessError> {
        self.atomic(offset, |old| Some(old.wrapping_add(add)))
    }

    /// Puts `swap` into the word at `offset` if it holds `compare`, and returns what it held. The
    /// address must be a multiple of 8. Atomic as [`fetch_add`](Self::fetch_add) is.
    pub fn compare_swap(&self, offset: usize, compare: u64, swap: u64) -> Result<u64, AccessError> {
        self.atomic(offset, |old| (old == compare).then_some(swap))
    }

    /// Sets the word at `offset` to 0. The address must be a multiple of 8. Atomic as
    /// [`fetch_add`](Self::fetch_add) is.
    pub fn reset(&self, offset: usize) -> Result<(), AccessError> {
        match &self.shadow {
            Some(shadow) => self.reset_shadowed(shadow, offset),
            None => self.atomic(offset, |_| Some(0)).map(|_| ()),
        }
    }

    /// One load through the window, which returns only after all earlier stores have arrived (PCIe
    /// ordering). About 1 us.
    pub fn read_back(&self) -> Result<(), AccessError> {
        if self.is_empty() {
            return Ok(());
        }
        self.settled(|| self.range.load(0, &mut [0]))
    }

    /// Makes our stores visible on other routes into the memory (the copy engine, a NIC). Costs a
    /// [`read_back`](Self::read_back) if there were any since the last load, and nothing otherwise.
    #[inline]
    pub fn settle(&self) -> Result<(), AccessError> {
        if self.is_dirty() { self.read_back() } else { Ok(()) }
    }

    /// Whether there may be unsettled stores: some since the last load, or before a load that is
    /// not back yet.
    #[inline]
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.unsettled.is_dirty() || self.on_gpu.is_dirty()
    }

    /// [`store`](Self::store) by the instructions named, where the processor has them: for
    /// measurements and tests.
    pub fn store_by(&self, isa: Isa, offset: usize, src: &[u8]) -> Result<(), AccessError> {
        let to = self.range.at(offset, src.len())?;
        self.put(isa.or_best(), to, src.into())
    }

    /// [`load`](Self::load) by the instructions named, where the processor has them: for
    /// measurements and tests.
    pub fn load_by<'a>(&self, isa: Isa, offset: usize, dst: impl Into<Sink<'a>>) -> Result<(), AccessError> {
        let dst = dst.into();
        let from = self.range.at(offset, dst.len())?;
        if dst.is_empty() {
            return Ok(());
        }
        self.settled(|| {
            // SAFETY: `dst` is ours; the window side is what `new` was promised; the processor has
            // what `or_best` gives.
            let rest = unsafe { wc::load(isa.or_best(), dst.as_mut_ptr(), from, dst.len()) };
            finished(from, dst.len(), rest)
        })
    }

    #[inline]
    fn put(&self, isa: Isa, to: *mut u8, src: Source<'_>) -> Result<(), AccessError> {
        if src.is_empty() {
            return Ok(());
        }
        // SAFETY: `src` is ours; the window side is what `new` was promised; callers pass an `isa`
        // the processor has.
        let rest = unsafe { wc::store(isa, to, src.as_ptr(), src.len()) };
        // After the stores: a concurrent load by another thread must not count as one that came
        // after them.
        self.unsettled.stored();
        finished(to, src.len(), rest)
    }

    /// Fence, then `load`, which settles all stores made so far.
    fn settled<T>(&self, load: impl FnOnce() -> Result<T, AccessError>) -> Result<T, AccessError> {
        let was_dirty = [self.unsettled.begin_load(), self.on_gpu.begin_load()];
        barrier::before_window_loads();
        let outcome = load();
        let failed = was_dirty.map(|dirty| dirty && outcome.is_err());
        self.unsettled.end_load(failed[0]);
        self.on_gpu.end_load(failed[1]);
        outcome
    }

    /// An atomic by the copy of the words.
    fn atomic_shadowed(
        &self,
        shadow: &Shadow,
        offset: usize,
        change: impl FnOnce(u64) -> Option<u64>,
    ) -> Result<u64, AccessError> {
        let mut words = shadow.lock();
        let bounds = AccessError::OutOfBounds { offset, len: 8, window: self.len() };
        let old = *words.get(offset / 8).ok_or(bounds)?;
        if let Some(new) = change(old) {
            // A kernel that sees the word sees the flags.
            if let Some(flags) = shadow.flags(offset)
                && let Some(flags_word) = words.get_mut(flags / 8)
                && *flags_word != Shadow::COUNTED
            {
                self.range.store_u64(flags, Shadow::COUNTED)?;
                *flags_word = Shadow::COUNTED;
            }
            self.store_shadowed(&mut words, offset, new)?;
        }
        Ok(old)
    }

    fn reset_shadowed(&self, shadow: &Shadow, offset: usize) -> Result<(), AccessError> {
        self.range.word(offset)?;
        let mut words = shadow.lock();
        // The kernel that posted the reset clears them in GPU memory.
        if let Some(flags_word) = shadow.flags(offset).and_then(|flags| words.get_mut(flags / 8)) {
            *flags_word = 0;
        }
        self.store_shadowed(&mut words, offset, 0)
    }

    fn store_shadowed(&self, words: &mut [u64], offset: usize, new: u64) -> Result<(), AccessError> {
        let bounds = AccessError::OutOfBounds { offset, len: 8, window: self.len() };
        let word = words.get_mut(offset / 8).ok_or(bounds)?;
        // A load would have ordered it behind earlier stores.
        barrier::before_last_bytes();
        self.unsettled.stored();
        self.range.store_u64(offset, new)?;
        *word = new;
        self.complete()
    }

    fn atomic(&self, offset: usize, change: impl FnOnce(u64) -> Option<u64>) -> Result<u64, AccessError> {
        self.range.word(offset)?;
        if let Some(shadow) = &self.shadow {
            return self.atomic_shadowed(shadow, offset, change);
        }
        let _one_at_a_time = ATOMICS.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.load_u64(offset)?;
        if let Some(new) = change(old) {
            self.store_u64(offset, new)?;
            // Before the unlock: the next atomic must read this value, and the GPU must see it
            // before the response leaves.
            self.complete()?;
        }
        Ok(old)
    }
}

impl fmt::Debug for GpuWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuWindow")
            .field("range", &self.range)
            .field("flush_by_load", &self.flush_by_load)
            .field("dirty", &self.is_dirty())
            .finish_non_exhaustive()
    }
}
