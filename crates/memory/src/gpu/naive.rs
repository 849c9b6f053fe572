//! Staging as programs do it without this library: `cudaMemcpy` between GPU memory and ordinary,
//! pageable host memory, and double-buffering in pinned memory.
//!
//! For comparisons only. These calls wait for the GPU, and for spinning kernels of the program: no
//! data path uses them.

use std::{ptr, slice, thread};

use thiserror::Error;

use super::api::{Api, Event, Stream, consts};
use super::own_stream::own_stream;
use super::{CudaError, GpuBuffer};
use crate::HostBuffer;

/// Why a copy was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NaiveError {
    /// The driver refused.
    #[error("a synchronous copy failed: {0}")]
    Cuda(#[from] CudaError),
    /// One of the two buffers is too short; nothing was copied.
    #[error(
        "{len} bytes at offset {gpu_offset:#x} of a GPU buffer of {gpu} bytes and at offset {host_offset:#x} of a host buffer of \
         {host} bytes do not fit; nothing was copied"
    )]
    OutOfBounds {
        /// Offset in the GPU buffer.
        gpu_offset: usize,
        /// Offset in the host buffer.
        host_offset: usize,
        /// Requested bytes.
        len: usize,
        /// Length of the GPU buffer.
        gpu: usize,
        /// Length of the host buffer.
        host: usize,
    },
}

/// Copies from the GPU to pageable host memory, and returns when the bytes are there.
pub fn copy_to_host(
    gpu: &GpuBuffer,
    gpu_offset: usize,
    host: &HostBuffer,
    host_offset: usize,
    len: usize,
) -> Result<(), NaiveError> {
    check(gpu, gpu_offset, host, host_offset, len)?;
    let (from, to) = (gpu.addr() + gpu_offset as u64, host.as_mut_ptr().wrapping_add(host_offset));
    run(gpu, |api| {
        // SAFETY: both ranges are inside buffers that are borrowed until the copy is over; to
        // neither are there references.
        unsafe { api.copy_from_device(to.cast(), from, len) }
    })
}

/// Copies from pageable host memory to the GPU. As with `cudaMemcpy`, the last bytes may still be
/// in flight when it returns; [`settle`] waits for them.
pub fn copy_to_gpu(
    gpu: &GpuBuffer,
    gpu_offset: usize,
    host: &HostBuffer,
    host_offset: usize,
    len: usize,
) -> Result<(), NaiveError> {
    check(gpu, gpu_offset, host, host_offset, len)?;
    let (to, from) = (gpu.addr() + gpu_offset as u64, host.as_mut_ptr().wrapping_add(host_offset));
    run(gpu, |api| {
        // SAFETY: as in `copy_to_host`; the driver is done with the host's side when the call
        // returns.
        unsafe { api.copy_to_device(to, from.cast(), len) }
    })
}

/// Waits until all copies made so far are over.
pub fn settle(gpu: &GpuBuffer) -> Result<(), NaiveError> {
    run(gpu, |api| {
        // SAFETY: the default stream always exists.
        unsafe { api.stream_synchronize(Stream::NULL) }
    })
}

fn run(gpu: &GpuBuffer, calls: impl FnOnce(&Api) -> Result<(), CudaError>) -> Result<(), NaiveError> {
    Ok(gpu.gpu().driver().in_context(gpu.gpu().primary()?, calls)?)
}

fn check(
    gpu: &GpuBuffer,
    gpu_offset: usize,
    host: &HostBuffer,
    host_offset: usize,
    len: usize,
) -> Result<(), NaiveError> {
    let fits = |offset: usize, of: usize| offset.checked_add(len).is_some_and(|end| end <= of);
    if fits(gpu_offset, gpu.len()) && fits(host_offset, host.len()) {
        return Ok(());
    }
    Err(NaiveError::OutOfBounds { gpu_offset, host_offset, len, gpu: gpu.len(), host: host.len() })
}

