//! The engine: packets in, packets out, completions.
//!
//! A device has one engine, or several independent ones (`progress/set.rs`). Everything here runs
//! under the engine's lock, in the engine thread or in a thread that posts or polls (`progress/`).
//! One [`Engine::progress`] receives pending packets, lets the protocol respond, and sends. Its
//! work is bounded, so that the lock is never held for long.

pub(crate) mod account;
pub(crate) mod build;
pub(crate) mod completions;
pub(crate) mod cq_state;
pub(crate) mod fetched;
pub(crate) mod grh;
pub(crate) mod gsi;
pub(crate) mod host;
pub(crate) mod icrc_checker;
pub(crate) mod memory_windows;
pub(crate) mod mixed;
pub(crate) mod multicast;
pub(crate) mod once;
pub(crate) mod overflows;
pub(crate) mod packet;
pub(crate) mod path;
pub(crate) mod path_probe;
pub(crate) mod peer_death;
pub(crate) mod presence;
pub(crate) mod qp_table;
pub(crate) mod queue_pair;
mod receive;
pub(crate) mod region;
pub(crate) mod release;
pub(crate) mod same_host;
pub(crate) mod scatter;
pub(crate) mod scheduler;
mod selective;
mod settle;
pub(crate) mod snapshot;
pub(crate) mod srqs;
pub(crate) mod submission;
#[cfg(test)]
mod submission_tests;
pub(crate) mod timer;
pub(crate) mod totals;
mod transmit;
mod turn;

use std::net::IpAddr;
use std::sync::{Arc, RwLock};

use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Qpn, Service};

use crate::links::{Link, OpenError, TxBatch, now_ns};
use crate::process::cpu::ThreadClock;
use crate::soft::engine::account::Account;
use crate::soft::engine::gsi::Gsi;
use crate::soft::engine::icrc_checker::IcrcChecker;
use crate::soft::engine::memory_windows::Windows;
use crate::soft::engine::overflows::{Overflows, Reports};
use crate::soft::engine::path::{NetworkPaths, Sharers};
use crate::soft::engine::presence::{PresenceConfig, Presences};
use crate::soft::engine::qp_table::QpTable;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::region::Regions;
use crate::soft::engine::same_host::SameHost;
use crate::soft::engine::scheduler::Scheduler;
use crate::soft::engine::snapshot::Keeper;
use crate::soft::engine::srqs::Srqs;
use crate::soft::engine::submission::Submissions;
pub(crate) use crate::soft::engine::transmit::Answers;
use crate::soft::events::event::Events;
use crate::soft::limits::RESPONDER_RESOURCES;
use crate::soft::qp_index::QpIndex;
use crate::sync::spin::{AdaptiveSpin, CALLER_SPIN_NS};
use crate::sync::waker::{TIMER_SLACK_NS, Waker};

/// Idle calls between two timer checks: a few microseconds of polling.
const TIMERS_EVERY: u32 = 16;

/// How long a polling caller sleeps at most before it returns to the application, which may have
/// other work.
const CALLER_SLEEP_NS: Nanos = 50_000;

/// A caller with a gap this long between two polls is not waiting.
const POLL_GAP_NS: Nanos = CALLER_SPIN_NS / 2;

/// How long a polling caller has waited.
#[derive(Debug)]
struct CallerWait {
    spin: AdaptiveSpin,
    /// Time of its last poll.
    polled_at: Nanos,
    /// When packets had last arrived or left at that time.
    active_at: Nanos,
}

/// The link, and everything else: separate, so that packets can be handled while the link hands
/// them out.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) link: Box<dyn Link>,
    pub(crate) core: Core,
    pub(crate) keeper: Option<Keeper>,
    /// The CPU time of its thread.
    pub(crate) cpu: ThreadClock,
    /// Wakes the thread that drives the engine.
    pub(crate) waker: Arc<Waker>,
    caller: CallerWait,
}

