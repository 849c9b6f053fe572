//! What waited for the GPU's copy engine is let go here, or fails.

use nobounce_memory::gpu::copy_engine::CopyError;
use nobounce_protocol::qp::{QpAttr, QpEvent, QpState, Status};

use super::engine::Core;
use super::entry::deliver;
use super::event::AsyncEvent;

impl Core {
    /// Starts the copies that were collected, and lets go of what waited for copies that are over.
    pub(super) fn release_held(&mut self) {
        if self.holding.is_empty() && !self.regions.stage.is_busy() {
            return;
        }
        // A copy that cannot be started is reported as a failure below.
        let _ = self.regions.stage.flush();
        self.regions.stage.poll();
        if let Some((ticket, error)) = self.regions.stage.take_failure() {
            self.fail_copies(ticket, &error);
        }
        for index in std::mem::take(&mut self.holding) {
            let Some(entry) = self.qps.get_mut(index as usize).and_then(Option::as_deref_mut) else {
                continue;
            };
            let Some(held) = &mut entry.held else { continue };
            let mut over = Vec::new();
            while let Some((ticket, _)) = held.completions.front()
                && self.regions.stage.is_over(*ticket)
                && let Some((_, completion)) = held.completions.pop_front()
            {
                over.push(completion);
            }
            held.listed = !held.is_empty();
            let sends = held.packet.is_some() || !held.answers.is_empty();
            if held.listed {
                self.holding.push(index);
            }
            let mut overflowed = None;
            for completion in over {
                overflowed = deliver(entry, completion).or(overflowed);
            }
            if sends {
                self.make_ready(index);
            }
            if let Some(cq) = overflowed {
                self.stop_users_of(cq);
            }
        }
    }

    /// A copy into GPU memory failed: the queue pairs whose bytes it carried cannot go on as if they had arrived.
    fn fail_copies(&mut self, ticket: u64, error: &CopyError) {
        self.regions.faults += 1;
        for index in 0..self.qps.len() {
            let Some(entry) = self.qps[index].as_deref_mut() else { continue };
            if entry.ticket < ticket || matches!(entry.qp.state(), QpState::Error | QpState::Reset) {
                continue;
            }
            tracing::warn!(qpn = entry.qpn.get(), %error, "a queue pair fails: its bytes did not reach the GPU");
            if let Some(held) = &mut entry.held {
                held.answers.clear();
                held.packet = None;
                for (_, completion) in held.completions.iter_mut().filter(|(waits, _)| *waits >= ticket) {
                    completion.status = Status::LocalProtection;
                }
            }
            let _ = entry.qp.modify(&QpAttr::to_state(QpState::Error)); // any state may go to the error state
            self.events.push(AsyncEvent::Qp { qpn: entry.qpn, event: QpEvent::Fatal });
            if let Ok(index) = u32::try_from(index) {
                self.settle(index);
            }
        }
    }
}
