//! The device: opens the link, owns the engine, makes everything else.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use nobounce_protocol::qp::{Mtu, Service};

use super::bell::Bell;
use super::channel::Channel;
use super::config::{Config, ConfigError, LinkChoice};
use super::counters::Counters;
use super::cq::Cq;
use super::engine::Engine;
use super::event::{AsyncEvent, Events};
use super::exit::Ending;
use super::fork;
use super::helper::Helper;
use super::limits::{Count, CreateError, DeviceLimits, Taken};
use super::qp::{CreateQpError, Qp, QpInit, QpLimits};
use super::report::Report;
use super::srq::{CreateSrqError, Srq, SrqLimits};
use super::tally::PathCounters;
use crate::links::Link;
use crate::links::fault::FaultLink;
use crate::links::pcap::{self, PcapLink};
use crate::links::shm::ShmLink;
use crate::links::udp::{self, UdpConfig, UdpLink};

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The link could not be opened.
    #[error(transparent)]
    Udp(#[from] udp::OpenError),
    /// The capture file could not be made.
    #[error(transparent)]
    Pcap(#[from] pcap::CreateError),
    /// A setting makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It was opened, but the first objects could not be made.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The kernel refused a descriptor.
    #[error("cannot open the device: {0} (too many open files? see ulimit -n)")]
    Descriptor(#[from] io::Error),
}

/// The engine behind its lock. The helper thread knows this much of the device and keeps none of it alive, so that
/// the device is closed when its last object is dropped, and not a little later.
#[derive(Debug)]
pub(crate) struct EngineLock {
    engine: Mutex<Engine>,
    generation: u64,
}

/// What all objects of a device share.
#[derive(Debug)]
pub(crate) struct Shared {
    engine: Arc<EngineLock>,
    helper: Mutex<Helper>,
    polls: Arc<std::sync::atomic::AtomicU64>,
    pub(crate) bell: Bell,
    pub(crate) events: Arc<Events>,
    pub(crate) counts: Counts,
    ending: Arc<Ending>,
    next_id: AtomicU32,
}

/// How many objects there are of those that no table of the engine counts.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) pds: Count,
    pub(crate) cqs: Count,
}

impl EngineLock {
    /// Whether this process is a forked child, where no lock may be taken.
    pub(crate) fn is_forked(&self) -> bool {
        fork::current() != self.generation
    }

    /// The number of forks before this process.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// The engine; `None` in a forked child, where the lock may be held by a thread that does not exist.
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, Engine>> {
        if self.is_forked() {
            return None;
        }
        Some(self.engine.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The engine, unless somebody else is driving it right now (or the process forked).
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Engine>> {
        if self.is_forked() {
            return None;
        }
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Shared {
    pub(crate) fn is_forked(&self) -> bool {
        self.engine.is_forked()
    }

    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, Engine>> {
        self.engine.lock()
    }

    /// Drives the engine for a caller that polls.
    pub(crate) fn drive_polled(&self) {
        // A count that two threads raise at once may miss one: it only tells whether anybody polls.
        self.polls.store(self.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        if let Some(mut engine) = self.engine.try_lock() {
            engine.progress();
            // It may have been the last poll before the caller sleeps.
            self.bell.ring_if_sleepy(|| engine.unattended_deadline());
        }
    }

    /// The caller will wait for an event instead of polling.
    pub(crate) fn expect_sleep(&self) {
        if !self.is_forked() {
            self.bell.ask_to_watch();
        }
    }

    pub(crate) fn next_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let helper = self.helper.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.engine.is_forked() {
            return helper.forget();
        }
        helper.stop();
        // What was put off, acknowledgements above all, must not be lost with the device.
        if let Some(mut engine) = self.engine.lock() {
            engine.hang_up();
            engine.drain();
            self.ending.report(&engine);
        }
    }
}

/// A software RDMA NIC.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) shared: Arc<Shared>,
    local: IpAddr,
    max_mtu: Mtu,
}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// Another user holds the port, the address is not ours, there is no free slot, ...: the message says what to do.
    pub fn open(config: &Config) -> Result<Self, OpenError> {
        let udp = UdpConfig { addr: config.addr, gso: config.gso, gro: config.gro, ..UdpConfig::default() };
        let mut link: Box<dyn Link> = Box::new(UdpLink::prepare(&udp)?);
        if config.link == LinkChoice::Auto {
            link = Box::new(ShmLink::new(link)?);
        }
        // The capture is outside the faults: it shows what we meant to say, and what reached us.
        if let Some(fault) = config.fault {
            link = Box::new(FaultLink::new(link, fault));
        }
        if let Some(path) = &config.pcap {
            link = Box::new(PcapLink::create(link, path, pcap::DEFAULT_LIMIT)?);
        }
        Self::with_link(link)
    }

    /// A device on a link of the caller's.
    ///
    /// # Errors
    /// The kernel refused a descriptor.
    pub fn with_link(link: Box<dyn Link>) -> Result<Self, OpenError> {
        let local = link.local();
        let max_mtu = Mtu::at_most(link.capabilities().max_path_mtu).unwrap_or(Mtu::Mtu256);
        let wake_fds = link.wake_fds();
        let events = Arc::new(Events::new()?);
        let helper = Helper::new()?;
        let report = Report::from_env(local);
        let mut engine = Engine::new(link, events.clone());
        engine.keep_snapshots(report.as_ref().and_then(Report::snapshots));
        let engine = Arc::new(EngineLock { engine: Mutex::new(engine), generation: fork::generation() });
        let shared = Arc::new(Shared {
            polls: helper.polls.clone(),
            bell: helper.bell.clone(),
            ending: Ending::new(engine.clone(), report, wake_fds),
            engine,
            helper: Mutex::new(helper),
            events,
            counts: Counts::default(),
            next_id: AtomicU32::new(1),
        });
        Ok(Self { shared, local, max_mtu })
    }

    /// The address it is reached at.
    pub fn local(&self) -> IpAddr {
        self.local
    }

    /// The largest path MTU whose packets fit the interface.
    pub fn max_mtu(&self) -> Mtu {
        self.max_mtu
    }

    /// What it offers at most.
    pub fn limits(&self) -> DeviceLimits {
        DeviceLimits::OURS
    }

    /// A protection domain: regions and queue pairs of different domains do not see each other.
    ///
    /// # Errors
    /// There are too many.
    pub fn alloc_pd(&self) -> Result<Pd, CreateError> {
        if self.shared.is_forked() {
            return Err(CreateError::Forked);
        }
        let taken = self.shared.counts.pds.take("protection domains", DeviceLimits::OURS.max_pds)?;
        let handle = Arc::new(PdHandle { uses: Arc::new(PdUse { _taken: taken }) });
        Ok(Pd { device: self.clone(), id: self.shared.next_id(), handle })
    }

    /// A completion channel.
    ///
    /// # Errors
    /// The kernel refused a descriptor.
    pub fn create_channel(&self) -> io::Result<Channel> {
        Channel::new()
    }

    /// A completion queue of `depth` entries.
    ///
    /// # Errors
    /// The depth is out of range, or there are too many.
    pub fn create_cq(&self, depth: usize, channel: Option<&Channel>) -> Result<Cq, CreateError> {
        if self.shared.is_forked() {
            return Err(CreateError::Forked);
        }
        Cq::create(&self.shared, depth, channel)
    }

    /// Whether this process is a child of the one that opened the device, where the device is dead.
    pub fn is_forked(&self) -> bool {
        self.shared.is_forked()
    }

    /// The next asynchronous event.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        self.shared.events.next()
    }

    /// As [`next_event`](Self::next_event), for a caller who has just read 8 bytes from [`event_fd`](Self::event_fd). Nothing if
    /// the object that the event was of went meanwhile: then read again.
    pub fn claim_event(&self) -> Option<AsyncEvent> {
        self.shared.events.claim()
    }

    /// A descriptor that is readable while there are asynchronous events. Each reading of 8 bytes stands for one of them; it
    /// blocks while there are none, unless `O_NONBLOCK` is set.
    pub fn event_fd(&self) -> std::os::fd::RawFd {
        self.shared.events.raw_fd()
    }

    /// What was counted so far.
    pub fn counters(&self) -> Counters {
        self.shared.lock().map(|engine| engine.core.totals()).unwrap_or_default()
    }

    /// Bytes and operations so far, by the way they took.
    pub fn path_counters(&self) -> PathCounters {
        let mut sum = PathCounters::default();
        self.peer_path_counters().iter().for_each(|(_, one)| sum.add(one));
        sum
    }

    /// The same for each peer.
    pub fn peer_path_counters(&self) -> Vec<(IpAddr, PathCounters)> {
        let moved = self.shared.lock().map(|engine| engine.core.moved_by_peer()).unwrap_or_default();
        let mut list: Vec<_> = moved.into_iter().collect();
        list.sort_by_key(|(peer, _)| *peer);
        list
    }

    /// What the link counted so far.
    pub fn link_counters(&self) -> Vec<(&'static str, u64)> {
        self.shared.lock().map(|engine| engine.link.counters()).unwrap_or_default()
    }

    /// What it has done so far, as the JSON object that it leaves as its report when it goes (docs/run.md); `None` in a forked child.
    pub fn report(&self) -> Option<String> {
        self.shared.lock().map(|engine| super::report::so_far(self.local, &engine))
    }

    /// Lets the device be reached, and has a thread look after it. From then on others may depend on that thread.
    pub(crate) fn listen(&self) -> Result<(), CreateQpError> {
        if self.is_forked() {
            return Err(CreateQpError::Forked); // where the lock below may be held by a thread that does not exist
        }
        let mut helper = self.shared.helper.lock().unwrap_or_else(PoisonError::into_inner);
        if helper.is_running() {
            return Ok(());
        }
        let mut engine = self.shared.lock().ok_or(CreateQpError::Forked)?;
        engine.listen()?;
        Ok(helper.start(&self.shared.engine, &*engine.link)?)
    }
}

/// A protection domain.
#[derive(Clone, Debug)]
pub struct Pd {
    pub(crate) device: Device,
    pub(crate) id: u32,
    handle: Arc<PdHandle>,
}

/// What the clones of a domain share.
#[derive(Debug)]
struct PdHandle {
    uses: Arc<PdUse>,
}

/// Held by the domain and by every object made of it.
#[derive(Debug)]
pub(crate) struct PdUse {
    _taken: Taken,
}

impl Pd {
    /// Whether regions, queue pairs or shared receive queues of it exist: a program that deallocates it now makes a mistake.
    pub fn is_busy(&self) -> bool {
        Arc::strong_count(&self.handle.uses) > 1
    }

    pub(crate) fn in_use(&self) -> Arc<PdUse> {
        self.handle.uses.clone()
    }

    /// Makes a reliable-connection queue pair with a receive queue of its own.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn create_qp(&self, send_cq: &Cq, recv_cq: &Cq, limits: QpLimits) -> Result<Qp, CreateQpError> {
        self.create_qp_with(&QpInit { service: Service::Rc, send_cq, recv_cq, srq: None, limits })
    }

    /// Makes a queue pair.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn create_qp_with(&self, init: &QpInit<'_>) -> Result<Qp, CreateQpError> {
        Qp::create(self, init)
    }

    /// Makes a shared receive queue.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn create_srq(&self, limits: SrqLimits) -> Result<Srq, CreateSrqError> {
        Srq::create(self, limits)
    }
}
