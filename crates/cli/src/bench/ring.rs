//! The memory of one end: message slots with a pattern to send, slots to be filled, and guard zones between them.
//!
//! Both ends lay their memory out alike and know the pattern, so each checks on its own what arrived. Filling and
//! checking happen before and after the timed part.

use anyhow::Context;
use nobounce::memory::gpu::kernel::pattern;
use nobounce::{Device, GpuOptions, Region, RemoteRegion};
use std::sync::Arc;

use super::case::Place;
use super::gpu;

/// Bytes between two slots, and before the first.
pub(super) const GUARD: usize = 64;
pub(super) const GUARD_BYTE: u8 = 0xa5;
/// Bytes of a message's number.
const STAMP: usize = 8;
/// Slots are so many that they take about this much memory (as with perftest, the message stays in the cache: the
/// link is measured, not the memory), but at least one and at most [`MAX_SLOTS`].
const AREA: usize = 256 << 10;
const MAX_SLOTS: usize = 64;

/// One end's memory.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) region: Arc<Region>,
    pub(super) size: usize,
    pub(super) slots: usize,
    pub(super) stride: usize,
    seed: u64,
    stamped: bool,
}

impl Ring {
    /// Memory for messages of `size` bytes; with `stamped`, they are numbered (which needs that they arrive in the
    /// order in which they are sent, that is over one queue pair).
    ///
    /// In GPU memory they are not: whoever stamped them would add to the time of every message what the bench is not about.
    pub(super) fn new(
        device: &Device,
        place: Place,
        size: u64,
        seed: u64,
        stamped: bool,
    ) -> anyhow::Result<Self> {
        let size = usize::try_from(size).context("the message is larger than this machine's memory")?;
        let stride = size.next_multiple_of(GUARD) + GUARD;
        let slots = (AREA / stride).clamp(1, MAX_SLOTS);
        let area = (GUARD + slots * stride).next_multiple_of(4096);
        let region = Arc::new(region(device, place, 2 * area)?);
        Ok(Self { region, size, slots, stride, seed, stamped: stamped && !place.is_gpu() })
    }

    pub(super) fn area(&self) -> usize {
        self.region.len() / 2
    }

    fn slot(&self, message: u64) -> usize {
        usize::try_from(message % self.slots as u64).unwrap_or(0)
    }

    /// Where message number `message` is sent from.
    pub(super) fn source(&self, message: u64) -> usize {
        GUARD + self.slot(message) * self.stride
    }

    /// Where message number `message` arrives.
    pub(super) fn target(&self, message: u64) -> usize {
        self.area() + self.source(message)
    }

    /// Where it arrives at the peer, whose memory is laid out alike.
    pub(super) fn remote_target(&self, peer: &RemoteRegion, message: u64) -> u64 {
        peer.addr + self.target(message) as u64
    }

    /// Where the peer has it to be read.
    pub(super) fn remote_source(&self, peer: &RemoteRegion, message: u64) -> u64 {
        peer.addr + self.source(message) as u64
    }

    /// Puts this round's pattern into the source slots, and guard bytes everywhere else.
    pub(super) fn prepare(&self, round: u32) -> anyhow::Result<()> {
        if let Some((buffer, patterns)) = gpu::patterns_for(&self.region) {
            return Ok(self.prepare_on_gpu(buffer, patterns, round)?);
        }
        self.region.fill(0..self.region.len(), GUARD_BYTE)?;
        let mut bytes = vec![0; self.size];
        for slot in 0..self.slots as u64 {
            self.pattern(round, slot, &mut bytes);
            self.region.write_at(self.source(slot), &bytes)?;
        }
        Ok(())
    }

    /// Whether messages are numbered: they must have room for a number, and come in order.
    fn stamps(&self) -> bool {
        self.stamped && self.size >= STAMP
    }

    /// Writes the number of the message that is about to be sent over the first bytes of its pattern.
    pub(super) fn stamp(&self, message: u64) -> anyhow::Result<()> {
        if self.stamps() {
            self.region.write_u64(self.source(message), message)?;
        }
        Ok(())
    }

