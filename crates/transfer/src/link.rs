//! A peer as the agent's thread serves it: frames, jobs and announcements.

mod end;
mod frames;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nobounce::{Connection, Status};

use crate::announcements::Announcements;
use crate::error::{Gone, TransferError};
use crate::frame::Frame;
use crate::frame_lane::FrameLane;
use crate::job::Job;
use crate::lanes::{BatchEnd, Lanes};
use crate::notification::{Announced, MAX_CREDIT, MAX_OF_PEER};
use crate::shared::{Arrival, PeerShared, Shared, SideChannel};
use crate::transfer::{EVER, Summary, TransferState};
use crate::wire::{MAX_UNSENT, Wire, WireError};

/// Poll interval of the side channel, and of idle lanes, while the thread is busy.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Poll interval of gates.
const GATE_INTERVAL: Duration = Duration::from_micros(100);

/// A transfer that has ended, and its peer must be told first: when it has acknowledged so many
/// bytes of frames.
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
    frames: FrameLane,
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
    /// Announcements that have ended, and the bytes of frames until then.
    told: VecDeque<(u64, u64)>,
    ended: Vec<BatchEnd>,
    heard: Instant,
    sent: Instant,
    polled: Instant,
    silence: Duration,
    /// Interval of keep-alive frames: in time for the limits of both ends.
    pub(crate) alive_every: Duration,
    /// The next completion raises an event.
    is_armed: bool,
    /// It was armed just now: completions before that raise none.
    is_unchecked: bool,
    /// Frames came or went since the thread slept.
    is_talking: bool,
    is_ending: bool,
}

impl Link {
    pub(crate) fn new(shared: &Arc<Shared>, arrival: Arrival) -> Self {
        let (now, silence) = (Instant::now(), shared.silence.min(EVER));
        Self {
            lanes: Lanes::new(shared, &arrival.connection),
            connection: arrival.connection,
            frames: arrival.frames,
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
            told: VecDeque::new(),
            ended: Vec::new(),
            heard: now,
            sent: now,
            polled: now - POLL_INTERVAL,
            silence,
            alive_every: silence.min(arrival.silence) / 5,
            is_armed: false,
            is_unchecked: false,
            is_talking: false,
            is_ending: false,
        }
    }

    /// Whether a completion is likely soon: of a request, or an answer of the peer.
    pub(crate) fn is_waiting(&self) -> bool {
        self.is_talking || !self.lanes.are_idle()
    }

    /// The thread is going to sleep; it polls once more first.
    pub(crate) fn prepare_sleep(&mut self) {
        self.is_talking = false;
        if self.is_armed {
            self.connection.cq().pause_polling();
        } else {
            self.connection.cq().request_notify(false);
            (self.is_armed, self.is_unchecked) = (true, true);
        }
    }

