//! Detects that registered host memory was unmapped, by events of userfaultfd.
//!
//! An adapter pins the pages of a region. Here the CPU writes to addresses, and whatever is mapped
//! there later would be written through the old key. The kernel reports the unmapping of a watched
//! range, and the thread that unmaps waits until the report was read. Pages are neither protected
//! nor faulted in: a range is registered for write protection, and nothing is ever protected.
//!
//! No watch is possible for file mappings, without permission (seccomp in containers), and beyond
//! [`MAX_RANGES`]: every watched range may split a mapping, of which a process has a limited
//! number.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use crate::page_size;
use crate::signals::BlockedSignals;

/// Maximum number of ranges that are watched at a time.
pub const MAX_RANGES: usize = 4096;
/// Variable that switches it off.
const VARIABLE: &str = "NOBOUNCE_WATCH_UNMAP";
/// Interval between attempts to take the lock, while further events are read.
const RETRY: Duration = Duration::from_micros(50);

const UFFD_USER_MODE_ONLY: i32 = 1;
const API: u64 = 0xaa;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const FEATURE_EVENT_REMAP: u64 = 1 << 2;
const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const MODE_WP: u64 = 2;
const EVENT_REMAP: u8 = 0x14;
const EVENT_UNMAP: u8 = 0x16;
const IOCTL_API: libc::c_ulong = 0xc018_aa3f;
const IOCTL_REGISTER: libc::c_ulong = 0xc020_aa00;
const IOCTL_UNREGISTER: libc::c_ulong = 0x8010_aa01;

#[repr(C)]
struct ApiRequest {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterRequest {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// An event: its kind in the first byte of `head`; then, of an unmapping, begin and end, and of a
/// move, origin, target and length.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Message {
    head: u64,
    words: [u64; 3],
}

impl Message {
    /// The addresses that are no longer what they were.
    fn range(&self) -> Option<(u64, u64)> {
        let [first, second, third] = self.words;
        match self.head.to_ne_bytes()[0] {
            EVENT_UNMAP => Some((first, second)),
            EVENT_REMAP => Some((first, first.saturating_add(third))),
            _ => None,
        }
    }

    /// Where a moved range is now, and its length.
    fn moved(&self) -> Option<[u64; 2]> {
        (self.head.to_ne_bytes()[0] == EVENT_REMAP).then_some([self.words[1], self.words[2]])
    }
}

/// Ranges in a fixed place: the thread that reads events must not allocate. The allocator may hold
/// its lock while it waits for that thread, with memory that it unmaps.
#[derive(Debug)]
struct Ranges<const N: usize> {
    some: [(u64, u64); N],
    count: usize,
    /// There were more: all addresses count.
    all: bool,
}

impl<const N: usize> Ranges<N> {
    const fn new() -> Self {
        Self { some: [(0, 0); N], count: 0, all: false }
    }

    fn push(&mut self, (start, end): (u64, u64)) {
        let known = self.iter().any(|known| known.0 <= start && end <= known.1);
        match self.some.get_mut(self.count) {
            _ if known => {}
            Some(place) => {
                *place = (start, end);
                self.count += 1;
            }
            None => self.all = true,
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        let all = self.all.then_some((0, u64::MAX));
        self.some[..self.count].iter().copied().chain(all)
    }

    fn clear(&mut self) {
        (self.count, self.all) = (0, false);
    }
}

/// What became of a watched range.
#[derive(Debug)]
struct Fate {
    /// Something of it is gone.
    any: AtomicBool,
    /// The parts that are.
    gone: Mutex<Ranges<MAX_PARTS>>,
}

/// Maximum number of unmapped parts recorded per range; beyond, all of the range is gone.
const MAX_PARTS: usize = 16;
/// Events that wait for the table; beyond, everything watched is gone.
const MAX_PENDING: usize = 256;

impl Fate {
    const fn new() -> Self {
        Self { any: AtomicBool::new(false), gone: Mutex::new(Ranges::new()) }
    }

