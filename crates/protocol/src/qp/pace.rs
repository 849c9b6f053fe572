//! Pacing: when the next packet may leave.

use crate::timing::Nanos;

/// The gap behind the last packet. A packet that leaves late shortens the next gap.
#[derive(Debug, Default)]
pub(super) struct Pace {
    until: Nanos,
    /// A packet waits for that time, or has waited and not left.
    holds: bool,
    /// The deadline has not been handled.
    armed: bool,
}

impl Pace {
    /// Whether the next packet has to wait.
    #[inline]
    pub(super) const fn is_set(&self, now: Nanos) -> bool {
        now < self.until
    }

    /// There is a packet, and it has to wait.
    pub(super) fn hold_back(&mut self) {
        (self.holds, self.armed) = (true, true);
    }

    /// Whether the next packet has waited: its sender did not pause.
    pub(super) const fn has_held_back(&self) -> bool {
        self.holds
    }

    /// A packet leaves; the next one has to be that much later.
    #[inline]
    pub(super) fn note_sent(&mut self, now: Nanos, gap: Nanos) {
        (self.holds, self.armed) = (false, false);
        if gap > 0 {
            self.until = self.until.saturating_add(gap).max(now);
        }
    }

    /// When a packet that waits may leave.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.armed.then_some(self.until)
    }

    pub(super) fn handle_timeout(&mut self, now: Nanos) {
        self.armed &= now < self.until;
    }
}
