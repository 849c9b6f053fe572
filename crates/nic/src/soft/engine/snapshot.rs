//! Snapshots of a device's counters that survive a killed process. They live in a memory-mapped
//! file, so that a snapshot costs no system call. The launcher reads it when there is no report
//! (docs/reference/json.md).

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_protocol::timing::{MILLISECOND, Nanos};

use crate::links::now_ns;
use crate::process::private_file;
use crate::soft::engine::Engine;
use crate::soft::engine::timer::Timer;
use crate::soft::engine::totals::{self, Totals};

/// Bytes of each of the two slots in the file. They are written alternately, so that one is always
/// complete.
const SNAPSHOT_PLACE: usize = 16 << 10;
/// Header before the text: the snapshot's sequence number, from 1 on, and the text's length. 8
/// bytes each, in native byte order.
const SNAPSHOT_HEAD: usize = 16;
/// Interval to the next snapshot: with activity since the last one, and without.
const BUSY: Nanos = 250 * MILLISECOND;
const QUIET: Nanos = 1000 * MILLISECOND;

/// The snapshot file of one device.
#[derive(Debug)]
pub(crate) struct Snapshots {
    at: NonNull<u8>,
    count: u64,
    due: Nanos,
    packets: u64,
}

// SAFETY: the mapping is this object's alone, and used through `&mut`.
unsafe impl Send for Snapshots {}

impl Snapshots {
    /// Creates the file.
    pub(crate) fn create(path: &Path, now: Nanos) -> io::Result<Self> {
        let file = private_file::options().read(true).create_new(true).open(path)?;
        let len = 2 * SNAPSHOT_PLACE;
        allocate(&file, len)?;
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping of a file of this length, at an address that the kernel chooses.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, rights, flags, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, count: 0, due: now + BUSY, packets: 0 })
    }

    /// When the next snapshot is due.
    pub(crate) fn due(&self) -> Nanos {
        self.due
    }

    /// Whether to write a snapshot now: one is due, and `packets`, a number that grows with any
    /// activity, has changed.
    pub(crate) fn is_wanted(&mut self, now: Nanos, packets: u64) -> bool {
        if now < self.due {
            return false;
        }
        let changed = packets != self.packets;
        self.due = now + if changed { BUSY } else { QUIET };
        self.packets = packets;
        changed
    }

    /// Writes a snapshot; a text that is too long is dropped.
    pub(crate) fn keep(&mut self, text: &str) {
        if text.len() > SNAPSHOT_PLACE - SNAPSHOT_HEAD {
            return;
        }
        self.count += 1;
        let place = if self.count.is_multiple_of(2) { SNAPSHOT_PLACE } else { 0 };
        // SAFETY: both slots lie in the mapping, the text fits behind the header of one, and there
        // are no references into the mapping.
        unsafe {
            let head = self.at.as_ptr().add(place).cast::<u64>();
            // Invalidate the slot while it is written: the process may be killed at any moment.
            head.write_volatile(0);
            fence(Ordering::SeqCst);
            head.add(1).write_volatile(text.len() as u64);
            ptr::copy_nonoverlapping(text.as_ptr(), head.cast::<u8>().add(SNAPSHOT_HEAD), text.len());
            fence(Ordering::SeqCst);
            head.write_volatile(self.count);
        }
    }
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        // SAFETY: the mapping of `create`, which is not used any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), 2 * SNAPSHOT_PLACE) };
    }
}

/// Gives the file its length and its blocks. A store into a sparse file on a full file system would
/// end the process by SIGBUS.
fn allocate(file: &File, len: usize) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: the call takes a descriptor and two numbers.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Takes periodic snapshots of one engine's totals. The first engine writes the file, including the
/// latest totals of the others.
#[derive(Clone, Debug)]
pub(crate) struct Keeper {
    number: usize,
    due: Nanos,
    /// For further engines: the packet count at their last update.
    packets: u64,
    kept: Arc<Mutex<SharedSnapshots>>,
}

#[derive(Debug)]
struct SharedSnapshots {
    file: Snapshots,
    /// By the number of the engine.
    others: HashMap<usize, Totals>,
}

impl Keeper {
    /// The keeper of the first engine.
    pub(crate) fn new(file: Snapshots) -> Self {
        let due = file.due();
        let kept = SharedSnapshots { file, others: HashMap::new() };
        Self { number: 0, due, packets: 0, kept: Arc::new(Mutex::new(kept)) }
    }

