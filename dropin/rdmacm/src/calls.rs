//! The functions of libibverbs that this library calls: of the one that the program has loaded,
//! which is ours.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use nobounce_verbs as verbs;

use crate::entry::Errno;
use crate::log;

macro_rules! calls {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty = $symbol:literal;)*) => {
        /// The functions.
        #[derive(Debug)]
        pub(crate) struct Calls {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Calls {
            fn find(handle: *mut c_void) -> Option<Self> {
                Some(Self {
                    $($name: {
                        let found = find(handle, $symbol)?;
                        // SAFETY: the function's manual page documents this signature.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(found)
                        }
                    },)*
                })
            }
        }
    };
}

calls! {
    get_device_list: fn(*mut c_int) -> *mut *mut verbs::Device = c"ibv_get_device_list";
    free_device_list: fn(*mut *mut verbs::Device) -> () = c"ibv_free_device_list";
    get_device_name: fn(*mut verbs::Device) -> *const c_char = c"ibv_get_device_name";
    open_device: fn(*mut verbs::Device) -> *mut verbs::Context = c"ibv_open_device";
    query_device: fn(*mut verbs::Context, *mut verbs::DeviceAttr) -> c_int = c"ibv_query_device";
    alloc_pd: fn(*mut verbs::Context) -> *mut verbs::Pd = c"ibv_alloc_pd";
    create_comp_channel: fn(*mut verbs::Context) -> *mut verbs::CompChannel = c"ibv_create_comp_channel";
    destroy_comp_channel: fn(*mut verbs::CompChannel) -> c_int = c"ibv_destroy_comp_channel";
    create_cq: fn(*mut verbs::Context, c_int, *mut c_void, *mut verbs::CompChannel, c_int) -> *mut verbs::Cq
        = c"ibv_create_cq";
    destroy_cq: fn(*mut verbs::Cq) -> c_int = c"ibv_destroy_cq";
    create_srq: fn(*mut verbs::Pd, *mut verbs::SrqInitAttr) -> *mut verbs::Srq = c"ibv_create_srq";
    destroy_srq: fn(*mut verbs::Srq) -> c_int = c"ibv_destroy_srq";
    create_qp: fn(*mut verbs::Pd, *mut verbs::QpInitAttr) -> *mut verbs::Qp = c"ibv_create_qp";
    destroy_qp: fn(*mut verbs::Qp) -> c_int = c"ibv_destroy_qp";
    attach_mcast: fn(*mut verbs::Qp, *const verbs::Gid, u16) -> c_int = c"ibv_attach_mcast";
    detach_mcast: fn(*mut verbs::Qp, *const verbs::Gid, u16) -> c_int = c"ibv_detach_mcast";
    modify_qp: fn(*mut verbs::Qp, *mut verbs::QpAttr, c_int) -> c_int = c"ibv_modify_qp";
}

fn find(handle: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: an open handle and a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// The functions, found at the first call.
pub(crate) fn calls() -> Result<&'static Calls, Errno> {
    static CALLS: OnceLock<Option<Calls>> = OnceLock::new();
    let found = CALLS.get_or_init(|| {
        // By the soname that programs are linked with: a program that has loaded it gets the same
        // one. Otherwise the loader finds ours, which lies beside this library.
        // SAFETY: a C string; the library is never closed.
        let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            return None;
        }
        Calls::find(handle)
    });
    found.as_ref().ok_or_else(|| {
        log::error(|| "librdmacm: cannot load libibverbs.so.1, or it lacks required functions".to_owned());
        Errno(libc::ENOSYS)
    })
}

/// The error that a call which gave no object left behind.
pub(crate) fn made<T>(object: *mut T) -> Result<*mut T, Errno> {
    if object.is_null() { Err(std::io::Error::last_os_error().into()) } else { Ok(object) }
}

/// The error number that a call returned.
pub(crate) fn done(code: c_int) -> Result<(), Errno> {
    if code == 0 { Ok(()) } else { Err(Errno(code)) }
}
