//! Short reads of files in the page cache: the agent's thread answers them itself, which saves two
//! wake-ups. This thread waits for a disk only if pages between the sampled ones are absent.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nobounce_transfer::{Direction, Notify, Part, Peer, Transfer};

use crate::jobs::{self, BATCH, Serving};
use crate::request::{Kind, MAX_REQUESTS, Request, answer};

/// Answers on their way, by client.
#[derive(Debug, Default)]
pub(crate) struct Short(HashMap<u64, (Peer, VecDeque<Transfer>)>);

/// What became of a request.
pub(crate) enum Taken {
    /// Its answer is on its way.
    Answered,
    /// It may block, or is refused: a worker's job.
    Left,
    /// The client takes none of its answers.
    Flooded,
}

impl Short {
    /// Answers a request if that does not block.
    pub(crate) fn take(&mut self, serving: &Serving, peer: &Peer, request: &Request) -> Taken {
        let (_, answers) = self.0.entry(peer.number()).or_insert_with(|| (peer.clone(), VecDeque::new()));
        while answers.front().is_some_and(|answer| answer.result().is_some()) {
            answers.pop_front();
        }
        if answers.len() >= 2 * MAX_REQUESTS {
            return Taken::Flooded;
        }
        match submit(serving, peer, request) {
            Some(answer) => {
                answers.push_back(answer);
                serving.at_once.fetch_add(1, Ordering::Relaxed);
            }
            None => return Taken::Left,
        }
        Taken::Answered
    }

    /// Forgets a client that is gone.
    pub(crate) fn forget(&mut self, peer: &Peer) {
        self.0.remove(&peer.number());
    }
}

/// One WRITE of pages that are in the page cache, and the answer.
fn submit(serving: &Serving, peer: &Peer, request: &Request) -> Option<Transfer> {
    let [(path, ranges)] = &request.files[..] else { return None };
    let bytes = ranges.iter().try_fold(0_u64, |sum, range| sum.checked_add(range.len))?;
    if request.kind != Kind::Read || bytes == 0 || bytes > BATCH {
        return None;
    }
    let file = serving.cache.known(&serving.root, path)?;
    let remote = jobs::memory_of(peer, request).ok()?;
    jobs::check(path, ranges, Some(file.size()), &remote).ok()?;
    let pieces = jobs::batches(ranges).next()?;
    // Mapped here, where a page that is absent after all delays this thread only: in the copy it
    // would stop the engine.
    let is_resident = pieces.iter().all(|piece| {
        let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        let range = at(piece.local)..at(piece.local + piece.len);
        file.mapping.is_resident(range.clone()) && file.mapping.populate(range).is_ok()
    });
    let view = file.view.as_ref().filter(|_| is_resident)?;
    let part = Part { local: view, remote: &remote, pieces: Arc::new(pieces) };
    peer.submit(Direction::Write, vec![part], Notify::Message(&answer(request.id, bytes))).ok()
}
