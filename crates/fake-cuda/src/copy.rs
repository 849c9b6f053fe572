//! Copies between host and device.

use std::slice;
use std::sync::Arc;

use crate::call::{Call, Rule, call};
use crate::lane::{Work, is_held, is_spinning};
use crate::memory::Piece;
use crate::status::{Answer, Status};

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, len: usize, stream: u64) -> Status {
    call("cuMemcpyHtoDAsync_v2", Rule::Context, |call| {
        if len == 0 {
            return Ok(());
        }
        call.block_until(|_| !is_held());
        let pieces = call.pieces(to, len)?;
        if call.is_captured(stream)? {
            return Ok(());
        }
        let lane = call.lane(stream)?;
        lane.push(match call.pinned(from.addr(), len) {
            Some(from) => Work::Write { from, to: pieces },
            None => {
                // Pageable memory is read before the call returns.
                // SAFETY: the caller of the copy passes `len` readable bytes.
                let bytes = unsafe { slice::from_raw_parts(from, len) };
                Work::WriteBytes { from: bytes.to_vec(), to: pieces }
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, len: usize, stream: u64) -> Status {
    call("cuMemcpyDtoHAsync_v2", Rule::Context, |call| {
        if len == 0 {
            return Ok(());
        }
        call.block_until(|_| !is_held());
        let pieces = call.pieces(from, len)?;
        if call.is_captured(stream)? {
            return Ok(());
        }
        let lane = call.lane(stream)?;
        match call.pinned(to.addr(), len) {
            Some(to) => lane.push(Work::Read { from: pieces, to }),
            None => {
                // Into pageable memory the call is not asynchronous at all.
                let waiting = Arc::clone(&lane);
                call.block_until(|_| waiting.is_idle() && !(waiting.blocking && is_spinning()));
                read_now(&pieces, to);
            }
        }
        Ok(())
    })
}

/// As `CUDA_MEMCPY2D` lays it out: sixteen words, the kinds of memory in the third and tenth.
#[repr(C)]
struct Rows([usize; 16]);

/// Rows from device memory into pinned memory; no caller uses another direction.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpy2DAsync_v2(copy: *const Rows, stream: u64) -> Status {
    call("cuMemcpy2DAsync_v2", Rule::Context, |call| {
        // SAFETY: the caller passes a description, as CUDA requires.
        let Some(Rows(words)) = (unsafe { copy.as_ref() }) else { return Err(Status::INVALID_VALUE) };
        let [_, _, from_kind, _, from, _, from_pitch, _, _, to_kind, to, _, _, to_pitch, width, height] =
            *words;
        if (from_kind & 0xffff_ffff, to_kind & 0xffff_ffff) != (2, 1)
            || to_pitch < width
            || from_pitch < width
        {
            return Err(Status::INVALID_VALUE);
        }
        call.block_until(|_| !is_held());
        let captured = call.is_captured(stream)?;
        let lane = call.lane(stream)?;
        let mut rows = Vec::with_capacity(height);
        for row in 0..height {
            let pieces = call.pieces((from + row * from_pitch) as u64, width)?;
            rows.push((pieces, call.pinned(to + row * to_pitch, width).ok_or(Status::INVALID_VALUE)?));
        }
        if !captured {
            lane.push(Work::ReadRows(rows));
        }
        Ok(())
    })
}

/// Copies from device memory into pinned memory; no caller uses another direction.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyBatchAsync(
    to: *const usize,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const [u32; 6],
    first: *const usize,
    attributes_count: usize,
    failed: *mut usize,
    stream: u64,
) -> Status {
    call("cuMemcpyBatchAsync", Rule::Context, |call| {
        // SAFETY: the caller passes as many as it says, as CUDA requires.
        let described = unsafe { (attributes.as_ref(), first.as_ref()) };
        let valid = attributes_count == 1 && described.1 == Some(&0) && !failed.is_null();
        if count == 0 || !valid || described.0.is_none_or(|[order, ..]| *order != 1) {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: as above.
        let lists = unsafe {
            let list = |at| slice::from_raw_parts(at, count);
            (list(to), slice::from_raw_parts(from, count), list(sizes))
        };
        call.block_until(|_| !is_held());
        let captured = call.is_captured(stream)?;
        let lane = call.lane(stream)?;
        let mut copies = Vec::with_capacity(count);
        for ((to, from), len) in lists.0.iter().zip(lists.1).zip(lists.2) {
            copies.push((call.pieces(*from, *len)?, call.pinned(*to, *len).ok_or(Status::INVALID_VALUE)?));
        }
        if !captured {
            lane.push(Work::ReadRows(copies));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, value: u8, len: usize, stream: u64) -> Status {
    call("cuMemsetD8Async", Rule::Context, |call| {
        if len == 0 {
            return Ok(());
        }
        let to = call.pieces(to, len)?;
        if call.is_captured(stream)? {
            return Ok(());
        }
        call.lane(stream)?.push(Work::Fill { value, to });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const u8, len: usize) -> Status {
    call("cuMemcpyHtoD_v2", Rule::ContextUncaptured, |call| {
        wait_for_default_stream(call)?;
        if len > 0 {
            write_now(&call.pieces(to, len)?, from);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, len: usize) -> Status {
    call("cuMemcpyDtoH_v2", Rule::ContextUncaptured, |call| {
        wait_for_default_stream(call)?;
        if len > 0 {
            read_now(&call.pieces(from, len)?, to);
        }
        Ok(())
    })
}

/// Synchronous copies queue on the default stream, behind its kernels and those of all streams that
/// are not NON_BLOCKING.
fn wait_for_default_stream(call: &mut Call) -> Answer {
    call.forbid_default_stream()?;
    call.block_until(|world| {
        !is_spinning() && world.streams.values().all(|stream| !stream.lane.blocking || stream.lane.is_idle())
    });
    Ok(())
}

pub(crate) fn read_now(pieces: &[Piece], mut to: *mut u8) {
    for piece in pieces {
        piece.place.read(to, piece.len);
        to = to.wrapping_add(piece.len);
    }
}

pub(crate) fn write_now(pieces: &[Piece], mut from: *const u8) {
    for piece in pieces {
        piece.place.write(from, piece.len);
        from = from.wrapping_add(piece.len);
    }
}
