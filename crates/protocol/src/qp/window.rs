//! The congestion window: how many packets a requester may have in flight.
//!
//! The window grows by slow start and then by one packet per round trip, and shrinks at most once
//! per round trip when a loss is seen, as TCP's does: flows that share a bottleneck converge to
//! equal shares. It never falls below [`SMALLEST`], so a flow always makes progress.
//!
//! Congestion notifications shrink it in proportion to how many of the last windows met one, as the
//! reaction point of DCQCN does with a rate and DCTCP with a window; down to one packet, as many
//! senders of one receiver must have.

/// Packets in flight after any number of losses.
const SMALLEST: u32 = 2;
/// Packets in flight at the start.
const FIRST: u32 = 32;
/// Most bytes in flight. Beyond this, a software NIC fills buffers, not the pipe.
const LARGEST_BYTES: u32 = 1 << 20;
/// Fixed point, 1/256 packet: growth by one packet per window needs no floating point.
const ONE: u32 = 256;
/// Windows over which the part that met congestion is averaged.
const GAIN: u32 = 16;

#[derive(Clone, Debug)]
pub(crate) struct CongestionWindow {
    size: u32,
    threshold: u32,
    largest: u32,
    /// Part of the last windows that met congestion, in 1/256. 0: none has ever.
    congested: u32,
    /// Packets acknowledged in this window.
    acknowledged: u64,
}

impl CongestionWindow {
    pub(crate) fn new(mtu: u32) -> Self {
        let largest = (LARGEST_BYTES / mtu).max(64) * ONE;
        let (size, threshold) = (FIRST * ONE, largest);
        Self { size, threshold, largest, congested: 0, acknowledged: 0 }
    }

    /// Packets that may be in flight.
    pub(crate) const fn packets(&self) -> u64 {
        (self.size / ONE) as u64
    }

    /// Packets were acknowledged; `in_use`: the window was (nearly) full; `calm`: no notification has
    /// come for a while.
    pub(crate) fn on_ack(&mut self, packets: u64, in_use: bool, calm: bool) {
        self.acknowledged += packets;
        if self.acknowledged >= self.packets() {
            self.acknowledged = 0;
            if calm {
                self.congested -= self.congested / GAIN;
            }
        }
        if !in_use {
            return;
        }
        let packets = u32::try_from(packets).unwrap_or(u32::MAX).min(1 << 12);
        let grow = if self.size < self.threshold {
            packets * ONE
        } else {
            // The more senders share the path, the less each may add.
            let step = (ONE - self.congested).max(ONE / GAIN);
            (u64::from(packets) * u64::from(ONE) * u64::from(step) / u64::from(self.size))
                .try_into()
                .unwrap_or(ONE)
        };
        self.size = (self.size + grow).min(self.largest);
    }

    /// First packet loss of this round trip.
    pub(crate) fn on_loss(&mut self) {
        self.size = (self.size / 10 * 7).max(SMALLEST * ONE);
        self.threshold = self.size;
    }

    /// A congestion notification.
    pub(crate) fn on_mark(&mut self) {
        self.congested = match self.congested {
            0 => ONE,
            part => part + (ONE - part) / GAIN,
        };
        let cut = u64::from(self.size) * u64::from(self.congested) / u64::from(2 * ONE);
        self.size = self.size.saturating_sub(u32::try_from(cut).unwrap_or(u32::MAX)).max(ONE);
        self.threshold = self.size;
    }

    /// Silence: a transport timeout, or a second probe without an answer.
    pub(crate) fn on_timeout(&mut self) {
        self.threshold = (self.size / 2).max(2 * SMALLEST * ONE);
        self.size = SMALLEST * ONE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_halve_it_at_first_and_hardly_shrink_it_where_they_are_rare() {
        let mut w = CongestionWindow::new(1024);
        w.on_mark();
        assert_eq!(w.packets(), u64::from(FIRST / 2));
        (0..10).for_each(|_| w.on_mark());
        assert_eq!(w.packets(), 1);
        (0..2000).for_each(|_| w.on_ack(w.packets(), true, true));
        let before = w.packets();
        w.on_mark();
        assert!(w.packets() > before * 9 / 10, "{} of {before}", w.packets());
    }

    #[test]
    fn shrinks_on_loss_recovers_and_never_closes() {
        let mut w = CongestionWindow::new(1024);
        let start = w.packets();
        w.on_ack(10, true, true);
        assert_eq!(w.packets(), start + 10, "slow start");
        w.on_loss();
        let after = w.packets();
        assert!(after < start + 10);
        w.on_ack(after, true, true);
        assert_eq!(w.packets(), after + 1, "one packet per round trip");
        for _ in 0..100 {
            w.on_loss();
        }
        assert_eq!(w.packets(), u64::from(SMALLEST));
        w.on_timeout();
        for _ in 0..10_000 {
            w.on_ack(w.packets(), true, true);
        }
        assert_eq!(w.packets(), u64::from(LARGEST_BYTES / 1024));
    }
}
