//! Verifies each window method once per process and GPU, on our own memory, before it maps memory
//! of the program.
//!
//! First the GPU writes random words, which the windows must show: only this proves that they map
//! our own memory. Only then are words stored through the windows, which the GPU must show in turn.
//! The GPU's part is done when its stream completes, not when the call returns. All windows are
//! verified together, so that we wait for copies twice in total and not twice for each. With a
//! kernel on all of an H200 the first registration took 549 ms when each waited by itself.

use std::collections::{BTreeMap, HashMap};

use super::super::allocation::GpuBuffer;
use super::super::api::Context;
use super::super::error::CudaError;
use super::super::range::{self, GpuRange, GpuRangeError, MemoryKind};
use super::mapping::{Extent, Mapping};
use super::{Method, PART_ALIGNMENT, Refused, compare, sampler};
use crate::barrier;

/// Two pages of the GPU, so that the second is seen to follow the first.
const LARGE: usize = 4 << 20;
/// Small allocations share a chunk: of several, at most one begins where the chunk does.
const SMALL: [usize; 3] = [4096, 70_000, 256];
/// Words written and compared in each direction.
const WORDS: u64 = 16;

/// Results so far, by method, GPU and kind of memory.
#[derive(Default)]
pub(super) struct WindowProofs {
    done: HashMap<(Method, i32, Recipe), Result<(), Refused>>,
    /// Memory allocated for the proof, by GPU. It is never freed: `cuMemFree` waits for the GPU.
    scratch: HashMap<i32, Scratch>,
}

/// Kinds of memory that need a proof of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Recipe {
    Vmm,
    Allocated,
}

/// Addresses, lengths and numbers of allocations.
struct Scratch {
    context: Context,
    allocated: Vec<(u64, usize, u64)>,
}

/// Ensures that `method` was verified for memory like that of `range` on its GPU.
pub(super) fn ensure(proofs: &mut WindowProofs, method: Method, range: &GpuRange) -> Result<(), Refused> {
    let recipe = match range.kind() {
        MemoryKind::VmmExportable | MemoryKind::VmmPrivate | MemoryKind::VmmSeveral => Recipe::Vmm,
        _ => Recipe::Allocated,
    };
    let key = (method, range.ordinal(), recipe);
    if let Some(answer) = proofs.done.get(&key) {
        return answer.clone();
    }
    let answer = prove(proofs, method, recipe, range).map_err(|refused| Refused {
        reason: format!("not usable on a scratch allocation: {}", refused.reason),
        ..refused
    });
    // Transient failures are retried at the next registration.
    if !matches!(&answer, Err(refused) if refused.passing) {
        proofs.done.insert(key, answer.clone());
    }
    answer
}

fn prove(proofs: &mut WindowProofs, method: Method, recipe: Recipe, like: &GpuRange) -> Result<(), Refused> {
    match recipe {
        Recipe::Vmm => {
            let buffer = GpuBuffer::new_in(like.gpu(), like.context(), LARGE).map_err(no_scratch)?;
            prove_on(method, &[(buffer.addr(), LARGE)])
        }
        Recipe::Allocated => prove_on(method, &proofs.allocated(like)?),
    }
}

impl WindowProofs {
    /// Scratch memory by `cuMemAlloc`, made anew if a reset of the device took the old one.
    fn allocated(&mut self, like: &GpuRange) -> Result<Vec<(u64, usize)>, Refused> {
        let driver = like.gpu().driver();
        let is_alive = |&(addr, _, id): &(u64, usize, u64)| {
            driver.relaxed(|api| range::buffer_id(api, addr)).is_ok_and(|now| now == id)
        };
        let ordinal = like.ordinal();
        if !self.scratch.get(&ordinal).is_some_and(|scratch| {
            scratch.context == like.context() && scratch.allocated.iter().all(is_alive)
        }) {
            let mut allocated = Vec::new();
            driver
                .in_context(like.context(), |api| {
                    for len in [LARGE].into_iter().chain(SMALL) {
                        let mut addr = 0;
                        // SAFETY: the call writes one address.
                        unsafe { api.mem_alloc(&raw mut addr, len) }?;
                        allocated.push((addr, len, range::buffer_id(api, addr)?));
                    }
                    Ok::<_, CudaError>(())
                })
                .map_err(no_scratch)?;
            self.scratch.insert(ordinal, Scratch { context: like.context(), allocated });
        }
        Ok(self.scratch[&ordinal].allocated.iter().map(|&(addr, len, _)| (addr, len)).collect())
    }
}

fn no_scratch(error: CudaError) -> Refused {
    Refused::passing(format!("scratch allocation failed: {error}"))
}

