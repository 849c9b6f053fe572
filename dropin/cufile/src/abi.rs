//! Numbers and structures of cuFile's interface, version 1.19. Facts of its header.

use std::ffi::{c_int, c_uint, c_void};

/// What `cuFileGetVersion` returns: 1000 for each major version, 10 for each minor one.
pub(crate) const VERSION: c_int = 1190;

/// `CUfileOpError`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
    NotInitialized = 5001,
    PlatformNotSupported = 5007,
    IoNotSupported = 5008,
    PointerInvalid = 5012,
    PointerRange = 5014,
    InvalidFileType = 5018,
    InvalidValue = 5022,
    AlreadyRegistered = 5023,
    NotRegistered = 5024,
    PermissionDenied = 5025,
    HandleNotRegistered = 5027,
    Internal = 5030,
    NoDescriptor = 5031,
    BatchFull = 5037,
    AsyncNotSupported = 5038,
    NoMemory = 5043,
    Io = 5044,
}

/// `CUfileError_t`: an error of cuFile, and one of CUDA's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Error {
    pub(crate) err: c_int,
    pub(crate) cu_err: c_int,
}

impl From<Result<(), Status>> for Error {
    fn from(result: Result<(), Status>) -> Self {
        Self { err: result.map_or_else(|status| status as c_int, |()| 0), cu_err: 0 }
    }
}

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
pub(crate) const OPAQUE_FD: c_int = 1;

/// `CUfileDescr_t`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Descr {
    pub(crate) kind: c_int,
    /// A union of a descriptor and a pointer.
    pub(crate) handle: Handle,
    pub(crate) fs_ops: *const c_void,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union Handle {
    pub(crate) fd: c_int,
    pub(crate) pointer: *mut c_void,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

/// Bits of `fflags`.
pub(crate) const BATCH_SUPPORTED: c_uint = 1 << 1;
pub(crate) const STREAMS_SUPPORTED: c_uint = 1 << 2;
/// Bits of `dcontrolflags`.
pub(crate) const USE_POLL_MODE: c_uint = 1 << 0;
pub(crate) const ALLOW_COMPAT_MODE: c_uint = 1 << 1;

/// `CUfileDrvProps_t`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct DriverProperties {
    pub(crate) major_version: c_uint,
    pub(crate) minor_version: c_uint,
    pub(crate) poll_thresh_size: usize,
    pub(crate) max_direct_io_size: usize,
    pub(crate) dstatusflags: c_uint,
    pub(crate) dcontrolflags: c_uint,
    pub(crate) fflags: c_uint,
    pub(crate) max_device_cache_size: c_uint,
    pub(crate) per_buffer_cache_size: c_uint,
    pub(crate) max_device_pinned_mem_size: c_uint,
    pub(crate) max_batch_io_size: c_uint,
    pub(crate) max_batch_io_timeout_msecs: c_uint,
}

/// `CUfileIOVec_t`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct IoVec {
    pub(crate) base: *mut c_void,
    pub(crate) len: usize,
}

/// `CUFILE_READ` and `CUFILE_WRITE`.
pub(crate) const READ: c_int = 0;
pub(crate) const WRITE: c_int = 1;

/// `CUfileIOParams_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct IoParams {
    pub(crate) mode: c_int,
    pub(crate) base: *mut c_void,
    pub(crate) file_offset: i64,
    pub(crate) buffer_offset: i64,
    pub(crate) size: usize,
    pub(crate) handle: *mut c_void,
    pub(crate) opcode: c_int,
    pub(crate) cookie: *mut c_void,
}

/// `CUfileStatus_t` of an entry that has ended.
pub(crate) const CANCELED: c_int = 0x8;
pub(crate) const COMPLETE: c_int = 0x10;
pub(crate) const FAILED: c_int = 0x40;

/// `CUfileIOEvents_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct IoEvent {
    pub(crate) cookie: *mut c_void,
    pub(crate) status: c_int,
    pub(crate) ret: usize,
}
