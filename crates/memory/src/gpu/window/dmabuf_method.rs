//! The first method in the fallback order: CUDA exports the memory as a dma-buf, and the CPU maps
//! that.

use std::fmt;
use std::io;

use super::super::dmabuf::DmaBuf;
use super::super::range::GpuRange;
use super::super::rm::map_fd;
use super::mapping::{Extent, Mapping};
use super::{Refused, no_room, piece_of};

/// The kernel's own number for "not supported", which has no name in user space.
const ENOTSUPP: i32 = 524;

pub(super) fn map(range: &GpuRange, extent: Extent) -> Result<Mapping, Refused> {
    let mut mapping = Mapping::reserve(extent)?;
    for segment in range.segments() {
        let Some(piece) = piece_of(range, segment, extent) else { continue };
        let len = usize::try_from(piece.len()).map_err(Refused::new)?;
        let exported = DmaBuf::export_pages(range.gpu().driver(), range.context(), piece.start, len)
            .map_err(Refused::new)?;
        mapping
            // SAFETY: the piece lies inside our own reservation, which is still unused.
            .place(piece, |at| unsafe { map_fd(exported.owned(), 0, len, at) })
            .map_err(|error| refused(range.gpu(), range.gpu().bar1_size(), len, &error))?;
        // The descriptor may go: the mapping keeps the export.
    }
    mapping = mapping.finish()?;
    Ok(mapping)
}

fn refused(gpu: &impl fmt::Display, bar1: Option<u64>, len: usize, error: &io::Error) -> Refused {
    let failed = format!("mmap of the dma-buf failed: {error}");
    match error.raw_os_error() {
        Some(ENOTSUPP) => Refused::new(
            "the driver exports a dma-buf but does not support mmap of it (error 524, ENOTSUPP); drivers for CUDA 13.3 and later do",
        ),
        Some(libc::ENOMEM) => no_room(gpu, bar1, len, failed),
        Some(libc::EAGAIN) => Refused::passing(failed),
        _ => Refused::new(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_bar1_is_said_with_its_sizes_and_may_pass() {
        let said =
            |code| refused(&"GPU 0 (a card)", Some(256 << 20), 64 << 20, &io::Error::from_raw_os_error(code));
        let full = said(libc::ENOMEM);
        assert!(full.passing);
        for words in ["65536 KiB", "256 MiB", "GPU 0 (a card)", "resizable BAR", "mmap of the dma-buf failed"]
        {
            assert!(full.reason.contains(words), "{}", full.reason);
        }
        assert!(said(libc::EAGAIN).passing);
        assert!(!said(libc::ENODEV).passing && !said(ENOTSUPP).passing);
        assert!(said(ENOTSUPP).reason.contains("CUDA 13.3"));
    }
}
