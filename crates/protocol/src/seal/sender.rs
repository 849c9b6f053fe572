//! The sending half: sessions by peer, and salts for datagrams.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::header::{HEADER_LEN, Kind, SealedHeader};
use super::keys::{ERA_BITS, Ends, FlowKey, FlowOf, Master};
use super::message::SessionNonce;
use super::random::Random;
use crate::timing::{MILLISECOND, Nanos};
use crate::wire::Qpn;

/// Peers with a session at a time. The one unused for longest makes room.
const MAX_PEERS: usize = 4096;
/// Destinations of datagrams. Beyond it all get new salts.
const MAX_DATAGRAM_PEERS: usize = 1024;
/// Requests for a session, each after twice the time of the one before.
const MAX_ASKS: u32 = 7;
/// When the second request is sent.
const FIRST_ASK: Nanos = 5 * MILLISECOND;
/// How long a peer that did not answer is left alone.
const SILENCE: Nanos = 500 * MILLISECOND;

/// A peer: an address and a slot there.
pub(super) type PeerName = (IpAddr, u8);

/// What to do with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealDecision {
    /// Seal it now.
    Ready(SealFlow),
    /// Keep it: a hello for its session is under way.
    Wait,
    /// Drop it: the peer does not answer.
    Refused,
}

/// What a packet is sealed for; valid until the next call that takes the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealFlow(pub(super) FlowName);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlowName {
    Session(usize),
    Datagram(Ends),
}

#[derive(Debug)]
struct TxSession {
    master: Arc<Master>,
    number: u64,
    key: FlowKey,
    next: u64,
}

/// A request on its way.
#[derive(Debug)]
struct Ask {
    master: Arc<Master>,
    nonce: SessionNonce,
    /// When it was sent first, in microseconds.
    time: u64,
    sent: u32,
    /// When it is sent again.
    at: Nanos,
}

#[derive(Debug)]
struct TxPeer {
    name: PeerName,
    session: Option<TxSession>,
    ask: Option<Ask>,
    silent_until: Nanos,
    used: Nanos,
}

#[derive(Debug)]
struct TxDatagrams {
    master: Arc<Master>,
    salt: u64,
    key: FlowKey,
    next: u32,
}

/// A request to send: the secret to sign it by, the peer, its nonce and its time.
pub(super) type Asking = (Arc<Master>, PeerName, (SessionNonce, u64));

#[derive(Debug, Default)]
pub(super) struct SealSender {
    peers: Vec<TxPeer>,
    places: HashMap<PeerName, usize>,
    /// The place of the peer that was looked for last.
    last: usize,
    datagrams: HashMap<Ends, TxDatagrams>,
}

impl SealSender {
    #[inline]
    fn find(&mut self, name: PeerName) -> Option<usize> {
        if self.peers.get(self.last).is_some_and(|peer| peer.name == name) {
            return Some(self.last);
        }
        let place = *self.places.get(&name)?;
        self.last = place;
        Some(place)
    }

    fn add(&mut self, name: PeerName, now: Nanos) -> usize {
        let peer = TxPeer { name, session: None, ask: None, silent_until: 0, used: now };
        let place = if self.peers.len() < MAX_PEERS {
            self.peers.push(peer);
            self.peers.len() - 1
        } else {
            let used = self.peers.iter().enumerate().min_by_key(|(_, peer)| peer.used);
            let place = used.map_or(0, |(place, _)| place);
            let last = std::mem::replace(&mut self.peers[place], peer);
            self.places.remove(&last.name);
            place
        };
        self.places.insert(name, place);
        place
    }

    /// What to do with a packet to that peer, and the request to send for it.
    pub(super) fn route(
        &mut self,
        (now, time): (Nanos, u64),
        name: PeerName,
        master: &Arc<Master>,
        random: &mut Random,
    ) -> (SealDecision, Option<Asking>) {
        let place = self.find(name).unwrap_or_else(|| self.add(name, now));
        let peer = &mut self.peers[place];
        peer.used = now;
        let session = peer.session.as_ref();
        let is_current = session.is_some_and(|session| session.master.is_same(master));
        let asks = !is_current && peer.ask.is_none() && now >= peer.silent_until;
        let asking = asks.then(|| peer.ask((now, time), master, random));
        let route = match (&peer.session, &peer.ask) {
            (Some(_), _) => SealDecision::Ready(SealFlow(FlowName::Session(place))),
            (None, Some(_)) => SealDecision::Wait,
            (None, None) => SealDecision::Refused,
        };
        (route, asking)
    }

    /// Seals a packet of a session: `packet` has room for the header before it and the tag behind.
    #[inline]
    pub(super) fn seal_session(&mut self, place: usize, mut header: SealedHeader, packet: &mut [u8]) -> bool {
        let Some(session) = self.peers.get_mut(place).and_then(|peer| peer.session.as_mut()) else {
            return false;
        };
        header.key_id = session.master.id;
        (header.flow, header.counter) = (session.number, session.next);
        session.next += 1;
        put(&header, packet);
        session.key.seal(header.counter, header.encrypted, packet);
        true
    }

