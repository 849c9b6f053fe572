//! The exported functions for the driver, files, buffers, reads and writes.

use std::ffi::{c_int, c_long, c_uint, c_void};
use std::fs;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use nobounce::file::{File, FileError};

use crate::abi::{
    ALLOW_COMPAT_MODE, BATCH_SUPPORTED, Descr, DriverProperties, Error, IoVec, OPAQUE_FD, STREAMS_SUPPORTED,
    Status, USE_POLL_MODE, VERSION,
};
use crate::entry::{Errno, guarded};
use crate::table::OpenFile;
use crate::transfer::{Direction, Failure, Request};
use crate::{log, memory, parameters, report, stats, table, transfer};

/// Runs a call that returns `CUfileError_t`.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Status>) -> Error {
    let caught = guarded(|| {
        nobounce_dropin::reserve::check()?;
        Ok(body())
    });
    caught
        .unwrap_or_else(|errno| Err(if errno == Errno::ENOMEM { Status::NoMemory } else { Status::Internal }))
        .into()
}

/// Runs a call that returns bytes, or a negative error.
fn bytes(body: impl FnOnce() -> Result<usize, Failure>) -> isize {
    let caught = guarded(|| Ok(body())).unwrap_or(Err(Failure::Status(Status::Internal)));
    match caught {
        Ok(moved) => isize::try_from(moved).unwrap_or(isize::MAX),
        Err(failure) => failure.returned(),
    }
}

/// Writes a result to the caller's output pointer.
///
/// # Safety
/// `to` is null or a place for a `T`.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Status> {
    if to.is_null() {
        return Err(Status::InvalidValue);
    }
    // SAFETY: the caller's promise. C does not promise that it is aligned.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Opens the driver. Other calls do not require it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileDriverOpen() -> Error {
    status(|| {
        report::at_exit();
        table::open();
        Ok(())
    })
}

/// Closes the driver; the last close deregisters all files and buffers.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileDriverClose_v2() -> Error {
    status(table::close)
}

/// The same, for programs built before version 1.3.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileDriverClose() -> Error {
    status(table::close)
}

/// How often the driver is open.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileUseCount() -> c_long {
    table::use_count()
}

/// Writes the version of the interface.
///
/// # Safety
/// `version` is null or a place for an int.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileGetVersion(version: *mut c_int) -> Error {
    // SAFETY: the caller's promise.
    status(|| unsafe { put(version, VERSION) })
}

/// Writes what the driver can do: no nvidia-fs is there.
///
/// # Safety
/// `properties` is null or a place for a `CUfileDrvProps_t`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileDriverGetProperties(properties: *mut DriverProperties) -> Error {
    use parameters::SizeParameter as Size;
    let size = |which| parameters::size(which).unwrap_or(0);
    let small = |which| c_uint::try_from(size(which)).unwrap_or(c_uint::MAX);
    let flag = |which, bit| if parameters::flag(which) == Some(true) { bit } else { 0 };
    let found = DriverProperties {
        major_version: 0,
        minor_version: 0,
        poll_thresh_size: size(Size::PollThreshold),
        max_direct_io_size: size(Size::MaxDirectIo),
        dstatusflags: 0,
        dcontrolflags: flag(parameters::USE_POLL_MODE, USE_POLL_MODE)
            | flag(parameters::ALLOW_COMPAT_MODE, ALLOW_COMPAT_MODE),
        fflags: BATCH_SUPPORTED | STREAMS_SUPPORTED,
        max_device_cache_size: small(Size::MaxDeviceCache),
        per_buffer_cache_size: small(Size::PerBufferCache),
        max_device_pinned_mem_size: small(Size::MaxPinnedMemory),
        max_batch_io_size: small(Size::BatchSize),
        max_batch_io_timeout_msecs: small(Size::BatchTimeout),
    };
    // SAFETY: the caller's promise.
    status(|| unsafe { put(properties, found) })
}

/// Registers an open file.
///
/// # Safety
/// Both point to their structures, or are null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileHandleRegister(handle: *mut *mut c_void, descr: *const Descr) -> Error {
    status(|| {
        report::at_exit();
        let registered = if handle.is_null() || descr.is_null() {
            Err(Status::InvalidValue)
        } else {
            // SAFETY: the caller's promise; the descriptor is the union's first member for this
            // type.
            let (kind, fd) = unsafe { ((*descr).kind, (*descr).handle.fd) };
            register(kind, fd)
        };
        stats::HANDLES.count(registered.is_ok());
        // SAFETY: the caller's promise.
        unsafe { put(handle, table::add_file(registered?)) }
    })
}

fn register(kind: c_int, fd: RawFd) -> Result<OpenFile, Status> {
    if kind != OPAQUE_FD {
        log::warn(|| format!("cufile: handles of type {kind} are not supported: pass a file descriptor"));
        return Err(Status::InvalidFileType);
    }
    let name = fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| Status::InvalidValue)?;
    let name = name.display().to_string();
    // SAFETY: fcntl reads flags of whatever the number is.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(Status::InvalidValue);
    }
    let file = if flags & libc::O_DIRECT == 0 { duplicate(fd) } else { reopen(fd, flags) };
    let file = file.map_err(|error| {
        log::warn(|| format!("cufile: cannot open {name} again: {error}"));
        match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Status::NoDescriptor,
            _ => Status::PermissionDenied,
        }
    })?;
    let file = File::from_std(file, name).map_err(|error| {
        log::warn(|| format!("cufile: {error}"));
        if matches!(error, FileError::NotAFile { .. }) { Status::InvalidFileType } else { Status::Io }
    })?;
    Ok(OpenFile { file })
}

