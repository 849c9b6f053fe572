//! Optional libraries, opened on demand.

use std::ffi::{CStr, c_void};

/// A system library. It stays loaded: other code may hold addresses from it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Library {
    handle: *mut c_void,
}

impl Library {
    /// Opens the first that can be.
    pub(super) fn open(names: &[&CStr]) -> Result<Self, String> {
        let mut told = String::from("no name was given");
        for name in names {
            // SAFETY: a C string. The library's constructors run, as they would in any program that
            // links with it.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            if !handle.is_null() {
                return Ok(Self { handle });
            }
            // SAFETY: null, or a string that lives until this thread's next call of the loader.
            let text = unsafe { libc::dlerror() };
            if !text.is_null() {
                // SAFETY: as above.
                told = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
            }
        }
        Err(told)
    }

    /// The address of a function.
    pub(super) fn find(self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a live handle and a C string.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

/// A function of a library by its C type; `None` if the library lacks it.
macro_rules! function {
    ($library:expr, $name:literal, $type:ty) => {
        $library.find($name).map(|address| {
            // SAFETY: the type is that of the library's header.
            unsafe { std::mem::transmute::<*mut std::ffi::c_void, $type>(address) }
        })
    };
}
pub(super) use function;
