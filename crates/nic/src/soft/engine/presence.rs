//! What peers that are reached by UDP can do, and whether they still live.
//!
//! A device asks each peer for its version and capabilities ([`Presence`]) when a queue pair
//! connects, and again with growing delays until it answers. A peer that never answers is another
//! RoCE device, and is left alone.
//!
//! Keep-alives: a NIC learns of a dead peer only by sending. A queue pair that waits for its peer,
//! with nothing in flight, would never learn of it. With keep-alives each peer gets a request in
//! every interval, and one that answered before and is silent for [`LOST_AFTER`] intervals is dead:
//! its queue pairs end in error, as after exhausted retries. Every queue pair keeps the generation
//! of its peer's first answer. Where a later answer has another one, the peer was started
//! anew, and its end of that queue pair did not survive.
//!
//! Every nobounce device answers, whether it asks or not.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use nobounce_protocol::qp::QpState;
use nobounce_protocol::timing::{MILLISECOND, Nanos};
use nobounce_protocol::wire::{Capabilities, Presence, Qpn};

use crate::links::{PeerName, RxDatagram, TxBatch, peer_name};
use crate::process::random::random_u32;
use crate::soft::config::{Config, Retransmit};
use crate::soft::engine::Core;
use crate::soft::engine::path_probe::PathProbes;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::timer::Timer;
use crate::soft::limits::RESPONDER_RESOURCES;
use crate::soft::qp_index::QpIndex;

/// Intervals of silence after which a peer is dead.
const LOST_AFTER: u64 = 3;
/// Requests to a peer that has never answered.
const MAX_REQUESTS: u32 = 10;
/// Answers that wait to be sent.
const MAX_ANSWERS: usize = 64;

/// The second request follows the first one so soon; each later one takes twice as long.
const FIRST_DELAY: Nanos = 10 * MILLISECOND;

/// What peers are asked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PresenceConfig {
    /// How often they are asked whether they live.
    keep_alive: Option<Duration>,
    /// Whether this device retransmits selectively, and asks peers whether they do.
    selective: bool,
}

impl PresenceConfig {
    pub(crate) fn of(config: &Config) -> Self {
        Self { keep_alive: config.keep_alive, selective: config.retransmit == Retransmit::Auto }
    }
}

#[derive(Debug)]
struct KnownPeer {
    nonce: u32,
    /// Requests since its last answer.
    asked: u32,
    /// Of its last answer; `None` before the first one.
    generation: Option<u64>,
    heard: Nanos,
    /// When it is asked next.
    next_at: Option<Nanos>,
}

impl KnownPeer {
    fn new(now: Nanos) -> Self {
        Self { nonce: random_u32(), asked: 0, generation: None, heard: now, next_at: Some(now) }
    }
}

/// What this device says of itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnPresence {
    /// It retransmits selectively.
    selective: bool,
    generation: u64,
    /// KiB of its socket buffer.
    receive_room: u16,
}

impl OwnPresence {
    /// A request from this device.
    pub(super) const fn request(&self, to: Qpn, from: Qpn, nonce: u32) -> Presence {
        Presence {
            is_answer: false,
            to,
            from,
            version: Presence::VERSION,
            nonce,
            generation: self.generation,
            capabilities: self.capabilities(),
            receive_room: self.receive_room,
        }
    }

    /// The answer to a request.
    fn answer(&self, request: &Presence) -> Presence {
        request.answer(self.generation, self.capabilities(), self.receive_room)
    }

    const fn capabilities(&self) -> u64 {
        if self.selective { Capabilities::OURS } else { Capabilities::OURS & !Capabilities::SELECTIVE }
    }
}

/// What the engine knows of its peers' presence.
#[derive(Debug)]
pub(crate) struct Presences {
    interval: Option<Nanos>,
    pub(super) ours: OwnPresence,
    peers: HashMap<PeerName, KnownPeer>,
    pub(crate) probes: PathProbes,
    answers: Vec<(IpAddr, Presence)>,
    requests: Vec<(IpAddr, Presence)>,
    /// When the timer fires.
    armed: Option<Nanos>,
}