/// What the engines of a device share.
#[derive(Clone, Debug)]
pub(crate) struct Joint {
    pub(crate) events: Arc<Events>,
    pub(crate) windows: Arc<RwLock<Windows>>,
    pub(crate) overflows: Arc<Overflows>,
    /// Number of engines that send to the same sockets; `None` if the device can have only one.
    pub(crate) sharers: Option<Arc<Sharers>>,
    /// What peers are asked.
    pub(crate) presence: PresenceConfig,
}

/// The state of one engine beside its link.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) local: IpAddr,
    pub(crate) qps: QpTable,
    pub(crate) regions: Regions,
    pub(crate) srqs: Srqs,
    pub(crate) tx: TxBatch,
    /// Queue pair 1.
    pub(crate) gsi: Gsi,
    pub(crate) icrc: IcrcChecker,
    /// The submission queue.
    pub(crate) submissions: Arc<Submissions>,
    pub(crate) scheduler: Scheduler,
    pub(crate) same_host: SameHost,
    pub(crate) account: Account,
    pub(crate) reports: Reports,
    pub(crate) presences: Presences,
}

impl Engine {
    /// The engine with that number of a device.
    pub(crate) fn new(
        link: Box<dyn Link>,
        number: usize,
        has_submissions: bool,
        waker: Arc<Waker>,
        joint: Joint,
    ) -> Self {
        let Joint { events, windows, overflows, sharers, presence } = joint;
        let core = Core {
            local: link.local(),
            qps: QpTable::new(link.slot()),
            regions: Regions::new(number, windows),
            srqs: Srqs::default(),
            tx: TxBatch::new(link.capabilities()),
            gsi: Gsi::default(),
            icrc: IcrcChecker::new(),
            submissions: Arc::new(Submissions::new(has_submissions)),
            scheduler: Scheduler::new(NetworkPaths::new(sharers)),
            same_host: SameHost::default(),
            account: Account::default(),
            reports: Reports::new(events, overflows),
            presences: Presences::new(presence, link.receive_room()),
        };
        let caller = CallerWait { spin: AdaptiveSpin::adaptive(CALLER_SPIN_NS), polled_at: 0, active_at: 0 };
        Self { link, core, keeper: None, cpu: ThreadClock::default(), waker, caller }
    }

    /// The queue pair has a new peer, which the link may reach through shared memory.
    pub(crate) fn change_path(&mut self, index: QpIndex) {
        let Core { qps, scheduler, local, .. } = &mut self.core;
        let Some(entry) = qps.get_mut(index) else { return };
        if let Some(old) = scheduler.change_path(entry) {
            scheduler.wake_waiting(qps, old);
        }
        let Some(entry) = qps.get_mut(index) else { return };
        let peer = entry.peer();
        entry.ends_at = None;
        entry.schedule.peer_generation = None;
        // A datagram's request names its destination (see `SameHost`); the address
        // attribute is unused.
        entry.route.heard_locally = false;
        entry.route.local =
            if entry.qp.service() == Service::Ud { None } else { self.link.local_route(peer) };
        // Only a device of this kind has a ring.
        entry.qp.set_peer_resources(if entry.route.local.is_some() { RESPONDER_RESOURCES } else { 0 });
        if let (None, Some(path)) = (&entry.route.local, entry.schedule.path)
            && (peer.0.is_loopback() || peer.0 == *local)
        {
            scheduler.paths.ends_here(path, self.link.receive_room());
        }
        self.core.expect_presence(now_ns(), index);
    }

    /// Makes the engine reachable.
    pub(crate) fn listen(&mut self) -> Result<(), OpenError> {
        self.link.listen()?;
        self.core.qps.set_slot(self.link.slot());
        Ok(())
    }

