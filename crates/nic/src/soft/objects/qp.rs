//! Queue pairs.

mod post;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use nobounce_protocol::qp::{
    AttrMask, Qp as ProtocolQp, QpAttr, QpConfig, QpCounters, QpState, Service, TransitionError,
};
use nobounce_protocol::wire::Qpn;

use crate::links::now_ns;
use crate::soft::engine::multicast::GroupError;
use crate::soft::engine::path_probe::PathMtu;
use crate::soft::engine::queue_pair::{QueuePair, XrcTarget};
use crate::soft::engine::release::RELEASE_TIMEOUT;
use crate::soft::engine::submission::WorkQueues;
use crate::soft::engine::{Answers, Engine};
use crate::soft::error::CreateQpError;
use crate::soft::limits::RESPONDER_RESOURCES;
use crate::soft::limits::{CountGuard, DeviceLimits};
use crate::soft::objects::cq::Cq;
use crate::soft::objects::device::{Pd, PdUse, Shared};
use crate::soft::objects::srq::Srq;
use crate::soft::objects::xrc::XrcDomain;
use crate::soft::progress::handle::Resident;
use crate::soft::progress::mode::Mode;
use crate::soft::progress::set::CqUse;
use crate::soft::qp_index::QpIndex;
use crate::work::QpLimits;

/// Why a queue pair could not be modified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModifyError {
    /// The transition or its attributes are wrong.
    #[error(transparent)]
    Transition(#[from] TransitionError),
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

/// Parameters of a new queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpInit<'a> {
    /// Its transport service.
    pub service: Service,
    /// The completion queue of its sends.
    pub send_cq: &'a Cq,
    /// The completion queue of its receives.
    pub recv_cq: &'a Cq,
    /// The shared queue it takes its receives from; the receive `limits` are then ignored.
    pub srq: Option<&'a Srq>,
    /// The depths of its queues.
    pub limits: QpLimits,
}

/// A queue pair. Dropping it destroys it.
#[derive(Debug)]
pub struct Qp {
    shared: Arc<Shared>,
    /// Its engine.
    handle: Resident,
    qpn: Qpn,
    service: Service,
    limits: QpLimits,
    shares: bool,
    work_queues: Arc<WorkQueues>,
    _taken: CountGuard,
    _pd: Option<Arc<PdUse>>,
    xrc_use: Option<Arc<()>>,
    /// Its use of its completion queues.
    _uses: Vec<CqUse>,
}

impl Qp {
    pub(crate) fn create(pd: &Pd, init: &QpInit<'_>) -> Result<Self, CreateQpError> {
        let QpInit { service, send_cq, recv_cq, srq, mut limits } = *init;
        let most = QpLimits::MAX;
        if srq.is_some() {
            (limits.recv_depth, limits.recv_sges) = (0, 0);
        }
        for (name, asked, max) in [
            ("send queue depth", limits.send_depth, most.send_depth),
            ("receive queue depth", limits.recv_depth, most.recv_depth),
            ("send scatter/gather elements", limits.send_sges, most.send_sges),
            ("receive scatter/gather elements", limits.recv_sges, most.recv_sges),
            ("inline bytes", limits.inline, most.inline),
        ] {
            if asked > max {
                return Err(CreateQpError::Limit { name, asked, max });
            }
        }
        let shared = pd.device.shared.clone();
        let ours = send_cq.is_of(&shared) && recv_cq.is_of(&shared);
        if !ours || srq.is_some_and(|srq| !srq.is_of(&shared)) {
            return Err(CreateQpError::OtherDevice);
        }
        if shared.is_forked() {
            return Err(CreateQpError::Forked);
        }
        let taken = shared.counts.qps.take("queue pairs", DeviceLimits::OURS.max_qps);
        let taken = taken.map_err(|_| CreateQpError::TooMany)?;
        pd.device.listen()?;
        let begins = send_cq.users.is_unused() && recv_cq.users.is_unused();
        let handle = match (srq, service) {
            (Some(srq), _) => srq.handle().clone(),
            // All datagrams of a device share one path.
            (None, Service::Ud) => shared.engines.first().clone(),
            (None, _) => shared.engines.choose(begins)?,
        };
        let handle = handle.settle_in(begins);
        let uses = vec![send_cq.users.join(&handle), recv_cq.users.join(&handle)];
        if shared.engines.mode() == Mode::Caller && (send_cq.inner.is_armed() || recv_cq.inner.is_armed()) {
            handle.waker.ask_to_watch();
        }
        let mut engine = handle.lock().ok_or(CreateQpError::Forked)?;
        let index = engine.core.qps.allocate().ok_or(CreateQpError::TooMany)?;
        let qpn = engine.core.qps.qpn(index);
        let config = QpConfig {
            service,
            qpn,
            port_mtu: pd.device.max_mtu(),
            send_depth: limits.send_depth,
            signal_all: limits.signal_all,
            responder_resources: RESPONDER_RESOURCES,
            peer_resources: 0,
        };
        let (send_cq, recv_cq) = (send_cq.inner.clone(), recv_cq.inner.clone());
        let mut entry = QueuePair::new(qpn, ProtocolQp::new(config), pd.id, send_cq, recv_cq);
        if let Some(srq) = srq
            && let Some(receive_pd) = engine.core.srqs.join(srq.index)
        {
            entry.share_receives(srq.index, receive_pd);
        }
        entry.posted.send_depth = limits.send_depth;
        let work_queues = entry.posted.work_queues.clone();
        engine.core.qps.insert(index, entry);
        if service == Service::Ud {
            // Datagrams have any destination: all datagrams of a device share one path from now on.
            engine.change_path(index);
        }
        drop(engine);
        let shares = srq.is_some();
        Ok(Self {
            shared,
            handle,
            qpn,
            service,
            limits,
            shares,
            work_queues,
            _taken: taken,
            _pd: Some(pd.in_use()),
            xrc_use: None,
            _uses: uses,
        })
    }

