//! What a hardware device suffers from, as one connection has seen and told it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nobounce_nic::hard::Health;

/// A port that is back within so many microseconds was never away: links hiccup, and retries bridge it.
const HICCUP: u64 = 250_000;
/// The port is up.
const UP: u64 = u64::MAX;
/// It is down, and that was told.
const TOLD: u64 = u64::MAX - 1;
/// It is down for longer than a hiccup, and nobody was told yet.
const LOST: u64 = u64::MAX - 2;

/// One thing that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ailment {
    /// Nothing completes any more.
    Gone,
    /// Completions are lost.
    QueueFailed,
    /// The port is down, and nobody was told yet.
    PortLost,
}

/// What was seen so far. Read at every empty poll, so without a lock.
#[derive(Debug)]
pub(crate) struct Ailments {
    pub(crate) gone: AtomicBool,
    queue_failed: AtomicBool,
    /// When the port was first seen down, in microseconds of the connection's; or [`UP`], [`LOST`] or [`TOLD`].
    down_since: AtomicU64,
}

impl Default for Ailments {
    fn default() -> Self {
        Self {
            gone: AtomicBool::default(),
            queue_failed: AtomicBool::default(),
            down_since: AtomicU64::new(UP),
        }
    }
}

impl Ailments {
    /// Takes in what a look at the device showed at `now`.
    pub(crate) fn note(&self, health: &Health, now: u64) {
        for (seen, kept) in [(health.gone, &self.gone), (health.queue_failed, &self.queue_failed)] {
            if seen {
                kept.store(true, Ordering::Release);
            }
        }
        match (health.port_down, self.down_since.load(Ordering::Relaxed)) {
            (false, UP) | (true, LOST | TOLD) => {}
            (false, _) => self.down_since.store(UP, Ordering::Relaxed),
            (true, UP) => self.down_since.store(now, Ordering::Relaxed),
            (true, since) if now.saturating_sub(since) >= HICCUP => {
                self.down_since.store(LOST, Ordering::Release);
            }
            (true, _) => {}
        }
    }

    /// The worst of it. That the port is down is told once.
    pub(crate) fn now(&self) -> Option<Ailment> {
        if self.gone.load(Ordering::Acquire) {
            Some(Ailment::Gone)
        } else if self.queue_failed.load(Ordering::Acquire) {
            Some(Ailment::QueueFailed)
        } else if self.down_since.load(Ordering::Acquire) == LOST
            && self.down_since.compare_exchange(LOST, TOLD, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            Some(Ailment::PortLost)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_stays_down_is_told_once_and_a_hiccup_never() {
        let (ailments, well) = (Ailments::default(), Health::default());
        let down = Health { port_down: true, ..Health::default() };
        for (health, at) in
            [(&down, 1000), (&down, 200_000), (&well, 240_000), (&down, 260_000), (&down, 500_000)]
        {
            ailments.note(health, at);
            assert_eq!(ailments.now(), None, "at {at} us");
        }
        ailments.note(&down, 520_000);
        assert_eq!((ailments.now(), ailments.now()), (Some(Ailment::PortLost), None));
        ailments.note(&down, 900_000);
        assert_eq!(ailments.now(), None, "it was told");
        ailments.note(&well, 1_000_000);
        ailments.note(&down, 1_100_000);
        ailments.note(&down, 1_400_000);
        assert_eq!(ailments.now(), Some(Ailment::PortLost), "down again");
    }

    #[test]
    fn what_is_final_is_told_at_once_and_again() {
        let ailments = Ailments::default();
        ailments.note(&Health { queue_failed: true, ..Health::default() }, 1);
        assert_eq!(
            (ailments.now(), ailments.now()),
            (Some(Ailment::QueueFailed), Some(Ailment::QueueFailed))
        );
        ailments.note(&Health { gone: true, ..Health::default() }, 2);
        assert_eq!(ailments.now(), Some(Ailment::Gone));
    }
}
