//! The memory behind a pointer.

use nobounce::file::{LocalMemory, LocalMemoryError};
use nobounce_memory::gpu::{GpuOptions, GpuRangeError, GpuRegisterError};
use nobounce_memory::path::Require;

use crate::abi::Status;
use crate::{log, parameters};

/// GPU memory, or host memory where CUDA does not know the address.
pub(crate) fn at(addr: u64, len: usize, has_window: bool) -> Result<LocalMemory, Status> {
    if addr == 0 || len == 0 {
        return Err(Status::InvalidValue);
    }
    let require = parameters::require();
    // Without a window a direct path is impossible.
    let window = has_window || require == Require::Direct;
    let options = GpuOptions { window, require, ..GpuOptions::default() }.with_environment();
    // SAFETY: cuFile's callers promise that the memory lives as long as it is registered or read
    // into.
    let found = unsafe { LocalMemory::gpu(addr, len, &options) };
    let refused = match found {
        Ok(memory) => return Ok(memory),
        Err(refused) => refused,
    };
    if let LocalMemoryError::Gpu(GpuRegisterError::Range(range)) = &refused {
        match range {
            GpuRangeError::HostMemory { .. } | GpuRangeError::Driver(_) => return host(addr, len),
            GpuRangeError::Crosses { .. } => return refuse(&refused, Status::PointerRange),
            _ => return refuse(&refused, Status::PointerInvalid),
        }
    }
    match &refused {
        LocalMemoryError::Gpu(GpuRegisterError::NotDirect { .. }) => refuse(&refused, Status::IoNotSupported),
        _ => refuse(&refused, Status::Internal),
    }
}

fn host(addr: u64, len: usize) -> Result<LocalMemory, Status> {
    let base = usize::try_from(addr).map_err(|_| Status::InvalidValue)?;
    // SAFETY: as above; the kernel and the guarded routines check every access.
    let found = unsafe { LocalMemory::host(std::ptr::with_exposed_provenance_mut(base), len) };
    found.or_else(|refused| refuse(&refused, Status::Internal))
}

fn refuse<T>(why: &LocalMemoryError, status: Status) -> Result<T, Status> {
    log::warn(|| format!("cufile: {why}"));
    Err(status)
}
