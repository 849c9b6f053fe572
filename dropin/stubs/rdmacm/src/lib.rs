//! librdmacm.so.1 with all its names: there is no connection manager yet, and every call says so with ENODEV.
//!
//! Not the system's: that one would speak to the kernel's connection manager about devices it has never heard of, and fail in
//! one way on a machine with rdma_cm loaded and in another without.

use std::ffi::{c_char, c_int, c_uint, c_void};

#[path = "../../endings.rs"]
mod endings;

const ERRNO: i32 = libc::ENODEV;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// libfabric looks at the count alone.
extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut c_void {
    if !count.is_null() {
        // SAFETY: the caller gives a place for the count, or null.
        unsafe { *count = 0 };
    }
    endings::null();
    std::ptr::null_mut()
}

/// Callers print errno or `gai_strerror` of what is returned: this is right for both.
extern "C" fn rdma_getaddrinfo(
    _node: *const c_char,
    _service: *const c_char,
    _hints: *const c_void,
    result: *mut *mut c_void,
) -> c_int {
    if !result.is_null() {
        // SAFETY: the caller gives a place for the result, as the manual page asks.
        unsafe { *result = std::ptr::null_mut() };
    }
    endings::null();
    libc::EAI_SYSTEM
}

/// The names of events, which programs print whether or not one ever came.
extern "C" fn rdma_event_str(event: c_uint) -> *const c_char {
    let names = [
        c"RDMA_CM_EVENT_ADDR_RESOLVED",
        c"RDMA_CM_EVENT_ADDR_ERROR",
        c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        c"RDMA_CM_EVENT_ROUTE_ERROR",
        c"RDMA_CM_EVENT_CONNECT_REQUEST",
        c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        c"RDMA_CM_EVENT_CONNECT_ERROR",
        c"RDMA_CM_EVENT_UNREACHABLE",
        c"RDMA_CM_EVENT_REJECTED",
        c"RDMA_CM_EVENT_ESTABLISHED",
        c"RDMA_CM_EVENT_DISCONNECTED",
        c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        c"RDMA_CM_EVENT_MULTICAST_JOIN",
        c"RDMA_CM_EVENT_MULTICAST_ERROR",
        c"RDMA_CM_EVENT_ADDR_CHANGE",
        c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
        c"RDMA_CM_EVENT_ADDRINFO_ERROR",
    ];
    let name = usize::try_from(event).ok().and_then(|at| names.get(at).copied());
    name.unwrap_or(c"UNKNOWN EVENT").as_ptr()
}