    /// The receiving end of an extended reliable connection. It has no send queue.
    pub(crate) fn create_target(domain: &XrcDomain) -> Result<Self, CreateQpError> {
        let shared = domain.shared().clone();
        if shared.is_forked() {
            return Err(CreateQpError::Forked);
        }
        let taken = shared.counts.qps.take("queue pairs", DeviceLimits::OURS.max_qps);
        let taken = taken.map_err(|_| CreateQpError::TooMany)?;
        domain.device.listen()?;
        let handle = shared.engines.first().clone().settle_in(false);
        let mut engine = handle.lock().ok_or(CreateQpError::Forked)?;
        let index = engine.core.qps.allocate().ok_or(CreateQpError::TooMany)?;
        let qpn = engine.core.qps.qpn(index);
        let service = Service::XrcTarget;
        let port_mtu = domain.device.max_mtu();
        let config = QpConfig {
            service,
            qpn,
            port_mtu,
            send_depth: 0,
            signal_all: false,
            responder_resources: RESPONDER_RESOURCES,
            peer_resources: 0,
        };
        let cqs = (domain.no_cq(), domain.no_cq());
        // A request has the protection domain of the queue that it names.
        let mut entry = QueuePair::new(qpn, ProtocolQp::new(config), 0, cqs.0, cqs.1);
        entry.posted.xrc = Some(XrcTarget { domain: domain.id, current: None, cqs: VecDeque::new() });
        let work_queues = entry.posted.work_queues.clone();
        engine.core.qps.insert(index, entry);
        drop(engine);
        let none = QpLimits {
            send_depth: 0,
            recv_depth: 0,
            send_sges: 0,
            recv_sges: 0,
            inline: 0,
            signal_all: false,
        };
        Ok(Self {
            shared,
            handle,
            qpn,
            service,
            limits: none,
            shares: true,
            work_queues,
            _taken: taken,
            _pd: None,
            xrc_use: Some(domain.in_use()),
            _uses: Vec::new(),
        })
    }

