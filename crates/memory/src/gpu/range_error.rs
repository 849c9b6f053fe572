//! Why a pointer is not what can be registered.

use thiserror::Error;

use super::api::Context;
use super::device::Gpu;
use super::driver::Driver;
use super::error::{CudaError, DriverError};
use crate::probe;

/// Why a range cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GpuRangeError {
    /// A range of no bytes, or one that wraps around.
    #[error(
        "invalid range of {len} bytes at {addr:#x}: expected at least one byte, without address overflow"
    )]
    Empty {
        /// Requested address.
        addr: u64,
        /// Requested length.
        len: usize,
    },
    /// CUDA does not know the address, and the CPU can read it.
    #[error(
        "{addr:#x} is host memory unknown to CUDA; register it as host memory, or pass a pointer from cudaMalloc"
    )]
    HostMemory {
        /// The address.
        addr: u64,
    },
    /// CUDA does not know the address, and neither does the kernel.
    #[error(
        "no memory at {addr:#x}: it was freed, its context was destroyed, or the address belongs to another process; pass a \
         pointer to a live allocation of this process"
    )]
    Nothing {
        /// The address.
        addr: u64,
    },
    /// CUDA does not know the address, and has no context in this process that memory could belong
    /// to.
    #[error(
        "no memory at {addr:#x} and no CUDA context in this process: it was destroyed with its memory (cudaDeviceReset, \
         cuCtxDestroy), or nothing is allocated yet; allocate, then register"
    )]
    NoContext {
        /// The address.
        addr: u64,
    },
    /// The range leaves the allocation that it begins in.
    #[error(
        "{len} bytes at {addr:#x} exceed their allocation of {size} bytes at {base:#x}; register at most {} bytes from there", .base.saturating_add(*.size).saturating_sub(*.addr)
    )]
    Crosses {
        /// Requested address.
        addr: u64,
        /// Requested length.
        len: usize,
        /// Where the allocation (or the run of VMM mappings) begins.
        base: u64,
        /// Its length.
        size: u64,
    },
    /// The memory's GPU is not among those that CUDA shows.
    #[error(
        "{addr:#x} is on CUDA device {ordinal}, which this process cannot see; check CUDA_VISIBLE_DEVICES"
    )]
    NoSuchGpu {
        /// The address.
        addr: u64,
        /// CUDA's number of the device.
        ordinal: i32,
    },
    /// The context of the memory is gone.
    #[error(
        "the CUDA context of the memory at {addr:#x} no longer exists ({error}); it was destroyed, for instance by \
         cudaDeviceReset: allocate and register again"
    )]
    ContextGone {
        /// The address.
        addr: u64,
        /// CUDA's error.
        error: CudaError,
    },
    /// CUDA could not say what the memory is.
    #[error("cannot query the memory at {addr:#x}: {error}")]
    Query {
        /// The address.
        addr: u64,
        /// CUDA's error.
        error: CudaError,
    },
    /// There is no CUDA here.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Classifies an address that CUDA does not know. CUDA's answer is always the same, so other
/// sources are queried.
pub(super) fn unknown(addr: u64) -> GpuRangeError {
    if probe::is_readable(addr) {
        GpuRangeError::HostMemory { addr }
    } else if has_context() {
        GpuRangeError::Nothing { addr }
    } else {
        GpuRangeError::NoContext { addr }
    }
}

/// Whether memory may belong to a context of this process: this thread has one, or a GPU's primary
/// one exists. True when uncertain.
fn has_context() -> bool {
    let Ok(driver) = Driver::get() else { return true };
    let is_current: Result<_, CudaError> = driver.relaxed(|api| {
        let (mut context, mut device) = (Context::NULL, -1);
        // SAFETY: the call writes one handle.
        unsafe { api.ctx_current(&raw mut context) }?;
        if context.is_null() {
            return Ok(false);
        }
        // SAFETY: the call writes one int.
        match unsafe { api.ctx_device(&raw mut device) } {
            // The context was destroyed but left current on this thread.
            Err(error) if error.context_is_gone() => Ok(false),
            answer => answer.map(|()| true),
        }
    });
    let has_primary =
        || Gpu::list().map_or(true, |gpus| gpus.iter().any(|gpu| gpu.primary_is_active().unwrap_or(true)));
    is_current.unwrap_or(true) || has_primary()
}

/// The error of a question about an address that CUDA did not answer.
pub(super) fn failed(addr: u64, error: CudaError) -> GpuRangeError {
    if error.context_is_gone() {
        GpuRangeError::ContextGone { addr, error }
    } else if error.code == CudaError::INVALID_VALUE {
        unknown(addr)
    } else {
        GpuRangeError::Query { addr, error }
    }
}
