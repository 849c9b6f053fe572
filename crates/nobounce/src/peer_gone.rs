//! Peer gone: flushes everything in flight, once.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the peer is gone.
///
/// Some drivers (rxe of Linux 6.1) do not flush requests posted after their queue pair was flushed.
/// So a later post flushes its lane again. The posting thread and the thread that detects the
/// peer's death may differ. Sequentially consistent accesses to `said` order them: the flush of all
/// follows the post, or the post sees `said`.
#[derive(Debug, Default)]
pub(crate) struct PeerGone {
    said: AtomicBool,
}

impl PeerGone {
    pub(crate) fn is_said(&self) -> bool {
        self.said.load(Ordering::Acquire)
    }

    /// Records that the peer is gone; the first call flushes everything.
    pub(crate) fn say(&self, flush: impl FnOnce()) {
        if !self.said.swap(true, Ordering::SeqCst) {
            flush();
        }
    }

    /// Call after every post.
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

    /// Regression: the flush ran every 5 ms of waiting, for all of up to 4096 queue pairs.
    #[test]
    fn everything_is_flushed_once_and_a_lane_again_when_something_was_posted_on_it() {
        let (peer_gone, all, lane) = (PeerGone::default(), Cell::new(0), Cell::new(0));
        let count = |of: &Cell<u32>| of.set(of.get() + 1);
        peer_gone.after_post(|| count(&lane));
        assert!(!peer_gone.is_said());
        for _ in 0..1000 {
            peer_gone.say(|| count(&all));
        }
        assert!(peer_gone.is_said());
        assert_eq!((all.get(), lane.get()), (1, 0));
        peer_gone.after_post(|| count(&lane));
        assert_eq!((all.get(), lane.get()), (1, 1));
    }
}
