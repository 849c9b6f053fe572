//! The function of the same name behind ours, and the one of libibverbs that makes a view.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the C library, resolved once.
pub(crate) struct Original {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Original {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The function, or null where this C library has none of that name.
    pub(crate) fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is a C string, and RTLD_NEXT means the libraries after this one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// The view that the drop-in libibverbs makes; `None` without that library.
pub(crate) fn view() -> Option<&'static CStr> {
    // SAFETY: the name is a C string. Both libraries are preloaded, so it is in the global scope.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"nobounce_view".as_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: no other library has a function of this name, and it has this type.
    let make = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_char>(found) };
    let path = make();
    // SAFETY: null, or a C string that is never freed.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) })
}
