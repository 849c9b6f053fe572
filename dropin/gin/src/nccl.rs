//! The NCCL that has loaded the plugin.

use std::ffi::{c_int, c_void};
use std::mem;

use crate::abi::Logger;

/// Its version as a number, 23005 for 2.30.5. `None` if the library of this function has none.
#[must_use]
pub fn version(logger: Logger) -> Option<c_int> {
    // SAFETY: plain values, which the call fills.
    let mut info: libc::Dl_info = unsafe { mem::zeroed() };
    // SAFETY: the address is only looked up.
    let is_known = unsafe { libc::dladdr(logger as *const c_void, &raw mut info) } != 0;
    if !is_known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name of a library that is loaded, and stays: it calls this one.
    let library = unsafe { libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: a library that was just opened, and a name that ends in a zero byte.
    let found = unsafe { libc::dlsym(library, c"ncclGetVersion".as_ptr()) };
    let mut version = 0;
    let has_answered = !found.is_null() && {
        // SAFETY: `ncclResult_t ncclGetVersion(int *)` of NCCL's interface since 2.0.
        let get: extern "C" fn(*mut c_int) -> c_int = unsafe { mem::transmute(found) };
        get(&raw mut version) == 0
    };
    // SAFETY: opened above.
    unsafe { libc::dlclose(library) };
    has_answered.then_some(version)
}
