//! Parameters that programs set and read back. One has an effect: without `ALLOW_COMPAT_MODE` a
//! direct path is required.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use nobounce_memory::gpu::GpuOptions;
use nobounce_memory::path::Require;

use crate::abi::{Error, Status};
use crate::calls::{put, status};

/// `CUFileSizeTConfigParameter_t`, as far as it is used here.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SizeParameter {
    MaxDirectIo = 5,
    MaxDeviceCache = 6,
    PerBufferCache = 7,
    MaxPinnedMemory = 8,
    BatchSize = 9,
    PollThreshold = 10,
    BatchTimeout = 11,
}

/// `CUFileBoolConfigParameter_t`.
pub(crate) const USE_POLL_MODE: usize = 0;
pub(crate) const ALLOW_COMPAT_MODE: usize = 1;

/// In the order of the header; the defaults are those of its documentation, in KiB.
static SIZES: [AtomicUsize; 12] = {
    const fn of(value: usize) -> AtomicUsize {
        AtomicUsize::new(value)
    }
    [
        of(0),
        of(128),
        of(4),
        of(1024),
        of(4),
        of(16_384),
        of(131_072),
        of(1024),
        of(33_554_432),
        of(128),
        of(4),
        of(0),
    ]
};

static FLAGS: [AtomicBool; 14] = {
    const fn of(value: bool) -> AtomicBool {
        AtomicBool::new(value)
    }
    [
        of(false),
        of(true),
        of(false),
        of(false),
        of(false),
        of(false),
        of(true),
        of(false),
        of(false),
        of(false),
        of(false),
        of(false),
        of(false),
        of(false),
    ]
};

static TEXTS: Mutex<[Vec<u8>; 4]> = Mutex::new([const { Vec::new() }; 4]);

/// Longest text that is kept.
const MAX_TEXT: usize = 4096;

pub(crate) fn size(which: SizeParameter) -> Option<usize> {
    Some(SIZES.get(which as usize)?.load(Ordering::Relaxed))
}

fn set_size(which: SizeParameter, value: usize) {
    if let Some(place) = SIZES.get(which as usize) {
        place.store(value, Ordering::Relaxed);
    }
}

pub(crate) fn flag(which: usize) -> Option<bool> {
    Some(FLAGS.get(which)?.load(Ordering::Relaxed))
}

/// A program that forbids the compatibility mode refuses a bounce through host memory.
pub(crate) fn require() -> Require {
    if flag(ALLOW_COMPAT_MODE) == Some(false) {
        return Require::Direct;
    }
    // The environment is read once: programs change theirs while threads run.
    static REQUIRED: OnceLock<Require> = OnceLock::new();
    *REQUIRED.get_or_init(|| GpuOptions::default().with_environment().require)
}

fn place<T>(table: &[T], which: c_uint) -> Result<&T, Status> {
    usize::try_from(which).ok().and_then(|which| table.get(which)).ok_or(Status::InvalidValue)
}

/// # Safety
/// `value` is null or a place for a `size_t`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileGetParameterSizeT(which: c_uint, value: *mut usize) -> Error {
    // SAFETY: the caller's promise.
    status(|| unsafe { put(value, place(&SIZES, which)?.load(Ordering::Relaxed)) })
}

/// Sets a number.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileSetParameterSizeT(which: c_uint, value: usize) -> Error {
    status(|| {
        place(&SIZES, which)?.store(value, Ordering::Relaxed);
        Ok(())
    })
}

/// # Safety
/// `value` is null or a place for a bool.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileGetParameterBool(which: c_uint, value: *mut bool) -> Error {
    // SAFETY: the caller's promise.
    status(|| unsafe { put(value, place(&FLAGS, which)?.load(Ordering::Relaxed)) })
}

/// Sets a flag.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileSetParameterBool(which: c_uint, value: bool) -> Error {
    status(|| {
        place(&FLAGS, which)?.store(value, Ordering::Relaxed);
        Ok(())
    })
}

/// # Safety
/// `text` has room for `len` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileGetParameterString(
    which: c_uint,
    text: *mut c_char,
    len: c_int,
) -> Error {
    status(|| {
        let texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = place(&*texts, which)?;
        let room = usize::try_from(len).map_err(|_| Status::InvalidValue)?;
        if text.is_null() || found.len() >= room {
            return Err(Status::InvalidValue);
        }
        // SAFETY: the caller's promise, and it fits with its end.
        unsafe {
            text.cast::<u8>().copy_from_nonoverlapping(found.as_ptr(), found.len());
            text.cast::<u8>().add(found.len()).write(0);
        }
        Ok(())
    })
}

/// # Safety
/// `text` is null or a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileSetParameterString(which: c_uint, text: *const c_char) -> Error {
    status(|| {
        if text.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: the caller's promise.
        let text = unsafe { CStr::from_ptr(text) }.to_bytes();
        let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let place = usize::try_from(which).ok().and_then(|which| texts.get_mut(which));
        let place = place.filter(|_| text.len() <= MAX_TEXT).ok_or(Status::InvalidValue)?;
        *place = text.to_owned();
        Ok(())
    })
}

/// Every value is accepted.
///
/// # Safety
/// Both are null or places for a `size_t`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileGetParameterMinMaxValue(
    which: c_uint,
    least: *mut usize,
    most: *mut usize,
) -> Error {
    status(|| {
        place(&SIZES, which)?;
        // SAFETY: the caller's promise.
        unsafe { put(least, 0).and_then(|()| put(most, usize::MAX)) }
    })
}

/// Nothing is polled here.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileDriverSetPollMode(poll: bool, threshold: usize) -> Error {
    status(|| {
        place(&FLAGS, 0)?.store(poll, Ordering::Relaxed);
        set_size(SizeParameter::PollThreshold, threshold);
        Ok(())
    })
}

/// Kept; pieces have a size of their own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileDriverSetMaxDirectIOSize(value: usize) -> Error {
    status(|| {
        set_size(SizeParameter::MaxDirectIo, value);
        Ok(())
    })
}

/// Kept; there is no cache.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileDriverSetMaxCacheSize(value: usize) -> Error {
    status(|| {
        set_size(SizeParameter::MaxDeviceCache, value);
        Ok(())
    })
}

/// Kept; windows are limited by BAR1 only.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileDriverSetMaxPinnedMemSize(value: usize) -> Error {
    status(|| {
        set_size(SizeParameter::MaxPinnedMemory, value);
        Ok(())
    })
}