impl Presences {
    pub(crate) fn new(config: PresenceConfig, receive_room: u64) -> Self {
        let interval =
            config.keep_alive.map(|interval| Nanos::try_from(interval.as_nanos()).unwrap_or(Nanos::MAX / 8));
        Self {
            interval,
            ours: OwnPresence {
                selective: config.selective,
                generation: u64::from(random_u32()) << 32 | u64::from(random_u32()),
                receive_room: u16::try_from(receive_room >> 10).unwrap_or(u16::MAX),
            },
            peers: HashMap::new(),
            probes: PathProbes::default(),
            answers: Vec::new(),
            requests: Vec::new(),
            armed: None,
        }
    }

    /// Whether this device retransmits selectively.
    pub(crate) const fn is_selective(&self) -> bool {
        self.ours.selective
    }

    /// Whether something is to be sent.
    pub(crate) fn has_work(&self) -> bool {
        !self.answers.is_empty() || !self.requests.is_empty() || self.probes.has_work()
    }

    /// Puts requests and answers into the batch; whether it is full.
    pub(crate) fn fill(&mut self, tx: &mut TxBatch) -> bool {
        while !self.answers.is_empty() || !self.requests.is_empty() {
            if !tx.has_room() {
                return true;
            }
            let Some((to, presence)) = self.answers.pop().or_else(|| self.requests.pop()) else { break };
            tx.put(to, 0, Presence::LEN, |room| presence.emit(room));
        }
        self.probes.fill(tx)
    }
}

/// A peer as the queue pairs see it.
struct Seen {
    ours: Qpn,
    theirs: Qpn,
    heard: Nanos,
}

impl Core {
    /// A queue pair was connected: its peer is asked soon, also if it answered before.
    pub(crate) fn expect_presence(&mut self, now: Nanos, index: QpIndex) {
        let Presences { interval, ours: OwnPresence { selective, .. }, .. } = self.presences;
        let Some(entry) = self.qps.get(index) else { return };
        if entry.route.local.is_some()
            || !entry.qp.service().is_reliable()
            || !(selective || interval.is_some())
        {
            return;
        }
        let name = entry.peer();
        let peer = self.presences.peers.entry(name).or_insert_with(|| KnownPeer::new(now));
        (peer.asked, peer.next_at) = (0, Some(now));
        self.arm_presence(now);
    }

    fn arm_presence(&mut self, at: Nanos) {
        if self.presences.armed.is_none_or(|armed| at < armed) {
            self.presences.armed = Some(at);
            self.scheduler.set_timer(at, Timer::KeepAlive);
        }
    }

