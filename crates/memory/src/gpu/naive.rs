//! Naive staging: `cudaMemcpy` between GPU memory and ordinary, pageable host memory.
//!
//! For comparisons only. These calls wait for the GPU, and for spinning kernels of the program: no
//! data path uses them.

use thiserror::Error;

use super::api::{Api, Stream};
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
