//! The device: opens links, owns the engines, creates all other objects.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use nobounce_protocol::qp::{Mtu, Service};
use nobounce_protocol::seal::{OVERHEAD, SealMode};

use crate::links::Link;
use crate::links::udp::route_path_mtu;
use crate::soft::config::Config;
use crate::soft::config::Progress;
use crate::soft::counters::Counters;
use crate::soft::engine::Joint;
use crate::soft::engine::memory_windows::Windows;
use crate::soft::engine::presence::PresenceConfig;
use crate::soft::engine::snapshot::Keeper;
use crate::soft::engine::totals;
use crate::soft::engine::totals::{Identity, Totals};
use crate::soft::error::CreateQpError;
use crate::soft::error::OpenError;
use crate::soft::events::event::{AsyncEvent, Events};
use crate::soft::lifecycle::exit::Ending;
use crate::soft::lifecycle::report::Report;
use crate::soft::limits::{Count, CountGuard, CreateError, DeviceLimits};
use crate::soft::objects::channel::Channel;
use crate::soft::objects::cq::Cq;
use crate::soft::objects::qp::{Qp, QpInit};
use crate::soft::objects::srq::{CreateSrqError, Srq, SrqLimits};
use crate::soft::port_speed::PortSpeed;
use crate::soft::progress::mode::Mode;
use crate::soft::progress::set::{EngineSet, LinkMaker};
use crate::tally::PathCounters;
use crate::work::QpLimits;

/// State that all objects of a device share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) engines: Arc<EngineSet>,
    pub(crate) events: Arc<Events>,
    pub(crate) counts: ObjectCounts,
    windows: Arc<RwLock<Windows>>,
    ending: Arc<Ending>,
    next_id: AtomicU32,
    pub(crate) is_ipv4: bool,
}

/// Counts of objects that have no table across all engines.
#[derive(Debug, Default)]
pub(crate) struct ObjectCounts {
    pub(crate) pds: Count,
    pub(crate) cqs: Count,
    pub(crate) qps: Count,
    pub(crate) srqs: Count,
}

impl Shared {
    pub(crate) fn is_forked(&self) -> bool {
        self.engines.first().is_forked()
    }

    /// The memory windows. Must not be called in a forked child.
    pub(crate) fn windows(&self) -> RwLockWriteGuard<'_, Windows> {
        self.windows.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The totals of all engines; `None` in a forked child.
    fn totals(&self) -> Option<Totals> {
        let mut sum = Totals::default();
        for handle in self.engines.iter() {
            sum.add(&Totals::of(&*handle.lock()?));
        }
        Some(sum)
    }

    pub(crate) fn next_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        let mut sum = Totals::default();
        for handle in self.engines.iter() {
            if let Some(engine) = handle.close() {
                sum.add(&Totals::of(&engine));
            }
        }
        self.ending.report(&sum);
    }
}

