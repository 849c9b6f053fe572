//! The ring of descriptors that kernels fill.
//!
//! A producer takes a ticket, waits until the consumer index leaves room for it, and stores the
//! words of its descriptor with the owner bit of the lap: 0 in the first, 1 in the second, and so
//! on. The words may arrive in any order. The consumer takes a descriptor when the owner bits of
//! all its words are those of the lap.

use nobounce_memory::{AccessError, Window};

use crate::descriptor::{BYTES, OWNER, WORDS};

/// The largest ring: 2^20 descriptors.
pub const MAX_LOG_DEPTH: u32 = 20;

/// The end that reads.
#[derive(Debug)]
pub struct Ring {
    memory: Window,
    log_depth: u32,
    taken: u64,
}

/// The memory does not fit the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a ring of 2^{log_depth} descriptors takes {needed} bytes, given {given}, and at most 2^20")]
#[allow(missing_docs)]
pub struct WrongSize {
    pub log_depth: u32,
    pub needed: u64,
    pub given: usize,
}

impl Ring {
    /// An empty ring in this memory, which no producer knows yet.
    ///
    /// # Errors
    /// The memory does not have the size of the ring.
    pub fn new(memory: Window, log_depth: u32) -> Result<Self, WrongSize> {
        let needed = (BYTES as u64) << log_depth.min(MAX_LOG_DEPTH + 1);
        if log_depth > MAX_LOG_DEPTH || memory.len() as u64 != needed {
            return Err(WrongSize { log_depth, needed, given: memory.len() });
        }
        let ring = Self { memory, log_depth, taken: 0 };
        // Not the owner bits of the first lap. A store that fails shows when the ring is read.
        (0..memory.len()).step_by(8).for_each(|at| _ = memory.store_u64(at, OWNER));
        Ok(ring)
    }

    /// How many descriptors were taken: the consumer index.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Whether the next descriptor has begun to arrive, or the memory is gone, which taking it
    /// shows.
    #[must_use]
    pub fn has_next(&self) -> bool {
        let (at, owner) = self.next();
        self.memory.load_u64(at).map_or(true, |word| word & OWNER == owner)
    }

    /// Where the next descriptor will be, and its owner bit.
    fn next(&self) -> (usize, u64) {
        let mask = (1_u64 << self.log_depth) - 1;
        let at = usize::try_from(self.taken & mask).unwrap_or(0) * BYTES;
        (at, self.taken >> self.log_depth & OWNER)
    }

    /// Takes the next descriptor, if all of it has arrived.
    ///
    /// # Errors
    /// The memory is gone.
    pub fn take(&mut self) -> Result<Option<[u64; WORDS]>, AccessError> {
        let (at, owner) = self.next();
        let mut words = [0; WORDS];
        for (number, word) in words.iter_mut().enumerate() {
            *word = self.memory.load_u64(at + 8 * number)?;
            if *word & OWNER != owner {
                return Ok(None);
            }
        }
        self.taken += 1;
        Ok(Some(words))
    }
}
