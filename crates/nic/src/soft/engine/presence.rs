//! Keep-alives: whether peers that are reached by UDP still live.
//!
//! A NIC learns of a dead peer only by sending. A queue pair that waits for its peer, with nothing
//! in flight, would never learn of it. So each peer gets a request in every interval
//! ([`Presence`]), and one that answered before and is silent for [`LOST_AFTER`] intervals is dead:
//! its queue pairs end in error, as after exhausted retries. Every queue pair keeps the generation
//! of its peer's first answer. Where a later answer has another one, the peer was started
//! anew, and its end of that queue pair did not survive. A peer that never answers is another RoCE
//! device, and is left alone.
//!
//! Every nobounce device answers, whether it asks or not.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use nobounce_protocol::qp::QpState;
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Capabilities, Presence, Qpn};

use crate::links::{RxDatagram, TxBatch};
use crate::process::random::random_u32;
use crate::soft::engine::Core;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::timer::Timer;
use crate::soft::limits::RESPONDER_RESOURCES;

/// Intervals of silence after which a peer is dead.
const LOST_AFTER: u64 = 3;
/// Requests to a peer that has never answered.
const MAX_REQUESTS: u32 = 10;
/// Answers that wait to be sent.
const MAX_ANSWERS: usize = 64;

/// What this device announces.
const OURS: u64 = Capabilities::OURS & !Capabilities::SELECTIVE;

/// A peer: its address and slot.
type PeerName = (IpAddr, u8);

#[derive(Debug)]
struct KnownPeer {
    nonce: u32,
    /// Requests since its last answer.
    asked: u32,
    /// Of its last answer; `None` before the first one.
    generation: Option<u64>,
    heard: Nanos,
}

/// What the engine knows of its peers' presence.
#[derive(Debug)]
pub(crate) struct Presences {
    interval: Option<Nanos>,
    generation: u64,
    peers: HashMap<PeerName, KnownPeer>,
    answers: Vec<(IpAddr, Presence)>,
    requests: Vec<(IpAddr, Presence)>,
    /// The timer is running.
    armed: bool,
}

impl Presences {
    /// Asks peers once in this interval, if there is one.
    pub(crate) fn new(interval: Option<Duration>) -> Self {
        let interval =
            interval.map(|interval| Nanos::try_from(interval.as_nanos()).unwrap_or(Nanos::MAX / 8));
        Self {
            interval,
            generation: u64::from(random_u32()) << 32 | u64::from(random_u32()),
            peers: HashMap::new(),
            answers: Vec::new(),
            requests: Vec::new(),
            armed: false,
        }
    }

    /// Whether something is to be sent.
    pub(crate) fn has_work(&self) -> bool {
        !self.answers.is_empty() || !self.requests.is_empty()
    }

    /// Puts requests and answers into the batch; whether it is full.
    pub(crate) fn fill(&mut self, tx: &mut TxBatch) -> bool {
        while self.has_work() {
            if !tx.has_room() {
                return true;
            }
            let Some((to, presence)) = self.answers.pop().or_else(|| self.requests.pop()) else { break };
            tx.put(to, 0, Presence::LEN, |room| presence.emit(room));
        }
        false
    }
}

/// A peer as the queue pairs see it.
struct Seen {
    ours: Qpn,
    theirs: Qpn,
    heard: Nanos,
}

impl Core {
    /// A queue pair was connected.
    pub(crate) fn expect_presence(&mut self, now: Nanos) {
        if self.presences.interval.is_some() && !self.presences.armed {
            self.presences.armed = true;
            self.scheduler.timers.push(Reverse((now, Timer::KeepAlive)));
        }
    }

