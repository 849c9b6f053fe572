//! Batches: reads and writes that threads carry out.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nobounce_memory::signals::BlockedSignals;

use crate::abi::{CANCELED, COMPLETE, Error, FAILED, IoEvent, IoParams, READ, Status, WRITE};
use crate::calls::{put, status};
use crate::entry::caught;
use crate::log;
use crate::report;
use crate::transfer::{self, Direction, Failure, Request};

/// Threads for all batches of the process: as many as keep a disk busy.
const THREADS: usize = 4;
/// Most entries of a batch.
const MAX_ENTRIES: usize = 4096;

#[derive(Debug, Default)]
struct State {
    /// Submitted, and their events are not taken yet.
    open: usize,
    /// The number of the next entry, and of the first that is not cancelled.
    next: u64,
    cancelled_below: u64,
    is_destroyed: bool,
    ended: VecDeque<Ended>,
}

#[derive(Clone, Copy, Debug)]
struct Ended(IoEvent);

// SAFETY: the cookie is the program's number, and is not followed.
unsafe impl Send for Ended {}

#[derive(Debug)]
struct Batch {
    most: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Batch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Job {
    batch: Arc<Batch>,
    request: Request,
    cookie: usize,
    number: u64,
}

impl Job {
    fn run(self) {
        let is_cancelled = self.number < self.batch.lock().cancelled_below;
        if is_cancelled {
            return self.end(CANCELED, 0);
        }
        // An entry that never ended would be waited for without end.
        let result = caught(|| Ok(transfer::run(&self.request)));
        match result.unwrap_or(Err(Failure::Status(Status::Internal))) {
            Ok(moved) => self.end(COMPLETE, moved),
            Err(failure) => self.end(FAILED, failure.stored().cast_unsigned()),
        }
    }

    fn end(&self, status: c_int, ret: usize) {
        let cookie = ptr::without_provenance_mut(self.cookie);
        self.batch.lock().ended.push_back(Ended(IoEvent { cookie, status, ret }));
        self.batch.changed.notify_all();
    }
}

/// The threads' queue. They live as long as the process; a child of `fork` makes its own.
fn queue() -> Result<mpsc::Sender<Job>, Status> {
    static QUEUE: Mutex<Option<(u32, mpsc::Sender<Job>)>> = Mutex::new(None);
    let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((_, sender)) = queue.as_ref().filter(|(of, _)| *of == process) {
        return Ok(sender.clone());
    }
    let (sender, jobs) = mpsc::channel::<Job>();
    let jobs = Arc::new(Mutex::new(jobs));
    for _ in 0..THREADS {
        let jobs = jobs.clone();
        let next = move || jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let work = move || {
            while let Ok(job) = next() {
                job.run();
            }
        };
        // Handlers of the program run on its own threads.
        let _blocked = BlockedSignals::new();
        thread::Builder::new().name("nb-cufile".to_owned()).spawn(work).map_err(|error| {
            log::warn(|| format!("cufile: no thread for batches: {error}"));
            Status::NoMemory
        })?;
    }
    std::mem::forget(queue.replace((process, sender.clone())));
    Ok(sender)
}

/// Batches by the number that C knows them by, which is their place and one. Places are not used
/// again: a stale number finds nothing.
fn with<T>(what: impl FnOnce(&mut Vec<Option<Arc<Batch>>>) -> T) -> T {
    static BATCHES: Mutex<(u32, Vec<Option<Arc<Batch>>>)> = Mutex::new((0, Vec::new()));
    let mut batches = BATCHES.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if batches.0 != process {
        // No thread of a child of `fork` ends the parent's.
        batches.1.iter_mut().for_each(|place| std::mem::forget(place.take()));
        batches.0 = process;
    }
    what(&mut batches.1)
}

fn find(id: *mut c_void) -> Result<Arc<Batch>, Status> {
    let found = with(|batches| id.addr().checked_sub(1).and_then(|at| batches.get(at)?.clone()));
    found.ok_or(Status::InvalidValue)
}

/// Makes a batch of at most `count` entries.
///
/// # Safety
/// `id` is null or a place for a pointer.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileBatchIOSetUp(id: *mut *mut c_void, count: c_uint) -> Error {
    status(|| {
        report::at_exit();
        let most = usize::try_from(count).unwrap_or(usize::MAX);
        if most == 0 || most > MAX_ENTRIES || id.is_null() {
            return Err(Status::InvalidValue);
        }
        let batch = Arc::new(Batch { most, state: Mutex::default(), changed: Condvar::new() });
        let number = with(|batches| {
            batches.push(Some(batch));
            batches.len()
        });
        // SAFETY: the caller's promise.
        unsafe { put(id, ptr::without_provenance_mut(number)) }
    })
}

