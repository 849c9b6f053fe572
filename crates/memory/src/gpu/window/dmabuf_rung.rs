//! The first rung: CUDA exports the memory as a dma-buf, and the CPU maps that.

use super::super::dmabuf::DmaBuf;
use super::super::range::GpuRange;
use super::super::rm::map_fd;
use super::mapping::{Extent, Mapping};
use super::{Refused, piece_of};

/// The kernel's own number for "not supported", which has no name in user space.
const ENOTSUPP: i32 = 524;

pub(super) fn map(range: &GpuRange, extent: Extent) -> Result<Mapping, Refused> {
    let mut mapping = Mapping::reserve(extent)?;
    for segment in range.segments() {
        let Some(piece) = piece_of(range, segment, extent) else { continue };
        let len = usize::try_from(piece.len()).map_err(Refused::new)?;
        let exported = DmaBuf::export_pages(range.gpu().driver(), range.context(), piece.start, len)
            .map_err(Refused::new)?;
        // SAFETY: the piece lies inside our own reservation, which nobody uses yet.
        unsafe { map_fd(exported.owned(), 0, len, mapping.at(piece.start)) }.map_err(|error| {
            match error.raw_os_error() {
                Some(ENOTSUPP) => Refused::new(
                    "the driver exports a dma-buf but does not let the CPU map it (mmap gave error 524, ENOTSUPP); \
                     drivers for CUDA 13.3 and later do",
                ),
                Some(libc::ENOMEM | libc::EAGAIN) => Refused::passing(format!("mmap of the dma-buf failed ({error})")),
                _ => Refused::new(format!("mmap of the dma-buf failed ({error})")),
            }
        })?;
        // The descriptor may go: the mapping keeps the export.
    }
    mapping = mapping.finish()?;
    Ok(mapping)
}
