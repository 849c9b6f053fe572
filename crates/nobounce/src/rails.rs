//! Several NICs for one transfer: it is split over connections, the rails, by the speed of their ports.
//!
//! Memory, the host's or a GPU's, is registered with every rail's device. A rail that fails fails the whole transfer, when the others have ended, and is named;
//! nothing is repeated on another one.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::GpuOptions;

use crate::connection::Connection;
use crate::lane::PostError;
use crate::message::MessageError;
use crate::region::{Region, RegisterError, RemoteRegion};
use crate::tickets::Ticket;
use crate::wait::WaitError;

/// Shares begin at multiples of this, so that no two rails write to one line of a cache.
const ALIGN: usize = 4096;
/// A speed for ports that say none, so that all of them get the same.
const UNKNOWN_SPEED: u64 = 10_000;

/// Connections to one peer over several NICs.
#[derive(Debug)]
pub struct Rails {
    rails: Vec<Connection>,
    speeds: Vec<u64>,
}

/// Memory that is registered with the device of every rail.
#[derive(Debug)]
pub struct RailRegion {
    // Dropped in this order: the first one owns the memory.
    others: Vec<Region>,
    first: Arc<Region>,
}

/// The same of a peer: one region for each rail, in their order.
pub type RemoteRailRegion = Vec<RemoteRegion>;

/// Why there are no rails, or a transfer over them failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RailError {
    /// No connection, or no region for each.
    #[error("{given} are given for {rails} rails")]
    Count {
        /// How many were given.
        given: usize,
        /// How many rails there are.
        rails: usize,
    },
    /// A device did not register the memory.
    #[error("rail {rail} ({device}) cannot use the memory: {error}")]
    Register {
        /// Which rail, from 0 on.
        rail: usize,
        /// Its device.
        device: String,
        /// Why.
        error: RegisterError,
    },
    /// The memory is somebody else's.
    #[error(
        "the memory does not belong to the region, so that nobody knows how long it lives: register it with each rail by hand"
    )]
    Borrowed,
    /// A share of the transfer could not be begun.
    #[error("rail {rail} ({device} to {peer}) did not take its share: {error}; the transfer failed")]
    Post {
        /// Which rail, from 0 on.
        rail: usize,
        /// Its device.
        device: String,
        /// Where it leads.
        peer: String,
        /// Why.
        error: PostError,
    },
    /// A share of the transfer failed.
    #[error(
        "rail {rail} ({device} to {peer}) failed: {error}; the transfer failed, and parts of it may have arrived"
    )]
    Failed {
        /// Which rail, from 0 on.
        rail: usize,
        /// Its device.
        device: String,
        /// Where it leads.
        peer: String,
        /// Why.
        error: WaitError,
    },
    /// The two ends could not tell each other about their memory.
    #[error("rail {rail}: {error}")]
    Message {
        /// Which rail, from 0 on.
        rail: usize,
        /// Why.
        error: MessageError,
    },
}

impl Rails {
    /// Rails of connections that exist, each on a device of its own; both ends must put them into the same order.
    ///
    /// # Errors
    /// There is none.
    pub fn new(rails: Vec<Connection>) -> Result<Self, RailError> {
        if rails.is_empty() {
            return Err(RailError::Count { given: 0, rails: 1 });
        }
        let speeds = rails
            .iter()
            .map(|rail| rail.device().nic().hard().map_or(0, |hard| hard.port().megabits))
            .collect();
        Ok(Self { rails, speeds })
    }

    /// The same with speeds that were measured, in any unit, instead of what the ports say.
    ///
    /// # Errors
    /// There is not one for each rail.
    pub fn with_speeds(self, speeds: Vec<u64>) -> Result<Self, RailError> {
        self.count(speeds.len())?;
        Ok(Self { speeds, ..self })
    }

    fn count(&self, given: usize) -> Result<(), RailError> {
        let rails = self.rails.len();
        if given == rails { Ok(()) } else { Err(RailError::Count { given, rails }) }
    }

    /// The connections.
    pub fn connections(&self) -> &[Connection] {
        &self.rails
    }

