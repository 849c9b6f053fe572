//! Transmission: batches of what may leave.

use nobounce_protocol::timing::Nanos;

use crate::links::now_ns;
use crate::soft::engine::{Core, Engine};

/// Batches sent in one call.
const MAX_BATCHES: usize = 16;

/// Which of the delayed ACKs leave now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    /// Those that can piggyback on a request.
    Travelling,
    /// Also those whose delay has expired.
    Due,
    All,
}

impl Engine {
    /// Sends what may leave, including the delayed ACKs that `answers` selects.
    pub(crate) fn transmit(&mut self, now: Nanos, answers: Answers) {
        if !self.core.same_host.unresolved.is_empty() {
            let Self { link, core, .. } = self;
            core.same_host.resolve_local_peers(&mut **link, &mut core.qps);
        }
        self.transmit_batches(now, answers);
        self.link.wake_peers();
    }

    fn transmit_batches(&mut self, now: Nanos, answers: Answers) {
        for _ in 0..MAX_BATCHES {
            if self.link.send_blocked() {
                return; // the link reports the retry time by next_deadline()
            }
            if std::mem::take(&mut self.core.scheduler.answers_are_next) {
                self.core.fill_answers(now, false);
            }
            let full = self.core.fill_beside() || self.core.fill(now);
            // Under a sustained load of full batches, as from long READs, delayed ACKs would starve
            // behind them.
            self.core.scheduler.answers_are_next = full;
            let travels = !self.core.tx.is_empty();
            if !full && (travels || answers != Answers::Travelling) {
                self.core.fill_answers(now, travels || answers == Answers::All);
            }
            if self.core.tx.is_empty() {
                self.core.tx.let_go();
                return;
            }
            self.core.account.counters.sent_pkts += self.core.tx.count() as u64;
            self.core.scheduler.note_active(now);
            self.link.send(&mut self.core.tx);
            // A full batch takes as long as several posts: submissions do not wait for all batches.
            if !full || (answers != Answers::All && !self.core.submissions.is_empty()) {
                return;
            }
        }
    }

    /// Sends the delayed ACKs.
    pub(crate) fn send_answers(&mut self) {
        self.transmit(now_ns(), Answers::All);
    }
}

impl Core {
    /// Fills the batch with packets of no queue pair: returned markers, and presence. Whether it is
    /// full.
    fn fill_beside(&mut self) -> bool {
        let Self { same_host, presences, tx, account, .. } = self;
        same_host.fill(tx, &mut account.counters.sent_markers) || (presences.has_work() && presences.fill(tx))
    }
}
