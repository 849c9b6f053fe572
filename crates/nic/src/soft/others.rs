//! What an engine's thread sees of those who drive the engine themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whoever polled within this time is about to do so again: who has something to wait for polls once in a microsecond or two, even between other
/// things.
const SOON_NS: u64 = 3_000;

/// What is told by those who drive, all without order. Of the counts two threads that count at once may miss one: all that matters is that they change.
#[derive(Clone, Debug, Default)]
pub(crate) struct Driven {
    /// Polls.
    pub(crate) polls: Arc<AtomicU64>,
    /// Polls that found packets, and posts.
    pub(crate) traffic: Arc<AtomicU64>,
}

impl Driven {
    #[inline]
    pub(crate) fn count_poll(&self) {
        raise(&self.polls);
    }

    #[inline]
    pub(crate) fn count_traffic(&self) {
        raise(&self.traffic);
    }

    pub(crate) fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }
}

fn raise(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// The others, as seen from a thread that looks again and again.
#[derive(Debug)]
pub(super) struct Others<'a> {
    driven: &'a Driven,
    polls: u64,
    traffic: u64,
    polled_at: Option<u64>,
}

impl<'a> Others<'a> {
    pub(super) fn new(driven: &'a Driven) -> Self {
        let (polls, traffic) = (driven.polls(), driven.traffic.load(Ordering::Relaxed));
        Self { driven, polls, traffic, polled_at: None }
    }

    /// Whether somebody polls these days.
    #[inline]
    pub(super) fn are_polling(&mut self, now: u64) -> bool {
        let polls = self.driven.polls();
        if polls != self.polls {
            self.polls = polls;
            self.polled_at = Some(now);
        }
        self.polled_at.is_some_and(|at| now.saturating_sub(at) < SOON_NS)
    }

    /// Whether they moved anything since we asked before.
    #[inline]
    pub(super) fn have_moved(&mut self) -> bool {
        let traffic = self.driven.traffic.load(Ordering::Relaxed);
        std::mem::replace(&mut self.traffic, traffic) != traffic
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_poll_until_they_have_not_for_a_while() {
        let driven = Driven::default();
        driven.count_poll();
        let mut others = Others::new(&driven);
        assert!(!others.are_polling(1_000), "what was before does not count");
        driven.count_poll();
        assert!(others.are_polling(2_000));
        assert!(others.are_polling(2_000 + SOON_NS - 1));
        assert!(!others.are_polling(2_000 + SOON_NS));
        driven.count_poll();
        assert!(others.are_polling(9_000));
    }

    #[test]
    fn what_they_moved_is_seen_once() {
        let driven = Driven::default();
        let mut others = Others::new(&driven);
        driven.count_poll();
        assert!(!others.have_moved());
        driven.count_traffic();
        assert!(others.have_moved());
        assert!(!others.have_moved());
    }
}
