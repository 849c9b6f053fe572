//! Loom models of the lock-free code: every interleaving that threads and the memory model allow.
//!
//! loom runs a model again and again, each time with another order of events and another choice of
//! what a relaxed load may see. The files below are the device's own, built once more: with loom's
//! locks and atomics, an eventfd that is a counter, and no forks. A model ends where a thread would
//! go to sleep: it asserts that the sleeping thread was woken, or has a deadline in time. Each
//! documents the mutation of the code that makes it fail.

#![allow(dead_code, unreachable_pub)] // the models use a part of each file, and have no callers

#[path = "../src/soft"]
mod soft {
    pub(crate) mod engine {
        pub(crate) mod completions;
    }
    pub(crate) mod events {
        pub(crate) mod completion_events;
    }
}

#[path = "../src/sync"]
mod sync {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;

    pub(crate) mod notices;
    pub(crate) mod ring;
    pub(crate) mod waker;

    pub(crate) const FIRST_PLACES: usize = 2;
}

mod process {
    pub(crate) mod fork {
        pub(crate) fn generation() -> u64 {
            0
        }

        pub(crate) fn current() -> u64 {
            0
        }
    }

    pub(crate) mod epoll {
        use std::io;
        use std::os::fd::RawFd;

        /// Nothing polls here.
        #[derive(Debug)]
        pub(crate) struct Epoll;

        impl Epoll {
            pub(crate) fn new() -> io::Result<Self> {
                Ok(Self)
            }

            pub(crate) fn add(&self, _: RawFd) -> io::Result<()> {
                Ok(())
            }

            pub(crate) fn fd(&self) -> RawFd {
                -1
            }
        }
    }

    pub(crate) mod eventfd {
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

            /// As read(2) on a descriptor that blocks. loom reports a reader that is never woken.
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
}

use std::sync::Arc;

use loom::thread;

use process::eventfd::EventFd;
use soft::engine::completions::Completions;
use soft::events::completion_events::CompletionEvents;
use sync::notices::Notices;
use sync::ring::Ring;
use sync::waker::{TIMER_SLACK_NS, Waker};
use sync::{AtomicBool, AtomicU64, Ordering};

/// When the engine must be driven, by the models' clock.
const DEADLINE: u64 = 5 * TIMER_SLACK_NS;
const CQ: u32 = 7;

/// An engine of which only the deadline is known (0: none). Its lock is spelt out: loom does not
/// try every order in which a `try_lock` of its own mutex fails.
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

