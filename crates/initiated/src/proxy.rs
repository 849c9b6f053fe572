//! Carries descriptors out.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nobounce_memory::AccessError;
use nobounce_nic::any::{Cq, CqError, Qp};
use nobounce_nic::soft::{Remote, Status};
use nobounce_nic::work::{Operation, RecvRequest, SendRequest, Sge, WorkCompletion};

use crate::descriptor::{Action, Counted, Descriptor, Signal, WORDS};
use crate::parts::{Channel, MAX_REQUESTS, Parts, PartsError, Scratch};
use crate::table::{Refusal, Table};
use crate::words::{STRIDE, WordMemory, Words};

/// Descriptors taken from a ring before the next ring and the completions have their turn.
const BATCH: usize = 32;

/// Marks the receive of each queue pair, which no message takes.
const END: u64 = 1 << 63;

/// Interval of probes of a silent rank. With the retries of a queue pair, a rank that is gone is
/// noticed within a second.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// Words of status: the rank cannot be reached; the proxy has ended.
const LOST: u64 = 1;
const ENDED: u64 = 2;

/// Reasons kept for the host.
const MAX_REFUSALS: usize = 64;

/// A rank: the queue pair to it.
#[derive(Debug)]
struct Peer {
    qp: Qp,
    /// Work requests posted and completed.
    posted: u64,
    completed: u64,
    /// Descriptors that wait for the completion of a request, in order of their requests.
    waiting: VecDeque<Waiting>,
    failure: Option<String>,
    next_probe: Instant,
    /// Requests posted up to the last READ. Later requests wait for it.
    last_read: u64,
    /// Channels with a refused descriptor to this rank since their last flush: that fails.
    refused: Vec<bool>,
}

impl Peer {
    /// The next descriptor whose requests are all complete.
    fn next_complete(&mut self) -> Option<Waiting> {
        let completed = self.completed;
        self.waiting.front().filter(|first| first.requests <= completed)?;
        self.waiting.pop_front()
    }
}

/// A descriptor that is complete when so many requests of its peer are.
#[derive(Debug)]
struct Waiting {
    requests: u64,
    channel: usize,
    /// Of the descriptor, in its channel.
    number: u64,
    counter: Option<Counted>,
}

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

