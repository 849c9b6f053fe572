//! The bytes behind an allocation: memfd, mapped once for the stand-in itself.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;
use std::sync::RwLock;

use crate::status::{Answer, Status};

/// The unit in which ranges are exported.
pub(crate) const PAGE: usize = 4096;

/// Host bytes behind device addresses.
///
/// They live in one memfd at first. A range exported as a dma-buf must begin at offset 0 of its
/// file. So the first export moves its pages into a memfd of their own. Pages whose export is still
/// open or mapped stay where they are.
#[derive(Debug)]
pub(crate) struct Backing {
    view: *mut u8,
    len: usize,
    segments: RwLock<Segments>,
}

#[derive(Debug)]
struct Segments {
    list: Vec<Segment>,
    /// The bytes are gone, and touching the view faults.
    gone: bool,
}

#[derive(Debug)]
struct Segment {
    offset: usize,
    len: usize,
    file: OwnedFd,
    /// Exported: another holder has a descriptor or handle.
    shared: bool,
    /// The holder may keep it for the life of the process.
    for_ever: bool,
}

impl Segment {
    fn end(&self) -> usize {
        self.offset + self.len
    }
}

// SAFETY: the view is the backing's own mapping; all access to it is a copy made under the lock.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Backing {
    /// Zeroed bytes, at least `len` of them, in whole pages.
    pub(crate) fn new(len: usize) -> Answer<Self> {
        let len = len.checked_next_multiple_of(PAGE).ok_or(Status::OUT_OF_MEMORY)?;
        let file = memfd(len).map_err(|_| Status::OUT_OF_MEMORY)?;
        Self::of_file(file, len, false)
    }

    /// The bytes of a file that another process shares with us.
    pub(crate) fn imported(file: File, len: usize) -> Answer<Self> {
        Self::of_file(file.into(), len.next_multiple_of(PAGE), true)
    }

    fn of_file(file: OwnedFd, len: usize, shared: bool) -> Answer<Self> {
        let view = map(&file, len, ptr::null_mut()).map_err(|_| Status::OUT_OF_MEMORY)?;
        let list = vec![Segment { offset: 0, len, file, shared, for_ever: shared }];
        Ok(Self { view, len, segments: RwLock::new(Segments { list, gone: false }) })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of the first byte in this process: what pinned and managed memory is known by.
    pub(crate) fn addr(&self) -> usize {
        self.view.addr()
    }

    /// Copies bytes out. The caller has checked the range and owns `to`.
    pub(crate) fn read(&self, offset: usize, to: *mut u8, len: usize) {
        let segments = self.segments.read().expect("no copy panics");
        if !segments.gone && self.holds(offset, len) {
            // SAFETY: the range lies inside the view; `to` is the caller's. Concurrent writes
            // through another window only change byte values.
            unsafe { to.copy_from(self.view.wrapping_add(offset), len) };
        }
    }

    /// Copies bytes in. The caller has checked the range and owns `from`.
    pub(crate) fn write(&self, offset: usize, from: *const u8, len: usize) {
        let segments = self.segments.read().expect("no copy panics");
        if !segments.gone && self.holds(offset, len) {
            // SAFETY: as in `read`.
            unsafe { self.view.wrapping_add(offset).copy_from(from, len) };
        }
    }

    /// Fills bytes.
    pub(crate) fn fill(&self, offset: usize, value: u8, len: usize) {
        let segments = self.segments.read().expect("no copy panics");
        if !segments.gone && self.holds(offset, len) {
            // SAFETY: as in `read`.
            unsafe { self.view.wrapping_add(offset).write_bytes(value, len) };
        }
    }

    /// Makes the bytes inaccessible at their address: a driver frees pinned memory with its
    /// context.
    pub(crate) fn vanish(&self) {
        let mut segments = self.segments.write().expect("no copy panics");
        segments.gone = true;
        // SAFETY: the view is ours; no copy is in flight, for we hold the lock.
        unsafe { libc::mprotect(self.view.cast(), self.len, libc::PROT_NONE) };
    }

    /// A file whose offset 0 is the byte at `offset`. It may be longer than requested, unless
    /// `exact`.
    ///
    /// Refused where the range cuts through pages of another export that is still open or mapped:
    /// they cannot be in two files.
    pub(crate) fn export(&self, offset: usize, len: usize, exact: bool) -> Answer<OwnedFd> {
        if len == 0 || !self.holds(offset, len) {
            return Err(Status::INVALID_VALUE);
        }
        let mut segments = self.segments.write().expect("no copy panics");
        let list = &mut segments.list;
        let end = offset + len;
        let fits =
            |segment: &Segment| segment.len == len || (segment.len > len && (segment.shared || !exact));
        if let Some(same) = list.iter_mut().find(|segment| segment.offset == offset && fits(segment)) {
            same.shared = true;
            return same.file.try_clone().map_err(|_| Status::OUT_OF_MEMORY);
        }
        let touched = |segment: &Segment| segment.offset < end && segment.end() > offset;
        if list.iter().any(|segment| touched(segment) && self.is_taken(segment)) {
            return Err(Status::NOT_SUPPORTED);
        }
        // The range gets a file of its own; so does the rest behind it, to begin at offset 0 too.
        let mut fresh = vec![self.move_out(offset, len, true)?];
        let rest = list.iter().filter(|&segment| touched(segment)).map(Segment::end).max().unwrap_or(end);
        if rest > end {
            fresh.push(self.move_out(end, rest - end, false)?);
        }
        for segment in list.iter_mut().filter(|segment| segment.offset < offset && segment.end() > offset) {
            segment.len = offset - segment.offset;
            segment.shared = false;
        }
        list.retain(|segment| segment.end() <= offset || segment.offset >= rest);
        let given = fresh[0].file.try_clone().map_err(|_| Status::OUT_OF_MEMORY)?;
        list.append(&mut fresh);
        Ok(given)
    }

    /// The one file that holds everything, for an export of the whole range.
    pub(crate) fn share_whole(&self) -> Answer<i32> {
        let mut segments = self.segments.write().expect("no copy panics");
        match &mut segments.list[..] {
            [only] => {
                // Another process may hold it, which cannot be detected from here.
                (only.shared, only.for_ever) = (true, true);
                Ok(only.file.as_raw_fd())
            }
            _ => Err(Status::NOT_SUPPORTED),
        }
    }

    fn holds(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// Whether an exported segment is still open or mapped somewhere.
    fn is_taken(&self, segment: &Segment) -> bool {
        if !segment.shared || segment.for_ever {
            return segment.for_ever;
        }
        let Some(file) = inode(segment.file.as_raw_fd()) else { return true };
        is_open_elsewhere(file, segment.file.as_raw_fd())
            || is_mapped_elsewhere(file, self.view.addr()..self.view.addr() + self.len)
    }

    /// Moves a range of the view into a new file; the caller holds the lock.
    fn move_out(&self, offset: usize, len: usize, shared: bool) -> Answer<Segment> {
        let move_now = || -> io::Result<OwnedFd> {
            let file = memfd(len)?;
            let fresh = map(&file, len, ptr::null_mut())?;
            let old = self.view.wrapping_add(offset);
            // SAFETY: both mappings are ours and of this length; no copy is in flight.
            unsafe {
                fresh.copy_from_nonoverlapping(old, len);
                libc::munmap(fresh.cast(), len);
            }
            map(&file, len, old)?;
            Ok(file)
        };
        let file = move_now().map_err(|_| Status::OUT_OF_MEMORY)?;
        Ok(Segment { offset, len, file, shared, for_ever: false })
    }
}

fn inode(fd: i32) -> Option<u64> {
    fs::metadata(format!("/proc/self/fd/{fd}")).ok().map(|data| data.ino())
}

fn is_open_elsewhere(file: u64, own: i32) -> bool {
    let Ok(open) = fs::read_dir("/proc/self/fd") else { return true };
    open.flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .any(|fd: i32| fd != own && inode(fd) == Some(file))
}

fn is_mapped_elsewhere(file: u64, own: Range<usize>) -> bool {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return true };
    maps.lines().any(|line| {
        // Address range, rights, offset, device, inode.
        let fields: Vec<&str> = line.split_whitespace().collect();
        let start = fields[0].split('-').next().and_then(|digits| usize::from_str_radix(digits, 16).ok());
        fields.get(4).and_then(|digits| digits.parse().ok()) == Some(file)
            && start.is_none_or(|start| !own.contains(&start))
    })
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: the mapping ends with its owner; its address was never shared, or (pinned memory)
        // its user freed it.
        unsafe { libc::munmap(self.view.cast(), self.len) };
    }
}

