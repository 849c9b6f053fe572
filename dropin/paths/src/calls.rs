//! Every call of the C library that takes a path which RDMA programs use on our folders.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{mode_t, size_t, ssize_t};

use crate::original::Original;
use crate::view::{Answer, Room, see};

/// One line for each call: its name, its arguments with a semicolon in place of the path, and its
/// return type. Last comes its return value (with ENOSYS) where the C library lacks the function. A
/// program linked with this C library never gets there.
macro_rules! calls {
    ($($name:ident($($before:ident: $kind:ty),*; $($after:ident: $other:ty),*) -> $result:ty, $missing:expr;)*) => {
        $(
            // The C library documents it; ours differs in the path alone.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($before: $kind,)* path: *const c_char, $($after: $other),*) -> $result {
                let Some(original) = originals::$name() else {
                    // SAFETY: the calling thread's errno.
                    unsafe { *libc::__errno_location() = libc::ENOSYS };
                    return $missing;
                };
                let mut room = Room::new();
                // SAFETY: the caller keeps the contract of the C library's function, so `path` is a
                // C string or null.
                let path = unsafe { see(path, &mut room) };
                // SAFETY: the same arguments but for the path, which is a C string in our room or
                // the caller's own.
                let answer = unsafe { original($($before,)* path, $($after),*) };
                // SAFETY: a path that the C library resolved is in the caller's buffer or in a new
                // one.
                unsafe { answer.shown() }
            }
        )*

        mod originals {
            use super::*;
            $(
                #[inline]
                pub(super) fn $name() -> Option<unsafe extern "C" fn($($kind,)* *const c_char, $($other),*) -> $result> {
                    static ORIGINAL: Original = Original::new(
                        match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                            Ok(name) => name,
                            Err(_) => panic!("a name has no NUL inside"),
                        },
                    );
                    // SAFETY: null is None; anything else is the C library's function of that name
                    // and signature.
                    unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($kind,)* *const c_char, $($other),*) -> $result>>(ORIGINAL.get()) }
                }
            )*
        }

        /// Resolves all of them, so that no later call does.
        pub(crate) fn resolve_all() {
            $(originals::$name();)*
        }
    };
}

type Filter = Option<unsafe extern "C" fn(*const c_void) -> c_int>;
type Order = Option<unsafe extern "C" fn(*const c_void, *const c_void) -> c_int>;

// `open` and its variants are variadic in C. The mode is in the register of a third (fourth)
// argument either way, on every architecture we support on Linux. A call without a mode has that
// register passed on unread.
calls! {
    open(; flags: c_int, mode: mode_t) -> c_int, -1;
    open64(; flags: c_int, mode: mode_t) -> c_int, -1;
    __open_2(; flags: c_int) -> c_int, -1;
    __open64_2(; flags: c_int) -> c_int, -1;
    openat(folder: c_int; flags: c_int, mode: mode_t) -> c_int, -1;
    openat64(folder: c_int; flags: c_int, mode: mode_t) -> c_int, -1;
    __openat_2(folder: c_int; flags: c_int) -> c_int, -1;
    __openat64_2(folder: c_int; flags: c_int) -> c_int, -1;
    fopen(; mode: *const c_char) -> *mut c_void, std::ptr::null_mut();
    fopen64(; mode: *const c_char) -> *mut c_void, std::ptr::null_mut();
    access(; mode: c_int) -> c_int, -1;
    eaccess(; mode: c_int) -> c_int, -1;
    euidaccess(; mode: c_int) -> c_int, -1;
    faccessat(folder: c_int; mode: c_int, flags: c_int) -> c_int, -1;
    stat(; facts: *mut c_void) -> c_int, -1;
    stat64(; facts: *mut c_void) -> c_int, -1;
    lstat(; facts: *mut c_void) -> c_int, -1;
    lstat64(; facts: *mut c_void) -> c_int, -1;
    fstatat(folder: c_int; facts: *mut c_void, flags: c_int) -> c_int, -1;
    fstatat64(folder: c_int; facts: *mut c_void, flags: c_int) -> c_int, -1;
    __xstat(version: c_int; facts: *mut c_void) -> c_int, -1;
    __xstat64(version: c_int; facts: *mut c_void) -> c_int, -1;
    __lxstat(version: c_int; facts: *mut c_void) -> c_int, -1;
    __lxstat64(version: c_int; facts: *mut c_void) -> c_int, -1;
    __fxstatat(version: c_int, folder: c_int; facts: *mut c_void, flags: c_int) -> c_int, -1;
    __fxstatat64(version: c_int, folder: c_int; facts: *mut c_void, flags: c_int) -> c_int, -1;
    statx(folder: c_int; flags: c_int, mask: c_uint, facts: *mut c_void) -> c_int, -1;
    readlink(; buffer: *mut c_char, size: size_t) -> ssize_t, -1;
    readlinkat(folder: c_int; buffer: *mut c_char, size: size_t) -> ssize_t, -1;
    __readlink_chk(; buffer: *mut c_char, size: size_t, room_for: size_t) -> ssize_t, -1;
    __readlinkat_chk(folder: c_int; buffer: *mut c_char, size: size_t, room_for: size_t) -> ssize_t, -1;
    getxattr(; name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t, -1;
    lgetxattr(; name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t, -1;
    listxattr(; list: *mut c_char, size: size_t) -> ssize_t, -1;
    llistxattr(; list: *mut c_char, size: size_t) -> ssize_t, -1;
    realpath(; resolved: *mut c_char) -> *mut c_char, std::ptr::null_mut();
    __realpath_chk(; resolved: *mut c_char, room_for: size_t) -> *mut c_char, std::ptr::null_mut();
    canonicalize_file_name(; ) -> *mut c_char, std::ptr::null_mut();
    chdir(; ) -> c_int, -1;
    opendir(; ) -> *mut c_void, std::ptr::null_mut();
    scandir(; names: *mut *mut *mut c_void, filter: Filter, order: Order) -> c_int, -1;
    scandir64(; names: *mut *mut *mut c_void, filter: Filter, order: Order) -> c_int, -1;
    scandirat(folder: c_int; names: *mut *mut *mut c_void, filter: Filter, order: Order) -> c_int, -1;
    scandirat64(folder: c_int; names: *mut *mut *mut c_void, filter: Filter, order: Order) -> c_int, -1;
}
