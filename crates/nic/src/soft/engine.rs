//! The engine: packets in, packets out, completions.
//!
//! A device has one, or several that know nothing of each other (`units.rs`). Everything here runs under the engine's lock, driven by whoever posts, polls, or by the helper thread. One
//! [`Engine::progress`] receives what is there, lets the protocol answer, and sends; its work is bounded, so that the
//! lock is never held for long.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use nobounce_protocol::cm::GSI_QPN;
use nobounce_protocol::qp::{Handled, QpEvent, QpState, Status, Treatment};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Header, Malformed, Marker, Qpn, Service};

use super::build::{Built, build, build_repeats, packet_len, port_hint, put_marker, ready_repeats};
use super::counters::{self, Counters};
use super::deaths::DEATH_TIMER;
use super::entry::{Owing, QpEntry, complete, flushed, next_packet, next_request};
use super::event::{AsyncEvent, Events};
use super::gsi::Gsi;
use super::host::PacketHost;
use super::mw::{Windows, carry_out_local};
use super::near::Near;
use super::overflows::Overflows;
use super::path::{PathIndex, Paths, Sharers};
use super::peer::Peers;
use super::region::Regions;
use super::snapshot::{Keeper, SNAPSHOT_TIMER};
use super::srq::Srqs;
use super::tally::PathCounters;
use super::ways::{Ways, addressee};
use crate::links::udp::OpenError;
use crate::links::{Link, RxDatagram, Sealers, TxBatch, now_ns};

/// Batches sent in one call.
const MAX_BATCHES: usize = 16;

/// Payload of a packet, or of packets that came as one, from which on a message is not one of many short ones.
const LONG: usize = 1024;

/// Markers kept until they leave; further ones are lost, and sent again by those who wait for them.
const MAX_RETURNS: usize = 64;

/// Peers whose bytes are counted apart after their queue pairs are gone.
const MAX_PEERS: usize = 1024;
/// Idle calls between two looks at the timers: a few microseconds of polling.
const TIMERS_EVERY: u32 = 16;

/// The link, and everything else: apart, so that packets can be handled while the link hands them out.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) link: Box<dyn Link>,
    pub(crate) core: Core,
    pub(super) keeper: Option<Keeper>,
    /// How many wait for the lock around it: what may wait until they have had it is put off.
    pub(super) wanted: Arc<AtomicUsize>,
}

/// What the engines of a device have in common.
#[derive(Clone, Debug)]
pub(crate) struct Joint {
    pub(crate) events: Arc<Events>,
    pub(crate) windows: Arc<RwLock<Windows>>,
    pub(crate) overflows: Arc<Overflows>,
    /// How many of them send to the same sockets; `None` where there can be no others.
    pub(crate) sharers: Option<Arc<Sharers>>,
    /// Whether there are several by now.
    pub(crate) several: Arc<AtomicBool>,
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(super) local: IpAddr,
    slot: u8,
    pub(crate) qps: Vec<Option<Box<QpEntry>>>,
    pub(super) free: VecDeque<u16>,
    pub(crate) regions: Regions,
    pub(crate) srqs: Srqs,
    pub(crate) paths: Paths,
    pub(crate) counters: Counters,
    pub(super) events: Arc<Events>,
    pub(super) overflows: Arc<Overflows>,
    /// How many overflows of completion queues it knows of.
    pub(super) overflows_known: usize,
    pub(super) tx: TxBatch,
    ready: VecDeque<u32>,
    owing: Owing,
    touched: Vec<u32>,
    /// Markers to be sent back, and where to.
    returns: Vec<(IpAddr, Marker)>,
    near: Near,
    /// Who sent markers here: they are sent back by the way that other packets would take.
    pub(super) askers: Ways,
    /// Queue pair 1.
    pub(super) gsi: Gsi,
    /// Queue pairs that wait for the GPU's copy engine.
    pub(super) holding: Vec<u32>,
    /// One of them found no chunk to fetch into.
    pub(super) starved: bool,
    /// The queue pair that chunks were taken from last.
    pub(super) robbed: usize,
    /// What queue pairs that are gone moved, by peer.
    pub(super) moved: HashMap<IpAddr, PathCounters>,
    pub(super) timers: BinaryHeap<Reverse<(Nanos, u32)>>,
    pub(super) peers: Peers,
    /// Precomputed ICRCs of the flows and packet lengths heard lately.
    pub(super) sealers: Sealers<(u16, IpAddr)>,
    /// Calls in a row that received nothing.
    idle_calls: u32,
    /// When somebody last looked for packets, give or take a few idle calls.
    driven_at: Nanos,
}