/// Verifies the method on our own allocations: the whole of each, then parts that begin elsewhere.
fn prove_on(method: Method, allocations: &[(u64, usize)]) -> Result<(), Refused> {
    let ranges = allocations
        .iter()
        .map(|&(addr, len)| GpuRange::of(addr, len))
        .collect::<Result<Vec<_>, GpuRangeError>>()
        .map_err(Refused::passing)?;
    let whole = |range: &GpuRange| Extent::whole_pages(range.base(), range.base() + range.size());
    check_both_ways(method, ranges.iter().map(|range| (range, whole(range))))?;
    let parts = ranges.iter().filter_map(|range| {
        let whole = whole(range);
        let part = Extent { start: whole.start + whole.len() / 2 + PART_ALIGNMENT, end: whole.end };
        let is_one = part.start < part.end && part.start.is_multiple_of(PART_ALIGNMENT);
        is_one.then_some((range, part))
    });
    check_both_ways(method, parts)
}

/// A window onto our own memory, and the addresses of the words that are compared through it.
struct Seen {
    mapping: Mapping,
    addresses: Vec<u64>,
}

impl Seen {
    fn new(range: &GpuRange, mapping: Mapping) -> Self {
        let ours = Extent { start: range.addr(), end: range.addr() + range.len() as u64 };
        let addresses = ours.overlap(mapping.extent()).map_or_else(Vec::new, |part| {
            let last = part.end / 8 * 8 - 8;
            let step = ((last - part.start) / (WORDS - 1)) / 8 * 8;
            (0..WORDS - 1).map(|index| part.start + index * step).chain([last]).collect()
        });
        Self { mapping, addresses }
    }
}

/// Maps all allocations, each in one context, and verifies all windows together.
fn check_both_ways<'a>(
    method: Method,
    named: impl Iterator<Item = (&'a GpuRange, Extent)> + Clone,
) -> Result<(), Refused> {
    let Some((first, _)) = named.clone().next() else { return Ok(()) };
    let (driver, context) = (first.gpu().driver(), first.context());
    let windows = named
        .map(|(range, extent)| Ok(Seen::new(range, super::map(method, range, extent)?)))
        .collect::<Result<Vec<_>, Refused>>()?;
    // Small allocations share pages, but no words.
    let mut words: BTreeMap<u64, u64> = BTreeMap::new();
    for window in &windows {
        words.extend(window.addresses.iter().copied().zip(secrets(window.addresses.len())?));
    }
    let by_gpu: Vec<(u64, u64)> = words.iter().map(|(&address, &word)| (address, word)).collect();
    sampler::write(driver, context, &by_gpu)?;
    for window in &windows {
        let seen = compare::load(&window.mapping, &window.addresses)?;
        if window.addresses.iter().zip(&seen).any(|(address, word)| words[address] != *word) {
            return Err(Refused::new("the window does not show what the GPU wrote to scratch memory"));
        }
    }

    // The windows show the random words: they map our memory, and may be stored to.
    for window in &windows {
        let by_cpu = secrets(window.addresses.len())?;
        let stored = window.mapping.window();
        for (&address, &word) in window.addresses.iter().zip(&by_cpu) {
            let offset = window.mapping.at(address).addr() - window.mapping.base().addr();
            stored
                .store_u64(offset, word)
                .map_err(|error| Refused::new(format!("store through the window failed: {error}")))?;
            words.insert(address, word);
        }
        barrier::before_completion();
        // A load flushes earlier stores on the same route, whatever the GPU's ordering.
        compare::load(&window.mapping, &window.addresses[..window.addresses.len().min(1)])?;
    }
    let addresses: Vec<u64> = words.keys().copied().collect();
    if !sampler::read(driver, context, &addresses)?.iter().eq(words.values()) {
        return Err(Refused::new("the GPU does not see stores through the window into scratch memory"));
    }
    Ok(())
}

/// Unpredictable random words, all different.
fn secrets(count: usize) -> Result<Vec<u64>, Refused> {
    let mut seed = [0u8; 8];
    // SAFETY: the buffer has the length that is passed.
    let got = unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) };
    if got != 8 {
        return Err(Refused::passing("getrandom failed"));
    }
    let mut state = u64::from_ne_bytes(seed);
    Ok((0..count)
        .map(|_| {
            // A Weyl sequence, mixed.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ (state >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            mixed ^ (mixed >> 32)
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::secrets;

    #[test]
    fn secrets_differ_from_each_other_and_from_time_to_time() {
        let (one, two) = (secrets(64).unwrap(), secrets(64).unwrap());
        let mut all: Vec<u64> = one.into_iter().chain(two).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 128);
    }
}