/// A software RDMA NIC.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) shared: Arc<Shared>,
    local: IpAddr,
    max_mtu: Mtu,
    speed: PortSpeed,
    sealed: Option<SealMode>,
}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// Another user holds the port, the address is not local, there is no free slot, ...: the
    /// message gives the remedy.
    pub fn open(config: &Config) -> Result<Self, OpenError> {
        let maker = LinkMaker::new(config)?;
        let link = maker.link(0)?;
        let engines = (Some(maker), config.engines());
        let presence = PresenceConfig::of(config);
        let sealed = config.key.as_ref().map(|key| key.mode);
        Self::with(link, engines, (config.progress.mode(), config.speed, sealed), presence)
    }

    /// A device with one engine, on the caller's link.
    ///
    /// # Errors
    /// The kernel refused a descriptor.
    pub fn with_link(link: Box<dyn Link>) -> Result<Self, OpenError> {
        let settings = (Progress::default().mode(), PortSpeed::default(), None);
        Self::with(link, (None, 1), settings, PresenceConfig::default())
    }

    fn with(
        link: Box<dyn Link>,
        (maker, engines): (Option<LinkMaker>, usize),
        (mode, speed, sealed): (Mode, PortSpeed, Option<SealMode>),
        presence: PresenceConfig,
    ) -> Result<Self, OpenError> {
        let local = link.local();
        let max_mtu = Mtu::at_most(link.capabilities().max_path_mtu).unwrap_or(Mtu::Mtu256);
        let events = Arc::new(Events::new()?);
        let windows = Arc::new(RwLock::default());
        let joint = Joint {
            events: events.clone(),
            windows: windows.clone(),
            overflows: Arc::default(),
            sharers: (engines > 1).then(Arc::default),
            presence,
        };
        let identity = Identity { local, progress: mode.name(), speed, sealed };
        let reports = Report::all(identity);
        let files: Vec<_> = reports.iter().filter_map(Report::snapshots).collect();
        let keeper = (!files.is_empty()).then(|| Keeper::new(files, totals::head(identity)));
        let engines = Arc::new(EngineSet::new(link, (maker, engines), mode, joint, keeper)?);
        let ending = Ending::new(engines.clone(), reports);
        let (counts, next_id) = (ObjectCounts::default(), AtomicU32::new(1));
        let shared =
            Arc::new(Shared { engines, events, counts, windows, ending, next_id, is_ipv4: local.is_ipv4() });
        Ok(Self { shared, local, max_mtu, speed, sealed })
    }

    /// Its address.
    pub fn local(&self) -> IpAddr {
        self.local
    }

    /// The largest path MTU whose packets fit the interface.
    pub fn max_mtu(&self) -> Mtu {
        self.max_mtu
    }

    /// The largest path MTU that the interface and the route to `remote` take, as far as this
    /// machine knows. A path may take less; see [`Qp::probe_path`](super::qp::Qp::probe_path).
    pub fn max_mtu_to(&self, remote: IpAddr) -> Mtu {
        let added = if self.sealed.is_some() { OVERHEAD } else { 0 };
        let route = route_path_mtu(self.local, remote, added).and_then(Mtu::at_most);
        route.map_or(self.max_mtu, |route| route.min(self.max_mtu))
    }

    /// The speed that its port states.
    pub fn speed(&self) -> PortSpeed {
        self.speed
    }

    /// How its packets by UDP are sealed; `None` without a key.
    pub fn sealed(&self) -> Option<SealMode> {
        self.sealed
    }

    /// Its limits.
    pub fn limits(&self) -> DeviceLimits {
        DeviceLimits::OURS
    }

    /// Allocates a protection domain: regions and queue pairs of different domains are isolated.
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

    /// Creates a completion channel.
    ///
    /// # Errors
    /// The kernel refused a descriptor.
    pub fn create_channel(&self) -> io::Result<Channel> {
        Channel::new(&self.shared.engines)
    }

    /// Creates a completion queue of `depth` entries.
    ///
    /// # Errors
    /// The depth is out of range, or there are too many.
    pub fn create_cq(&self, depth: usize, channel: Option<&Channel>) -> Result<Cq, CreateError> {
        if self.shared.is_forked() {
            return Err(CreateError::Forked);
        }
        Cq::create(&self.shared, depth, channel)
    }

    /// Whether both are one opened device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Whether this process is a forked child of the one that opened the device. The device is
    /// unusable there.
    pub fn is_forked(&self) -> bool {
        self.shared.is_forked()
    }

    /// The next asynchronous event.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        self.shared.events.next()
    }

    /// As [`next_event`](Self::next_event), for a caller that has just read 8 bytes from
    /// [`event_counter_fd`](Self::event_counter_fd). `None` if the event's object was destroyed
    /// meanwhile: then read again.
    pub fn claim_event(&self) -> Option<AsyncEvent> {
        self.shared.events.claim()
    }

    /// The descriptor that counts asynchronous events: each read of 8 bytes stands for one. It
    /// blocks while there are none.
    pub fn event_counter_fd(&self) -> std::os::fd::RawFd {
        self.shared.events.counter_fd()
    }

    /// A descriptor to poll: readable while there are asynchronous events.
    pub fn event_fd(&self) -> std::os::fd::RawFd {
        self.shared.events.raw_fd()
    }

    /// Its counters.
    pub fn counters(&self) -> Counters {
        self.shared.totals().unwrap_or_default().counters
    }

    /// Bytes and operations so far, by route.
    pub fn path_counters(&self) -> PathCounters {
        let mut sum = PathCounters::default();
        self.peer_path_counters().iter().for_each(|(_, one)| sum.add(one));
        sum
    }

    /// The same for each peer.
    pub fn peer_path_counters(&self) -> Vec<(IpAddr, PathCounters)> {
        let mut list: Vec<_> = self.shared.totals().unwrap_or_default().moved.into_iter().collect();
        list.sort_by_key(|(peer, _)| *peer);
        list
    }

    /// The counters of its links.
    pub fn link_counters(&self) -> Vec<(&'static str, u64)> {
        self.shared.totals().unwrap_or_default().link
    }

    /// Why packets to same-host peers take UDP although shared memory is enabled: a sentence for
    /// each reason. The same is logged when it happens.
    pub fn fallbacks(&self) -> Vec<String> {
        self.shared.totals().unwrap_or_default().fallbacks.into_iter().collect()
    }

    /// Number of open engines: one, until it has several queue pairs.
    pub fn engines(&self) -> usize {
        self.shared.engines.iter().count()
    }

    /// Which thread drives it: `thread` or `caller`.
    pub fn progress(&self) -> &'static str {
        self.shared.engines.mode().name()
    }

    /// Its totals so far, as the JSON object of its final report (docs/reference/json.md); `None`
    /// in a forked child.
    pub fn report(&self) -> Option<String> {
        let Self { local, speed, sealed, .. } = *self;
        let identity = Identity { local, progress: self.progress(), speed, sealed };
        self.shared.totals().map(|totals| totals::so_far(identity, &totals))
    }

    /// Makes the device reachable, and starts its engine thread. From then on peers may depend on
    /// that thread.
    pub(crate) fn listen(&self) -> Result<(), CreateQpError> {
        self.shared.engines.first().listen()
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

/// Held by the domain and by every object created in it.
#[derive(Debug)]
pub(crate) struct PdUse {
    _taken: CountGuard,
}

impl Pd {
    /// Its number, which no other domain of the device has.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether regions, queue pairs or shared receive queues of it exist: deallocating it now is a
    /// program error.
    pub fn is_busy(&self) -> bool {
        Arc::strong_count(&self.handle.uses) > 1
    }

    pub(crate) fn in_use(&self) -> Arc<PdUse> {
        self.handle.uses.clone()
    }

    /// Creates a reliable-connection queue pair with its own receive queue.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn create_qp(&self, send_cq: &Cq, recv_cq: &Cq, limits: QpLimits) -> Result<Qp, CreateQpError> {
        self.create_qp_with(&QpInit { service: Service::Rc, send_cq, recv_cq, srq: None, limits })
    }

    /// Creates a queue pair.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn create_qp_with(&self, init: &QpInit<'_>) -> Result<Qp, CreateQpError> {
        Qp::create(self, init)
    }

    /// Creates a shared receive queue.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn create_srq(&self, limits: SrqLimits) -> Result<Srq, CreateSrqError> {
        Srq::create(self, limits)
    }
}
