//! The application's own reads and writes of GPU memory: through the BAR1 window where that is
//! faster, else by the copy engine, synchronously.
//!
//! The window is the device's own, if it has one (none where staging was requested). Each of the
//! two sees by its flag what the other has stored, and a copy settles it first. Other threads may
//! use it at the same time, though. The flag is down from the start of a thread's load, not from
//! its end. So where the flag alone would decide, this code makes the load itself (`read_back`,
//! about 1 us).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::calibration::{Calibration, USUAL_CROSSOVER};
use nobounce_memory::gpu::copy_engine::{CopyEngine, CopyError, PendingCopy, PinnedChunk};
use nobounce_memory::gpu::{GpuMemory, GpuWindow};
use nobounce_memory::path::Mechanism;

use crate::access::AccessError;

/// Pinned memory for one access: pieces of this length, with a fixed number in flight. Concurrent
/// accesses have their own, and return it to the pool.
const PIECE: usize = 512 << 10;
const PIECES: usize = 4;
/// Timeout for one piece: thousands of times what the largest needs.
const LIMIT: Duration = Duration::from_secs(10);
/// Spin this long for a piece; after that, yield to other threads.
const SPIN: Duration = Duration::from_micros(200);

/// How bytes get out of GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadMethod {
    /// Loads through the window.
    Window,
    /// The copy engine, into pinned memory.
    CopyEngine,
}

impl ReadMethod {
    pub(crate) fn mechanism(self) -> Mechanism {
        match self {
            Self::Window => Mechanism::Window,
            Self::CopyEngine => Mechanism::CopyEngine,
        }
    }
}

/// Copies bytes out of GPU memory.
pub(crate) fn read(memory: &GpuMemory, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
    let len = bytes.len();
    let mut rest = bytes;
    read_pieces(memory, offset, len, |piece, _| {
        let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len());
        now.copy_from_slice(piece);
        rest = later;
        Ok(())
    })
}

/// Calls `take` with the bytes of a range of GPU memory, piece by piece and in order.
pub(crate) fn read_pieces<E: From<AccessError>>(
    memory: &GpuMemory,
    offset: usize,
    len: usize,
    mut take: impl FnMut(&[u8], ReadMethod) -> Result<(), E>,
) -> Result<(), E> {
    check(memory, offset, len)?;
    if let Some(window) = memory.window() {
        if len <= crossover(memory) {
            let mut bytes = vec![0; len];
            window.load(offset, &mut bytes[..]).map_err(AccessError::from)?;
            return take(&bytes, ReadMethod::Window);
        }
        window.read_back().map_err(AccessError::from)?;
    }
    let engine = engine(memory)?;
    let mut under_way: VecDeque<PendingCopy> = VecDeque::new();
    let (mut started, mut taken) = (0, 0);
    while taken < len {
        while started < len
            && under_way.len() < PIECES
            && let Some(chunk) = chunk(&engine, under_way.is_empty(), len)?
        {
            let piece = PIECE.min(len - started);
            let copy = engine.start_read(memory, offset + started, piece, chunk);
            under_way.push_back(copy.map_err(AccessError::from)?);
            started += piece;
        }
        let Some(copy) = under_way.pop_front() else { continue };
        let (copied, piece) = (copy.len(), wait(&engine, copy, len)?);
        take(&piece[..copied], ReadMethod::CopyEngine)?;
        taken += copied;
    }
    Ok(())
}

/// Copies bytes into GPU memory; on return they are visible to kernels, the copy engine and peers.
pub(crate) fn write(memory: &GpuMemory, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
    check(memory, offset, bytes.len())?;
    if let Some(window) = memory.window() {
        window.store_last(offset, bytes)?;
        return finish(window);
    }
    let engine = engine(memory)?;
    let mut under_way: VecDeque<PendingCopy> = VecDeque::new();
    for (at, piece) in (offset..).step_by(PIECE).zip(bytes.chunks(PIECE)) {
        if under_way.len() == PIECES
            && let Some(first) = under_way.pop_front()
        {
            wait(&engine, first, bytes.len())?;
        }
        let mut chunk = wait_for_chunk(&engine, bytes.len())?;
        // A chunk that was just taken has no clones.
        if let Some(room) = chunk.get_mut() {
            room[..piece.len()].copy_from_slice(piece);
        }
        under_way.push_back(engine.start_write(memory, at, chunk, piece.len())?);
    }
    under_way.into_iter().try_for_each(|copy| wait(&engine, copy, bytes.len()).map(drop))
}