    #[cfg(test)]
    pub(crate) fn handle(&self) -> &Resident {
        &self.handle
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// Whether it is the receiving end of a connection in that domain.
    pub fn is_target_of(&self, domain: &XrcDomain) -> bool {
        self.xrc_use.as_ref().is_some_and(|xrc| Arc::ptr_eq(xrc, &domain.in_use()))
    }

    /// Its limits.
    pub fn limits(&self) -> &QpLimits {
        &self.limits
    }

    /// Its state (in a forked child, where nothing works: the error state).
    pub fn state(&self) -> QpState {
        self.attr().state
    }

    /// Its attributes.
    pub fn attr(&self) -> QpAttr {
        let dead = || QpAttr { state: QpState::Error, ..QpAttr::default() };
        self.with(|entry| entry.qp.attr().clone()).unwrap_or_else(dead)
    }

    /// Whether it is in SQD, and started work is not over yet.
    pub fn is_draining(&self) -> bool {
        self.with(|entry| entry.qp.is_draining()).unwrap_or(false)
    }

    /// Its counters.
    pub fn counters(&self) -> QpCounters {
        self.with(|entry| *entry.qp.counters()).unwrap_or_default()
    }

    /// Probes whether packets of its path MTU reach the peer. The result follows within about half
    /// a second, while the device is driven; see [`path_mtu`](Self::path_mtu).
    pub fn probe_path(&self) {
        let Some(mut engine) = self.handle.lock() else { return };
        engine.core.probe_path(now_ns(), QpIndex::of(self.qpn));
        engine.transmit(now_ns(), Answers::Travelling);
        self.handle.let_go(engine);
    }

    /// What is known of the path to its peer.
    pub fn path_mtu(&self) -> PathMtu {
        let Some(mut engine) = self.handle.lock() else { return PathMtu::Unknown };
        let peer = engine.core.entry(self.qpn).map(|entry| entry.peer());
        peer.map_or(PathMtu::Unknown, |peer| engine.core.presences.probes.result(peer))
    }

    fn with<T>(&self, f: impl FnOnce(&mut QueuePair) -> T) -> Option<T> {
        self.handle.lock()?.core.entry(self.qpn).map(f)
    }

    /// Changes attributes and state.
    ///
    /// # Errors
    /// The message names the missing transition, or the attribute that is missing, not allowed or
    /// out of range.
    pub fn modify(&self, attr: &QpAttr) -> Result<(), ModifyError> {
        // Concurrent posts wait for the lock from now on.
        self.work_queues.close();
        let mut engine = self.handle.lock().ok_or(ModifyError::Forked)?;
        // Start earlier requests first: draining the send queue must not leave them over.
        engine.transmit(now_ns(), Answers::Travelling);
        let modified = self.modify_locked(&mut engine, attr);
        if let Some(entry) = engine.core.entry(self.qpn) {
            entry.publish_rules();
        }
        self.handle.let_go(engine);
        modified
    }

    fn modify_locked(&self, engine: &mut Engine, attr: &QpAttr) -> Result<(), ModifyError> {
        let index = QpIndex::of(self.qpn);
        let Some(entry) = engine.core.entry(self.qpn) else { return Ok(()) };
        let open = entry.qp.has_open_receive();
        entry.qp.modify(attr)?;
        if attr.mask.contains(AttrMask::AV) || attr.mask.contains(AttrMask::DEST_QPN) {
            engine.change_path(index);
        }
        let core = &mut engine.core;
        if attr.mask.contains(AttrMask::STATE)
            && attr.state == QpState::Reset
            && let Some(entry) = core.entry(self.qpn)
        {
            entry.posted.sends.clear();
            entry.posted.receives.clear();
            let unfinished = entry.posted.current.take().filter(|_| open).zip(entry.posted.shared());
            if let Some(xrc) = &mut entry.posted.xrc {
                xrc.cqs.clear();
                xrc.current = None;
            }
            entry.posted.said_last = false;
            entry.drop_held();
            entry.send_cq.forget_qp(self.qpn);
            entry.recv_cq.forget_qp(self.qpn);
            core.regions.unbind_qp(index);
            core.regions.staging.forget_owner(index);
            if let Some((receive, srq)) = unfinished {
                core.srqs.give_back(srq, receive);
            }
        }
        core.settle(index);
        core.make_ready(index);
        engine.transmit(now_ns(), Answers::Travelling);
        Ok(())
    }

    /// Receives datagrams of a multicast group, too. Attached twice is attached once.
    ///
    /// # Errors
    /// It is no datagram queue pair, the address is no group of this device's IP version, a limit
    /// is reached, or the system refuses.
    pub fn attach(&self, group: IpAddr) -> Result<(), GroupError> {
        self.handle.lock().ok_or(GroupError::Forked)?.attach(self.qpn, group)
    }

    /// Receives no more datagrams of a multicast group.
    ///
    /// # Errors
    /// It is not attached to it.
    pub fn detach(&self, group: IpAddr) -> Result<(), GroupError> {
        let detached = self.handle.lock().ok_or(GroupError::Forked)?.detach(self.qpn, group);
        if detached { Ok(()) } else { Err(GroupError::NotAttached(group)) }
    }

    /// Whether it is attached to a multicast group.
    pub fn is_attached(&self) -> bool {
        self.handle.lock().is_some_and(|engine| engine.core.is_attached(self.qpn))
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let begin = Instant::now();
        while let Some(mut engine) = self.handle.lock() {
            // The peer may wait for nothing but a delayed ACK.
            if engine.settle_debts(self.qpn) || begin.elapsed() > RELEASE_TIMEOUT {
                engine.detach_from_all(self.qpn);
                engine.core.remove(self.qpn);
                return;
            }
            // Let other threads continue: copies may wait for kernels, and those for data that
            // other threads receive.
            drop(engine);
            std::thread::yield_now();
        }
    }
}
