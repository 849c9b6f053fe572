//! The units of a device: which there are, how one more is opened, and who lives where.
//!
//! A device begins with one, and stays with it while it has one queue pair. Each further queue pair goes to the unit with the fewest; a
//! unit is opened, with a link, a slot and a thread of its own, when the first queue pair comes to it. What never changes place:
//! datagrams, shared receive queues with their queue pairs, and the connection manager, which is the first unit's.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::config::{Config, LinkChoice};
use super::copier::Copier;
use super::copiers::Known;
use super::device::OpenError;
use super::engine::{Engine, Joint};
use super::qp::CreateQpError;
use super::snapshot::Keeper;
use super::unit::Unit;
use crate::links::Link;
use crate::links::fault::FaultLink;
use crate::links::pcap::{self, PcapLink, Recorder};
use crate::links::shm::ShmLink;
use crate::links::udp::{UdpConfig, UdpLink};

/// Engines that a device has at most.
pub(crate) const MAX_ENGINES: usize = 8;

/// How the links of a device are made: each like the first.
#[derive(Debug)]
pub(crate) struct LinkMaker {
    config: Config,
    recorder: Option<Recorder>,
}

impl LinkMaker {
    pub(crate) fn new(config: &Config) -> Result<Self, OpenError> {
        let recorder =
            config.pcap.as_ref().map(|path| Recorder::create(path, config.addr, pcap::DEFAULT_LIMIT));
        Ok(Self { config: config.clone(), recorder: recorder.transpose()? })
    }

    /// The link of the unit with that number.
    pub(crate) fn link(&self, number: usize) -> Result<Box<dyn Link>, OpenError> {
        let Self { config, recorder } = self;
        let udp = UdpConfig { addr: config.addr, gso: config.gso, gro: config.gro, ..UdpConfig::default() };
        let mut link: Box<dyn Link> = Box::new(UdpLink::prepare(&udp)?);
        if config.link == LinkChoice::Auto {
            link = Box::new(ShmLink::new(link)?);
        }
        // The capture is outside the faults: it shows what we meant to say, and what reached us.
        if let Some(mut fault) = config.fault {
            // Each has its own, or all would lose the same packets.
            fault.seed = fault.seed.wrapping_add(number as u64);
            link = Box::new(FaultLink::new(link, fault));
        }
        if let Some(recorder) = recorder {
            link = Box::new(PcapLink::new(link, recorder.clone()));
        }
        Ok(link)
    }
}

/// The units of a device. Those that are there stay.
#[derive(Debug)]
pub(crate) struct Units {
    first: Arc<Unit>,
    /// In order; as many as there may be.
    more: Vec<OnceLock<Arc<Unit>>>,
    maker: Option<LinkMaker>,
    joint: Joint,
    keeper: Option<Keeper>,
    /// Whoever changes what all units must know (regions, units) holds this, and may then take the lock of one engine after the other.
    registry: Mutex<()>,
}

impl Units {
    /// Those of a device that has one for now, on that link, and at most `most`.
    pub(crate) fn new(
        link: Box<dyn Link>,
        (maker, most): (Option<LinkMaker>, usize),
        joint: Joint,
        keeper: Option<Keeper>,
    ) -> Result<Self, OpenError> {
        let most = if maker.is_some() { most.clamp(1, MAX_ENGINES) } else { 1 };
        let mut engine = Engine::new(link, 0, joint.clone());
        engine.keep_snapshots(keeper.clone());
        let first = Arc::new(Unit::new(0, engine, joint.several.clone())?);
        joint.overflows.wakes(&first.bell);
        let more = (1..most).map(|_| OnceLock::new()).collect();
        Ok(Self { first, more, maker, joint, keeper, registry: Mutex::new(()) })
    }

    #[inline]
    pub(crate) fn first(&self) -> &Arc<Unit> {
        &self.first
    }

