//! The engines of a device: opening them, and assigning queue pairs to them.
//!
//! A device begins with one engine, and stays with it while it has one queue pair. Each further
//! queue pair goes to the engine with the fewest. The first queue pair of an engine opens it, with
//! its own link, slot and thread. Never moved: datagram queue pairs, shared receive queues with
//! their queue pairs, and the connection manager (first engine).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::soft::config::MAX_ENGINES;
use crate::soft::progress::handle::EngineHandle;
use crate::soft::progress::mode::Mode;
use crate::soft::progress::wait;
use crate::soft::progress::watch::Watch;
use crate::sync::waker::Waker;
use nobounce_protocol::timing::Nanos;

use crate::links::fault::FaultLink;
use crate::links::pcap::{self, PcapLink, Recorder};
use crate::links::udp::UdpConfig;
use crate::links::{Guards, Link, now_ns};
use crate::process::eventfd::EventFd;
use crate::soft::config::Config;
use crate::soft::engine::snapshot::Keeper;
use crate::soft::engine::{Engine, Joint};
use crate::soft::error::CreateQpError;
use crate::soft::error::OpenError;
use crate::soft::gpu::copier::Copier;
use crate::soft::gpu::copiers::ContextCopier;

/// Creates the links of a device: each like the first.
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

    /// The link of the engine with that number.
    pub(crate) fn link(&self, number: usize) -> Result<Box<dyn Link>, OpenError> {
        let Self { config, recorder } = self;
        let Config { addr, gso, gro, local_ports, .. } = *config;
        let udp = UdpConfig { addr, gso, gro, local_ports, ..UdpConfig::default() };
        let guards = Guards { keys: config.key.clone(), peers: config.peers.clone() };
        let mut link = config.link.open(&udp, &guards)?;
        // The capture wraps the faults: it shows intended sends, and actual receives.
        if let Some(mut fault) = config.fault {
            // Each has its own seed; otherwise all would drop the same packets.
            fault.seed = fault.seed.wrapping_add(number as u64);
            link = Box::new(FaultLink::new(link, fault));
        }
        if let Some(recorder) = recorder {
            link = Box::new(PcapLink::new(link, recorder.clone()));
        }
        Ok(link)
    }
}

/// The engines of a device. Open engines stay open.
#[derive(Debug)]
pub(crate) struct EngineSet {
    first: Arc<EngineHandle>,
    /// In order; as many as there may be.
    more: Vec<OnceLock<Arc<EngineHandle>>>,
    maker: Option<LinkMaker>,
    mode: Mode,
    joint: Joint,
    keeper: Option<Keeper>,
    pub(crate) watch: Watch,
    /// Held while state changes that all engines share (regions, engines); the engines' locks are
    /// taken inside, one after the other.
    registry: Mutex<()>,
}

impl EngineSet {
    /// Starts with one engine on that link, of at most `most`.
    pub(crate) fn new(
        link: Box<dyn Link>,
        (maker, most): (Option<LinkMaker>, usize),
        mode: Mode,
        joint: Joint,
        keeper: Option<Keeper>,
    ) -> Result<Self, OpenError> {
        let most = if maker.is_some() { most.clamp(1, MAX_ENGINES) } else { 1 };
        let mut engine = Engine::new(link, 0, mode == Mode::Thread, new_waker()?, joint.clone());
        engine.keep_snapshots(keeper.clone());
        let first = Arc::new(EngineHandle::new(0, mode, engine));
        joint.overflows.wakes(&first.waker);
        let more = (1..most).map(|_| OnceLock::new()).collect();
        Ok(Self {
            first,
            more,
            maker,
            mode,
            joint,
            keeper,
            watch: Watch::default(),
            registry: Mutex::new(()),
        })
    }

    #[inline]
    pub(crate) fn first(&self) -> &Arc<EngineHandle> {
        &self.first
    }

