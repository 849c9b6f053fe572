//! Memory that kernels and the proxy share, besides the heap.
//!
//! In GPU memory: signals, status, then for each channel its consumer index, its counters and its
//! description. The rings lie in pinned host memory.

use std::sync::Arc;

use nobounce_memory::Window;
use nobounce_memory::gpu::kernel::PinnedWords;
use nobounce_memory::gpu::{Gpu, GpuBuffer, GpuMemory, GpuOptions};

use crate::descriptor::BYTES;
use crate::device::DeviceChannel;
use crate::join_error::JoinError;
use crate::options::Options;
use crate::words::{STRIDE, WordMemory};

/// The handle of the symmetric heap in descriptors.
pub(crate) const HEAP: u16 = 1;
/// Bytes of a description, with room to lie on cache lines of its own.
const DESCRIPTION: usize = size_of::<DeviceChannel>().next_multiple_of(128);

/// The memory of one rank.
#[derive(Debug)]
pub(crate) struct ControlMemory {
    rings: PinnedWords,
    // The registration ends before the memory does.
    memory: Arc<GpuMemory>,
    buffer: GpuBuffer,
    layout: Layout,
}

/// Where everything lies, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    signals: usize,
    ranks: usize,
    /// Of a channel, with those of flushes.
    counters: usize,
    channels: usize,
    ring: usize,
}

impl Layout {
    fn of(options: &Options) -> Self {
        let ranks = options.ranks as usize;
        Self {
            signals: usize::from(options.signals),
            ranks,
            counters: usize::from(options.counters) + ranks,
            channels: options.channels,
            ring: BYTES << options.log_depth,
        }
    }

    fn status(&self) -> usize {
        self.signals * STRIDE
    }

    fn channel(&self, number: usize) -> usize {
        let first = (self.status() + (self.ranks + 1) * STRIDE).next_multiple_of(DESCRIPTION);
        first + number * (DESCRIPTION + (1 + self.counters) * STRIDE).next_multiple_of(DESCRIPTION)
    }

    fn consumed(&self, number: usize) -> usize {
        self.channel(number) + DESCRIPTION
    }

    fn counters(&self, number: usize) -> usize {
        self.consumed(number) + STRIDE
    }

    fn len(&self) -> usize {
        self.channel(self.channels)
    }
}

/// What the proxy has of a channel.
pub(crate) struct ChannelMemory {
    pub(crate) ring: Window,
    pub(crate) consumed: WordMemory,
    pub(crate) counters: WordMemory,
}

impl ControlMemory {
    pub(crate) fn allocate(gpu: &Arc<Gpu>, options: &Options) -> Result<Self, JoinError> {
        let layout = Layout::of(options);
        let buffer = GpuBuffer::new(gpu, layout.len())?;
        let memory = Arc::new(GpuMemory::reach(buffer.addr(), layout.len(), &GpuOptions::default())?);
        let Some(window) = memory.window() else {
            return Err(JoinError::NoWindow { reason: memory.paths().to_string() });
        };
        let zeroes = vec![0; layout.len()];
        window.store(0, &zeroes[..]).and_then(|()| window.complete()).map_err(JoinError::Words)?;
        let rings = PinnedWords::new(gpu, layout.channels * layout.ring / 8)?;
        Ok(Self { rings, memory, buffer, layout })
    }

    /// Address and length of the signals, which peers change.
    pub(crate) fn signals(&self) -> (u64, usize) {
        (self.buffer.addr(), self.layout.signals * STRIDE)
    }

    pub(crate) fn counters_of_channel(&self) -> usize {
        self.layout.counters
    }

    fn words(&self, offset: usize, len: usize) -> Result<WordMemory, JoinError> {
        let lost = || JoinError::NoWindow { reason: self.memory.paths().to_string() };
        WordMemory::gpu(self.memory.clone(), offset, len).ok_or_else(lost)
    }

    pub(crate) fn status(&self) -> Result<WordMemory, JoinError> {
        self.words(self.layout.status(), (self.layout.ranks + 1) * STRIDE)
    }

    pub(crate) fn channel(&self, number: usize) -> Result<ChannelMemory, JoinError> {
        let Layout { ring, counters, .. } = self.layout;
        let base = self.rings.as_ptr().cast::<u8>().wrapping_add(number * ring);
        Ok(ChannelMemory {
            // SAFETY: pinned words are never freed, and are only accessed as atomic words.
            ring: unsafe { Window::new(base, ring) },
            consumed: self.words(self.layout.consumed(number), STRIDE)?,
            counters: self.words(self.layout.counters(number), counters * STRIDE)?,
        })
    }

    /// The address of a channel's description; `None` if there is no such channel.
    pub(crate) fn channel_addr(&self, number: usize) -> Option<u64> {
        (number < self.layout.channels).then(|| self.buffer.addr() + self.layout.channel(number) as u64)
    }

    /// Writes the descriptions of all channels.
    pub(crate) fn describe(&self, options: &Options, heap: u64, max_message: u32) -> Result<(), JoinError> {
        let at = |offset: usize| self.buffer.addr() + offset as u64;
        for number in 0..self.layout.channels {
            let description = DeviceChannel {
                counters: at(self.layout.counters(number)),
                signals: at(0),
                ring: self.rings.address(number * self.layout.ring / 8),
                consumed: at(self.layout.consumed(number)),
                log_depth: options.log_depth,
                status: at(self.layout.status()),
                heap,
                heap_bytes: options.heap as u64,
                rank: options.rank,
                ranks: options.ranks,
                heap_handle: HEAP,
                first_flush_counter: options.counters,
                max_message,
                ..DeviceChannel::default()
            };
            let lost = || JoinError::NoWindow { reason: self.memory.paths().to_string() };
            let window = self.memory.window().ok_or_else(lost)?;
            let bytes = description.bytes();
            let stored =
                window.store(self.layout.channel(number), &bytes[..]).and_then(|()| window.complete());
            stored.map_err(JoinError::Words)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        let options = Options { ranks: 3, channels: 5, signals: 7, counters: 9, ..Options::default() };
        let layout = Layout::of(&options);
        let mut parts = vec![(0, 7 * STRIDE), (layout.status(), 4 * STRIDE)];
        for number in 0..5 {
            parts.push((layout.channel(number), DESCRIPTION));
            parts.push((layout.consumed(number), STRIDE));
            parts.push((layout.counters(number), 12 * STRIDE));
        }
        for pair in parts.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{parts:?}");
        }
        let (last, len) = parts[parts.len() - 1];
        assert!(last + len <= layout.len());
        assert!(parts.iter().all(|(at, _)| at % STRIDE == 0));
    }
}
