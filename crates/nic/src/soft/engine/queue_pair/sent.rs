//! What a queue pair has sent, so that each payload is counted once.

use nobounce_protocol::wire::{Header, Opcode, Psn, Syndrome};

use crate::soft::engine::once::Once;

/// Packets that have left.
#[derive(Debug, Default)]
pub(crate) struct SentPackets {
    /// The peer's first packet that no sent response covers. `None`: no response has left.
    pub(crate) unanswered: Option<Psn>,
    /// Its requests and responses whose payload has been counted.
    requests: Once,
    answers: Once,
}

impl SentPackets {
    /// A packet left: records what it acknowledges; returns whether it left for the first time.
    #[inline]
    pub(crate) fn note_sent(&mut self, header: &Header) -> bool {
        if !header.opcode.is_response() {
            return self.requests.note(header.psn, 1) > 0;
        }
        let covers = matches!(header.aeth.syndrome, Syndrome::Ack(_)) || header.opcode != Opcode::Ack;
        self.unanswered = Some(if covers { header.psn.next() } else { header.psn });
        self.answers.note(header.psn, u32::from(covers)) > 0
    }

    /// This many packets left from `first` on, the last with this header; how many of them for the
    /// first time.
    #[inline]
    pub(crate) fn note_repeats(&mut self, last: &Header, first: Psn, packets: u64) -> u64 {
        let Ok(packets) = u32::try_from(packets) else { return 0 }; // at most one turn
        if last.opcode.is_response() {
            self.unanswered = Some(last.psn.next());
            self.answers.note(first, packets).into()
        } else {
            self.requests.note(first, packets).into()
        }
    }
}
