//! A request, as a thread of the server carries it out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use nobounce::file::File;
use nobounce_transfer::{
    Agent, Announcement, Direction, Notify, Part, Peer, Piece, Remote, Transfer, TransferError, View,
};

use crate::cache::{self, Cache, Mapped};
use crate::request::{FileRange, Kind, Request, tag};
use crate::root::Root;

/// Bytes of a file that are read from the disk before their WRITEs are posted.
pub(crate) const BATCH: u64 = 1 << 20;
/// Batches on the wire while the next is read.
const BATCHES: usize = 16;
/// Time for one batch. A client that lives and takes nothing for so long holds a thread.
const BATCH_TIMEOUT: Duration = Duration::from_secs(30);

/// What the jobs of a server share.
#[derive(Debug)]
pub(crate) struct Serving {
    pub(crate) root: Root,
    pub(crate) is_writable: bool,
    pub(crate) cache: Cache,
    /// Requests that the agent's thread has answered.
    pub(crate) at_once: AtomicU64,
}

impl Serving {
    /// Carries out a request and answers it.
    pub(crate) fn run(&self, agent: &Agent, peer: &Peer, request: &Request) {
        let size = match (request.kind, request.files.first()) {
            (Kind::Stat, Some((path, _))) => cache::size_of(&self.root, path),
            (Kind::Stat, None) => Err("a request without a file".to_owned()),
            _ => Ok(0),
        };
        // A peer that is gone needs no answer.
        let Ok(announcement) = peer.announce(&tag(request.id, *size.as_ref().unwrap_or(&0))) else { return };
        let result = size.and_then(|_| match request.kind {
            Kind::Stat => Ok(VecDeque::new()),
            Kind::Read => self.read(agent, peer, request, &announcement),
            Kind::Write => self.write(agent, peer, request, &announcement).map(|()| VecDeque::new()),
        });
        match result {
            Ok(under_way) => {
                // The client is notified when they have ended: not after this thread has woken up.
                announcement.complete();
                // One that failed has closed the connection, or failed the announcement.
                let _ = under_way.iter().try_for_each(|transfer| finish(peer, transfer));
            }
            Err(reason) => announcement.abort(&reason),
        }
    }

    /// Submits all WRITEs; returns those that may not have ended.
    fn read(
        &self,
        agent: &Agent,
        peer: &Peer,
        request: &Request,
        answer: &Announcement,
    ) -> Result<VecDeque<Transfer>, String> {
        let remote = memory_of(peer, request)?;
        if request.files.len() > 1 {
            // Not kept open: they may be more than the process may have open.
            for (path, ranges) in &request.files {
                check(path, ranges, Some(cache::size_of(&self.root, path)?), &remote)?;
            }
        }
        let mut under_way = VecDeque::new();
        for (path, ranges) in &request.files {
            let file = self.cache.open(&self.root, agent, path)?;
            // Its size now.
            check(path, ranges, Some(file.size()), &remote)?;
            let Some(view) = &file.view else { continue };
            for batch in batches(ranges) {
                populate(&file, path, &batch)?;
                let part = Part { local: view, remote: &remote, pieces: Arc::new(batch) };
                let sent = peer.submit(Direction::Write, vec![part], Notify::With(answer));
                under_way.push_back(sent.map_err(|error| error.to_string())?);
                if under_way.len() > BATCHES {
                    under_way.pop_front().map_or(Ok(()), |first| finish(peer, &first))?;
                }
            }
        }
        Ok(under_way)
    }

