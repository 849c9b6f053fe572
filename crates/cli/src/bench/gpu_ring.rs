//! Fills and checks message slots in place: kernels on the GPU do it, and no byte goes to the host.

use std::ops::Range;

use nobounce::memory::gpu::GpuBuffer;
use nobounce::memory::gpu::kernel::{KernelError, Patterns};

use super::ring::{GUARD, GUARD_BYTE, Ring, untouched};
use super::round::Round;

impl Ring {
    /// Writes this round's pattern into the source slots, and guard bytes everywhere else.
    pub(super) fn prepare_on_gpu(
        &self,
        buffer: &GpuBuffer,
        patterns: &Patterns,
        round: Round,
    ) -> Result<(), KernelError> {
        for area in [0, self.area()] {
            patterns.fill_byte(buffer, area..area + self.span(), GUARD_BYTE)?;
        }
        (0..self.slots()).try_for_each(|slot| {
            let at = self.source(slot);
            patterns.fill(buffer, at..at + self.size, self.pattern_seed(round, slot))
        })
    }

    /// Checks that the first `filled` slots hold this round's messages, and that nothing else
    /// changed.
    pub(super) fn check_on_gpu(
        &self,
        buffer: &GpuBuffer,
        patterns: &Patterns,
        round: Round,
        filled: u64,
    ) -> Result<(), String> {
        let area = self.area();
        let guard = |range: Range<usize>| -> Result<(), String> {
            let start = range.start - area;
            let found = patterns.check_byte(buffer, range, GUARD_BYTE).map_err(|e| e.to_string())?;
            match found.first {
                Some(first) => Err(format!(
                    "round {}: {} guard bytes changed, the first {} bytes into the target area",
                    round.index,
                    found.wrong,
                    start as u64 + first
                )),
                None => Ok(()),
            }
        };
        guard(area..area + GUARD)?;
        for slot in 0..self.slots() {
            let at = self.target(slot);
            if slot >= filled {
                guard(at..at + self.stride)?;
                continue;
            }
            let seed = self.pattern_seed(round, slot);
            let found = patterns.check(buffer, at..at + self.size, seed).map_err(|e| e.to_string())?;
            if let Some(first) = found.first {
                let (wrong, size, message) = (found.wrong, self.size, round.message(slot));
                let old =
                    patterns.check_byte(buffer, at..at + size, GUARD_BYTE).map_err(|e| e.to_string())?;
                if old.is_clean() {
                    return Err(format!("{message}: {}", untouched(size)));
                }
                return Err(format!(
                    "{message}: {wrong} of {size} bytes are wrong, the first is byte {first}"
                ));
            }
            guard(at + self.size..at + self.stride)?;
        }
        Ok(())
    }
}
