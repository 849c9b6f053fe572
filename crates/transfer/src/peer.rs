//! A peer, as the application sees it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce::RemoteRegion;
use nobounce::memory::gpu::{StreamError, StreamEvent};

use crate::error::{AgentError, Gone, TransferError};
use crate::exports::Metadata;
use crate::frame::{Frame, MAX_MESSAGE, MAX_TAG};
use crate::job::{Direction, Gate, Job, JobPart};
use crate::memory::View;
use crate::pieces::{self, ListError, Pages, Piece};
use crate::shared::{Command, PeerShared, Shared};
use crate::transfer::{Transfer, TransferState, deadline};

/// Another agent. Clones mean the same one. When it is gone it stays gone: an agent that is started
/// anew is another peer.
#[derive(Clone, Debug)]
pub struct Peer {
    pub(crate) inner: Arc<PeerShared>,
    pub(crate) shared: Arc<Shared>,
}

/// A region of a peer, or a part of one.
#[derive(Clone, Debug)]
pub struct Remote {
    name: String,
    generation: u64,
    region: RemoteRegion,
}

impl Remote {
    /// The name under which the peer exports it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.region.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A part of it; `None` if it is not inside.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        let addr = self.region.addr.checked_add(offset)?;
        inside.then(|| Self { region: RemoteRegion { addr, len, ..self.region }, ..self.clone() })
    }
}

/// One part of a transfer: pieces between a view and a region of the peer.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// The local memory.
    pub local: &'a View,
    /// The peer's memory.
    pub remote: &'a Remote,
    /// What moves. Parts may share a list.
    pub pieces: Arc<Vec<Piece>>,
}

