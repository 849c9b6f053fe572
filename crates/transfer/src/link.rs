//! A peer as the agent's thread serves it: frames, jobs and announcements.

use std::collections::{HashMap, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nobounce::{Connection, Status};

use crate::announcements::Announcements;
use crate::error::{Gone, TransferError};
use crate::frame::{Frame, MAX_EXPORTS, printable};
use crate::job::Job;
use crate::lanes::{BatchEnd, Lanes};
use crate::notification::{self, Announced, MAX_CREDIT, MAX_OF_PEER, Outcome};
use crate::service::wait;
use crate::shared::{Arrival, Event, PeerShared, Shared, SideChannel};
use crate::transfer::{EVER, Summary, TransferState};
use crate::wire::{Wire, WireError};

/// Poll interval of the side channel while requests are outstanding.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Reads of the side channel in one turn.
const MAX_READS: usize = 4;
/// Poll interval of gates.
const GATE_INTERVAL: Duration = Duration::from_micros(100);

/// Late frames are counted until the peer pauses for so long, or has sent so many bytes.
const LATE_PAUSE: Duration = Duration::from_millis(10);
const MAX_LATE_BYTES: usize = 64 << 20;

/// A transfer that has ended, and its peer must be told first: when so many bytes of the side channel
/// have left.
#[derive(Debug)]
struct Ending {
    after: u64,
    state: Arc<TransferState>,
    result: Result<Summary, TransferError>,
}

#[derive(Debug)]
pub(crate) struct Link {
    // Dropped first: no request reaches the memory of a job that is dropped.
    pub(crate) connection: Connection,
    pub(crate) stream: SideChannel,
    pub(crate) peer: Arc<PeerShared>,
    shared: Arc<Shared>,
    wire: Wire,
    lanes: Lanes,
    jobs: HashMap<u64, Job>,
    /// Jobs with pieces to post, in turns.
    queue: VecDeque<u64>,
    announcements: Announcements,
    announced: Announced,
    /// Announcements that the peer may still send.
    credit: usize,
    endings: VecDeque<Ending>,
    ended: Vec<BatchEnd>,
    heard: Instant,
    sent: Instant,
    polled: Instant,
    silence: Duration,
    /// Interval of keep-alive frames: in time for the limits of both ends.
    pub(crate) alive_every: Duration,
    pub(crate) is_armed: bool,
}

impl Link {
    pub(crate) fn new(shared: &Arc<Shared>, arrival: Arrival) -> Self {
        let (now, silence) = (Instant::now(), shared.silence.min(EVER));
        Self {
            lanes: Lanes::new(&arrival.connection),
            connection: arrival.connection,
            stream: arrival.stream,
            peer: arrival.peer,
            shared: shared.clone(),
            wire: arrival.wire,
            jobs: HashMap::new(),
            queue: VecDeque::new(),
            announcements: Announcements::default(),
            announced: Announced::default(),
            credit: 0,
            endings: VecDeque::new(),
            ended: Vec::new(),
            heard: now,
            sent: now,
            polled: now - POLL_INTERVAL,
            silence,
            alive_every: silence.min(arrival.silence) / 5,
            is_armed: false,
        }
    }

    pub(crate) fn has_requests(&self) -> bool {
        !self.lanes.are_idle()
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.lanes.are_idle() || !self.queue.is_empty()
    }

    pub(crate) fn has_unsent(&self) -> bool {
        self.wire.has_unsent()
    }

    /// Polls the side channel in the next turn.
    pub(crate) fn poll_side_channel(&mut self) {
        self.polled = Instant::now() - POLL_INTERVAL;
    }

    /// When this link must be polled again.
    pub(crate) fn deadline(&self) -> Instant {
        let life = (self.sent + self.alive_every).min(self.heard + self.silence);
        // Jobs in the queue of an idle link wait for their gates.
        let has_gates = !self.queue.is_empty() && self.lanes.are_idle();
        if has_gates { life.min(Instant::now() + GATE_INTERVAL) } else { life }
    }

    pub(crate) fn send(&mut self, frame: &Frame) {
        self.wire.push(frame);
        self.sent = Instant::now();
    }

    pub(crate) fn announce(&mut self, id: u64, tag: Vec<u8>) {
        self.announcements.add(id, tag);
        self.announce_waiting();
    }

    /// Announces what the peer has room for; transfers that waited for that may begin.
    fn announce_waiting(&mut self) {
        while let Some((announcement, end, held)) = self.announcements.announce() {
            self.send(&announcement);
            end.iter().for_each(|end| self.send(end));
            self.queue.extend(held);
        }
    }

    pub(crate) fn submit(&mut self, job: Job) {
        let id = job.state.id;
        if job.announcement.is_none_or(|number| self.announcements.submit(number, id)) {
            self.queue.push_back(id);
        }
        self.jobs.insert(id, job);
    }

    /// The transfer was cancelled: one that waits for its announcement ends in the next turn.
    pub(crate) fn cancel(&mut self, transfer: u64) {
        if self.jobs.contains_key(&transfer) {
            self.queue.push_back(transfer);
        }
    }

    pub(crate) fn finish(&mut self, id: u64, abort: Option<String>) {
        if let Some(end) = self.announcements.finish(id, abort) {
            self.send(&end);
        }
    }

    /// Grants the peer announcements, as long as there is room for their notifications.
    pub(crate) fn grant(&mut self) {
        if self.credit > MAX_CREDIT / 2 {
            return;
        }
        // First, so that a notification that is taken meanwhile leads to another try.
        self.peer.is_short.store(true, Ordering::SeqCst);
        let room = MAX_OF_PEER.saturating_sub(self.peer.promised.load(Ordering::SeqCst));
        let count = self.shared.promise(&self.peer, room.min(MAX_CREDIT - self.credit));
        self.credit += count;
        if self.credit > MAX_CREDIT / 2 {
            self.peer.is_short.store(false, Ordering::SeqCst);
        }
        if count > 0 {
            self.send(&Frame::Credit { count: u32::try_from(count).unwrap_or(u32::MAX) });
        }
    }

    /// Carries on; returns whether anything happened.
    pub(crate) fn turn(&mut self, now: Instant) -> Result<bool, Gone> {
        let mut is_busy = false;
        if now.saturating_duration_since(self.polled) >= POLL_INTERVAL {
            self.polled = now;
            is_busy |= self.receive(now)?;
        }
        is_busy |= self.post()?;
        if !self.lanes.are_idle() {
            is_busy |= self.complete()?;
        }
        self.flush(now)?;
        Ok(is_busy)
    }

    fn flush(&mut self, now: Instant) -> Result<(), Gone> {
        let flushed = self.wire.flush(&self.stream);
        let (_, sent) = self.wire.progress();
        while self.endings.front().is_some_and(|ending| ending.after <= sent) {
            let Some(Ending { state, result, .. }) = self.endings.pop_front() else { break };
            self.shared.end(&state, result);
        }
        let Err(error) = flushed else { return Ok(()) };
        // The peer may have said why before it went.
        self.receive(now)?;
        Err(gone(&error))
    }

    /// Sends a keep-alive when it is due, and checks the silence limit.
    pub(crate) fn keep_alive(&mut self, now: Instant) -> Result<(), Gone> {
        self.grant();
        if now >= self.sent + self.alive_every {
            self.send(&Frame::KeepAlive);
            self.flush(now)?;
        }
        if now < self.heard + self.silence {
            return Ok(());
        }
        // It may be this process that was stopped: what has arrived meanwhile counts.
        if self.receive(now)? { Ok(()) } else { Err(Gone::Silent(self.silence)) }
    }

    fn receive(&mut self, now: Instant) -> Result<bool, Gone> {
        let (mut has_heard, mut end) = (false, None);
        // Frames of the handshake's last read come first. A peer that never stops gets its turn again.
        for _ in 0..MAX_READS {
            while let Some(frame) = self.wire.next().map_err(|error| gone(&error))? {
                has_heard = true;
                self.take(frame)?;
            }
            if let Some(end) = end {
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

    fn take(&mut self, frame: Frame) -> Result<(), Gone> {
        match frame {
            Frame::Hello { .. } => return Err(Gone::Protocol("a second hello")),
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
                if !self.shared.inbox.add(&self.peer, bytes) {
                    return Err(Gone::Protocol("more messages than this agent's application takes"));
                }
                self.shared.tell(Event::Message);
            }
            Frame::KeepAlive => {}
            Frame::Bye => return Err(Gone::Closed),
        }
        Ok(())
    }

    fn notify(&mut self, id: u64, outcome: Outcome) -> Result<(), Gone> {
        let (tag, outcome) = self.announced.end(id, outcome).map_err(Gone::Protocol)?;
        self.shared.notify(&self.peer, tag, outcome, None);
        Ok(())
    }

    fn post(&mut self) -> Result<bool, Gone> {
        let mut is_busy = false;
        let mut closed = 0;
        while let Some(&id) = self.queue.front()
            && closed < self.queue.len()
        {
            let Some(job) = self.jobs.get_mut(&id) else {
                self.queue.pop_front();
                continue;
            };
            if job.state.is_cancelled() && job.failed.is_none() {
                job.failed = Some(TransferError::Cancelled);
            }
            if !job.is_open() {
                closed += 1;
                self.queue.rotate_left(1);
                continue;
            }
            if !job.is_exhausted() {
                let Some(lane) = self.lanes.with_room(&self.connection) else { break };
                self.lanes.post(&self.connection, lane, job).map_err(Gone::Broken)?;
            }
            is_busy = true;
            self.queue.pop_front();
            if !job.is_exhausted() {
                self.queue.push_back(id);
            } else if job.posted == 0 {
                self.end_job(id);
            }
        }
        Ok(is_busy)
    }

    fn complete(&mut self) -> Result<bool, Gone> {
        let mut ended = std::mem::take(&mut self.ended);
        let polled = self.lanes.poll(&self.connection, &mut ended);
        let is_busy = !ended.is_empty();
        let mut broken = polled.map_err(Gone::Broken);
        for BatchEnd { job: id, status } in ended.drain(..) {
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            job.posted -= 1;
            // Flushed batches of a job may come before its last good one: after a failure none ends well.
            if broken.is_err() {
                continue;
            }
            if status != Status::Success {
                broken = Err(self.stop(id, status));
            } else if job.posted == 0 && job.is_exhausted() {
                self.end_job(id);
            }
        }
        self.ended = ended;
        broken.map(|()| is_busy)
    }

    /// A request of this job failed. The job gets the reason; the link ends.
    fn stop(&mut self, id: u64, status: Status) -> Gone {
        if status == Status::RetryExceeded {
            return Gone::Silent(self.silence);
        }
        let peer = self.peer.name.clone();
        let error = match status {
            Status::RemoteAccess => TransferError::RemoteAccess { peer },
            _ => TransferError::Failed { peer, status },
        };
        if let Some(job) = self.jobs.get_mut(&id) {
            job.failed = Some(error.clone());
        }
        Gone::Broken(error.to_string())
    }

    /// All requests of this job have ended.
    fn end_job(&mut self, id: u64) {
        let Some(job) = self.jobs.remove(&id) else { return };
        let result = job.result();
        self.shared.count(|counters| match &result {
            Ok(summary) => {
                counters.transfers += 1;
                counters.bytes += summary.bytes;
            }
            Err(_) => counters.failed += 1,
        });
        let told = job.announcement.and_then(|number| self.announcements.end_job(number, &result));
        // The memory is released before the application hears of the end.
        let state = job.state.clone();
        drop(job);
        let Some(frame) = told else { return self.shared.end(&state, result) };
        // The application may exit as soon as it hears of it: the frame leaves first.
        self.send(&frame);
        let (after, _) = self.wire.progress();
        self.endings.push_back(Ending { after, state, result });
    }

    /// The peer is gone: from now on the application knows.
    pub(crate) fn note_end(&self, reason: &Gone) {
        self.peer.change(|state| {
            state.exports.clear();
            state.gone.get_or_insert_with(|| reason.clone());
        });
        self.shared.tell(Event::Peer);
    }

    /// The peer is gone: all that waits for it ends. The queue pairs go first, so no late packet
    /// reaches memory of the application.
    pub(crate) fn end(mut self, reason: &Gone) {
        if matches!(reason, Gone::Broken(_) | Gone::ClosedHere | Gone::Protocol(_)) {
            self.send_failures(reason);
        }
        let Self { connection, stream, peer, shared, mut wire, jobs, endings, mut announced, .. } = self;
        drop(connection);
        let gone = TransferError::PeerGone { peer: peer.name.clone(), reason: reason.clone() };
        shared.count(|counters| counters.failed += jobs.len() as u64);
        for (_, job) in jobs {
            let (state, error) = (job.state.clone(), job.failed.clone().unwrap_or_else(|| gone.clone()));
            drop(job);
            shared.end(&state, Err(error));
        }
        // Their bytes are there, but the peer may never hear of it.
        let (_, sent) = wire.progress();
        for Ending { after, state, result } in endings {
            shared.end(&state, if after <= sent { result } else { Err(gone.clone()) });
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
        while let Ok(Some(_)) = wire.next() {
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

fn gone(error: &WireError) -> Gone {
    match error {
        WireError::Closed => Gone::Ended,
        WireError::Malformed => Gone::Protocol("a malformed frame"),
        WireError::Unsent(bytes) => Gone::NotReading(*bytes),
        WireError::Io(error) => Gone::Broken(format!("the TCP side channel failed: {error}")),
    }
}
