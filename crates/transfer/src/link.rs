//! A peer as the agent's thread serves it: frames, jobs and announcements.

use std::collections::{HashMap, VecDeque};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nobounce::{Connection, Status};

use crate::error::{Gone, TransferError};
use crate::frame::{Frame, MAX_EXPORTS, printable};
use crate::job::Job;
use crate::lanes::{BatchEnd, Lanes};
use crate::notification::{self, Announced, MAX_OF_PEER, Outcome};
use crate::shared::{Arrival, Event, PeerShared, Shared};
use crate::wire::{Wire, WireError};

/// Poll interval of the side channel while requests are outstanding.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Reads of the side channel in one turn.
const MAX_READS: usize = 4;
/// Poll interval of gates.
const GATE_INTERVAL: Duration = Duration::from_micros(100);

/// An announcement of ours.
#[derive(Debug, Default)]
struct Announcement {
    jobs: usize,
    bytes: u64,
    failed: Option<(bool, String)>,
    is_finished: bool,
}

#[derive(Debug)]
pub(crate) struct Link {
    // Dropped first: no request reaches the memory of a job that is dropped.
    pub(crate) connection: Connection,
    pub(crate) stream: TcpStream,
    pub(crate) peer: Arc<PeerShared>,
    shared: Arc<Shared>,
    wire: Wire,
    lanes: Lanes,
    jobs: HashMap<u64, Job>,
    /// Jobs with pieces to post, in turns.
    queue: VecDeque<u64>,
    announcements: HashMap<u64, Announcement>,
    announced: Announced,
    ended: Vec<BatchEnd>,
    heard: Instant,
    sent: Instant,
    polled: Instant,
    silence: Duration,
    pub(crate) is_armed: bool,
}

