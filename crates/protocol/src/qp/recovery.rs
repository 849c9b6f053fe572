//! Loss detection and retransmission: the state of a requester that waits for an answer.

use super::Params;
use crate::timing::{self, Nanos};

/// Loss detection and retransmission.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    pub(super) last_progress: Nanos,
    pub(super) probe_at: Option<Nanos>,
    pub(super) probes: u32,
    /// The answer before came after a probe.
    pub(super) was_probed: bool,
    pub(super) send_probe: bool,
    pub(super) rnr_until: Option<Nanos>,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    /// When a NAK without progress arrived, or cost a retry.
    pub(super) stalled_since: Option<Nanos>,
    /// Losses before this PSN have already shrunk the window.
    pub(super) recovery_point: u64,
    /// Silence closed the window: if nothing before this PSN proves lost, it opens again.
    pub(super) silent_before: Option<u64>,
    /// PSN and time of the last rewind, so that one loss does not cause two.
    pub(super) rewound: Option<(u64, Nanos)>,
}

impl Recovery {
    pub(super) fn refill_retries(&mut self, params: &Params) {
        self.retries = params.retry_cnt;
        self.rnr_retries = params.rnr_retry;
    }

    /// Whether an ACK timeout has passed without progress since the first NAK, or since the last
    /// retry that NAKs cost. A burst of NAKs, forged ones included, must not use up the retries.
    pub(super) fn stalled(&mut self, now: Nanos, params: &Params) -> bool {
        let since = *self.stalled_since.get_or_insert(now);
        let stalled = timing::ack_timeout(params.timeout).is_some_and(|limit| now >= since + limit);
        if stalled {
            self.stalled_since = Some(now);
        }
        stalled
    }

    /// Handles an RNR NAK: waits as long as the peer asks; false if no RNR retry is left.
    pub(super) fn wait_for_receive(&mut self, now: Nanos, code: u8, params: &Params) -> bool {
        if self.rnr_retries == 0 {
            return false;
        }
        // 7 stands for no limit.
        if params.rnr_retry < 7 {
            self.rnr_retries -= 1;
        }
        let until = now + timing::rnr_timer(code);
        self.rnr_until = Some(until);
        // The packet arrived and the peer lives: the delay is neither silence nor loss.
        self.last_progress = until;
        self.retries = params.retry_cnt;
        true
    }

    pub(super) fn spend_retry(&mut self) -> bool {
        let left = self.retries > 0;
        self.retries = self.retries.saturating_sub(1);
        left
    }
}
