//! Reads and writes in the order of a CUDA stream.
//!
//! The call waits until the stream has come to it and then moves the bytes: work that is put into
//! the stream afterwards finds them. The calling thread is blocked meanwhile, which the interface
//! allows.

use std::ffi::{c_uint, c_void};
use std::thread;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::StreamEvent;

use crate::abi::{Error, Status};
use crate::calls::{put, status};
use crate::transfer::{Direction, Request};
use crate::{log, report, table, transfer};

/// Polls without sleep for so long; streams are usually short of work here.
const SPIN: Duration = Duration::from_micros(50);
const PAUSE: Duration = Duration::from_micros(20);

/// Reads and writes need no registration of their stream.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileStreamRegister(_stream: *mut c_void, _flags: c_uint) -> Error {
    Error::from(Ok(()))
}

/// As for registration.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileStreamDeregister(_stream: *mut c_void) -> Error {
    Error::from(Ok(()))
}

fn wait(stream: *mut c_void) -> Result<(), Status> {
    let refuse = |reason: String| {
        log::warn(|| format!("cufile: cannot wait for the stream: {reason}"));
        Status::AsyncNotSupported
    };
    // SAFETY: the program passes a live stream.
    let event = unsafe { StreamEvent::record(stream.addr() as u64) };
    let event = event.map_err(|error| refuse(error.to_string()))?;
    let begun = Instant::now();
    while !event.is_reached().map_err(|error| refuse(error.to_string()))? {
        if begun.elapsed() > SPIN {
            thread::sleep(PAUSE);
        }
    }
    Ok(())
}

/// # Safety
/// The pointers are null or places of their types.
unsafe fn run(
    direction: Direction,
    (handle, base): (*mut c_void, *mut c_void),
    (size, file_offset, buffer_offset): (*const usize, *const i64, *const i64),
    moved: *mut isize,
    stream: *mut c_void,
) -> Error {
    status(|| {
        report::at_exit();
        if size.is_null() || file_offset.is_null() || buffer_offset.is_null() || moved.is_null() {
            return Err(Status::InvalidValue);
        }
        table::file(handle)?;
        wait(stream)?;
        // Work in the stream may have set them.
        // SAFETY: the caller's promise.
        let request = unsafe {
            let (size, file_offset) = (size.read_volatile(), file_offset.read_volatile());
            Request {
                direction,
                handle,
                base,
                size,
                file_offset,
                buffer_offset: buffer_offset.read_volatile(),
            }
        };
        let result = transfer::run(&request).map(|bytes| isize::try_from(bytes).unwrap_or(isize::MAX));
        // SAFETY: the caller's promise.
        unsafe { put(moved, result.unwrap_or_else(transfer::Failure::stored)) }
    })
}

/// Reads in the order of a stream.
///
/// # Safety
/// The pointers are null or places of their types.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileReadAsync(
    handle: *mut c_void,
    base: *mut c_void,
    size: *mut usize,
    file_offset: *mut i64,
    buffer_offset: *mut i64,
    moved: *mut isize,
    stream: *mut c_void,
) -> Error {
    let place = (size.cast_const(), file_offset.cast_const(), buffer_offset.cast_const());
    // SAFETY: the caller's promise.
    unsafe { run(Direction::Read, (handle, base), place, moved, stream) }
}

/// Writes in the order of a stream.
///
/// # Safety
/// The pointers are null or places of their types.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileWriteAsync(
    handle: *mut c_void,
    base: *mut c_void,
    size: *mut usize,
    file_offset: *mut i64,
    buffer_offset: *mut i64,
    moved: *mut isize,
    stream: *mut c_void,
) -> Error {
    let place = (size.cast_const(), file_offset.cast_const(), buffer_offset.cast_const());
    // SAFETY: the caller's promise.
    unsafe { run(Direction::Write, (handle, base), place, moved, stream) }
}
