//! Carries descriptors out.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nobounce_memory::AccessError;
use nobounce_nic::any::{Cq, CqError};
use nobounce_nic::work::{Operation, Remote, Sge, Status, WorkCompletion};

use crate::descriptor::{Action, Counted, Descriptor, Signal, WORDS};
use crate::parts::{Channel, Parts, PartsError, Scratch};
use crate::peer::{Completed, Peer, Source, Waiting};
use crate::table::{Refusal, Table};
use crate::words::{STRIDE, Words};

/// Descriptors taken from a ring before the next ring and the completions have their turn.
const BATCH: usize = 32;

/// Interval of probes. With the retries of a queue pair, a rank that is gone is noticed within a
/// second.
pub(crate) const PROBE_EVERY: Duration = Duration::from_millis(250);

/// Words of status: the rank cannot be reached; the proxy has ended.
const LOST: u64 = 1;
const ENDED: u64 = 2;

/// Reasons kept for the host.
const MAX_REFUSALS: usize = 64;

/// A descriptor that was refused, or failed.
#[derive(Clone, Debug)]
pub struct Report {
    /// The channel it was in.
    pub channel: usize,
    /// Its number in that channel.
    pub number: u64,
    /// Why.
    pub reason: Refusal,
}

/// Why a proxy cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// A ring or a counter is gone.
    #[error("memory of a channel is gone: {0}")]
    Memory(#[from] AccessError),
    /// Completions are lost.
    #[error(transparent)]
    Completions(#[from] CqError),
}

/// What there was to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Descriptors, or completions.
    Busy,
    /// Nothing, but requests are not complete.
    Waiting,
    /// Nothing.
    Idle,
}

/// Carries out the descriptors of channels, with one queue pair to each rank.
#[derive(Debug)]
pub struct Proxy {
    rank: usize,
    /// The channel that is served first.
    first: usize,
    next_probe: Instant,
    channels: Vec<Channel>,
    /// A descriptor of each channel that found no room in a send queue.
    held: Vec<Option<[u64; WORDS]>>,
    peers: Vec<Peer>,
    cq: Cq,
    table: Table,
    scratch: Scratch,
    /// For kernels: not 0 if a rank cannot be reached; the last one if any cannot.
    status: Words,
    reports: Arc<Mutex<VecDeque<Report>>>,
    completions: Vec<WorkCompletion>,
}

impl Proxy {
    /// From its parts.
    ///
    /// # Errors
    /// They do not fit each other.
    pub fn new(parts: Parts) -> Result<Self, PartsError> {
        parts.check()?;
        let Parts { rank, channels, qps, cq, table, scratch, status } = parts;
        let count = channels.len();
        let peer = |(at, qp)| Peer::new(at, qp, count);
        let mut proxy = Self {
            rank,
            first: 0,
            next_probe: Instant::now() + PROBE_EVERY,
            held: channels.iter().map(|_| None).collect(),
            channels,
            peers: qps.into_iter().enumerate().map(peer).collect(),
            cq,
            table,
            scratch,
            status,
            reports: Arc::default(),
            completions: Vec::new(),
        };
        for at in 0..proxy.peers.len() {
            if proxy.peers[at].failure.is_some() {
                let _ = proxy.lose(at); // memory that is gone shows in the first turn
            }
        }
        Ok(proxy)
    }

    /// Whether a channel has a descriptor.
    pub(crate) fn has_descriptors(&self) -> bool {
        self.held.iter().any(Option::is_some) || self.channels.iter().any(|channel| channel.ring.has_next())
    }

    /// There will be no turn for a while.
    pub(crate) fn pause(&self) {
        self.cq.pause_polling();
    }

    /// Kernels must not wait for a proxy that has ended.
    pub(crate) fn end(&mut self) {
        for word in 0..=self.peers.len() {
            self.status.set(word, ENDED);
            let _ = self.status.write_back(word);
        }
    }

