//! The functions that write to where their caller points: a result that is not written is a crash in the caller.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

fn function(name: &CStr) -> *mut c_void {
    let test = std::env::current_exe().expect("a test has an executable");
    let path = test
        .ancestors()
        .skip(1)
        .take(2)
        .flat_map(|folder| [folder.join("librdmacm.so"), folder.join("deps/librdmacm.so")])
        .find(|path| path.exists())
        .expect("cargo builds the library before its tests");
    let path = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
    // SAFETY: C strings; the library has no constructors of its own and is never closed.
    let found = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

fn errno() -> Option<i32> {
    std::io::Error::last_os_error().raw_os_error()
}

#[test]
fn there_are_no_devices_and_the_count_says_so() {
    type GetDevices = unsafe extern "C" fn(*mut c_int) -> *mut c_void;
    // SAFETY: the signature is the one in rdma_cma.h.
    let get_devices =
        unsafe { std::mem::transmute::<*mut c_void, GetDevices>(function(c"rdma_get_devices")) };
    let mut count = 77;
    // SAFETY: a place for the count.
    assert!(unsafe { get_devices(&raw mut count) }.is_null());
    assert_eq!((count, errno()), (0, Some(libc::ENODEV)));
    // SAFETY: the count may be left out.
    assert!(unsafe { get_devices(ptr::null_mut()) }.is_null());
}

#[test]
fn an_address_is_not_resolved_and_the_result_is_null() {
    type GetAddrInfo =
        unsafe extern "C" fn(*const c_char, *const c_char, *const c_void, *mut *mut c_void) -> c_int;
    // SAFETY: the signature is the one in rdma_cma.h.
    let resolve = unsafe { std::mem::transmute::<*mut c_void, GetAddrInfo>(function(c"rdma_getaddrinfo")) };
    let mut result = ptr::dangling_mut();
    // SAFETY: C strings and a place for the result.
    let code = unsafe { resolve(c"localhost".as_ptr(), c"1".as_ptr(), ptr::null(), &raw mut result) };
    assert_eq!((code, errno(), result.is_null()), (libc::EAI_SYSTEM, Some(libc::ENODEV), true));
}

#[test]
fn events_have_names() {
    type EventStr = unsafe extern "C" fn(c_uint) -> *const c_char;
    // SAFETY: the signature is the one in rdma_cma.h.
    let name = unsafe { std::mem::transmute::<*mut c_void, EventStr>(function(c"rdma_event_str")) };
    // SAFETY: it gives a static C string for every number.
    let name = |event| unsafe { CStr::from_ptr(name(event)) };
    assert_eq!(name(9), c"RDMA_CM_EVENT_ESTABLISHED");
    assert_eq!(name(4_000_000_000), c"UNKNOWN EVENT");
}