/// Submits entries; all or none.
///
/// # Safety
/// `entries` has `count` entries.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileBatchIOSubmit(
    id: *mut c_void,
    count: c_uint,
    entries: *const IoParams,
    _flags: c_uint,
) -> Error {
    status(|| {
        let batch = find(id)?;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if entries.is_null() {
            return Err(Status::InvalidValue);
        }
        if count > batch.most {
            return Err(Status::BatchFull);
        }
        // SAFETY: the caller's promise.
        let entries = (0..count).map(|number| unsafe { entries.add(number).read_unaligned() });
        let mut jobs: Vec<Job> = entries.map(|entry| job(&batch, &entry)).collect::<Result<_, _>>()?;
        let queue = queue()?;
        let mut state = batch.lock();
        if state.is_destroyed {
            return Err(Status::InvalidValue);
        }
        if state.open + count > batch.most {
            return Err(Status::BatchFull);
        }
        state.open += count;
        for job in &mut jobs {
            job.number = state.next;
            state.next += 1;
        }
        drop(state);
        for job in jobs {
            if let Err(mpsc::SendError(job)) = queue.send(job) {
                job.end(FAILED, Failure::Status(Status::Internal).stored().cast_unsigned());
            }
        }
        Ok(())
    })
}

fn job(batch: &Arc<Batch>, entry: &IoParams) -> Result<Job, Status> {
    let &IoParams { base, file_offset, buffer_offset, size, handle, opcode, cookie, .. } = entry;
    let direction = match opcode {
        READ => Direction::Read,
        WRITE => Direction::Write,
        _ => return Err(Status::InvalidValue),
    };
    let request = Request { direction, handle, base, size, file_offset, buffer_offset };
    Ok(Job { batch: batch.clone(), request, cookie: cookie.addr(), number: 0 })
}

/// Takes the events of entries that have ended: waits for `least` of them, or until the time is
/// over.
///
/// # Safety
/// `count` points to the room in `events`; `timeout` is null or a time.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFileBatchIOGetStatus(
    id: *mut c_void,
    least: c_uint,
    count: *mut c_uint,
    events: *mut IoEvent,
    timeout: *const libc::timespec,
) -> Error {
    status(|| {
        let batch = find(id)?;
        if count.is_null() || events.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: the caller's promise.
        let (room, timeout) = unsafe { (count.read_unaligned(), timeout.as_ref()) };
        let deadline = timeout.map(|time| Instant::now() + duration(time));
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        let mut state = batch.lock();
        let least = usize::try_from(least).unwrap_or(usize::MAX).min(room);
        while state.ended.len() < least.min(state.open) {
            state = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                None => batch.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => break,
                Some(left) => {
                    batch.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        let taken = state.ended.len().min(room);
        for (number, Ended(event)) in state.ended.drain(..taken).enumerate() {
            // SAFETY: the caller's promise: there is room for them.
            unsafe { events.add(number).write_unaligned(event) };
        }
        state.open -= taken;
        // SAFETY: the caller's promise.
        unsafe { put(count, c_uint::try_from(taken).unwrap_or(c_uint::MAX)) }
    })
}

fn duration(time: &libc::timespec) -> Duration {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0).min(1 << 32);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0).min(999_999_999))
}

/// Cancels what has not begun.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileBatchIOCancel(id: *mut c_void) -> Error {
    status(|| {
        let batch = find(id)?;
        let mut state = batch.lock();
        state.cancelled_below = state.next;
        Ok(())
    })
}

/// Ends a batch: what has not begun is cancelled, the rest is waited for.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFileBatchIODestroy(id: *mut c_void) {
    let _ = status(|| {
        let batch = find(id)?;
        with(|batches| id.addr().checked_sub(1).and_then(|at| batches.get_mut(at).and_then(Option::take)));
        let mut state = batch.lock();
        (state.cancelled_below, state.is_destroyed) = (u64::MAX, true);
        while state.ended.len() < state.open {
            state = batch.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    });
}