    /// Refused and failed descriptors, the oldest first. Later ones than 64 are not kept.
    #[must_use]
    pub fn reports(&self) -> Arc<Mutex<VecDeque<Report>>> {
        self.reports.clone()
    }

    /// Takes descriptors and completions.
    ///
    /// # Errors
    /// The proxy cannot go on: its memory is gone, or completions are lost.
    pub fn turn(&mut self) -> Result<Turn, ProxyError> {
        let (mut is_busy, count) = (false, self.channels.len());
        // Each channel is the first one in its turn: it finds room in send queues.
        self.first = (self.first + 1) % count.max(1);
        for step in 0..count {
            is_busy |= self.serve((self.first + step) % count)?;
        }
        if is_busy {
            self.post_queued()?;
        }
        let mut completions = std::mem::take(&mut self.completions);
        self.cq.poll_awake(&mut completions, 64)?;
        for completion in completions.drain(..) {
            is_busy |= self.complete(&completion)?;
        }
        self.completions = completions;
        let now = Instant::now();
        if now >= self.next_probe {
            self.next_probe = now + PROBE_EVERY;
            self.probe()?;
        }
        Ok(match is_busy {
            true => Turn::Busy,
            false if self.peers.iter().any(Peer::is_waiting) => Turn::Waiting,
            false => Turn::Idle,
        })
    }

    /// Writes nothing to ranks without outstanding requests. Kernels may wait for signals of a rank
    /// to which nothing is posted, and must learn that it is gone.
    fn probe(&mut self) -> Result<(), ProxyError> {
        for (at, peer) in self.peers.iter_mut().enumerate() {
            if at != self.rank
                && peer.failure.is_none()
                && !peer.is_waiting()
                && let Some(place) = self.table.any_place(at)
            {
                peer.queue(Operation::Write(remote(place)), Source::None);
            }
        }
        self.post_queued()
    }

    fn serve(&mut self, channel: usize) -> Result<bool, ProxyError> {
        let mut count = 0;
        while count < BATCH {
            let words = match self.held[channel].take() {
                Some(words) => words,
                None => match self.channels[channel].ring.take()? {
                    Some(words) => words,
                    None => break,
                },
            };
            if !self.carry_out(channel, &words)? {
                self.held[channel] = Some(words);
                break;
            }
            count += 1;
        }
        let Channel { ring, consumed, .. } = &mut self.channels[channel];
        // What is held has left the ring.
        if consumed.get(0) != ring.taken() {
            consumed.set(0, ring.taken());
            consumed.write_back(0)?;
        }
        Ok(count > 0)
    }

    /// Posts what descriptors have queued.
    fn post_queued(&mut self) -> Result<(), ProxyError> {
        for at in 0..self.peers.len() {
            let peer = &mut self.peers[at];
            if peer.failure.is_none() {
                peer.post();
                if peer.failure.is_some() {
                    self.lose(at)?;
                }
            }
        }
        Ok(())
    }

    /// False if there is no room for its work requests.
    fn carry_out(&mut self, channel: usize, words: &[u64; WORDS]) -> Result<bool, ProxyError> {
        let descriptor = match Descriptor::parse(words) {
            Ok(descriptor) => descriptor,
            Err(malformed) => return self.refuse(channel, None, malformed.into()).map(|()| true),
        };
        match self.post(channel, &descriptor) {
            Ok(has_room) => Ok(has_room),
            Err(Stop::Refused(reason)) => self.refuse(channel, Some(&descriptor), reason).map(|()| true),
            Err(Stop::Ended(error)) => Err(error),
        }
    }