/// Whether and how the peer is notified.
#[derive(Clone, Copy, Debug, Default)]
pub enum Notify<'a> {
    /// It is not.
    #[default]
    Nothing,
    /// A notification with this tag of at most 256 bytes, when the transfer has ended.
    Tag(&'a [u8]),
    /// The transfer belongs to an announcement.
    With(&'a Announcement),
    /// Its application gets this message of at most 1024 bytes, behind the bytes of the transfer.
    /// It hears of no failure.
    Message(&'a [u8]),
}

impl Peer {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// A random number of that start of the agent.
    pub fn generation(&self) -> u64 {
        self.inner.generation
    }

    /// The address of its end of the side channel.
    pub fn addr(&self) -> &str {
        &self.inner.addr
    }

    /// Why it is gone, if it is.
    pub fn gone(&self) -> Option<Gone> {
        self.inner.state().gone.clone()
    }

    /// The names that it exports now.
    pub fn regions(&self) -> Vec<String> {
        self.inner.state().exports.keys().cloned().collect()
    }

    /// The region that it exports by this name, as soon as it does.
    ///
    /// # Errors
    /// It does not within the timeout, or the peer is gone.
    pub fn region(&self, name: &str, timeout: Duration) -> Result<Remote, TransferError> {
        let deadline = deadline(timeout);
        let mut state = self.inner.state();
        loop {
            if let Some(&(_, region)) = state.exports.get(name) {
                return Ok(Remote { name: name.to_owned(), generation: self.generation(), region });
            }
            if let Some(reason) = &state.gone {
                return Err(self.gone_error(reason.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let names: Vec<_> = state.exports.keys().take(8).map(|name| format!("{name:?}")).collect();
                let exported = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
                let (peer, region) = (self.name().to_owned(), name.to_owned());
                return Err(TransferError::NoRegion { peer, region, timeout, exported });
            }
            let waited = self.inner.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Adds regions from metadata of this peer that came by another channel.
    ///
    /// # Errors
    /// They are malformed, or of another agent or generation.
    pub fn add_metadata(&self, metadata: &[u8]) -> Result<(), AgentError> {
        let metadata = Metadata::decode(metadata).ok_or(AgentError::Metadata)?;
        if metadata.generation != self.generation() {
            return Err(AgentError::Stale { name: metadata.name });
        }
        self.inner.change(|state| state.learn(metadata.exports));
        Ok(())
    }

    /// Sends a short message to the application of the peer, which gets it from
    /// [`Agent::message`](crate::Agent::message) after everything that was sent before.
    ///
    /// # Errors
    /// It is too long, or the peer is gone.
    pub fn send_message(&self, bytes: &[u8]) -> Result<(), TransferError> {
        let bytes = checked_message(bytes)?;
        self.check_here()?;
        let frame = Frame::Message { bytes };
        self.shared.push([Command::SendTo { peer: self.inner.key, frame }]);
        Ok(())
    }

    /// A number that no other peer of this agent has.
    pub fn number(&self) -> u64 {
        self.inner.key
    }

    /// Closes the connection. The peer sees it; transfers in flight fail.
    pub fn close(&self) {
        self.shared.push([Command::Close { peer: self.inner.key }]);
    }

    /// Writes pages of a block table to pages of the peer's.
    ///
    /// # Errors
    /// The list is invalid or the peer is gone; nothing was posted. The same applies to all
    /// transfers.
    pub fn write_pages(
        &self,
        local: &View,
        remote: &Remote,
        pages: &Pages<'_>,
        notify: Notify<'_>,
    ) -> Result<Transfer, TransferError> {
        self.submit(Direction::Write, vec![Part { local, remote, pieces: Arc::new(pages.pieces()?) }], notify)
    }

    /// Reads pages of the peer's block table into pages of the local one.
    #[allow(missing_docs)]
    pub fn read_pages(
        &self,
        local: &View,
        remote: &Remote,
        pages: &Pages<'_>,
        notify: Notify<'_>,
    ) -> Result<Transfer, TransferError> {
        self.submit(Direction::Read, vec![Part { local, remote, pieces: Arc::new(pages.pieces()?) }], notify)
    }

    /// Writes a list of pieces.
    pub fn write_list(
        &self,
        local: &View,
        remote: &Remote,
        list: &[Piece],
        notify: Notify<'_>,
    ) -> Result<Transfer, TransferError> {
        self.submit(
            Direction::Write,
            vec![Part { local, remote, pieces: Arc::new(pieces::merged(list)) }],
            notify,
        )
    }

    /// Reads a list of pieces.
    pub fn read_list(
        &self,
        local: &View,
        remote: &Remote,
        list: &[Piece],
        notify: Notify<'_>,
    ) -> Result<Transfer, TransferError> {
        self.submit(
            Direction::Read,
            vec![Part { local, remote, pieces: Arc::new(pieces::merged(list)) }],
            notify,
        )
    }

    /// One transfer of several parts, for instance one for each layer's own allocation.
    ///
    /// # Errors
    /// As for [`write_pages`](Self::write_pages).
    pub fn submit(
        &self,
        direction: Direction,
        parts: Vec<Part<'_>>,
        notify: Notify<'_>,
    ) -> Result<Transfer, TransferError> {
        self.submit_after(direction, parts, notify, None)
    }

    /// As [`submit`](Self::submit), but no byte is read or written before the gate opens. It is
    /// tried about every 100 us, by the agent's thread: it must not block. [`stream_gate`] makes
    /// one of a CUDA stream.
    ///
    /// # Errors
    /// As for [`write_pages`](Self::write_pages).
    pub fn submit_after(
        &self,
        direction: Direction,
        parts: Vec<Part<'_>>,
        notify: Notify<'_>,
        gate: Option<Gate>,
    ) -> Result<Transfer, TransferError> {
        let mut bytes = 0_u64;
        for part in &parts {
            if direction == Direction::Read && part.local.is_read_only() {
                return Err(TransferError::ReadOnly);
            }
            if part.local.is_of_another(self.shared.generation) {
                return Err(TransferError::OtherAgent);
            }
            self.check(part)?;
            let of_part = pieces::check(&part.pieces, part.local.len(), part.remote.len())?;
            bytes = bytes.checked_add(of_part).ok_or(ListError::TooLong)?;
        }
        let parts = parts.into_iter().map(|part| JobPart {
            view: part.local.clone(),
            remote: part.remote.region,
            pieces: part.pieces,
        });
        let (peer, state) = (self.inner.key, Arc::new(TransferState::new(self.shared.number())));
        let job = |announcement, message| {
            let mut job = Job::new(state.clone(), direction, parts.collect(), bytes, announcement, gate);
            job.message = message;
            Command::Submit { peer: self.inner.clone(), job: Box::new(job) }
        };
        match notify {
            Notify::Nothing => self.shared.push([job(None, None)]),
            Notify::Message(bytes) => self.shared.push([job(None, Some(checked_message(bytes)?))]),
            Notify::Tag(tag) => {
                let (id, tag) = (self.shared.number(), checked(tag)?);
                let finish = Command::Finish { peer, id, abort: None };
                self.shared.push([Command::Announce { peer, id, tag }, job(Some(id), None), finish]);
            }
            Notify::With(announcement) => {
                if announcement.peer.inner.key != peer {
                    return Err(TransferError::AnnouncementEnded);
                }
                self.shared.push([job(Some(announcement.id), None)]);
            }
        }
        Ok(Transfer { state, shared: self.shared.clone() })
    }

    /// Tells the peer that a transfer with this tag begins. It may consist of many: all that are
    /// submitted with [`Notify::With`] until [`Announcement::complete`]. The peer is notified once,
    /// when all have ended.
    ///
    /// # Errors
    /// The tag is too long, or the peer is gone.
    pub fn announce(&self, tag: &[u8]) -> Result<Announcement, TransferError> {
        let (id, tag) = (self.shared.number(), checked(tag)?);
        self.check_here()?;
        self.shared.push([Command::Announce { peer: self.inner.key, id, tag }]);
        Ok(Announcement { peer: self.clone(), id, is_ended: false })
    }

    fn check(&self, part: &Part<'_>) -> Result<(), TransferError> {
        self.check_here()?;
        let remote = part.remote;
        let (peer, region) = (self.name().to_owned(), remote.name.clone());
        if remote.generation != self.generation() {
            return Err(TransferError::Stale { peer, region });
        }
        if remote.region.closed {
            return Err(TransferError::RemoteClosed(region));
        }
        let state = self.inner.state();
        let is_exported =
            state.exports.get(&remote.name).is_some_and(|(_, now)| now.rkey == remote.region.rkey);
        if is_exported { Ok(()) } else { Err(TransferError::Withdrawn { peer, region }) }
    }

    fn check_here(&self) -> Result<(), TransferError> {
        self.gone().map_or(Ok(()), |reason| Err(self.gone_error(reason)))
    }

    fn gone_error(&self, reason: Gone) -> TransferError {
        TransferError::PeerGone { peer: self.name().to_owned(), reason }
    }
}

/// A gate that opens when the work that a CUDA stream holds now is done; 0 is the default stream of
/// this thread's context.
///
/// # Errors
/// See [`StreamError`].
///
/// # Safety
/// `stream` is the handle of a live stream of this thread's context.
#[allow(unsafe_code)] // hands on what the caller promises
pub unsafe fn stream_gate(stream: u64) -> Result<Gate, StreamError> {
    // SAFETY: the caller's promise is the same.
    let event = unsafe { StreamEvent::record(stream)? };
    Ok(Box::new(move || event.is_reached().map_err(|error| error.to_string())))
}

fn checked_message(bytes: &[u8]) -> Result<Vec<u8>, TransferError> {
    if bytes.len() <= MAX_MESSAGE { Ok(bytes.to_vec()) } else { Err(TransferError::Message(bytes.len())) }
}

fn checked(tag: &[u8]) -> Result<Vec<u8>, TransferError> {
    if tag.len() <= MAX_TAG { Ok(tag.to_vec()) } else { Err(TransferError::Tag(tag.len())) }
}

/// A transfer that the peer expects. Dropping it without [`complete`](Self::complete) aborts it:
/// the peer is notified of that.
#[derive(Debug)]
pub struct Announcement {
    peer: Peer,
    id: u64,
    is_ended: bool,
}

impl Announcement {
    /// All of its transfers are submitted. The peer is notified when they have ended.
    pub fn complete(mut self) {
        self.end(None);
    }

    /// It will not complete, for this reason.
    pub fn abort(mut self, reason: &str) {
        self.end(Some(reason.to_owned()));
    }

    fn end(&mut self, abort: Option<String>) {
        if !std::mem::replace(&mut self.is_ended, true) {
            let peer = self.peer.inner.key;
            self.peer.shared.push([Command::Finish { peer, id: self.id, abort }]);
        }
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        self.end(Some("it was given up".to_owned()));
    }
}
