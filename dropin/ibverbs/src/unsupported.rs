//! What this device does not offer, and says so; and what there is nothing to do for.

use std::ffi::{c_int, c_void};

use crate::entry::Errno;

/// Functions that return an error number.
pub(crate) unsafe extern "C" fn code() -> c_int {
    Errno::EOPNOTSUPP.set();
    Errno::EOPNOTSUPP.0
}

/// Functions that return -1 and errno.
pub(crate) unsafe extern "C" fn minus_one() -> c_int {
    Errno::EOPNOTSUPP.set();
    -1
}

/// Functions that return NULL and errno.
pub(crate) unsafe extern "C" fn pointer() -> *mut c_void {
    Errno::EOPNOTSUPP.set();
    std::ptr::null_mut()
}

/// Functions that return nothing and have nothing to do.
pub(crate) unsafe extern "C" fn nothing() {}
