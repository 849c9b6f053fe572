//! Peers on this host whose process was killed.
//!
//! A NIC detects this only by sending: a queue pair that waits for its peer, with nothing in
//! flight, would wait forever. But a shared-memory link to a peer reports the end of its
//! connection. A peer that closes cleanly sends a goodbye first. So queue pairs of a peer that
//! ended without one go to the error state. They get an event and flushed receives, as after
//! exhausted retries.

use nobounce_protocol::timing::Nanos;

use crate::links::{Departed, now_ns};
use crate::soft::engine::Core;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::timer::Timer;

/// Time to receive what the dead peer had sent.
const GRACE_NS: Nanos = 100_000_000;

impl Core {
    /// The shared-memory link to a peer has ended.
    #[cold]
    pub(crate) fn lose_peer(&mut self, departed: Departed) {
        let Departed { peer, died } = departed;
        let end = now_ns() + GRACE_NS;
        for entry in self.qps.iter_mut() {
            // Packets to a peer without shared memory need an ICRC again.
            entry.part_with(peer);
            if died && entry.peer() == peer {
                entry.ends_at = Some(end);
            }
        }
        self.same_host.senders.forget(peer);
        if died {
            self.scheduler.set_timer(end, Timer::PeerDeath);
        }
    }

    /// Moves the queue pairs of expired peers to the error state.
    #[cold]
    pub(crate) fn expire_dead_peers(&mut self, now: Nanos) {
        for index in self.qps.indexes() {
            let due = |entry: &&mut QueuePair| entry.ends_at.is_some_and(|end| end <= now);
            let Some(entry) = self.qps.get_mut(index).filter(due) else { continue };
            entry.ends_at = None;
            if entry.qp.handle_peer_death() {
                tracing::warn!(qpn = %entry.qpn, "the peer's process was killed: its queue pair here ends in error");
                self.settle(index);
                self.make_ready(index);
            }
        }
    }
}
