//! Notifications: how transfers with a tag ended, at the side whose memory they used.

use std::collections::HashMap;

use crate::error::Gone;
use crate::frame::printable;

/// Transfers that one peer may announce while the application takes no notification. Further ones
/// wait at the peer.
pub(crate) const MAX_OF_PEER: usize = 1 << 14;
/// The same of all peers, also of those that are gone.
pub(crate) const MAX_OF_ALL: usize = 1 << 18;
/// Announcements that a peer may send at a time without hearing of more room.
pub(crate) const MAX_CREDIT: usize = 1 << 10;

/// The end of a transfer with a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The name of the peer that started it.
    pub peer: String,
    /// The generation of that peer.
    pub generation: u64,
    /// Its tag.
    pub tag: Vec<u8>,
    /// How it ended.
    pub outcome: Outcome,
    /// Why the peer is gone, if that aborted it.
    pub gone: Option<Gone>,
}

/// How a transfer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of its bytes are in memory: a kernel that is launched now sees them, and so does the
    /// host.
    Complete {
        /// Bytes moved.
        bytes: u64,
    },
    /// A part of it failed; some bytes may have arrived.
    Failed {
        /// The reason.
        reason: String,
    },
    /// It was announced, and will not complete: it was cancelled, or the peer is gone.
    Aborted {
        /// The reason.
        reason: String,
    },
}

/// Transfers that one peer has announced and not ended.
#[derive(Debug, Default)]
pub(crate) struct Announced(HashMap<u64, Vec<u8>>);

impl Announced {
    pub(crate) fn add(&mut self, id: u64, tag: Vec<u8>) -> Result<(), &'static str> {
        match self.0.insert(id, tag) {
            None => Ok(()),
            Some(_) => Err("a transfer announced twice"),
        }
    }

    /// The notification of one that ended. Each tag is taken once.
    pub(crate) fn end(&mut self, id: u64, outcome: Outcome) -> Result<(Vec<u8>, Outcome), &'static str> {
        self.0.remove(&id).map(|tag| (tag, outcome)).ok_or("the end of a transfer that was not announced")
    }

    /// The notifications of all others, when the peer is gone.
    pub(crate) fn abort(&mut self, reason: &Gone) -> impl Iterator<Item = (Vec<u8>, Outcome)> {
        let mut left: Vec<_> = self.0.drain().collect();
        left.sort_unstable_by_key(|(id, _)| *id);
        let reason = format!("the peer is gone: {reason}");
        left.into_iter().map(move |(_, tag)| (tag, Outcome::Aborted { reason: reason.clone() }))
    }
}

/// The outcome that a frame tells of.
pub(crate) fn failure(is_aborted: bool, reason: &str) -> Outcome {
    let reason = printable(reason);
    if is_aborted { Outcome::Aborted { reason } } else { Outcome::Failed { reason } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tag_ends_once() {
        let mut announced = Announced::default();
        for id in 0..3 {
            announced.add(id, vec![u8::try_from(id).unwrap()]).unwrap();
        }
        assert!(announced.add(1, Vec::new()).is_err());
    }

    #[test]
    fn what_was_announced_is_aborted_in_order() {
        let mut announced = Announced::default();
        for id in [7, 3, 9] {
            announced.add(id, vec![u8::try_from(id).unwrap()]).unwrap();
        }
        assert_eq!(announced.end(3, Outcome::Complete { bytes: 1 }).unwrap().0, [3]);
        assert!(announced.end(3, Outcome::Complete { bytes: 1 }).is_err());
        let tags: Vec<_> = announced.abort(&Gone::Ended).map(|(tag, _)| tag).collect();
        assert_eq!(tags, [[7], [9]]);
        assert_eq!(announced.abort(&Gone::Ended).count(), 0);
    }
}
