//! The C boundary: no panic crosses it, no thread is cancelled inside, errors become errno values.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::log;

/// An error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

impl Errno {
    pub(crate) const EACCES: Self = Self(libc::EACCES);
    pub(crate) const EAGAIN: Self = Self(libc::EAGAIN);
    pub(crate) const EFAULT: Self = Self(libc::EFAULT);
    pub(crate) const EINVAL: Self = Self(libc::EINVAL);
    pub(crate) const EIO: Self = Self(libc::EIO);
    pub(crate) const ENODEV: Self = Self(libc::ENODEV);
    pub(crate) const ENOMEM: Self = Self(libc::ENOMEM);
    pub(crate) const ENOTSUP: Self = Self(libc::ENOTSUP);

    pub(crate) fn set(self) {
        // SAFETY: the location is this thread's own.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// Runs `body`; a panic in it is EIO.
#[inline]
pub(crate) fn caught<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        log::error(|| {
            "gdrapi: a function of the library panicked, which is a bug of ours; it returns EIO".to_owned()
        });
        Err(Errno::EIO)
    })
}

/// The number that C gets.
#[inline]
pub(crate) fn code(outcome: Result<(), Errno>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(errno) => errno.0,
    }
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// For functions that may make system calls: a thread cancelled in one would be unwound through our
/// frames, with locks held.
pub(crate) fn uncancelled<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut old = 0;
    // SAFETY: `old` is a valid place for the result.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut old) };
    let outcome = caught(body);
    // SAFETY: the second argument may be null.
    unsafe { pthread_setcancelstate(old, ptr::null_mut()) };
    outcome
}
