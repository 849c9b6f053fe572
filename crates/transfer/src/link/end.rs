//! The end of a link.

use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use super::{Ending, Link};
use crate::error::{Gone, TransferError};
use crate::frame::{Frame, printable};
use crate::job::Job;
use crate::service::wait;
use crate::shared::Event;
use crate::wire::Wire;

/// A link that closes waits so long for acknowledgements of its last frames.
const CLOSING: Duration = Duration::from_millis(100);
/// Late frames are counted until the peer pauses for so long, or has sent so many bytes.
const LATE_PAUSE: Duration = Duration::from_millis(10);
const MAX_LATE_BYTES: usize = 64 << 20;

impl Link {
    /// The peer is gone: from now on the application knows.
    pub(crate) fn note_end(&self, reason: &Gone) {
        self.peer.change(|state| {
            state.exports.clear();
            state.gone.get_or_insert_with(|| reason.clone());
        });
        self.shared.tell(Event::Peer);
        if let Some(hooks) = self.shared.hook.get() {
            hooks.gone(&self.shared, &self.peer);
        }
    }

    /// The peer is gone: all that waits for it ends. The queue pairs go first, so no late packet
    /// reaches memory of the application.
    pub(crate) fn end(mut self, reason: &Gone) {
        self.is_ending = true;
        if *reason == Gone::ClosedHere {
            self.settle();
        }
        if matches!(reason, Gone::Broken(_) | Gone::ClosedHere | Gone::Protocol(_)) {
            self.send_failures(reason);
        }
        let (_, acknowledged) = self.frames.progress();
        let Self { connection, frames, stream, peer, shared, mut wire, jobs, endings, mut announced, .. } =
            self;
        drop(connection);
        drop(frames);
        let gone = TransferError::PeerGone { peer: peer.name.clone(), reason: reason.clone() };
        shared.count(|counters| counters.failed += jobs.len() as u64);
        for (_, job) in jobs {
            let (state, error) = (job.state.clone(), job.failed.clone().unwrap_or_else(|| gone.clone()));
            drop(job);
            shared.end(&state, Err(error));
        }
        // Their bytes are there, but the peer may never hear of it.
        for Ending { after, state, result } in endings {
            let is_told = after <= acknowledged;
            shared.end(&state, if is_told { result } else { Err(gone.clone()) });
        }
        for (tag, outcome) in announced.abort(reason) {
            shared.notify(&peer, tag, outcome, Some(reason.clone()));
        }
        shared.release(&peer, self.credit);
        shared.inbox.forget(&peer);
        tracing::debug!(peer = peer.name, "the peer is gone: {reason}");
        let _ = stream.shutdown(Shutdown::Write); // it may be closed already
        let late = count_late_frames(&mut wire, &stream);
        shared.count(|counters| counters.late_frames += late);
    }

    /// Sends the last frames, and waits until the peer has them.
    fn settle(&mut self) {
        let deadline = Instant::now() + CLOSING;
        loop {
            let (pushed, acknowledged) = self.frames.progress();
            let polled = self.flush(Instant::now()).and_then(|_| self.complete());
            if acknowledged == pushed || polled.is_err() || Instant::now() > deadline {
                return;
            }
            std::thread::sleep(CLOSING / 1000);
        }
    }

    /// Failures of transfers whose cause the peer does not know, and the end.
    fn send_failures(&mut self, reason: &Gone) {
        for id in self.announcements.take_announced() {
            let of = |job: &&Job| job.announcement == Some(id) && job.failed.is_some();
            let own = self.jobs.values().find(of).and_then(|job| job.failed.as_ref());
            let is_aborted = own.is_none();
            let reason = own.map_or_else(|| reason.to_string(), ToString::to_string);
            self.wire.push(&Frame::Failed { id, is_aborted, reason: printable(&reason) });
        }
        self.wire.push(&Frame::Bye);
        // What the socket does not take is lost; the peer reports its transfers as aborted then.
        let _ = self.wire.flush(&self.stream);
    }
}

/// Frames that come after the decision, until the peer pauses. They have no effect.
fn count_late_frames(wire: &mut Wire, stream: &TcpStream) -> u64 {
    let (mut late, mut bytes, mut has_ended) = (0, 0, false);
    loop {
        while let Ok(Some(_)) = wire.next_frame() {
            late += 1;
        }
        if has_ended || bytes > MAX_LATE_BYTES {
            return late;
        }
        match wire.fill(stream) {
            Ok(0) => {
                let mut fds = [libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
                wait(&mut fds, Some(LATE_PAUSE));
                has_ended = fds[0].revents == 0;
            }
            Ok(read) => bytes += read,
            Err(_) => has_ended = true,
        }
    }
}