impl Link {
    pub(crate) fn new(shared: &Arc<Shared>, arrival: Arrival, silence: Duration) -> Self {
        let now = Instant::now();
        Self {
            lanes: Lanes::new(&arrival.connection),
            connection: arrival.connection,
            stream: arrival.stream,
            peer: arrival.peer,
            shared: shared.clone(),
            wire: arrival.wire,
            jobs: HashMap::new(),
            queue: VecDeque::new(),
            announcements: HashMap::new(),
            announced: Announced::default(),
            ended: Vec::new(),
            heard: now,
            sent: now,
            polled: now - POLL_INTERVAL,
            silence,
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
        let life = (self.sent + self.alive_every()).min(self.heard + self.silence);
        // Jobs in the queue of an idle link wait for their gates.
        let has_gates = !self.queue.is_empty() && self.lanes.are_idle();
        if has_gates { life.min(Instant::now() + GATE_INTERVAL) } else { life }
    }

    fn alive_every(&self) -> Duration {
        self.silence / 5
    }

    pub(crate) fn send(&mut self, frame: &Frame) {
        self.wire.push(frame);
        self.sent = Instant::now();
    }

    pub(crate) fn announce(&mut self, id: u64, tag: Vec<u8>) {
        self.announcements.insert(id, Announcement::default());
        self.send(&Frame::Announce { id, tag });
    }

    pub(crate) fn submit(&mut self, job: Job) {
        if let Some(announcement) = job.announcement.and_then(|id| self.announcements.get_mut(&id)) {
            announcement.jobs += 1;
        }
        let id = job.state.id;
        self.jobs.insert(id, job);
        self.queue.push_back(id);
    }

    pub(crate) fn finish(&mut self, id: u64, abort: Option<String>) {
        let Some(announcement) = self.announcements.get_mut(&id) else { return };
        announcement.is_finished = true;
        if let Some(reason) = abort {
            announcement.failed.get_or_insert((true, reason));
        }
        self.end_announcement(id);
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
        let Err(error) = self.wire.flush(&self.stream) else { return Ok(()) };
        // The peer may have said why before it went.
        self.receive(now)?;
        Err(gone(&error))
    }

    /// Sends a keep-alive when it is due, and checks the silence limit.
    pub(crate) fn keep_alive(&mut self, now: Instant) -> Result<(), Gone> {
        if now >= self.sent + self.alive_every() {
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
                Ok(true) => has_heard = true,
                Ok(false) => break,
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
                // Counted until the application takes the notification, so that each has its place.
                let of_peer = self.peer.promised.fetch_add(1, Ordering::Relaxed);
                if of_peer >= MAX_OF_PEER || !self.shared.promise() {
                    self.peer.promised.fetch_sub(1, Ordering::Relaxed);
                    return Err(Gone::Protocol(
                        "more transfers announced than this agent takes notifications of",
                    ));
                }
                self.announced.add(id, tag).map_err(Gone::Protocol)?;
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
        self.shared.notify(&self.peer, tag, outcome);
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
        if let Some(number) = job.announcement
            && let Some(announcement) = self.announcements.get_mut(&number)
        {
            announcement.jobs -= 1;
            match &result {
                Ok(summary) => announcement.bytes += summary.bytes,
                Err(error) => {
                    let is_aborted = *error == TransferError::Cancelled;
                    announcement.failed.get_or_insert((is_aborted, error.to_string()));
                }
            }
            self.end_announcement(number);
        }
        // The memory is released before the application hears of the end.
        let state = job.state.clone();
        drop(job);
        self.shared.end(&state, result);
    }

    /// Tells the peer, when all transfers of a finished announcement have ended.
    fn end_announcement(&mut self, id: u64) {
        let Some(announcement) = self.announcements.get(&id) else { return };
        if !announcement.is_finished || announcement.jobs > 0 {
            return;
        }
        let Some(Announcement { bytes, failed, .. }) = self.announcements.remove(&id) else { return };
        self.send(&match failed {
            None => Frame::Done { id, bytes },
            Some((is_aborted, reason)) => Frame::Failed { id, is_aborted, reason: printable(&reason) },
        });
    }

    /// The peer is gone: all that waits for it ends. The queue pairs go first, so no late packet
    /// reaches memory of the application.
    pub(crate) fn end(mut self, reason: &Gone) {
        let name = self.peer.name.clone();
        let reports_failures = matches!(reason, Gone::Broken(_) | Gone::ClosedHere | Gone::Protocol(_));
        if reports_failures {
            self.send_failures(reason);
        }
        let late = self.count_late_frames();
        let Self { connection, stream, peer, shared, jobs, mut announced, .. } = self;
        drop(connection);
        drop(stream);
        peer.change(|state| {
            state.exports.clear();
            state.gone.get_or_insert_with(|| reason.clone());
        });
        let gone = TransferError::PeerGone { peer: name, reason: reason.clone() };
        shared.count(|counters| {
            counters.failed += jobs.len() as u64;
            counters.late_frames += late;
        });
        for (_, job) in jobs {
            let (state, error) = (job.state.clone(), job.failed.clone().unwrap_or_else(|| gone.clone()));
            drop(job);
            shared.end(&state, Err(error));
        }
        for (tag, outcome) in announced.abort(reason) {
            shared.notify(&peer, tag, outcome);
        }
        shared.tell(Event::Peer);
        tracing::debug!(peer = peer.name, "the peer is gone: {reason}");
    }

    /// Failures of transfers whose cause the peer does not know, and the end.
    fn send_failures(&mut self, reason: &Gone) {
        let mut failed: Vec<_> = self.announcements.drain().map(|(id, _)| id).collect();
        failed.sort_unstable();
        for id in failed {
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

    /// Frames that came after the decision.
    fn count_late_frames(&mut self) -> u64 {
        let mut late = 0;
        for _ in 0..MAX_READS {
            if !matches!(self.wire.fill(&self.stream), Ok(true)) {
                break;
            }
            while let Ok(Some(_)) = self.wire.next() {
                late += 1;
            }
        }
        late
    }
}

fn gone(error: &WireError) -> Gone {
    match error {
        WireError::Closed => Gone::Ended,
        WireError::Malformed => Gone::Protocol("a malformed frame"),
        WireError::Io(error) => Gone::Broken(format!("the TCP side channel failed: {error}")),
    }
}
