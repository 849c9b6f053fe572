//! How long a thread goes on looking after traffic before it sleeps, where there are CPUs to spare.
//!
//! Being woken costs the sleeper 5 to 50 us, on a virtual machine whose host is busy more; and a conversation that has become so much slower has longer pauses, in which everybody falls asleep again: NCCL's
//! operations took either 50 us or 150 to 300, run by run (docs/measurements/nccl.md). So who was woken soon after it fell asleep looks for longer the next time, up to four times as long; who slept long had looked in
//! vain, and looks for a shorter time. A thread that spins takes from whoever shares its core, so it is short at first, and for those who are seldom wanted; and who had to wait
//! for a CPU meanwhile has none to spare.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nobounce_protocol::timing::Nanos;

/// Who waits for CPUs for more than one part in so many of its time has none to spare. (Seen: one in two hundred and less where there are CPUs enough, a third where there are not.)
const CROWDED: u64 = 20;
/// That is looked at so often.
const COUNT_FOR: Nanos = 2_000_000;

/// At most so many times as long as at first.
const MOST: u64 = 4;

/// How long a thread looks before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spin {
    least: Nanos,
    now: Nanos,
    /// When it was last looked at how long it had waited for CPUs, what that was, and what came of it.
    counted_at: Nanos,
    waited: u64,
    is_crowded: bool,
}

impl Spin {
    pub(super) const fn new(least: Nanos) -> Self {
        Self { least, now: least, counted_at: 0, waited: 0, is_crowded: false }
    }

    /// For so long it looks.
    #[inline]
    pub(super) fn ns(&self) -> Nanos {
        self.now
    }

    /// It was woken, for something to do, when it had slept for so long; for so long it has waited for CPUs in all.
    pub(super) fn note_woken(&mut self, now: Nanos, slept: Nanos, waited: impl FnOnce() -> u64) {
        let passed = now.saturating_sub(self.counted_at);
        if passed > COUNT_FOR {
            let before = std::mem::replace(&mut self.waited, waited());
            self.is_crowded = self.waited.saturating_sub(before) > passed / CROWDED;
            self.counted_at = now;
        }
        let most = self.least * MOST;
        self.now = if self.is_crowded {
            self.least
        } else if slept < most {
            (self.now * 2).min(most)
        } else {
            (self.now / 2).max(self.least)
        };
    }
}

/// How long a thread has waited for CPUs that others had.
#[derive(Debug)]
pub(super) struct Queueing(Option<File>);

impl Queueing {
    /// Of the thread that calls.
    pub(super) fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// In all, in nanoseconds; 0 where the kernel does not tell.
    pub(super) fn ns(&self) -> u64 {
        let mut said = [0; 64];
        let len = self.0.as_ref().and_then(|file| file.read_at(&mut said, 0).ok()).unwrap_or(0);
        // Time on a CPU, time waited for one, and how often it had one.
        let waited = str::from_utf8(&said[..len]).ok().and_then(|said| said.split(' ').nth(1));
        waited.and_then(|waited| waited.parse().ok()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often it is woken while something comes every `gap`, and how long it looks in the end.
    fn woken(gap: u64, times: u32) -> (u32, u64) {
        let mut spin = Spin::new(50);
        let mut woken = 0;
        for _ in 0..times {
            if gap > spin.ns() {
                woken += 1;
                spin.note_woken(0, gap - spin.ns(), || 0);
            }
        }
        (woken, spin.ns())
    }

    #[test]
    fn it_does_not_sleep_between_what_comes_soon() {
        assert_eq!(woken(40, 1000), (0, 50));
        assert_eq!(woken(90, 1000), (1, 100));
        assert_eq!(woken(199, 1000), (2, 200));
    }

    #[test]
    fn it_does_not_look_for_what_comes_late() {
        assert_eq!(woken(1000, 1000), (1000, 50));
        let mut spin = Spin::new(50);
        spin.note_woken(0, 60, || 0);
        spin.note_woken(0, 60, || 0);
        assert_eq!(spin.ns(), 200);
        spin.note_woken(0, 5000, || 0);
        spin.note_woken(0, 5000, || 0);
        assert_eq!(spin.ns(), 50, "whoever is wanted seldom looks as long as at first");
    }

    #[test]
    fn it_does_not_look_long_where_others_want_the_cpu() {
        let mut spin = Spin::new(50);
        let (mut now, mut waited) = (0, 0);
        for _ in 0..100 {
            (now, waited) = (now + 2 * COUNT_FOR, waited + COUNT_FOR / 2);
            spin.note_woken(now, 60, || waited);
            spin.note_woken(now + 60, 60, || panic!("looked at too often"));
            assert_eq!(spin.ns(), 50);
        }
        spin.note_woken(now + 2 * COUNT_FOR, 60, || waited + 1000);
        assert_eq!(spin.ns(), 100, "they have gone");
    }

    #[test]
    fn who_shares_a_cpu_has_waited_for_it() {
        if Queueing::of_this_thread().0.is_none() {
            return println!("this kernel does not tell (no /proc/thread-self/schedstat)");
        }
        // SAFETY: a set of CPUs is plain numbers, and is as long as it is said to be; the first CPU allowed is one of it.
        let crowd = || unsafe {
            let mut allowed: libc::cpu_set_t = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut allowed);
            let first = (0..1024).find(|cpu| libc::CPU_ISSET(*cpu, &allowed)).unwrap();
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(first, &mut one);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const one);
            let queueing = Queueing::of_this_thread();
            let (begin, before) = (std::time::Instant::now(), queueing.ns());
            while queueing.ns() - before < COUNT_FOR {
                assert!(begin.elapsed().as_secs() < 20, "nobody had to wait");
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(crowd))));
    }
}
