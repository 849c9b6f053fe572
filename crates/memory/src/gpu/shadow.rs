//! A copy of a window's words in host memory, for atomics: a load through the window takes 1 us.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The words, as they were stored last. The lock is held while one changes.
#[derive(Debug)]
pub(super) struct Shadow(Mutex<Box<[u64]>>);

impl Shadow {
    /// Of a window with these bytes.
    pub(super) fn new(bytes: &[u8]) -> Self {
        // Bytes behind the last whole word are no words.
        let words = bytes.as_chunks::<8>().0;
        Self(Mutex::new(words.iter().map(|word| u64::from_ne_bytes(*word)).collect()))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Box<[u64]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
