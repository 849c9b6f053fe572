//! `caller` mode: whether the application polls often enough for the engine thread to stand by.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use nobounce_protocol::timing::Nanos;

/// Measurement window for polls. It is also the longest time that packets wait if the application
/// stops polling without arming a completion queue.
pub(crate) const WINDOW_NS: Nanos = 1_000_000;

/// This many polls in a window count as attention: a waiting caller polls or sleeps on the link at
/// least every 100 us. A program that polls less often computes, or spins on memory.
const POLLS: u64 = 10;

/// Activity of callers, for the engine thread.
#[derive(Debug, Default)]
pub(crate) struct Callers {
    /// Polls that drove the engine. Two concurrent counts may count as one.
    polls: AtomicU64,
    /// Threads that sleep on the link: inside a poll, for a short time, or until a packet arrives.
    asleep: AtomicU32,
    /// One of them sleeps until a packet arrives.
    is_watched: AtomicBool,
}

impl Callers {
    #[inline]
    pub(crate) fn count_poll(&self) {
        self.polls.store(self.polls().wrapping_add(1), Ordering::Relaxed);
    }

    pub(crate) fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// A caller sleeps, or is awake again.
    pub(crate) fn fall_asleep(&self) {
        self.asleep.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn wake_up(&self) {
        self.asleep.fetch_sub(1, Ordering::Relaxed);
        self.count_poll();
    }

    /// A caller sleeps until a packet arrives, or is awake again.
    pub(crate) fn begin_watch(&self) {
        self.fall_asleep();
        self.is_watched.store(true, Ordering::Relaxed);
    }

    pub(crate) fn end_watch(&self) {
        self.is_watched.store(false, Ordering::Relaxed);
        self.wake_up();
    }

    /// Whether a caller has watched the link since there were so many polls.
    pub(crate) fn have_watched_since(&self, polls: u64) -> bool {
        self.is_watched.load(Ordering::Relaxed) && self.polls() == polls
    }

    fn are_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed) > 0
    }
}

/// Whether callers drive the engine.
#[derive(Debug)]
pub(crate) struct Attention {
    since: Nanos,
    polls: u64,
    is_paid: bool,
}

impl Attention {
    /// No poll so far.
    pub(crate) fn new(now: Nanos, callers: &Callers) -> Self {
        Self { since: now, polls: callers.polls(), is_paid: false }
    }

    /// Whether callers drive the engine, from their polls so far.
    pub(crate) fn is_paid(&mut self, now: Nanos, callers: &Callers) -> bool {
        // Packets that the engine thread takes do not wake a caller that sleeps on the link.
        let is_asleep = callers.are_asleep();
        if is_asleep || now.saturating_sub(self.since) >= WINDOW_NS {
            let polls = callers.polls();
            self.is_paid = is_asleep || polls.wrapping_sub(self.polls) >= POLLS;
            (self.since, self.polls) = (now, polls);
        }
        self.is_paid
    }

    /// A completion queue was armed: the application is about to sleep.
    pub(crate) fn end(&mut self, now: Nanos, callers: &Callers) {
        *self = Self::new(now, callers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(callers: &Callers, times: u64) {
        (0..times).for_each(|_| callers.count_poll());
    }

    #[test]
    fn a_polling_application_is_left_alone_until_it_stops() {
        let callers = Callers::default();
        let mut attention = Attention::new(0, &callers);
        poll(&callers, 100);
        assert!(!attention.is_paid(WINDOW_NS / 2, &callers), "too early to tell");
        assert!(attention.is_paid(WINDOW_NS, &callers));
        assert!(attention.is_paid(WINDOW_NS + 1, &callers), "until the next window ends");
        poll(&callers, POLLS - 1);
        assert!(!attention.is_paid(2 * WINDOW_NS, &callers), "a poll now and then is none");
        poll(&callers, POLLS);
        assert!(attention.is_paid(3 * WINDOW_NS, &callers));
        poll(&callers, POLLS);
        attention.end(3 * WINDOW_NS, &callers);
        assert!(!attention.is_paid(3 * WINDOW_NS + 1, &callers));
    }

    #[test]
    fn a_caller_that_sleeps_on_the_link_is_left_alone_at_once() {
        let callers = Callers::default();
        let mut attention = Attention::new(0, &callers);
        callers.fall_asleep();
        assert!(attention.is_paid(1, &callers));
        callers.wake_up();
        assert!(attention.is_paid(2, &callers), "for a window");
        assert!(!attention.is_paid(1 + WINDOW_NS, &callers));
    }
}
