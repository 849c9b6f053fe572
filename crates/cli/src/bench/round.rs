//! One round of a case: the number of messages, and whether each has its own slot and bytes.

use serde::{Deserialize, Serialize};

/// One round, as both ends know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Round {
    /// Its number: no two rounds of a case have the same bytes.
    pub(super) index: u32,
    /// Messages in each direction.
    pub(super) messages: u64,
    /// Not timed, and with no more messages than slots: no message overwrites another, so that each
    /// is compared.
    pub(super) checked: bool,
}

impl Round {
    /// How the message in that slot is called.
    pub(super) fn message(&self, slot: u64) -> String {
        if self.checked {
            return format!(
                "round {}, message {} of {} with separate buffers",
                self.index,
                slot + 1,
                self.messages
            );
        }
        format!("round {}, slot {slot}", self.index)
    }
}

/// Fault that is injected into the last message of a checked round, to prove that the check fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spoil {
    /// One byte in its middle is changed.
    Byte,
    /// It is taken away: its place is as it was before.
    Message,
}

impl Spoil {
    /// Reads the fault to inject from the environment. It tests the check on hardware that cannot
    /// be told to lose data. An unknown word is an error: it would inject nothing, and the check
    /// would look blind.
    pub(super) fn asked() -> Result<Option<Self>, String> {
        match std::env::var("NOBOUNCE_BENCH_SPOIL") {
            Ok(word) => Self::named(&word).map(Some),
            Err(_) => Ok(None),
        }
    }

    fn named(word: &str) -> Result<Self, String> {
        match word {
            "byte" => Ok(Self::Byte),
            "message" => Ok(Self::Message),
            _ => Err(format!("invalid NOBOUNCE_BENCH_SPOIL '{word}': expected byte or message")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_way_to_spoil_is_an_error() {
        assert_eq!(Spoil::named("byte"), Ok(Spoil::Byte));
        assert_eq!(Spoil::named("message"), Ok(Spoil::Message));
        for wrong in ["bytes", "", "Byte"] {
            assert!(Spoil::named(wrong).unwrap_err().contains("expected byte or message"));
        }
    }
}