    /// The peers that connected queue pairs reach by UDP.
    fn distant_peers(&self) -> HashMap<PeerName, Seen> {
        let mut peers: HashMap<PeerName, Seen> = HashMap::new();
        for entry in self.qps.iter().flatten() {
            let connected = matches!(entry.qp.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
            if !connected || !entry.qp.service().is_reliable() || entry.route.ring.is_some() {
                continue;
            }
            let (ours, theirs, heard) = (entry.qpn, entry.qp.attr().dest_qpn, entry.schedule.heard);
            let seen = peers.entry(entry.peer()).or_insert(Seen { ours, theirs, heard });
            seen.heard = seen.heard.max(heard);
        }
        peers
    }

    /// Asks every peer, and gives up those that are silent.
    #[cold]
    pub(crate) fn ask_for_presence(&mut self, now: Nanos) {
        let Some(interval) = self.presences.interval else { return };
        let seen = self.distant_peers();
        self.presences.peers.retain(|name, _| seen.contains_key(name));
        self.presences.armed = !seen.is_empty();
        let mut lost = Vec::new();
        let generation = self.presences.generation;
        for (name, Seen { ours, theirs, heard }) in seen {
            let peer = self.presences.peers.entry(name).or_insert_with(|| KnownPeer {
                nonce: random_u32(),
                asked: 0,
                generation: None,
                heard: now,
            });
            let silent = now.saturating_sub(peer.heard.max(heard));
            // Time alone does not tell: this process may have been stopped.
            let unanswered = u64::from(peer.asked) >= LOST_AFTER;
            if peer.generation.is_some() && unanswered && silent >= LOST_AFTER * interval {
                lost.push(name);
                continue;
            }
            if peer.generation.is_none() && peer.asked >= MAX_REQUESTS {
                if peer.asked == MAX_REQUESTS {
                    tracing::info!(peer = %name.0, "no answer to keep-alives: another RoCE device, whose end goes unnoticed");
                    peer.asked += 1;
                }
                continue;
            }
            peer.asked += 1;
            let request = Presence {
                is_answer: false,
                to: theirs,
                from: ours,
                version: Presence::VERSION,
                nonce: peer.nonce,
                generation,
                capabilities: OURS,
            };
            self.presences.requests.push((name.0, request));
        }
        for name in lost {
            let seconds = LOST_AFTER * interval / 1_000_000_000;
            tracing::warn!(peer = %name.0, "no sign of life for {seconds} s: its queue pairs here end in error");
            self.give_up(name, now);
        }
        if self.presences.armed {
            self.scheduler.timers.push(Reverse((now + interval, Timer::KeepAlive)));
        }
    }

    fn give_up(&mut self, name: PeerName, now: Nanos) {
        self.presences.peers.remove(&name);
        for entry in self.qps.iter_mut().flatten().filter(|entry| entry.peer() == name) {
            entry.ends_at = Some(now);
        }
        self.scheduler.timers.push(Reverse((now, Timer::PeerDeath)));
    }

    /// Handles a request or an answer; false if the packet is neither, or not from a peer.
    #[cold]
    pub(crate) fn handle_presence(&mut self, now: Nanos, datagram: &RxDatagram<'_>) -> bool {
        let Some(presence) = Presence::parse(datagram.bytes) else { return false };
        let from = datagram.src;
        let ours = presence.to.get() >> 16 == u32::from(self.slot);
        if !ours || (datagram.has_icrc && !self.check_icrc(datagram)) {
            return false;
        }
        // The queue pair may be gone while others to the same peer live.
        let is_of_peer = |entry: &QueuePair| entry.qp.attr().remote == from;
        let is_peer = self.entry(presence.to).is_some_and(|entry| is_of_peer(entry))
            || self.qps.iter().flatten().any(|entry| is_of_peer(entry));
        if !is_peer {
            return false;
        }
        let [_, slot, ..] = presence.from.get().to_be_bytes();
        if !presence.is_answer {
            if let Some(peer) = self.presences.peers.get_mut(&(from, slot)) {
                // It lives, and knows us now.
                peer.heard = now;
                if peer.generation.is_none() {
                    peer.asked = 0;
                }
            }
            if self.presences.answers.len() < MAX_ANSWERS {
                self.presences.answers.push((from, presence.answer(self.presences.generation, OURS)));
            }
            return true;
        }
        let Some(peer) = self.presences.peers.get_mut(&(from, slot)) else { return false };
        if peer.nonce != presence.nonce || presence.capabilities & Capabilities::KEEP_ALIVE == 0 {
            return false;
        }
        (peer.generation, peer.heard, peer.asked) = (Some(presence.generation), now, 0);
        let mut stale = false;
        let has_resources = presence.capabilities & Capabilities::RESPONDER_RESOURCES != 0;
        for entry in self.qps.iter_mut().flatten().filter(|entry| entry.peer() == (from, slot)) {
            let known = entry.schedule.peer_generation.get_or_insert(presence.generation);
            if *known != presence.generation {
                entry.ends_at = Some(now);
                stale = true;
            } else if has_resources {
                entry.qp.set_peer_resources(RESPONDER_RESOURCES);
            }
        }
        if stale {
            tracing::warn!(peer = %from, "its device was opened anew: queue pairs to the old one end in error");
            self.scheduler.timers.push(Reverse((now, Timer::PeerDeath)));
        }
        true
    }
}
