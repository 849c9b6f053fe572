//! The folder that stands for the root, and the paths that are looked up below it.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use nobounce_dropin::log;

use crate::original::View;
use crate::{copies, original};

/// No path is longer for the kernel.
pub(crate) const PATH_MAX: usize = 4096;
/// The path of a folder of ours; a longer one is not taken.
const ROOT_MAX: usize = 512;

/// Redirected prefixes. A longer name (`/sys/class/infiniband_mad`) is another folder.
const PREFIXES: [&[u8]; 5] = [
    b"/sys/class/infiniband",
    b"/sys/class/infiniband_verbs",
    b"/dev/infiniband",
    b"/sys/devices/virtual/nobounce",
    b"/sys/kernel/mm/memory_peers",
];
/// The list of devices that rdma-core reads.
const VERBS_DEVICES: &[u8] = b"/sys/class/infiniband_verbs";
/// The first bytes of all of them, and of few other paths.
const STARTS: [&[u8]; 4] = [b"/sys/class/i", b"/dev/i", b"/sys/devices/virtual/n", b"/sys/kernel/mm/me"];

const UNKNOWN: u8 = 0;
const BUSY: u8 = 1;
const NONE: u8 = 2;
const READY: u8 = 3;
/// The environment names none: libibverbs makes one when a path needs it.
const TO_BE_MADE: u8 = 4;

/// How long a thread waits while another one makes the folder: naps of a millisecond.
const MOST_NAPS: u32 = 2_000;

/// The path of a folder, copied from the environment: programs overwrite it (setproctitle does).
pub(crate) struct Folder {
    variable: &'static CStr,
    /// The state without the variable.
    without: u8,
    state: AtomicU8,
    /// The process and the thread that make the folder, and look at the system's own folders
    /// meanwhile. 0 at the very start.
    maker: AtomicU64,
    /// The reason why there is no folder yet was logged.
    said: AtomicBool,
    bytes: UnsafeCell<[u8; ROOT_MAX]>,
    length: UnsafeCell<usize>,
}

// SAFETY: only the caller that moved `state` from UNKNOWN to BUSY writes, and others read only
// after READY.
unsafe impl Sync for Folder {}

/// The calling process and thread.
fn caller() -> u64 {
    // SAFETY: the calls cannot fail. glibc has gettid since 2.30 only.
    let (process, thread) = unsafe { (libc::getpid(), libc::syscall(libc::SYS_gettid)) };
    u64::from(process.cast_unsigned()) << 32 | thread.cast_unsigned()
}

/// What stands for the root.
static ROOT: Folder = Folder::new(c"NOBOUNCE_VIEW", TO_BE_MADE);
/// Where the processes of a run leave their reports.
pub(crate) static REPORT: Folder = Folder::new(c"NOBOUNCE_REPORT", NONE);

impl Folder {
    const fn new(variable: &'static CStr, without: u8) -> Self {
        let (bytes, length) = (UnsafeCell::new([0; ROOT_MAX]), UnsafeCell::new(0));
        let (state, maker) = (AtomicU8::new(UNKNOWN), AtomicU64::new(0));
        Self { variable, without, state, maker, said: AtomicBool::new(false), bytes, length }
    }

    /// Reads the environment, once.
    fn find(&self) {
        if self.state.compare_exchange(UNKNOWN, BUSY, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return;
        }
        // SAFETY: the name is a C string; the result of getenv stays valid while we copy, for this
        // runs before main.
        let named = unsafe { libc::getenv(self.variable.as_ptr()) };
        if named.is_null() {
            self.state.store(self.without, Ordering::Release);
        } else {
            // SAFETY: getenv returns a C string, and this caller alone is BUSY.
            unsafe { self.set(CStr::from_ptr(named)) };
        }
    }

    /// # Safety
    /// The caller moved `state` to BUSY.
    unsafe fn set(&self, path: &CStr) {
        let path = path.to_bytes();
        let mut state = NONE;
        if path.first() == Some(&b'/') && path.len() <= ROOT_MAX {
            // SAFETY: as the caller promises, no other thread writes, and none reads before READY.
            unsafe {
                (&mut *self.bytes.get())[..path.len()].copy_from_slice(path);
                *self.length.get() = path.len();
            }
            state = READY;
        } else if !path.is_empty() {
            let what = if path.len() > ROOT_MAX { "is too long" } else { "is no absolute path" };
            log::error(|| {
                format!(
                    "{}={}: it {what}, so programs do not find nb0 in /sys/class/infiniband; use a path of at most {ROOT_MAX} bytes",
                    self.variable.to_string_lossy(),
                    String::from_utf8_lossy(path)
                )
            });
        }
        self.state.store(state, Ordering::Release);
    }

    /// Has libibverbs make the folder, once. What that reads below /sys meanwhile is the system's.
    #[cold]
    fn make(&self) {
        let here = caller();
        if self.state.compare_exchange(TO_BE_MADE, BUSY, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait(here);
            return;
        }
        self.maker.store(here, Ordering::Relaxed);
        // SAFETY: the calling thread's errno, restored below.
        let errno = unsafe { *libc::__errno_location() };
        match original::view() {
            // SAFETY: this caller alone is BUSY.
            View::Made(path) => unsafe { self.set(path) },
            View::Absent => {
                if !self.said.swap(true, Ordering::Relaxed) {
                    log::error(|| {
                        "this program has loaded no libibverbs of nobounce, and none is beside libnobounce-paths.so: files of nb0 below \
                         /sys/class/infiniband are missing; add libibverbs.so.1 to LD_PRELOAD"
                            .to_owned()
                    });
                }
                // The next path asks again, and its maker is another one.
                self.maker.store(0, Ordering::Relaxed);
                self.state.store(TO_BE_MADE, Ordering::Release);
            }
            View::Refused => self.state.store(NONE, Ordering::Release),
        }
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
    }