    fn deadline(deadline: &AtomicU64) -> Option<u64> {
        Some(deadline.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }
}

fn waker() -> Arc<Waker> {
    Arc::new(Waker::new(EventFd::new().unwrap()))
}

fn took(completions: &Completions<u32>) -> Vec<u32> {
    let mut out = Vec::new();
    completions.take(usize::MAX, &mut |completion| out.push(completion));
    out
}

/// An application posts under the lock, in `caller` mode. Fails if the engine thread reads the
/// deadline before it publishes its sleep deadline, or does not read it at all. Also fails if it
/// sleeps for long where it could not read it.
#[test]
fn a_sleeping_thread_knows_of_every_deadline() {
    loom::model(|| {
        let (waker, engine) = (waker(), Arc::new(Engine::default()));
        let poster = thread::spawn({
            let (waker, engine) = (waker.clone(), engine.clone());
            move || {
                // As `EngineHandle::let_go`: asked under the lock, told after it.
                let post = |deadline: &AtomicU64| {
                    deadline.store(DEADLINE, Ordering::Relaxed);
                    waker.is_asleep().then_some(DEADLINE)
                };
                let asleep = loop {
                    match engine.try_drive(post) {
                        Some(asleep) => break asleep,
                        None => thread::yield_now(),
                    }
                };
                waker.wake_by(asleep);
            }
        });
        waker.fall_asleep(None);
        let known = engine.try_drive(Engine::deadline).unwrap_or(Some(TIMER_SLACK_NS));
        poster.join().unwrap();
        let in_time = known.is_some_and(|until| until <= DEADLINE + TIMER_SLACK_NS);
        assert!(in_time || waker.fd.is_raised(), "asleep until {known:?}");
    });
}

/// An application submits, in `thread` mode. Fails without either of the two fences of the waker.
#[test]
fn a_sleeping_thread_knows_of_every_submission() {
    loom::model(|| {
        let (waker, submissions) = (waker(), Arc::new(Ring::new(2)));
        let poster = thread::spawn({
            let (waker, submissions) = (waker.clone(), submissions.clone());
            move || {
                submissions.push(1).unwrap();
                waker.wake_if_asleep();
            }
        });
        waker.fall_asleep(None);
        let sleeps = submissions.is_empty();
        poster.join().unwrap();
        assert!(!sleeps || waker.fd.is_raised());
    });
}

/// Fails if the thread checks for a watch request before it publishes that it stands by.
#[test]
fn a_thread_that_was_asked_to_watch_does_not_stand_by() {
    loom::model(|| {
        let waker = waker();
        let application = thread::spawn({
            let waker = waker.clone();
            move || waker.ask_to_watch()
        });
        let stands_by = waker.stand_by();
        application.join().unwrap();
        assert!(!stands_by || waker.fd.is_raised());
        assert!(waker.take_watch());
    });
}

/// Fails if a producer publishes the slot before it has written the value, or a consumer frees it
/// before it has read.
#[test]
fn what_is_submitted_arrives_once() {
    loom::model(|| {
        let ring = Arc::new(Ring::new(2));
        let producers = [1, 2].map(|value| {
            let ring = ring.clone();
            thread::spawn(move || ring.push(Box::new(value)).unwrap())
        });
        let mut all = Vec::new();
        ring.pop_each(2, |value| all.push(*value));
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        ring.pop_each(2, |value| all.push(*value));
        all.sort_unstable();
        assert_eq!(all, [1, 2]);
        assert!(ring.is_empty());
    });
}

/// Two threads poll one completion queue, in a ring that has to be filled anew.
#[test]
fn pollers_share_what_is_there() {
    loom::model(|| {
        let ring = Arc::new(Ring::new(2));
        ring.push(1).unwrap();
        ring.push(2).unwrap();
        let other = thread::spawn({
            let ring = ring.clone();
            move || ring.pop()
        });
        let ours = ring.pop();
        let refilled = ring.push(3).is_ok();
        let theirs = other.join().unwrap();
        let mut all: Vec<_> = [ours, theirs].into_iter().flatten().collect();
        ring.pop_each(4, |value| all.push(value));
        all.sort_unstable();
        assert_eq!(all, if refilled { vec![1, 2, 3] } else { vec![1, 2] });
    });
}

/// The ring grows under a thread that polls the old one.
#[test]
fn a_ring_that_grows_loses_nothing() {
    loom::model(|| {
        let completions = Arc::new(Completions::new(CQ, 4, None));
        completions.push(1, false);
        completions.push(2, false);
        let engine = thread::spawn({
            let completions = completions.clone();
            move || assert!(completions.push(3, false))
        });
        let mut all = took(&completions);
        engine.join().unwrap();
        all.extend(took(&completions));
        assert_eq!(all, [1, 2, 3]);
    });
}

/// Fails if `push` checks whether the queue is armed before the completion is visible.
#[test]
fn who_arms_and_polls_sees_the_completion_or_gets_the_event() {
    loom::model(|| {
        let channel = CompletionEvents::new().unwrap();
        let completions = Arc::new(Completions::new(CQ, 4, Some(channel.clone())));
        let engine = thread::spawn({
            let completions = completions.clone();
            move || assert!(completions.push(1, false))
        });
        completions.arm(false);
        let seen = took(&completions);
        engine.join().unwrap();
        let announced = channel.0.next();
        assert!(seen == [1] || announced == Some(CQ), "took {seen:?}, announced {announced:?}");
        assert_eq!(channel.0.next(), None, "once");
    });
}

/// Fails if a consumer takes a slot for empty that was filled in the last lap.
#[test]
fn no_completion_is_stranded() {
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

/// Fails if `take_unless_lost` checks for the overflow after it checked for completions: a program
/// that stops at the error would lose queued completions. Also fails if the flag is set or read
/// with relaxed ordering.
#[test]
fn an_overflow_is_told_after_what_the_queue_held() {
    loom::model(|| {
        let channel = CompletionEvents::new().unwrap();
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
        let announced = channel.0.next();
        assert_eq!(announced.is_some(), !fitted, "an overflow wakes those who sleep");
    });
}

/// Fails if `push` announces after it released the lock.
#[test]
fn a_closed_queue_announces_nothing() {
    loom::model(|| {
        let channel = CompletionEvents::new().unwrap();
        let completions = Arc::new(Completions::new(CQ, 4, Some(channel.clone())));
        completions.arm(false);
        let engine = thread::spawn({
            let completions = completions.clone();
            move || assert!(completions.push(1, false))
        });
        completions.close();
        engine.join().unwrap();
        assert_eq!(channel.0.next(), None);
        assert!(took(&completions).is_empty());
    });
}

/// Readers block in read(2) and then claim. Fails if `push` raises the descriptor before it takes
/// the lock (a reader finds nothing, and the notice is lost). Also fails if `forget` takes nothing
/// from the descriptor (it stays readable forever).
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
                    notices.counter.read();
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
        assert!(!notices.counter.is_raised(), "readable, and nothing is there");
    });
}

/// Fails if the oldest notice is dropped and the descriptor is raised all the same. Also fails if
/// `next` takes from the descriptor before it has the lock.
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
        assert_eq!(notices.counter.is_raised(), notices.next().is_some());
        assert!(!notices.counter.is_raised() && notices.next().is_none());
    });
}