    fn write(
        &self,
        agent: &Agent,
        peer: &Peer,
        request: &Request,
        answer: &Announcement,
    ) -> Result<(), String> {
        if !self.is_writable {
            return Err("this server's files are read-only (serve --write)".to_owned());
        }
        let remote = memory_of(peer, request)?;
        request.files.iter().try_for_each(|(path, ranges)| check(path, ranges, None, &remote))?;
        // A path that cannot be written is found here. What did not exist stays behind, empty.
        request.files.iter().try_for_each(|(path, _)| self.create(path).map(drop))?;
        let len = usize::try_from(BATCH).unwrap_or(usize::MAX);
        let buffer = agent.register(len).map_err(|error| error.to_string())?;
        for (path, ranges) in &request.files {
            let file = self.create(path)?;
            for range in ranges.iter().flat_map(cut) {
                fetch(peer, &buffer, &remote, &range, answer)?;
                // At most a batch.
                let place = 0..usize::try_from(range.len).unwrap_or(len);
                let written = buffer.region().write_file(&file, range.offset, place);
                written.map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    /// Opens a file to write it.
    fn create(&self, path: &str) -> Result<File, String> {
        let file = self.root.file(path, true).map_err(|error| format!("cannot write {path:?}: {error}"))?;
        File::from_std(file, format!("{path:?}")).map_err(|error| error.to_string())
    }
}

pub(crate) fn memory_of(peer: &Peer, request: &Request) -> Result<Remote, String> {
    // It was sent before the request.
    peer.region(&request.export, Duration::ZERO).map_err(|error| error.to_string())
}

/// Refuses ranges outside of the file or the memory. All files of a request are checked before a
/// byte moves; one that becomes shorter afterwards fails when it is its turn.
pub(crate) fn check(
    path: &str,
    ranges: &[FileRange],
    size: Option<u64>,
    remote: &Remote,
) -> Result<(), String> {
    let inside = |at: u64, len: u64, size: u64| at.checked_add(len).is_some_and(|end| end <= size);
    for &FileRange { offset, len, memory } in ranges {
        let size = size.unwrap_or(i64::MAX.unsigned_abs());
        if !inside(offset, len, size) {
            return Err(format!(
                "{len} bytes at offset {offset} are not inside of {path:?}, which has {size}"
            ));
        }
        if !inside(memory, len, remote.len()) {
            return Err(format!(
                "{len} bytes at {memory} are not inside of {} bytes of memory",
                remote.len()
            ));
        }
    }
    Ok(())
}

/// A range in pieces of at most [`BATCH`] bytes.
fn cut(range: &FileRange) -> impl Iterator<Item = FileRange> {
    let FileRange { offset, len, memory } = *range;
    (0..len.div_ceil(BATCH)).map(move |number| {
        let at = number * BATCH;
        FileRange { offset: offset + at, len: BATCH.min(len - at), memory: memory + at }
    })
}

/// Groups of ranges with about [`BATCH`] bytes each.
pub(crate) fn batches(ranges: &[FileRange]) -> impl Iterator<Item = Vec<Piece>> {
    let mut pieces = ranges.iter().filter(|range| range.len > 0).flat_map(cut).peekable();
    std::iter::from_fn(move || {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while let Some(range) = pieces.next_if(|range| bytes == 0 || bytes + range.len <= BATCH) {
            bytes += range.len;
            batch.push(Piece { local: range.offset, remote: range.memory, len: range.len });
        }
        (!batch.is_empty()).then_some(batch)
    })
}

/// Reads the pages of a batch from the disk, here and not in the engine.
fn populate(file: &Mapped, path: &str, batch: &[Piece]) -> Result<(), String> {
    for piece in batch {
        // Inside of the file, which is mapped.
        let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        let range = at(piece.local)..at(piece.local + piece.len);
        let read = file.mapping.populate(range);
        read.map_err(|error| format!("cannot read {path:?} at offset {}: {error}", piece.local))?;
    }
    Ok(())
}

fn finish(peer: &Peer, transfer: &Transfer) -> Result<(), String> {
    let ended = transfer.wait(BATCH_TIMEOUT);
    if matches!(ended, Err(TransferError::Timeout(_))) {
        tracing::warn!(peer = peer.addr(), "a client took nothing for {BATCH_TIMEOUT:?}: closed");
        peer.close();
    }
    ended.map(drop).map_err(|error| error.to_string())
}

fn fetch(
    peer: &Peer,
    buffer: &View,
    remote: &Remote,
    range: &FileRange,
    answer: &Announcement,
) -> Result<(), String> {
    let pieces = Arc::new(vec![Piece { local: 0, remote: range.memory, len: range.len }]);
    let part = Part { local: buffer, remote, pieces };
    let read = peer.submit(Direction::Read, vec![part], Notify::With(answer));
    finish(peer, &read.map_err(|error| error.to_string())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_all_bytes_in_order() {
        let range = |offset, len| FileRange { offset, len, memory: 10 * offset };
        let ranges = [range(5, 3 * BATCH + 1), range(0, 0), range(7, 100), range(9, BATCH - 1), range(1, 1)];
        let found: Vec<_> = batches(&ranges).collect();
        assert!(found.iter().all(|batch| batch.iter().map(|piece| piece.len).sum::<u64>() <= BATCH));
        let pieces: Vec<_> = found.into_iter().flatten().collect();
        assert_eq!(pieces.iter().map(|piece| piece.len).sum::<u64>(), 4 * BATCH + 101);
        assert_eq!((pieces[0].local, pieces[1].local, pieces[1].remote), (5, 5 + BATCH, 50 + BATCH));
    }
}
