//! The engine: packets in, packets out, completions.
//!
//! A device has one engine, or several independent ones (`progress/set.rs`). Everything here runs
//! under the engine's lock, in the engine thread or in a thread that posts or polls (`progress/`).
//! One [`Engine::progress`] receives pending packets, lets the protocol respond, and sends. Its
//! work is bounded, so that the lock is never held for long.

pub(crate) mod build;
pub(crate) mod completions;
pub(crate) mod cq_state;
pub(crate) mod fetched;
pub(crate) mod grh;
pub(crate) mod gsi;
pub(crate) mod host;
pub(crate) mod memory_windows;
pub(crate) mod mixed;
pub(crate) mod multicast;
pub(crate) mod once;
pub(crate) mod overflows;
pub(crate) mod packet;
pub(crate) mod parts;
pub(crate) mod path;
pub(crate) mod path_probe;
pub(crate) mod peer_death;
pub(crate) mod peers;
pub(crate) mod presence;
pub(crate) mod qp_table;
pub(crate) mod queue_pair;
pub(crate) mod region;
pub(crate) mod release;
pub(crate) mod scatter;
mod selective;
pub(crate) mod snapshot;
pub(crate) mod srqs;
pub(crate) mod submission;
#[cfg(test)]
mod submission_tests;
pub(crate) mod timer;
pub(crate) mod totals;
mod turn;

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, RwLock};

use nobounce_protocol::qp::{QpEvent, QpState, Status};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Header, Malformed, Marker, Parsed, Qpn, Service};

use crate::links::OpenError;
use crate::links::{Arrival, IcrcWriters, Link, RxDatagram, TxBatch, now_ns, peer_name};
use crate::process::cpu::ThreadClock;
use crate::soft::counters;
use crate::soft::engine::gsi::Gsi;
use crate::soft::engine::host::{PacketHost, ReceiveSource};
use crate::soft::engine::memory_windows::Windows;
use crate::soft::engine::multicast::Groups;
use crate::soft::engine::overflows::Overflows;
use crate::soft::engine::packet::put_marker;
use crate::soft::engine::parts::{Account, CopyWaits, Markers, OverflowCursor, SameHost, Scheduler};
use crate::soft::engine::path::{NetworkPaths, PathIndex, Sharers};
use crate::soft::engine::path_probe::PathProbes;
use crate::soft::engine::presence::{PresenceConfig, Presences};
use crate::soft::engine::qp_table::QpTable;
use crate::soft::engine::queue_pair::{Posted, QueuePair, complete, flushed};
use crate::soft::engine::region::Regions;
use crate::soft::engine::snapshot::Keeper;
use crate::soft::engine::srqs::Srqs;
use crate::soft::engine::submission::Submissions;
use crate::soft::engine::timer::Timer;
use crate::soft::events::event::{AsyncEvent, Events};
use crate::soft::limits::RESPONDER_RESOURCES;
use crate::soft::qp_index::QpIndex;
use crate::sync::spin::AdaptiveSpin;
use crate::sync::spin::CALLER_SPIN_NS;
use crate::sync::waker::{TIMER_SLACK_NS, Waker};

/// Batches sent in one call.
const MAX_BATCHES: usize = 16;

/// Payload of a packet, or of coalesced packets, from which on a message does not count as short.
const LONG: usize = 1024;

/// Markers kept until they are sent; further ones are dropped, and their senders retransmit.
const MAX_RETURNS: usize = 64;

