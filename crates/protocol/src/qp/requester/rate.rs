//! How fast a requester may send: congestion control, and the pace that it sets.

use crate::congestion::{Aimd, CongestionControl};
use crate::qp::Params;
use crate::qp::pace::Pace;
use crate::timing::Nanos;

/// The PSN window: less than half of the PSN space, or old and new PSNs would be ambiguous.
const MAX_OUTSTANDING: u64 = (1 << 23) - 1;

#[derive(Debug)]
pub(super) struct Rate {
    pub(super) control: Box<dyn CongestionControl>,
    pub(super) pace: Pace,
}

impl Rate {
    pub(super) fn new() -> Self {
        Self { control: Box::new(Aimd::default()), pace: Pace::default() }
    }

    /// A connection with that MTU begins.
    pub(super) fn begin(&mut self, mtu: u32) {
        self.control.begin(mtu);
        self.pace = Pace::default();
    }

    /// Packets that may be in flight.
    pub(super) fn window(&self, params: &Params) -> u64 {
        (self.control.window() / u64::from(params.mtu)).clamp(1, MAX_OUTSTANDING)
    }

    /// So many packets leave: the next ones wait as long as congestion control says.
    pub(super) fn note_sent(&mut self, now: Nanos, packets: u64, params: &Params) {
        let bytes = packets * u64::from(params.mtu);
        self.control.on_sent(now, bytes);
        self.pace.note_sent(now, self.control.gap(now, bytes));
    }
}
