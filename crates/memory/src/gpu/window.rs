//! The CPU's BAR1 window onto GPU memory: the methods to map one, tried in fallback order, each
//! verified before use.
//!
//! *Methods.* A dma-buf that the driver lets the CPU map (newer drivers); the resource manager's
//! own mapping; the `gdrdrv` module, if installed; none. Every refusal is kept with its reason.
//!
//! *Verification.* The methods rest partly on private driver interfaces. So each is verified once
//! per process and GPU on memory of our own (`proof.rs`). Each window is compared with its memory,
//! by reads only, before it is handed out (`compare.rs`). Memory that we did not allocate is never
//! written for this check.

mod compare;
mod dmabuf_method;
mod gdrdrv_method;
mod mapping;
mod proof;
mod rm_method;
mod sampler;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use super::range::{GpuRange, MemoryKind, Segment};
use mapping::Extent;
pub(super) use mapping::Mapping;
pub(super) use sampler::witness_of;

/// An allocation up to this size is mapped whole, so that registrations within it share one
/// mapping.
const WHOLE_UP_TO: u64 = 64 << 20;
/// A larger one too, if the range is at least one part in so many of it.
const WHOLE_PARTS: u64 = 4;
/// Parts of allocations are mapped in multiples of this, the GPU's second page size.
const PART_ALIGNMENT: u64 = 64 << 10;

/// A method to map a window, in fallback order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Method {
    /// `mmap` of a dma-buf that CUDA exports.
    DmaBufMmap,
    /// The resource manager maps the memory through BAR1.
    Rm,
    /// The `gdrdrv` kernel module of GDRCopy.
    Gdrdrv,
}

impl Method {
    /// All, in the order they are tried.
    pub const ALL: [Self; 3] = [Self::DmaBufMmap, Self::Rm, Self::Gdrdrv];

    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DmaBufMmap => "dma-buf mmap",
            Self::Rm => "resource manager",
            Self::Gdrdrv => "gdrdrv",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a method mapped no window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowRefusal {
    /// The method.
    pub method: Method,
    /// The reason, for people.
    pub reason: String,
    /// Space ran out, or the GPU was busy: another time or a smaller range may do.
    pub may_pass: bool,
}

impl fmt::Display for WindowRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.method, self.reason)
    }
}

/// A reason not to map, and whether it may pass.
#[derive(Clone, Debug)]
struct Refused {
    reason: String,
    /// Space ran out, or the GPU was busy: another time or a smaller range may do.
    passing: bool,
}

impl Refused {
    fn new(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), passing: false }
    }

    fn passing(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), passing: true }
    }
}

/// A window that was found.
#[derive(Debug)]
pub(super) struct OpenedWindow {
    pub(super) method: Method,
    pub(super) mapping: Arc<Mapping>,
    /// Where the range begins in the mapping.
    pub(super) offset: usize,
}

impl OpenedWindow {
    /// The address of the range's first byte in this process.
    pub(super) fn base(&self) -> *mut u8 {
        self.mapping.base().wrapping_add(self.offset)
    }
}

/// Whose a mapping is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MappingOwner {
    /// All registrations within one allocation may share it: they only access it.
    Everybody,
    /// One registration's, which may hide it.
    Registration,
}

/// Maps a window onto `range`, and returns why the earlier methods failed.
pub(super) fn open(range: &GpuRange, owner: MappingOwner) -> (Option<OpenedWindow>, Vec<WindowRefusal>) {
    let mut refusals = Vec::new();
    let mut state = lock_state();
    for method in Method::ALL {
        match open_by(&mut state, method, range, owner) {
            Ok(opened) => return (Some(opened), refusals),
            Err(refused) => {
                refusals.push(WindowRefusal { method, reason: refused.reason, may_pass: refused.passing })
            }
        }
    }
    (None, refusals)
}

/// State shared by all windows of this process.
#[derive(Default)]
struct WindowState {
    proofs: proof::WindowProofs,
    mappings: HashMap<MappingKey, Vec<Weak<Mapping>>>,
}

/// One allocation, under one method. A buffer ID is never reused, so that a freed and reused
/// address differs.
type MappingKey = (Method, i32, u64, u64);

