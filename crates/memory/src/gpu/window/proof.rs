//! Each way to a window is proved once per process and GPU, on memory of our own, before it is used for anybody else's.
//!
//! First the GPU writes words that nobody can guess and the window must show them: only then is it known that the window lies on our
//! own memory, and only then is anything stored through it, which the GPU must then show in turn.

use std::collections::HashMap;

use super::super::allocation::GpuBuffer;
use super::super::api::Context;
use super::super::error::CudaError;
use super::super::range::{self, GpuRange, MemoryKind, RangeError};
use super::mapping::{Extent, Mapping};
use super::{PART_ALIGNMENT, Refused, Rung, compare, sampler};
use crate::barrier;

/// Two pages of the GPU, so that the second is seen to follow the first.
const LARGE: usize = 4 << 20;
/// Small allocations share a chunk: of several, at most one begins where the chunk does.
const SMALL: [usize; 3] = [4096, 70_000, 256];
/// Words written and looked at in each direction.
const WORDS: u64 = 16;

/// What has been tried, by rung, GPU and kind of memory.
#[derive(Default)]
pub(super) struct Proofs {
    done: HashMap<(Rung, i32, Recipe), Result<(), Refused>>,
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

/// Makes sure that `rung` was proved for memory like that of `range` on its GPU.
pub(super) fn ensure(proofs: &mut Proofs, rung: Rung, range: &GpuRange) -> Result<(), Refused> {
    let recipe = match range.kind() {
        MemoryKind::VmmExportable | MemoryKind::VmmPrivate | MemoryKind::VmmSeveral => Recipe::Vmm,
        _ => Recipe::Allocated,
    };
    let key = (rung, range.ordinal(), recipe);
    if let Some(answer) = proofs.done.get(&key) {
        return answer.clone();
    }
    let answer = prove(proofs, rung, recipe, range).map_err(|refused| Refused {
        reason: format!("not usable on a scratch allocation: {}", refused.reason),
        ..refused
    });
    // What may pass is tried again at the next registration.
    if !matches!(&answer, Err(refused) if refused.passing) {
        proofs.done.insert(key, answer.clone());
    }
    answer
}

fn prove(proofs: &mut Proofs, rung: Rung, recipe: Recipe, like: &GpuRange) -> Result<(), Refused> {
    match recipe {
        Recipe::Vmm => {
            let buffer = GpuBuffer::new_in(like.gpu(), like.context(), LARGE).map_err(no_scratch)?;
            prove_on(rung, buffer.addr(), LARGE)
        }
        Recipe::Allocated => {
            for (addr, len) in proofs.allocated(like)? {
                prove_on(rung, addr, len)?;
            }
            Ok(())
        }
    }
}

impl Proofs {
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
    Refused::passing(format!("a scratch allocation failed: {error}"))
}

/// Proves the rung on memory of our own: the whole allocation, and a part of it that begins elsewhere.
fn prove_on(rung: Rung, addr: u64, len: usize) -> Result<(), Refused> {
    let range = GpuRange::of(addr, len).map_err(|error: RangeError| Refused::passing(error))?;
    let whole = Extent::whole_pages(range.base(), range.base() + range.size());
    check_both_ways(&range, &super::map(rung, &range, whole)?)?;
    let part = Extent { start: whole.start + whole.len() / 2 + PART_ALIGNMENT, end: whole.end };
    if part.start < part.end && part.start.is_multiple_of(PART_ALIGNMENT) {
        check_both_ways(&range, &super::map(rung, &range, part)?)?;
    }
    Ok(())
}

fn check_both_ways(range: &GpuRange, mapping: &Mapping) -> Result<(), Refused> {
    let (driver, context) = (range.gpu().driver(), range.context());
    let ours = Extent { start: range.addr(), end: range.addr() + range.len() as u64 };
    let Some(part) = ours.overlap(mapping.extent()) else { return Ok(()) };
    let last = part.end / 8 * 8 - 8;
    let step = ((last - part.start) / (WORDS - 1)) / 8 * 8;
    let addresses: Vec<u64> = (0..WORDS - 1).map(|index| part.start + index * step).chain([last]).collect();

    let by_gpu = secrets(addresses.len())?;
    let words: Vec<(u64, u64)> = addresses.iter().copied().zip(by_gpu.iter().copied()).collect();
    sampler::write(driver, context, &words)?;
    if compare::load(mapping, &addresses)? != by_gpu {
        return Err(Refused::new("the window does not show what the GPU wrote to memory of our own"));
    }

    // The window shows words that nobody could guess: it lies on our memory, and may be stored to.
    let by_cpu = secrets(addresses.len())?;
    let window = mapping.window();
    for (&address, &word) in addresses.iter().zip(&by_cpu) {
        let offset = mapping.at(address).addr() - mapping.base().addr();
        window
            .store_u64(offset, word)
            .map_err(|error| Refused::new(format!("a store through the window failed: {error}")))?;
    }
    barrier::before_completion();
    // Stores travel ahead of a load on the same way, whatever the GPU's ordering.
    compare::load(mapping, &addresses[..1])?;
    if sampler::read(driver, context, &addresses)? != by_cpu {
        return Err(Refused::new(
            "the GPU does not see what was stored through the window into memory of our own",
        ));
    }
    Ok(())
}

/// Words that nobody can guess, and of which no two are alike.
fn secrets(count: usize) -> Result<Vec<u64>, Refused> {
    let mut seed = [0u8; 8];
    // SAFETY: the buffer has the length that is passed.
    let got = unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) };
    if got != 8 {
        return Err(Refused::passing("the kernel gave no random numbers"));
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