/// The same open file under a descriptor of our own: the program may close its own first.
fn duplicate(fd: RawFd) -> std::io::Result<fs::File> {
    // SAFETY: fcntl makes a new descriptor, or fails.
    let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if own < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: made just now, and nothing else has it.
    Ok(unsafe { fs::File::from_raw_fd(own) })
}

/// Short reads come from the page cache, which a descriptor with `O_DIRECT` bypasses.
fn reopen(fd: RawFd, flags: c_int) -> std::io::Result<fs::File> {
    let mode = flags & libc::O_ACCMODE;
    let mut options = fs::File::options();
    options.read(mode != libc::O_WRONLY).write(mode != libc::O_RDONLY);
    options.custom_flags(flags & (libc::O_SYNC | libc::O_DSYNC | libc::O_NOATIME));
    options.open(format!("/proc/self/fd/{fd}"))
}

/// Deregisters a file. Reads that are under way end first.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileHandleDeregister(handle: *mut c_void) {
    let _ = status(|| {
        let removed = table::remove_file(handle);
        stats::HANDLE_ENDS.count(removed.is_some());
        removed.map(table::release).ok_or(Status::HandleNotRegistered)
    });
}

/// Registers a buffer: GPU memory gets a window.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileBufRegister(base: *const c_void, len: usize, _flags: c_int) -> Error {
    status(|| {
        report::at_exit();
        let base = base.addr() as u64;
        let registered = if table::is_registered(base) {
            Err(Status::AlreadyRegistered)
        } else {
            memory::at(base, len, true).and_then(|memory| table::add_buffer(base, memory))
        };
        stats::BUFFERS.count(registered.is_ok());
        registered
    })
}

/// Deregisters a buffer.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileBufDeregister(base: *const c_void) -> Error {
    status(|| {
        let removed = table::remove_buffer(base.addr() as u64);
        stats::BUFFER_ENDS.count(removed.is_ok());
        removed
    })
}

/// Reads from a file into memory.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileRead(
    handle: *mut c_void,
    base: *mut c_void,
    size: usize,
    file_offset: i64,
    buffer_offset: i64,
) -> isize {
    let direction = Direction::Read;
    bytes(|| transfer::run(&Request { direction, handle, base, size, file_offset, buffer_offset }))
}

/// Writes memory to a file.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileWrite(
    handle: *mut c_void,
    base: *const c_void,
    size: usize,
    file_offset: i64,
    buffer_offset: i64,
) -> isize {
    let (direction, base) = (Direction::Write, base.cast_mut());
    bytes(|| transfer::run(&Request { direction, handle, base, size, file_offset, buffer_offset }))
}

/// Several buffers, one behind the other in the file. Ends early where one moves fewer bytes.
///
/// # Safety
/// `vectors` has `count` entries.
unsafe fn each(
    direction: Direction,
    handle: *mut c_void,
    (vectors, count): (*const IoVec, usize),
    file_offset: i64,
) -> Result<usize, Failure> {
    if vectors.is_null() && count > 0 {
        return Err(Status::InvalidValue.into());
    }
    let mut total = 0_usize;
    for number in 0..count {
        // SAFETY: the caller's promise.
        let IoVec { base, len: size } = unsafe { vectors.add(number).read_unaligned() };
        let done = i64::try_from(total).ok().and_then(|total| file_offset.checked_add(total));
        let file_offset = done.ok_or(Status::InvalidValue)?;
        let request = Request { direction, handle, base, size, file_offset, buffer_offset: 0 };
        match transfer::run(&request) {
            Ok(moved) => {
                total += moved;
                if moved < size {
                    break;
                }
            }
            // As for preadv: what has moved counts.
            Err(_) if total > 0 => break,
            Err(failure) => return Err(failure),
        }
    }
    Ok(total)
}

/// As `preadv`.
///
/// # Safety
/// `vectors` has `count` entries.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileReadv(
    handle: *mut c_void,
    vectors: *const IoVec,
    count: usize,
    file_offset: i64,
    _flags: c_uint,
) -> isize {
    // SAFETY: the caller's promise.
    bytes(|| unsafe { each(Direction::Read, handle, (vectors, count), file_offset) })
}

/// As `pwritev`.
///
/// # Safety
/// `vectors` has `count` entries.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileWritev(
    handle: *mut c_void,
    vectors: *const IoVec,
    count: usize,
    file_offset: i64,
    _flags: c_uint,
) -> isize {
    // SAFETY: the caller's promise.
    bytes(|| unsafe { each(Direction::Write, handle, (vectors, count), file_offset) })
}

macro_rules! not_offered {
    ($($name:ident)*) => {$(
        #[doc = "Not offered."]
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name() -> Error {
            log::debug(|| concat!("cufile: ", stringify!($name), " is not offered").to_owned());
            Error::from(Err(Status::PlatformNotSupported))
        }
    )*};
}

not_offered! {
    cuFileDriverGetP2PFlags cuFileDriverSetP2PFlags cuFileExportPCIeTopology cuFileGetBARSizeInKB
    cuFileGetParameterGpuBounceBufferSlabArray cuFileGetParameterPosixPoolSlabArray
    cuFileSetParameterGpuBounceBufferSlabArray cuFileSetParameterPosixPoolSlabArray
    cuFileGetStatsL2 cuFileGetStatsL3
}