/// One lock for all: registration is rare, and the proof must run once.
fn lock_state() -> MutexGuard<'static, WindowState> {
    static STATE: LazyLock<Mutex<WindowState>> = LazyLock::new(Mutex::default);
    // A panic inside leaves at worst a proof undone, which is then done again.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WindowState {
    /// A live mapping of the same allocation that holds the whole of `extent`.
    fn cached(&self, key: MappingKey, extent: Extent) -> Option<Arc<Mapping>> {
        self.mappings
            .get(&key)?
            .iter()
            .filter_map(Weak::upgrade)
            .find(|mapping| mapping.extent().contains(extent) && !mapping.is_cut())
    }

    fn keep(&mut self, key: MappingKey, mapping: &Arc<Mapping>) {
        for mappings in self.mappings.values_mut() {
            mappings.retain(|mapping| mapping.strong_count() > 0);
        }
        self.mappings.retain(|_, mappings| !mappings.is_empty());
        self.mappings.entry(key).or_default().push(Arc::downgrade(mapping));
    }
}

fn open_by(
    state: &mut WindowState,
    method: Method,
    range: &GpuRange,
    owner: MappingOwner,
) -> Result<OpenedWindow, Refused> {
    if let Some(reason) = out_of_question(method, range) {
        return Err(Refused::new(reason));
    }
    proof::ensure(&mut state.proofs, method, range)?;
    let needed = part_of(range);
    let mapping = match (owner, range.segments()) {
        (MappingOwner::Everybody, [segment]) if segment.buffer_id != 0 => {
            shared(state, method, range, *segment, needed)?
        }
        // The stand-in's files cannot hold one page twice, but a mapping of them can be doubled.
        (MappingOwner::Registration, [segment]) if range.gpu().driver().is_stand_in() => {
            Arc::new(Mapping::twin(&shared(state, method, range, *segment, needed)?, needed)?)
        }
        _ => Arc::new(map(method, range, needed)?),
    };
    compare::check(range, &mapping)?;
    let offset = usize::try_from(range.addr() - mapping.extent().start)
        .map_err(|_| Refused::new("the range exceeds the address space of this process"))?;
    Ok(OpenedWindow { method, mapping, offset })
}

/// The mapping that registrations within one allocation share.
fn shared(
    state: &mut WindowState,
    method: Method,
    range: &GpuRange,
    segment: Segment,
    needed: Extent,
) -> Result<Arc<Mapping>, Refused> {
    let key = (method, range.ordinal(), segment.base, segment.buffer_id);
    if let Some(mapping) = state.cached(key, needed) {
        return Ok(mapping);
    }
    let mapping = Arc::new(map_generously(method, range, segment, needed)?);
    state.keep(key, &mapping);
    Ok(mapping)
}

/// Maps the whole allocation where that costs little, so that its other parts need no mapping of
/// their own; else the requested part.
fn map_generously(
    method: Method,
    range: &GpuRange,
    segment: Segment,
    needed: Extent,
) -> Result<Mapping, Refused> {
    // Whole GPU pages may reach beyond the allocation.
    let pages = Extent::whole_pages(segment.base, segment.end());
    let whole = Extent { start: pages.start.min(needed.start), end: pages.end.max(needed.end) };
    let is_cheap = segment.size <= WHOLE_UP_TO || segment.size <= needed.len().saturating_mul(WHOLE_PARTS);
    // A small BAR1 is for what is needed.
    let has_room = range.gpu().bar1_size().is_none_or(|bar1| segment.size <= bar1 / 8);
    let wanted = (whole != needed && is_cheap && has_room).then_some(whole);
    first_that_fits(wanted, needed, |extent| map(method, range, extent))
}

/// Maps the preferred extent, or the required one where that does not fit.
fn first_that_fits<T>(
    wanted: Option<Extent>,
    needed: Extent,
    mut map: impl FnMut(Extent) -> Result<T, Refused>,
) -> Result<T, Refused> {
    if let Some(wanted) = wanted {
        match map(wanted) {
            Err(refused) if refused.passing => {}
            answer => return answer,
        }
    }
    map(needed)
}

fn map(method: Method, range: &GpuRange, extent: Extent) -> Result<Mapping, Refused> {
    match method {
        Method::DmaBufMmap => dmabuf_method::map(range, extent),
        Method::Rm => rm_method::map(range, extent),
        Method::Gdrdrv => gdrdrv_method::map(range, extent),
    }
}

