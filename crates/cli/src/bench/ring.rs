//! The memory of one end: message slots with a pattern to send, slots to be filled, and guard zones between them.
//!
//! Both ends lay their memory out alike and know the pattern, so each checks on its own what arrived. Filling and
//! checking happen before and after the timed part.

use anyhow::Context;
use nobounce::{Device, Region, RemoteRegion};

/// Bytes between two slots, and before the first.
const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xa5;
/// Slots are so many that they take about this much memory (as with perftest, the message stays in the cache: the
/// link is measured, not the memory), but at least one and at most [`MAX_SLOTS`].
const AREA: usize = 256 << 10;
const MAX_SLOTS: usize = 64;

/// One end's memory.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) region: Region,
    size: usize,
    slots: usize,
    stride: usize,
    seed: u64,
}

impl Ring {
    pub(super) fn new(device: &Device, size: u64, seed: u64) -> anyhow::Result<Self> {
        let size = usize::try_from(size).context("the message is larger than this machine's memory")?;
        let stride = size.next_multiple_of(GUARD) + GUARD;
        let slots = (AREA / stride).clamp(1, MAX_SLOTS);
        let area = (GUARD + slots * stride).next_multiple_of(4096);
        let region = device.register(2 * area)?;
        Ok(Self { region, size, slots, stride, seed })
    }

    fn area(&self) -> usize {
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
        self.region.fill(0..self.region.len(), GUARD_BYTE)?;
        let mut bytes = vec![0; self.size];
        for slot in 0..self.slots as u64 {
            self.pattern(round, slot, &mut bytes);
            self.region.write_at(self.source(slot), &bytes)?;
        }
        Ok(())
    }

    /// Checks that `messages` messages of this round arrived whole, and that nothing else changed. With
    /// `ignore_last` the last byte of each was used to count.
    pub(super) fn check(&self, round: u32, messages: u64, ignore_last: bool) -> Result<(), String> {
        let filled = messages.min(self.slots as u64);
        let (mut expected, mut found) = (vec![0; self.size], vec![0; self.stride]);
        let read = |offset, out: &mut [u8]| self.region.read_at(offset, out).map_err(|e| e.to_string());
        let guard = |found: &[u8], at: usize| match found.iter().position(|b| *b != GUARD_BYTE) {
            Some(i) => Err(format!("round {round}: a guard byte changed, {} bytes into the target area", at + i)),
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
        let start = self.seed ^ (u64::from(round) << 40) ^ (slot << 32);
        for (word, chunk) in out.chunks_mut(8).enumerate() {
            let bytes = mix(start.wrapping_add(word as u64)).to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }
}

/// SplitMix64's finisher: every input bit changes half of the output bits.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use nobounce::Config;

    use super::*;

    fn ring(size: u64) -> Ring {
        let config = Config::default().at("127.60.0.1").unwrap();
        Ring::new(&Device::open_with(&config).unwrap(), size, 7).unwrap()
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
            assert_eq!(ring.check(3, 0, false), Ok(()));
            deliver(&ring, 2);
            assert_eq!(ring.check(3, 2, false), Ok(()), "size {size}");
            // A byte too far.
            let beyond = ring.target(1) + ring.size;
            ring.region.write_at(beyond, &[1]).unwrap();
            assert!(ring.check(3, 2, false).unwrap_err().contains("guard byte"), "size {size}");
            ring.region.write_at(beyond, &[GUARD_BYTE]).unwrap();
            if size > 0 {
                assert!(ring.check(4, 2, false).is_err(), "another round's bytes");
                assert!(ring.check(3, 1, false).is_err(), "a message nobody sent");
                assert!(ring.check(3, 3, false).is_err(), "a message that is missing");
                let mut last = [0];
                ring.region.read_at(ring.target(0) + ring.size - 1, &mut last).unwrap();
                ring.region.write_at(ring.target(0) + ring.size - 1, &[!last[0]]).unwrap();
                assert!(ring.check(3, 2, false).is_err());
                assert_eq!(ring.check(3, 2, true), Ok(()));
            }
        }
    }
}