impl Engine {
    /// The engine with that number of a device.
    pub(crate) fn new(link: Box<dyn Link>, number: usize, joint: Joint) -> Self {
        let Joint { events, windows, overflows, sharers, several: _ } = joint;
        let core = Core {
            local: link.local(),
            slot: link.slot(),
            qps: Vec::new(),
            free: VecDeque::new(),
            regions: Regions::new(number, windows),
            srqs: Srqs::default(),
            paths: Paths::new(sharers),
            counters: Counters::default(),
            events,
            overflows_known: overflows.count(),
            overflows,
            tx: TxBatch::new(link.capabilities()),
            ready: VecDeque::new(),
            owing: Owing::default(),
            touched: Vec::new(),
            returns: Vec::new(),
            near: Near::default(),
            askers: Ways::default(),
            gsi: Gsi::default(),
            holding: Vec::new(),
            starved: false,
            robbed: 0,
            moved: HashMap::new(),
            timers: BinaryHeap::new(),
            peers: Peers::default(),
            sealers: Sealers::new(),
            idle_calls: 0,
            driven_at: 0,
        };
        Self { link, core, keeper: None, wanted: Arc::default() }
    }

    /// The queue pair has a new peer: the link may have a shorter way there.
    pub(crate) fn change_path(&mut self, index: u32) {
        self.core.change_path(index);
        let Some(entry) = self.core.qps[index as usize].as_deref_mut() else { return };
        let (remote, slot) = entry.peer();
        entry.ends_at = None;
        // Datagrams go to whoever the request says (see `meet_strangers`); the address of the attributes is nobody's.
        entry.ring = if entry.qp.service() == Service::Ud { None } else { self.link.introduce(remote, slot) };
        if let (None, Some(path)) = (&entry.ring, entry.path)
            && (remote.is_loopback() || remote == self.core.local)
        {
            self.core.paths.ends_here(path, self.link.receive_room());
        }
    }

    /// Tries to meet those to whom the queue pair's datagrams go, before the first one is built: later ones must not overtake it.
    #[cold]
    pub(crate) fn meet_strangers(&mut self, index: u32) {
        let Self { link, core, .. } = self;
        let Some(entry) = core.qps[index as usize].as_deref_mut() else { return };
        if let Some(ways) = &mut entry.ways {
            ways.meet_strangers(&mut **link, &mut core.near);
        }
    }

    /// Can be reached from now on.
    pub(crate) fn listen(&mut self) -> Result<(), OpenError> {
        self.link.listen()?;
        self.core.slot = self.link.slot();
        Ok(())
    }

    /// Receives, lets the protocol work, sends. Returns how many packets came in.
    pub(crate) fn progress(&mut self) -> usize {
        let Self { link, core, .. } = self;
        // An application that polls asks far more often than packets come: the clock is read when one did, and for
        // the timers now and then.
        let mut clock = None;
        let received =
            link.receive(&mut |datagram| core.handle_datagram(*clock.get_or_insert_with(now_ns), datagram));
        while let Some(departed) = link.departed() {
            core.lose_peer(departed);
        }
        if core.overflows.count() != core.overflows_known {
            core.hear_of_overflows();
        }
        core.idle_calls = if received == 0 { core.idle_calls.wrapping_add(1) } else { 0 };
        if received == 0 && core.is_idle() && !core.idle_calls.is_multiple_of(TIMERS_EVERY) {
            return 0;
        }
        let now = clock.unwrap_or_else(now_ns);
        core.driven_at = now;
        if core.askers.has_strangers() {
            core.askers.meet_strangers(&mut **link, &mut core.near);
        }
        core.settle_touched(now);
        core.fire_timers(now);
        if core.gsi.wanted {
            self.serve_gsi(now);
            self.keep_snapshot(now);
        }
        let core = &mut self.core;
        core.release_held();
        // Nothing came: nobody waits for anything more urgent than the answers we put off.
        self.transmit(now, if received == 0 { Answers::Due } else { Answers::Travelling });
        received
    }

