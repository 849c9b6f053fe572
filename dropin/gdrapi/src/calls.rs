//! The exported functions: GDRCopy's header, version 2.6, in its order.
//!
//! All of them may be called by several threads at once, which GDRCopy does not promise.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::ptr;

use nobounce_memory::gpu::{Driver, GpuOptions};

use crate::entry::{Errno, caught, guarded};
use crate::layout::{
    ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE, ATTR_USE_PERSISTENT_MAPPING, ATTR_USING_DMA_BUF_MMAP, InfoV1, InfoV2,
    MAPPING_CACHING, MAPPING_DEVICE, MAPPING_NONE, MAPPING_WC, MemoryHandle, PIN_FLAG_FORCE_PCIE, VERSION,
};
use crate::log;
use crate::pin::Pin;
use crate::slab::Number;
use crate::table;

/// The number that C gets; GDRCopy's functions leave errno alone.
fn code(outcome: Result<(), Errno>) -> c_int {
    outcome.map_or_else(|errno| errno.0, |()| 0)
}

fn number(handle: MemoryHandle) -> Number {
    Number(handle.h)
}

/// Writes a result to the caller's output pointer.
///
/// # Safety
/// `to` is null or a place for a `T`.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Errno> {
    if to.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the caller's promise. C does not promise that it is aligned.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Opens the library. NULL and errno where no buffer could ever be pinned: there is no CUDA, or
/// windows are switched off.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdr_open() -> *mut c_void {
    let opened = guarded(|| {
        if !GpuOptions::default().with_environment().window {
            log::warn(|| "gdrapi: cannot open: windows are switched off (NOBOUNCE_WINDOW=off)".to_owned());
            return Err(Errno::ENODEV);
        }
        Driver::is_installed().map_err(|error| {
            log::info(|| format!("gdrapi: cannot open: {error}"));
            Errno::ENODEV
        })?;
        table::open()
    });
    opened.unwrap_or_else(|errno| {
        errno.set();
        ptr::null_mut()
    })
}

/// Closes it. What is still pinned is unpinned, and what is mapped is no longer.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdr_close(g: *mut c_void) -> c_int {
    code(guarded(|| table::close(g)))
}

fn pin(g: *mut c_void, addr: c_ulong, size: usize, handle: *mut MemoryHandle) -> Result<(), Errno> {
    if handle.is_null() {
        return Err(Errno::EINVAL);
    }
    table::check_open(g)?;
    let number = table::add(g, Pin::new(addr, size)?)?;
    // SAFETY: a place for a handle, as C promises.
    unsafe { put(handle, MemoryHandle { h: number.0 }) }
}

/// Pins a buffer. Tokens are of drivers long ago: GDRCopy hands them to a gdrdrv before 2.5 only.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdr_pin_buffer(
    g: *mut c_void,
    addr: c_ulong,
    size: usize,
    _p2p_token: u64,
    _va_space: u32,
    handle: *mut MemoryHandle,
) -> c_int {
    code(guarded(|| pin(g, addr, size, handle)))
}

/// Pins a buffer, with flags.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdr_pin_buffer_v2(
    g: *mut c_void,
    addr: c_ulong,
    size: usize,
    flags: u32,
    handle: *mut MemoryHandle,
) -> c_int {
    code(guarded(|| {
        if flags & !PIN_FLAG_FORCE_PCIE != 0 {
            log::debug(|| format!("gdrapi: unknown pin flags {flags:#x}"));
            return Err(Errno::EINVAL);
        }
        pin(g, addr, size, handle)
    }))
}

/// Unpins a buffer. One that is still mapped is unmapped.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdr_unpin_buffer(g: *mut c_void, handle: MemoryHandle) -> c_int {
    code(guarded(|| table::remove(g, number(handle)).map(drop)))
}

/// Whether the mapping ended because the memory was freed: never, since mappings outlive it
/// (persistent).
///
/// # Safety
/// As C's contract says: `flag` is a place for an int.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_get_callback_flag(
    g: *mut c_void,
    handle: MemoryHandle,
    flag: *mut c_int,
) -> c_int {
    code(guarded(|| {
        table::pin_of(g, number(handle))?;
        // SAFETY: the caller's promise.
        unsafe { put(flag, 0) }
    }))
}

/// What a buffer is, without the type of its mapping: for programs built before that was added.
///
/// # Safety
/// As C's contract says: `info` is a place for the structure.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_get_info(
    g: *mut c_void,
    handle: MemoryHandle,
    info: *mut InfoV1,
) -> c_int {
    code(guarded(|| {
        let found = table::pin_of(g, number(handle))?.info().v1;
        // SAFETY: the caller's promise.
        unsafe { put(info, found) }
    }))
}

/// Properties of a buffer.
///
/// # Safety
/// As C's contract says: `info` is a place for the structure.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_get_info_v2(
    g: *mut c_void,
    handle: MemoryHandle,
    info: *mut InfoV2,
) -> c_int {
    code(guarded(|| {
        let found = table::pin_of(g, number(handle))?.info();
        // SAFETY: the caller's promise.
        unsafe { put(info, found) }
    }))
}

