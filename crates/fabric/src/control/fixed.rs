//! A constant window: for checks against theory.

use nobounce_protocol::congestion::{Ack, CongestionControl, Loss};
use nobounce_protocol::timing::Nanos;

/// A constant window.
#[derive(Debug)]
pub struct Fixed {
    window: u64,
}

impl Fixed {
    /// A window in bytes.
    pub const fn new(window: u64) -> Self {
        Self { window }
    }
}

impl CongestionControl for Fixed {
    fn begin(&mut self, _mtu: u32) {}

    fn on_ack(&mut self, _now: Nanos, _ack: Ack) {}

    fn on_mark(&mut self, _now: Nanos) {}

    fn on_loss(&mut self, _now: Nanos, _loss: Loss) -> bool {
        false
    }

    fn window(&self) -> u64 {
        self.window
    }
}