    /// The open engines. Takes no lock, so it may be called from anywhere.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<EngineHandle>> + Clone {
        std::iter::once(&self.first).chain(self.more.iter().map_while(OnceLock::get))
    }

    /// Which thread drives them.
    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    /// Locks the state that all engines share; `None` in a forked child, where the lock may be held
    /// forever.
    pub(crate) fn registry(&self) -> Option<MutexGuard<'_, ()>> {
        if self.first.is_forked() {
            return None;
        }
        Some(self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The open engine with the least load. A queue pair that is the first to use a completion
    /// queue goes to the engine with the fewest such. Programs have a completion queue for each
    /// task, often shared with queue pairs that have little to do. (NCCL has one for sends and one
    /// for receives, the latter with a queue pair that only flushes. Counted alike, both may end up
    /// in one engine, which halves the speed.)
    pub(crate) fn least_loaded(&self, begins: bool) -> &Arc<EngineHandle> {
        let load =
            |handle: &&Arc<EngineHandle>| (if begins { handle.first_users() } else { 0 }, handle.load());
        self.iter().min_by_key(load).unwrap_or(&self.first)
    }

    /// The engine for the next queue pair without a fixed one, or for the next shared receive
    /// queue. `begins`: it is the first to use a completion queue.
    pub(crate) fn choose(&self, begins: bool) -> Result<Arc<EngineHandle>, CreateQpError> {
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
            Some(Ok(handle)) => Ok(handle),
            Some(Err(error)) => {
                // The open engines suffice for all, as on a smaller machine.
                tracing::warn!(%error, "no further engine could be opened: queue pairs share those there are");
                Ok(least.clone())
            }
        }
    }

    /// Opens one more, if the limit allows. The caller holds the registry.
    fn open_next(&self) -> Option<Result<Arc<EngineHandle>, CreateQpError>> {
        let maker = self.maker.as_ref()?;
        let at = self.more.iter().position(|handle| handle.get().is_none())?;
        Some(self.open(maker, at + 1).inspect(|handle| _ = self.more[at].set(handle.clone())))
    }

    fn open(&self, maker: &LinkMaker, number: usize) -> Result<Arc<EngineHandle>, CreateQpError> {
        let link = maker.link(number).map_err(|error| CreateQpError::Engine(Box::new(error)))?;
        let mut engine =
            Engine::new(link, number, self.mode == Mode::Thread, new_waker()?, self.joint.clone());
        engine.keep_snapshots(self.keeper.as_ref().map(|keeper| keeper.of(number)));
        let contexts = {
            let first = self.first.lock().ok_or(CreateQpError::Forked)?;
            engine.core.regions.know_as(&first.core.regions);
            first.core.regions.staging.copiers.all()
        };
        for (_, known) in contexts {
            let known = known.filter(|known| !known.copier.is_gone()).map(
                |ContextCopier { gpu, context, .. }| {
                    let copier = Copier::new(&gpu, context, &engine.waker)
                        .map_err(|e| CreateQpError::Engine(Box::new(e)))?;
                    Ok::<_, CreateQpError>(ContextCopier { gpu, context, copier })
                },
            );
            engine.core.regions.staging.copiers.adopt(known.transpose()?);
        }
        let handle = Arc::new(EngineHandle::new(number, self.mode, engine));
        handle.listen()?;
        self.joint.overflows.wakes(&handle.waker);
        Ok(handle)
    }
}

fn new_waker() -> std::io::Result<Arc<Waker>> {
    Ok(Arc::new(Waker::new(EventFd::new()?)))
}

/// How many queue pairs of each engine use a completion queue: polling it drives those engines in
/// `caller` mode.
#[derive(Debug, Default)]
pub(crate) struct CqUsers {
    counts: [AtomicU32; MAX_ENGINES],
}

impl CqUsers {
    /// A queue pair of this engine uses the queue.
    pub(crate) fn join(self: &Arc<Self>, handle: &EngineHandle) -> CqUse {
        self.counts[handle.number].fetch_add(1, Ordering::Relaxed);
        CqUse { users: self.clone(), engine: handle.number }
    }

    /// Whether no queue pair uses the queue.
    pub(crate) fn is_unused(&self) -> bool {
        self.counts.iter().all(|count| count.load(Ordering::Relaxed) == 0)
    }

    #[inline]
    fn has(&self, handle: &EngineHandle) -> bool {
        self.counts[handle.number].load(Ordering::Relaxed) > 0
    }
}

/// One queue pair's use of a completion queue.
#[derive(Debug)]
pub(crate) struct CqUse {
    users: Arc<CqUsers>,
    engine: usize,
}

impl Drop for CqUse {
    fn drop(&mut self) {
        self.users.counts[self.engine].fetch_sub(1, Ordering::Relaxed);
    }
}

impl EngineSet {
    /// The engines that use a completion queue at this moment; all of them, if it has no queue
    /// pairs.
    fn users(&self, users: &CqUsers) -> impl Iterator<Item = &Arc<EngineHandle>> + Clone {
        let all = users.is_unused();
        // Sampled once: an engine that a queue pair joins meanwhile is in all copies of the
        // iterator, or in none.
        let uses = self.iter().fold([false; MAX_ENGINES], |mut uses, handle| {
            uses[handle.number] = all || users.has(handle);
            uses
        });
        self.iter().filter(move |handle| uses[handle.number])
    }

    /// `caller` mode: a completion queue was found empty. Drives its engines. Returns until when
    /// the caller should sleep, if it has waited long enough on all of them.
    #[inline]
    pub(crate) fn drive_polled(&self, users: &CqUsers, is_attention: bool) -> Option<Nanos> {
        if self.more.is_empty() {
            return self.first.drive_polled(is_attention);
        }
        let mut until = Some(Nanos::MAX);
        for handle in self.users(users) {
            let its = handle.drive_polled(is_attention);
            until = until.zip(its).map(|(all, its)| all.min(its));
        }
        until
    }

    /// `caller` mode: sleeps until a packet arrives, or until the deadline.
    #[cold]
    pub(crate) fn sleep_polled(&self, users: &CqUsers, until: Nanos) {
        let engines = self.users(users);
        engines.clone().for_each(|handle| handle.callers.fall_asleep());
        wait::for_packets(engines.clone().map(|handle| &handle.link), until.saturating_sub(now_ns()));
        for handle in engines {
            handle.callers.wake_up();
            handle.drive_woken();
        }
    }

    /// `caller` mode: the application waits for an event of that queue instead of polling it.
    pub(crate) fn expect_sleep(&self, users: &CqUsers) {
        if self.mode == Mode::Caller {
            self.users(users).for_each(|handle| handle.waker.ask_to_watch());
        }
    }
}