    /// The descriptor of completions is readable.
    pub(crate) fn take_event(&mut self) {
        self.connection.channel().take();
        self.is_armed = false;
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

    /// Returns the bytes of frames until its end.
    pub(crate) fn send(&mut self, frame: &Frame) -> u64 {
        self.frames.push(frame);
        self.sent = Instant::now();
        self.frames.progress().0
    }

    /// The frame that ends an announcement: returns the bytes of frames until then.
    fn send_end(&mut self, id: u64, frame: &Frame) -> u64 {
        let after = self.send(frame);
        self.told.push_back((after, id));
        after
    }

    pub(crate) fn announce(&mut self, id: u64, tag: Vec<u8>) {
        self.announcements.add(id, tag);
        self.announce_waiting();
    }

    /// Announces what the peer has room for; transfers that waited for that may begin.
    fn announce_waiting(&mut self) {
        while let Some((announcement, end, held)) = self.announcements.announce() {
            self.send(&announcement);
            if let (Some(end), Frame::Announce { id, .. }) = (end, announcement) {
                self.send_end(id, &end);
            }
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
            self.send_end(id, &end);
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
        let is_due = now.saturating_duration_since(self.polled) >= POLL_INTERVAL;
        // Polls of an armed queue do not keep the engine thread from driving, too.
        if self.is_waiting() && self.is_armed && !self.is_unchecked {
            self.connection.cq().cancel_notify();
            self.is_armed = false;
        }
        let mut is_busy = false;
        if !self.is_armed || is_due || std::mem::take(&mut self.is_unchecked) {
            is_busy |= self.complete()?;
        }
        if is_due {
            self.polled = now;
            is_busy |= self.receive(now)?;
        }
        // An announcement leaves before the first byte of its transfers.
        is_busy |= self.post_frames()?;
        if self.frames.unsent() == 0 {
            is_busy |= self.post()?;
        }
        is_busy |= self.flush(now)?;
        Ok(is_busy)
    }

    fn post_frames(&mut self) -> Result<bool, Gone> {
        let is_busy = self.lanes.post_frames(&self.connection, &mut self.frames).map_err(Gone::Broken)?;
        self.is_talking |= is_busy;
        Ok(is_busy)
    }

    /// Sends frames, and ends what the peer has been told of.
    fn flush(&mut self, now: Instant) -> Result<bool, Gone> {
        let is_busy = self.post_frames()?;
        let (_, acknowledged) = self.frames.progress();
        while self.told.front().is_some_and(|(after, _)| *after <= acknowledged) {
            self.told.pop_front().iter().for_each(|(_, id)| self.announcements.forget(*id));
        }
        while self.endings.front().is_some_and(|ending| ending.after <= acknowledged) {
            let Some(Ending { state, result, .. }) = self.endings.pop_front() else { break };
            self.shared.end(&state, result);
        }
        if self.frames.unsent() > MAX_UNSENT {
            return Err(Gone::NotReading(self.frames.unsent()));
        }
        let Err(error) = self.wire.flush(&self.stream) else { return Ok(is_busy) };
        // The peer may have said why before it went.
        self.receive(now)?;
        Err(gone(&error))
    }

    /// Sends a keep-alive when it is due, and checks the silence limit.
    pub(crate) fn keep_alive(&mut self, now: Instant) -> Result<(), Gone> {
        self.grant();
        if now >= self.sent + self.alive_every {
            self.wire.push(&Frame::KeepAlive);
            self.sent = now;
            self.flush(now)?;
        }
        if now < self.heard + self.silence {
            return Ok(());
        }
        // It may be this process that was stopped: what has arrived meanwhile counts.
        if self.receive(now)? { Ok(()) } else { Err(Gone::Silent(self.silence)) }
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
            if job.state.is_cancelled() && job.failed.is_none() && job.counted.is_none() {
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
            } else if self.lanes.is_single() {
                self.count_posted(id);
            }
        }
        Ok(is_busy)
    }

    /// All of a transfer is posted on the only lane: the frame that ends its announcement follows
    /// its bytes there, and need not wait for their completion.
    fn count_posted(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if let Some(bytes) = job.message.take_if(|_| job.failed.is_none()) {
            job.counted = Some(None);
            let after = self.send(&Frame::Message { bytes });
            self.jobs.entry(id).and_modify(|job| job.counted = Some(Some(after)));
            return;
        }
        let Some(number) = job.announcement.filter(|_| job.failed.is_none() && job.counted.is_none()) else {
            return;
        };
        job.counted = Some(None);
        let result = job.result();
        let Some(frame) = self.announcements.end_job(number, &result) else { return };
        let after = self.send_end(number, &frame);
        self.jobs.entry(id).and_modify(|job| job.counted = Some(Some(after)));
    }

    fn complete(&mut self) -> Result<bool, Gone> {
        let mut ended = std::mem::take(&mut self.ended);
        let polled = self.lanes.poll(&self.connection, &mut self.frames, &mut ended);
        let mut broken = polled.clone().map_err(Gone::Broken).and_then(|_| self.take_frames());
        for BatchEnd { job: id, status } in ended.drain(..) {
            let Some(id) = id else {
                broken = broken.and_then(|()| Err(self.stop(None, status)));
                continue;
            };
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            job.posted -= 1;
            // Flushed batches of a job may come before its last good one: after a failure none ends
            // well.
            if broken.is_err() {
                continue;
            }
            if status != Status::Success {
                broken = Err(self.stop(Some(id), status));
            } else if job.posted == 0 && job.is_exhausted() {
                self.end_job(id);
            }
        }
        self.ended = ended;
        broken.map(|()| polled.unwrap_or(false))
    }

    /// A request of this job, or frames, failed. The job gets the reason; the link ends.
    fn stop(&mut self, id: Option<u64>, status: Status) -> Gone {
        if status == Status::RetryExceeded {
            return Gone::Silent(self.silence);
        }
        let peer = self.peer.name.clone();
        let error = match status {
            Status::RemoteAccess => TransferError::RemoteAccess { peer },
            _ => TransferError::Failed { peer, status },
        };
        if let Some(job) = id.and_then(|id| self.jobs.get_mut(&id)) {
            job.failed = Some(error.clone());
        }
        Gone::Broken(error.to_string())
    }

    /// All requests of this job have ended.
    fn end_job(&mut self, id: u64) {
        let Some(mut job) = self.jobs.remove(&id) else { return };
        let result = job.result();
        self.shared.count(|counters| match &result {
            Ok(summary) => {
                counters.transfers += 1;
                counters.bytes += summary.bytes;
            }
            Err(_) => counters.failed += 1,
        });
        let announcement = job.announcement.filter(|_| job.counted.is_none());
        // The application may exit as soon as it hears of the end: the peer has the frame before.
        let told =
            announcement.and_then(|number| Some((number, self.announcements.end_job(number, &result)?)));
        let told = told.map(|(number, frame)| self.send_end(number, &frame));
        let message = job.message.take_if(|_| result.is_ok());
        let sent = message.map(|bytes| self.send(&Frame::Message { bytes }));
        let after = told.or(sent).or(job.counted.flatten());
        // The memory is released before the application hears of the end.
        let state = job.state.clone();
        drop(job);
        match after {
            None => self.shared.end(&state, result),
            Some(after) => self.endings.push_back(Ending { after, state, result }),
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