/// Peers with separate byte counters after their queue pairs are destroyed.
const MAX_PEERS: usize = 1024;
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
    pub(crate) paths: NetworkPaths,
    pub(crate) events: Arc<Events>,
    pub(crate) tx: TxBatch,
    /// Queue pair 1.
    pub(crate) gsi: Gsi,
    /// Precomputed ICRCs of recent flows and packet lengths.
    pub(crate) icrc_writers: IcrcWriters<(u16, IpAddr)>,
    /// The submission queue.
    pub(crate) submissions: Arc<Submissions>,
    pub(crate) scheduler: Scheduler,
    pub(crate) markers: Markers,
    pub(crate) same_host: SameHost,
    pub(crate) copy_waits: CopyWaits,
    pub(crate) account: Account,
    pub(crate) overflow: OverflowCursor,
    pub(crate) presences: Presences,
    pub(crate) path_probes: PathProbes,
    pub(crate) groups: Groups,
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
            paths: NetworkPaths::new(sharers),
            events,
            tx: TxBatch::new(link.capabilities()),
            gsi: Gsi::default(),
            icrc_writers: IcrcWriters::new(),
            submissions: Arc::new(Submissions::new(has_submissions)),
            scheduler: Scheduler::default(),
            markers: Markers::default(),
            same_host: SameHost::default(),
            copy_waits: CopyWaits::default(),
            account: Account::default(),
            overflow: OverflowCursor { known: overflows.count(), shared: overflows },
            presences: Presences::new(presence, link.receive_room()),
            path_probes: PathProbes::default(),
            groups: Groups::new(),
        };
        let caller = CallerWait { spin: AdaptiveSpin::adaptive(CALLER_SPIN_NS), polled_at: 0, active_at: 0 };
        Self { link, core, keeper: None, cpu: ThreadClock::default(), waker, caller }
    }

    /// The queue pair has a new peer, which the link may reach through shared memory.
    pub(crate) fn change_path(&mut self, index: QpIndex) {
        self.core.change_path(index);
        let Some(entry) = self.core.qps.get_mut(index) else { return };
        let peer = entry.peer();
        entry.ends_at = None;
        entry.schedule.peer_generation = None;
        // A datagram's request names its destination (see `resolve_local_peers`); the address
        // attribute is unused.
        entry.route.heard_locally = false;
        entry.route.local =
            if entry.qp.service() == Service::Ud { None } else { self.link.local_route(peer) };
        // Only a device of this kind has a ring.
        entry.qp.set_peer_resources(if entry.route.local.is_some() { RESPONDER_RESOURCES } else { 0 });
        if let (None, Some(path)) = (&entry.route.local, entry.schedule.path)
            && (peer.0.is_loopback() || peer.0 == self.core.local)
        {
            self.core.paths.ends_here(path, self.link.receive_room());
        }
        self.core.expect_presence(now_ns(), index);
    }

    /// Resolves the local peers among datagram destinations before the first datagram is built.
    /// Later ones must not overtake it.
    #[cold]
    fn resolve_local_peers(&mut self) {
        let Self { link, core, .. } = self;
        while let Some(index) = core.same_host.unresolved.pop() {
            let Some(entry) = core.qps.get_mut(index) else { continue };
            if let Some(routes) = &mut entry.route.routes {
                routes.resolve_local_peers(&mut **link, &mut core.same_host.peers);
            }
        }
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
        if core.overflow.shared.count() != core.overflow.known {
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
        if core.markers.senders.has_unresolved() {
            core.markers.senders.resolve_local_peers(&mut **link, &mut core.same_host.peers);
        }
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

    /// Sends what may leave, including the delayed ACKs that `answers` selects.
    pub(crate) fn transmit(&mut self, now: Nanos, answers: Answers) {
        if !self.core.same_host.unresolved.is_empty() {
            self.resolve_local_peers();
        }
        self.transmit_batches(now, answers);
        self.link.wake_peers();
    }

    fn transmit_batches(&mut self, now: Nanos, answers: Answers) {
        for _ in 0..MAX_BATCHES {
            if self.link.send_blocked() {
                return; // the link reports the retry time by next_deadline()
            }
            if std::mem::take(&mut self.core.scheduler.answers_are_next) {
                self.core.fill_answers(now, false);
            }
            let full = self.core.fill_returns() || self.core.fill_presences() || self.core.fill(now);
            // Under a sustained load of full batches, as from long READs, delayed ACKs would starve
            // behind them.
            self.core.scheduler.answers_are_next = full;
            let travels = !self.core.tx.is_empty();
            if !full && (travels || answers != Answers::Travelling) {
                self.core.fill_answers(now, travels || answers == Answers::All);
            }
            if self.core.tx.is_empty() {
                self.core.tx.let_go();
                return;
            }
            self.core.account.counters.sent_pkts += self.core.tx.count() as u64;
            self.core.scheduler.note_active(now);
            self.link.send(&mut self.core.tx);
            // A full batch takes as long as several posts: submissions do not wait for all batches.
            if !full || (answers != Answers::All && !self.core.submissions.is_empty()) {
                return;
            }
        }
    }

    /// Sends the delayed ACKs.
    pub(crate) fn send_answers(&mut self) {
        self.transmit(now_ns(), Answers::All);
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
        !self.core.copy_waits.holding.is_empty() || self.core.regions.staging.is_busy()
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
        let timer = self.core.scheduler.timers.peek().map(|Reverse((at, _))| *at);
        let answer = self.core.scheduler.pending_acks.delayed.front().map(|(due, _)| *due);
        [timer, answer, copies, self.link.next_deadline()].into_iter().flatten().min()
    }
}

impl Core {
    /// Nothing is to be sent, and nothing waits for copies.
    fn is_idle(&self) -> bool {
        !self.has_work() && self.copy_waits.holding.is_empty() && !self.regions.staging.is_busy()
    }

    /// Something is to be sent.
    fn has_work(&self) -> bool {
        !self.scheduler.ready.is_empty()
            || !self.markers.returns.is_empty()
            || self.presences.has_work()
            || self.path_probes.has_work()
            || !self.scheduler.pending_acks.soon.is_empty()
    }

    pub(crate) fn entry(&mut self, qpn: Qpn) -> Option<&mut QueuePair> {
        self.qps.get_mut(QpIndex::of(qpn))
    }

    pub(crate) fn remove(&mut self, qpn: Qpn) {
        let index = QpIndex::of(qpn);
        let Some(mut entry) = self.qps.remove(index) else { return };
        if let Some((srq, receive)) = entry.take_open_shared() {
            self.srqs.give_back(srq, receive);
        }
        if let Some(srq) = entry.posted.srq {
            self.srqs.leave(srq);
        }
        self.events.forget(|event| matches!(event, AsyncEvent::Qp { qpn: of, .. } if *of == qpn));
        self.regions.staging.forget_owner(index);
        self.regions.unbind_qp(index);
        counters::add(&mut self.account.counters.qps, entry.qp.counters());
        // Bound the map: queue pairs to ever new (invented) peers must not grow it without end.
        let peer = if self.account.moved.len() < MAX_PEERS {
            entry.qp.attr().remote
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        self.account.moved.entry(peer).or_default().add(&entry.tally);
        if let Some(path) = entry.schedule.path {
            self.paths.charge(path, entry.schedule.charged, 0);
            self.paths.leave(path, entry.qp.service().is_reliable());
            self.wake_waiting(path);
        }
        entry.send_cq.forget_qp(qpn);
        entry.recv_cq.forget_qp(qpn);
    }

    pub(crate) fn handle_datagram(&mut self, now: Nanos, datagram: &RxDatagram<'_>) {
        self.account.counters.rcvd_pkts += u64::from(datagram.packets);
        // Parse in place. A moved header would be read in other sizes than it was written in. That
        // store-forwarding stall waits until the payload before it is stored (5 % of a receiver's
        // time).
        let parsed = &Header::parse(datagram.bytes);
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(malformed) => {
                let is_ours = *malformed == Malformed::UnknownOpcode
                    && datagram.group.is_none()
                    && (self.handle_selective_ack(now, datagram)
                        || self.handle_congestion_notification(now, datagram)
                        || self.handle_marker(datagram)
                        || self.handle_presence(now, datagram));
                if is_ours {
                    return;
                }
                self.account.counters.malformed[malformed.index()] += 1;
                return;
            }
        };
        if datagram.has_icrc && !self.check_icrc(datagram) {
            self.account.counters.icrc_errors += 1;
            return;
        }
        let header = &parsed.header;
        // Admit receives that were posted before the peer sent this message.
        if !header.opcode.is_response() {
            self.take_submissions(|| now);
        }
        if let Some(&group) = datagram.group {
            return self.handle_multicast(now, group, datagram, parsed);
        }
        if !self.qps.owns(header.dest_qpn) {
            return self.handle_stray(datagram, parsed);
        }
        self.deliver(now, QpIndex::of(header.dest_qpn), datagram, parsed);
    }

    /// Lets the queue pair with that index handle a packet.
    // Always inlined: it is most of the work for each packet.
    #[inline(always)]
    fn deliver(&mut self, now: Nanos, index: QpIndex, datagram: &RxDatagram<'_>, parsed: &Parsed) {
        let header = &parsed.header;
        let Some(entry) = self.qps.get_mut(index) else {
            return self.handle_stray(datagram, parsed);
        };
        if matches!(entry.qp.state(), QpState::Reset | QpState::Init) {
            self.account.counters.wrong_state += 1;
            return;
        }
        if entry.qp.service() != Service::Ud {
            // A peer that writes to a ring sends nothing by UDP: such a packet is forged.
            let beside = entry.route.heard_locally && datagram.arrival == Arrival::BesideLocal;
            if entry.qp.attr().remote != datagram.src || beside {
                self.account.counters.wrong_peer += 1;
                return;
            }
            entry.route.heard_locally |= datagram.arrival == Arrival::Local;
            entry.schedule.heard = now;
        }
        let mut payload =
            datagram.whole.unwrap_or_else(|| datagram.bytes.into()).slice(parsed.payload.clone());
        let mut packets = u32::from(datagram.packets);
        let taken = entry.qp.taken_of_run(header, packets, payload.len());
        let rest;
        let header = if taken == 0 {
            header
        } else {
            payload = payload.skip(taken as usize * (payload.len() / packets as usize));
            packets -= taken;
            rest = Header { psn: header.psn.plus(taken), ..*header };
            &rest
        };
        entry.ack.heard_long = payload.len() > LONG;
        let Posted { receives, srq, xrc, receive_pd, sends, current, .. } = &mut entry.posted;
        let receives = ReceiveSource::of(receives, *srq, xrc.as_mut(), &mut self.srqs);
        let mut host = PacketHost {
            regions: &mut self.regions,
            pd: &mut entry.pd,
            receive_pd,
            payload,
            datagram,
            local: &self.local,
            sends,
            receives,
            current,
            psn: header.psn,
            qp: index,
            ticket: &mut entry.gpu.ticket,
            tally: &mut entry.tally.inbound,
        };
        let handled = entry.qp.handle_run(now, (header, packets), payload.len(), &mut host);
        self.account.counters.count_handled(handled);
        if entry.qp.holds_packets() {
            self.deliver_held(now, index, datagram);
        }
        let Some(entry) = self.qps.get_mut(index) else { return };
        if header.has_xrceth()
            && let Some(srq) = entry.posted.shared()
        {
            // The next message may name another queue.
            self.srqs.check_limit(srq, &self.events);
            self.srqs.publish_room(srq);
        }
        if datagram.marked {
            entry.qp.handle_mark(now, header.opcode, packets);
        }
        entry.schedule.answered |= header.opcode.is_response();
        if !entry.schedule.touched {
            entry.schedule.touched = true;
            self.scheduler.touched.push(index);
        }
    }

    /// Returns a marker of a same-host peer, or handles a returned one; false if the packet is no
    /// marker.
    #[cold]
    fn handle_marker(&mut self, datagram: &RxDatagram<'_>) -> bool {
        let Some(marker) = Marker::parse(datagram.bytes) else { return false };
        if !self.same_host.peers.contains(datagram.src) || !self.check_icrc(datagram) {
            return false;
        }
        if !marker.returns {
            if self.markers.returns.len() < MAX_RETURNS {
                self.markers.senders.expect(peer_name(datagram.src, marker.from));
                self.markers.returns.push((datagram.src, marker.returned()));
            }
        } else if let Some(entry) = self.entry(marker.to) {
            entry.qp.handle_marker(marker.number);
            entry.schedule.answered = true;
            if !entry.schedule.touched {
                entry.schedule.touched = true;
                self.scheduler.touched.push(QpIndex::of(marker.to));
            }
        }
        true
    }

    /// Processes the effects of received packets, once for each queue pair.
    fn settle_touched(&mut self, now: Nanos) {
        while let Some(index) = self.scheduler.touched.pop() {
            let Some(entry) = self.qps.get_mut(index) else { continue };
            if let Some(srq) = entry.posted.shared() {
                self.srqs.check_limit(srq, &self.events);
            }
            self.settle(index);
            let Some(entry) = self.qps.get_mut(index) else { continue };
            entry.schedule.touched = false;
            let replies = entry.qp.has_replies();
            if replies {
                entry.ack.note_heard(now);
            }
            let sends = std::mem::take(&mut entry.schedule.answered) && entry.may_send();
            if sends || entry.qp.has_urgent_replies() || entry.qp.has_congestion_notification() {
                self.make_ready(index);
            } else if replies {
                entry.delay_ack(now, &mut self.scheduler.pending_acks);
            }
        }
    }

    fn fire_timers(&mut self, now: Nanos) {
        while let Some(&Reverse((at, timer))) = self.scheduler.timers.peek() {
            if at > now {
                return;
            }
            self.scheduler.timers.pop();
            match timer {
                Timer::QueuePair(index) => self.fire_timer_of(index, at, now),
                // Snapshots are taken when queue pair 1 is served.
                Timer::ConnectionManager | Timer::Snapshot => self.gsi.wanted = true,
                Timer::PeerDeath => self.expire_dead_peers(now),
                Timer::KeepAlive => self.ask_for_presence(now),
                Timer::PathProbe => self.advance_path_probes(now),
            }
        }
    }

    fn fire_timer_of(&mut self, index: QpIndex, at: Nanos, now: Nanos) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        if entry.schedule.armed == Some(at) {
            entry.schedule.armed = None;
        }
        if entry.qp.poll_timeout().is_some_and(|due| due <= now) {
            if entry.holds_request() {
                entry.qp.put_off(now);
            } else {
                let before = entry.qp.counters().local_ack_timeout_err;
                entry.qp.handle_timeout(now);
                if entry.qp.counters().local_ack_timeout_err > before {
                    self.suspect_path(now, index);
                }
            }
            self.settle(index);
            self.make_ready(index);
        } else {
            self.arm(index);
        }
    }

    /// Puts the queue pair's next timeout on the heap, unless an earlier entry exists.
    fn arm(&mut self, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        let Some(at) = entry.qp.poll_timeout() else { return };
        if entry.schedule.armed.is_none_or(|armed| at < armed) {
            entry.schedule.armed = Some(at);
            self.scheduler.timers.push(Reverse((at, Timer::QueuePair(index))));
        }
    }

    pub(crate) fn make_ready(&mut self, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        if !entry.schedule.ready {
            entry.schedule.ready = true;
            self.scheduler.ready.push_back(index);
        }
    }

    /// Collects the results of the last protocol call: completions, events, freed requests and
    /// room.
    pub(crate) fn settle(&mut self, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        let mut overflowed = None;
        let staging = &self.regions.staging;
        // Before the completions: an application that has one may post again.
        entry.publish_room();
        if let Some(srq) = entry.posted.shared() {
            self.srqs.publish_room(srq);
        }
        while let Some(completion) = entry.qp.poll_completion() {
            if completion.status != Status::Success {
                self.account.counters.count_failed(completion.status);
                // It may come long after the last packet.
                self.scheduler.note_active(now_ns());
            }
            overflowed = complete(entry, staging, completion).or(overflowed);
        }
        while let Some(event) = entry.qp.poll_event() {
            self.events.push(AsyncEvent::Qp { qpn: entry.qpn, event });
        }
        if entry.qp.state() == QpState::Error {
            while let Some(posted) = entry.posted.receives.pop_front() {
                entry.publish_room();
                self.account.counters.count_failed(Status::Flushed);
                overflowed = complete(entry, staging, flushed(&posted)).or(overflowed);
            }
            entry.posted.current = None;
            entry.gpu.prefetches = None;
            if entry.ends_sharing() {
                self.events.push(AsyncEvent::Qp { qpn: entry.qpn, event: QpEvent::LastWqeReached });
            }
        }
        if entry.joins_holding() {
            self.copy_waits.holding.push(index);
        }
        let oldest = entry.qp.oldest_serial();
        while entry.posted.sends.front().is_some_and(|send| send.serial < oldest) {
            entry.posted.sends.pop_front();
        }
        self.recharge(index);
        if let Some(cq) = overflowed {
            self.stop_users_of(cq);
        }
    }

    /// Updates the path's charge, and wakes other queue pairs for the freed room.
    pub(crate) fn recharge(&mut self, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        let outstanding = entry.qp.outstanding();
        let Some(path) = entry.schedule.path else { return };
        let freed = outstanding < entry.schedule.charged;
        self.paths.charge(path, entry.schedule.charged, outstanding);
        entry.schedule.charged = outstanding;
        if freed {
            self.wake_waiting(path);
        }
    }

    /// The queue pair has a new peer: its packets are charged to another path from now on.
    fn change_path(&mut self, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        let (remote, slot) = entry.peer();
        let reliable = entry.qp.service().is_reliable();
        let new = self.paths.join(remote, slot, reliable);
        let old = entry.schedule.path.replace(new);
        let charged = std::mem::take(&mut entry.schedule.charged);
        // It no longer waits on the old path; otherwise it would never join the new path's queue.
        entry.schedule.waiting = false;
        if let Some(old) = old {
            self.paths.charge(old, charged, 0);
            self.paths.leave(old, reliable);
            self.wake_waiting(old);
        }
    }

    /// Lets the next queue pair that waits for room retry, if there is room. One is enough: when
    /// its turn is over and room is left, the next one follows.
    fn wake_waiting(&mut self, path: PathIndex) {
        while let Some(index) = self.paths.wake(path) {
            if let Some(entry) = self.qps.get_mut(index) {
                entry.schedule.waiting = false;
                self.make_ready(index);
                return;
            }
        }
    }

    /// Asks for presence and answers; whether the batch is full.
    fn fill_presences(&mut self) -> bool {
        (self.presences.has_work() && self.presences.fill(&mut self.tx))
            || (self.path_probes.has_work() && self.path_probes.fill(&mut self.tx))
    }

    /// Returns markers; whether the batch is full.
    fn fill_returns(&mut self) -> bool {
        while let Some((to, marker)) = self.markers.returns.pop() {
            if !self.tx.has_room() {
                self.markers.returns.push((to, marker));
                return true;
            }
            put_marker(&mut self.tx, to, 0, &marker);
            self.account.counters.sent_markers += 1;
        }
        false
    }
}

/// Which of the delayed ACKs leave now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    /// Those that can piggyback on a request.
    Travelling,
    /// Also those whose delay has expired.
    Due,
    All,
}