    fn add(&self, part: (u64, u64)) {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner).push(part);
        self.any.store(true, Ordering::Release);
    }
}

#[derive(Debug)]
struct Entry {
    range: Range<u64>,
    fate: Arc<Fate>,
}

#[derive(Debug)]
struct Watcher {
    fd: OwnedFd,
    process: u32,
    entries: Mutex<Vec<Entry>>,
    /// Events that were read and not applied yet. The lock is held while they are read: a range
    /// that is registered after an event does not get it.
    pending: Mutex<Ranges<MAX_PENDING>>,
}

/// Why memory is not watched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// It is switched off.
    #[error("{VARIABLE}=off")]
    Off,
    /// The kernel or a container policy refuses userfaultfd.
    #[error("userfaultfd: {0}")]
    Refused(String),
    /// The range cannot be watched, for instance because it maps a file.
    #[error("userfaultfd cannot watch this mapping: {0}")]
    Mapping(String),
    /// Too many ranges are watched.
    #[error("{MAX_RANGES} ranges are watched already")]
    TooMany,
}

/// A range that is watched until this is dropped.
#[derive(Debug)]
pub struct WatchedRange {
    watcher: &'static Watcher,
    range: Range<u64>,
    fate: Arc<Fate>,
}

impl WatchedRange {
    /// Whether some of it was unmapped or moved since.
    #[inline]
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.fate.any.load(Ordering::Acquire)
    }

    /// The first of these bytes that was unmapped or moved since.
    #[cold]
    #[must_use]
    pub fn first_gone(&self, addr: u64, len: usize) -> Option<u64> {
        let end = addr.saturating_add(len as u64);
        let gone = self.fate.gone.lock().unwrap_or_else(PoisonError::into_inner);
        gone.iter().filter(|part| part.0 < end && addr < part.1).map(|part| part.0.max(addr)).min()
    }
}

