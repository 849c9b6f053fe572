//! Multi-rail transfers: splits a transfer over several NICs (one connection each) by the speed of
//! their ports.
//!
//! Host or GPU memory is registered with every rail's device. If the link of a rail fails, the
//! other rails carry its part: a WRITE or READ may be repeated. That rail is not used again. Any
//! other error, or that of the last rail, ends the transfer, once the other rails have ended, and
//! names the rail.

use std::collections::VecDeque;
use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nobounce_memory::gpu::GpuOptions;
use nobounce_nic::work::Status;

use crate::connection::Connection;
use crate::lane::PostError;
use crate::message::MessageError;
use crate::region::{Region, RegisterError, RemoteRegion};
use crate::shares::{pieces, split};
use crate::tickets::Ticket;
use crate::wait::WaitError;

/// How long to wait for one full rail while others may have room again.
const TURN: Duration = Duration::from_millis(1);

/// Connections to one peer over several NICs.
#[derive(Debug)]
pub struct Rails {
    rails: Vec<Connection>,
    speeds: Vec<u64>,
    /// The longest message in bytes, if below what the ports carry.
    longest: u32,
    /// Whose link has failed.
    failed: Vec<AtomicBool>,
}

/// Memory that is registered with the device of every rail.
#[derive(Debug)]
pub struct RailRegion {
    // Dropped in this order: the first one owns the memory.
    others: Vec<Region>,
    first: Arc<Region>,
}

/// The peer's counterpart: one region for each rail, in the same order.
pub type RemoteRailRegion = Vec<RemoteRegion>;

/// Why rails could not be set up, or a transfer over them failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RailError {
    /// No connection, or not one region for each.
    #[error("expected one for each of {rails} rails, got {given}")]
    Count {
        /// The given number.
        given: usize,
        /// The number of rails.
        rails: usize,
    },
    /// A device did not register the memory.
    #[error("rail {rail} ({device}) cannot register the memory: {error}")]
    Register {
        /// Index of the rail, from 0.
        rail: usize,
        /// Its device.
        device: String,
        /// The cause.
        error: RegisterError,
    },
    /// The region borrows its memory and does not own it.
    #[error(
        "the region does not own its memory, so its lifetime is unknown: register it with each rail separately"
    )]
    Borrowed,
    /// A share of the transfer could not be posted.
    #[error("rail {rail} ({device} to {peer}) could not post its share: {error}; the transfer failed")]
    Post {
        /// Index of the rail, from 0.
        rail: usize,
        /// Its device.
        device: String,
        /// Its peer.
        peer: String,
        /// The cause.
        error: PostError,
    },
    /// A share of the transfer failed.
    #[error(
        "rail {rail} ({device} to {peer}) failed: {error}; the transfer failed, and parts of it may have arrived"
    )]
    Failed {
        /// Index of the rail, from 0.
        rail: usize,
        /// Its device.
        device: String,
        /// Its peer.
        peer: String,
        /// The cause.
        error: WaitError,
    },
    /// The two ends could not exchange region descriptors.
    #[error("rail {rail}: {error}")]
    Message {
        /// Index of the rail, from 0.
        rail: usize,
        /// The cause.
        error: MessageError,
    },
}