    /// Receives, runs the protocol, sends. Returns the number of received packets.
    pub(crate) fn progress(&mut self) -> usize {
        let Self { link, core, .. } = self;
        // An application polls far more often than packets arrive. So the clock is read only after
        // a packet arrived, and now and then for the timers.
        let mut clock = None;
        let received =
            link.receive(&mut |datagram| core.handle_datagram(*clock.get_or_insert_with(now_ns), datagram));
        while let Some(departed) = link.departed() {
            core.lose_peer(departed);
        }
        if core.reports.has_overflows() {
            core.hear_of_overflows();
        }
        core.scheduler.idle_calls = if received == 0 { core.scheduler.idle_calls.wrapping_add(1) } else { 0 };
        if received == 0 && core.is_idle() && !core.scheduler.idle_calls.is_multiple_of(TIMERS_EVERY) {
            return 0;
        }
        let now = clock.unwrap_or_else(now_ns);
        if received > 0 {
            core.scheduler.note_active(now);
        }
        core.same_host.resolve_senders(&mut **link);
        core.settle_touched(now);
        core.fire_timers(now);
        if core.gsi.wanted {
            self.serve_gsi(now);
            self.keep_snapshot(now);
        }
        let core = &mut self.core;
        core.release_held();
        // Nothing came: the delayed acknowledgements are the most urgent packets.
        self.transmit(now, if received == 0 { Answers::Due } else { Answers::Travelling });
        received
    }

    /// `caller` mode: a caller polls. Returns until when it should sleep, if it has polled without
    /// pause and without packets for a whole spin.
    #[inline]
    pub(crate) fn sleep_of_caller(&mut self, now: Nanos) -> Option<Nanos> {
        let CallerWait { spin, polled_at, active_at } = &mut self.caller;
        // A program with other work between its polls is not waiting.
        let is_waiting = now.saturating_sub(*polled_at) <= POLL_GAP_NS;
        *polled_at = now;
        if !is_waiting || *active_at != self.core.scheduler.active_at {
            *active_at = self.core.scheduler.active_at;
            spin.found();
            return None;
        }
        spin.is_over(now).then(|| self.deadline().unwrap_or(Nanos::MAX).min(now + CALLER_SLEEP_NS))
    }

    /// `caller` mode: the caller has slept.
    pub(crate) fn note_slept(&mut self, now: Nanos) {
        self.caller.spin.slept();
        self.caller.polled_at = now;
        self.link.poll_control();
    }

    /// Whether copies by the GPU are pending.
    pub(crate) fn awaits_copies(&self) -> bool {
        self.core.awaits_copies()
    }

    /// When the engine must be driven if no poll follows; delayed work can wait that long. Copies
    /// wake the engine thread themselves.
    pub(crate) fn unattended_deadline(&self) -> Option<Nanos> {
        if self.core.has_work() { Some(now_ns()) } else { self.deadline() }
    }

    /// When to come back if nothing arrives before: now if there is more to send.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        if self.core.has_work() && !self.link.send_blocked() {
            return Some(0);
        }
        // A finished copy wakes the engine thread; a stuck one is detected by polling.
        let copies = self.awaits_copies().then(|| now_ns() + TIMER_SLACK_NS);
        let timer = self.core.scheduler.next_timer();
        let answer = self.core.scheduler.pending_acks.delayed.front().map(|(due, _)| *due);
        [timer, answer, copies, self.link.next_deadline()].into_iter().flatten().min()
    }
}

impl Core {
    /// Nothing is to be sent, and nothing waits for copies.
    fn is_idle(&self) -> bool {
        !self.has_work() && !self.awaits_copies()
    }

    /// Copies by the GPU are pending.
    fn awaits_copies(&self) -> bool {
        !self.scheduler.copies.holding.is_empty() || self.regions.staging.is_busy()
    }

    /// Something is to be sent.
    fn has_work(&self) -> bool {
        !self.scheduler.ready.is_empty()
            || !self.same_host.returns.is_empty()
            || self.presences.has_work()
            || !self.scheduler.pending_acks.soon.is_empty()
    }

    pub(crate) fn entry(&mut self, qpn: Qpn) -> Option<&mut QueuePair> {
        self.qps.get_mut(QpIndex::of(qpn))
    }

    pub(crate) fn make_ready(&mut self, index: QpIndex) {
        if let Some(entry) = self.qps.get_mut(index) {
            self.scheduler.make_ready(entry);
        }
    }
}
