//! The channel as a kernel sees it: `nobounce::Channel` of `include/nobounce.cuh`. Its first part
//! is the channel of NCCL's GPI backend.

use std::mem::offset_of;

/// In GPU memory. Addresses are those of the GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct DeviceChannel {
    pub counters: u64,
    pub signals: u64,
    /// The ring, in pinned host memory.
    pub ring: u64,
    /// Tickets taken by kernels.
    pub produced: u64,
    /// The consumer index, which the proxy stores.
    pub consumed: u64,
    /// Its last value that a kernel saw.
    pub consumed_seen: u64,
    pub log_depth: u32,
    pub reserved: u32,
    pub status: u64,
    /// The symmetric heap of this rank.
    pub heap: u64,
    pub heap_bytes: u64,
    pub rank: u32,
    pub ranks: u32,
    /// Its handle, at all ranks.
    pub heap_handle: u16,
    /// The counter of the flush to rank 0; those to others follow.
    pub first_flush_counter: u16,
    /// The longest message.
    pub max_message: u32,
}

// The header asserts the same.
const _: () = assert!(size_of::<DeviceChannel>() == 96 && offset_of!(DeviceChannel, log_depth) == 48);
const _: () = assert!(offset_of!(DeviceChannel, status) == 56 && offset_of!(DeviceChannel, rank) == 80);
const _: () = assert!(offset_of!(DeviceChannel, first_flush_counter) == 90);
const _: () = assert!(offset_of!(DeviceChannel, max_message) == 92);

impl DeviceChannel {
    /// The bytes to copy into GPU memory.
    #[must_use]
    pub fn bytes(&self) -> [u8; size_of::<Self>()] {
        let mut all = [0; size_of::<Self>()];
        let words = [
            self.counters,
            self.signals,
            self.ring,
            self.produced,
            self.consumed,
            self.consumed_seen,
            u64::from(self.log_depth),
            self.status,
            self.heap,
            self.heap_bytes,
            u64::from(self.rank) | u64::from(self.ranks) << 32,
            u64::from(self.heap_handle)
                | u64::from(self.first_flush_counter) << 16
                | u64::from(self.max_message) << 32,
        ];
        for (place, word) in all.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        all
    }
}