    /// Those that are open. To be called from anywhere: no lock is taken.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Unit>> + Clone {
        std::iter::once(&self.first).chain(self.more.iter().map_while(OnceLock::get))
    }

    /// Whether there are several.
    #[inline]
    pub(crate) fn are_several(&self) -> bool {
        self.more.first().is_some_and(|second| second.get().is_some())
    }

    /// Nobody else changes what all units know until the result is dropped; `None` in a forked child, where nobody may wait for it.
    pub(crate) fn registry(&self) -> Option<MutexGuard<'_, ()>> {
        if self.first.is_forked() {
            return None;
        }
        Some(self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The one of those that are open where the fewest live. Whoever is the first to use a completion queue goes where the fewest such live: programs
    /// have a queue for each thing that they do, and with it queue pairs that have little to do. (NCCL has one for what it sends and one for what it
    /// receives, the latter with a queue pair that only flushes: counted alike, both may end up in one engine, which halves the speed.)
    pub(crate) fn least_loaded(&self, begins: bool) -> &Arc<Unit> {
        let load = |unit: &&Arc<Unit>| (if begins { unit.conversations() } else { 0 }, unit.load());
        self.iter().min_by_key(load).unwrap_or(&self.first)
    }

    /// Where the next queue pair is to live, which may go anywhere; or the next shared receive queue. It `begins`, if it is the first to use a completion
    /// queue.
    pub(crate) fn choose(&self, begins: bool) -> Result<Arc<Unit>, CreateQpError> {
        if self.more.is_empty() {
            return Ok(self.first.clone());
        }
        let _registry = self.registry().ok_or(CreateQpError::Forked)?;
        let least = self.least_loaded(begins);
        if least.load() == 0 {
            return Ok(least.clone());
        }
        match self.open_next() {
            None => Ok(least.clone()),
            Some(Ok(unit)) => Ok(unit),
            Some(Err(error)) => {
                // Those that are there do for all, as on a smaller machine.
                tracing::warn!(%error, "no further engine could be opened: queue pairs share those there are");
                Ok(least.clone())
            }
        }
    }

    /// Opens one more, if there may be one. The registry is held.
    fn open_next(&self) -> Option<Result<Arc<Unit>, CreateQpError>> {
        let maker = self.maker.as_ref()?;
        let at = self.more.iter().position(|unit| unit.get().is_none())?;
        Some(self.open(maker, at + 1).inspect(|unit| _ = self.more[at].set(unit.clone())))
    }

    fn open(&self, maker: &LinkMaker, number: usize) -> Result<Arc<Unit>, CreateQpError> {
        let link = maker.link(number).map_err(|error| CreateQpError::Engine(Box::new(error)))?;
        let mut engine = Engine::new(link, number, self.joint.clone());
        engine.keep_snapshots(self.keeper.as_ref().map(|keeper| keeper.of(number)));
        let contexts = {
            let first = self.first.lock().ok_or(CreateQpError::Forked)?;
            engine.core.regions.know_as(&first.core.regions);
            first.core.regions.stage.copiers.all()
        };
        for (_, known) in contexts {
            let known =
                known.filter(|known| !known.copier.is_gone()).map(|Known { gpu, context, .. }| {
                    let copier =
                        Copier::new(&gpu, context).map_err(|e| CreateQpError::Engine(Box::new(e)))?;
                    Ok::<_, CreateQpError>(Known { gpu, context, copier })
                });
            engine.core.regions.stage.copiers.adopt(known.transpose()?);
        }
        let unit = Arc::new(Unit::new(number, engine, self.joint.several.clone())?);
        unit.listen()?;
        self.joint.several.store(true, Ordering::SeqCst);
        self.joint.overflows.wakes(&unit.bell);
        Ok(unit)
    }
}

/// In how many queue pairs' lives a completion queue has a part, for each unit: whoever polls it drives those units.
#[derive(Debug, Default)]
pub(crate) struct Users {
    counts: [AtomicU32; MAX_ENGINES],
    /// Somebody sleeps until something completes, now and then.
    sleepy: AtomicBool,
    /// Where the next poll begins.
    turn: AtomicU32,
}

impl Users {
    /// A queue pair of this unit uses the queue.
    pub(crate) fn join(self: &Arc<Self>, unit: &Unit) -> Use {
        self.counts[unit.number].fetch_add(1, Ordering::Relaxed);
        if self.sleepy.load(Ordering::Relaxed) {
            unit.bell.ask_to_watch();
        }
        Use { users: self.clone(), unit: unit.number }
    }

    /// Whether no queue pair uses the queue.
    pub(crate) fn is_unused(&self) -> bool {
        self.counts.iter().all(|count| count.load(Ordering::Relaxed) == 0)
    }

    #[inline]
    fn has(&self, unit: &Unit) -> bool {
        self.counts[unit.number].load(Ordering::Relaxed) > 0
    }
}

/// One queue pair's part in a completion queue.
#[derive(Debug)]
pub(crate) struct Use {
    users: Arc<Users>,
    unit: usize,
}

impl Drop for Use {
    fn drop(&mut self) {
        self.users.counts[self.unit].fetch_sub(1, Ordering::Relaxed);
    }
}

impl Units {
    /// Drives the units that have something to do with a completion queue that was found empty, until `is_over`.
    #[inline]
    pub(crate) fn drive_polled(&self, users: &Users, is_over: impl Fn() -> bool) {
        if self.are_several() { self.drive_several(users, is_over) } else { self.first.drive_polled() }
    }

    fn drive_several(&self, users: &Users, is_over: impl Fn() -> bool) {
        let mut used = self.iter().filter(|unit| users.has(unit));
        let (Some(one), None) = (used.next(), used.next()) else {
            return self.drive_in_turn(users, is_over);
        };
        // Two that want one lock are in each other's way.
        if !one.is_on_duty() {
            one.drive_polled();
        }
    }

    /// Each of the several that it has to do with, but those whose own threads are at it; another one is the first each time.
    fn drive_in_turn(&self, users: &Users, is_over: impl Fn() -> bool) {
        let turn = users.turn.load(Ordering::Relaxed);
        users.turn.store(turn.wrapping_add(1), Ordering::Relaxed);
        let count = self.iter().count();
        let begin = turn as usize % count;
        let nobody = !self.iter().any(|unit| users.has(unit));
        for unit in self.iter().cycle().skip(begin).take(count) {
            if nobody || (users.has(unit) && !unit.is_on_duty()) {
                unit.drive_polled();
                if is_over() {
                    return;
                }
            }
        }
    }

    /// The caller will wait for an event of that queue instead of polling it.
    pub(crate) fn expect_sleep(&self, users: &Users) {
        users.sleepy.store(true, Ordering::Relaxed);
        let nobody = !self.iter().any(|unit| users.has(unit));
        for unit in self.iter().filter(|unit| nobody || users.has(unit)) {
            unit.bell.ask_to_watch();
        }
    }
}
