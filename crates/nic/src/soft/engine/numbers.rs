//! Allocation of queue pair numbers.

use crate::process::random::random_u32;
use crate::soft::engine::Core;

/// The first queue pair's number is random among this many: all that a device has, but for the
/// management queue pairs.
const FIRST_NUMBERS: u32 = (1 << 16) - 2;

impl Core {
    /// A free queue pair number of this device, not one that was released just now.
    pub(crate) fn allocate(&mut self, max: usize) -> Option<u32> {
        if self.qps.len() < max {
            if self.qps.is_empty() {
                self.skip_numbers();
            }
            self.qps.push(None);
            return u32::try_from(self.qps.len() - 1).ok();
        }
        self.free.pop_front().map(u32::from)
    }

    /// The first number of a device is random: forged packets must guess it. Peers of a process
    /// that is gone may go on sending to its queue pairs. (The kernel's RoCE does so forever with a
    /// retry count of 7.) Those packets must not reach the next process's queue pairs. Skipped
    /// numbers are allocated last. Numbers 0 and 1 are the management queue pairs.
    fn skip_numbers(&mut self) {
        let first = 2 + u16::try_from(random_u32() % FIRST_NUMBERS).unwrap_or(0);
        self.qps.extend((0..first).map(|_| None));
        self.free.extend(2..first);
    }
}