fn memfd(len: usize) -> io::Result<OwnedFd> {
    // Exports are taken for dma-bufs by their name.
    // SAFETY: the name ends in a zero byte.
    let fd = unsafe { libc::memfd_create(c"stand-in-gpu-dmabuf".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor without another owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len as u64)?;
    Ok(file.into())
}

/// Maps a file, at `place` (over what is there) unless that is null.
fn map(file: &OwnedFd, len: usize, place: *mut u8) -> io::Result<*mut u8> {
    let fixed = if place.is_null() { 0 } else { libc::MAP_FIXED };
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, or one over a range of our own view.
    let view =
        unsafe { libc::mmap(place.cast(), len, rights, libc::MAP_SHARED | fixed, file.as_raw_fd(), 0) };
    if view == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(view.cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(backing: &Backing, offset: usize) -> u8 {
        let mut byte = 0;
        backing.read(offset, &raw mut byte, 1);
        byte
    }

    #[test]
    fn an_exported_range_begins_its_file() {
        let backing = Backing::new(4 * PAGE).unwrap();
        for page in 0..4u8 {
            backing.fill(usize::from(page) * PAGE, 10 + page, PAGE);
        }
        let export = |offset, len| backing.export(offset, len, true);
        let file = export(PAGE, PAGE).unwrap();
        let window = map(&file, PAGE, ptr::null_mut()).unwrap();
        drop(file);
        // SAFETY: the mapping just made.
        assert_eq!(unsafe { window.read_volatile() }, 11);
        // SAFETY: as above.
        unsafe { window.write_volatile(77) };
        assert_eq!(bytes(&backing, PAGE), 77);
        assert!(export(PAGE, PAGE).is_ok(), "the same range again");
        assert!(export(2 * PAGE, 2 * PAGE).is_ok(), "the pages behind it");
        assert!(export(3 * PAGE, PAGE).is_ok(), "a part of pages without a holder");
        assert_eq!(export(0, 2 * PAGE).unwrap_err(), Status::NOT_SUPPORTED, "across pages that are mapped");
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(window.cast(), PAGE) };
        assert!(export(0, 4 * PAGE).is_ok(), "now it may");
        assert_eq!([0, 1, 2, 3].map(|page| bytes(&backing, page * PAGE)), [10, 77, 12, 13]);
        let list = &backing.segments.read().unwrap().list;
        assert_eq!(list.len(), 1, "one file again");
    }
}