/// Reads an aligned word.
pub(crate) fn read_u64(memory: &GpuMemory, offset: usize) -> Result<u64, AccessError> {
    match word_window(memory, offset)? {
        Some(window) => Ok(window.load_u64(offset)?),
        None => {
            let mut word = [0; 8];
            read(memory, offset, &mut word)?;
            Ok(u64::from_ne_bytes(word))
        }
    }
}

/// Writes an aligned word; on return it is visible to others.
pub(crate) fn write_u64(memory: &GpuMemory, offset: usize, value: u64) -> Result<(), AccessError> {
    match word_window(memory, offset)? {
        Some(window) => {
            window.store_u64(offset, value)?;
            finish(window)
        }
        None => write(memory, offset, &value.to_ne_bytes()),
    }
}

/// After stores: makes them visible to all, including copies that the application starts without
/// the window.
pub(crate) fn finish(window: &GpuWindow) -> Result<(), AccessError> {
    window.complete()?;
    Ok(window.read_back()?)
}

fn word_window(memory: &GpuMemory, offset: usize) -> Result<Option<&GpuWindow>, AccessError> {
    check(memory, offset, 8)?;
    let address = memory.addr() + offset as u64;
    if address.is_multiple_of(8) { Ok(memory.window()) } else { Err(AccessError::Misaligned { address }) }
}

fn check(memory: &GpuMemory, offset: usize, len: usize) -> Result<(), AccessError> {
    match offset.checked_add(len) {
        Some(end) if end <= memory.len() => Ok(()),
        _ => Err(AccessError::OutOfBounds { offset, len, region: memory.len() }),
    }
}

fn crossover(memory: &GpuMemory) -> usize {
    Calibration::of(memory.gpu()).map_or(USUAL_CROSSOVER, |found| found.load_crossover)
}

/// A copy engine for one access. It is cheap: finished engines return their resources for reuse.
fn engine(memory: &GpuMemory) -> Result<CopyEngine, AccessError> {
    engine_of(memory, PIECES, PIECE)
}

/// A copy engine with so many chunks of this length.
pub(crate) fn engine_of(memory: &GpuMemory, chunks: usize, len: usize) -> Result<CopyEngine, AccessError> {
    // Report freed memory as such, before CUDA fails on its address.
    memory.check_alive().map_err(CopyError::from)?;
    let context = memory.range().context_now().map_err(CopyError::from)?;
    Ok(CopyEngine::in_context(memory.gpu(), context, chunks, len)?)
}

/// A chunk, if one is free; waits for one if this access has none in flight.
fn chunk(engine: &CopyEngine, none_under_way: bool, len: usize) -> Result<Option<PinnedChunk>, AccessError> {
    if none_under_way { wait_for_chunk(engine, len).map(Some) } else { Ok(engine.take_chunk()) }
}

/// Chunks run out only after an earlier access timed out on copies that are still in flight.
pub(crate) fn wait_for_chunk(engine: &CopyEngine, len: usize) -> Result<PinnedChunk, AccessError> {
    let mut found = None;
    poll_until_done(len, || {
        found = engine.take_chunk();
        Ok(found.is_some())
    })?;
    found.ok_or(AccessError::Slow { len, limit: LIMIT })
}

/// Waits for a copy and returns its chunk.
pub(crate) fn wait(engine: &CopyEngine, copy: PendingCopy, len: usize) -> Result<PinnedChunk, AccessError> {
    poll_until_done(len, || Ok(engine.poll(&copy)?))?;
    copy.into_chunk().map_err(|_| AccessError::Slow { len, limit: LIMIT })
}

fn poll_until_done(
    len: usize,
    mut done: impl FnMut() -> Result<bool, AccessError>,
) -> Result<(), AccessError> {
    let start = Instant::now();
    while !done()? {
        let waited = start.elapsed();
        if waited > LIMIT {
            return Err(AccessError::Slow { len, limit: LIMIT });
        }
        if waited > SPIN {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
    Ok(())
}