    /// Sends what may leave, and of the answers that were put off those that `answers` says.
    pub(crate) fn transmit(&mut self, now: Nanos, answers: Answers) {
        for _ in 0..MAX_BATCHES {
            if self.link.send_blocked() {
                return; // the link says by next_deadline() when to try again
            }
            let full = self.core.fill_returns() || self.core.fill(now);
            let travels = !self.core.tx.is_empty();
            if !full && (travels || answers != Answers::Travelling) {
                self.core.fill_answers(now, travels || answers == Answers::All);
            }
            if self.core.tx.is_empty() {
                self.core.tx.let_go();
                return;
            }
            self.core.counters.sent_pkts += self.core.tx.count() as u64;
            self.link.send(&mut self.core.tx);
            // A full batch takes as long as several posts: they must not wait for all of them.
            if !full || self.wanted.load(Ordering::Relaxed) > 0 {
                return;
            }
        }
    }

    /// Sends the answers that were put off.
    pub(crate) fn send_answers(&mut self) {
        self.transmit(now_ns(), Answers::All);
    }

    /// Packets that came and went so far.
    pub(crate) fn moved(&self) -> u64 {
        self.core.counters.rcvd_pkts.wrapping_add(self.core.counters.sent_pkts)
    }

    /// When somebody last looked for packets, give or take a few idle calls.
    pub(crate) fn driven_at(&self) -> Nanos {
        self.core.driven_at
    }

    /// Whether the GPU's copy engine has to be looked after.
    pub(crate) fn awaits_copies(&self) -> bool {
        !self.core.holding.is_empty() || self.core.regions.stage.is_busy()
    }

    /// When somebody must drive the engine if nobody polls: at once (0) where the GPU's copy engine has to be looked after; what was
    /// merely put off has time.
    pub(crate) fn unattended_deadline(&self) -> Option<Nanos> {
        if self.awaits_copies() {
            return Some(0);
        }
        if self.core.is_idle() { self.deadline() } else { Some(now_ns()) }
    }

    /// When to come back if nothing arrives before: now if there is more to send.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        if !self.core.is_idle() && !self.link.send_blocked() {
            return Some(0);
        }
        let timer = self.core.timers.peek().map(|Reverse((at, _))| *at);
        let answer = self.core.owing.patient.front().map(|(due, _)| *due);
        [timer, answer, self.link.next_deadline()].into_iter().flatten().min()
    }
}

impl Core {
    /// Nothing waits to be sent.
    fn is_idle(&self) -> bool {
        self.ready.is_empty()
            && self.returns.is_empty()
            && self.owing.soon.is_empty()
            && self.holding.is_empty()
            && !self.regions.stage.is_busy()
    }

    /// Whether its address is one of IPv4.
    pub(crate) fn is_ipv4(&self) -> bool {
        self.local.is_ipv4()
    }

    pub(crate) fn qpn(&self, index: u32) -> Qpn {
        Qpn::new(u32::from(self.slot) << 16 | index)
    }

    pub(crate) fn entry(&mut self, qpn: Qpn) -> Option<&mut QpEntry> {
        self.qps.get_mut((qpn.get() & 0xffff) as usize)?.as_deref_mut()
    }

    pub(crate) fn remove(&mut self, qpn: Qpn) {
        let index = qpn.get() & 0xffff;
        let Some(mut entry) = self.qps.get_mut(index as usize).and_then(Option::take) else { return };
        if let Some((srq, receive)) = entry.take_open_shared() {
            self.srqs.give_back(srq, receive);
        }
        if let Some(srq) = entry.srq {
            self.srqs.leave(srq);
        }
        self.events.forget(|event| matches!(event, AsyncEvent::Qp { qpn: of, .. } if *of == qpn));
        self.regions.stage.forget_owner(index);
        self.regions.unbind_qp(index);
        counters::add(&mut self.counters.qps, entry.qp.counters());
        // Somebody who invents peers must not make us remember them all.
        let peer =
            if self.moved.len() < MAX_PEERS { entry.qp.attr().remote } else { Ipv4Addr::UNSPECIFIED.into() };
        self.moved.entry(peer).or_default().add(&entry.tally);
        if let Some(path) = entry.path {
            self.paths.charge(path, entry.charged, 0);
            self.paths.leave(path, entry.qp.service() == Service::Rc);
            self.wake_waiting(path);
        }
        entry.send_cq.forget_qp(qpn);
        entry.recv_cq.forget_qp(qpn);
        if let Ok(index) = u16::try_from(index) {
            self.free.push_back(index);
        }
    }