    /// Host memory that every rail's peers may use.
    ///
    /// # Errors
    /// A device refused: which, and why.
    pub fn register(&self, len: usize) -> Result<RailRegion, RailError> {
        let first = self.rails[0].device().register(len).map_err(|error| self.refused(0, error))?;
        self.share(Arc::new(first), &GpuOptions::default())
    }

    /// Memory of the GPU that CUDA counts as `ordinal`, registered with the device of every rail. Each has a path of its own
    /// ([`RailRegion::regions`]).
    ///
    /// # Errors
    /// As for [`register`](Self::register); also where a direct path is required, and one of the rails has none.
    pub fn register_gpu(
        &self,
        ordinal: i32,
        len: usize,
        options: GpuOptions,
    ) -> Result<RailRegion, RailError> {
        let first = self.rails[0].device().register_gpu_on(ordinal, len, options);
        self.share(Arc::new(first.map_err(|error| self.refused(0, error))?), &options)
    }

    /// Registers memory with every rail that the first rail's device knows already, and whose region it is; GPU memory with `options`.
    ///
    /// # Errors
    /// As for [`register`](Self::register); or it does not belong to the region.
    pub fn share(&self, first: Arc<Region>, options: &GpuOptions) -> Result<RailRegion, RailError> {
        let others = self.rails.iter().enumerate().skip(1).map(|(at, rail)| {
            let device = rail.device();
            let region = if first.gpu_buffer().is_some() {
                // SAFETY: memory of the first region, which outlives the others; no Rust reference to GPU memory can exist.
                unsafe { device.register_gpu_raw(first.addr(), first.len(), Region::ALL, options) }
            } else {
                let base = first.host_buffer().ok_or(RailError::Borrowed)?.as_mut_ptr();
                // SAFETY: memory of the first region, which outlives the others and is reached through windows only.
                unsafe { device.register_raw(base, first.len(), Region::ALL) }
            };
            region.map_err(|error| self.refused(at, error))
        });
        Ok(RailRegion { others: others.collect::<Result<_, _>>()?, first })
    }

    fn refused(&self, rail: usize, error: RegisterError) -> RailError {
        RailError::Register { rail, device: self.name(rail).0, error }
    }

    /// The speeds by which transfers are split, in the order of the rails: megabits per second unless
    /// [others were given](Self::with_speeds), 0 where nothing is known.
    pub fn speeds(&self) -> &[u64] {
        &self.speeds
    }

    /// Tells the peer about our memory, and hears about its.
    ///
    /// # Errors
    /// The peer is gone, or does something else.
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

    /// Writes the bytes `range` of ours to `offset` of the peer's, over all rails, and waits until all of it is there.
    ///
    /// # Errors
    /// Names the rail that failed. By then nothing of the transfer is under way any more, unless it is that `timeout` which is over.
    pub fn write(
        &self,
        local: &RailRegion,
        range: Range<usize>,
        remote: &[RemoteRegion],
        offset: u64,
        timeout: Duration,
    ) -> Result<(), RailError> {
        self.transfer(local, range, remote, offset, timeout, |rail, local, share, remote, at| {
            rail.write(local, share, remote, at)
        })
    }

