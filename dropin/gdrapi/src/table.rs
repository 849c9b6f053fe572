//! All open handles and pinned buffers of this process, by number.
//!
//! A forked child starts with an empty table: the parent's may be locked by a thread that the child
//! does not have. The parent's buffers are not the child's, as with gdrdrv (EACCES).

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::entry::Errno;
use crate::log;
use crate::pin::Pin;
use crate::slab::{Number, Slab};

/// Fork depth: number of forks between the first process and this one.
static FORKS: AtomicU8 = AtomicU8::new(0);
/// Null until it is needed, and again in a child.
static TABLE: AtomicPtr<RwLock<Table>> = AtomicPtr::new(ptr::null_mut());

struct Table {
    /// The result of `gdr_open`.
    opens: Slab<()>,
    pins: Slab<Entry>,
}

struct Entry {
    /// The open handle that pinned it.
    open: Number,
    pin: Arc<Pin>,
}

extern "C" fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // The parent's table is leaked: a child must not touch it.
    TABLE.store(ptr::null_mut(), Ordering::Release);
}

#[inline]
fn table() -> &'static RwLock<Table> {
    let found = TABLE.load(Ordering::Acquire);
    if found.is_null() {
        return new_table();
    }
    // SAFETY: a table is never freed.
    unsafe { &*found }
}

#[cold]
fn new_table() -> &'static RwLock<Table> {
    let fork = FORKS.load(Ordering::Relaxed);
    let ours = Box::into_raw(Box::new(RwLock::new(Table { opens: Slab::new(fork), pins: Slab::new(fork) })));
    match TABLE.compare_exchange(ptr::null_mut(), ours, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            if fork == 0 {
                // SAFETY: the handler stores to two statics, and stays in memory with this library.
                // If there is no memory for it, the driver refuses a child instead.
                unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
            }
            // SAFETY: just made, and never freed from here on.
            unsafe { &*ours }
        }
        Err(theirs) => {
            // SAFETY: ours was never shared.
            drop(unsafe { Box::from_raw(ours) });
            // SAFETY: a table is never freed.
            unsafe { &*theirs }
        }
    }
}

#[inline]
fn read<T>(look: impl FnOnce(&Table) -> T) -> T {
    look(&table().read().unwrap_or_else(PoisonError::into_inner))
}

fn write<T>(change: impl FnOnce(&mut Table) -> T) -> T {
    change(&mut table().write().unwrap_or_else(PoisonError::into_inner))
}

/// Why there is nothing by a number.
#[cold]
fn unknown(what: &str, number: Number) -> Errno {
    let fork = FORKS.load(Ordering::Relaxed);
    if fork != 0 && number.0 != 0 && number.fork() != fork {
        log::debug(|| {
            format!("gdrapi: {what} {:#x} belongs to the parent process; a child must open its own", number.0)
        });
        return Errno::EACCES;
    }
    log::debug(|| format!("gdrapi: unknown {what} {:#x}: closed, unpinned or never created", number.0));
    Errno::EINVAL
}

/// The pointer that C knows an open library by. It points to nothing.
pub(crate) fn open() -> Result<*mut c_void, Errno> {
    let number = write(|table| table.opens.insert(())).ok_or(Errno::ENOMEM)?;
    usize::try_from(number.0).map(ptr::without_provenance_mut).map_err(|_| Errno::ENOMEM)
}

fn number_of(open: *mut c_void) -> Number {
    Number(open.addr() as u64)
}

/// Whether this is what `gdr_open` gave.
pub(crate) fn check_open(open: *mut c_void) -> Result<(), Errno> {
    let number = number_of(open);
    read(|table| table.opens.get(number).copied()).ok_or_else(|| unknown("gdr_t", number))
}

/// Closes it; everything pinned through it goes, mapped or not.
pub(crate) fn close(open: *mut c_void) -> Result<(), Errno> {
    let number = number_of(open);
    let closed = write(|table| {
        table.opens.remove(number)?;
        let numbers = table.pins.numbers(|entry| entry.open == number);
        Some(numbers.into_iter().filter_map(|number| table.pins.remove(number)).collect::<Vec<_>>())
    });
    // Windows are unmapped here, without the lock.
    closed.map(drop).ok_or_else(|| unknown("gdr_t", number))
}

/// Stores a pinned buffer, and returns its handle.
pub(crate) fn add(open: *mut c_void, pin: Pin) -> Result<Number, Errno> {
    let number = number_of(open);
    let entry = Entry { open: number, pin: Arc::new(pin) };
    let added = write(|table| {
        // It may have been closed by another thread in the meantime.
        table.opens.get(number)?;
        Some(table.pins.insert(entry).ok_or(Errno::ENOMEM))
    });
    added.unwrap_or_else(|| Err(unknown("gdr_t", number)))
}

/// The buffer pinned under a handle. It stays alive until the caller drops it, even if it is
/// unpinned meanwhile.
#[inline]
pub(crate) fn pin(handle: Number) -> Result<Arc<Pin>, Errno> {
    read(|table| table.pins.get(handle).map(|entry| Arc::clone(&entry.pin)))
        .ok_or_else(|| unknown("handle", handle))
}

/// The same, if it was pinned through `open`.
pub(crate) fn pin_of(open: *mut c_void, handle: Number) -> Result<Arc<Pin>, Errno> {
    check_open(open)?;
    let number = number_of(open);
    let found = read(|table| table.pins.get(handle).map(|entry| (entry.open, Arc::clone(&entry.pin))));
    match found {
        Some((owner, pin)) if owner == number => Ok(pin),
        Some(_) => {
            log::debug(|| format!("gdrapi: handle {:#x} was pinned through another gdr_t", handle.0));
            Err(Errno::EINVAL)
        }
        None => Err(unknown("handle", handle)),
    }
}

/// Takes a handle out. What it pinned is unmapped when the last copy that uses it is over.
pub(crate) fn remove(open: *mut c_void, handle: Number) -> Result<Arc<Pin>, Errno> {
    pin_of(open, handle)?;
    write(|table| table.pins.remove(handle)).map(|entry| entry.pin).ok_or_else(|| unknown("handle", handle))
}