/// Watches `len` bytes at `addr`.
///
/// # Errors
/// They are not watched: why.
pub fn watch(addr: u64, len: usize) -> Result<WatchedRange, WatchError> {
    /// The watcher of this process: one of a parent would watch the parent's memory.
    static OF_PROCESS: Mutex<Option<(u32, Result<&'static Watcher, WatchError>)>> = Mutex::new(None);
    let mut of_process = OF_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let now = std::process::id();
    let (_, watcher) = match &mut *of_process {
        Some(known) if known.0 == now => known,
        other => other.insert((now, Watcher::start())),
    };
    let watcher = watcher.clone()?;
    drop(of_process);
    watcher.watch(addr, len)
}

impl Watcher {
    /// Opens one, which stays, and starts the thread that reads its events.
    fn start() -> Result<&'static Self, WatchError> {
        let watcher: &'static Self = Box::leak(Box::new(Self::open()?));
        let thread = std::thread::Builder::new().name("nb-unmap".to_owned());
        // A handler of the program's that unmaps memory would wait for the thread it runs on.
        let _blocked = BlockedSignals::new();
        thread
            .spawn(|| watcher.read_events())
            .map_err(|error| WatchError::Refused(format!("no thread to read its events: {error}")))?;
        Ok(watcher)
    }

    fn open() -> Result<Self, WatchError> {
        if std::env::var(VARIABLE).is_ok_and(|value| value == "off") {
            return Err(WatchError::Off);
        }
        let refused = || WatchError::Refused(io::Error::last_os_error().to_string());
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
        // SAFETY: takes a number; the result is checked before it is owned.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(refused)?;
        // SAFETY: just opened, with no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let features = FEATURE_PAGEFAULT_FLAG_WP
            | FEATURE_EVENT_REMAP
            | FEATURE_EVENT_UNMAP
            | FEATURE_WP_HUGETLBFS_SHMEM;
        let mut request = ApiRequest { api: API, features, ioctls: 0 };
        // SAFETY: a live structure of the layout that this request has.
        if unsafe { libc::ioctl(fd.as_raw_fd(), IOCTL_API, &raw mut request) } < 0 {
            return Err(refused());
        }
        let (entries, pending) = (Mutex::default(), Mutex::new(Ranges::new()));
        Ok(Self { fd, process: std::process::id(), entries, pending })
    }

    fn watch(&'static self, addr: u64, len: usize) -> Result<WatchedRange, WatchError> {
        let page = page_size() as u64;
        let end = addr.saturating_add(len as u64).next_multiple_of(page);
        let range = addr - addr % page..end;
        let fate = Arc::new(Fate::new());
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= MAX_RANGES {
            return Err(WatchError::TooMany);
        }
        let (start, len) = (range.start, range.end - range.start);
        let mut request = RegisterRequest { start, len, mode: MODE_WP, ioctls: 0 };
        // SAFETY: a live structure of the layout that this request has. Memory is not changed.
        if unsafe { libc::ioctl(self.fd.as_raw_fd(), IOCTL_REGISTER, &raw mut request) } < 0 {
            return Err(WatchError::Mapping(io::Error::last_os_error().to_string()));
        }
        // What was unmapped before is not the new range.
        self.apply(&entries);
        entries.push(Entry { range: range.clone(), fate: fate.clone() });
        Ok(WatchedRange { watcher: self, range, fate })
    }

    /// Marks what the events that were read have taken away.
    fn apply(&self, entries: &[Entry]) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        for range in pending.iter() {
            let overlaps = |entry: &&Entry| entry.range.start < range.1 && range.0 < entry.range.end;
            entries.iter().filter(overlaps).for_each(|entry| entry.fate.add(range));
        }
        pending.clear();
    }

    fn unregister(&self, mut range: [u64; 2]) {
        // SAFETY: a live structure of the layout that this request has. Memory is not changed.
        unsafe { libc::ioctl(self.fd.as_raw_fd(), IOCTL_UNREGISTER, &raw mut range) };
    }

    /// Reads the events there are.
    fn read(&self) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut messages = [Message::default(); 16];
        let room = size_of_val(&messages);
        // SAFETY: room for so many bytes, any of which are valid messages.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), room) };
        let count = usize::try_from(got).unwrap_or(0) / size_of::<Message>();
        for message in &messages[..count] {
            if let Some(range) = message.range() {
                pending.push(range);
            }
            if let Some(moved) = message.moved() {
                self.unregister(moved);
            }
        }
    }

    /// Reads events until the process exits. The thread that unmaps memory waits for the read,
    /// maybe with our lock held (an allocator unmaps what was freed): while the table is in use,
    /// further events are read.
    fn read_events(&self) {
        let mut applied = true;
        loop {
            let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            if applied {
                // SAFETY: one live structure.
                unsafe { libc::poll(&raw mut poll, 1, -1) };
            }
            self.read();
            applied = match self.entries.try_lock() {
                Ok(entries) => {
                    self.apply(&entries);
                    true
                }
                Err(TryLockError::Poisoned(entries)) => {
                    self.apply(&entries.into_inner());
                    true
                }
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(RETRY);
                    false
                }
            };
        }
    }
}

/// The parts of a range that no entry covers.
fn uncovered(range: &Range<u64>, entries: &[Entry]) -> Vec<Range<u64>> {
    let mut rest = vec![range.clone()];
    for other in entries.iter().map(|entry| &entry.range) {
        rest = rest
            .into_iter()
            .flat_map(|part| {
                [
                    part.start..part.end.min(other.start.max(part.start)),
                    part.start.max(other.end.min(part.end))..part.end,
                ]
            })
            .filter(|part| part.start < part.end)
            .collect();
    }
    rest
}