    /// Until another thread has made the folder. A process that was forked meanwhile has no such
    /// thread, and libibverbs, which was interrupted in it, cannot be asked again.
    fn wait(&self, here: u64) {
        for _ in 0..MOST_NAPS {
            let maker = self.maker.load(Ordering::Relaxed);
            if self.state.load(Ordering::Acquire) != BUSY || maker == here {
                return;
            }
            if maker != 0 && maker >> 32 != here >> 32 {
                break;
            }
            // SAFETY: takes a number.
            unsafe { libc::usleep(1000) };
        }
        // Later calls do not wait. A maker that is only slow still stores READY.
        if self.state.compare_exchange(BUSY, NONE, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            log::error(|| {
                "the files of nb0 below /sys/class/infiniband are missing here: the program forked while they were made, or that took \
                 2 s; start it with 'nobounce run'"
                    .to_owned()
            });
        }
    }

    pub(crate) fn get(&self) -> Option<&[u8]> {
        if self.state.load(Ordering::Acquire) == UNKNOWN {
            self.find(); // a constructor that runs before ours
        }
        // SAFETY: READY means that both are written and never written again.
        (self.state.load(Ordering::Acquire) == READY)
            .then(|| unsafe { &(&*self.bytes.get())[..*self.length.get()] })
    }

    /// The same, made if there is none.
    fn get_or_make(&self) -> Option<&[u8]> {
        let found = self.get();
        if found.is_none() && matches!(self.state.load(Ordering::Acquire), TO_BE_MADE | BUSY) {
            self.make();
            return self.get();
        }
        found
    }
}

/// Reads the environment.
pub(crate) fn find() {
    ROOT.find();
    REPORT.find();
}

/// Buffer for a changed path, on the caller's stack.
pub(crate) struct Room(MaybeUninit<[u8; PATH_MAX]>);

impl Room {
    pub(crate) const fn new() -> Self {
        Self(MaybeUninit::uninit())
    }
}

/// The path to use: the caller's own, or the one below the view, made in `room`.
///
/// # Safety
/// `path` is null or a C string.
#[inline]
pub(crate) unsafe fn see(path: *const c_char, room: &mut Room) -> *const c_char {
    // Nearly every path ends here, after a few bytes.
    // SAFETY: as the caller promises.
    let ours = !path.is_null() && STARTS.iter().any(|start| unsafe { starts(path, start) });
    if !ours {
        return path;
    }
    // SAFETY: as the caller promises.
    unsafe { below_view(path, room) }
}

/// # Safety
/// `path` is a C string.
unsafe fn starts(path: *const c_char, wanted: &[u8]) -> bool {
    // SAFETY: the comparison stops at the first difference, the end of the string at the latest.
    wanted.iter().enumerate().all(|(at, byte)| unsafe { path.cast::<u8>().add(at).read() } == *byte)
}

/// Whether a path that ends with a NUL is one of the view's.
fn is_shown(bytes: &[u8]) -> bool {
    let rests = PREFIXES.iter().filter_map(|prefix| bytes.strip_prefix(*prefix));
    rests.into_iter().any(|rest| matches!(rest.first(), Some(b'/' | 0)))
}

/// What a call returns.
pub(crate) trait Answer {
    /// The answer without the folder that stands for the root.
    ///
    /// # Safety
    /// A path is null, or a C string that may be written.
    unsafe fn shown(self) -> Self;
}

/// A resolved path.
impl Answer for *mut c_char {
    unsafe fn shown(self) -> Self {
        if self.is_null() {
            return self;
        }
        // SAFETY: as the caller promises.
        let bytes = unsafe { CStr::from_ptr(self) }.to_bytes_with_nul();
        let below = ROOT.get().and_then(|root| bytes.strip_prefix(root)).filter(|rest| is_shown(rest));
        if let Some((start, len)) = below.map(|rest| (rest.as_ptr(), rest.len())) {
            // SAFETY: both are in the same string, and the second is longer by the root.
            unsafe { self.cast::<u8>().copy_from(start, len) };
        }
        self
    }
}

macro_rules! no_path {
    ($($kind:ty)*) => { $(impl Answer for $kind {
        unsafe fn shown(self) -> Self {
            self
        }
    })* };
}
no_path!(c_int isize *mut c_void);

/// # Safety
/// `path` is a C string.
#[cold]
unsafe fn below_view(path: *const c_char, room: &mut Room) -> *const c_char {
    // SAFETY: as the caller promises.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    let Some(root) = is_shown(bytes).then(|| ROOT.get_or_make()).flatten() else { return path };
    if let Some(b"\0" | b"/\0") = bytes.strip_prefix(VERBS_DEVICES) {
        copies::note();
    }
    let length = root.len() + bytes.len();
    if length > PATH_MAX {
        return path; // the kernel will say ENAMETOOLONG, or that there is no such file
    }
    let start: *mut u8 = room.0.as_mut_ptr().cast();
    // SAFETY: both parts fit into the buffer, as checked, and the buffer has no other user.
    unsafe {
        start.copy_from_nonoverlapping(root.as_ptr(), root.len());
        start.add(root.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
    }
    start.cast()
}
