//! GPU memory of our own, made for RDMA.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::api::{AccessDesc, AllocationHandle, AllocationProp, Api, Context, consts};
use super::context::KeptContext;
use super::device::Gpu;
use super::error::CudaError;

/// GPU memory that other devices and the CPU can access: a VMM allocation that is exportable by
/// file descriptor.
///
/// Its length is rounded up to the GPU's granularity (2 MiB). Dropping it never waits for the GPU,
/// unlike `cudaFree`; work that uses it must be over by then.
#[derive(Debug)]
pub struct GpuBuffer {
    gpu: Arc<Gpu>,
    context: KeptContext,
    addr: u64,
    len: usize,
    mapped_len: usize,
}

impl GpuBuffer {
    /// `len` bytes (at least one granule is allocated), not zeroed.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self, CudaError> {
        Self::new_in(gpu, gpu.primary()?, len)
    }

    /// The same through an existing context.
    pub(super) fn new_in(gpu: &Arc<Gpu>, context: Context, len: usize) -> Result<Self, CudaError> {
        // VMM memory belongs to no context and is no witness of one.
        let kept = KeptContext::new(gpu.driver(), context, None)?;
        gpu.driver().in_context(context, |api| {
            let prop =
                AllocationProp::device(gpu.ordinal(), true, gpu.gpu_direct_rdma_with_vmm() == Some(true));
            let mut granularity = 0;
            // SAFETY: the call reads the properties and writes one size.
            unsafe { api.mem_granularity(&raw mut granularity, &raw const prop, 0) }?;
            let mapped_len = len.max(1).checked_next_multiple_of(granularity.max(1)).ok_or(CudaError {
                call: "cuMemCreate",
                code: 2,
                name: "CUDA_ERROR_OUT_OF_MEMORY",
            })?;
            let mut handle = 0;
            // SAFETY: the call reads the properties and writes one handle.
            unsafe { api.mem_create(&raw mut handle, mapped_len, &raw const prop, 0) }?;
            let mapped = map(api, handle, mapped_len, &prop);
            // SAFETY: the mapping, where there is one, keeps the memory; the handle is not used
            // again.
            let _ = unsafe { api.mem_release(handle) };
            Ok(Self { gpu: Arc::clone(gpu), context: kept, addr: mapped?, len, mapped_len })
        })
    }

    /// Its address on the GPU.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its requested length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a buffer of no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// A context in which it can be used, while that is alive.
    #[must_use]
    pub fn context(&self) -> Context {
        self.context.handle()
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        // Errors mean that the context is gone. After a reset the addresses may be reallocated, so
        // leave them alone.
        let _ = self.context.run(self.gpu.driver(), |api| {
            // SAFETY: the range is ours, was mapped as one, and is no longer in use.
            unsafe {
                api.mem_unmap(self.addr, self.mapped_len)?;
                api.mem_address_free(self.addr, self.mapped_len)
            }
        });
    }
}

/// Reserves addresses, maps the allocation there and lets its GPU at it.
fn map(api: &Api, handle: AllocationHandle, len: usize, prop: &AllocationProp) -> Result<u64, CudaError> {
    let mut addr = 0;
    // SAFETY: the call writes one address.
    unsafe { api.mem_reserve(&raw mut addr, len, 0, 0, 0) }?;
    // SAFETY: the reservation is ours, the handle is live and `len` bytes long.
    if let Err(error) = unsafe { api.mem_map(addr, len, 0, handle, 0) } {
        // SAFETY: nothing is mapped in the reservation.
        let _ = unsafe { api.mem_address_free(addr, len) };
        return Err(error);
    }
    let access = AccessDesc { location: prop.location, flags: 3 };
    // SAFETY: the range is mapped; one description is passed.
    if let Err(error) = unsafe { api.mem_set_access(addr, len, &raw const access, 1) } {
        // SAFETY: the mapping and the reservation are ours and their address was not shared yet.
        let _ = unsafe { api.mem_unmap(addr, len).and_then(|()| api.mem_address_free(addr, len)) };
        return Err(error);
    }
    Ok(addr)
}

/// The VMM allocation mapped at `addr` as a file descriptor. To be called with a context current.
pub(super) fn export_fd(api: &Api, addr: u64) -> Result<OwnedFd, CudaError> {
    let mut handle = 0;
    // SAFETY: the call writes one handle, which is released below.
    unsafe { api.mem_retain_handle(&raw mut handle, addr) }?;
    let mut fd: RawFd = -1;
    // SAFETY: the handle is live; for this type of handle the call writes an int.
    let answer = unsafe { api.mem_export((&raw mut fd).cast(), handle, consts::HANDLE_TYPE_POSIX_FD, 0) };
    // SAFETY: releases the reference taken above.
    let _ = unsafe { api.mem_release(handle) };
    answer?;
    if fd < 0 {
        return Err(no_descriptor("cuMemExportToShareableHandle"));
    }
    // SAFETY: the driver made the descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A driver that reports success without giving a descriptor.
pub(super) fn no_descriptor(call: &'static str) -> CudaError {
    CudaError { call, code: 999, name: "success, but without a file descriptor" }
}
