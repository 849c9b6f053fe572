//! dma-bufs: files of a range of device memory.

use std::ffi::c_void;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::abi::{put_any, size};
use crate::backing::{Backing, PAGE};
use crate::call::{Call, Rule, call};
use crate::memory::{Home, Kind};
use crate::status::{Answer, Status};
use crate::world::{self, World};

const DMA_BUF_FD: u32 = 1;
const MAPPING_TYPE_PCIE: u64 = 1;

/// Hands out a file descriptor and records it, so that a leaked one is detected.
pub(crate) fn give(world: &mut World, file: OwnedFd) -> i32 {
    let name = name_of(file.as_raw_fd());
    let number = file.into_raw_fd();
    world.given.insert(number, name);
    number
}

impl World {
    /// Exported descriptors that are still open.
    pub(crate) fn files_out(&self) -> usize {
        self.given.iter().filter(|&(&number, name)| name_of(number) == *name).count()
    }
}

/// Identity of a descriptor: its link in /proc and the file's inode number.
fn name_of(fd: i32) -> String {
    let path = format!("/proc/self/fd/{fd}");
    match (fs::read_link(&path), fs::metadata(&path)) {
        (Ok(link), Ok(data)) => format!("{} {}", link.display(), data.ino()),
        _ => "closed".to_owned(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetHandleForAddressRange(
    out: *mut c_void,
    pointer: u64,
    len: usize,
    kind: u32,
    flags: u64,
) -> Status {
    call("cuMemGetHandleForAddressRange", Rule::Context, |call| {
        let at = size(pointer)?;
        let aligned = at.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && len > 0;
        if kind != DMA_BUF_FD || !aligned || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if flags & !MAPPING_TYPE_PCIE != 0 || (flags != 0 && call.knobs.refuse_mmap) {
            return Err(Status::NOT_SUPPORTED);
        }
        let file = file_of(call, at, len)?;
        put_any(out, give(call, file))
    })
}

/// What the kernel module of GDRCopy pins: any device memory, regardless of what the driver
/// exports. For the tests' stand-in of the module: the file that holds the memory and the offset of
/// `pointer` in it. Returns -1 where there is no such memory. The file stays ours.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_pinned_file(pointer: u64, len: usize, offset: *mut u64) -> i32 {
    let world = world::lock();
    let file = size(pointer).and_then(|at| {
        let overlaps = |start: usize, size: usize| start < at + len && at < start + size;
        let entry = world.memory.values().find(|entry| overlaps(entry.start, entry.len));
        let entry = entry.filter(|entry| !entry.is_host()).ok_or(Status::INVALID_VALUE)?;
        let backing = entry.backing.as_ref().ok_or(Status::NOT_SUPPORTED)?;
        let first = at.checked_sub(entry.start - entry.offset).ok_or(Status::INVALID_VALUE)?;
        put_any(offset.cast(), u64::try_from(first).map_err(|_| Status::INVALID_VALUE)?)?;
        backing.share_whole()
    });
    file.unwrap_or(-1)
}

fn file_of(call: &Call, at: usize, len: usize) -> Answer<OwnedFd> {
    let Pages { backing, offset, shared_block } = range_of(call, at, len)?;
    if call.knobs.refuse_mmap {
        return unmappable().map_err(|_| Status::OUT_OF_MEMORY);
    }
    if call.knobs.wrong_export {
        return Backing::new(len)?.export(0, len, false);
    }
    backing.export(offset, len, shared_block)
}

/// Whole pages of a backing.
struct Pages {
    backing: Arc<Backing>,
    offset: usize,
    /// Other allocations lie in the same backing.
    shared_block: bool,
}

/// The bytes of a range of whole pages. An allocation may begin or end inside a page; the page's
/// other bytes belong to its neighbours.
fn range_of(call: &Call, at: usize, len: usize) -> Answer<Pages> {
    let last = at.checked_add(len).ok_or(Status::INVALID_VALUE)?;
    let entry = call
        .memory
        .values()
        .find(|entry| entry.start < at + PAGE && at < entry.start + entry.len)
        .ok_or(Status::INVALID_VALUE)?;
    match entry.kind {
        Kind::Malloc | Kind::Pool | Kind::Vmm(_) => {}
        Kind::Ipc | Kind::Managed | Kind::Pinned | Kind::Registered => return Err(Status::NOT_SUPPORTED),
    }
    let backing = entry.backing.as_ref().ok_or(Status::NOT_SUPPORTED)?;
    let first = entry.start - entry.offset;
    // A real driver exports several VMM handles as one dma-buf; one memfd cannot.
    let end = first + if matches!(entry.kind, Kind::Vmm(_)) { entry.len } else { backing.len() };
    if last > end {
        return Err(if call.entry(end).is_some() { Status::NOT_SUPPORTED } else { Status::INVALID_VALUE });
    }
    let shared_block = matches!(entry.home, Home::Chunk(_));
    Ok(Pages { backing: Arc::clone(backing), offset: at - first, shared_block })
}

/// A file that cannot be mapped, like the dma-bufs of drivers up to 580 (they return ENOTSUPP, this
/// one ENODEV).
fn unmappable() -> io::Result<OwnedFd> {
    // SAFETY: eventfd has no preconditions.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor without another owner.
    Ok(unsafe { File::from_raw_fd(fd) }.into())
}
