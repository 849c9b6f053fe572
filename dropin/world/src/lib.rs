//! `libnobounce.so`: `include/nobounce.h` on [`nobounce_initiated::world`], and NCCL's GIN plugin.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::time::Duration;

use nobounce_dropin::entry::{Errno, guarded};
// One library for both: they have the engine in common. NCCL finds the plugin by its symbols.
use nobounce_gin as _;
use nobounce_initiated::options::Options;
use nobounce_initiated::world::World;

/// As in the header.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct NbOptions {
    pub rank: u32,
    pub ranks: u32,
    pub rendezvous: *const c_char,
    pub gpu: c_int,
    pub heap: usize,
    pub channels: u32,
    pub log_depth: u32,
    pub signals: u16,
    pub counters: u16,
    pub timeout_ms: u32,
}

/// # Safety
/// The options' text ends in a zero byte.
unsafe fn options(given: &NbOptions) -> Result<Options, String> {
    if given.rendezvous.is_null() {
        return Err("no rendezvous: set it to the address and port at which rank 0 listens".to_owned());
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(given.rendezvous) }.to_string_lossy();
    let rendezvous = text
        .parse()
        .map_err(|_| format!("rendezvous {text:?} is no address and port, such as 127.0.0.1:14792"))?;
    Ok(Options {
        rank: given.rank,
        ranks: given.ranks,
        rendezvous,
        gpu: given.gpu,
        heap: given.heap,
        channels: given.channels as usize,
        log_depth: given.log_depth,
        signals: given.signals,
        counters: given.counters,
        limit: Duration::from_millis(given.timeout_ms.into()),
    })
}

/// An error with its causes.
fn reason(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let more = next.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = next.source();
    }
    text
}

/// Copies text, cut off where there is no room, with a zero byte.
///
/// # Safety
/// `to` is null, or has room for `len` bytes.
unsafe fn copy_text(text: &str, to: *mut c_char, len: usize) {
    let Some(most) = len.checked_sub(1).filter(|_| !to.is_null()) else { return };
    let count = text.len().min(most);
    // SAFETY: the caller's promise; `count` is less than `len`.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), to, count);
        to.add(count).write(0);
    }
}

/// Joins.
///
/// # Safety
/// As the header says: options with a text that ends in a zero byte, and room for `error_len`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nb_join(
    given: *const NbOptions,
    error: *mut c_char,
    error_len: usize,
) -> *mut World {
    let joined = guarded(|| {
        // SAFETY: null, or options, as C promises.
        let Some(given) = (unsafe { given.as_ref() }) else { return Ok(Err("no options".to_owned())) };
        // SAFETY: as above.
        let options = unsafe { options(given) };
        Ok(options.and_then(|options| World::join(&options).map_err(|error| reason(&error))))
    });
    let said = match joined {
        Ok(Ok(world)) => return Box::into_raw(Box::new(world)),
        Ok(Err(said)) => said,
        Err(Errno(number)) => format!("internal error {number}, see the log"),
    };
    // SAFETY: as C promises.
    unsafe { copy_text(&said, error, error_len) };
    ptr::null_mut()
}

/// Leaves.
///
/// # Safety
/// A world of [`nb_join`] that was not left yet, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nb_leave(world: *mut World) {
    if !world.is_null() {
        // SAFETY: as C promises, it is one of `nb_join`, and not used again.
        let world = unsafe { Box::from_raw(world) };
        let _ = guarded(|| {
            drop(world);
            Ok(())
        });
    }
}

/// A channel.
///
/// # Safety
/// A world of [`nb_join`] that was not left, or null; so for the other functions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nb_channel(world: *const World, number: u32) -> *mut c_void {
    // SAFETY: as C promises.
    let addr = unsafe { world.as_ref() }.and_then(|world| world.channel(number as usize));
    addr.map_or(ptr::null_mut(), address)
}

fn address(addr: u64) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(addr).unwrap_or(0))
}

/// The heap.
///
/// # Safety
/// As for [`nb_channel`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nb_heap(world: *const World) -> *mut c_void {
    // SAFETY: as C promises.
    unsafe { world.as_ref() }.map_or(ptr::null_mut(), |world| address(world.heap().addr()))
}

/// Its length.
///
/// # Safety
/// As for [`nb_channel`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nb_heap_bytes(world: *const World) -> usize {
    // SAFETY: as C promises.
    unsafe { world.as_ref() }.map_or(0, |world| world.heap().len())
}

/// A barrier of hosts.
///
/// # Safety
/// As for [`nb_channel`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nb_barrier(world: *mut World) -> c_int {
    // SAFETY: as C promises, one thread at a time.
    let Some(world) = (unsafe { world.as_mut() }) else { return libc::EINVAL };
    match guarded(|| Ok(world.barrier().map_or(libc::ECONNRESET, |()| 0))) {
        Ok(code) | Err(Errno(code)) => code,
    }
}

/// Refused and failed descriptors.
///
/// # Safety
/// As for [`nb_channel`], and room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nb_reports(world: *const World, text: *mut c_char, len: usize) -> usize {
    // SAFETY: as C promises.
    let Some(world) = (unsafe { world.as_ref() }) else { return 0 };
    let line = |report: nobounce_initiated::proxy::Report| {
        format!("channel {}, descriptor {}: {}\n", report.channel, report.number, report.reason)
    };
    let all = guarded(|| Ok(world.reports().into_iter().map(line).collect::<String>())).unwrap_or_default();
    // SAFETY: as C promises.
    unsafe { copy_text(&all, text, len) };
    all.len()
}
