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

/// `ibv_dontfork_range` and `ibv_dofork_range`: our memory may be shared with a child, so nothing needs to be done.
pub(crate) unsafe extern "C" fn fork_range() -> c_int {
    0
}

/// `ibv_is_fork_initialized`: IBV_FORK_UNNEEDED.
pub(crate) unsafe extern "C" fn is_fork_initialized() -> c_int {
    2
}
