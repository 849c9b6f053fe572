//! Round-trip times, and the tail-loss probe timer.

use std::ops::Range;

use crate::timing::{MICROSECOND, MILLISECOND, Nanos, SECOND};

/// A packet whose ACK is timed, to measure the round trip.
#[derive(Clone, Copy, Debug)]
struct Timed {
    psn: u64,
    /// When it was first sent.
    sent: Nanos,
    /// It was retransmitted since, or may have been.
    again: bool,
}

/// Smoothed round-trip time, after Jacobson.
#[derive(Clone, Debug)]
pub(crate) struct Rtt {
    timed: Option<Timed>,
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
        Self {
            timed: None,
            smoothed: FIRST_GUESS,
            deviation: FIRST_GUESS / 2,
            measured: false,
            shortest: Nanos::MAX,
        }
    }

    /// A packet that will be answered leaves for the first time: it is timed, unless another one
    /// is.
    #[inline]
    pub(crate) fn time(&mut self, psn: u64, now: Nanos) {
        self.timed.get_or_insert(Timed { psn, sent: now, again: false });
    }

    /// The timed packet is retransmitted: the answer may be to either copy.
    pub(crate) fn time_again(&mut self) {
        if let Some(timed) = &mut self.timed {
            timed.again = true;
        }
    }

    /// The same if it is one of these.
    pub(crate) fn time_again_in(&mut self, packets: Range<u64>) {
        if self.timed.is_some_and(|timed| packets.contains(&timed.psn)) {
            self.time_again();
        }
    }

    /// Packets from this one on have not left.
    pub(crate) fn forget_from(&mut self, psn: u64) {
        self.timed.take_if(|timed| timed.psn >= psn);
    }

    /// If the timed packet was answered: samples its round trip, and returns it if it is exact.
    pub(crate) fn sample_timed(&mut self, now: Nanos, is_answered: impl Fn(u64) -> bool) -> Option<Nanos> {
        let Timed { sent, again, .. } = self.timed.take_if(|timed| is_answered(timed.psn))?;
        let took = now.saturating_sub(sent);
        if again {
            self.at_most(took);
            return None;
        }
        self.sample(took);
        Some(took)
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
