//! `caller` mode: whether the application polls often enough for the engine thread to stand by.

use nobounce_protocol::timing::Nanos;

/// The application is judged by its polls in so much time. It is also the longest that packets wait where it stops polling without
/// arming a completion queue.
pub(crate) const WINDOW_NS: Nanos = 1_000_000;

/// So many polls in that time are attention: a waiting caller polls or sleeps on the link at least every 100 us. A program that polls
/// less often computes, or spins on memory.
const POLLS: u64 = 10;

/// Counts polls.
#[derive(Debug)]
pub(crate) struct Attention {
    since: Nanos,
    polls: u64,
    is_paid: bool,
}

impl Attention {
    /// Nobody polls yet.
    pub(crate) fn new(now: Nanos, polls: u64) -> Self {
        Self { since: now, polls, is_paid: false }
    }

    /// Whether the application attends to the device, from its polls so far.
    pub(crate) fn is_paid(&mut self, now: Nanos, polls: u64) -> bool {
        let passed = now.saturating_sub(self.since);
        if passed >= WINDOW_NS {
            self.is_paid = polls.wrapping_sub(self.polls) >= POLLS;
            (self.since, self.polls) = (now, polls);
        }
        self.is_paid
    }

    /// A completion queue was armed: the application is going to sleep.
    pub(crate) fn end(&mut self, now: Nanos, polls: u64) {
        *self = Self::new(now, polls);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_polling_application_is_left_alone_until_it_stops() {
        let mut attention = Attention::new(0, 0);
        assert!(!attention.is_paid(WINDOW_NS / 2, 100), "too early to tell");
        assert!(attention.is_paid(WINDOW_NS, 200));
        assert!(attention.is_paid(WINDOW_NS + 1, 200), "until the next window ends");
        assert!(!attention.is_paid(2 * WINDOW_NS, 200 + POLLS - 1), "a poll now and then is none");
        assert!(attention.is_paid(3 * WINDOW_NS, 400));
        attention.end(3 * WINDOW_NS, 400);
        assert!(!attention.is_paid(3 * WINDOW_NS + 1, 500));
    }
}
