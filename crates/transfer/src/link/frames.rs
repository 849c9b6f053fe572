//! Frames of the peer, by the side channel and by the first lane.

use std::time::Instant;

use super::{Link, gone};
use crate::error::Gone;
use crate::frame::{Frame, MAX_EXPORTS};
use crate::notification::{self, Outcome};
use crate::shared::Event;

/// Polls for what a peer sent before it ended: it had acknowledgements, so it is there.
const LAST_POLLS: usize = 64;
/// Reads of the side channel in one turn.
const MAX_READS: usize = 4;

impl Link {
    pub(super) fn receive(&mut self, now: Instant) -> Result<bool, Gone> {
        let (mut has_heard, mut end) = (false, None);
        // Frames of the handshake's last read come first. A peer that never stops gets its turn
        // again.
        for _ in 0..MAX_READS {
            while let Some(frame) = self.wire.next_frame().map_err(|error| gone(&error.into()))? {
                has_heard = true;
                self.take_control(frame)?;
            }
            if let Some(end) = end {
                self.take_last_frames();
                return Err(end);
            }
            match self.wire.fill(&self.stream) {
                Ok(0) => break,
                Ok(_) => has_heard = true,
                Err(error) => end = Some(gone(&error)),
            }
        }
        if has_heard {
            self.heard = now;
        }
        Ok(has_heard)
    }

    /// Frames that the peer sent before it ended.
    fn take_last_frames(&mut self) {
        for _ in 0..LAST_POLLS {
            // The reason of the end is known, and counts.
            if !self.complete().is_ok_and(|is_busy| is_busy) {
                break;
            }
        }
    }

    /// Frames of the side channel: with a key, the only ones that are not authenticated.
    fn take_control(&mut self, frame: Frame) -> Result<(), Gone> {
        match frame {
            Frame::KeepAlive => Ok(()),
            Frame::Bye => {
                self.take_last_frames();
                Err(Gone::Closed)
            }
            Frame::Failed { id, is_aborted, reason } => {
                self.take_last_frames();
                // The peer does not know whether an end that it sent has arrived.
                if let Ok((tag, outcome)) = self.announced.end(id, notification::failure(is_aborted, &reason))
                {
                    self.shared.notify(&self.peer, tag, outcome, None);
                }
                Ok(())
            }
            Frame::Hello { .. } => Err(Gone::Protocol("a second hello")),
            _ => Err(Gone::Protocol("a frame on the side channel that belongs on a lane")),
        }
    }

    fn take(&mut self, frame: Frame) -> Result<(), Gone> {
        match frame {
            Frame::Export { name, version, region } => {
                let is_new = !self.peer.state().exports.contains_key(&name);
                if is_new && self.peer.state().exports.len() >= MAX_EXPORTS {
                    return Err(Gone::Protocol("too many regions exported"));
                }
                self.peer.change(|state| state.export(name, version, region));
                self.shared.tell(Event::Peer);
            }
            Frame::Withdraw { name, version } => {
                self.peer.change(|state| state.withdraw(&name, version));
                self.shared.tell(Event::Peer);
            }
            Frame::Version { version } => self.peer.change(|state| state.version = version),
            Frame::Announce { id, tag } => {
                if self.credit == 0 {
                    return Err(Gone::Protocol("more transfers announced than were granted"));
                }
                self.announced.add(id, tag).map_err(Gone::Protocol)?;
                self.credit -= 1;
                self.grant();
            }
            Frame::Credit { count } => {
                self.announcements.grant(count);
                self.announce_waiting();
            }
            Frame::Done { id, bytes } => self.notify(id, Outcome::Complete { bytes })?,
            Frame::Failed { id, is_aborted, reason } => {
                self.notify(id, notification::failure(is_aborted, &reason))?;
            }
            Frame::Message { bytes } => {
                if let Some(hooks) = self.shared.hook.get() {
                    hooks.message(&self.shared, &self.peer, &bytes);
                    return Ok(());
                }
                if !self.shared.inbox.add(&self.peer, bytes) {
                    return Err(Gone::Protocol("more messages than this agent's application takes"));
                }
                self.shared.tell(Event::Message);
            }
            Frame::Hello { .. } | Frame::KeepAlive | Frame::Bye => {
                return Err(Gone::Protocol("a frame on a lane that belongs on the side channel"));
            }
        }
        Ok(())
    }

    fn notify(&mut self, id: u64, outcome: Outcome) -> Result<(), Gone> {
        let (tag, outcome) = self.announced.end(id, outcome).map_err(Gone::Protocol)?;
        self.shared.notify(&self.peer, tag, outcome, None);
        Ok(())
    }

    pub(super) fn take_frames(&mut self) -> Result<(), Gone> {
        while let Some(frame) = self.frames.next().map_err(|error| gone(&error.into()))? {
            // The application has heard of the end.
            if self.is_ending {
                continue;
            }
            self.heard = Instant::now();
            self.is_talking = true;
            self.take(frame)?;
        }
        Ok(())
    }
}
