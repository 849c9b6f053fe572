//! The results of calls, with CUDA's numbers and names.

use std::ffi::{CStr, c_char};

use crate::abi::Out;

/// A `CUresult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) u32);

/// Result of a call before its conversion to a [`Status`].
pub(crate) type Answer<T = ()> = Result<T, Status>;

macro_rules! statuses {
    ($($name:ident = $code:literal $symbol:literal $words:literal;)*) => {
        impl Status {
            $(pub(crate) const $name: Self = Self($code);)*
        }

        const TABLE: &[(Status, &CStr, &CStr)] = &[$((Status::$name, $symbol, $words),)*];
    };
}

statuses! {
    SUCCESS = 0 c"CUDA_SUCCESS" c"no error";
    INVALID_VALUE = 1 c"CUDA_ERROR_INVALID_VALUE" c"invalid argument";
    OUT_OF_MEMORY = 2 c"CUDA_ERROR_OUT_OF_MEMORY" c"out of memory";
    NOT_INITIALIZED = 3 c"CUDA_ERROR_NOT_INITIALIZED" c"initialization error";
    DEINITIALIZED = 4 c"CUDA_ERROR_DEINITIALIZED" c"driver shutting down";
    NO_DEVICE = 100 c"CUDA_ERROR_NO_DEVICE" c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101 c"CUDA_ERROR_INVALID_DEVICE" c"invalid device ordinal";
    INVALID_CONTEXT = 201 c"CUDA_ERROR_INVALID_CONTEXT" c"invalid device context";
    INVALID_HANDLE = 400 c"CUDA_ERROR_INVALID_HANDLE" c"invalid resource handle";
    ILLEGAL_STATE = 401 c"CUDA_ERROR_ILLEGAL_STATE" c"the operation cannot be performed in the present state";
    NOT_FOUND = 500 c"CUDA_ERROR_NOT_FOUND" c"named symbol not found";
    NOT_READY = 600 c"CUDA_ERROR_NOT_READY" c"device not ready";
    ILLEGAL_ADDRESS = 700 c"CUDA_ERROR_ILLEGAL_ADDRESS" c"an illegal memory access was encountered";
    CONTEXT_IS_DESTROYED = 709 c"CUDA_ERROR_CONTEXT_IS_DESTROYED" c"context is destroyed";
    ALREADY_REGISTERED = 712 c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" c"part or all of the memory is already registered";
    NOT_REGISTERED = 713 c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED" c"pointer does not correspond to a registered memory region";
    NOT_PERMITTED = 800 c"CUDA_ERROR_NOT_PERMITTED" c"operation not permitted";
    NOT_SUPPORTED = 801 c"CUDA_ERROR_NOT_SUPPORTED" c"operation not supported";
    CAPTURE_UNSUPPORTED = 900 c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" c"operation not permitted when stream is capturing";
    CAPTURE_INVALIDATED = 901 c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" c"operation failed due to a previous error during capture";
    CAPTURE_IMPLICIT = 906 c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" c"operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907 c"CUDA_ERROR_CAPTURED_EVENT" c"operation not permitted on an event last recorded in a capturing stream";
    CAPTURE_WRONG_THREAD = 908 c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD" c"attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999 c"CUDA_ERROR_UNKNOWN" c"unknown error";
}

fn find(
    code: Status,
    out: Out<*const c_char>,
    pick: impl Fn(&(Status, &'static CStr, &'static CStr)) -> &'static CStr,
) -> Status {
    match TABLE.iter().find(|row| row.0 == code) {
        Some(row) => out.put(pick(row).as_ptr()).err().unwrap_or(Status::SUCCESS),
        None => Status::INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(code: Status, name: Out<*const c_char>) -> Status {
    find(code, name, |row| row.1)
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(code: Status, words: Out<*const c_char>) -> Status {
    find(code, words, |row| row.2)
}