fn map(g: *mut c_void, handle: MemoryHandle, va: *mut *mut c_void, size: usize) -> Result<(), Errno> {
    let pin = table::pin_of(g, number(handle))?;
    if va.is_null() {
        return Err(Errno::EINVAL);
    }
    let mapped = pin.map(size)?;
    // SAFETY: a place for a pointer, as C promises.
    unsafe { put(va, mapped) }
}

/// Maps a buffer.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdr_map(
    g: *mut c_void,
    handle: MemoryHandle,
    va: *mut *mut c_void,
    size: usize,
) -> c_int {
    code(guarded(|| map(g, handle, va, size)))
}

/// Maps a buffer by a type of mapping, of which there is one: write-combined.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdr_map_v2(
    g: *mut c_void,
    handle: MemoryHandle,
    va: *mut *mut c_void,
    size: usize,
    flags: c_int,
) -> c_int {
    code(guarded(|| {
        // A mapped buffer reports that first.
        if table::pin_of(g, number(handle))?.is_mapped() {
            log::debug(|| "gdrapi: the buffer is already mapped".to_owned());
            return Err(Errno::EAGAIN);
        }
        let refusal = match u32::try_from(flags) {
            Ok(MAPPING_NONE | MAPPING_WC) => return map(g, handle, va, size),
            Ok(MAPPING_CACHING | MAPPING_DEVICE) => Errno::ENOTSUP,
            _ => Errno::EINVAL,
        };
        log::debug(|| format!("gdrapi: mapping type {flags} is not supported; mappings are write-combined"));
        Err(refusal)
    }))
}

/// Takes a mapping back.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdr_unmap(
    g: *mut c_void,
    handle: MemoryHandle,
    va: *mut c_void,
    size: usize,
) -> c_int {
    code(guarded(|| table::pin_of(g, number(handle))?.unmap(va, size)))
}

/// Copies into GPU memory.
///
/// # Safety
/// As C's contract says: `h_ptr` is `size` bytes that may be read.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_copy_to_mapping(
    handle: MemoryHandle,
    map_d_ptr: *mut c_void,
    h_ptr: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    code(caught(|| unsafe { table::pin(number(handle))?.copy_to(map_d_ptr, h_ptr, size) }))
}

/// Copies out of GPU memory.
///
/// # Safety
/// As C's contract says: `h_ptr` is `size` bytes that may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_copy_from_mapping(
    handle: MemoryHandle,
    h_ptr: *mut c_void,
    map_d_ptr: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    code(caught(|| unsafe { table::pin(number(handle))?.copy_from(h_ptr, map_d_ptr, size) }))
}

/// The version of this library.
///
/// # Safety
/// As C's contract says: places for two ints.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_runtime_get_version(major: *mut c_int, minor: *mut c_int) {
    // SAFETY: the caller's promise. There is nothing to return.
    let _ = unsafe { put(major, VERSION.0).and_then(|()| put(minor, VERSION.1)) };
}

/// The version of the kernel module that belongs to this library. There is no module; the answer
/// stops a search for an older one.
///
/// # Safety
/// As C's contract says: places for two ints.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_driver_get_version(
    g: *mut c_void,
    major: *mut c_int,
    minor: *mut c_int,
) -> c_int {
    code(guarded(|| {
        table::check_open(g)?;
        // SAFETY: the caller's promise.
        unsafe { put(major, VERSION.0).and_then(|()| put(minor, VERSION.1)) }
    }))
}

/// Attributes of the library. Mappings outlive the memory's freeing (persistent), and always go
/// through BAR1.
///
/// # Safety
/// As C's contract says: `v` is a place for an int.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_get_attribute(g: *mut c_void, attr: c_uint, v: *mut c_int) -> c_int {
    code(guarded(|| {
        table::check_open(g)?;
        let value = match attr {
            ATTR_USE_PERSISTENT_MAPPING | ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE => Some(1),
            // The window method is chosen per buffer; programs use this attribute to learn whether
            // a child inherits the mapping.
            ATTR_USING_DMA_BUF_MMAP => Some(0),
            _ => None,
        };
        // SAFETY: the caller's promise.
        unsafe { put(v, value.unwrap_or(0)) }?;
        value.map(drop).ok_or(Errno::EINVAL)
    }))
}

/// The name of a type of mapping.
///
/// # Safety
/// As C's contract says: `name` is a place for a pointer.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gdr_get_mapping_type_string(
    mapping_type: c_uint,
    name: *mut *const c_char,
) -> c_int {
    let found: Option<&CStr> = match mapping_type {
        MAPPING_NONE => Some(c"None"),
        MAPPING_WC => Some(c"Write Combining"),
        MAPPING_CACHING => Some(c"Caching"),
        MAPPING_DEVICE => Some(c"Device"),
        _ => None,
    };
    // SAFETY: the caller's promise.
    code(found.ok_or(Errno::EINVAL).and_then(|found| unsafe { put(name, found.as_ptr()) }))
}
