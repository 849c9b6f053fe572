//! Carries descriptors out.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nobounce_memory::{AccessError, Window};
use nobounce_nic::any::{Cq, CqError, Qp};
use nobounce_nic::soft::{Remote, Status};
use nobounce_nic::work::{Operation, RecvRequest, SendRequest, Sge, WorkCompletion};

use crate::descriptor::{Action, Counted, Descriptor, Signal, WORDS};
use crate::ring::Ring;
use crate::table::{Refusal, Table};
use crate::words::{STRIDE, Words};

/// Descriptors taken from a ring before the next ring and the completions have their turn.
const BATCH: usize = 32;

/// Work requests of one descriptor.
const MAX_REQUESTS: usize = 2;

/// Marks the receive of each queue pair, which no message takes.
const END: u64 = 1 << 63;

/// Interval of probes of a silent rank. With the retries of a queue pair, a rank that is gone is
/// noticed within a second.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// Reasons kept for the host.
const MAX_REFUSALS: usize = 64;

/// What a kernel and the proxy share.
#[derive(Debug)]
pub struct Channel {
    /// The ring, in host memory.
    pub ring: Ring,
    /// One word, in GPU memory: the consumer index.
    pub consumed: Words,
    /// Counters, in GPU memory.
    pub counters: Words,
}

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
    counter: Option<Counted>,
}

/// Where atomics return old values, which no one reads.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// Address of 8 bytes.
    pub addr: u64,
    /// Their key.
    pub lkey: u32,
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
    signals: Window,
    scratch: Scratch,
    /// For kernels: not 0 if a rank cannot be reached; the last one if any cannot.
    status: Words,
    reports: Arc<Mutex<VecDeque<Report>>>,
    completions: Vec<WorkCompletion>,
}

/// What a proxy is made of.
#[derive(Debug)]
pub struct Parts {
    /// The channels.
    pub channels: Vec<Channel>,
    /// A connected queue pair to each rank, with completions in `cq`.
    pub qps: Vec<Qp>,
    /// As deep as all send queues together.
    pub cq: Cq,
    /// What descriptors may name.
    pub table: Table,
    /// The signals of this rank.
    pub signals: Window,
    /// For atomics.
    pub scratch: Scratch,
    /// One word for each rank, and one for all.
    pub status: Words,
}

