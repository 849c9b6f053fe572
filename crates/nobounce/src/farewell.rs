//! What happens once the peer is gone: everything under way is flushed, once.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the peer is gone.
///
/// Some drivers (rxe of Linux 6.1) do not flush what is posted after their queue pair was: whoever posts later flushes his lane again. He and
/// the one who finds the peer gone may be two threads, so that either the flush of all comes after the post, or the post is seen to come
/// after it: hence the strict order of `said`.
#[derive(Debug, Default)]
pub(crate) struct Farewell {
    said: AtomicBool,
}

impl Farewell {
    pub(crate) fn is_said(&self) -> bool {
        self.said.load(Ordering::Acquire)
    }

    /// The peer was found gone; the first one to say so flushes everything.
    pub(crate) fn say(&self, flush: impl FnOnce()) {
        if !self.said.swap(true, Ordering::SeqCst) {
            flush();
        }
    }

    /// Something was posted.
    pub(crate) fn after_post(&self, flush_lane: impl FnOnce()) {
        if self.said.load(Ordering::SeqCst) {
            flush_lane();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// It was done every 5 ms of waiting, for all of up to 4096 queue pairs.
    #[test]
    fn everything_is_flushed_once_and_a_lane_again_when_something_was_posted_on_it() {
        let (farewell, all, lane) = (Farewell::default(), Cell::new(0), Cell::new(0));
        let count = |of: &Cell<u32>| of.set(of.get() + 1);
        farewell.after_post(|| count(&lane));
        assert!(!farewell.is_said());
        for _ in 0..1000 {
            farewell.say(|| count(&all));
        }
        assert!(farewell.is_said());
        assert_eq!((all.get(), lane.get()), (1, 0));
        farewell.after_post(|| count(&lane));
        assert_eq!((all.get(), lane.get()), (1, 1));
    }
}
