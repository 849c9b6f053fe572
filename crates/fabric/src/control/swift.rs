//! Window control by delay, after Swift (Kumar et al., SIGCOMM 2020): additive increase below a
//! target delay, multiplicative decrease by the excess above it, a target that grows as windows
//! shrink, and pacing for windows of less than a packet.
//!
//! Some things are this crate's own: a start by doubling until the first delay above the target,
//! also after a pause; and, as an option, congestion notifications that count as a delay above it.

use nobounce_protocol::congestion::{Ack, CongestionControl, Loss};
use nobounce_protocol::timing::Nanos;
use serde::Serialize;

use super::{Path, gap_of};
use crate::units::{MICROSECOND, NANOSECOND, Picos, float, whole};

/// Parameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SwiftOptions {
    /// Queueing delay that a window of [`Self::scale_to`] packets tolerates.
    pub queueing: Picos,
    /// The same for each switch on the path, on top.
    pub per_switch: Picos,
    /// What smaller windows tolerate on top, at most.
    pub scale_range: Picos,
    /// Windows of so many packets or fewer tolerate all of it.
    pub scale_from: f64,
    /// Windows of so many packets or more tolerate none of it.
    pub scale_to: f64,
    /// Growth in a round trip, as a share of what the empty path holds.
    pub additive: f64,
    /// Share of the excess delay by which it shrinks.
    pub beta: f64,
    /// Most that it shrinks by in a round trip.
    pub largest_cut: f64,
    /// Bytes in the first window.
    pub first: u64,
    /// Smallest window in packets.
    pub smallest: f64,
    /// Whether congestion notifications shrink the window, too.
    pub notified: bool,
}

impl Default for SwiftOptions {
    fn default() -> Self {
        Self {
            queueing: 2 * MICROSECOND,
            per_switch: 2 * MICROSECOND,
            scale_range: 4 * MICROSECOND,
            scale_from: 0.1,
            scale_to: 100.0,
            additive: 1.0 / 128.0,
            beta: 0.8,
            largest_cut: 0.5,
            first: 16 << 10,
            smallest: 0.01,
            notified: false,
        }
    }
}

/// The window of one sender.
#[derive(Debug)]
pub struct Swift {
    options: SwiftOptions,
    path: Path,
    /// In packets.
    window: f64,
    /// What the empty path holds.
    path_holds: f64,
    starting: bool,
    round_trip: f64,
    may_cut_at: Picos,
}

impl Swift {
    /// A sender with its first window.
    pub fn new(options: SwiftOptions, path: Path) -> Self {
        Self {
            window: float(options.first) / path.mtu,
            path_holds: path.line_gbits * float(path.round_trip) / 8_000.0 / path.mtu,
            options,
            path,
            starting: true,
            round_trip: float(path.round_trip),
            may_cut_at: 0,
        }
    }

    /// Round trip that the window tolerates, in picoseconds.
    fn target(&self) -> f64 {
        let options = &self.options;
        let inverse = |packets: f64| 1.0 / packets.sqrt();
        let (from, to) = (inverse(options.scale_from), inverse(options.scale_to));
        let share = ((inverse(self.window) - to) / (from - to)).clamp(0.0, 1.0);
        let tolerated = options.queueing + u64::from(self.path.switches) * options.per_switch;
        float(self.path.round_trip + tolerated) + share * float(options.scale_range)
    }

    /// The rate in Gb/s.
    fn rate(&self) -> f64 {
        // A window that leaves within a round trip needs no more; a little more keeps it open. The
        // target stands for the round trip: a sender with a small window measures it so rarely that
        // it would stay slow long after a queue is gone.
        let gain = if self.window < 1.0 { 1.0 } else { 1.25 };
        (gain * self.window * self.path.mtu * 8_000.0 / self.target()).min(self.path.line_gbits)
    }

    fn cut(&mut self, now: Picos, factor: f64) {
        self.starting = false;
        if now < self.may_cut_at {
            return;
        }
        self.window = (self.window * factor).max(self.options.smallest);
        self.may_cut_at = now + whole(self.round_trip);
    }
}

impl CongestionControl for Swift {
    fn begin(&mut self, _mtu: u32) {}

    fn on_ack(&mut self, now: Nanos, ack: Ack) {
        let Some(round_trip) = ack.round_trip.map(|time| float(time * NANOSECOND)) else { return };
        self.round_trip = round_trip;
        let (packets, target) = (float(ack.bytes) / self.path.mtu, self.target());
        if round_trip >= target {
            let excess = (round_trip - target) / round_trip;
            self.cut(
                now * NANOSECOND,
                (1.0 - self.options.beta * excess).max(1.0 - self.options.largest_cut),
            );
            return;
        }
        let growth = self.options.additive * self.path_holds * packets / self.window.max(1.0);
        let growth = if self.starting { packets } else { growth };
        // Twice the path, for the queue that the target allows.
        self.window = (self.window + growth).min((2.0 * self.path_holds).max(8.0));
    }

    fn on_mark(&mut self, now: Nanos) {
        if self.options.notified {
            self.cut(now * NANOSECOND, 0.8);
        }
    }

    fn on_loss(&mut self, now: Nanos, _loss: Loss) -> bool {
        self.cut(now * NANOSECOND, 1.0 - self.options.largest_cut);
        true
    }

    fn on_restart(&mut self, _now: Nanos) {
        // What was known of the path is old.
        self.window = self.window.max(float(self.options.first) / self.path.mtu);
        self.starting = true;
    }

    fn window(&self) -> u64 {
        whole(self.window * self.path.mtu)
    }

    fn gap(&mut self, _now: Nanos, bytes: u64) -> Nanos {
        gap_of(bytes, self.rate())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sender() -> Swift {
        let path = Path { line_gbits: 100.0, round_trip: 10 * MICROSECOND, mtu: 4096.0, switches: 1 };
        Swift::new(SwiftOptions::default(), path)
    }

    const US: Nanos = 1_000;

    fn ack(micros: u64) -> Ack {
        Ack { bytes: 4096, round_trip: Some(micros * US), in_use: true }
    }

    #[test]
    fn doubles_then_adds_and_shrinks_once_per_round_trip() {
        let mut sender = sender();
        for _ in 0..4 {
            sender.on_ack(0, ack(11));
        }
        assert_eq!(sender.window(), 8 * 4096);
        sender.on_ack(20 * US, ack(40));
        let cut = sender.window();
        assert!(cut < 7 * 4096, "{cut}");
        sender.on_ack(21 * US, ack(40));
        assert_eq!(sender.window(), cut);
        sender.on_ack(90 * US, ack(11));
        assert!(sender.window() > cut && sender.window() < cut + 4096);
    }

    #[test]
    fn small_windows_tolerate_more_delay_and_are_paced() {
        let mut sender = sender();
        let wide = sender.target();
        for round in 1..100 {
            sender.on_ack(round * 200 * US, ack(200));
        }
        assert!(sender.target() > wide);
        assert!(sender.window() < 4096);
        let rate = sender.rate();
        let paced = float(sender.window()) * 8_000.0 / sender.target();
        assert!((rate - paced).abs() < 0.01 * rate, "{rate} Gb/s, a packet in a target is {paced}");
    }
}
