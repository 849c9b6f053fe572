//! What does without a lock, tried in every order that threads and memory allow.
//!
//! loom runs a model again and again, each time with another order of events and another choice of what a relaxed load may see.
//! The files below are the device's own, built once more: with loom's locks and atomics, an eventfd that is a counter, and no forks.
//! A model ends where a thread would go to sleep: it asserts that whoever sleeps was told, or was going to look in time.
//! Each says what was taken out of the code to see it fail.

#![allow(dead_code, unreachable_pub)] // the models use a part of each file, and nobody uses them

#[path = "../src/soft/bell.rs"]
mod bell;
#[path = "../src/soft/channel.rs"]
mod channel;
#[path = "../src/soft/completions.rs"]
mod completions;
#[path = "../src/soft/notices.rs"]
mod notices;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;
}

mod fork {
    pub(crate) fn generation() -> u64 {
        0
    }

    pub(crate) fn current() -> u64 {
        0
    }
}

mod eventfd {
    use std::io;
    use std::os::fd::{AsRawFd, RawFd};

    use loom::sync::{Condvar, Mutex};

    /// As the kernel's: a number behind a lock.
    #[derive(Debug)]
    pub(crate) struct EventFd {
        raised: Mutex<u64>,
        more: Condvar,
        counts: bool,
    }

    impl EventFd {
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self { raised: Mutex::new(0), more: Condvar::new(), counts: false })
        }

        pub(crate) fn counting() -> io::Result<Self> {
            Ok(Self { counts: true, ..Self::new()? })
        }

        pub(crate) fn raise(&self) {
            *self.raised.lock().unwrap() += 1;
            self.more.notify_one();
        }

        pub(crate) fn take(&self) -> bool {
            let mut raised = self.raised.lock().unwrap();
            let was = *raised;
            *raised = if self.counts { was.saturating_sub(1) } else { 0 };
            was > 0
        }

        /// As read(2) on a descriptor that blocks. loom reports a reader whom nobody wakes.
        pub(crate) fn read(&self) {
            let mut raised = self.raised.lock().unwrap();
            while *raised == 0 {
                raised = self.more.wait(raised).unwrap();
            }
            *raised -= 1;
        }

        pub(crate) fn is_raised(&self) -> bool {
            *self.raised.lock().unwrap() > 0
        }

        pub(crate) fn wait(&self, _ms: i32) -> bool {
            self.is_raised()
        }
    }

    impl AsRawFd for EventFd {
        fn as_raw_fd(&self) -> RawFd {
            -1
        }
    }
}

use std::sync::Arc;

use loom::thread;

use bell::{Bell, LOOK_EVERY_NS};
use channel::Channel;
use completions::Completions;
use eventfd::EventFd;
use notices::Notices;
use sync::{AtomicBool, AtomicU64, Ordering};

/// Now, and when the engine must be driven, by the models' clock.
const NOW: u64 = 1;
const DEADLINE: u64 = 5 * LOOK_EVERY_NS;
const CQ: u32 = 7;

/// An engine of which only the deadline is known (0: none). Its lock is spelt out: loom does not try every order in which a `try_lock` of
/// its own mutex fails.
#[derive(Debug, Default)]
struct Engine {
    held: AtomicBool,
    deadline: AtomicU64,
}

impl Engine {
    fn try_drive<R>(&self, drive: impl FnOnce(&AtomicU64) -> R) -> Option<R> {
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok()?;
        let result = drive(&self.deadline);
        self.held.store(false, Ordering::Release);
        Some(result)
    }

    /// As posting does: waits for its turn, and rings afterwards.
    fn post(&self, bell: &Bell) {
        while self.try_drive(|deadline| deadline.store(DEADLINE, Ordering::Relaxed)).is_none() {
            thread::yield_now();
        }
        bell.ring(Some(DEADLINE));
    }

