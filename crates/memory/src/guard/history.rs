//! Previous signal handlers: written under a lock when the guard is installed, read without one in
//! the handler.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Different handlers remembered per signal. Real processes have one or two (a runtime, a crash
/// reporter).
pub(super) const LIMIT: usize = 16;

/// All dispositions found below ours, each once, oldest first.
pub(super) struct History {
    entries: [UnsafeCell<Option<libc::sigaction>>; LIMIT],
    /// Set once a handler with SA_RESETHAND has had its one call.
    spent: [AtomicBool; LIMIT],
    count: AtomicUsize,
    /// The entry that held the signal when we last took it.
    top: AtomicUsize,
}

// SAFETY: an entry is written once, before `count` makes it known, and only read after that.
unsafe impl Sync for History {}

impl History {
    pub(super) const fn new() -> Self {
        Self {
            entries: [const { UnsafeCell::new(None) }; LIMIT],
            spent: [const { AtomicBool::new(false) }; LIMIT],
            count: AtomicUsize::new(0),
            top: AtomicUsize::new(0),
        }
    }

    /// Remembers the current handler of the signal. False if the table is full.
    ///
    /// # Safety
    /// One caller at a time.
    pub(super) unsafe fn remember(&self, found: &libc::sigaction) -> bool {
        let count = self.count.load(Ordering::Acquire);
        let known = (0..count).find(|&index| self.entry(index).is_some_and(|entry| same(entry, found)));
        if let Some(index) = known {
            // The handler was installed anew, so its one call is due again.
            self.spent[index].store(false, Ordering::Release);
            self.top.store(index, Ordering::Release);
            return true;
        }
        let Some(free) = self.entries.get(count) else { return false };
        // SAFETY: entries from `count` on have no reader, and the caller is the only writer.
        unsafe { *free.get() = Some(*found) };
        self.count.store(count + 1, Ordering::Release);
        self.top.store(count, Ordering::Release);
        true
    }

    /// The disposition to chain to: at level 0 the one we replaced; at each further level (it has
    /// chained back to us) the next older one, cyclically. `None`, the default action, where that
    /// leads nowhere.
    ///
    /// The cycle matters where two copies of this crate live in one process and each has seen the
    /// other.
    pub(super) fn at(&self, level: usize) -> Option<libc::sigaction> {
        let count = self.count.load(Ordering::Acquire);
        if count == 0 || level >= 2 * LIMIT {
            return None;
        }
        let top = self.top.load(Ordering::Acquire);
        let index = (top + count - level % count) % count;
        let entry = *self.entry(index)?;
        let once = entry.sa_flags & libc::SA_RESETHAND != 0;
        if once && self.spent[index].swap(true, Ordering::AcqRel) { None } else { Some(entry) }
    }

    fn entry(&self, index: usize) -> Option<&libc::sigaction> {
        // SAFETY: callers pass an index below `count`, and such entries are not written any more.
        unsafe { (*self.entries[index].get()).as_ref() }
    }
}

fn same(a: &libc::sigaction, b: &libc::sigaction) -> bool {
    a.sa_sigaction == b.sa_sigaction && a.sa_flags == b.sa_flags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disposition(handler: usize, flags: i32) -> libc::sigaction {
        // SAFETY: sigaction is plain data, and these are never installed.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        action
    }

    fn handlers(history: &History, levels: usize) -> Vec<Option<usize>> {
        (0..levels).map(|level| history.at(level).map(|action| action.sa_sigaction)).collect()
    }

    #[test]
    fn newest_first_then_older_then_round() {
        let history = History::new();
        assert_eq!(handlers(&history, 1), [None]);
        for handler in [10, 20, 30, 20] {
            // SAFETY: one thread.
            assert!(unsafe { history.remember(&disposition(handler, 0)) });
        }
        assert_eq!(handlers(&history, 4), [Some(20), Some(10), Some(30), Some(20)]);
        assert!(history.at(2 * LIMIT).is_none());
    }

    #[test]
    fn a_one_time_handler_is_called_once() {
        let history = History::new();
        // SAFETY: one thread.
        unsafe { history.remember(&disposition(10, libc::SA_RESETHAND)) };
        assert_eq!(handlers(&history, 1), [Some(10)]);
        assert_eq!(handlers(&history, 1), [None]);
    }

    #[test]
    fn no_room_is_said() {
        let history = History::new();
        for handler in 0..LIMIT {
            // SAFETY: one thread.
            assert!(unsafe { history.remember(&disposition(handler, 0)) });
        }
        // SAFETY: one thread.
        assert!(!unsafe { history.remember(&disposition(LIMIT, 0)) });
    }
}
