//! The C boundary: no panic crosses it, no thread is cancelled inside, errors become errno values.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

#[cfg(feature = "nic")]
use nobounce_nic::soft::CreateError;
#[cfg(feature = "nic")]
use nobounce_protocol::cm::CmError;

use crate::{log, reserve};

/// An error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub c_int);

impl Errno {
    #[allow(missing_docs)]
    pub const EACCES: Self = Self(libc::EACCES);
    #[allow(missing_docs)]
    pub const EAGAIN: Self = Self(libc::EAGAIN);
    #[allow(missing_docs)]
    pub const EFAULT: Self = Self(libc::EFAULT);
    #[allow(missing_docs)]
    pub const ENODEV: Self = Self(libc::ENODEV);
    #[allow(missing_docs)]
    pub const ENOTSUP: Self = Self(libc::ENOTSUP);
    #[allow(missing_docs)]
    pub const EINVAL: Self = Self(libc::EINVAL);
    #[allow(missing_docs)]
    pub const EBUSY: Self = Self(libc::EBUSY);
    #[allow(missing_docs)]
    pub const ENOMEM: Self = Self(libc::ENOMEM);
    #[allow(missing_docs)]
    pub const EADDRINUSE: Self = Self(libc::EADDRINUSE);
    #[allow(missing_docs)]
    pub const EIO: Self = Self(libc::EIO);
    #[allow(missing_docs)]
    pub const EOPNOTSUPP: Self = Self(libc::EOPNOTSUPP);

    /// Sets this thread's errno.
    pub fn set(self) {
        // SAFETY: the location is this thread's own.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

#[cfg(feature = "nic")]
impl From<CreateError> for Errno {
    fn from(error: CreateError) -> Self {
        log::warn(|| error.to_string());
        Self(error.errno())
    }
}

#[cfg(feature = "nic")]
impl From<CmError> for Errno {
    fn from(error: CmError) -> Self {
        log::info(|| format!("librdmacm: {error}"));
        Self(match error {
            CmError::InUse => libc::EADDRINUSE,
            CmError::TooMany => libc::ENOMEM,
            _ => libc::EINVAL,
        })
    }
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// A cancelled thread would be unwound through our frames at the next system call, with locks held.
/// So cancellation is disabled while this lives; blocking calls (`read_notice` in `channel.rs` of
/// libibverbs and librdmacm) enable it where they hold nothing.
struct Uncancelled(c_int);

impl Uncancelled {
    #[inline]
    fn new() -> Self {
        let mut old = 0;
        // SAFETY: `old` is a valid place for the result.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut old) };
        Self(old)
    }
}

impl Drop for Uncancelled {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the second argument may be null.
        unsafe { pthread_setcancelstate(self.0, ptr::null_mut()) };
    }
}

/// Runs `body`; a panic in it is EIO. For functions that make no system call.
#[inline]
pub fn caught<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        log::error(|| "a library function panicked (a bug in nobounce); it returns EIO".to_owned());
        Err(Errno::EIO)
    })
}

/// The same without cancellation of the thread.
#[inline]
pub fn guarded<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let _uncancelled = Uncancelled::new();
    caught(body)
}

/// For functions that return a pointer, or NULL and errno: they create objects.
pub fn pointer<T>(body: impl FnOnce() -> Result<*mut T, Errno>) -> *mut T {
    guarded(|| reserve::check().and_then(|()| body())).unwrap_or_else(|errno| {
        errno.set();
        ptr::null_mut()
    })
}

/// For functions that return 0 or an error number.
#[inline]
pub fn code(body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    match guarded(body) {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            errno.0
        }
    }
}

/// For functions that return something not negative, or -1 and errno.
pub fn minus_one(body: impl FnOnce() -> Result<c_int, Errno>) -> c_int {
    guarded(body).unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}

/// For functions that return nothing.
pub fn silent(body: impl FnOnce() -> Result<(), Errno>) {
    if let Err(errno) = guarded(body) {
        errno.set();
    }
}
