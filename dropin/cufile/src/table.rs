//! What is open and registered.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nobounce::file::{File, LocalMemory};

use crate::abi::Status;
use crate::log;

/// Between two looks at an object in use.
const PAUSE: Duration = Duration::from_micros(50);

/// An open file, and what the program may do with it.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) file: File,
}

/// Registered memory.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub(crate) base: u64,
    pub(crate) memory: Arc<LocalMemory>,
}

#[derive(Debug)]
struct Table {
    /// The process that it belongs to: a child of `fork` has none of its parent's threads and
    /// windows.
    process: u32,
    /// Calls of `cuFileDriverOpen` without a close.
    opened: i64,
    files: BTreeMap<usize, Arc<OpenFile>>,
    /// The number of the file opened last.
    last: usize,
    /// By their first byte.
    buffers: BTreeMap<u64, Arc<LocalMemory>>,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);

fn with<T>(what: impl FnOnce(&mut Table) -> T) -> T {
    let mut table: MutexGuard<'_, Option<Table>> = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if table.as_ref().is_none_or(|table| table.process != process) {
        // A handle of the parent must not name a file of the child.
        let last = table.as_ref().map_or(0, |table| table.last);
        // The parent's windows and threads are not here: nothing of them may be dropped.
        std::mem::forget(table.take());
        let (files, buffers) = (BTreeMap::new(), BTreeMap::new());
        *table = Some(Table { process, opened: 0, files, last, buffers });
    }
    match &mut *table {
        Some(table) => what(table),
        None => unreachable!("it was filled above"),
    }
}

/// Counts an open driver.
pub(crate) fn open() {
    with(|table| table.opened += 1);
}

/// Closes it; the last close releases what is registered.
pub(crate) fn close() -> Result<(), Status> {
    let left = with(|table| {
        table.opened =
            table.opened.checked_sub(1).filter(|opened| *opened >= 0).ok_or(Status::NotInitialized)?;
        let is_last = table.opened == 0;
        Ok(is_last.then(|| (std::mem::take(&mut table.files), std::mem::take(&mut table.buffers))))
    })?;
    // Windows are unmapped here, without the lock.
    if let Some((files, buffers)) = left {
        files.into_values().for_each(release);
        buffers.into_values().for_each(release);
    }
    Ok(())
}

/// Drops an object when nothing uses it: after a deregistration the program may free the memory.
pub(crate) fn release<T>(object: Arc<T>) {
    while Arc::strong_count(&object) > 1 {
        thread::sleep(PAUSE);
    }
}

pub(crate) fn use_count() -> i64 {
    with(|table| table.opened)
}

/// Stores a file, and returns the pointer that C knows it by. It points to nothing.
pub(crate) fn add_file(file: OpenFile) -> *mut c_void {
    with(|table| {
        table.last += 1;
        table.files.insert(table.last, Arc::new(file));
        ptr::without_provenance_mut(table.last)
    })
}

pub(crate) fn file(handle: *mut c_void) -> Result<Arc<OpenFile>, Status> {
    with(|table| table.files.get(&handle.addr()).cloned()).ok_or_else(|| {
        log::debug(|| {
            format!("cufile: unknown handle {:#x}: deregistered or never registered", handle.addr())
        });
        Status::HandleNotRegistered
    })
}

pub(crate) fn remove_file(handle: *mut c_void) -> Option<Arc<OpenFile>> {
    with(|table| table.files.remove(&handle.addr()))
}

/// Whether memory is registered there. An entry whose memory was freed goes.
pub(crate) fn is_registered(base: u64) -> bool {
    let found = with(|table| table.buffers.get(&base).cloned());
    let is_live = found.as_ref().is_some_and(|memory| memory.is_live());
    if let Some(dead) = found.filter(|_| !is_live) {
        evict(base, &dead);
    }
    is_live
}

fn evict(base: u64, dead: &Arc<LocalMemory>) {
    let gone = with(|table| {
        let is_same = table.buffers.get(&base).is_some_and(|memory| Arc::ptr_eq(memory, dead));
        is_same.then(|| table.buffers.remove(&base))
    });
    if gone.is_some() {
        log::warn(|| format!("cufile: the memory at {base:#x} was freed while it was registered"));
    }
}

pub(crate) fn add_buffer(base: u64, memory: LocalMemory) -> Result<(), Status> {
    with(|table| {
        if table.buffers.contains_key(&base) {
            return Err(memory);
        }
        table.buffers.insert(base, Arc::new(memory));
        Ok(())
    })
    // It is dropped here, without the lock.
    .map_err(|_memory| Status::AlreadyRegistered)
}

pub(crate) fn remove_buffer(base: u64) -> Result<(), Status> {
    let removed = with(|table| table.buffers.remove(&base)).ok_or(Status::NotRegistered)?;
    release(removed);
    Ok(())
}

/// The registered buffer with all of these bytes.
pub(crate) fn buffer(addr: u64, len: usize) -> Option<Buffer> {
    let end = addr.checked_add(len as u64)?;
    let found = with(|table| {
        let mut before = table.buffers.range(..=addr).rev();
        let (base, memory) = before.find(|(base, memory)| end <= *base + memory.len() as u64)?;
        Some(Buffer { base: *base, memory: memory.clone() })
    })?;
    if found.memory.is_live() {
        return Some(found);
    }
    evict(found.base, &found.memory);
    None
}
