//! The GPU memory of a context, as kernels of NCCL's GPI backend expect it.
//!
//! ```text
//! for each context: gpi_gpu_channel_t (56 bytes), flush tickets (8 bytes for each rank)
//! for each context: consumer index, counters, flush counters (one for each rank), signals
//! status of the proxy
//! ```
//! Kernels find the flush counters by their distance from the signals.

use nobounce_initiated::words::STRIDE;

/// `sizeof(gpi_gpu_channel_t)`.
const CHANNEL: usize = 56;

/// Where everything lies, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) contexts: usize,
    pub(crate) ranks: usize,
    /// Those of flushes are more.
    pub(crate) counters: usize,
    pub(crate) signals: usize,
}

impl Layout {
    fn descriptions(&self) -> usize {
        (self.contexts * self.description_stride()).next_multiple_of(STRIDE)
    }

    /// Bytes from the description of a context to the next.
    pub(crate) fn description_stride(&self) -> usize {
        CHANNEL + 8 * self.ranks
    }

    /// With those of flushes.
    pub(crate) fn all_counters(&self) -> usize {
        self.counters + self.ranks
    }

    pub(crate) fn consumed(&self, context: usize) -> usize {
        self.descriptions() + context * (1 + self.all_counters() + self.signals) * STRIDE
    }

    pub(crate) fn counters(&self, context: usize) -> usize {
        self.consumed(context) + STRIDE
    }

    pub(crate) fn signals(&self, context: usize) -> usize {
        self.counters(context) + self.all_counters() * STRIDE
    }

    pub(crate) fn status(&self) -> usize {
        self.consumed(self.contexts)
    }

    pub(crate) fn len(&self) -> usize {
        self.status() + (self.ranks + 1) * STRIDE
    }
}

/// `gpi_gpu_channel_t`. Addresses are those of the GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Channel {
    pub(crate) counters: u64,
    pub(crate) signals: u64,
    pub(crate) ring: u64,
    pub(crate) consumed: u64,
    pub(crate) log_depth: u32,
}

impl Channel {
    pub(crate) fn bytes(&self) -> [u8; CHANNEL] {
        let (produced, consumed_seen) = (0, 0);
        let words = [
            self.counters,
            self.signals,
            self.ring,
            produced,
            self.consumed,
            consumed_seen,
            u64::from(self.log_depth),
        ];
        let mut all = [0; CHANNEL];
        for (place, word) in all.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        all
    }
}