    fn handle_datagram(&mut self, now: Nanos, datagram: &RxDatagram<'_>) {
        self.counters.rcvd_pkts += u64::from(datagram.packets);
        let parsed = match Header::parse(datagram.bytes) {
            Ok(parsed) => parsed,
            Err(malformed) => {
                if malformed == Malformed::UnknownOpcode && self.handle_marker(datagram) {
                    return;
                }
                self.counters.malformed[malformed.index()] += 1;
                return;
            }
        };
        if datagram.sealed && !self.check_icrc(datagram) {
            self.counters.icrc_errors += 1;
            return;
        }
        let header = &parsed.header;
        let index = header.dest_qpn.get() & 0xffff;
        let ours = header.dest_qpn.get() >> 16 == u32::from(self.slot);
        let Some(entry) = self.qps.get_mut(index as usize).and_then(Option::as_deref_mut).filter(|_| ours)
        else {
            return self.handle_stray(datagram, &parsed);
        };
        if matches!(entry.qp.state(), QpState::Reset | QpState::Init) {
            self.counters.wrong_state += 1;
            return;
        }
        if entry.qp.attr().remote != datagram.src && entry.qp.service() != Service::Ud {
            self.counters.wrong_peer += 1;
            return;
        }
        let payload = &datagram.whole.unwrap_or(datagram.bytes)[parsed.payload.clone()];
        entry.heard_long = payload.len() > LONG;
        let receives = match entry.srq.and_then(|srq| self.srqs.get(srq)) {
            None => &mut entry.receives,
            Some(srq) => &mut srq.receives,
        };
        let mut host = PacketHost {
            regions: &mut self.regions,
            pd: entry.pd,
            receive_pd: entry.receive_pd,
            payload,
            datagram,
            local: &self.local,
            sends: &entry.sends,
            receives,
            current: &mut entry.current,
            psn: header.psn,
            qp: index,
            ticket: &mut entry.ticket,
            tally: &mut entry.tally.inbound,
        };
        let run = (header, u32::from(datagram.packets));
        let handled = entry.qp.handle_run(now, run, payload.len(), &mut host);
        match handled {
            Handled::Taken => {}
            Handled::WrongState => self.counters.wrong_state += 1,
            Handled::Unsolicited => self.counters.unsolicited += 1,
            Handled::WrongService => self.counters.wrong_service += 1,
        }
        entry.answered |= header.opcode.is_response();
        if !entry.touched {
            entry.touched = true;
            self.touched.push(index);
        }
    }

    /// Sends a marker of somebody on this machine back, or hears of one that came back; false if it is none.
    #[cold]
    fn handle_marker(&mut self, datagram: &RxDatagram<'_>) -> bool {
        let Some(marker) = Marker::parse(datagram.bytes) else { return false };
        if !self.near.contains(datagram.src) || !self.check_icrc(datagram) {
            return false;
        }
        if !marker.returns {
            if self.returns.len() < MAX_RETURNS {
                self.askers.expect(addressee(datagram.src, marker.from));
                self.returns.push((datagram.src, marker.returned()));
            }
        } else if let Some(entry) = self.entry(marker.to) {
            entry.qp.handle_marker(marker.number);
            entry.answered = true;
            if !entry.touched {
                entry.touched = true;
                self.touched.push(marker.to.get() & 0xffff);
            }
        }
        true
    }

    /// Draws the consequences of the packets that came, once for each queue pair.
    fn settle_touched(&mut self, now: Nanos) {
        while let Some(index) = self.touched.pop() {
            self.settle(index);
            let Some(entry) = self.qps[index as usize].as_deref_mut() else { continue };
            entry.touched = false;
            if let Some(srq) = entry.srq {
                self.srqs.check_limit(srq, &self.events);
            }
            let replies = entry.qp.has_replies();
            if replies {
                entry.note_heard(now);
            }
            let sends = std::mem::take(&mut entry.answered) && entry.may_send();
            if sends || entry.qp.has_urgent_replies() {
                self.make_ready(index);
            } else if replies {
                entry.owe(now, &mut self.owing);
            }
        }
    }