/// Carries out the descriptors of channels, with one queue pair to each rank.
#[derive(Debug)]
pub struct Proxy {
    channels: Vec<Channel>,
    /// A descriptor of each channel that found no room in a send queue.
    held: Vec<Option<[u64; WORDS]>>,
    peers: Vec<Peer>,
    cq: Cq,
    table: Table,
    signals: WordMemory,
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
        let Parts { channels, qps, cq, table, signals, scratch, status } = parts;
        let count = channels.len();
        let peer = |(at, qp): (usize, Qp)| {
            // Completes with an error when the queue pair ends, though nothing was posted to it.
            let failure = qp.post_recv(&RecvRequest { wr_id: END | at as u64, sges: &[] }).err();
            let failure = failure.map(|error| error.to_string());
            Peer {
                qp,
                posted: 0,
                completed: 0,
                waiting: VecDeque::new(),
                failure,
                next_probe: Instant::now() + PROBE_EVERY,
                last_read: 0,
                refused: vec![false; count],
            }
        };
        let mut proxy = Self {
            held: channels.iter().map(|_| None).collect(),
            channels,
            peers: qps.into_iter().enumerate().map(peer).collect(),
            cq,
            table,
            signals,
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

    /// Takes descriptors and completions. Returns whether there were any.
    ///
    /// # Errors
    /// The proxy cannot go on: its memory is gone, or completions are lost.
    pub fn turn(&mut self) -> Result<bool, ProxyError> {
        let mut is_busy = false;
        for channel in 0..self.channels.len() {
            is_busy |= self.serve(channel)?;
        }
        let mut completions = std::mem::take(&mut self.completions);
        self.cq.poll(&mut completions, 64)?;
        for completion in completions.drain(..) {
            is_busy = true;
            self.complete(&completion)?;
        }
        self.completions = completions;
        if !is_busy {
            self.probe();
        }
        Ok(is_busy)
    }

    /// Writes nothing to ranks that have been silent. Kernels may wait for signals of a rank to which
    /// nothing is posted, and must learn that it is gone.
    fn probe(&mut self) {
        let now = Instant::now();
        for at in 0..self.peers.len() {
            let peer = &mut self.peers[at];
            if peer.failure.is_some() || peer.posted > peer.completed || now < peer.next_probe {
                continue;
            }
            peer.next_probe = now + PROBE_EVERY;
            if let Some(place) = self.table.any_place(at) {
                // A queue pair that refuses it has ended, which its receive tells.
                let _ = self.request(at, Some(Operation::Write(remote(place))), None, None, None);
            }
        }
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
            return Ok(self.control(channel, descriptor.action).map(|()| true)?);
        };
        let at = self.table.index_of(rank)?;
        let peer = &self.peers[at];
        if let Some(reason) = &peer.failure {
            return Err(Refusal::Unreachable { rank, reason: reason.clone() }.into());
        }
        let outstanding = usize::try_from(peer.posted - peer.completed).unwrap_or(usize::MAX);
        if outstanding.saturating_add(MAX_REQUESTS) > peer.qp.limits().send_depth {
            return Ok(false);
        }
        let value;
        let (operation, sge, inline, signal) = match descriptor.action {
            Action::Get(moved) => {
                let moved = self.table.transfer(&moved)?;
                let sge = Sge { addr: moved.local.0, len: moved.len, lkey: moved.local.1 };
                (Some(Operation::Read(remote(moved.remote))), Some(sge), None, None)
            }
            // A signal alone names no memory.
            Action::Put(moved, signal @ Some(_)) if moved.len == 0 => (None, None, None, signal),
            Action::Put(moved, signal) => {
                let moved = self.table.transfer(&moved)?;
                let sge = Sge { addr: moved.local.0, len: moved.len, lkey: moved.local.1 };
                (Some(Operation::Write(remote(moved.remote))), Some(sge), None, signal)
            }
            Action::PutValue { to, value: bytes, len, signal } => {
                if !(1..=8).contains(&len) {
                    return Err(Refusal::ValueLength { len }.into());
                }
                value = bytes.to_le_bytes();
                let place = self.table.place(to, u64::from(len))?;
                (Some(Operation::Write(remote(place))), None, Some(&value[..len as usize]), signal)
            }
            Action::Add { to, value } => {
                let remote = remote(self.table.word(to)?);
                (Some(Operation::FetchAdd { remote, add: value }), Some(self.scratch.sge()), None, None)
            }
            Action::Flush { .. } => (None, None, None, None),
            Action::ResetCounter(_) | Action::WriteBackCounter { .. } | Action::ResetSignal { .. } => {
                return Ok(true); // handled above
            }
        };
        let signal = match signal {
            Some(signal) => Some((self.table.signal(rank, signal)?, signal)),
            None => None,
        };
        let is_flush = matches!(descriptor.action, Action::Flush { .. });
        if is_flush && std::mem::take(&mut self.peers[at].refused[channel]) {
            return Err(
                Refusal::Post { reason: "an earlier descriptor to this rank was refused".into() }.into()
            );
        }
        self.request(at, operation, sge, inline, signal)?;
        let number = self.number(channel);
        let peer = &mut self.peers[at];
        if matches!(descriptor.action, Action::Get(_)) {
            peer.last_read = peer.posted;
        }
        let waiting = Waiting { requests: peer.posted, channel, number, counter: descriptor.counter };
        if peer.failure.is_some() || peer.completed < peer.posted {
            peer.waiting.push_back(waiting);
        } else {
            self.finish(&waiting, true)?; // a flush, and all is complete
        }
        if self.peers[at].failure.is_some() {
            self.lose(at)?;
        }
        Ok(true)
    }

    /// The number of the descriptor that was taken last.
    fn number(&self, channel: usize) -> u64 {
        self.channels[channel].ring.taken().saturating_sub(1)
    }

