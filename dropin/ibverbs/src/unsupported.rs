//! Unsupported functions, which return an error; and functions without an effect here.

use std::ffi::{c_int, c_void};

use crate::entry::Errno;
use crate::log;

fn refuse() {
    log::debug(|| "unsupported call on nb0 (EOPNOTSUPP)".to_owned());
    Errno::EOPNOTSUPP.set();
}

/// Functions that return an error number.
pub(crate) unsafe extern "C" fn code() -> c_int {
    refuse();
    Errno::EOPNOTSUPP.0
}

/// Functions that return -1 and errno.
pub(crate) unsafe extern "C" fn minus_one() -> c_int {
    refuse();
    -1
}

/// Functions that return NULL and errno.
pub(crate) unsafe extern "C" fn pointer() -> *mut c_void {
    refuse();
    std::ptr::null_mut()
}

/// Functions that return nothing and have nothing to do.
pub(crate) unsafe extern "C" fn nothing() {}
