//! The last method in the fallback order: the `gdrdrv` module of GDRCopy, where installed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::super::driver::Driver;
use super::super::range::GpuRange;
use super::super::rm::{map_fd, request};
use super::mapping::{Extent, Mapping};
use super::{Refused, no_room};

const NODE: &str = "/dev/gdrdrv";
const MAGIC: u8 = 0xDA;
const PIN: u8 = 1;
const UNPIN: u8 = 2;
/// The module pins whole pages of the GPU.
const GPU_PAGE: u64 = 64 << 10;

/// The argument of `PIN`, as the module defines it.
#[repr(C)]
struct PinBuffer {
    addr: u64,
    size: u64,
    token: u64,
    va_space: u32,
    pad: u32,
    handle: u64,
}

/// Pages that the module pinned for us.
struct GdrPin {
    node: Arc<OwnedFd>,
    handle: u64,
}

impl Drop for GdrPin {
    fn drop(&mut self) {
        if Driver::is_forked() {
            return;
        }
        // The module declares the argument of UNPIN by a pointer's size.
        let request = request(MAGIC, UNPIN, size_of::<*const u64>());
        // SAFETY: the call reads one handle. A failure leaves the pages to the descriptor's end.
        unsafe { libc::ioctl(self.node.as_raw_fd(), request, &raw mut self.handle) };
    }
}

pub(super) fn map(range: &GpuRange, extent: Extent) -> Result<Mapping, Refused> {
    let node: File = OpenOptions::new().read(true).write(true).open(NODE).map_err(|error| {
        Refused::new(format!(
            "{NODE} cannot be opened ({error}): the gdrdrv module of GDRCopy is not loaded or not accessible"
        ))
    })?;
    let node = Arc::new(OwnedFd::from(node));
    // The module maps its pinned pages from their start: whole GPU pages, though the memory begins
    // inside one.
    let extent = Extent {
        start: extent.start / GPU_PAGE * GPU_PAGE,
        end: extent.end.checked_next_multiple_of(GPU_PAGE).ok_or_else(|| Refused::new("no such address"))?,
    };
    let mut mapping = Mapping::reserve(extent)?;
    for segment in range.segments() {
        let pages = Extent {
            start: segment.base / GPU_PAGE * GPU_PAGE,
            end: segment.end().next_multiple_of(GPU_PAGE),
        };
        let piece = if range.segments().len() == 1 { Some(extent) } else { pages.overlap(extent) };
        let Some(piece) = piece else { continue };
        let mut pin =
            PinBuffer { addr: piece.start, size: piece.len(), token: 0, va_space: 0, pad: 0, handle: 0 };
        // SAFETY: the structure is the one the module takes.
        if unsafe { libc::ioctl(node.as_raw_fd(), request(MAGIC, PIN, size_of::<PinBuffer>()), &raw mut pin) }
            != 0
        {
            let error = io::Error::last_os_error();
            let reason = format!("gdrdrv cannot pin the memory ({error})");
            // Most often BAR1 is full: another time, or less of it, may do.
            let is_full = error.raw_os_error() == Some(libc::ENOMEM);
            let len = usize::try_from(piece.len()).unwrap_or(usize::MAX);
            return Err(if is_full {
                no_room(range.gpu(), range.gpu().bar1_size(), len, reason)
            } else {
                Refused::new(reason)
            });
        }
        mapping.keep(GdrPin { node: Arc::clone(&node), handle: pin.handle });
        let len = usize::try_from(piece.len()).map_err(Refused::new)?;
        let offset = i64::try_from(pin.handle)
            .ok()
            .and_then(|handle| handle.checked_mul(i64::try_from(crate::page_size()).ok()?))
            .ok_or_else(|| {
                Refused::new(format!(
                    "gdrdrv returned the handle {:#x}, which is not a valid offset",
                    pin.handle
                ))
            })?;
        mapping
            // SAFETY: the piece lies inside our own reservation, which is still unused.
            .place(piece, |at| unsafe { map_fd(&node, offset, len, at) })
            .map_err(|error| Refused::new(format!("mmap by gdrdrv failed ({error})")))?;
    }
    mapping.finish()
}