    /// Posts the requests of a descriptor, all reported.
    fn request(
        &mut self,
        at: usize,
        operation: Option<Operation>,
        sge: Option<Sge>,
        inline: Option<&[u8]>,
        signal: Option<((u64, u32), Signal)>,
    ) -> Result<(), Refusal> {
        let (scratch, peer) = (self.scratch.sge(), &mut self.peers[at]);
        let add =
            signal.map(|(place, Signal { add, .. })| Operation::FetchAdd { remote: remote(place), add });
        let sges = sge.as_slice();
        let scratch = [scratch];
        let requests = [(operation, sges, inline), (add, &scratch[..], None)];
        let mut is_begun = false;
        for (operation, sges, inline) in requests {
            let Some(operation) = operation else { continue };
            // Data of an earlier READ may be the source of this one, or its target there.
            let fence = peer.completed < peer.last_read;
            let request = SendRequest { inline, fence, ..SendRequest::new(at as u64, operation, sges) };
            match peer.qp.post_send(&request) {
                Ok(()) => (peer.posted, is_begun) = (peer.posted + 1, true),
                // One half of it is on its way: the rank cannot be served in order any more.
                Err(error) if is_begun => _ = peer.failure.get_or_insert_with(|| error.to_string()),
                Err(error) => return Err(Refusal::Post { reason: error.to_string() }),
            }
        }
        Ok(())
    }

    fn control(&mut self, channel: usize, action: Action) -> Result<(), ProxyError> {
        let counters = &mut self.channels[channel].counters;
        match action {
            Action::ResetCounter(Counted { index, is_written_back }) => {
                counters.set(index.into(), 0);
                if is_written_back {
                    counters.write_back(index.into())?;
                }
            }
            Action::WriteBackCounter { index } => counters.write_back(index.into())?,
            Action::ResetSignal { index } => {
                // Beyond the end there is nothing to set.
                let at = usize::from(index) * STRIDE;
                if at + 8 <= self.signals.len() {
                    self.signals.swap(at, 0)?;
                }
            }
            Action::Get(_)
            | Action::Put(..)
            | Action::PutValue { .. }
            | Action::Add { .. }
            | Action::Flush { .. } => {}
        }
        Ok(())
    }

    fn complete(&mut self, completion: &WorkCompletion) -> Result<(), ProxyError> {
        let at = usize::try_from(completion.wr_id & !END).unwrap_or(usize::MAX);
        let Some(peer) = self.peers.get_mut(at) else { return Ok(()) };
        let is_end = completion.wr_id & END != 0;
        peer.completed += u64::from(!is_end);
        if is_end || completion.status != Status::Success {
            peer.failure.get_or_insert_with(|| format!("{:?}", completion.status));
            return self.lose(at);
        }
        while let Some(waiting) = self.peers[at].next_complete() {
            self.finish(&waiting, true)?;
        }
        Ok(())
    }

    /// Counts a descriptor that is complete, or failed.
    fn finish(&mut self, waiting: &Waiting, succeeded: bool) -> Result<(), ProxyError> {
        let Some(Counted { index, is_written_back }) = waiting.counter else { return Ok(()) };
        let counters = &mut self.channels[waiting.channel].counters;
        if succeeded {
            counters.count(index.into());
        } else {
            counters.fail(index.into());
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
        let waiting = std::mem::take(&mut self.peers[at].waiting);
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
        // The next flush tells kernels that have no counter for it. One of which nothing is known may
        // have been for any rank.
        let rank = descriptor.and_then(|descriptor| Table::rank_of(&descriptor.action));
        for (at, peer) in self.peers.iter_mut().enumerate() {
            peer.refused[channel] |= !is_flush && rank.is_none_or(|rank| rank as usize == at);
        }
        self.report(channel, self.number(channel), reason);
        if let Some(Counted { index, .. }) = descriptor.and_then(|descriptor| descriptor.counter) {
            let counters = &mut self.channels[channel].counters;
            counters.fail(index.into());
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
