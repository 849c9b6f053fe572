//! A constant window: for checks against theory, and for queue pairs without congestion control.

use super::{Ack, CongestionControl, Path};
use crate::units::Picos;

/// A constant window at line rate.
#[derive(Debug)]
pub struct Fixed {
    window: f64,
    line: f64,
}

impl Fixed {
    /// A window in bytes.
    pub fn new(window: f64, path: Path) -> Self {
        Self { window, line: path.line_gbits }
    }
}

impl CongestionControl for Fixed {
    fn on_sent(&mut self, _now: Picos, _bytes: f64) {}

    fn on_ack(&mut self, _now: Picos, _ack: Ack) {}

    fn on_congestion_notification(&mut self, _now: Picos) {}

    fn on_loss(&mut self, _now: Picos) {}

    fn rate(&mut self, _now: Picos) -> f64 {
        self.line
    }

    fn window(&self) -> f64 {
        self.window
    }
}
