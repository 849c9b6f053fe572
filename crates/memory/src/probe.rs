//! Checks once, at registration, that a range is mapped with the required permissions.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use thiserror::Error;

use crate::page_size;

/// Why a range cannot be registered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RangeError {
    /// Address plus length is more than an address can be.
    #[error("{len} bytes at {addr:#x} exceed the address space; check the length")]
    Overflow {
        /// First address of the range.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A page of the range is not mapped.
    #[error("the page at {page:#x} is not mapped; register memory only while it is allocated")]
    Unmapped {
        /// Address of the first such page.
        page: u64,
    },
    /// A page of the range is mapped without the right wanted.
    #[error(
        "the page at {page:#x} is mapped but may not be {}; map it with that access or request less",
        if *write { "written" } else { "read" }
    )]
    Protected {
        /// Address of the first such page.
        page: u64,
        /// True if the right to write was wanted.
        write: bool,
    },
    /// A page of the range is mapped but has no memory behind it.
    #[error(
        "the page at {page:#x} is mapped but cannot be faulted in ({source}); check that the file behind it is long enough"
    )]
    Unbacked {
        /// Address of the first such page.
        page: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel could not answer at all.
    #[error(
        "cannot determine whether the page at {page:#x} is mapped: /proc/self/maps is not readable ({source})"
    )]
    Unknown {
        /// Address of the first page of the range.
        page: u64,
        /// Why the list of mappings could not be read.
        source: io::Error,
    },
}

impl RangeError {
    /// The errno a registration call answers with.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Overflow { .. } => libc::EINVAL,
            Self::Unmapped { .. } | Self::Protected { .. } => libc::EFAULT,
            // Memory pressure and poisoned pages keep their errno; a truncated file is EFAULT.
            Self::Unbacked { source, .. } => source.raw_os_error().unwrap_or(libc::EFAULT),
            Self::Unknown { source, .. } => source.raw_os_error().unwrap_or(libc::ENOSYS),
        }
    }
}

/// Checks that all pages touched by `len` bytes at `addr` are mapped and readable, or writable if
/// `write`. Like a registration with a hardware NIC, it faults them in. An empty range is always
/// fine.
///
/// This is a snapshot; memory may still be unmapped later, which [`guard`](crate::guard) handles.
pub fn check_range(addr: u64, len: u64, write: bool) -> Result<(), RangeError> {
    let end = addr.checked_add(len).ok_or(RangeError::Overflow { addr, len })?;
    if len == 0 {
        return Ok(());
    }
    let page = page_size() as u64;
    let first = addr - addr % page;
    let pages = (end - 1 - first) / page + 1;
    let whole = pages.checked_mul(page).ok_or(RangeError::Overflow { addr, len })?;
    match populate(first, whole, write) {
        Ok(()) => Ok(()),
        // Not mapped (or out of memory), no permission or a device mapping, or a kernel older than
        // 5.14: the list of mappings tells them apart.
        Err(source) if matches!(source.raw_os_error(), Some(libc::ENOMEM)) => {
            Err(listed(first, end, write).err().unwrap_or_else(|| unbacked(first, pages, write, source)))
        }
        Err(source) if matches!(source.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EPERM)) => {
            listed(first, end, write)
        }
        Err(source) => Err(unbacked(first, pages, write, source)),
    }
}

fn populate(start: u64, len: u64, write: bool) -> io::Result<()> {
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    let bad = |_| io::Error::from_raw_os_error(libc::ENOMEM);
    let (start, len) = (usize::try_from(start).map_err(bad)?, usize::try_from(len).map_err(bad)?);
    loop {
        // SAFETY: populating reads page tables and brings pages in as an access would; it changes
        // no contents, whatever the range.
        let answer = unsafe { libc::madvise(std::ptr::without_provenance_mut(start), len, advice) };
        if answer == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // A signal ends the call early, with some pages populated: the next iteration continues.
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Finds the first page that cannot be brought in, by halving.
fn unbacked(first: u64, pages: u64, write: bool, source: io::Error) -> RangeError {
    let page = page_size() as u64;
    let (mut start, mut count) = (first, pages);
    while count > 1 {
        let half = count / 2;
        if populate(start, half * page, write).is_ok() {
            start += half * page;
            count -= half;
        } else {
            count = half;
        }
    }
    RangeError::Unbacked { page: start, source }
}

/// Looks the range up in the list of mappings.
fn listed(first: u64, end: u64, write: bool) -> Result<(), RangeError> {
    let unknown = |source| RangeError::Unknown { page: first, source };
    let maps = BufReader::new(File::open("/proc/self/maps").map_err(unknown)?);
    let mut reached = first;
    for line in maps.split(b'\n') {
        let line = line.map_err(unknown)?;
        let Some(mapping) = MapsEntry::parse(&line) else { continue };
        if mapping.end <= reached {
            continue;
        }
        if mapping.start > reached {
            break;
        }
        if !(if write { mapping.write } else { mapping.read }) {
            return Err(RangeError::Protected { page: reached, write });
        }
        reached = mapping.end;
        if reached >= end {
            return Ok(());
        }
    }
    Err(RangeError::Unmapped { page: reached })
}

/// Whether the CPU may read the byte at `addr`, by /proc/self/maps; false where that cannot be
/// read.
pub(crate) fn is_readable(addr: u64) -> bool {
    addr.checked_add(1).is_some_and(|end| listed(addr, end, false).is_ok())
}

#[derive(Debug, PartialEq)]
struct MapsEntry {
    start: u64,
    end: u64,
    read: bool,
    write: bool,
}

impl MapsEntry {
    /// Parses `7f00-8f00 rw-p ...`; the rest of the line (a file name) may be any bytes.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|&byte| byte == b' ');
        let (range, rights) = (str::from_utf8(words.next()?).ok()?, words.next()?);
        let (start, end) = range.split_once('-')?;
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            read: rights.first() == Some(&b'r'),
            write: rights.get(1) == Some(&b'w'),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostBuffer;

    #[test]
    fn maps_lines_are_parsed() {
        let line = b"7f0000001000-7f0000003000 r-xp 00000000 08:01 42 /tmp/\xff name with spaces";
        let expected = MapsEntry { start: 0x7f00_0000_1000, end: 0x7f00_0000_3000, read: true, write: false };
        assert_eq!(MapsEntry::parse(line), Some(expected));
        assert_eq!(MapsEntry::parse(b""), None);
        assert_eq!(MapsEntry::parse(b"nonsense rw-p"), None);
    }

    /// The method for older kernels, which this machine's kernel would not use by itself.
    #[test]
    fn the_list_answers_like_the_kernel() {
        let page = page_size() as u64;
        let buffer = HostBuffer::guarded(3 * page_size()).unwrap();
        let (start, end) = (buffer.addr(), buffer.addr() + 3 * page);
        listed(start, end, true).unwrap();
        assert!(
            matches!(listed(start, end + 1, true), Err(RangeError::Protected { page, .. }) if page == end)
        );
        assert!(matches!(listed(0, 1, false), Err(RangeError::Unmapped { page: 0 })));
        let middle = buffer.as_mut_ptr().wrapping_add(page_size());
        // SAFETY: the middle page of a buffer of ours that is not in use.
        assert_eq!(unsafe { libc::munmap(middle.cast(), page_size()) }, 0);
        assert!(
            matches!(listed(start, end, false), Err(RangeError::Unmapped { page: hole }) if hole == start + page)
        );
    }
}