    /// The peers that connected queue pairs reach by UDP.
    fn distant_peers(&self) -> HashMap<PeerName, Seen> {
        let mut peers: HashMap<PeerName, Seen> = HashMap::new();
        for entry in self.qps.iter() {
            let connected = matches!(entry.qp.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
            if !connected || !entry.qp.service().is_reliable() || entry.route.local.is_some() {
                continue;
            }
            let (ours, theirs, heard) = (entry.qpn, entry.qp.attr().dest_qpn, entry.schedule.heard);
            let seen = peers.entry(entry.peer()).or_insert(Seen { ours, theirs, heard });
            seen.heard = seen.heard.max(heard);
        }
        peers
    }

    /// Asks the peers whose turn it is, and gives up those that are silent.
    #[cold]
    pub(crate) fn ask_for_presence(&mut self, now: Nanos) {
        if self.presences.armed.take_if(|armed| *armed <= now).is_none() {
            return; // an earlier timer has done it
        }
        let seen = self.distant_peers();
        self.presences.peers.retain(|name, _| seen.contains_key(name));
        let mut lost = Vec::new();
        let interval = self.presences.interval;
        let mut next: Option<Nanos> = None;
        for (name, Seen { ours, theirs, heard }) in seen {
            let peer = self.presences.peers.entry(name).or_insert_with(|| KnownPeer::new(now));
            let Some(at) = peer.next_at else { continue };
            if at > now {
                next = Some(next.map_or(at, |next| next.min(at)));
                continue;
            }
            let silent = now.saturating_sub(peer.heard.max(heard));
            // Time alone does not tell: this process may have been stopped.
            let unanswered = u64::from(peer.asked) >= LOST_AFTER;
            if let Some(interval) = interval
                && peer.generation.is_some()
                && unanswered
                && silent >= LOST_AFTER * interval
            {
                lost.push(name);
                continue;
            }
            if (peer.generation.is_none() || interval.is_none()) && peer.asked >= MAX_REQUESTS {
                tracing::info!(peer = %name.0, "no answer to requests: another RoCE device; go-back-N, and its end goes unnoticed");
                peer.next_at = None;
                continue;
            }
            let delay = FIRST_DELAY << peer.asked.min(MAX_REQUESTS);
            let again = match (peer.generation, interval) {
                // Until it answers, and then for the keep-alives.
                (None, Some(interval)) => now + delay.min(interval),
                (Some(_), Some(interval)) => now + interval,
                (_, None) => now + delay,
            };
            peer.next_at = Some(again);
            peer.asked += 1;
            next = Some(next.map_or(again, |next| next.min(again)));
            let nonce = peer.nonce;
            let request = self.presences.ours.request(theirs, ours, nonce);
            self.presences.requests.push((name.0, request));
        }
        for name in lost {
            let seconds = LOST_AFTER * interval.unwrap_or(0) / 1_000_000_000;
            tracing::warn!(peer = %name.0, "no sign of life for {seconds} s: its queue pairs here end in error");
            self.give_up(name, now);
        }
        if let Some(next) = next {
            self.arm_presence(next);
        }
    }

    fn give_up(&mut self, name: PeerName, now: Nanos) {
        self.presences.peers.remove(&name);
        for entry in self.qps.iter_mut().filter(|entry| entry.peer() == name) {
            entry.ends_at = Some(now);
        }
        self.scheduler.set_timer(now, Timer::PeerDeath);
    }

    /// Handles a request or an answer; false if the packet is neither, or not from a peer.
    #[cold]
    pub(crate) fn handle_presence(&mut self, now: Nanos, datagram: &RxDatagram<'_>) -> bool {
        let Some(presence) = Presence::parse(datagram.bytes) else { return false };
        let from = datagram.src;
        let ours = self.qps.owns(presence.to);
        if !ours || (datagram.has_icrc && !self.icrc.is_valid(self.local, datagram)) {
            return false;
        }
        // The queue pair may be gone while others to the same peer live.
        let is_of_peer = |entry: &QueuePair| entry.qp.attr().remote == from;
        let is_peer =
            self.entry(presence.to).is_some_and(|entry| is_of_peer(entry)) || self.qps.iter().any(is_of_peer);
        if !is_peer {
            // A peer that was connected first asks before our end is: it asks again.
            return !presence.is_answer;
        }
        let name = peer_name(from, presence.from);
        let is_selective = presence.capabilities & Capabilities::SELECTIVE != 0;
        if !presence.is_answer {
            if let Some(peer) = self.presences.peers.get_mut(&name) {
                // It lives, and knows us now.
                peer.heard = now;
                if peer.generation.is_none() {
                    peer.asked = 0;
                    if peer.next_at.is_none() {
                        peer.next_at = Some(now);
                        self.arm_presence(now);
                    }
                }
            }
            if self.presences.answers.len() < MAX_ANSWERS {
                let answer = self.presences.ours.answer(&presence);
                self.presences.answers.push((from, answer));
            }
            return true;
        }
        if self.presences.probes.hear(name, presence.nonce) {
            return true;
        }
        let has_interval = self.presences.interval.is_some();
        let Some(peer) = self.presences.peers.get_mut(&name) else { return false };
        if peer.nonce != presence.nonce || presence.capabilities & Capabilities::KEEP_ALIVE == 0 {
            return false;
        }
        (peer.generation, peer.heard, peer.asked) = (Some(presence.generation), now, 0);
        if !has_interval {
            peer.next_at = None;
        }
        let mut stale = false;
        let has_resources = presence.capabilities & Capabilities::RESPONDER_RESOURCES != 0;
        for entry in self.qps.iter_mut().filter(|entry| entry.peer() == name) {
            let known = entry.schedule.peer_generation.get_or_insert(presence.generation);
            if *known != presence.generation {
                if has_interval {
                    entry.ends_at = Some(now);
                    stale = true;
                }
                continue;
            }
            if has_resources {
                entry.qp.set_peer_resources(RESPONDER_RESOURCES);
            }
            // Earlier versions tell none.
            if let Some(path) = entry.schedule.path.filter(|_| presence.receive_room > 0) {
                self.scheduler.paths.set_receive_room(path, u64::from(presence.receive_room) << 10);
            }
        }
        if is_selective {
            self.retransmit_selectively(now, name, presence.generation);
        }
        if stale {
            tracing::warn!(peer = %from, "its device was opened anew: queue pairs to the old one end in error");
            self.scheduler.set_timer(now, Timer::PeerDeath);
        }
        true
    }
}