    fn post(&mut self, channel: usize, descriptor: &Descriptor) -> Result<bool, Stop> {
        self.table.check(descriptor)?;
        let Some(rank) = Table::rank_of(&descriptor.action) else {
            if let Action::ResetSignal { index } = descriptor.action {
                // Of this rank.
                let rank = u32::try_from(self.rank).unwrap_or(u32::MAX);
                self.table.signal(rank, channel, Signal { index, add: 0 })?;
            }
            return Ok(self.control(channel, descriptor.action).map(|()| true)?);
        };
        let at = self.table.index_of(rank)?;
        let peer = &self.peers[at];
        if let Some(reason) = &peer.failure {
            return Err(Refusal::Unreachable { rank, reason: reason.clone() }.into());
        }
        if !peer.has_room() {
            return Ok(false);
        }
        let (operation, signal) = match descriptor.action {
            Action::Get(moved) => {
                let moved = self.table.transfer(&moved)?;
                let sge = Sge { addr: moved.local.0, len: moved.len, lkey: moved.local.1 };
                (Some((Operation::Read(remote(moved.remote)), Source::Memory(sge))), None)
            }
            // A signal alone names no memory.
            Action::Put(moved, signal @ Some(_)) if moved.len == 0 => (None, signal),
            Action::Put(moved, signal) => {
                let moved = self.table.transfer(&moved)?;
                let sge = Sge { addr: moved.local.0, len: moved.len, lkey: moved.local.1 };
                (Some((Operation::Write(remote(moved.remote)), Source::Memory(sge))), signal)
            }
            Action::PutValue { to, value, len, signal } => {
                if !(1..=8).contains(&len) {
                    return Err(Refusal::ValueLength { len }.into());
                }
                let place = self.table.place(to, u64::from(len))?;
                let source = Source::Value(value.to_le_bytes(), u8::try_from(len).unwrap_or(8));
                (Some((Operation::Write(remote(place)), source)), signal)
            }
            Action::Add { to, value } => {
                let remote = remote(self.table.word(to)?);
                let source = Source::Memory(self.scratch.sge());
                (Some((Operation::FetchAdd { remote, add: value }, source)), None)
            }
            Action::Flush { .. } => (None, None),
            Action::ResetCounter(_) | Action::WriteBackCounter { .. } | Action::ResetSignal { .. } => {
                return Ok(true); // handled above
            }
        };
        let signal = match signal {
            Some(signal) => Some((self.table.signal(rank, channel, signal)?, signal)),
            None => None,
        };
        let is_flush = matches!(descriptor.action, Action::Flush { .. });
        // A signal says that everything before it has arrived. A flush tells kernels of it, once.
        let tells = is_flush || signal.is_some() || matches!(descriptor.action, Action::Add { .. });
        let refused = &mut self.peers[at].refused[channel];
        if tells && *refused {
            *refused = !is_flush;
            return Err(
                Refusal::Post { reason: "an earlier descriptor to this rank was refused".into() }.into()
            );
        }
        let (number, scratch) = (self.number(channel), self.scratch.sge());
        let peer = &mut self.peers[at];
        if let Some((operation, source)) = operation {
            peer.queue(operation, source);
        }
        if let Some((place, Signal { add, .. })) = signal {
            peer.queue(Operation::FetchAdd { remote: remote(place), add }, Source::Memory(scratch));
        }
        let waiting = Waiting { requests: 0, channel, number, counter: descriptor.counter, is_flush };
        if let Some(complete) = peer.wait(waiting) {
            self.finish(&complete, true)?; // a flush, and all is complete
        }
        Ok(true)
    }

    /// The number of the descriptor that was taken last.
    fn number(&self, channel: usize) -> u64 {
        self.channels[channel].ring.taken().saturating_sub(1)
    }

    fn control(&mut self, channel: usize, action: Action) -> Result<(), ProxyError> {
        let Channel { counters, signals, .. } = &mut self.channels[channel];
        match action {
            Action::ResetCounter(Counted { index, is_written_back }) => {
                counters.set(index.into(), 0);
                if is_written_back {
                    counters.write_back(index.into())?;
                }
            }
            Action::WriteBackCounter { index } => counters.write_back(index.into())?,
            Action::ResetSignal { index } => {
                signals.reset(usize::from(index) * STRIDE)?;
            }
            Action::Get(_)
            | Action::Put(..)
            | Action::PutValue { .. }
            | Action::Add { .. }
            | Action::Flush { .. } => {}
        }
        Ok(())
    }

