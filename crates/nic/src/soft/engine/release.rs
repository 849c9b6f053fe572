//! Releases, or fails, what waited for the GPU's copy engine.

use std::time::Duration;

use nobounce_protocol::qp::{QpEvent, Status};
use nobounce_protocol::wire::Qpn;

use crate::soft::engine::queue_pair::{QueuePair, deliver};
use crate::soft::engine::{Core, Engine};
use crate::soft::events::event::AsyncEvent;
use crate::soft::gpu::staging::{Changed, CopyOwner};
use crate::soft::qp_index::QpIndex;

/// How long a closing queue pair or device waits for copies into GPU memory with pending ACKs.
/// Microseconds are usual. Shorter than the retry time of its peers, which receive nothing
/// meanwhile (8 times 268 ms).
pub(crate) const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

impl Engine {
    /// Waits briefly until copies into GPU memory are over, and sends the ACKs that waited for
    /// them: before the device closes.
    pub(crate) fn drain(&mut self) {
        if !self.core.scheduler.copies.holding.is_empty() || self.core.regions.staging.is_busy() {
            self.core.regions.staging.drain(RELEASE_TIMEOUT);
            self.core.release_held();
        }
        self.send_answers();
    }

    /// Sends the queue pair's pending ACKs, as far as possible. Returns whether none of them waits
    /// for copies into GPU memory.
    pub(crate) fn settle_debts(&mut self, qpn: Qpn) -> bool {
        self.core.release_held();
        self.core.make_ready(QpIndex::of(qpn));
        self.send_answers();
        let Some(entry) = self.core.entry(qpn) else { return true };
        let ticket = entry.gpu.ticket;
        self.core.regions.staging.is_over(ticket)
    }
}

impl Core {
    /// Starts the collected copies, and releases what waited for finished ones.
    pub(crate) fn release_held(&mut self) {
        if self.scheduler.copies.holding.is_empty() && !self.regions.staging.is_busy() {
            return;
        }
        self.regions.staging.flush();
        self.regions.staging.poll();
        while let Some(Changed { qp, psn, before }) = self.regions.staging.take_changed() {
            if let Some(entry) = self.qps.get_mut(qp) {
                entry.tell_before(psn, before);
            }
        }
        while let Some(index) = self.regions.staging.take_failed() {
            self.fail_placement(index);
        }
        if std::mem::take(&mut self.scheduler.copies.starved) {
            self.free_chunks();
        }
        for index in std::mem::take(&mut self.scheduler.copies.holding) {
            let Some(entry) = self.qps.get_mut(index) else {
                continue;
            };
            let Some(held) = &mut entry.gpu.held else { continue };
            let mut over = Vec::new();
            while let Some((after, _)) = held.completions.front()
                && self.regions.staging.is_settled(CopyOwner { qp: index, after: *after })
                && let Some((_, completion)) = held.completions.pop_front()
            {
                over.push(completion);
            }
            held.listed = !held.is_empty();
            let sends = held.has_packets();
            if held.listed {
                self.scheduler.copies.holding.push(index);
            }
            let mut overflowed = None;
            for completion in over {
                overflowed = deliver(entry, completion).or(overflowed);
            }
            if entry.ends_sharing() {
                self.reports.events.push(AsyncEvent::Qp { qpn: entry.qpn, event: QpEvent::LastWqeReached });
            }
            if sends {
                self.make_ready(index);
            }
            if let Some(cq) = overflowed {
                self.stop_users_of(cq);
            }
        }
    }

    /// A copy into GPU memory failed: the queue pair that received the bytes fails, and its peer
    /// must not get an ACK for them.
    fn fail_placement(&mut self, index: QpIndex) {
        self.regions.faults += 1;
        let Some(entry) = self.qps.get_mut(index) else { return };
        tracing::warn!(qpn = entry.qpn.get(), "a queue pair fails: its bytes did not reach the GPU");
        if let Some(held) = &mut entry.gpu.held {
            held.forget_answers();
            for (_, completion) in held.completions.iter_mut().filter(|(_, c)| c.status == Status::Success) {
                completion.status = Status::LocalProtection;
            }
        }
        let from = entry.sent.unanswered.unwrap_or(entry.qp.attr().rq_psn);
        entry.qp.handle_placement_fault(from);
        self.settle(index);
        self.make_ready(index);
    }

    /// Reclaims a chunk from the queue pair with the most fetches, so that another can fetch. It
    /// fetches the bytes again later.
    fn free_chunks(&mut self) {
        let spare = |entry: &QueuePair| {
            // A queue pair that waits for a packet's payload sends as soon as it has it: it keeps
            // one.
            let waits = entry.gpu.held.as_ref().is_some_and(|held| held.waits_for_payload());
            entry
                .gpu
                .prefetches
                .as_ref()
                .map_or(0, |prefetches| prefetches.len())
                .saturating_sub(usize::from(waits))
        };
        // Round-robin: begins behind the reclaim cursor, so that it is not always the same.
        let richest = self
            .qps
            .indexes_behind(self.scheduler.copies.reclaim_cursor)
            .max_by_key(|index| self.qps.get(*index).map_or(0, spare));
        if let Some(index) = richest
            && let Some(entry) = self.qps.get_mut(index)
            && spare(entry) > 0
            && let Some(prefetches) = &mut entry.gpu.prefetches
        {
            prefetches.give_up_last();
            self.scheduler.copies.reclaim_cursor = index;
        }
    }
}
