//! Arguments as C hands them over.

use std::ffi::{CStr, c_char, c_void};
use std::slice;

use crate::status::{Answer, Status};

/// Where a call writes an answer.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the answer; a null pointer is an invalid value, as it is to CUDA.
    pub(crate) fn put(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: not null, and the C caller provides space for a T there. Alignment is not relied
        // on: some outputs are `void *`.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the answer where one is wanted: some outputs may be null.
    pub(crate) fn put_if_wanted(self, value: T) {
        let _ = self.put(value);
    }
}

/// Input, or in-out, argument of a call.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct In<T>(*mut T);

impl<T: Copy> In<T> {
    /// The first value behind the pointer.
    pub(crate) fn take(self) -> Answer<T> {
        self.many(1).map(|values| values[0])
    }

    /// `count` values behind the pointer.
    pub(crate) fn many(self, count: usize) -> Answer<Vec<T>> {
        if self.0.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: not null, and the C caller passes `count` readable values there.
        Ok(unsafe { slice::from_raw_parts(self.0, count) }.to_vec())
    }

    /// Writes over the value.
    pub(crate) fn put(self, value: T) -> Answer {
        Out(self.0).put(value)
    }
}

/// A string that ends in a zero byte.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Words(*const c_char);

impl Words {
    /// The string; an empty one for null or for bytes that are not UTF-8.
    pub(crate) fn take(self) -> String {
        if self.0.is_null() {
            return String::new();
        }
        // SAFETY: not null, and the C caller passes a string there.
        unsafe { CStr::from_ptr(self.0) }.to_str().unwrap_or_default().to_owned()
    }
}

/// Space for a string of `len` bytes, including the NUL.
pub(crate) fn put_words(room: *mut c_char, len: i32, words: &CStr) -> Answer {
    let bytes = words.to_bytes_with_nul();
    if room.is_null() || usize::try_from(len).is_ok_and(|len| len < bytes.len()) || len < 0 {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: the caller passes `len` writable bytes, and the string fits.
    unsafe { room.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

/// A value behind a `void *`, as pointer attributes are written.
pub(crate) fn put_any<T>(room: *mut c_void, value: T) -> Answer {
    Out(room.cast::<T>()).put(value)
}

/// An address or length of the interface as a number of this machine.
pub(crate) fn size(value: u64) -> Answer<usize> {
    usize::try_from(value).map_err(|_| Status::INVALID_VALUE)
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

impl Location {
    pub(crate) const DEVICE: u32 = 1;
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationProp {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: Location,
    pub(crate) windows: usize,
    pub(crate) compression: u8,
    pub(crate) gpu_direct_rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

const _: () = assert!(size_of::<AllocationProp>() == 32, "as in CUDA's header");

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

const _: () = assert!(size_of::<AccessDesc>() == 12, "as in CUDA's header");

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct IpcHandle(pub(crate) [u32; 16]);

const _: () = assert!(size_of::<IpcHandle>() == 64, "as in CUDA's header");
