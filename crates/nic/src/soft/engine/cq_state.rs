//! Completion queues as queue pairs use them.

use nobounce_memory::barrier;
use nobounce_protocol::qp::{Completion, Status};
use nobounce_protocol::wire::Qpn;

use crate::links::now_ns;
use crate::soft::engine::completions::Completions;
use crate::work::WorkCompletion;

/// What a completion queue and its queue pairs share.
pub(crate) type CqInner = Completions<WorkCompletion>;

impl CqInner {
    /// Adds a completion of a queue pair; false at the first overflow.
    pub(crate) fn deliver(&self, qpn: Qpn, completion: Completion) -> bool {
        // Data first, then its completion.
        barrier::before_completion();
        let urgent = completion.solicited || completion.status != Status::Success;
        let completion = WorkCompletion {
            wr_id: completion.wr_id,
            status: completion.status,
            kind: completion.kind,
            byte_len: completion.byte_len,
            immediate: completion.immediate,
            invalidated: completion.invalidated,
            qpn,
            source: completion.source,
            timestamp: if self.records_time() { now_ns() } else { 0 },
        };
        self.push(completion, urgent)
    }

    /// Removes completions of a destroyed queue pair.
    pub(crate) fn forget_qp(&self, qpn: Qpn) {
        self.forget(|completion| completion.qpn == qpn);
    }
}