/// Double-buffering by one thread: while the GPU copies from one pinned buffer, the thread fills
/// the next. Shares no code with [`CopyEngine`](super::copy_engine::CopyEngine).
#[derive(Debug)]
pub struct DoubleBuffer<'a> {
    gpu: &'a GpuBuffer,
    stream: Stream,
    /// Pinned memory, and the event behind its last copy.
    buffers: Vec<(*mut u8, Event)>,
    /// Bytes of each.
    len: usize,
    /// The one to fill now.
    at: usize,
}

// SAFETY: the buffers belong to this object alone, and CUDA's functions may be called from any
// thread.
unsafe impl Send for DoubleBuffer<'_> {}

impl<'a> DoubleBuffer<'a> {
    /// With so many buffers of `len` bytes.
    pub fn new(gpu: &'a GpuBuffer, buffers: usize, len: usize) -> Result<Self, NaiveError> {
        let mut own = Self { gpu, stream: Stream::NULL, buffers: Vec::new(), len, at: 0 };
        run(gpu, |api| {
            own.stream = own_stream(api)?;
            for _ in 0..buffers {
                let (mut memory, mut event) = (ptr::null_mut(), Event::NULL);
                // SAFETY: each call writes one pointer or handle; the memory has that many bytes.
                unsafe {
                    api.event_create(&raw mut event, consts::EVENT_DISABLE_TIMING)?;
                    api.mem_host_alloc(&raw mut memory, len, consts::MEMHOSTALLOC_PORTABLE)?;
                    ptr::write_bytes(memory.cast::<u8>(), 0, len);
                }
                own.buffers.push((memory.cast(), event));
            }
            Ok(())
        })?;
        Ok(own)
    }

    /// The next buffer, after its last copy is over.
    pub fn buffer(&mut self) -> Result<&mut [u8], NaiveError> {
        let (memory, event) = self.buffers[self.at];
        run(self.gpu, |api| {
            // As `cudaEventSynchronize`, which polls by default.
            // SAFETY: the event is ours, and the context is the primary one that it was made in.
            while let Err(error) = unsafe { api.event_query(event) } {
                if error.code != CudaError::NOT_READY {
                    return Err(error);
                }
                thread::yield_now();
            }
            Ok(())
        })?;
        // SAFETY: memory of that length, initialised; no copy of it is in flight, and the next one
        // needs this object.
        Ok(unsafe { slice::from_raw_parts_mut(memory, self.len) })
    }

    /// Starts the copy of the first `len` bytes of the buffer that [`buffer`](Self::buffer) gave.
    pub fn copy(&mut self, gpu_offset: usize, len: usize) -> Result<(), NaiveError> {
        let gpu = self.gpu;
        if len > self.len || gpu_offset.checked_add(len).is_none_or(|end| end > gpu.len()) {
            let (host, gpu) = (self.len, gpu.len());
            return Err(NaiveError::OutOfBounds { gpu_offset, host_offset: 0, len, gpu, host });
        }
        let (memory, event) = self.buffers[self.at];
        run(gpu, |api| {
            // SAFETY: both ranges are inside; the buffer is not handed out again before the event,
            // and the GPU's is borrowed until `drop` has waited.
            unsafe {
                let to = gpu.addr() + gpu_offset as u64;
                api.copy_to_device_async(to, memory.cast(), len, self.stream)?;
                api.event_record(event, self.stream)
            }
        })?;
        self.at = (self.at + 1) % self.buffers.len();
        Ok(())
    }

    /// Waits until all copies are over.
    pub fn settle(&self) -> Result<(), NaiveError> {
        run(self.gpu, |api| {
            // SAFETY: the stream is ours.
            unsafe { api.stream_synchronize(self.stream) }
        })
    }
}

impl Drop for DoubleBuffer<'_> {
    fn drop(&mut self) {
        // What may still be in use, or fails here, is left to the context.
        if self.stream.is_null() || self.settle().is_err() {
            return;
        }
        let _ = run(self.gpu, |api| {
            for (memory, event) in self.buffers.drain(..) {
                // SAFETY: ours, and no longer in use.
                unsafe {
                    api.mem_host_free(memory.cast())?;
                    api.event_destroy(event)?;
                }
            }
            // SAFETY: as above.
            unsafe { api.stream_destroy(self.stream) }
        });
    }
}
