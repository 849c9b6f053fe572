//! GPU memory as a dma-buf: what an RDMA adapter registers, and what newer drivers let the CPU map.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::allocation::no_descriptor;
use super::api::{Context, consts};
use super::error::CudaError;
use super::range::GpuRange;
use crate::page_size;

/// A range of GPU memory exported as a dma-buf.
///
/// CUDA exports whole host pages only: the exported range is the requested one, widened to pages.
#[derive(Debug)]
pub struct DmaBuf {
    fd: OwnedFd,
    start: u64,
    len: usize,
}

impl DmaBuf {
    /// Exports the pages of `range`.
    pub fn export(range: &GpuRange) -> Result<Self, CudaError> {
        let (start, len) = whole_pages(range.addr(), range.len(), page_size());
        Self::export_pages(range.gpu().driver(), range.context_now()?, start, len)
    }

    /// Exports `len` bytes at `start`, both multiples of the page size.
    pub(super) fn export_pages(
        driver: &super::Driver,
        context: Context,
        start: u64,
        len: usize,
    ) -> Result<Self, CudaError> {
        let mut fd: RawFd = -1;
        driver.in_context(context, |api| {
            // SAFETY: for this type of handle the call writes an int.
            unsafe {
                api.mem_range_handle((&raw mut fd).cast(), start, len, consts::RANGE_HANDLE_DMA_BUF_FD, 0)
            }
        })?;
        if fd < 0 {
            return Err(no_descriptor("cuMemGetHandleForAddressRange"));
        }
        // SAFETY: the driver made the descriptor for us.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, start, len })
    }

    /// The GPU address of its first byte.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Its length in bytes, whole pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn owned(&self) -> &OwnedFd {
        &self.fd
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The range widened to whole pages.
pub(super) fn whole_pages(addr: u64, len: usize, page: usize) -> (u64, usize) {
    let mask = page as u64 - 1;
    let head = usize::try_from(addr & mask).unwrap_or(0);
    (addr & !mask, (head + len).next_multiple_of(page))
}

#[cfg(test)]
mod tests {
    use super::whole_pages;

    #[test]
    fn ranges_are_widened_to_whole_pages() {
        assert_eq!(whole_pages(0x1000, 4096, 4096), (0x1000, 4096));
        assert_eq!(whole_pages(0x1001, 4096, 4096), (0x1000, 8192));
        assert_eq!(whole_pages(0x1fff, 1, 4096), (0x1000, 4096));
        assert_eq!(whole_pages(0x1200, 70_000, 4096), (0x1000, 18 * 4096));
    }
}
