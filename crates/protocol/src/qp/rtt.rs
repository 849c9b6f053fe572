//! Round-trip times, and the tail-loss probe timer.

use crate::timing::{MICROSECOND, MILLISECOND, Nanos, SECOND};

/// Smoothed round-trip time, after Jacobson.
#[derive(Clone, Debug)]
pub(crate) struct Rtt {
    smoothed: Nanos,
    deviation: Nanos,
    measured: bool,
    shortest: Nanos,
}

/// Initial estimate: long enough for a machine that is busy starting up.
const FIRST_GUESS: Nanos = 2 * MILLISECOND;
/// Below this the timers of an operating system are noise.
const SHORTEST_PROBE: Nanos = 50 * MICROSECOND;
const LONGEST_PROBE: Nanos = SECOND;

impl Rtt {
    pub(crate) const fn new() -> Self {
        Self { smoothed: FIRST_GUESS, deviation: FIRST_GUESS / 2, measured: false, shortest: Nanos::MAX }
    }

    pub(crate) fn sample(&mut self, rtt: Nanos) {
        self.shortest = self.shortest.min(rtt);
        if !self.measured {
            self.measured = true;
            self.smoothed = rtt;
            self.deviation = rtt / 2;
            return;
        }
        self.deviation = (3 * self.deviation + self.smoothed.abs_diff(rtt)) / 4;
        self.smoothed = (7 * self.smoothed + rtt) / 8;
    }

    /// An upper bound of a round trip: which of several copies was answered is unknown. Without
    /// such samples, a path with heavy loss or reordering would keep its first estimate forever.
    /// That one may stem from a time when the peer was descheduled.
    pub(crate) fn at_most(&mut self, rtt: Nanos) {
        if rtt < self.smoothed {
            self.sample(rtt);
        }
    }

    pub(crate) const fn smoothed(&self) -> Nanos {
        self.smoothed
    }

    /// The shortest round trip; 0 before the first measurement.
    pub(crate) const fn shortest(&self) -> Nanos {
        if self.measured { self.shortest } else { 0 }
    }

    /// Probe timeout after `probes` earlier probes.
    pub(crate) fn probe_delay(&self, probes: u32) -> Nanos {
        let base = 2 * self.smoothed + 4 * self.deviation;
        (base.max(SHORTEST_PROBE) << probes.min(10)).min(LONGEST_PROBE)
    }
}