impl Proxy {
    /// From its parts.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts { channels, qps, cq, table, signals, scratch, status } = parts;
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
            }
        };
        Self {
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
            self.probe()?;
        }
        Ok(is_busy)
    }

    /// Writes nothing to ranks that have been silent. Kernels may wait for signals of a rank to which
    /// nothing is posted, and must learn that it is gone.
    fn probe(&mut self) -> Result<(), ProxyError> {
        let now = Instant::now();
        for at in 0..self.peers.len() {
            let peer = &mut self.peers[at];
            if peer.failure.is_some() || peer.posted > peer.completed || now < peer.next_probe {
                continue;
            }
            peer.next_probe = now + PROBE_EVERY;
            if let Some(place) = self.table.any_place(at) {
                self.request(at, Some(Operation::Write(remote(place))), None, None, None);
            }
            if self.peers[at].failure.is_some() {
                self.lose(at)?;
            }
        }
        Ok(())
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
        let at = self.table.reachable(rank)?;
        let Some(peer) = self.peers.get(at) else {
            return Err(Refusal::Rank { rank, ranks: self.peers.len() }.into());
        };
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
            Action::Put(moved, signal) => {
                let moved = self.table.transfer(&moved)?;
                let sge = Sge { addr: moved.local.0, len: moved.len, lkey: moved.local.1 };
                let operation = Operation::Write(remote(moved.remote));
                let is_empty = moved.len == 0 && signal.is_some();
                ((!is_empty).then_some(operation), Some(sge), None, signal)
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
        self.request(at, operation, sge, inline, signal);
        let peer = &mut self.peers[at];
        let waiting = Waiting { requests: peer.posted, channel, counter: descriptor.counter };
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

    /// Posts the requests of a descriptor, all reported.
    fn request(
        &mut self,
        at: usize,
        operation: Option<Operation>,
        sge: Option<Sge>,
        inline: Option<&[u8]>,
        signal: Option<((u64, u32), Signal)>,
    ) {
        let (scratch, peer) = (self.scratch.sge(), &mut self.peers[at]);
        let add =
            signal.map(|(place, Signal { add, .. })| Operation::FetchAdd { remote: remote(place), add });
        let sges = sge.as_slice();
        let scratch = [scratch];
        let requests = [(operation, sges, inline), (add, &scratch[..], None)];
        for (operation, sges, inline) in requests {
            let Some(operation) = operation else { continue };
            let request = SendRequest { inline, ..SendRequest::new(at as u64, operation, sges) };
            match peer.qp.post_send(&request) {
                Ok(()) => peer.posted += 1,
                Err(error) => {
                    peer.failure.get_or_insert_with(|| error.to_string());
                    return;
                }
            }
        }
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
                    self.signals.store_u64(at, 0)?;
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
        // A kernel that sees the error bit finds the reason.
        for waiting in &waiting {
            self.report(waiting.channel, Refusal::Unreachable { rank, reason: reason.clone() });
            self.finish(waiting, false)?;
        }
        for word in [at, self.peers.len()] {
            if self.status.get(word) == 0 {
                self.status.set(word, 1);
                self.status.write_back(word)?;
            }
        }
        Ok(())
    }

    fn refuse(
        &mut self,
        channel: usize,
        descriptor: Option<&Descriptor>,
        reason: Refusal,
    ) -> Result<(), ProxyError> {
        self.report(channel, reason);
        let counter = descriptor.and_then(|descriptor| descriptor.counter);
        if let Some(Counted { index, .. }) = counter {
            let counters = &mut self.channels[channel].counters;
            counters.fail(index.into());
            counters.write_back(index.into())?;
        }
        Ok(())
    }

    fn report(&self, channel: usize, reason: Refusal) {
        let number = self.channels[channel].ring.taken().saturating_sub(1);
        tracing::error!(channel, number, %reason, "a descriptor was not carried out");
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        if reports.len() < MAX_REFUSALS {
            reports.push_back(Report { channel, number, reason });
        }
    }
}

impl Scratch {
    fn sge(self) -> Sge {
        Sge { addr: self.addr, len: 8, lkey: self.lkey }
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

/// The thread of a proxy. Dropping it stops the thread.
#[derive(Debug)]
pub struct ProxyThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    reports: Arc<Mutex<VecDeque<Report>>>,
}

/// How long the thread spins after the last descriptor or completion.
const SPIN: Duration = Duration::from_micros(200);

/// The longest sleep of an idle thread: how long the first descriptor after a pause waits.
const MAX_SLEEP: Duration = Duration::from_millis(1);

impl ProxyThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(mut proxy: Proxy) -> std::io::Result<Self> {
        let (stop, reports) = (Arc::<AtomicBool>::default(), proxy.reports());
        let asked = stop.clone();
        let run = move || {
            let (mut last, mut sleep) = (Instant::now(), Duration::ZERO);
            while !asked.load(Ordering::Relaxed) {
                match proxy.turn() {
                    Ok(true) => (last, sleep) = (Instant::now(), Duration::ZERO),
                    Ok(false) if last.elapsed() < SPIN => std::hint::spin_loop(),
                    Ok(false) => {
                        // No kernel can wake this thread.
                        sleep = (sleep * 2).clamp(Duration::from_micros(20), MAX_SLEEP);
                        std::thread::sleep(sleep);
                    }
                    Err(error) => {
                        tracing::error!(%error, "the proxy of GPU-initiated operations ends");
                        return;
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("nobounce-proxy".into()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread), reports })
    }

    /// Refused and failed descriptors so far.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl Drop for ProxyThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was reported
        }
    }
}
