//! Return values of unsupported functions. They ignore their arguments, so one function serves
//! every signature; callers that expect an `int` take the lower half of the result.

/// Not offered.
const ERRNO: i32 = libc::EOPNOTSUPP;

fn set_errno() {
    // SAFETY: the pointer is the calling thread's errno, valid as long as the thread.
    unsafe { *libc::__errno_location() = ERRNO };
}

/// Returns the error number, as most verbs do.
pub extern "C" fn errno() -> isize {
    set_errno();
    ERRNO as isize
}

/// Returns NULL and sets errno.
pub extern "C" fn null() -> isize {
    set_errno();
    0
}

/// Returns -1 and sets errno.
pub extern "C" fn minus() -> isize {
    set_errno();
    -1
}

/// Returns nothing, or false.
pub extern "C" fn zero() -> isize {
    0
}
