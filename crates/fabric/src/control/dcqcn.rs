//! Rate control by congestion notification packets, after DCQCN (Zhu et al., SIGCOMM 2015): the
//! algorithm of the reaction point, with the paper's parameters.

use nobounce_protocol::congestion::{Ack, CongestionControl, Loss};
use nobounce_protocol::timing::Nanos;
use serde::Serialize;

use super::{Path, RATE_WINDOW, gap_of};
use crate::units::{MICROSECOND, NANOSECOND, Picos, float};

/// Parameters, by the names of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DcqcnOptions {
    /// Gain of the estimate of congestion.
    pub g: f64,
    /// Time without a notification after which that estimate falls.
    pub alpha_timer: Picos,
    /// Time between two increases.
    pub rate_timer: Picos,
    /// Bytes between two increases.
    pub byte_counter: f64,
    /// Increases by halves towards the rate before the last cut, before that rate itself grows.
    pub recovery_steps: u32,
    /// Additive increase, in Gb/s.
    pub additive: f64,
    /// Hyper increase, in Gb/s.
    pub hyper: f64,
    /// Lowest rate, in Gb/s.
    pub lowest: f64,
}

impl Default for DcqcnOptions {
    fn default() -> Self {
        Self {
            g: 1.0 / 256.0,
            alpha_timer: 55 * MICROSECOND,
            rate_timer: 55 * MICROSECOND,
            byte_counter: 10e6,
            recovery_steps: 5,
            additive: 0.04,
            hyper: 0.2,
            lowest: 0.01,
        }
    }
}

/// The reaction point of one sender.
#[derive(Debug)]
pub struct Dcqcn {
    options: DcqcnOptions,
    line: f64,
    current: f64,
    target: f64,
    alpha: f64,
    /// Before the first notification the sender is not limited, and no timer runs.
    limited: bool,
    alpha_due: Picos,
    rate_due: Picos,
    timer_steps: u32,
    byte_steps: u32,
    bytes: f64,
}

impl Dcqcn {
    /// A sender at line rate.
    pub fn new(options: DcqcnOptions, path: Path) -> Self {
        Self {
            options,
            line: path.line_gbits,
            current: path.line_gbits,
            target: path.line_gbits,
            alpha: 1.0,
            limited: false,
            alpha_due: 0,
            rate_due: 0,
            timer_steps: 0,
            byte_steps: 0,
            bytes: 0.0,
        }
    }

    fn catch_up(&mut self, now: Picos) {
        if !self.limited {
            return;
        }
        while self.alpha_due <= now {
            self.alpha *= 1.0 - self.options.g;
            self.alpha_due += self.options.alpha_timer;
        }
        while self.limited && self.rate_due <= now {
            self.timer_steps += 1;
            self.rate_due += self.options.rate_timer;
            self.increase();
        }
    }

    /// The rate in Gb/s.
    fn rate(&mut self, now: Picos) -> f64 {
        self.catch_up(now);
        self.current
    }

    fn increase(&mut self) {
        let steps = self.options.recovery_steps;
        if self.timer_steps.min(self.byte_steps) > steps {
            let beyond = f64::from(self.timer_steps.min(self.byte_steps) - steps);
            self.target += beyond * self.options.hyper;
        } else if self.timer_steps.max(self.byte_steps) > steps {
            self.target += self.options.additive;
        }
        self.target = self.target.min(self.line);
        self.current = f64::midpoint(self.target, self.current);
        if self.current > 0.999 * self.line {
            (self.current, self.target, self.limited, self.alpha) = (self.line, self.line, false, 1.0);
        }
    }

    fn cut(&mut self, now: Picos) {
        self.catch_up(now);
        self.target = self.current;
        self.current = (self.current * (1.0 - self.alpha / 2.0)).max(self.options.lowest);
        self.alpha = (1.0 - self.options.g) * self.alpha + self.options.g;
        self.limited = true;
        (self.timer_steps, self.byte_steps, self.bytes) = (0, 0, 0.0);
        self.alpha_due = now + self.options.alpha_timer;
        self.rate_due = now + self.options.rate_timer;
    }
}

impl CongestionControl for Dcqcn {
    fn begin(&mut self, _mtu: u32) {}

    fn on_sent(&mut self, now: Nanos, bytes: u64) {
        self.catch_up(picos(now));
        self.bytes += float(bytes);
        if self.limited && self.bytes >= self.options.byte_counter {
            self.bytes = 0.0;
            self.byte_steps += 1;
            self.increase();
        }
    }

    fn on_ack(&mut self, _now: Nanos, _ack: Ack) {}

    fn on_mark(&mut self, now: Nanos) {
        self.cut(picos(now));
    }

    fn on_loss(&mut self, now: Nanos, _loss: Loss) -> bool {
        self.cut(picos(now));
        true
    }

    fn window(&self) -> u64 {
        RATE_WINDOW
    }

    fn gap(&mut self, now: Nanos, bytes: u64) -> Nanos {
        gap_of(bytes, self.rate(picos(now)))
    }
}

const fn picos(now: Nanos) -> Picos {
    now.saturating_mul(NANOSECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Nanos = 1_000;

    fn path() -> Path {
        Path { line_gbits: 40.0, round_trip: 10 * MICROSECOND, mtu: 1024.0, switches: 1 }
    }

    #[test]
    fn halves_at_first_and_recovers_by_halves() {
        let mut sender = Dcqcn::new(DcqcnOptions::default(), path());
        assert_eq!(sender.rate(0), 40.0);
        sender.on_mark(US);
        assert_eq!(sender.rate(MICROSECOND), 20.0);
        // One step: half of the way back.
        assert_eq!(sender.rate(57 * MICROSECOND), 30.0);
        assert_eq!(sender.rate(112 * MICROSECOND), 35.0);
        sender.on_mark(112 * US);
        let after = sender.rate(112 * MICROSECOND);
        assert!((17.5..18.0).contains(&after), "alpha has fallen twice by 1/256: {after}");
    }

    #[test]
    fn never_falls_below_its_lowest_rate() {
        let mut sender = Dcqcn::new(DcqcnOptions::default(), path());
        for at in 1..100 {
            sender.on_mark(at * US);
        }
        assert_eq!(sender.rate(100 * MICROSECOND), 0.01);
    }
}
