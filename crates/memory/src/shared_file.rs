//! Memory that two processes share, as a file in memory that neither can cut short.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Required seals: a file truncated under a mapping would kill the process that reads there.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A file of so many zero bytes, sealed.
///
/// # Errors
/// The kernel refused it.
pub fn create(len: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the flags are the call's own.
    let fd = unsafe { libc::memfd_create(c"nobounce".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor without another owner.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: the calls take a descriptor and numbers.
    if unsafe { libc::ftruncate(fd, len) } < 0 || unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, SEALS) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// Whether a peer's file has the required length, is sealed, and has ordinary pages. Where huge
/// pages run out, a read kills the process.
#[must_use]
pub fn is_sound(file: &OwnedFd, len: usize) -> bool {
    // SAFETY: the call takes a descriptor and a number.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    // SAFETY: stat is plain integers; zeros are a valid value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is the one the call fills.
    let known = unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) } == 0;
    // SAFETY: as above.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let ordinary = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) } == 0
        && system.f_type == libc::TMPFS_MAGIC;
    seals >= 0 && seals & SEALS == SEALS && known && ordinary && usize::try_from(stat.st_size) == Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sealed_file_of_the_right_length_is_sound() {
        let file = create(8192).unwrap();
        assert!(is_sound(&file, 8192) && !is_sound(&file, 4096));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 0) }, -1, "it cannot be cut short");
        let plain: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        assert!(!is_sound(&plain, 8192));
        // SAFETY: as in `create`.
        let open = unsafe {
            OwnedFd::from_raw_fd(libc::memfd_create(
                c"open".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            ))
        };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::ftruncate(open.as_raw_fd(), 8192) }, 0);
        assert!(!is_sound(&open, 8192), "it could be cut short");
    }
}