impl Rails {
    /// Rails over existing connections, each on a device of its own. Both ends must use the same
    /// order.
    ///
    /// # Errors
    /// The list is empty.
    pub fn new(rails: Vec<Connection>) -> Result<Self, RailError> {
        if rails.is_empty() {
            return Err(RailError::Count { given: 0, rails: 1 });
        }
        let speeds = rails
            .iter()
            .map(|rail| rail.device().nic().hard().map_or(0, |hard| hard.port().megabits))
            .collect();
        let failed = rails.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Self { rails, speeds, longest: u32::MAX, failed })
    }

    /// Sets measured speeds, in any unit, instead of the ports' speeds.
    ///
    /// # Errors
    /// The number of speeds differs from the number of rails.
    pub fn with_speeds(self, speeds: Vec<u64>) -> Result<Self, RailError> {
        self.count(speeds.len())?;
        Ok(Self { speeds, ..self })
    }

    /// Limits messages to `longest` bytes. The default is what each port carries.
    #[must_use]
    pub fn with_pieces(self, longest: u32) -> Self {
        Self { longest, ..self }
    }

    fn count(&self, given: usize) -> Result<(), RailError> {
        let rails = self.rails.len();
        if given == rails { Ok(()) } else { Err(RailError::Count { given, rails }) }
    }

    /// The rails whose link has failed, and which are not used any more.
    pub fn failed(&self) -> Vec<usize> {
        (0..self.rails.len()).filter(|rail| self.has_failed(*rail)).collect()
    }

    fn has_failed(&self, rail: usize) -> bool {
        self.failed[rail].load(Ordering::Relaxed)
    }

    /// Takes a rail out of use after that error, if its link is the cause and another rail is left.
    fn retire(&self, rail: usize, error: &WaitError) -> bool {
        let others = (0..self.rails.len()).any(|other| other != rail && !self.has_failed(other));
        if !is_link_failure(error) || !others {
            return false;
        }
        if !self.failed[rail].swap(true, Ordering::Relaxed) {
            let (device, peer) = self.name(rail);
            tracing::warn!(
                "rail {rail} ({device} to {peer}) failed: {error}; the other rails carry its part"
            );
        }
        true
    }

    /// The connections.
    pub fn connections(&self) -> &[Connection] {
        &self.rails
    }

    /// Host memory that every rail's peers may use.
    ///
    /// # Errors
    /// A device refused: the error says which, and why.
    pub fn register(&self, len: usize) -> Result<RailRegion, RailError> {
        let first = self.rails[0].device().register(len).map_err(|error| self.refused(0, error))?;
        self.share(Arc::new(first), &GpuOptions::default())
    }

    /// Memory of CUDA device `ordinal`, registered with the device of every rail. Each has its own
    /// path ([`RailRegion::regions`]).
    ///
    /// # Errors
    /// As for [`register`](Self::register); also where a direct path is required, and one of the
    /// rails has none.
    pub fn register_gpu(
        &self,
        ordinal: i32,
        len: usize,
        options: GpuOptions,
    ) -> Result<RailRegion, RailError> {
        let first = self.rails[0].device().register_gpu_on(ordinal, len, options);
        self.share(Arc::new(first.map_err(|error| self.refused(0, error))?), &options)
    }

    /// Registers a region of the first rail's device, which must own its memory, with every other
    /// rail; GPU memory with `options`.
    ///
    /// # Errors
    /// As for [`register`](Self::register); or the region does not own its memory.
    pub fn share(&self, first: Arc<Region>, options: &GpuOptions) -> Result<RailRegion, RailError> {
        let others = self.rails.iter().enumerate().skip(1).map(|(at, rail)| {
            let device = rail.device();
            let region = if first.gpu_buffer().is_some() {
                // SAFETY: memory of the first region, which outlives the others; no Rust reference
                // to GPU memory can exist.
                unsafe { device.register_gpu_raw(first.addr(), first.len(), Region::ALL, options) }
            } else {
                let base = first.host_buffer().ok_or(RailError::Borrowed)?.as_mut_ptr();
                // SAFETY: memory of the first region, which outlives the others and is reached
                // through windows only.
                unsafe { device.register_raw(base, first.len(), Region::ALL) }
            };
            region.map_err(|error| self.refused(at, error))
        });
        Ok(RailRegion { others: others.collect::<Result<_, _>>()?, first })
    }

    fn refused(&self, rail: usize, error: RegisterError) -> RailError {
        RailError::Register { rail, device: self.name(rail).0, error }
    }

    /// The speeds that determine the split, in rail order: megabits per second unless [set
    /// otherwise](Self::with_speeds), 0 where unknown.
    pub fn speeds(&self) -> &[u64] {
        &self.speeds
    }

    /// Exchanges region descriptors with the peer.
    ///
    /// # Errors
    /// The peer is gone, or sent another kind of message.
    pub fn exchange(&self, ours: &RailRegion, timeout: Duration) -> Result<RemoteRailRegion, RailError> {
        self.count(ours.regions().count())?;
        let regions = ours.regions().zip(&self.rails).enumerate();
        regions
            .map(|(rail, (region, connection))| {
                connection
                    .exchange_region(region, timeout)
                    .map_err(|error| RailError::Message { rail, error })
            })
            .collect()
    }

    /// Writes the bytes `range` of our memory to `offset` of the peer's, over all rails, and waits
    /// for completion.
    ///
    /// # Errors
    /// Names the rail that failed: no other one was left, or its link is not the cause. Nothing of
    /// the transfer is in flight by then, except after a timeout.
    pub fn write(
        &self,
        local: &RailRegion,
        range: Range<usize>,
        remote: &[RemoteRegion],
        offset: u64,
        timeout: Duration,
    ) -> Result<(), RailError> {
        self.transfer(Connection::write, local, range, remote, offset, timeout)
    }

    /// Reads bytes at `offset` of the peer's memory into `range` of ours, over all rails, and waits
    /// for completion.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn read(
        &self,
        local: &RailRegion,
        range: Range<usize>,
        remote: &[RemoteRegion],
        offset: u64,
        timeout: Duration,
    ) -> Result<(), RailError> {
        self.transfer(Connection::read, local, range, remote, offset, timeout)
    }

    /// Splits a transfer over all rails, posts each piece with `begin`, and waits for completion.
    fn transfer(
        &self,
        begin: impl Fn(&Connection, &Region, Range<usize>, &RemoteRegion, u64) -> Result<Ticket, PostError>,
        local: &RailRegion,
        range: Range<usize>,
        remote: &[RemoteRegion],
        offset: u64,
        timeout: Duration,
    ) -> Result<(), RailError> {
        let deadline = Instant::now() + timeout;
        self.count(remote.len())?;
        self.count(local.regions().count())?;
        let mut tracks: Vec<_> = self
            .split(range.len())
            .into_iter()
            .zip(&self.rails)
            .map(|(share, rail)| {
                let longest = self.longest.min(rail.device().nic().max_message());
                Track { left: pieces(share, longest).peekable(), begun: VecDeque::new(), lost: Vec::new() }
            })
            .collect();
        let mut failed = None;
        // Pieces of rails whose link has failed.
        let mut moved = VecDeque::new();
        loop {
            for (at, (track, (local, remote))) in
                tracks.iter_mut().zip(local.regions().zip(remote)).enumerate()
            {
                if self.has_failed(at) {
                    continue;
                }
                let begun = track.post(&mut moved, |piece| {
                    let (from, to) = (range.start + piece.start, offset.saturating_add(piece.start as u64));
                    begin(&self.rails[at], local, from..from + piece.len(), remote, to)
                });
                if let Err(error) = begun {
                    let (device, peer) = self.name(at);
                    failed.get_or_insert(RailError::Post { rail: at, device, peer, error });
                }
            }
            // After a failure post nothing more. Wait for posted operations: after the error the
            // caller may free the memory.
            if failed.is_some() {
                tracks.iter_mut().for_each(Track::stop);
                moved.clear();
            }
            let waiting = tracks.iter().filter(|track| !track.begun.is_empty()).count();
            if waiting == 0 {
                return failed.map_or(Ok(()), Err);
            }
            let is_filling = !moved.is_empty() || tracks.iter_mut().any(|track| track.left.peek().is_some());
            for (at, track) in tracks.iter_mut().enumerate() {
                // Wait briefly for each rail while another one may run dry.
                let most = if is_filling && waiting > 1 { TURN } else { timeout };
                if let Err(error) = self.wait_for_room(at, track, deadline, most) {
                    if failed.is_none() && self.retire(at, &error) {
                        moved.extend(track.lost.drain(..).chain(track.left.by_ref()));
                        continue;
                    }
                    let (device, peer) = self.name(at);
                    failed.get_or_insert(RailError::Failed { rail: at, device, peer, error });
                }
            }
        }
    }

    /// Shares of a transfer in rail order; nothing for a failed rail, unless all have failed.
    fn split(&self, len: usize) -> Vec<Range<usize>> {
        let is_used = |rail: &usize| !self.has_failed(*rail);
        let used: Vec<usize> = (0..self.rails.len()).filter(is_used).collect();
        if used.len() == self.rails.len() || used.is_empty() {
            return split(len, &self.speeds);
        }
        let speeds: Vec<u64> = used.iter().map(|rail| self.speeds[*rail]).collect();
        let mut shares = vec![0..0; self.rails.len()];
        for (rail, share) in used.into_iter().zip(split(len, &speeds)) {
            shares[rail] = share;
        }
        shares
    }

    /// Waits at most `most` for the oldest posted piece, and takes all that completed with it.
    fn wait_for_room(
        &self,
        at: usize,
        track: &mut Track<impl Iterator<Item = Range<usize>>>,
        deadline: Instant,
        most: Duration,
    ) -> Result<(), WaitError> {
        let mut result = Ok(());
        let mut most = most;
        while let Some((ticket, _)) = track.begun.front() {
            let left = deadline.saturating_duration_since(Instant::now());
            let ended = self.rails[at].wait(*ticket, left.min(most));
            let is_lost = ended.is_err();
            match ended {
                // A port that is down is reported early and once, and ends nothing: it may come
                // back, or the share fails soon.
                Err(WaitError::PortLost { .. }) => continue,
                Err(WaitError::Timeout { .. }) if left > most => break,
                // If it has not come back, some drivers complete nothing at all: report the port as
                // the reason.
                Err(timeout @ WaitError::Timeout { .. }) if result.is_ok() => {
                    result = Err(self.rails[at].port_lost().unwrap_or(timeout));
                }
                Err(error) if result.is_ok() => result = Err(error),
                _ => {}
            }
            let ended = track.begun.pop_front();
            if let Some((_, piece)) = ended.filter(|_| is_lost) {
                track.lost.push(piece);
            }
            most = Duration::ZERO;
        }
        result
    }

    fn name(&self, rail: usize) -> (String, String) {
        let rail = &self.rails[rail];
        let nic = rail.device().nic();
        // Software NICs share one name and differ by their addresses.
        let at = nic.soft().map(|_| format!(" at {}", nic.local())).unwrap_or_default();
        (format!("{}{at}", nic.name()), rail.peer().to_string())
    }
}

