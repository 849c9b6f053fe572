//! Words that kernels read: counters, consumer index, status.
//!
//! Each has 64 bytes of its own, as in NCCL's GPI backend. The proxy alone writes them, and keeps
//! their values, so that it never reads GPU memory.

use std::sync::Arc;

use nobounce_memory::gpu::{GpuMemory, GpuWindow};
use nobounce_memory::{AccessError, Window};

/// Bytes from one word to the next.
pub const STRIDE: usize = 64;

/// The bits of a counter that count.
pub const COUNT_MASK: u64 = (1 << 56) - 1;

/// Set in a counter when one of its operations failed, until it is reset.
pub const ERROR: u64 = 1 << 62;

/// Where words lie.
#[derive(Clone, Debug)]
pub struct WordMemory {
    place: WordStorage,
    offset: usize,
    len: usize,
}

#[derive(Clone, Debug)]
enum WordStorage {
    Host(Window),
    /// It has a window.
    Gpu(Arc<GpuMemory>),
}

impl WordMemory {
    /// Host memory. Kernels reach it across the bus.
    #[must_use]
    pub fn host(memory: Window) -> Self {
        Self { place: WordStorage::Host(memory), offset: 0, len: memory.len() }
    }

    /// A part of GPU memory; `None` where that has no window, or does not have this part.
    #[must_use]
    pub fn gpu(memory: Arc<GpuMemory>, offset: usize, len: usize) -> Option<Self> {
        let window = memory.window()?;
        let fits = offset.checked_add(len).is_some_and(|end| end <= window.len());
        fits.then_some(Self { place: WordStorage::Gpu(memory), offset, len })
    }

    fn window(memory: &GpuMemory) -> Result<&GpuWindow, AccessError> {
        memory.window().ok_or(AccessError::Faulted { address: memory.addr() })
    }

    fn check(&self, at: usize) -> Result<usize, AccessError> {
        let inside = at.checked_add(8).is_some_and(|end| end <= self.len);
        inside.then_some(self.offset + at).ok_or(AccessError::OutOfBounds {
            offset: at,
            len: 8,
            window: self.len,
        })
    }

    /// Stores a word after everything that was stored before it.
    ///
    /// # Errors
    /// The memory is gone, or has no such word.
    pub fn store(&self, at: usize, value: u64) -> Result<(), AccessError> {
        let offset = self.check(at)?;
        match &self.place {
            WordStorage::Host(window) => window.store_u64(offset, value),
            WordStorage::Gpu(memory) => {
                let window = Self::window(memory)?;
                window.store_u64(offset, value)?;
                window.complete()
            }
        }
    }

    /// Sets a word that peers change by atomics to 0.
    ///
    /// # Errors
    /// The memory is gone, or has no such word.
    pub fn reset(&self, at: usize) -> Result<(), AccessError> {
        match &self.place {
            WordStorage::Host(_) => self.store(at, 0),
            WordStorage::Gpu(memory) => Self::window(memory)?.reset(self.check(at)?),
        }
    }
}

/// An array of words.
#[derive(Debug)]
pub struct Words {
    memory: WordMemory,
    values: Vec<u64>,
}

impl Words {
    /// As many as the memory has room for, all 0.
    #[must_use]
    pub fn new(memory: WordMemory) -> Self {
        let words = Self { values: vec![0; memory.len / STRIDE], memory };
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

    /// A flush is over. The error bit is that of this one.
    pub fn flushed(&mut self, index: usize, succeeded: bool) {
        self.count(index);
        let value = self.get(index) & !ERROR;
        self.set(index, if succeeded { value } else { value | ERROR });
    }

    /// Stores the value where kernels read it.
    ///
    /// # Errors
    /// The memory is gone.
    pub fn write_back(&self, index: usize) -> Result<(), AccessError> {
        if index < self.values.len() {
            self.memory.store(index * STRIDE, self.get(index))?;
        }
        Ok(())
    }
}