    /// Seals a datagram.
    pub(super) fn seal_datagram(
        &mut self,
        unix: u64,
        ends: Ends,
        mut header: SealedHeader,
        packet: &mut [u8],
        (master, random): (&Arc<Master>, &mut Random),
    ) {
        let known = self.datagrams.get(&ends);
        if known.is_none_or(|flow| !flow.master.is_same(master) || flow.next >> ERA_BITS != 0) {
            if self.datagrams.len() >= MAX_DATAGRAM_PEERS {
                self.datagrams.clear();
            }
            let salt = random.number();
            let key = master.flow_key(FlowOf::Datagrams, &ends, &[&salt.to_be_bytes()]);
            self.datagrams.insert(ends, TxDatagrams { master: master.clone(), salt, key, next: 0 });
        }
        let Some(flow) = self.datagrams.get_mut(&ends) else { return };
        header.key_id = master.id;
        (header.flow, header.counter) = (flow.salt, unix << 32 | u64::from(flow.next));
        flow.next += 1;
        put(&header, packet);
        flow.key.seal(header.counter, header.encrypted, packet);
    }

    /// The peer answered; whether the answer is for the request that waits.
    pub(super) fn handle_reply(
        &mut self,
        name: PeerName,
        ends: &Ends,
        (ask, answer): (&SessionNonce, &SessionNonce),
        number: u64,
    ) -> bool {
        let Some(place) = self.find(name) else { return false };
        let peer = &mut self.peers[place];
        let Some(asked) = peer.ask.take_if(|asked| asked.nonce == *ask) else { return false };
        let key = asked.master.flow_key(FlowOf::Session, ends, &[ask, answer]);
        peer.session = Some(TxSession { master: asked.master, number, key, next: 0 });
        true
    }

    /// The peer does not know the session: asks for another one.
    pub(super) fn handle_stale(
        &mut self,
        (now, time): (Nanos, u64),
        name: PeerName,
        number: u64,
        master: &Arc<Master>,
        random: &mut Random,
    ) -> Option<Asking> {
        let place = self.find(name)?;
        let peer = &mut self.peers[place];
        peer.session.take_if(|session| session.number == number)?;
        peer.ask.is_none().then(|| peer.ask((now, time), master, random))
    }

    /// Requests that are due, and peers that were asked often enough.
    pub(super) fn handle_timeout(&mut self, now: Nanos) -> (Vec<Asking>, Vec<PeerName>) {
        let (mut again, mut silent) = (Vec::new(), Vec::new());
        for peer in &mut self.peers {
            let Some(ask) = peer.ask.as_mut().filter(|ask| ask.at <= now) else { continue };
            if ask.sent < MAX_ASKS {
                ask.at = now + (FIRST_ASK << ask.sent);
                ask.sent += 1;
                again.push((ask.master.clone(), peer.name, (ask.nonce, ask.time)));
            } else {
                peer.ask = None;
                peer.silent_until = now + SILENCE;
                silent.push(peer.name);
            }
        }
        (again, silent)
    }

    /// When a request is due.
    pub(super) fn poll_timeout(&self) -> Option<Nanos> {
        self.peers.iter().filter_map(|peer| peer.ask.as_ref()).map(|ask| ask.at).min()
    }

    /// Forgets what belongs to secrets that are no longer used.
    pub(super) fn keep(&mut self, is_used: impl Fn(&Master) -> bool) {
        for peer in &mut self.peers {
            peer.session.take_if(|session| !is_used(&session.master));
            peer.ask.take_if(|ask| !is_used(&ask.master));
        }
        self.datagrams.retain(|_, flow| is_used(&flow.master));
    }
}

impl TxPeer {
    fn ask(&mut self, (now, time): (Nanos, u64), master: &Arc<Master>, random: &mut Random) -> Asking {
        let nonce = random.nonce();
        self.ask = Some(Ask { master: master.clone(), nonce, time, sent: 1, at: now + FIRST_ASK });
        (master.clone(), self.name, (nonce, time))
    }
}

#[inline]
fn put(header: &SealedHeader, packet: &mut [u8]) {
    if let Some(room) = packet.first_chunk_mut::<HEADER_LEN>() {
        *room = header.emit();
    }
}

/// The header of a packet, but for what the flow adds.
#[inline]
pub(super) fn header_of(kind: Kind, encrypted: bool, slot: u8, ip_id: u16, to: Qpn) -> SealedHeader {
    let ip_id = u8::try_from(ip_id).unwrap_or(0);
    SealedHeader { kind, encrypted, ip_id, slot, key_id: 0, to, flow: 0, counter: 0 }
}