    /// The keeper of another engine.
    pub(crate) fn of(&self, number: usize) -> Self {
        Self { number, due: now_ns() + BUSY, packets: 0, kept: self.kept.clone() }
    }

    fn keep(&mut self, now: Nanos, local: IpAddr, mut totals: Totals) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if self.number > 0 {
            let before = std::mem::replace(&mut self.packets, totals.packets());
            self.due = now + if self.packets == before { QUIET } else { BUSY };
            kept.others.insert(self.number, totals);
            return;
        }
        kept.others.values().for_each(|other| totals.add(other));
        if kept.file.is_wanted(now, totals.packets()) {
            kept.file.keep(&totals::so_far(local, &totals));
        }
        self.due = kept.file.due();
    }
}

impl Engine {
    /// Starts periodic snapshots.
    pub(crate) fn keep_snapshots(&mut self, keeper: Option<Keeper>) {
        if let Some(keeper) = &keeper {
            self.core.scheduler.timers.push(Reverse((keeper.due, Timer::Snapshot)));
        }
        self.keeper = keeper;
    }

    /// Takes a snapshot if one is due.
    pub(crate) fn keep_snapshot(&mut self, now: Nanos) {
        let Some(mut keeper) = self.keeper.take() else { return };
        if keeper.due <= now {
            keeper.keep(now, self.link.local(), Totals::of(self));
            self.core.scheduler.timers.push(Reverse((keeper.due, Timer::Snapshot)));
        }
        self.keeper = Some(keeper);
    }
}

/// The text of the latest snapshot in the bytes of such a file.
pub fn last_snapshot(file: &[u8]) -> Option<&[u8]> {
    let word = |place: &[u8], at: usize| Some(u64::from_ne_bytes(place.get(at..at + 8)?.try_into().ok()?));
    let kept = file.chunks(SNAPSHOT_PLACE).filter_map(|place| {
        let (count, len) = (word(place, 0)?, usize::try_from(word(place, 8)?).ok()?);
        let text = place.get(SNAPSHOT_HEAD..)?.get(..len)?;
        (count > 0).then_some((count, text))
    });
    kept.max_by_key(|(count, _)| *count).map(|(_, text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_one_is_found() {
        let path = std::env::temp_dir().join(format!("snapshots-{}", std::process::id()));
        let mut snapshots = Snapshots::create(&path, 5).unwrap();
        assert_eq!(last_snapshot(&std::fs::read(&path).unwrap()), None);
        for text in ["one", "two", "three and more", "4"] {
            snapshots.keep(text);
            assert_eq!(last_snapshot(&std::fs::read(&path).unwrap()), Some(text.as_bytes()));
        }
        snapshots.keep(&"x".repeat(SNAPSHOT_PLACE));
        let mut file = std::fs::read(&path).unwrap();
        assert_eq!(last_snapshot(&file), Some("4".as_bytes()));
        // The process was killed while it wrote the fifth.
        file[SNAPSHOT_PLACE..SNAPSHOT_PLACE + 8].fill(0);
        assert_eq!(last_snapshot(&file), Some("three and more".as_bytes()));
        assert!(!snapshots.is_wanted(5, 1) && snapshots.is_wanted(5 + BUSY, 1));
        assert!(!snapshots.is_wanted(6 + 2 * BUSY, 1) && snapshots.is_wanted(7 + 2 * BUSY + QUIET, 2));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_other_engines_said_last_is_in_it() {
        let path = std::env::temp_dir().join(format!("snapshots-of-two-{}", std::process::id()));
        let mut first = Keeper::new(Snapshots::create(&path, 5).unwrap());
        let mut second = first.of(1);
        let sent = |packets| {
            let mut totals = Totals::default();
            totals.counters.sent_pkts = packets;
            totals
        };
        let local = "127.0.0.1".parse().unwrap();
        for (at, packets) in [(1, 40), (2, 50)] {
            second.keep(at * QUIET, local, sent(packets));
            first.keep(at * QUIET, local, sent(3));
        }
        let file = std::fs::read(&path).unwrap();
        let text = String::from_utf8_lossy(last_snapshot(&file).unwrap()).into_owned();
        assert!(text.contains("\"packets_sent\": 53,"), "{text}");
        assert_eq!(second.due, 2 * QUIET + BUSY);
        second.keep(3 * QUIET, local, sent(50));
        assert_eq!(second.due, 4 * QUIET, "nothing happened there");
        std::fs::remove_file(&path).unwrap();
    }
}