    fn deadline(deadline: &AtomicU64) -> Option<u64> {
        Some(deadline.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }
}

fn bell() -> Bell {
    Bell::new(EventFd::new().unwrap())
}

/// The helper goes to sleep with nothing to wait for: until when.
fn helper_sleeps(bell: &Bell, engine: &Engine) -> Option<u64> {
    assert!(bell.begin_round());
    bell.fall_asleep(None, NOW, || engine.try_drive(Engine::deadline))
}

fn is_in_time(bell: &Bell, until: Option<u64>) -> bool {
    bell.wake.is_raised() || until.is_some_and(|until| until <= DEADLINE + LOOK_EVERY_NS)
}

fn took(completions: &Completions<u32>) -> Vec<u32> {
    let mut out = Vec::new();
    completions.take(usize::MAX, &mut |completion| out.push(completion));
    out
}

/// Without the helper's second look at the engine, or with that look before it says how long it sleeps, nobody wakes it.
#[test]
fn the_helper_wakes_for_what_was_posted() {
    loom::model(|| {
        let (bell, engine) = (bell(), Arc::new(Engine::default()));
        let poster = thread::spawn({
            let (bell, engine) = (bell.clone(), engine.clone());
            move || engine.post(&bell)
        });
        let until = helper_sleeps(&bell, &engine);
        poster.join().unwrap();
        assert!(is_in_time(&bell, until), "asleep until {until:?}");
    });
}

/// An application posts, polls, and then spins on memory; nobody knows that it sleeps, so that the poll does not ring. Without a short
/// sleep after a look that failed (a fault that was there: a lost packet would have been lost for ever) the poll hides the deadline.
#[test]
fn a_poll_hides_no_deadline() {
    loom::model(|| {
        let (bell, engine) = (bell(), Arc::new(Engine::default()));
        let application = thread::spawn({
            let (bell, engine) = (bell.clone(), engine.clone());
            move || {
                engine.post(&bell);
                engine.try_drive(|deadline| bell.ring_if_sleepy(|| Engine::deadline(deadline)));
            }
        });
        let until = helper_sleeps(&bell, &engine);
        application.join().unwrap();
        assert!(is_in_time(&bell, until), "asleep until {until:?}");
    });
}

/// An application arms, polls once more, and sleeps: what that poll left to do is done in time. Fails if `ask_to_watch` does not
/// note that the application sleeps, without the second look, and without the short sleep after one that failed.
#[test]
fn the_helper_wakes_for_what_the_last_poll_left() {
    loom::model(|| {
        let (bell, engine) = (bell(), Arc::new(Engine::default()));
        let application = thread::spawn({
            let (bell, engine) = (bell.clone(), engine.clone());
            move || {
                bell.ask_to_watch();
                let polled = engine.try_drive(|deadline| {
                    deadline.store(DEADLINE, Ordering::Relaxed);
                    bell.ring_if_sleepy(|| Engine::deadline(deadline));
                });
                polled.is_some()
            }
        });
        let until = helper_sleeps(&bell, &engine);
        let left_something = application.join().unwrap();
        assert!(!left_something || is_in_time(&bell, until), "asleep until {until:?}");
    });
}

/// Fails if `step_back` stores AWAY without looking whether somebody asked (a fault that was there: the event came a millisecond late),
/// and if `ask_to_watch` does not wake a helper that is away.
#[test]
fn a_helper_that_was_asked_to_watch_watches() {
    for away in [false, true] {
        loom::model(move || {
            let bell = bell();
            if away {
                bell.step_back();
            }
            assert_eq!(bell.begin_round(), !away);
            let application = thread::spawn({
                let bell = bell.clone();
                move || bell.ask_to_watch()
            });
            bell.wake_up();
            bell.step_back();
            let watches = bell.begin_round();
            application.join().unwrap();
            assert!(watches || bell.wake.is_raised());
        });
    }
}

/// Fails if `push` stores the count after it let go of the lock, or looks before it has the lock whether the queue is armed.
#[test]
fn who_arms_and_polls_sees_the_completion_or_gets_the_event() {
    loom::model(|| {
        let channel = Channel::new().unwrap();
        let completions = Arc::new(Completions::new(CQ, 4, Some(channel.clone())));
        let engine = thread::spawn({
            let completions = completions.clone();
            move || assert!(completions.push(1, false))
        });
        completions.arm(false);
        let seen = took(&completions);
        engine.join().unwrap();
        let announced = channel.next();
        assert!(seen == [1] || announced == Some(CQ), "took {seen:?}, announced {announced:?}");
        assert_eq!(channel.next(), None, "once");
    });
}

/// Fails if `take` stores the count after it let go of the lock: the completion that came between is never found.
#[test]
fn the_count_strands_no_completion() {
    loom::model(|| {
        let completions = Arc::new(Completions::new(CQ, 4, None));
        let engine = thread::spawn({
            let completions = completions.clone();
            move || {
                assert!(completions.push(1, false));
                assert!(completions.push(2, false));
            }
        });
        let mut all = took(&completions);
        engine.join().unwrap();
        all.extend(took(&completions));
        assert_eq!(all, [1, 2]);
    });
}

/// Fails if `take_unless_lost` looks for the overflow after it looked for completions (a fault that was there: a program that takes the
/// error as the end loses what the queue held), or if the flag is set or read with relaxed ordering.
#[test]
fn an_overflow_is_told_after_what_the_queue_held() {
    loom::model(|| {
        let channel = Channel::new().unwrap();
        let completions = Arc::new(Completions::new(CQ, 1, Some(channel.clone())));
        let engine = thread::spawn({
            let completions = completions.clone();
            move || {
                completions.push(1, false);
                completions.push(2, false)
            }
        });
        let first = completions.take_unless_lost(1, &mut |completion| assert_eq!(completion, 1));
        assert!(first.is_some(), "the first completion was there when the second was lost");
        let fitted = engine.join().unwrap();
        let announced = channel.next();
        assert_eq!(announced.is_some(), !fitted, "an overflow wakes those who sleep");
    });
}

/// Fails if `push` announces after it let go of the lock.
#[test]
fn a_closed_queue_announces_nothing() {
    loom::model(|| {
        let channel = Channel::new().unwrap();
        let completions = Arc::new(Completions::new(CQ, 4, Some(channel.clone())));
        completions.arm(false);
        let engine = thread::spawn({
            let completions = completions.clone();
            move || assert!(completions.push(1, false))
        });
        completions.close();
        engine.join().unwrap();
        assert_eq!(channel.next(), None);
        assert!(took(&completions).is_empty());
    });
}

/// Readers block in read(2) and then claim. Fails if `push` raises the descriptor before it takes the lock (a reader finds nothing, and the
/// notice is nobody's), or if `forget` takes nothing from the descriptor (it is readable for ever).
#[test]
fn readings_and_notices_stay_in_step() {
    const GOING: u32 = 1;
    const KEPT: u32 = 2;
    loom::model(|| {
        let notices = Arc::new(Notices::new().unwrap());
        let reader = thread::spawn({
            let notices = notices.clone();
            move || {
                loop {
                    notices.fd.read();
                    if notices.claim() == Some(KEPT) {
                        return;
                    }
                }
            }
        });
        notices.push(GOING, 4);
        notices.push(KEPT, 4);
        notices.forget(|notice| *notice == GOING);
        reader.join().unwrap();
        assert_eq!(notices.next(), None);
        assert!(!notices.fd.is_raised(), "readable, and nothing is there");
    });
}

/// Fails if the oldest makes room and the descriptor is raised all the same, or if `next` takes from the descriptor before it has the lock.
#[test]
fn a_full_queue_stays_in_step() {
    loom::model(|| {
        let notices = Arc::new(Notices::new().unwrap());
        let pusher = thread::spawn({
            let notices = notices.clone();
            move || (1..=2).for_each(|notice| notices.push(notice, 1))
        });
        notices.next();
        pusher.join().unwrap();
        assert_eq!(notices.fd.is_raised(), notices.next().is_some());
        assert!(!notices.fd.is_raised() && notices.next().is_none());
    });
}
