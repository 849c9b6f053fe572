//! Bytes that the CPU and the GPU can both compute, so that each end verifies data in place.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::{Kernel, KernelError, Module, PinnedWords, Stream};
use crate::gpu::{Gpu, GpuBuffer};

const PTX: &str = include_str!("pattern.ptx");
/// So long a fill or a check may take: hundreds of times what the largest memory needs.
const LIMIT: Duration = Duration::from_secs(20);
const BLOCK: u32 = 256;
/// Enough blocks to use the whole memory bandwidth; each thread then takes several words.
const MAX_GRID: usize = 1024;
/// Bytes that one thread takes at once.
const WORD: usize = 8;
/// The words of a finding in pinned memory and on the GPU.
const WRONG: usize = 0;
const FIRST: usize = 1;

/// Word `index` of the pattern `seed`: `SplitMix64`'s finisher, in which every input bit changes
/// half of the output bits.
///
/// Seeds that are to give unrelated patterns differ in their high bits: `pattern_word(s, i + 1)` is
/// `pattern_word(s + 1, i)`.
#[must_use]
pub const fn pattern_word(seed: u64, index: u64) -> u64 {
    let mut x = seed.wrapping_add(index).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Fills `out` with the pattern from its beginning; a last piece shorter than a word gets the
/// word's first bytes.
pub fn pattern(seed: u64, out: &mut [u8]) {
    for (index, chunk) in (0u64..).zip(out.chunks_mut(WORD)) {
        chunk.copy_from_slice(&pattern_word(seed, index).to_le_bytes()[..chunk.len()]);
    }
}

/// Result of a check on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Bytes that differ.
    pub wrong: u64,
    /// The first of them, as an offset from the start of the range.
    pub first: Option<u64>,
}

impl Finding {
    /// Whether every byte was right.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.wrong == 0
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first {
            Some(first) => write!(f, "{} bytes are wrong, the first at offset {first:#x}", self.wrong),
            None => f.write_str("every byte is right"),
        }
    }
}

/// Fills and checks GPU memory on the GPU. Every call waits for its own work, but never for other
/// work on the GPU's streams.
#[derive(Debug)]
pub struct Patterns {
    fill: Kernel,
    check: Kernel,
    check_byte: Kernel,
    stream: Stream,
    /// Where kernels accumulate their findings: two words of GPU memory, since many threads add at
    /// once.
    found: GpuBuffer,
    /// Where it is copied to.
    host: PinnedWords,
}

