//! Which number a queue pair gets.

use crate::soft::engine::Core;
use crate::soft::engine::region::random_u32;

/// Among so many numbers a device's first queue pair has one by chance.
const FIRST_NUMBERS: u32 = 1024;

impl Core {
    /// A free queue pair number of this device, not one that was given back just now.
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

    /// Where a device's numbers begin is left to chance: a peer of a process that is gone may go on sending to its queue pairs (the kernel's
    /// RoCE does so for ever with a retry count of 7), and these must not be the next process's. Those skipped are given out last. Numbers 0
    /// and 1 are the management queue pairs.
    fn skip_numbers(&mut self) {
        let first = 2 + u16::try_from(random_u32() % FIRST_NUMBERS).unwrap_or(0);
        self.qps.extend((0..first).map(|_| None));
        self.free.extend(2..first);
    }
}