    fn fire_timers(&mut self, now: Nanos) {
        while let Some(&Reverse((at, index))) = self.timers.peek() {
            if at > now {
                return;
            }
            self.timers.pop();
            let Some(entry) = self.qps.get_mut(index as usize).and_then(Option::as_deref_mut) else {
                // Three timers are no queue pair's: that of the connection manager, of snapshots, which is looked at with it, and of deaths.
                self.gsi.wanted |= index == GSI_QPN || index == SNAPSHOT_TIMER;
                if index == DEATH_TIMER {
                    self.bury(now);
                }
                continue;
            };
            if entry.armed == Some(at) {
                entry.armed = None;
            }
            if entry.qp.poll_timeout().is_some_and(|due| due <= now) {
                entry.qp.handle_timeout(now);
                self.settle(index);
                self.make_ready(index);
            } else {
                self.arm(index);
            }
        }
    }

    /// Puts the queue pair's next timeout on the heap, unless an earlier entry is there already.
    fn arm(&mut self, index: u32) {
        let Some(entry) = self.qps[index as usize].as_deref_mut() else { return };
        let Some(at) = entry.qp.poll_timeout() else { return };
        if entry.armed.is_none_or(|armed| at < armed) {
            entry.armed = Some(at);
            self.timers.push(Reverse((at, index)));
        }
    }

    pub(crate) fn make_ready(&mut self, index: u32) {
        let Some(entry) = self.qps[index as usize].as_deref_mut() else { return };
        if !entry.ready {
            entry.ready = true;
            self.ready.push_back(index);
        }
    }

    /// Takes out of the protocol what came of the last call: completions, events, freed requests and room.
    pub(crate) fn settle(&mut self, index: u32) {
        let Some(entry) = self.qps[index as usize].as_deref_mut() else { return };
        let mut overflowed = None;
        let stage = &self.regions.stage;
        while let Some(completion) = entry.qp.poll_completion() {
            if completion.status != Status::Success {
                self.counters.count_failed(completion.status);
            }
            overflowed = complete(entry, stage, completion).or(overflowed);
        }
        while let Some(event) = entry.qp.poll_event() {
            self.events.push(AsyncEvent::Qp { qpn: entry.qpn, event });
        }
        if entry.qp.state() == QpState::Error {
            while let Some(posted) = entry.receives.pop_front() {
                self.counters.count_failed(Status::Flushed);
                overflowed = complete(entry, stage, flushed(&posted)).or(overflowed);
            }
            entry.current = None;
            entry.feeds = None;
            if entry.ends_sharing() {
                self.events.push(AsyncEvent::Qp { qpn: entry.qpn, event: QpEvent::LastWqeReached });
            }
        }
        if entry.joins_holding() {
            self.holding.push(index);
        }
        let oldest = entry.qp.oldest_serial();
        while entry.sends.front().is_some_and(|send| send.serial < oldest) {
            entry.sends.pop_front();
        }
        self.recharge(index);
        if let Some(cq) = overflowed {
            self.stop_users_of(cq);
        }
    }

    /// Brings the path's account up to date, and lets others have the room that was freed.
    pub(crate) fn recharge(&mut self, index: u32) {
        let Some(entry) = self.qps[index as usize].as_deref_mut() else { return };
        let outstanding = entry.qp.outstanding();
        let Some(path) = entry.path else { return };
        let freed = outstanding < entry.charged;
        self.paths.charge(path, entry.charged, outstanding);
        entry.charged = outstanding;
        if freed {
            self.wake_waiting(path);
        }
    }

    /// The queue pair has a new peer: what it sends is charged to another path from now on.
    fn change_path(&mut self, index: u32) {
        let Some(entry) = self.qps[index as usize].as_deref_mut() else { return };
        let (remote, slot) = entry.peer();
        let reliable = entry.qp.service() == Service::Rc;
        let new = self.paths.join(remote, slot, reliable);
        let old = entry.path.replace(new);
        let charged = std::mem::take(&mut entry.charged);
        // It does not wait on the old path any more, or it would never be put into the new one's queue.
        entry.waiting = false;
        if let Some(old) = old {
            self.paths.charge(old, charged, 0);
            self.paths.leave(old, reliable);
            self.wake_waiting(old);
        }
    }

