//! Round-trip times, and when to probe for a lost tail.

use crate::timing::{MICROSECOND, MILLISECOND, Nanos, SECOND};

/// Smoothed round-trip time, after Jacobson.
#[derive(Clone, Debug)]
pub(crate) struct Rtt {
    smoothed: Nanos,
    deviation: Nanos,
    measured: bool,
}

/// Before anything was measured: long enough for a machine that is busy starting up.
const FIRST_GUESS: Nanos = 2 * MILLISECOND;
/// Below this the timers of an operating system are noise.
const SHORTEST_PROBE: Nanos = 50 * MICROSECOND;
const LONGEST_PROBE: Nanos = SECOND;

impl Rtt {
    pub(crate) const fn new() -> Self {
        Self { smoothed: FIRST_GUESS, deviation: FIRST_GUESS / 2, measured: false }
    }

    pub(crate) fn sample(&mut self, rtt: Nanos) {
        if !self.measured {
            self.measured = true;
            self.smoothed = rtt;
            self.deviation = rtt / 2;
            return;
        }
        self.deviation = (3 * self.deviation + self.smoothed.abs_diff(rtt)) / 4;
        self.smoothed = (7 * self.smoothed + rtt) / 8;
    }

    /// A round trip took no longer than this, and perhaps much less: which of several copies was answered is not known. Without such
    /// samples, a path that loses or reorders so much that hardly a packet is answered at once would keep a first estimate, which may
    /// be of a time when the peer was away, for ever.
    pub(crate) fn at_most(&mut self, rtt: Nanos) {
        if rtt < self.smoothed {
            self.sample(rtt);
        }
    }

    pub(crate) const fn smoothed(&self) -> Nanos {
        self.smoothed
    }

    /// How long to wait for an acknowledgement before asking again, after `probes` earlier questions.
    pub(crate) fn probe_delay(&self, probes: u32) -> Nanos {
        let base = 2 * self.smoothed + 4 * self.deviation;
        (base.max(SHORTEST_PROBE) << probes.min(10)).min(LONGEST_PROBE)
    }
}