impl Patterns {
    /// Brings the kernels to the GPU; before anything spins there.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        let module = Module::load(gpu, PTX)?;
        let found = GpuBuffer::new(gpu, 2 * WORD)?;
        Ok(Self {
            fill: module.kernel("fill")?,
            check: module.kernel("check")?,
            check_byte: module.kernel("check_byte")?,
            stream: Stream::new(gpu)?,
            found,
            host: PinnedWords::new(gpu, 2)?,
        })
    }

    /// Writes the pattern of `seed` into a range of a buffer: byte 0 of the pattern at the start of
    /// the range.
    pub fn fill(&self, buffer: &GpuBuffer, range: Range<usize>, seed: u64) -> Result<(), KernelError> {
        let (address, len) = place(buffer, &range)?;
        // SAFETY: inside a live buffer that is borrowed until the work is over. (Should it take too
        // long and the buffer go, the GPU refuses the access: no memory of this process is
        // concerned.)
        unsafe { self.fill_at(address, len, seed) }
    }

    /// Writes one value everywhere into a range of a buffer.
    pub fn fill_byte(&self, buffer: &GpuBuffer, range: Range<usize>, value: u8) -> Result<(), KernelError> {
        let (address, len) = place(buffer, &range)?;
        if len == 0 {
            return Ok(());
        }
        self.stream.with(|api, stream| {
            // SAFETY: as in `fill`.
            unsafe { api.memset_async(address, value, len, stream) }
        })?;
        self.stream.wait("filling GPU memory", LIMIT)
    }

    /// Compares a range of a buffer with the pattern of `seed`.
    pub fn check(&self, buffer: &GpuBuffer, range: Range<usize>, seed: u64) -> Result<Finding, KernelError> {
        let (address, len) = place(buffer, &range)?;
        // SAFETY: as in `fill`.
        unsafe { self.check_at(address, len, seed) }
    }

    /// Compares every byte of a range of a buffer with one value.
    pub fn check_byte(
        &self,
        buffer: &GpuBuffer,
        range: Range<usize>,
        value: u8,
    ) -> Result<Finding, KernelError> {
        let (address, len) = place(buffer, &range)?;
        // SAFETY: as in `fill`.
        unsafe { self.finding(&self.check_byte, address, len, u64::from(value)) }
    }

    /// As [`fill`](Self::fill), for memory that the caller allocated elsewhere.
    ///
    /// # Safety
    /// `len` bytes at `address` are memory that this GPU's primary context may write, and stay so
    /// until the call returns.
    pub unsafe fn fill_at(&self, address: u64, len: usize, seed: u64) -> Result<(), KernelError> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.fill.launch(&self.stream, grid(len), BLOCK, &[address, len as u64, seed]) }?;
        self.stream.wait("filling GPU memory", LIMIT)
    }

    /// As [`check`](Self::check), for memory that the caller allocated elsewhere.
    ///
    /// # Safety
    /// `len` bytes at `address` are memory that this GPU's primary context may read, and stay so
    /// until the call returns.
    pub unsafe fn check_at(&self, address: u64, len: usize, seed: u64) -> Result<Finding, KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.finding(&self.check, address, len, seed) }
    }

    /// Runs a checking kernel on zeroed counts and fetches them.
    ///
    /// # Safety
    /// As for `check_at`.
    unsafe fn finding(
        &self,
        kernel: &Kernel,
        address: u64,
        len: usize,
        what: u64,
    ) -> Result<Finding, KernelError> {
        let found = self.found.addr();
        if len > 0 {
            self.stream.with(|api, stream| {
                // SAFETY: `found` is a live buffer of two words.
                unsafe { api.memset_async(found, 0, 2 * WORD, stream) }
            })?;
            // SAFETY: the caller's promise for the range; `found` as above.
            unsafe { kernel.launch(&self.stream, grid(len), BLOCK, &[address, len as u64, what, found]) }?;
            self.stream.with(|api, stream| {
                // SAFETY: both sides are two words; the host's are never freed, and accessed as
                // atomics only.
                unsafe { api.copy_from_device_async(self.host.as_ptr(), found, 2 * WORD, stream) }
            })?;
            self.stream.wait("checking GPU memory", LIMIT)?;
        }
        let wrong = if len > 0 { self.host.get(WRONG) } else { 0 };
        Ok(Finding { wrong, first: (wrong > 0).then(|| !self.host.get(FIRST)) })
    }
}

fn place(buffer: &GpuBuffer, range: &Range<usize>) -> Result<(u64, usize), KernelError> {
    let out_of_bounds = || KernelError::OutOfBounds {
        offset: range.start,
        len: range.end.saturating_sub(range.start),
        buffer: buffer.len(),
    };
    let len = range.end.checked_sub(range.start).ok_or_else(out_of_bounds)?;
    if range.end > buffer.len() {
        return Err(out_of_bounds());
    }
    Ok((buffer.addr() + range.start as u64, len))
}

fn grid(len: usize) -> u32 {
    let blocks = len.div_ceil(WORD * BLOCK as usize).clamp(1, MAX_GRID);
    u32::try_from(blocks).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_is_splitmix() {
        // The first outputs of SplitMix64 with seed 0 are those of its finisher at multiples of the
        // golden number; the first of them is ours at index 0.
        assert_eq!(pattern_word(0, 0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(pattern_word(5, 3), pattern_word(4, 4));
        let mut bytes = [0; 20];
        pattern(7, &mut bytes);
        assert_eq!(bytes[..8], pattern_word(7, 0).to_le_bytes());
        assert_eq!(bytes[16..], pattern_word(7, 2).to_le_bytes()[..4]);
    }

    #[test]
    fn every_length_gets_a_launchable_grid() {
        assert_eq!(grid(1), 1);
        assert_eq!(grid(WORD * BLOCK as usize), 1);
        assert_eq!(grid(WORD * BLOCK as usize + 1), 2);
        assert_eq!(grid(usize::MAX), 1024);
    }
}
