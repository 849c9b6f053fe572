//! The memory of one end: message slots with a pattern to send, slots to be filled, and guard zones
//! between them.
//!
//! Both ends use the same layout and know the pattern, so each checks on its own what arrived.
//! Filling and checking happen outside the timed part.

use anyhow::Context;
use nobounce::memory::gpu::kernel::pattern;
use nobounce::{Device, GpuOptions, Region, RemoteRegion};
use std::cell::Cell;
use std::sync::Arc;

use super::case::Place;
use super::round::{Round, Spoil};
use super::{gpu, gpu_choice};

/// Bytes between two slots, and before the first.
pub(super) const GUARD: usize = 64;
pub(super) const GUARD_BYTE: u8 = 0xa5;
/// Bytes of a message's number.
const STAMP: usize = 8;
/// Size of the slots together, with at least one and at most [`MAX_SLOTS`]. As in perftest,
/// messages stay in the cache: the link is measured, not the memory.
const AREA: usize = 256 << 10;
const MAX_SLOTS: usize = 64;
/// Most slots of checked rounds. Long messages have `LONG_SLOTS`, if those take at most `LONG_AREA`
/// bytes.
const CHECKED_SLOTS: usize = 16;
const LONG_SLOTS: usize = 8;
const LONG_AREA: usize = 32 << 20;

/// One end's memory.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) region: Arc<Region>,
    pub(super) size: usize,
    pub(super) stride: usize,
    /// Slots of timed rounds, of checked ones, and of the round that was prepared last.
    timed_slots: usize,
    checked_slots: usize,
    slots: Cell<usize>,
    seed: u64,
    stamped: bool,
}

impl Ring {
    /// Memory for messages of `size` bytes. With `stamped`, they carry sequence numbers, which
    /// needs in-order arrival, that is a single queue pair.
    ///
    /// Messages in GPU memory carry no stamp: stamping would add unrelated time to every message.
    /// Checked rounds find a message that is lost there behind another one.
    pub(super) fn new(
        device: &Device,
        place: Place,
        size: u64,
        seed: u64,
        stamped: bool,
    ) -> anyhow::Result<Self> {
        let size = usize::try_from(size).context("the message is larger than the address space")?;
        let stride = size.next_multiple_of(GUARD) + GUARD;
        let timed_slots = (AREA / stride).clamp(1, MAX_SLOTS);
        let checked_slots = timed_slots.clamp((LONG_AREA / size.max(1)).clamp(1, LONG_SLOTS), CHECKED_SLOTS);
        let area = (GUARD + timed_slots.max(checked_slots) * stride).next_multiple_of(4096);
        let region = Arc::new(region(device, place, 2 * area)?);
        let slots = Cell::new(timed_slots);
        Ok(Self {
            region,
            size,
            stride,
            timed_slots,
            checked_slots,
            slots,
            seed,
            stamped: stamped && !place.is_gpu(),
        })
    }

    pub(super) fn area(&self) -> usize {
        self.region.len() / 2
    }

    /// Slots of the round that was prepared last.
    pub(super) fn slots(&self) -> u64 {
        self.slots.get() as u64
    }

    /// Messages of a checked round: one for each slot.
    pub(super) fn checkable(&self) -> u64 {
        self.checked_slots as u64
    }

    /// Bytes of the slots in use with their guard zones, from the beginning of either area.
    pub(super) fn span(&self) -> usize {
        GUARD + self.slots.get() * self.stride
    }

    fn slot(&self, message: u64) -> usize {
        usize::try_from(message % self.slots()).unwrap_or(0)
    }

    /// Where message number `message` is sent from.
    pub(super) fn source(&self, message: u64) -> usize {
        GUARD + self.slot(message) * self.stride
    }

    /// Where message number `message` arrives.
    pub(super) fn target(&self, message: u64) -> usize {
        self.area() + self.source(message)
    }

    /// Its place in the peer's memory, which has the same layout.
    pub(super) fn remote_target(&self, peer: &RemoteRegion, message: u64) -> u64 {
        peer.addr + self.target(message) as u64
    }

    /// Where the peer has it to be read.
    pub(super) fn remote_source(&self, peer: &RemoteRegion, message: u64) -> u64 {
        peer.addr + self.source(message) as u64
    }

