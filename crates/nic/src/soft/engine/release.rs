//! What waited for the GPU's copy engine is let go here, or fails.

use std::time::Duration;

use nobounce_protocol::qp::{QpEvent, Status};
use nobounce_protocol::wire::Qpn;

use crate::soft::engine::entry::{QpEntry, deliver};
use crate::soft::engine::{Core, Engine};
use crate::soft::events::event::AsyncEvent;
use crate::soft::gpu::staging::{Changed, Owner};

/// How long a queue pair or a device that goes waits for copies into GPU memory, whose answers it owes. Microseconds are usual. Shorter
/// than the patience of its peers, who hear nothing meanwhile (8 times 268 ms).
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

impl Engine {
    /// Waits, not for long, until copies into GPU memory are over, and sends the answers that waited for them: before the device goes.
    pub(crate) fn drain(&mut self) {
        if !self.core.holding.is_empty() || self.core.regions.stage.is_busy() {
            self.core.regions.stage.drain(PATIENCE);
            self.core.release_held();
        }
        self.send_answers();
    }

    /// Sends what the queue pair still owes its peer, as far as it can be sent; whether nothing of it waits for copies into GPU memory.
    pub(crate) fn settle_debts(&mut self, qpn: Qpn) -> bool {
        self.core.release_held();
        self.core.make_ready(qpn.get() & 0xffff);
        self.send_answers();
        let Some(entry) = self.core.entry(qpn) else { return true };
        let ticket = entry.ticket;
        self.core.regions.stage.is_over(ticket)
    }
}

impl Core {
    /// Starts the copies that were collected, and lets go of what waited for copies that are over.
    pub(crate) fn release_held(&mut self) {
        if self.holding.is_empty() && !self.regions.stage.is_busy() {
            return;
        }
        self.regions.stage.flush();
        self.regions.stage.poll();
        while let Some(Changed { qp, psn, before }) = self.regions.stage.take_changed() {
            if let Some(entry) = self.qps.get_mut(qp as usize).and_then(Option::as_deref_mut) {
                entry.tell_before(psn, before);
            }
        }
        while let Some(index) = self.regions.stage.take_failed() {
            self.fail_placement(index);
        }
        if std::mem::take(&mut self.starved) {
            self.free_chunks();
        }
        for index in std::mem::take(&mut self.holding) {
            let Some(entry) = self.qps.get_mut(index as usize).and_then(Option::as_deref_mut) else {
                continue;
            };
            let Some(held) = &mut entry.held else { continue };
            let mut over = Vec::new();
            while let Some((after, _)) = held.completions.front()
                && self.regions.stage.is_settled(Owner { qp: index, after: *after })
                && let Some((_, completion)) = held.completions.pop_front()
            {
                over.push(completion);
            }
            held.listed = !held.is_empty();
            let sends = held.has_packets();
            if held.listed {
                self.holding.push(index);
            }
            let mut overflowed = None;
            for completion in over {
                overflowed = deliver(entry, completion).or(overflowed);
            }
            if entry.ends_sharing() {
                self.events.push(AsyncEvent::Qp { qpn: entry.qpn, event: QpEvent::LastWqeReached });
            }
            if sends {
                self.make_ready(index);
            }
            if let Some(cq) = overflowed {
                self.stop_users_of(cq);
            }
        }
    }

    /// A copy into GPU memory failed: the queue pair whose bytes it carried cannot go on as if they had arrived, and its peer must
    /// not think so either.
    fn fail_placement(&mut self, index: u32) {
        self.regions.faults += 1;
        let Some(entry) = self.qps.get_mut(index as usize).and_then(Option::as_deref_mut) else { return };
        tracing::warn!(qpn = entry.qpn.get(), "a queue pair fails: its bytes did not reach the GPU");
        if let Some(held) = &mut entry.held {
            held.forget_answers();
            for (_, completion) in held.completions.iter_mut().filter(|(_, c)| c.status == Status::Success) {
                completion.status = Status::LocalProtection;
            }
        }
        let from = entry.unanswered.unwrap_or(entry.qp.attr().rq_psn);
        entry.qp.handle_placement_fault(from);
        self.settle(index);
        self.make_ready(index);
    }

    /// Takes fetched bytes away from the queue pair that has fetched furthest ahead: somebody else cannot fetch any. It will fetch
    /// them again.
    fn free_chunks(&mut self) {
        let count = self.qps.len();
        let spare = |entry: &QpEntry| {
            // One that waits for a packet's payload sends as soon as it has it: it keeps one.
            let waits = entry.held.as_ref().is_some_and(|held| held.waits_for_payload());
            entry.feeds.as_ref().map_or(0, |feeds| feeds.len()).saturating_sub(usize::from(waits))
        };
        // Begins behind the one robbed last, so that it is not always the same.
        let richest = (1..=count)
            .map(|step| (self.robbed + step) % count)
            .max_by_key(|index| self.qps[*index].as_deref().map_or(0, spare));
        if let Some(index) = richest
            && let Some(entry) = self.qps[index].as_deref_mut()
            && spare(entry) > 0
            && let Some(feeds) = &mut entry.feeds
        {
            feeds.give_up_last();
            self.robbed = index;
        }
    }
}
