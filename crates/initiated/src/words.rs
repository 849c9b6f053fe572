//! Words that kernels read: counters, consumer index, status.
//!
//! Each has 64 bytes of its own, as in NCCL's GPI backend. The proxy alone writes them, and keeps
//! their values, so that it never reads GPU memory.

use nobounce_memory::{AccessError, Window};

/// Bytes from one word to the next.
pub const STRIDE: usize = 64;

/// The bits of a counter that count.
pub const COUNT_MASK: u64 = (1 << 56) - 1;

/// Set in a counter when one of its operations failed, until it is reset.
pub const ERROR: u64 = 1 << 62;

/// An array of words.
#[derive(Debug)]
pub struct Words {
    memory: Window,
    values: Vec<u64>,
}

impl Words {
    /// As many as the memory has room for, all 0.
    #[must_use]
    pub fn new(memory: Window) -> Self {
        let words = Self { memory, values: vec![0; memory.len() / STRIDE] };
        // A store that fails shows in the next one.
        (0..words.values.len()).for_each(|index| _ = words.write_back(index));
        words
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The value, as the proxy knows it.
    #[must_use]
    pub fn get(&self, index: usize) -> u64 {
        self.values.get(index).copied().unwrap_or(0)
    }

    /// Sets a value. Kernels see it after [`write_back`](Self::write_back).
    pub fn set(&mut self, index: usize, value: u64) {
        if let Some(place) = self.values.get_mut(index) {
            *place = value;
        }
    }

    /// One more operation of a counter is complete.
    pub fn count(&mut self, index: usize) {
        let value = self.get(index);
        self.set(index, (value & !COUNT_MASK) | (value.wrapping_add(1) & COUNT_MASK));
    }

    /// An operation of a counter has failed.
    pub fn fail(&mut self, index: usize) {
        self.set(index, self.get(index) | ERROR);
    }

    /// Stores the value where kernels read it.
    ///
    /// # Errors
    /// The memory is gone.
    pub fn write_back(&self, index: usize) -> Result<(), AccessError> {
        if index < self.values.len() {
            self.memory.store_u64(index * STRIDE, self.get(index))?;
        }
        Ok(())
    }
}