    /// Writes this round's pattern into the source slots, and guard bytes everywhere else.
    pub(super) fn prepare(&self, round: Round) -> anyhow::Result<()> {
        self.slots.set(if round.checked { self.checked_slots } else { self.timed_slots });
        if let Some((buffer, patterns)) = gpu::patterns_for(&self.region) {
            return Ok(self.prepare_on_gpu(buffer, patterns, round)?);
        }
        for area in [0, self.area()] {
            self.region.fill(area..area + self.span(), GUARD_BYTE)?;
        }
        let mut bytes = vec![0; self.size];
        for slot in 0..self.slots() {
            self.pattern(round, slot, &mut bytes);
            self.region.write_at(self.source(slot), &bytes)?;
        }
        Ok(())
    }

    /// Whether messages carry sequence numbers: they must have room for one, and arrive in order.
    fn stamps(&self) -> bool {
        self.stamped && self.size >= STAMP
    }

    /// Writes the message's sequence number over the first bytes of its pattern.
    pub(super) fn stamp(&self, message: u64) -> anyhow::Result<()> {
        if self.stamps() {
            self.region.write_u64(self.source(message), message)?;
        }
        Ok(())
    }

    /// Checks that `arrived` messages of this round are complete, the last one of each slot last,
    /// and that nothing else changed. With `ignore_last` the last byte of each was a counter;
    /// `numbered` messages were stamped.
    pub(super) fn check(
        &self,
        round: Round,
        arrived: u64,
        ignore_last: bool,
        numbered: bool,
    ) -> Result<(), String> {
        let filled = arrived.min(self.slots());
        if let Some(spoil) = Spoil::asked()?.filter(|_| round.checked && filled > 0) {
            self.spoil(spoil, filled - 1).map_err(|error| format!("cannot spoil a message: {error}"))?;
        }
        if let Some((buffer, patterns)) = gpu::patterns_for(&self.region) {
            return self.check_on_gpu(buffer, patterns, round, filled);
        }
        let (mut expected, mut found) = (vec![0; self.size], vec![0; self.stride]);
        let read = |offset, out: &mut [u8]| self.region.read_at(offset, out).map_err(|e| e.to_string());
        let guard = |found: &[u8], at: usize| match found.iter().position(|b| *b != GUARD_BYTE) {
            Some(i) => {
                let round = round.index;
                Err(format!("round {round}: a guard byte changed, {} bytes into the target area", at + i))
            }
            None => Ok(()),
        };
        read(self.area(), &mut found[..GUARD])?;
        guard(&found[..GUARD], 0)?;
        for slot in 0..self.slots() {
            let at = self.target(slot);
            read(at, &mut found)?;
            let in_area = at - self.area();
            if slot >= filled {
                guard(&found, in_area)?;
                continue;
            }
            self.pattern(round, slot, &mut expected);
            if numbered && self.stamps() {
                let slots = self.slots();
                let last = (arrived - 1 - slot) / slots * slots + slot;
                expected[..STAMP].copy_from_slice(&last.to_ne_bytes());
            }
            let checked = if ignore_last { self.size.saturating_sub(1) } else { self.size };
            if let Some(i) = (0..checked).find(|&i| found[i] != expected[i]) {
                let message = round.message(slot);
                if found[..checked].iter().all(|byte| *byte == GUARD_BYTE) {
                    return Err(format!("{message}: {}", untouched(self.size)));
                }
                return Err(format!(
                    "{message}: byte {i} of {} is {:#04x}, expected {:#04x}",
                    self.size, found[i], expected[i]
                ));
            }
            guard(&found[self.size..], in_area + self.size)?;
        }
        Ok(())
    }

    /// Corrupts the message in a slot, to prove that the check fails.
    fn spoil(&self, how: Spoil, slot: u64) -> Result<(), nobounce::AccessError> {
        let (at, middle) = (self.target(slot), self.target(slot) + self.size / 2);
        match how {
            Spoil::Message => self.region.fill(at..at + self.size, GUARD_BYTE),
            Spoil::Byte => {
                let mut byte = [0];
                self.region.read_at(middle, &mut byte)?;
                self.region.write_at(middle, &[!byte[0]])
            }
        }
    }

    /// Different for every position, slot, round and seed.
    fn pattern(&self, round: Round, slot: u64, out: &mut [u8]) {
        pattern(self.pattern_seed(round, slot), out);
    }

