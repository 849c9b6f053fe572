//! How long a thread goes on looking after traffic before it sleeps, where there are CPUs to spare.
//!
//! Being woken costs the sleeper some 15 us, on a virtual machine whose host is busy several times that; and a conversation that has become so much slower has longer pauses, in which everybody falls asleep again: NCCL's
//! operations took either 50 us or 150 to 300, run by run (docs/measurements/nccl.md). So who was woken so soon that looking would have found it looks for longer the next time, up to six times as long; who looked in
//! vain looks for a shorter time. A thread that spins takes from whoever shares its core, so it is short at first, and for those who are seldom wanted; and where threads have to wait for a CPU there is none to spare.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nobounce_protocol::timing::Nanos;

use crate::links::now_ns;

/// At most so many times as long as at first.
const MOST: u64 = 6;
/// Who waits for CPUs for more than one part in so many of its time has none to spare. (Seen: one in two hundred and less where there are CPUs enough, a third where there are not.)
const CROWDED: u64 = 20;
/// That is looked at so often.
const COUNT_EVERY: Nanos = 2_000_000;

/// How long a thread looks before it sleeps.
#[derive(Debug)]
pub(super) struct Spin {
    least: Nanos,
    now: Nanos,
    queueing: Queueing,
    /// When it was last looked at how long it had waited for CPUs, and what that was.
    counted_at: Nanos,
    waited: Nanos,
}

impl Spin {
    /// For the thread that calls.
    pub(super) fn new(least: Nanos) -> Self {
        Self { least, now: least, queueing: Queueing::of_this_thread(), counted_at: 0, waited: 0 }
    }

    /// Whether nothing has come since then for so long that it is not worth while to look on.
    #[inline]
    pub(super) fn is_over(&mut self, since: Nanos) -> bool {
        let now = now_ns();
        if self.now > self.least && now.saturating_sub(self.counted_at) > COUNT_EVERY {
            self.count(now, self.queueing.ns());
        }
        now.saturating_sub(since) > self.now
    }

    /// In all it has waited for CPUs for so long.
    #[cold]
    fn count(&mut self, now: Nanos, waited: Option<Nanos>) {
        let Some(waited) = waited else { return };
        let passed = now.saturating_sub(std::mem::replace(&mut self.counted_at, now));
        let waited = waited.saturating_sub(std::mem::replace(&mut self.waited, waited));
        if waited > passed / CROWDED {
            self.now = self.least;
        }
    }

    /// It was woken, for something to do, when it had slept for so long.
    pub(super) fn note_woken(&mut self, slept: Nanos) {
        if self.now + slept <= self.least * MOST {
            self.now = (self.now * 2).min(self.least * MOST);
        } else {
            self.note_in_vain();
        }
    }

    /// There was nothing to do.
    pub(super) fn note_in_vain(&mut self) {
        self.now = (self.now / 2).max(self.least);
    }
}

/// How long a thread has waited for CPUs that others had.
#[derive(Debug)]
struct Queueing(Option<File>);

impl Queueing {
    /// Of the thread that calls.
    fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// In all. Not every kernel tells.
    fn ns(&self) -> Option<Nanos> {
        let mut said = [0; 64];
        let len = self.0.as_ref()?.read_at(&mut said, 0).ok()?;
        // Time on a CPU, time waited for one, and how often it had one.
        str::from_utf8(&said[..len]).ok()?.split(' ').nth(1)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    /// How often it is woken while something comes every `gap`, and how long it looks in the end.
    fn woken(gap: Nanos, times: u32) -> (u32, Nanos) {
        let mut spin = Spin::new(50);
        let mut woken = 0;
        for _ in 0..times {
            if gap > spin.now {
                woken += 1;
                spin.note_woken(gap - spin.now);
            }
        }
        (woken, spin.now)
    }

    #[test]
    fn it_does_not_sleep_between_what_comes_soon() {
        assert_eq!(woken(40, 1000), (0, 50));
        assert_eq!(woken(90, 1000), (1, 100));
        assert_eq!(woken(300, 1000), (3, 300));
    }

    #[test]
    fn it_does_not_look_for_what_comes_late() {
        for gap in [301, 350, 399, 400, 1000] {
            assert_eq!(woken(gap, 1000), (1000, 50), "every {gap}");
        }
        let mut spin = Spin { now: 300, ..Spin::new(50) };
        spin.note_woken(5000);
        assert_eq!(spin.now, 150);
        spin.note_in_vain();
        spin.note_in_vain();
        assert_eq!(spin.now, 50, "whoever is wanted seldom looks as long as at first");
    }

    #[test]
    fn it_does_not_look_long_where_others_want_the_cpu() {
        let mut spin = Spin { now: 300, ..Spin::new(50) };
        spin.count(COUNT_EVERY, Some(COUNT_EVERY / 100));
        assert_eq!(spin.now, 300);
        spin.count(2 * COUNT_EVERY, None);
        assert_eq!(spin.now, 300, "where it is not known it is as before");
        spin.count(3 * COUNT_EVERY, Some(COUNT_EVERY / 2));
        assert_eq!(spin.now, 50);
    }

    #[test]
    fn who_shares_a_cpu_has_waited_for_it() {
        if Queueing::of_this_thread().ns().is_none() {
            return println!("this kernel does not tell (no /proc/thread-self/schedstat)");
        }
        let have_waited = AtomicUsize::new(0);
        let crowd = || {
            let queueing = Queueing::of_this_thread();
            let (begin, before) = (Instant::now(), queueing.ns().unwrap());
            stay_on_one_cpu();
            while queueing.ns().unwrap() - before < COUNT_EVERY {
                assert!(begin.elapsed() < Duration::from_secs(60), "it did not have to wait");
            }
            have_waited.fetch_add(1, Ordering::Relaxed);
            // The other must wait, too.
            while have_waited.load(Ordering::Relaxed) < 2 && begin.elapsed() < Duration::from_secs(60) {}
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(crowd))));
    }

    /// On the first CPU that the thread may use.
    fn stay_on_one_cpu() {
        // SAFETY: sets of CPUs are plain numbers, as long as it is said.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
            let first = (0..1024).find(|cpu| libc::CPU_ISSET(*cpu, &set)).unwrap();
            set = std::mem::zeroed();
            libc::CPU_SET(first, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
        }
    }
}
