//! Health of a hardware device, as one connection has seen and reported it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nobounce_nic::hard::Health;

/// Microseconds of port downtime that are ignored: retries bridge short link flaps.
const HICCUP: u64 = 250_000;
/// The port is up.
const UP: u64 = u64::MAX;
/// The port is down, and that was reported.
const TOLD: u64 = u64::MAX - 1;
/// Down for longer than a link flap, and not reported yet.
const LOST: u64 = u64::MAX - 2;

/// One health problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The device is gone: nothing completes any more.
    Gone,
    /// Completions are lost.
    QueueFailed,
    /// The port is down, and that is not reported yet.
    PortLost,
}

/// What was seen so far. Every empty poll reads it, so it has no lock.
#[derive(Debug)]
pub(crate) struct HealthMonitor {
    pub(crate) gone: AtomicBool,
    queue_failed: AtomicBool,
    /// When the port was first seen down, in microseconds since the connection began; or [`UP`],
    /// [`LOST`] or [`TOLD`].
    down_since: AtomicU64,
}

impl Default for HealthMonitor {
    fn default() -> Self {
        Self {
            gone: AtomicBool::default(),
            queue_failed: AtomicBool::default(),
            down_since: AtomicU64::new(UP),
        }
    }
}

impl HealthMonitor {
    /// Records the health of the device at `now`.
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

    /// The worst problem. A port that is down is reported once.
    pub(crate) fn now(&self) -> Option<Fault> {
        if self.gone.load(Ordering::Acquire) {
            Some(Fault::Gone)
        } else if self.queue_failed.load(Ordering::Acquire) {
            Some(Fault::QueueFailed)
        } else if self.down_since.load(Ordering::Acquire) == LOST
            && self.down_since.compare_exchange(LOST, TOLD, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            Some(Fault::PortLost)
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
        let (monitor, well) = (HealthMonitor::default(), Health::default());
        let down = Health { port_down: true, ..Health::default() };
        for (health, at) in
            [(&down, 1000), (&down, 200_000), (&well, 240_000), (&down, 260_000), (&down, 500_000)]
        {
            monitor.note(health, at);
            assert_eq!(monitor.now(), None, "at {at} us");
        }
        monitor.note(&down, 520_000);
        assert_eq!((monitor.now(), monitor.now()), (Some(Fault::PortLost), None));
        monitor.note(&down, 900_000);
        assert_eq!(monitor.now(), None, "it was told");
        monitor.note(&well, 1_000_000);
        monitor.note(&down, 1_100_000);
        monitor.note(&down, 1_400_000);
        assert_eq!(monitor.now(), Some(Fault::PortLost), "down again");
    }

    #[test]
    fn what_is_final_is_told_at_once_and_again() {
        let monitor = HealthMonitor::default();
        monitor.note(&Health { queue_failed: true, ..Health::default() }, 1);
        assert_eq!((monitor.now(), monitor.now()), (Some(Fault::QueueFailed), Some(Fault::QueueFailed)));
        monitor.note(&Health { gone: true, ..Health::default() }, 2);
        assert_eq!(monitor.now(), Some(Fault::Gone));
    }
}
