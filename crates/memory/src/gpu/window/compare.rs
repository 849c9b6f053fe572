//! Verifies, by reads alone, that a window maps the right memory.

use std::collections::HashSet;
use std::sync::atomic::{Ordering, fence};

use super::super::range::GpuRange;
use super::Refused;
use super::mapping::{Extent, Mapping};
use super::sampler;

/// Words compared across a range, besides those at the ends of its segments.
const SPREAD: u64 = 14;
/// Words compared where only the contents show which part of an object is mapped.
const UNSURE_SPREAD: u64 = 62;
/// Required number of different words: uniform memory proves nothing.
const UNSURE_DIFFERENT: usize = 4;
/// The program may write the memory concurrently: one agreement per word suffices.
const ROUNDS: usize = 6;

/// Compares sampled words of the range with the results of GPU copies.
pub(super) fn check(range: &GpuRange, mapping: &Mapping) -> Result<(), Refused> {
    let registered = Extent { start: range.addr(), end: range.addr() + range.len() as u64 };
    let mut addresses = Vec::new();
    for segment in range.segments() {
        let pages = Extent { start: segment.base, end: segment.end() };
        let Some(part) = registered.overlap(pages) else { continue };
        let unsure = mapping.unsure().iter().any(|unsure| unsure.overlap(part).is_some());
        let spread = match (unsure, range.segments().len()) {
            (true, _) => UNSURE_SPREAD,
            (false, 1) => SPREAD,
            (false, _) => 0,
        };
        spread_words(part, spread, &mut addresses);
    }
    // A range of a few bytes may hold no whole word; then its place rests on the proof alone.
    let seen = agree(range, mapping, &addresses)?;
    for &unsure in mapping.unsure() {
        let different: HashSet<u64> = addresses
            .iter()
            .zip(&seen)
            .filter(|&(&address, _)| (unsure.start..unsure.end).contains(&address))
            .map(|(_, &word)| word)
            .collect();
        if registered.overlap(unsure).is_some() && different.len() < UNSURE_DIFFERENT {
            return Err(Refused::new(
                "cannot identify the mapped part of a larger VMM handle: its contents are uniform; map handles whole, or fill \
                 the memory before registration",
            ));
        }
    }
    Ok(())
}

/// Adds the addresses of aligned words inside `part`: the first, the last, and `spread` between
/// them.
fn spread_words(part: Extent, spread: u64, addresses: &mut Vec<u64>) {
    let first = part.start.next_multiple_of(8);
    let Some(last) = (part.end / 8 * 8).checked_sub(8).filter(|&last| last >= first) else { return };
    let words = (last - first) / 8;
    let steps = (spread + 1).min(words.max(1));
    addresses.extend((0..=steps).map(|step| {
        // In 128 bits, since a position times a number of steps may not fit in 64.
        let word = u128::from(words) * u128::from(step) / u128::from(steps);
        first + u64::try_from(word).unwrap_or(0) * 8
    }));
    addresses.dedup();
}

/// Returns the words, each of which was the same on both sides at some moment.
fn agree(range: &GpuRange, mapping: &Mapping, addresses: &[u64]) -> Result<Vec<u64>, Refused> {
    let mut seen = vec![0; addresses.len()];
    let mut left: Vec<usize> = (0..addresses.len()).collect();
    for _ in 0..ROUNDS {
        if left.is_empty() {
            return Ok(seen);
        }
        let asked: Vec<u64> = left.iter().map(|&index| addresses[index]).collect();
        let before = load(mapping, &asked)?;
        let copied = sampler::read(range.gpu().driver(), range.context(), &asked)?;
        let after = load(mapping, &asked)?;
        left = left
            .iter()
            .enumerate()
            .filter(|&(at, &index)| {
                seen[index] = copied[at];
                copied[at] != before[at] && copied[at] != after[at]
            })
            .map(|(_, &index)| index)
            .collect();
    }
    if left.is_empty() {
        return Ok(seen);
    }
    Err(Refused::new(format!(
        "the window does not show this memory: {} of {} sampled words differ from the GPU's copy, the first at {:#x}",
        left.len(),
        addresses.len(),
        addresses[left[0]]
    )))
}

/// Loads words through the window.
pub(super) fn load(mapping: &Mapping, addresses: &[u64]) -> Result<Vec<u64>, Refused> {
    fence_loads();
    let window = mapping.window();
    addresses
        .iter()
        .map(|&address| {
            let offset = mapping.at(address).addr() - mapping.base().addr();
            window
                .load_u64(offset)
                .map_err(|error| Refused::new(format!("load through the window failed: {error}")))
        })
        .collect()
}

/// Loads from write-combining memory may hit stale fill buffers, unless they are fenced.
fn fence_loads() {
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: mfence is part of the x86_64 baseline and touches neither memory nor registers.
    unsafe {
        std::arch::x86_64::_mm_mfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(start: u64, end: u64, spread: u64) -> Vec<u64> {
        let mut addresses = Vec::new();
        spread_words(Extent { start, end }, spread, &mut addresses);
        addresses
    }

    #[test]
    fn sampled_words_are_aligned_and_inside_and_at_both_ends() {
        for (start, end) in [(0x1000, 0x2000), (0x1001, 0x2001), (0x1007, 0x1fff), (0x1000, 1 << 40)] {
            let addresses = words(start, end, SPREAD);
            assert!(
                addresses.iter().all(|address| address % 8 == 0 && *address >= start && address + 8 <= end)
            );
            assert!(addresses.is_sorted() && addresses.len() > 10, "{addresses:x?}");
            assert!(addresses[0] < start + 8 && addresses[addresses.len() - 1] + 16 > end);
        }
        assert_eq!(words(0x1000, 0x1008, SPREAD), [0x1000]);
        assert_eq!(words(0x1000, 0x1010, SPREAD), [0x1000, 0x1008]);
        assert!(words(0x1001, 0x1008, SPREAD).is_empty());
        assert!(words(0x1004, 0x100a, SPREAD).is_empty());
        assert_eq!(words(0x1000, 0x3000, 0), [0x1000, 0x2ff8]);
    }
}
