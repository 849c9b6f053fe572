//! Snapshots of a device's counters, for readers of the live folder, and for the launcher where a
//! process was killed. They live in a memory-mapped file, so that a snapshot costs no system call
//! (docs/reference/json.md).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_protocol::timing::Nanos;

use crate::process::private_file;
use crate::soft::engine::Engine;
use crate::soft::engine::scheduler::SnapshotTimer;
use crate::soft::engine::totals::{self, Totals};

/// Bytes of each of the two slots in the file. They are written alternately, so that one is always
/// complete.
const SNAPSHOT_PLACE: usize = 16 << 10;
/// Header before the text: the snapshot's sequence number, from 1 on, and the text's length. 8
/// bytes each, in native byte order.
const SNAPSHOT_HEAD: usize = 16;
/// The snapshot file of one device.
#[derive(Debug)]
pub(crate) struct Snapshots {
    at: NonNull<u8>,
    count: u64,
}

// SAFETY: the mapping is this object's alone, and used through `&mut`.
unsafe impl Send for Snapshots {}

impl Snapshots {
    /// Creates the file.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = private_file::options().read(true).create_new(true).open(path)?;
        Self::map(&file).inspect_err(|_| {
            let _ = std::fs::remove_file(path); // the first error is the one to tell
        })
    }

    fn map(file: &File) -> io::Result<Self> {
        let len = 2 * SNAPSHOT_PLACE;
        allocate(file, len)?;
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping of a file of this length, at an address that the kernel chooses.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, rights, flags, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, count: 0 })
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

/// Takes snapshots of one engine's totals, and writes them with the latest totals of the other
/// engines.
#[derive(Clone, Debug)]
pub(crate) struct Keeper {
    number: usize,
    kept: Arc<Mutex<SharedSnapshots>>,
}

#[derive(Debug)]
struct SharedSnapshots {
    files: Vec<Snapshots>,
    /// The fields known at open.
    head: String,
    /// By the number of the engine.
    totals: HashMap<usize, Totals>,
}

impl Keeper {
    /// The keeper of the first engine.
    pub(crate) fn new(files: Vec<Snapshots>, head: String) -> Self {
        let kept = SharedSnapshots { files, head, totals: HashMap::new() };
        Self { number: 0, kept: Arc::new(Mutex::new(kept)) }
    }

    /// The keeper of another engine.
    pub(crate) fn of(&self, number: usize) -> Self {
        Self { number, kept: self.kept.clone() }
    }

    fn keep(&self, totals: Totals) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.totals.insert(self.number, totals);
        let mut sum = Totals::default();
        kept.totals.values().for_each(|one| sum.add(one));
        // A text that does not fit would be dropped, and the counters would stand still.
        let text = totals::text_within(&kept.head, &sum, SNAPSHOT_PLACE - SNAPSHOT_HEAD);
        kept.files.iter_mut().for_each(|file| file.keep(&text));
    }
}

impl Engine {
    /// Takes snapshots from now on.
    pub(crate) fn keep_snapshots(&mut self, keeper: Option<Keeper>) {
        if keeper.is_some() {
            self.core.scheduler.snapshot = SnapshotTimer::Idle;
        }
        self.keeper = keeper;
    }

    /// Takes a snapshot if one is due.
    pub(crate) fn keep_snapshot(&mut self, now: Nanos) {
        if !matches!(self.core.scheduler.snapshot, SnapshotTimer::Due(due) if due <= now) {
            return;
        }
        self.core.scheduler.snapshot = SnapshotTimer::Idle;
        if let Some(keeper) = &self.keeper {
            keeper.keep(Totals::of(self));
        }
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
        let mut snapshots = Snapshots::create(&path).unwrap();
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
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn counters_go_on_with_long_reasons() {
        let path = std::env::temp_dir().join(format!("snapshots-of-reasons-{}", std::process::id()));
        let keeper = Keeper::new(vec![Snapshots::create(&path).unwrap()], "\"version\": 1".to_owned());
        for packets in 1..4 {
            let mut totals = Totals::default();
            totals.counters.sent_pkts = packets;
            totals.fallbacks.extend((0..32).map(|n| format!("{n}{}", "x".repeat(1000 * n))));
            keeper.keep(totals);
            let file = std::fs::read(&path).unwrap();
            let text = String::from_utf8_lossy(last_snapshot(&file).unwrap()).into_owned();
            assert!(text.contains(&format!("\"packets_sent\": {packets},")), "{text}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_other_engines_said_last_is_in_it() {
        let path = std::env::temp_dir().join(format!("snapshots-of-two-{}", std::process::id()));
        let first = Keeper::new(vec![Snapshots::create(&path).unwrap()], "\"version\": 1".to_owned());
        let second = first.of(1);
        let sent = |packets| {
            let mut totals = Totals::default();
            totals.counters.sent_pkts = packets;
            totals
        };
        first.keep(sent(3));
        second.keep(sent(40));
        second.keep(sent(50));
        let file = std::fs::read(&path).unwrap();
        let text = String::from_utf8_lossy(last_snapshot(&file).unwrap()).into_owned();
        assert!(text.contains("\"packets_sent\": 53,"), "{text}");
        std::fs::remove_file(&path).unwrap();
    }
}