impl RailRegion {
    /// The memory through the first rail's device, for reading and writing it.
    pub fn memory(&self) -> &Region {
        &self.first
    }

    /// The registrations, in the order of the rails.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        std::iter::once(&*self.first).chain(&self.others)
    }
}

/// One rail's part of a transfer.
struct Track<I: Iterator<Item = Range<usize>>> {
    /// Pieces still to be posted.
    left: Peekable<I>,
    /// Operations in flight, in order, with their pieces.
    begun: VecDeque<(Ticket, Range<usize>)>,
    /// Pieces of operations that failed.
    lost: Vec<Range<usize>>,
}

/// Whether the link, or what is attached to it, is the cause: another rail may work.
fn is_link_failure(error: &WaitError) -> bool {
    match error {
        WaitError::Failed { status, .. } => matches!(status, Status::RetryExceeded | Status::Flushed),
        WaitError::PeerGone { .. } | WaitError::PortDown { .. } => true,
        _ => false,
    }
}

impl<I: Iterator<Item = Range<usize>>> Track<I> {
    /// Posts as many pieces as the queue holds: its own, then those of failed rails.
    fn post(
        &mut self,
        moved: &mut VecDeque<Range<usize>>,
        begin: impl Fn(Range<usize>) -> Result<Ticket, PostError>,
    ) -> Result<(), PostError> {
        while let Some(piece) = self.left.peek().or_else(|| moved.front()).cloned() {
            match begin(piece.clone()) {
                Ok(ticket) => self.begun.push_back((ticket, piece)),
                // A completion of our own frees a slot. A queue that others filled is not ours to
                // drain.
                Err(error) if error.is_full() && !self.begun.is_empty() => return Ok(()),
                Err(error) => return Err(error),
            }
            if self.left.next().is_none() {
                moved.pop_front();
            }
        }
        Ok(())
    }

    fn stop(&mut self) {
        self.left.by_ref().for_each(drop);
    }
}