/// The part of the allocations that the range needs.
fn part_of(range: &GpuRange) -> Extent {
    let end = range.addr() + range.len() as u64;
    let pages = Extent::whole_pages(range.base(), range.base().saturating_add(range.size()));
    // A range of whole GPU pages is needed whole, though it may leave its allocation.
    Extent {
        start: (range.addr() / PART_ALIGNMENT * PART_ALIGNMENT).max(pages.start).min(range.addr()),
        end: end.next_multiple_of(PART_ALIGNMENT).min(pages.end).max(end),
    }
}

/// The part of `extent` to map from the driver's object behind `segment`. With one segment only it
/// is everything: the extent beyond the segment is the rest of the same object.
fn piece_of(range: &GpuRange, segment: &Segment, extent: Extent) -> Option<Extent> {
    match range.segments() {
        [_] => Some(extent),
        _ => Extent::whole_pages(segment.base, segment.end()).overlap(extent),
    }
}

/// Why a method cannot apply to this memory at all.
fn out_of_question(method: Method, range: &GpuRange) -> Option<String> {
    let gpu = range.gpu();
    if range.kind() == MemoryKind::Managed {
        return Some("managed memory moves between host and GPU and has no fixed place to map".to_owned());
    }
    if gpu.driver().is_stand_in() && method == Method::Rm {
        return Some("the stand-in driver of the tests has no resource manager".to_owned());
    }
    too_large(range.len() as u64, gpu.bar1_size()?, gpu)
}

fn too_large(len: u64, bar1: u64, gpu: &impl fmt::Display) -> Option<String> {
    (len > bar1).then(|| {
        format!(
            "the range of {} MiB is larger than the BAR1 of {gpu}, {} MiB; register it in parts, or switch on resizable BAR",
            len >> 20,
            bar1 >> 20
        )
    })
}

/// BAR1 is full, or most likely so: `found` is what was seen of it.
fn no_room(gpu: &impl fmt::Display, bar1: Option<u64>, len: usize, found: impl fmt::Display) -> Refused {
    let bar1 = bar1.map_or_else(|| "of unknown size".to_owned(), |size| format!("of {} MiB", size >> 20));
    Refused::passing(format!(
        "no room for {} KiB in the BAR1 of {gpu}, {bar1} ({found}); register less, close other windows, or switch on resizable BAR",
        len >> 10
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_tried_from_the_cleanest_to_the_last() {
        assert!(Method::ALL.is_sorted());
        let reason = "the module is not loaded".to_owned();
        let refusal = WindowRefusal { method: Method::Gdrdrv, reason, may_pass: false };
        assert_eq!(refusal.to_string(), "gdrdrv: the module is not loaded");
    }

    #[test]
    fn a_range_larger_than_bar1_is_refused_with_both_sizes() {
        let reason = too_large(300 << 20, 256 << 20, &"GPU 0 (a card)").unwrap();
        for words in ["300 MiB", "256 MiB", "GPU 0 (a card)", "in parts"] {
            assert!(reason.contains(words), "{reason}");
        }
        assert_eq!(too_large(256 << 20, 256 << 20, &"GPU 0"), None);
    }

    /// BAR1 has no space for the whole allocation: the requested part may still fit. Other refusals
    /// are final.
    #[test]
    fn a_full_bar1_gets_the_part_that_is_needed() {
        let (whole, needed) = (Extent { start: 0, end: 1 << 30 }, Extent { start: 0x10000, end: 0x20000 });
        let full = |extent: Extent| {
            if extent == whole { Err(Refused::passing("BAR1 is full")) } else { Ok(extent) }
        };
        assert_eq!(first_that_fits(Some(whole), needed, full).unwrap(), needed);
        assert_eq!(first_that_fits(None, needed, full).unwrap(), needed);
        let mut tried = 0;
        let refused = first_that_fits(Some(whole), needed, |_| {
            tried += 1;
            Err::<(), _>(Refused::new("not this memory"))
        });
        assert_eq!((refused.unwrap_err().reason.as_str(), tried), ("not this memory", 1));
        let refused =
            first_that_fits(Some(whole), needed, |_| Err::<(), _>(Refused::passing("BAR1 is full")));
        assert!(refused.unwrap_err().passing);
    }
}
