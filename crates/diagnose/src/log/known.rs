//! Messages of any program whose causes are known: what they mean, and what to try first.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Seen;
use super::messages::MESSAGES;
use crate::checks::peer_module::PeerModule;
use crate::finding::{Fix, FixPart, Side};
use nobounce_topology::facts::Facts;

/// A cause of what a log shows, and its remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogCause {
    /// What the message or the completion means.
    pub problem: String,
    /// The cause.
    pub cause: &'static str,
    /// What to do. JSON has it as a line and as parts.
    #[serde(flatten)]
    pub fix: Fix,
}

/// What mends a cause.
#[derive(Clone, Copy, Debug)]
pub(super) enum Remedy {
    /// The same on every machine.
    Parts(Side, &'static [FixPart<&'static str>]),
    /// The peer-memory module that fits the machine is loaded, or this.
    LoadModule(&'static str),
    /// The loaded peer-memory module is loaded or built again, or this.
    ReloadModule(&'static str),
}

impl Remedy {
    fn on(self, facts: &Facts) -> Fix {
        let fix = match self {
            Self::Parts(side, parts) => Fix::of(side, parts),
            Self::LoadModule(or) => PeerModule(facts).load().remark(or),
            Self::ReloadModule(or) => PeerModule(facts).reload().remark(or),
        };
        if facts.is_container() { fix.in_container() } else { fix }
    }
}

/// A cause with the condition under which it is worth a look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cause {
    pub(super) when: fn(&Facts, &str) -> bool,
    pub(super) text: &'static str,
    pub(super) fix: Remedy,
}

/// The causes that these facts and this line allow, the likeliest first.
pub(super) fn causes(
    problem: &str,
    causes: &[Cause],
    facts: &Facts,
    line: &str,
) -> impl Iterator<Item = LogCause> {
    causes.iter().filter(|cause| (cause.when)(facts, line)).map(|cause| LogCause {
        problem: problem.to_owned(),
        cause: cause.text,
        fix: cause.fix.on(facts),
    })
}

/// A message.
#[derive(Debug)]
pub(super) struct Message {
    /// All of them are in the line.
    pub(super) words: &'static [&'static str],
    pub(super) meaning: &'static str,
    pub(super) causes: &'static [Cause],
}

/// Messages that a log shows.
#[derive(Clone, Debug, Default)]
pub struct KnownMessages {
    found: BTreeMap<usize, Seen>,
}

impl KnownMessages {
    /// Takes one line.
    pub(super) fn take(&mut self, line: &str) {
        let is_in = |message: &&(usize, &Message)| message.1.words.iter().all(|word| line.contains(word));
        if let Some((at, _)) = MESSAGES.iter().enumerate().find(|message| is_in(&message)) {
            self.found.entry(at).or_default().take(line);
        }
    }

    /// Whether there was none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// What the messages mean, with the first of their lines, and their causes. Messages without a
    /// cause that the facts allow are left out.
    pub(super) fn judge(&self, facts: &Facts) -> (Vec<(String, Seen)>, Vec<LogCause>) {
        let (mut problems, mut all) = (Vec::new(), Vec::new());
        for (at, seen) in &self.found {
            let message = &MESSAGES[*at];
            let found: Vec<_> = causes(message.meaning, message.causes, facts, &seen.example).collect();
            if !found.is_empty() {
                problems.push((message.meaning.to_owned(), seen.clone()));
                all.extend(found);
            }
        }
        (problems, all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(line: &str) -> Option<LogCause> {
        let mut known = KnownMessages::default();
        known.take(line);
        known.judge(&Facts::default()).1.into_iter().next()
    }

    #[test]
    fn addresses_of_the_virtual_memory_api() {
        let line = |address| format!("UCX ERROR ibv_reg_mr(address={address}, length=2) failed: Bad address");
        assert!(first(&line("0xa02000000")).unwrap().cause.contains("virtual memory"));
        assert!(first(&line("0x7f3245200000")).unwrap().cause.contains("peer-memory"));
    }

    #[test]
    fn a_message_needs_a_cause_that_the_facts_allow() {
        assert_eq!(first("NCCL INFO Channel 00"), None);
        // Harmless without a Direct NIC.
        assert_eq!(first("libmlx5.so: undefined symbol: mlx5dv_reg_dmabuf_mr, version MLX5_1.25"), None);
    }

    #[test]
    fn every_message_is_found_by_its_own_words() {
        for (at, message) in MESSAGES.iter().enumerate() {
            let mut known = KnownMessages::default();
            known.take(&message.words.join(" "));
            assert!(known.found.contains_key(&at), "{} is hidden by another", message.meaning);
            assert!(!message.causes.is_empty() && !message.meaning.is_empty());
        }
    }
}