    /// Reads bytes at `offset` of the peer's into `range` of ours, over all rails, and waits until all of it is here.
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
        self.transfer(local, range, remote, offset, timeout, |rail, local, share, remote, at| {
            rail.read(local, share, remote, at)
        })
    }

    fn transfer(
        &self,
        local: &RailRegion,
        range: Range<usize>,
        remote: &[RemoteRegion],
        offset: u64,
        timeout: Duration,
        begin: impl Fn(&Connection, &Region, Range<usize>, &RemoteRegion, u64) -> Result<Ticket, PostError>,
    ) -> Result<(), RailError> {
        let deadline = Instant::now() + timeout;
        self.count(remote.len())?;
        self.count(local.regions().count())?;
        let shares = split(range.len(), &self.speeds);
        let (mut begun, mut failed) = (Vec::new(), None);
        for (rail, (share, (local, remote))) in
            shares.into_iter().zip(local.regions().zip(remote)).enumerate()
        {
            if share.is_empty() {
                continue;
            }
            for piece in pieces(share, self.rails[rail].device().nic().max_message()) {
                let (from, to) = (range.start + piece.start, offset.saturating_add(piece.start as u64));
                match begin(&self.rails[rail], local, from..from + piece.len(), remote, to) {
                    Ok(ticket) => begun.push((rail, ticket)),
                    Err(error) => {
                        let (device, peer) = self.name(rail);
                        failed = Some(RailError::Post { rail, device, peer, error });
                        break;
                    }
                }
            }
            if failed.is_some() {
                break;
            }
        }
        // All are waited for, also after a failure: whoever hears of it may free the memory.
        for (rail, ticket) in begun {
            let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let mut ended = self.rails[rail].wait(ticket, left());
            // That the port is down is told early, and ends nothing: it may come back, or the share fails soon.
            while matches!(ended, Err(WaitError::PortLost { .. })) {
                ended = self.rails[rail].wait(ticket, left());
            }
            if let Err(error) = ended {
                let (device, peer) = self.name(rail);
                failed.get_or_insert(RailError::Failed { rail, device, peer, error });
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn name(&self, rail: usize) -> (String, String) {
        let rail = &self.rails[rail];
        let nic = rail.device().nic();
        // Software NICs have one name, and differ by their addresses.
        let at = nic.soft().map(|_| format!(" at {}", nic.local())).unwrap_or_default();
        (format!("{}{at}", nic.name()), rail.peer().to_string())
    }
}

impl RailRegion {
    /// The memory, by the device of the first rail: for reading and writing it.
    pub fn memory(&self) -> &Region {
        &self.first
    }

    /// The registrations, in the order of the rails.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        std::iter::once(&*self.first).chain(&self.others)
    }
}

/// A share as messages that its rail's port carries.
fn pieces(share: Range<usize>, longest: u32) -> impl Iterator<Item = Range<usize>> {
    let longest = usize::try_from(longest).unwrap_or(usize::MAX).max(1);
    let step = if longest > ALIGN { longest / ALIGN * ALIGN } else { longest };
    share.clone().step_by(step).map(move |start| start..share.end.min(start.saturating_add(step)))
}

/// Shares of a transfer in the order of the rails, by their speeds; whole pages, but for the end.
fn split(len: usize, speeds: &[u64]) -> Vec<Range<usize>> {
    let speeds: Vec<u128> =
        speeds.iter().map(|speed| if *speed == 0 { UNKNOWN_SPEED } else { *speed }.into()).collect();
    let total: u128 = speeds.iter().sum();
    let (mut before, mut start) = (0, 0);
    let mut shares = Vec::with_capacity(speeds.len());
    for speed in &speeds {
        before += speed;
        let end = usize::try_from(len as u128 * before / total).unwrap_or(len);
        let end = if before == total { len } else { (end / ALIGN * ALIGN).max(start) };
        shares.push(start..end);
        start = end;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_cut_into_messages_that_the_port_carries() {
        let of =
            |share, longest| pieces(share, longest).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        assert_eq!(of(0..10, 1 << 31), [(0, 10)]);
        assert_eq!(of(4096..20_000, 8200), [(4096, 12_288), (12_288, 20_000)], "whole pages");
        assert_eq!(of(0..7, 3), [(0, 3), (3, 6), (6, 7)]);
        assert_eq!(of(5..5, 3), []);
    }

    #[test]
    fn shares_are_by_speed_and_leave_nothing_out() {
        assert_eq!(split(1 << 20, &[100, 300]), [0..262_144, 262_144..1 << 20]);
        assert_eq!(
            split(1 << 20, &[0, 0]),
            [0..1 << 19, 1 << 19..1 << 20],
            "ports that say nothing are alike"
        );
        assert_eq!(split(100, &[1, 1, 1]), [0..0, 0..0, 0..100], "what is short goes one way");
        for (len, speeds) in [(0, vec![5]), (12_345_678, vec![400, 200, 25, 1]), (4097, vec![1, 1])] {
            let shares = split(len, &speeds);
            assert_eq!(shares.len(), speeds.len());
            assert_eq!((shares[0].start, shares[shares.len() - 1].end), (0, len));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{shares:?}");
        }
    }
}
