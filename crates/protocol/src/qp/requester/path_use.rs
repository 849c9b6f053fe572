//! What a requester takes of the path to its peer, and what it was told of that path.

/// Packets of a long message between two ACK requests, at most.
const ACK_EVERY: u64 = 30;

#[derive(Debug, Default)]
pub(super) struct PathUse {
    /// Bytes that may occupy the receiver's socket buffer because of this queue pair.
    pub(super) outstanding: u64,
    /// The last packet was held back only for lack of room on the path.
    pub(super) is_limited: bool,
    /// With a full window, keep at most one ACK request in flight.
    pub(super) asks_rarely: bool,
    /// Short WRITEs are sent as WRITEs of one packet each.
    pub(super) splits_writes: bool,
}

impl PathUse {
    /// Bytes have arrived, or were not sent.
    pub(super) fn release(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
    }

    /// Whether a packet with this cost fits into this room. A packet that does not is held back.
    #[inline]
    pub(super) fn takes(&mut self, cost: u64, room: u64) -> bool {
        self.is_limited = cost > room;
        !self.is_limited
    }

    /// Packets of a long message between two ACK requests: a small window asks several times, so
    /// that it does not leave in one burst.
    pub(super) const fn ack_every(&self, window: u64) -> u64 {
        let quarter = window / 4;
        if self.asks_rarely || quarter > ACK_EVERY {
            ACK_EVERY
        } else if quarter == 0 {
            1
        } else {
            quarter
        }
    }
}
