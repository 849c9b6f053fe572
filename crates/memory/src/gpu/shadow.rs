//! A copy of a window's words in host memory, for atomics: a load through the window takes 1 us.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Which words of a registration have a copy in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shadowed {
    /// None.
    #[default]
    No,
    /// All. Nothing but atomics through this registration may change the memory.
    Words,
    /// All, which are signals of NCCL's GPI backend: 64 bytes each, a word and its flags. An atomic
    /// sets the flag that makes kernels ask for a reset
    /// ([`GpuWindow::reset`](super::GpuWindow::reset)). Without it a kernel may store 0 itself.
    Signals,
}

/// Bytes of a signal.
const SIGNAL: usize = 64;

/// The words, as they were stored last.
#[derive(Debug)]
pub(super) struct Shadow {
    /// The lock is held while one changes.
    words: Mutex<Box<[u64]>>,
    are_signals: bool,
}

impl Shadow {
    /// Set in the flags of a signal that must be reset by the window.
    pub(super) const COUNTED: u64 = 1;

    /// Of a window with these bytes.
    pub(super) fn new(bytes: &[u8], are_signals: bool) -> Self {
        // Bytes behind the last whole word are no words.
        let words = bytes.as_chunks::<8>().0;
        let words = Mutex::new(words.iter().map(|word| u64::from_ne_bytes(*word)).collect());
        Self { words, are_signals }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Box<[u64]>> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the flags of the signal at `offset` lie.
    pub(super) fn flags(&self, offset: usize) -> Option<usize> {
        (self.are_signals && offset.is_multiple_of(SIGNAL)).then_some(offset + 8)
    }
}
