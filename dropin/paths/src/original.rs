//! The function of the same name behind ours, and the one of libibverbs that makes a view.

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, Ordering};

use nobounce_dropin::log;

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
    let found = maker();
    if found.is_null() {
        return None;
    }
    // SAFETY: no other library has a function of this name, and it has this type.
    let make = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_char>(found) };
    let path = make();
    // SAFETY: null, or a C string that is never freed.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) })
}

/// `nobounce_view` of the libibverbs that is loaded, else of the one beside this library: where
/// only this one is preloaded, a program may have loaded none yet.
fn maker() -> *mut c_void {
    const NAME: &CStr = c"nobounce_view";
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, NAME.as_ptr()) };
    if !found.is_null() {
        return found;
    }
    let Some(beside) = beside(c"libibverbs.so.1") else { return found };
    // SAFETY: the name is a C string.
    if !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ibv_get_device_list".as_ptr()) }.is_null() {
        log::error(|| {
            format!(
                "the program has loaded another libibverbs, which cannot drive nb0: add {} to LD_PRELOAD",
                beside.to_string_lossy()
            )
        });
        return found;
    }
    // SAFETY: a C string. The library stays loaded.
    let library = unsafe { libc::dlopen(beside.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NODELETE) };
    if library.is_null() {
        return library;
    }
    // SAFETY: an open library and a C string.
    unsafe { libc::dlsym(library, NAME.as_ptr()) }
}

/// The path of a file in the folder of this library.
fn beside(name: &CStr) -> Option<CString> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address is allowed, and `info` has room for the answer.
    if unsafe { libc::dladdr(view as *const c_void, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: dladdr filled it in; the name belongs to the loader and stays.
    let own = unsafe { CStr::from_ptr(info.assume_init().dli_fname) }.to_bytes();
    let folder = &own[..=own.iter().rposition(|byte| *byte == b'/')?];
    CString::new([folder, name.to_bytes()].concat()).ok()
}