    /// Lets the next queue pair that waits for room try again, if there is room. One is enough: when its turn is
    /// over and room is left, the next one follows.
    fn wake_waiting(&mut self, path: PathIndex) {
        while let Some(index) = self.paths.wake(path) {
            if let Some(entry) = self.qps.get_mut(index as usize).and_then(Option::as_deref_mut) {
                entry.waiting = false;
                self.make_ready(index);
                return;
            }
        }
    }

    /// Sends markers back; whether the batch is full.
    fn fill_returns(&mut self) -> bool {
        while let Some((to, marker)) = self.returns.pop() {
            if !self.tx.has_room() {
                self.returns.push((to, marker));
                return true;
            }
            put_marker(&mut self.tx, to, 0, &marker);
            self.counters.sent_markers += 1;
        }
        false
    }

    /// Fills the batch from the queue pairs that have something to send; whether it is full.
    fn fill(&mut self, now: Nanos) -> bool {
        while let Some(index) = self.ready.pop_front() {
            let Some(entry) = self.qps[index as usize].as_deref_mut() else { continue };
            entry.ready = false;
            match self.turn(now, index, false) {
                Turn::Done => {}
                Turn::More => self.make_ready(index),
                Turn::BatchFull => {
                    // Its turn goes on with the next batch.
                    if let Some(entry) = self.qps[index as usize].as_deref_mut() {
                        entry.ready = true;
                        self.ready.push_front(index);
                    }
                    return true;
                }
            }
        }
        false
    }

    /// Adds the answers that were put off; with `all`, those too that wait for a request to travel with.
    fn fill_answers(&mut self, now: Nanos, all: bool) {
        for index in std::mem::take(&mut self.owing.soon) {
            self.answer(now, index);
        }
        // Each once: one that cannot say all it has to, for lack of bytes from a GPU, puts itself at the end again.
        for _ in 0..self.owing.patient.len() {
            let Some(&(due, index)) = self.owing.patient.front().filter(|(due, _)| all || *due <= now) else {
                break;
            };
            self.owing.patient.pop_front();
            let Some(entry) = self.qps[index as usize].as_deref_mut() else { continue };
            if due <= now && entry.owes_something() {
                entry.note_silence();
            }
            self.answer(now, index);
        }
    }

    fn answer(&mut self, now: Nanos, index: u32) {
        let Some(entry) = self.qps[index as usize].as_deref_mut() else { return };
        entry.owes_ack = false;
        if !entry.owes_something() {
            return; // it found a request to travel with
        }
        match self.turn(now, index, true) {
            Turn::Done => {}
            Turn::More | Turn::BatchFull => self.make_ready(index),
        }
    }