    /// Checks that `messages` messages of this round arrived whole, the last one of each slot last, and that nothing
    /// else changed. With `ignore_last` the last byte of each was used to count; `numbered` messages were stamped.
    pub(super) fn check(
        &self,
        round: u32,
        messages: u64,
        ignore_last: bool,
        numbered: bool,
    ) -> Result<(), String> {
        let filled = messages.min(self.slots as u64);
        if let Some((buffer, patterns)) = gpu::patterns_for(&self.region) {
            return self.check_on_gpu(buffer, patterns, round, filled);
        }
        let (mut expected, mut found) = (vec![0; self.size], vec![0; self.stride]);
        let read = |offset, out: &mut [u8]| self.region.read_at(offset, out).map_err(|e| e.to_string());
        let guard = |found: &[u8], at: usize| match found.iter().position(|b| *b != GUARD_BYTE) {
            Some(i) => {
                Err(format!("round {round}: a guard byte changed, {} bytes into the target area", at + i))
            }
            None => Ok(()),
        };
        read(self.area(), &mut found[..GUARD])?;
        guard(&found[..GUARD], 0)?;
        for slot in 0..self.slots as u64 {
            let at = self.target(slot);
            read(at, &mut found)?;
            let in_area = at - self.area();
            if slot >= filled {
                guard(&found, in_area)?;
                continue;
            }
            self.pattern(round, slot, &mut expected);
            if numbered && self.stamps() {
                let slots = self.slots as u64;
                let last = (messages - 1 - slot) / slots * slots + slot;
                expected[..STAMP].copy_from_slice(&last.to_ne_bytes());
            }
            let checked = if ignore_last { self.size.saturating_sub(1) } else { self.size };
            if let Some(i) = (0..checked).find(|&i| found[i] != expected[i]) {
                return Err(format!(
                    "round {round}, slot {slot}: byte {i} of {} is {:#04x} and should be {:#04x}",
                    self.size, found[i], expected[i]
                ));
            }
            guard(&found[self.size..], in_area + self.size)?;
        }
        Ok(())
    }

    /// Different for every position, slot, round and seed.
    fn pattern(&self, round: u32, slot: u64, out: &mut [u8]) {
        pattern(self.pattern_seed(round, slot), out);
    }

    /// What tells the patterns of slots, rounds and runs from each other.
    pub(super) fn pattern_seed(&self, round: u32, slot: u64) -> u64 {
        self.seed ^ (u64::from(round) << 40) ^ (slot << 32)
    }
}

/// How memory of that place is registered.
pub(super) fn options(place: Place) -> GpuOptions {
    GpuOptions { staged: place != Place::Direct, ..GpuOptions::default() }
}

/// Memory of that place, for both directions.
pub(super) fn region(device: &Device, place: Place, len: usize) -> anyhow::Result<Region> {
    let options = options(place);
    Ok(if place.is_gpu() {
        device.register_gpu_on(gpu::ordinal(), len, options)?
    } else {
        device.register(len)?
    })
}

#[cfg(test)]
mod tests {
    use nobounce::Config;

    use super::*;

    fn ring(size: u64) -> Ring {
        let config = Config::default().at("127.60.0.1").unwrap();
        Ring::new(&Device::open_with(&config).unwrap(), Place::Host, size, 7, true).unwrap()
    }

    /// As if every message had arrived.
    fn deliver(ring: &Ring, messages: u64) {
        let mut bytes = vec![0; ring.size];
        for slot in 0..messages {
            ring.region.read_at(ring.source(slot), &mut bytes).unwrap();
            ring.region.write_at(ring.target(slot), &bytes).unwrap();
        }
    }

    #[test]
    fn what_arrived_whole_passes_and_anything_else_does_not() {
        for size in [0, 1, 63, 64, 1000] {
            let ring = ring(size);
            ring.prepare(3).unwrap();
            assert_eq!(ring.check(3, 0, false, false), Ok(()));
            deliver(&ring, 2);
            assert_eq!(ring.check(3, 2, false, false), Ok(()), "size {size}");
            // Every slot once more, numbered.
            let slots = ring.slots as u64;
            (slots..2 * slots).for_each(|message| ring.stamp(message).unwrap());
            deliver(&ring, slots);
            assert_eq!(ring.check(3, 2 * slots, false, true), Ok(()), "size {size}");
            assert_eq!(ring.check(3, slots, false, true).is_err(), size >= 8, "the numbers of another pass");
            ring.prepare(3).unwrap();
            deliver(&ring, 2);
            // A byte too far.
            let beyond = ring.target(1) + ring.size;
            ring.region.write_at(beyond, &[1]).unwrap();
            assert!(ring.check(3, 2, false, false).unwrap_err().contains("guard byte"), "size {size}");
            ring.region.write_at(beyond, &[GUARD_BYTE]).unwrap();
            if size > 0 {
                assert!(ring.check(4, 2, false, false).is_err(), "another round's bytes");
                assert!(ring.check(3, 1, false, false).is_err(), "a message nobody sent");
                assert!(ring.check(3, 3, false, false).is_err(), "a message that is missing");
                let mut last = [0];
                ring.region.read_at(ring.target(0) + ring.size - 1, &mut last).unwrap();
                ring.region.write_at(ring.target(0) + ring.size - 1, &[!last[0]]).unwrap();
                assert!(ring.check(3, 2, false, false).is_err());
                assert_eq!(ring.check(3, 2, true, false), Ok(()));
            }
        }
    }
}
