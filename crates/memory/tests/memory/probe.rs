//! Which ranges may be registered.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use nobounce_memory::probe::{RangeError, check_range};
use nobounce_memory::{HostBuffer, page_size};

#[test]
fn mapped_memory_is_fine_and_is_brought_in() {
    let page = page_size();
    let buffer = HostBuffer::guarded(8 * page).unwrap();
    check_range(buffer.addr() + 5, 7 * page as u64, true).unwrap();
    let mut resident = [0u8; 8];
    // SAFETY: the buffer's own pages, and one byte for each.
    assert_eq!(unsafe { libc::mincore(buffer.as_mut_ptr().cast(), 8 * page, resident.as_mut_ptr()) }, 0);
    assert!(resident.iter().all(|byte| byte & 1 == 1), "{resident:?}");
    check_range(buffer.addr(), 1, false).unwrap();
    check_range(buffer.addr() + 8 * page as u64 - 1, 1, true).unwrap();
}

#[test]
fn contents_stay() {
    let buffer = HostBuffer::new(page_size()).unwrap();
    buffer.write_at(10, b"kept").unwrap();
    check_range(buffer.addr(), buffer.len() as u64, true).unwrap();
    let mut back = [0; 4];
    buffer.read_at(10, &mut back).unwrap();
    assert_eq!(&back, b"kept");
}

#[test]
fn nothing_is_always_there() {
    check_range(0, 0, true).unwrap();
    check_range(u64::MAX, 0, true).unwrap();
}

#[test]
fn the_end_of_the_address_space() {
    assert!(matches!(check_range(u64::MAX, 2, false), Err(RangeError::Overflow { .. })));
    assert!(matches!(check_range(1, u64::MAX, false), Err(RangeError::Overflow { .. })));
    assert!(check_range(0, u64::MAX, false).is_err());
    assert!(check_range(u64::MAX - 10, 5, false).is_err());
    assert!(check_range(1 << 63, 4096, false).is_err());
}

#[test]
fn the_first_bad_page_is_named() {
    let page = page_size() as u64;
    let buffer = HostBuffer::guarded(4 * page_size()).unwrap();
    let end = buffer.addr() + 4 * page;
    let error = check_range(buffer.addr() + 100, 4 * page, false).unwrap_err();
    assert!(matches!(error, RangeError::Protected { page, write: false } if page == end), "{error}");
    assert_eq!(error.errno(), libc::EFAULT);

    let base = buffer.as_mut_ptr();
    // SAFETY: pages of a buffer of ours that are not in use.
    unsafe {
        assert_eq!(libc::mprotect(base.add(page_size()).cast(), page_size(), libc::PROT_READ), 0);
    }
    check_range(buffer.addr(), 4 * page, false).unwrap();
    let error = check_range(buffer.addr(), 4 * page, true).unwrap_err();
    assert!(
        matches!(error, RangeError::Protected { page: bad, write: true } if bad == buffer.addr() + page),
        "{error}"
    );

    // SAFETY: as above.
    unsafe {
        assert_eq!(libc::munmap(base.add(2 * page_size()).cast(), page_size()), 0);
    }
    let error = check_range(buffer.addr(), 4 * page, false).unwrap_err();
    assert!(
        matches!(error, RangeError::Unmapped { page: bad } if bad == buffer.addr() + 2 * page),
        "{error}"
    );
    assert_eq!(error.errno(), libc::EFAULT);
    assert!(matches!(check_range(0, 1, false), Err(RangeError::Unmapped { page: 0 })));
}

#[test]
fn a_mapping_longer_than_its_file() {
    let page = page_size();
    // SAFETY: a plain system call; the name is a constant.
    let fd = unsafe { libc::memfd_create(c"short".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the descriptor was just made and has no other owner.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(3 * page as u64).unwrap();
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping of our own file, left in place until the process ends.
    let base =
        unsafe { libc::mmap(ptr::null_mut(), 8 * page, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    let base = base.addr() as u64;
    check_range(base, 3 * page as u64, true).unwrap();
    let error = check_range(base, 8 * page as u64, true).unwrap_err();
    assert!(
        matches!(error, RangeError::Unbacked { page: bad, .. } if bad == base + 3 * page as u64),
        "{error}"
    );
    assert_eq!(error.errno(), libc::EFAULT);
}