    /// Lets one queue pair send.
    fn turn(&mut self, now: Nanos, index: u32, flush: bool) -> Turn {
        let Self { qps, tx, regions, paths, owing, holding, starved, near, counters, ready, .. } = self;
        let Some(entry) = qps[index as usize].as_deref_mut() else { return Turn::Done };
        let room = entry.path.map_or(0, |path| paths.room(path));
        let path = entry.path;
        let shared = path.is_some_and(|path| paths.is_shared(path));
        // (Others must not wait for room until this one's next turn to ask.)
        entry.qp.ask_rarely(!shared && path.is_some_and(|path| paths.is_of_this_machine(path)));
        let charged = entry.charged;
        let unreliable = entry.qp.service() != Service::Rc;
        let mut turn = Turn::More;
        let mut faulted = None;
        // The next answer, to a READ, has no payload yet: requests do not wait for that.
        let mut answer_waits = false;
        // Answers that can wait travel with the first request that leaves.
        let mut flush = flush;
        tx.treat(entry.qp.attr().treatment);
        // What is left of the message of the packet built last.
        let mut rest = 0;
        let mtu = entry.qp.attr().path_mtu.bytes();
        while entry.turn_left > 0 {
            // The last packet of a message would begin a send of its own in the next batch, too.
            let ends_next = (1..=mtu).contains(&rest);
            if !tx.has_room() || (tx.ends_with_full_send() && !ends_next) {
                turn = Turn::BatchFull;
                break;
            }
            if flush && !entry.may_send() && !entry.qp.has_replies() {
                turn = Turn::Done;
                break;
            }
            let used = entry.qp.outstanding().saturating_sub(charged);
            let left = room.saturating_sub(used);
            let next = if answer_waits {
                next_request(entry, &regions.stage, now, left)
            } else {
                next_packet(entry, &regions.stage, now, left, flush)
            };
            let Some(mut transmit) = next else {
                if carry_out_local(entry, regions) {
                    continue;
                }
                turn = Turn::Done;
                break;
            };
            entry.turn_left -= 1;
            if shared && entry.turn_left == 0 && transmit.header.opcode.is_acknowledged() {
                // Others have their turn next: what this one has under way must not wait for its own next turn to
                // be acknowledged, or it would hold back the room that all share.
                transmit.header.ack_req = true;
            }
            if unreliable {
                tx.treat(entry.qp.treatment());
                entry.choose_way(&transmit.header);
            }
            match build(entry, tx, regions, &transmit) {
                Ok(Built::Done(route)) => {
                    flush = true;
                    if unreliable {
                        entry.note_direction(&transmit.header, near);
                    }
                    let is_new = entry.note_sent(&transmit.header);
                    let len = u64::from(transmit.payload.len());
                    if len > 0 && is_new {
                        entry.tally.outbound.count(route, len, transmit.payload.rest() == 0);
                    }
                    if transmit.payload.rest() == 0 {
                        continue; // the last of its message
                    }
                    let used = entry.qp.outstanding().saturating_sub(charged);
                    // One less than its turn has left where the last one is looked at (see above).
                    let most = (tx.room_for(packet_len(&transmit)) as u64)
                        .min(entry.turn_left.saturating_sub(u64::from(shared)))
                        .min(ready_repeats(entry, &transmit, route));
                    let repeats = entry.qp.poll_repeat(now, &transmit, room.saturating_sub(used), most);
                    if repeats > 0 {
                        entry.turn_left -= repeats;
                        let first = transmit.header.psn.next();
                        if let Err(nak) = build_repeats(entry, tx, regions, &mut transmit, repeats) {
                            faulted = Some((transmit, nak));
                            break;
                        }
                        let new = entry.note_repeats(&transmit.header, first, repeats);
                        entry.tally.outbound.count(route, new * len, false);
                    }
                    rest = transmit.payload.rest();
                }
                Ok(Built::Pending { after, starved: no_chunk }) => {
                    entry.hold_packet(after, transmit);
                    *starved |= no_chunk;
                    if transmit.header.opcode.is_response() {
                        answer_waits = true;
                        continue;
                    }
                    turn = Turn::Done;
                    break;
                }
                Err(nak) => {
                    faulted = Some((transmit, nak));
                    break;
                }
            }
        }
        if ready.is_empty() {
            tx.show();
        }
        tx.treat(Treatment::default());
        if unreliable && turn != Turn::BatchFull {
            if !tx.has_room() {
                turn = Turn::BatchFull;
            } else if let Some((to, marker)) = entry.marker(now) {
                put_marker(tx, to, port_hint(entry), &marker);
                counters.sent_markers += 1;
            }
        }
        if entry.joins_holding() {
            holding.push(index);
        }
        if turn != Turn::BatchFull {
            entry.turn_left = entry.whole_turn(shared);
        }
        if turn == Turn::Done {
            if let Some(path) = entry.path
                && entry.qp.is_path_limited()
                && !entry.waiting
            {
                entry.waiting = true;
                paths.wait(path, index);
            }
            if entry.qp.has_replies() {
                entry.owe(now, owing);
            }
        }
        if let Some((transmit, nak)) = faulted {
            entry.qp.handle_gather_fault(&transmit, nak);
            self.settle(index);
        } else if entry.qp.has_completions() {
            // Of an unreliable service: what has left is done.
            self.settle(index);
        } else {
            self.recharge(index);
        }
        if let Some(path) = path {
            self.wake_waiting(path);
        }
        self.arm(index);
        turn
    }
}

/// Which of the answers that can wait leave now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    /// Those that find a request to travel with.
    Travelling,
    /// Those that have waited long enough, too.
    Due,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// It has nothing more to send for now.
    Done,
    /// Its turn is over, but it has more.
    More,
    BatchFull,
}