    /// Seed that distinguishes the patterns of slots, rounds and runs.
    pub(super) fn pattern_seed(&self, round: Round, slot: u64) -> u64 {
        self.seed ^ (u64::from(round.index) << 40) ^ (slot << 32)
    }
}

/// The error for a message whose slot holds only guard bytes.
pub(super) fn untouched(size: usize) -> String {
    format!("it did not arrive: its {size} bytes are unchanged from byte 0 on")
}

/// How memory of that place is registered.
pub(super) fn options(place: Place) -> GpuOptions {
    GpuOptions { staged: place != Place::Direct, ..GpuOptions::default() }
}

/// Memory of that place, for both directions.
pub(super) fn region(device: &Device, place: Place, len: usize) -> anyhow::Result<Region> {
    let options = options(place);
    Ok(if place.is_gpu() {
        device.register_gpu_on(gpu_choice::ordinal(), len, options)?
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

    fn timed(index: u32) -> Round {
        Round { index, messages: 2, checked: false }
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
            ring.prepare(timed(3)).unwrap();
            assert_eq!(ring.check(timed(3), 0, false, false), Ok(()));
            deliver(&ring, 2);
            assert_eq!(ring.check(timed(3), 2, false, false), Ok(()), "size {size}");
            // Every slot once more, numbered.
            let slots = ring.slots();
            (slots..2 * slots).for_each(|message| ring.stamp(message).unwrap());
            deliver(&ring, slots);
            assert_eq!(ring.check(timed(3), 2 * slots, false, true), Ok(()), "size {size}");
            assert_eq!(
                ring.check(timed(3), slots, false, true).is_err(),
                size >= 8,
                "the numbers of another pass"
            );
            ring.prepare(timed(3)).unwrap();
            deliver(&ring, 2);
            // A byte too far.
            let beyond = ring.target(1) + ring.size;
            ring.region.write_at(beyond, &[1]).unwrap();
            assert!(ring.check(timed(3), 2, false, false).unwrap_err().contains("guard byte"), "size {size}");
            ring.region.write_at(beyond, &[GUARD_BYTE]).unwrap();
            if size > 0 {
                assert!(ring.check(timed(4), 2, false, false).is_err(), "another round's bytes");
                assert!(ring.check(timed(3), 1, false, false).is_err(), "a message that was never sent");
                assert!(ring.check(timed(3), 3, false, false).is_err(), "a message that is missing");
                let mut last = [0];
                ring.region.read_at(ring.target(0) + ring.size - 1, &mut last).unwrap();
                ring.region.write_at(ring.target(0) + ring.size - 1, &[!last[0]]).unwrap();
                assert!(ring.check(timed(3), 2, false, false).is_err());
                assert_eq!(ring.check(timed(3), 2, true, false), Ok(()));
            }
        }
    }

    /// In a checked round long messages have several slots, too, and one that was lost or changed
    /// is named with its byte.
    #[test]
    fn each_message_of_a_checked_round_is_compared() {
        for (size, slots) in [(8, 16), (256 << 10, 8), (8 << 20, 4), (40 << 20, 1)] {
            let ring = ring(size);
            let round = Round { index: 9, messages: ring.checkable(), checked: true };
            assert_eq!(round.messages, slots, "size {size}");
            ring.prepare(round).unwrap();
            assert_eq!(ring.slots(), slots);
            deliver(&ring, slots);
            assert_eq!(ring.check(round, slots, false, false), Ok(()), "size {size}");
            ring.spoil(Spoil::Byte, slots - 1).unwrap();
            let told = ring.check(round, slots, false, false).unwrap_err();
            let wanted = format!(
                "round 9, message {slots} of {slots} with separate buffers: byte {} of {size} is ",
                size / 2
            );
            assert!(told.starts_with(&wanted), "{told}");
            ring.spoil(Spoil::Message, slots - 1).unwrap();
            let told = ring.check(round, slots, false, false).unwrap_err();
            assert!(told.contains("it did not arrive"), "{told}");
            // What arrives for one slot in the place of another is wrong in both.
            if slots > 1 {
                deliver(&ring, slots);
                let mut bytes = vec![0; ring.size];
                ring.region.read_at(ring.source(0), &mut bytes).unwrap();
                ring.region.write_at(ring.target(1), &bytes).unwrap();
                assert!(ring.check(round, slots, false, false).is_err(), "size {size}");
            }
        }
    }
}
