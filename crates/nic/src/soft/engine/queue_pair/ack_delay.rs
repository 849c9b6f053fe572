//! Delayed acknowledgements: an ACK waits to piggyback on a request.

use std::collections::VecDeque;
use std::sync::LazyLock;

use nobounce_protocol::timing::Nanos;

use crate::process::cpu::has_many_cpus;
use crate::soft::qp_index::QpIndex;

/// This many requests in a row that follow the peer's make a ping-pong pattern.
const PING_PONG: u8 = 4;

/// Delayed ACK: how long an acknowledgement waits to piggyback on a request.
#[derive(Debug)]
struct AckDelay {
    /// A request posted this soon after the peer's counts as a reply to it.
    at_once: Nanos,
    /// How long the ACK waits for the expected request.
    wait: Nanos,
    /// The same if the peer sends long messages by UDP.
    wait_if_long: Nanos,
}

/// With a CPU for each thread, an application replies within a few microseconds. A peer may need
/// the ACK before its next message (NCCL's send and receive of 8 bytes: 22 us with 25 us, 19 with
/// 6). On a small machine the other process must be scheduled first.
static ACK_DELAY: LazyLock<AckDelay> = LazyLock::new(|| {
    if has_many_cpus() {
        AckDelay { at_once: 50_000, wait: 6_000, wait_if_long: 25_000 }
    } else {
        AckDelay { at_once: 50_000, wait: 25_000, wait_if_long: 25_000 }
    }
});

/// Queue pairs with a delayed ACK.
#[derive(Debug, Default)]
pub(crate) struct PendingAcks {
    /// Until no more urgent packet is pending.
    pub(crate) soon: VecDeque<QpIndex>,
    /// Until the given time, earliest first.
    pub(crate) delayed: VecDeque<(Nanos, QpIndex)>,
}

/// What a queue pair knows about the timing of its peer's requests and its own.
#[derive(Debug, Default)]
pub(crate) struct AckTiming {
    /// It is in a list of queue pairs with a delayed ACK.
    pub(crate) pending: bool,
    /// When its peer's last request arrived, until the application posts. 0: none since.
    heard_at: Nanos,
    /// Its peer's last packet belonged to a long message.
    pub(crate) heard_long: bool,
    /// Ping-pong detection: how often in a row the application followed the peer's request at once
    /// with its own.
    ping_pongs: u8,
}

impl AckTiming {
    /// The peer sent a request.
    pub(crate) fn note_heard(&mut self, now: Nanos) {
        self.heard_at = now;
    }

    /// The application posted a request.
    pub(crate) fn note_posted(&mut self, now: Nanos) {
        let heard = std::mem::take(&mut self.heard_at);
        if heard != 0 {
            let at_once = now.saturating_sub(heard) < ACK_DELAY.at_once;
            self.ping_pongs = if at_once { self.ping_pongs.saturating_add(1) } else { 0 };
        }
    }

    /// A delayed ACK expired without a request to piggyback on.
    pub(crate) fn note_silence(&mut self) {
        self.ping_pongs = 0;
    }

    /// Puts that queue pair into the list of those with a delayed ACK, unless it is in one; `wire`:
    /// its packets leave by UDP.
    ///
    /// In a ping-pong pattern the ACK waits briefly for the next request. A peer that polls for the
    /// request gets the ACK with it. Its application may poll memory only, without a call that
    /// would receive a separate ACK.
    pub(crate) fn delay(&mut self, now: Nanos, index: QpIndex, wire: bool, pending_acks: &mut PendingAcks) {
        if self.pending {
            return;
        }
        self.pending = true;
        if self.ping_pongs >= PING_PONG {
            // When a long message has arrived, the next ones are already in flight. The sender does
            // not wait for the first ACK, and by UDP an ACK is a system call at both ends.
            let wait = if self.heard_long && wire { ACK_DELAY.wait_if_long } else { ACK_DELAY.wait };
            pending_acks.delayed.push_back((now + wait, index));
        } else {
            pending_acks.soon.push_back(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The peer's request arrives at `now`; the application posts its own after this delay.
    fn exchange(ack: &mut AckTiming, now: Nanos, after: Nanos) {
        ack.note_heard(now);
        ack.note_posted(now + after);
    }

    /// When the ACK of a packet at `now` is due; `None`: as soon as nothing more urgent is pending.
    fn delay(ack: &mut AckTiming, now: Nanos) -> Option<Nanos> {
        let mut pending_acks = PendingAcks::default();
        ack.pending = false;
        ack.delay(now, QpIndex::new(2), true, &mut pending_acks);
        assert_eq!(pending_acks.soon.len() + pending_acks.delayed.len(), 1);
        pending_acks.delayed.front().map(|(due, _)| due - now)
    }

    #[test]
    fn an_acknowledgement_waits_for_the_next_request_of_a_ping_pong() {
        let mut ack = AckTiming::default();
        assert_eq!(delay(&mut ack, 0), None);
        for round in 1..=u64::from(PING_PONG) {
            assert_eq!(delay(&mut ack, round * 1000), None, "not a ping-pong yet");
            exchange(&mut ack, round * 1000, 500);
        }
        assert_eq!(delay(&mut ack, 9000), Some(ACK_DELAY.wait));
        exchange(&mut ack, 9000, ACK_DELAY.at_once);
        assert_eq!(delay(&mut ack, 200_000), None, "the application takes its time");
    }

    #[test]
    fn an_acknowledgement_that_waited_in_vain_ends_the_delay() {
        let mut ack = AckTiming::default();
        (0..10).for_each(|round| exchange(&mut ack, round * 1000 + 1, 500));
        assert!(delay(&mut ack, 20_000).is_some());
        ack.note_silence();
        assert_eq!(delay(&mut ack, 30_000), None);
    }
}