    /// Returns whether a descriptor waited for it.
    fn complete(&mut self, completion: &WorkCompletion) -> Result<bool, ProxyError> {
        let Completed { at, requests } = Completed::of(completion.wr_id);
        let Some(peer) = self.peers.get_mut(at) else { return Ok(false) };
        match requests {
            Some(requests) if completion.status == Status::Success => peer.complete(requests),
            _ => {
                peer.failure.get_or_insert_with(|| format!("{:?}", completion.status));
                return self.lose(at).map(|()| true);
            }
        }
        let mut has_finished = false;
        while let Some(waiting) = self.peers[at].next_complete() {
            self.finish(&waiting, true)?;
            has_finished = true;
        }
        Ok(has_finished)
    }

    /// Counts a descriptor that is complete, or failed.
    fn finish(&mut self, waiting: &Waiting, succeeded: bool) -> Result<(), ProxyError> {
        let Some(Counted { index, is_written_back }) = waiting.counter else { return Ok(()) };
        let counters = &mut self.channels[waiting.channel].counters;
        match succeeded {
            _ if waiting.is_flush => counters.flushed(index.into(), succeeded),
            true => counters.count(index.into()),
            false => counters.fail(index.into()),
        }
        if is_written_back || !succeeded {
            counters.write_back(index.into())?;
        }
        Ok(())
    }

    /// A rank cannot be reached any more: everything that waits for it fails.
    fn lose(&mut self, at: usize) -> Result<(), ProxyError> {
        let rank = u32::try_from(at).unwrap_or(u32::MAX);
        let reason = self.peers[at].failure.clone().unwrap_or_default();
        let waiting = self.peers[at].take_waiting();
        for word in [at, self.peers.len()] {
            if self.status.get(word) == 0 {
                self.status.set(word, LOST);
                self.status.write_back(word)?;
            }
        }
        // A kernel that sees the error bit finds the status and the reason.
        for waiting in &waiting {
            let reason = Refusal::Unreachable { rank, reason: reason.clone() };
            self.report(waiting.channel, waiting.number, reason);
            self.finish(waiting, false)?;
        }
        Ok(())
    }

    fn refuse(
        &mut self,
        channel: usize,
        descriptor: Option<&Descriptor>,
        reason: Refusal,
    ) -> Result<(), ProxyError> {
        let is_flush = descriptor.is_some_and(|descriptor| matches!(descriptor.action, Action::Flush { .. }));
        // The next flush tells kernels that have no counter for it. One of which nothing is known
        // may have been for any rank.
        let rank = descriptor.and_then(|descriptor| Table::rank_of(&descriptor.action));
        for (at, peer) in self.peers.iter_mut().enumerate() {
            peer.refused[channel] |= !is_flush && rank.is_none_or(|rank| rank as usize == at);
        }
        self.report(channel, self.number(channel), reason);
        if let Some(Counted { index, .. }) = descriptor.and_then(|descriptor| descriptor.counter) {
            let counters = &mut self.channels[channel].counters;
            if is_flush {
                counters.flushed(index.into(), false);
            } else {
                counters.fail(index.into());
            }
            counters.write_back(index.into())?;
        }
        Ok(())
    }

    fn report(&self, channel: usize, number: u64, reason: Refusal) {
        tracing::error!(channel, number, %reason, "a descriptor was not carried out");
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        if reports.len() < MAX_REFUSALS {
            reports.push_back(Report { channel, number, reason });
        }
    }
}

fn remote((addr, rkey): (u64, u32)) -> Remote {
    Remote { addr, rkey }
}

/// Why a descriptor is not posted.
enum Stop {
    Refused(Refusal),
    Ended(ProxyError),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<ProxyError> for Stop {
    fn from(error: ProxyError) -> Self {
        Self::Ended(error)
    }
}
