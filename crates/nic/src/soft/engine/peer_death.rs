//! Peers on this machine whose process was killed.
//!
//! A NIC learns of it only by asking: a queue pair that waits for its peer, and has nothing under way itself, would wait for ever. But whoever has
//! shared memory with a peer hears its connection end, and whoever goes on purpose says goodbye first. So queue pairs of one that went without
//! a word end in error, with an event and with flushed receives, as if they had asked and got no answer.

use std::cmp::Reverse;

use nobounce_protocol::timing::Nanos;

use crate::links::{Departed, now_ns};
use crate::soft::engine::Core;
use crate::soft::engine::entry::QpEntry;

/// Time to read what the dead one wrote before.
const GRACE_NS: Nanos = 100_000_000;
/// In the heap of timers, whose other entries are queue pairs.
pub(crate) const DEATH_TIMER: u32 = u32::MAX - 1;

impl Core {
    /// The shorter way to a peer has ended.
    #[cold]
    pub(crate) fn lose_peer(&mut self, departed: Departed) {
        let Departed { peer, died } = departed;
        let end = now_ns() + GRACE_NS;
        for entry in self.qps.iter_mut().flatten() {
            // Packets to those whose shorter way has ended need an ICRC again.
            entry.part_with(peer);
            if died && entry.peer() == peer {
                entry.ends_at = Some(end);
            }
        }
        self.askers.forget(peer);
        if died {
            self.timers.push(Reverse((end, DEATH_TIMER)));
        }
    }

    /// Ends the queue pairs whose peers died that long ago.
    #[cold]
    pub(crate) fn bury(&mut self, now: Nanos) {
        for at in 0..self.qps.len() {
            let due = |entry: &&mut QpEntry| entry.ends_at.is_some_and(|end| end <= now);
            let Some(entry) = self.qps[at].as_deref_mut().filter(due) else { continue };
            entry.ends_at = None;
            if entry.qp.handle_peer_death() {
                let index = entry.index();
                tracing::warn!(qpn = %entry.qpn, "the peer's process was killed: its queue pair here ends in error");
                self.settle(index);
                self.make_ready(index);
            }
        }
    }
}