impl Drop for WatchedRange {
    fn drop(&mut self) {
        // In a forked child the memory is another's, and the lock may never be released.
        if self.watcher.process != std::process::id() {
            return;
        }
        let mut entries = self.watcher.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = entries.iter().position(|entry| Arc::ptr_eq(&entry.fate, &self.fate)) {
            entries.swap_remove(at);
        }
        for part in uncovered(&self.range, &entries) {
            self.watcher.unregister([part.start, part.end - part.start]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::time::Instant;

    use super::*;

    const LEN: usize = 64 << 10;

    fn map(at: *mut u8, flags: i32) -> *mut u8 {
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_ANONYMOUS);
        // SAFETY: fresh memory, or memory of this test.
        let mapped = unsafe { libc::mmap(at.cast(), LEN, rights, flags, -1, 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        mapped.cast()
    }

    fn watched(at: *mut u8) -> Option<WatchedRange> {
        match watch(at.addr() as u64 + 100, LEN - 200) {
            Ok(watched) => Some(watched),
            Err(error @ WatchError::Refused(_)) => {
                println!("waived ({error})");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The event was read when the call returned; marking follows at once.
    fn becomes_gone(watched: &WatchedRange) {
        let start = Instant::now();
        while !watched.is_gone() {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
    }

    #[test]
    fn memory_that_is_unmapped_replaced_or_moved_is_gone() {
        for flags in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
            for how in 0..3 {
                let at = map(ptr::null_mut(), flags);
                let (Some(first), Some(second)) = (watched(at), watched(at)) else { return };
                // SAFETY: memory of this test.
                unsafe { at.add(5000).write_volatile(7) };
                assert!(!first.is_gone());
                // SAFETY: memory of this test, not used afterwards.
                unsafe {
                    match how {
                        0 => assert_eq!(libc::munmap(at.cast(), LEN), 0),
                        1 => assert_eq!(map(at, flags | libc::MAP_FIXED), at),
                        _ => {
                            let to = libc::mremap(at.cast(), LEN, 4 * LEN, libc::MREMAP_MAYMOVE);
                            assert_ne!(to, libc::MAP_FAILED);
                            if to == at.cast() {
                                continue; // it grew in place
                            }
                        }
                    }
                }
                becomes_gone(&first);
                becomes_gone(&second);
                drop(first);
                drop(second);
            }
        }
    }

    #[test]
    fn memory_beside_it_and_after_it_is_let_go() {
        let at = map(ptr::null_mut(), libc::MAP_PRIVATE);
        let half = (LEN / 2) as u64;
        let Some(whole) = watched(at) else { return };
        drop(whole);
        let lower = watch(at.addr() as u64, LEN / 2).unwrap();
        // SAFETY: memory of this test.
        assert_eq!(unsafe { libc::munmap(at.add(LEN / 2).cast(), LEN / 2) }, 0);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!lower.is_gone(), "{half} bytes behind it were unmapped");
        // SAFETY: memory of this test.
        assert_eq!(unsafe { libc::munmap(at.add(LEN / 4).cast(), LEN / 4) }, 0);
        becomes_gone(&lower);
        let (start, quarter) = (at.addr() as u64, LEN / 4);
        assert_eq!(lower.first_gone(start, quarter), None);
        assert_eq!(lower.first_gone(start, quarter + 1), Some(start + quarter as u64));
    }

    /// What was registered after an event is not what the event is about.
    #[test]
    fn memory_registered_after_an_event_lives() {
        for _ in 0..200 {
            let at = map(ptr::null_mut(), libc::MAP_PRIVATE);
            let Some(before) = watched(at) else { return };
            assert_eq!(map(at, libc::MAP_PRIVATE | libc::MAP_FIXED), at);
            let after = watched(at).unwrap();
            becomes_gone(&before);
            assert!(!after.is_gone());
            drop((before, after));
            // SAFETY: memory of this test.
            unsafe { libc::munmap(at.cast(), LEN) };
        }
    }

    #[test]
    fn what_others_cover_stays() {
        let fate = || Arc::new(Fate::new());
        let entries: Vec<_> = [2..4, 6..7, 9..20].map(|range| Entry { range, fate: fate() }).into();
        assert_eq!(uncovered(&(0..10), &entries), [0..2, 4..6, 7..9]);
        assert_eq!(uncovered(&(10..12), &entries), Vec::<Range<u64>>::new());
        assert_eq!(uncovered(&(0..2), &entries), vec![0..2]);
    }

    #[test]
    fn a_file_is_not_watched() {
        let file = crate::shared_file::create(4096).unwrap();
        let path = std::env::temp_dir().join(format!("watch-{}", std::process::id()));
        drop(file);
        std::fs::write(&path, vec![0; 4096]).unwrap();
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping.
        let at = unsafe { libc::mmap(ptr::null_mut(), 4096, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        std::fs::remove_file(path).unwrap();
        let outcome = watch(at.addr() as u64, 4096);
        let is_tmpfs = outcome.is_ok();
        assert!(is_tmpfs || matches!(outcome, Err(WatchError::Mapping(_) | WatchError::Refused(_))));
    }
}
