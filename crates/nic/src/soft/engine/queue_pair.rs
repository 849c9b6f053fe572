//! One queue pair with its queues, and its pending responses and packets.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use nobounce_protocol::qp::{Completion, Datagram, Qp as ProtocolQp, QpState, Transmit, WorkKind};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Header, Marker, Opcode, Psn, Qpn, Service, Syndrome};

use crate::links::rings::PeerRing;
use crate::process::cpu::has_many_cpus;
use crate::soft::engine::cq_state::CqInner;
use crate::soft::engine::host::{PostedReceive, PostedSend};
use crate::soft::engine::memory_windows::Accessor;
use crate::soft::engine::mixed::Mixed;
use crate::soft::engine::once::Once;
use crate::soft::engine::path::PathIndex;
use crate::soft::engine::srqs::SrqIndex;
use crate::soft::engine::submission::WorkQueues;
use crate::soft::gpu::prefetch::{Origin, Prefetch};
use crate::soft::gpu::staging::{CopyOwner, Staging};
use crate::soft::local::local_peers::LocalPeers;
use crate::soft::local::routes::{Routes, addressee};
use crate::tally::PathCounters;

/// One queue pair with its queues.
#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) qpn: Qpn,
    pub(crate) qp: ProtocolQp,
    pub(crate) pd: u32,
    pub(crate) send_cq: Arc<CqInner>,
    pub(crate) recv_cq: Arc<CqInner>,
    pub(crate) sends: VecDeque<PostedSend>,
    /// Its own receives: empty if it uses a shared receive queue.
    pub(crate) receives: VecDeque<PostedReceive>,
    /// The shared receive queue that it takes receives from.
    pub(crate) srq: Option<SrqIndex>,
    /// The protection domain of its receives' memory.
    pub(crate) receive_pd: u32,
    /// It has reported its last receive from the shared queue.
    pub(crate) said_last: bool,
    pub(crate) current: Option<PostedReceive>,
    pub(crate) path: Option<PathIndex>,
    /// Bytes that this queue pair has charged to its path.
    pub(crate) charged: u64,
    /// It is in the list of queue pairs with received packets.
    pub(crate) touched: bool,
    /// Those packets included a response: it may send more.
    pub(crate) answered: bool,
    /// Packets left in its turn.
    pub(crate) turn_left: u64,
    /// It is in the ready queue.
    pub(crate) ready: bool,
    /// The destination of its last packet of an unreliable service.
    direction: Option<(IpAddr, Qpn)>,
    /// It waits for room on its path.
    pub(crate) waiting: bool,
    /// It is in a list of queue pairs with a delayed ACK.
    pub(crate) has_pending_ack: bool,
    /// When its peer's last request arrived, until the application posts. 0: none since.
    heard_at: Nanos,
    /// Its peer's last packet belonged to a long message.
    pub(crate) heard_long: bool,
    /// Ping-pong detection: how often in a row the application followed the peer's request at once
    /// with its own.
    ping_pongs: u8,
    /// Its earliest entry in the timer heap.
    pub(crate) armed: Option<Nanos>,
    /// The ring of a same-host peer, in which its packets are built; they have no ICRC.
    pub(crate) ring: Option<Arc<PeerRing>>,
    /// Its peer's process was killed: when it goes to the error state.
    pub(crate) ends_at: Option<Nanos>,
    /// Prefetched bytes of its outbound messages, for GPU memory.
    pub(crate) prefetches: Option<Box<Prefetches>>,
    /// The ticket of the copy that its last placed byte waits for.
    pub(crate) ticket: u64,
    /// The peer's first packet that no sent response covers. `None`: no response has left.
    pub(crate) unanswered: Option<Psn>,
    /// Its requests and responses whose payload has been counted.
    requests: Once,
    answers: Once,
    /// What waits for copies.
    pub(crate) held: Option<Box<Held>>,
    /// The routes of its datagrams, for UD; `ring` is then that of the last packet.
    pub(crate) routes: Option<Box<Routes>>,
    pub(crate) tally: PathCounters,
    /// Free places in its work queues, as posters see them.
    pub(crate) work_queues: Arc<WorkQueues>,
    /// Depth of its send queue.
    pub(crate) send_depth: usize,
}

/// Packets that a queue pair may send in its round-robin turn: one full segmented send. (Two: 64
/// queue pairs together reach 0.6 of one instead of 0.9.)
const TURN: u64 = 15;

/// The same through shared memory, where the route is its own: a whole piece of a READ.
const NEAR_TURN: u64 = 32;

/// This many requests in a row that follow the peer's make a ping-pong pattern.
const PING_PONG: u8 = 4;

/// Delayed ACK: how long an acknowledgement waits to piggyback on a request.
#[derive(Debug)]
struct AckDelay {
    /// A request posted this soon after the peer's counts as a reply to it.
    at_once: Nanos,
    /// How long the ACK waits for the expected request.
    wait: Nanos,
    /// The same if the peer sends long messages by UDP.
    wait_if_long: Nanos,
}

/// With a CPU for each thread, an application replies within a few microseconds. A peer may need
/// the ACK before its next message (NCCL's send and receive of 8 bytes: 22 us with 25 us, 19 with
/// 6). On a small machine the other process must be scheduled first.
static ACK_DELAY: LazyLock<AckDelay> = LazyLock::new(|| {
    if has_many_cpus() {
        AckDelay { at_once: 50_000, wait: 6_000, wait_if_long: 25_000 }
    } else {
        AckDelay { at_once: 50_000, wait: 25_000, wait_if_long: 25_000 }
    }
});

/// Queue pairs with a delayed ACK.
#[derive(Debug, Default)]
pub(crate) struct PendingAcks {
    /// Until no more urgent packet is pending.
    pub(crate) soon: VecDeque<u32>,
    /// Until the given time, earliest first.
    pub(crate) delayed: VecDeque<(Nanos, u32)>,
}

/// Prefetched bytes of a queue pair: of its own requests, and of its peer's READs.
#[derive(Debug, Default)]
pub(crate) struct Prefetches {
    requests: Prefetch,
    reads: Prefetch,
    /// The message of the last packet, if that was to be fetched but was not. Its fetch was late,
    /// or it has several pieces.
    pub(crate) loaded: Option<Origin>,
    /// The fetched payload of the last packet was copied once more.
    pub(crate) copies: bool,
    /// The gathered part of a packet with several pieces.
    pub(crate) mixed: Option<Mixed>,
    /// The message that waits for a copy before it is read, and that copy: the latest one at the
    /// first send attempt.
    fence: Option<(Origin, u64)>,
}

impl Prefetches {
    /// The copy that must end before the message is read.
    pub(crate) fn fence(&mut self, origin: Origin, ticket: u64) -> u64 {
        match self.fence {
            Some((waits, after)) if waits == origin => after,
            _ => {
                self.fence = Some((origin, ticket));
                ticket
            }
        }
    }

    pub(crate) fn of(&self, origin: Origin) -> &Prefetch {
        if matches!(origin, Origin::Request(_)) { &self.requests } else { &self.reads }
    }

    pub(crate) fn of_mut(&mut self, origin: Origin) -> &mut Prefetch {
        if matches!(origin, Origin::Request(_)) { &mut self.requests } else { &mut self.reads }
    }

    /// Number of fetches.
    pub(crate) fn len(&self) -> usize {
        self.requests.len() + self.reads.len()
    }

    /// Drops the bytes that would be sent last.
    pub(crate) fn give_up_last(&mut self) {
        let prefetch =
            if self.requests.len() >= self.reads.len() { &mut self.requests } else { &mut self.reads };
        prefetch.give_up_last();
    }
}

/// Responses held separately; further ones are merged.
const MAX_ANSWERS: usize = 16;

/// Responses and packets of a queue pair that wait for the GPU's copy engine.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// A request packet whose payload is being fetched, and the copy it waits for.
    request: Option<(u64, Transmit)>,
    /// The same for a READ response; later responses wait behind it.
    response: Option<(u64, Transmit)>,
    /// Responses without payload, and the copy each waits for.
    answers: VecDeque<(u64, Transmit)>,
    /// Completions, and the copy each waits for.
    pub(crate) completions: VecDeque<(u64, Completion)>,
    /// It is in the list of holding queue pairs.
    pub(crate) listed: bool,
}

impl Held {
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_packets() && self.completions.is_empty()
    }

    pub(crate) fn has_packets(&self) -> bool {
        self.request.is_some() || self.response.is_some() || !self.answers.is_empty()
    }

    /// Whether a packet waits for its payload.
    pub(crate) fn waits_for_payload(&self) -> bool {
        self.request.is_some() || self.response.is_some()
    }

    /// An atomic was executed: its response carries the original value.
    fn tell_before(&mut self, psn: Psn, before: u64) {
        let answers = self.answers.iter_mut().map(|(_, transmit)| &mut transmit.header);
        for header in answers.filter(|header| header.opcode == Opcode::AtomicAck && header.psn == psn) {
            header.original = before;
        }
    }

    /// Drops the responses: they are no longer true.
    pub(crate) fn forget_answers(&mut self) {
        self.answers.clear();
        self.response = None;
    }
}

impl QueuePair {
    pub(crate) fn new(
        qpn: Qpn,
        qp: ProtocolQp,
        pd: u32,
        send_cq: Arc<CqInner>,
        recv_cq: Arc<CqInner>,
    ) -> Self {
        let service = qp.service();
        Self {
            qpn,
            qp,
            pd,
            send_cq,
            recv_cq,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            srq: None,
            receive_pd: pd,
            said_last: false,
            current: None,
            path: None,
            charged: 0,
            touched: false,
            answered: false,
            turn_left: TURN,
            ready: false,
            direction: None,
            waiting: false,
            ring: None,
            ends_at: None,
            has_pending_ack: false,
            heard_at: 0,
            heard_long: false,
            ping_pongs: 0,
            armed: None,
            prefetches: None,
            ticket: 0,
            unanswered: None,
            requests: Once::default(),
            answers: Once::default(),
            held: None,
            routes: (service == Service::Ud).then(Box::default),
            tally: PathCounters::default(),
            work_queues: Arc::default(),
            send_depth: 0,
        }
    }

    /// Takes receives from a shared queue, whose memory belongs to domain `pd`.
    pub(crate) fn share_receives(&mut self, srq: SrqIndex, pd: u32) {
        self.srq = Some(srq);
        self.receive_pd = pd;
    }

    /// Whether it has just taken and reported its last receive from a shared queue.
    pub(crate) fn ends_sharing(&mut self) -> bool {
        let ends = self.srq.is_some()
            && !self.said_last
            && self.qp.state() == QpState::Error
            && self.held.as_ref().is_none_or(|held| held.completions.is_empty());
        self.said_last |= ends;
        ends
    }

    /// The receive of the incoming message, and its shared queue.
    pub(crate) fn take_open_shared(&mut self) -> Option<(SrqIndex, PostedReceive)> {
        let srq = self.srq.filter(|_| self.qp.has_open_receive())?;
        Some((srq, self.current.take()?))
    }

    /// Drops what waits for copies.
    pub(crate) fn drop_held(&mut self) {
        if let Some(held) = &mut self.held {
            **held = Held { listed: held.listed, ..Held::default() };
        }
        self.prefetches = None;
        self.ticket = 0;
        self.unanswered = None;
        self.requests = Once::default();
        self.answers = Once::default();
    }

    /// The peer's atomic with this PSN was executed; `before` is the original value.
    pub(crate) fn tell_before(&mut self, psn: Psn, before: u64) {
        self.qp.handle_changed(psn, before);
        if let Some(held) = &mut self.held {
            held.tell_before(psn, before);
        }
    }

    /// Its index in the device's table.
    pub(crate) fn index(&self) -> u32 {
        self.qpn.get() & 0xffff
    }

    /// Whether it holds something and is not listed yet; it is from now on.
    pub(crate) fn joins_holding(&mut self) -> bool {
        let joins = self.held.as_ref().is_some_and(|held| !held.listed && !held.is_empty());
        if joins {
            self.hold().listed = true;
        }
        joins
    }

    /// Its destination: the high byte of the 24-bit QP number is the slot of the owning process.
    pub(crate) fn peer(&self) -> (IpAddr, u8) {
        let attr = self.qp.attr();
        let [_, slot, ..] = attr.dest_qpn.get().to_be_bytes();
        (attr.remote, slot)
    }

    /// Packets in its turn; `shared`: other queue pairs use the same route.
    pub(crate) fn whole_turn(&self, shared: bool) -> u64 {
        if self.ring.is_some() && !shared { NEAR_TURN } else { TURN }
    }

    /// The identity under which its peer accesses memory.
    pub(crate) fn accessor(&self) -> Accessor {
        Accessor { pd: self.pd, qp: self.index() }
    }

    /// The identity under which its packets are placed.
    pub(crate) fn owner(&self) -> CopyOwner {
        CopyOwner { qp: self.index(), after: self.ticket }
    }

    /// A packet cannot be built before the copy `after` is over, or its payload is fetched.
    pub(crate) fn hold_packet(&mut self, after: u64, transmit: Transmit) {
        let held = self.hold();
        if transmit.header.opcode.is_response() {
            held.response = Some((after, transmit));
        } else {
            held.request = Some((after, transmit));
        }
    }

    /// Whether the next request packet waits for its payload.
    pub(crate) fn holds_request(&self) -> bool {
        let request = self.held.as_ref().and_then(|held| held.request);
        request.is_some_and(|(_, transmit)| self.qp.is_current(&transmit))
    }

    /// A datagram was posted.
    #[inline]
    pub(crate) fn note_addressee(&mut self, to: &Datagram) {
        if let Some(routes) = &mut self.routes {
            routes.expect(addressee(to.remote, to.dest_qpn));
        }
    }

    /// Whether it has a datagram to an unresolved peer.
    #[inline]
    pub(crate) fn has_unresolved(&self) -> bool {
        self.routes.as_ref().is_some_and(|routes| routes.has_unresolved())
    }

    /// A packet of an unreliable service is about to be built: a datagram takes the route to its
    /// receiver.
    pub(crate) fn choose_route(&mut self, header: &Header) {
        let to = addressee(*self.qp.destination(), header.dest_qpn);
        if let Some(way) = self.routes.as_mut().and_then(|routes| routes.turn_to(to)) {
            self.ring = way;
        }
    }

    /// The peer's ring is closed: packets to it need an ICRC again.
    pub(crate) fn part_with(&mut self, gone: (IpAddr, u8)) {
        let was_ours = match &mut self.routes {
            Some(routes) => routes.forget(gone),
            None => self.peer() == gone,
        };
        if was_ours {
            self.ring = None;
        }
    }

    /// A packet of an unreliable service leaves.
    pub(crate) fn note_direction(&mut self, header: &Header, local_peers: &mut LocalPeers) {
        let (to, qpn) = (*self.qp.destination(), header.dest_qpn);
        if self.direction.is_none_or(|(before, _)| before != to) {
            self.qp.set_near(local_peers.contains(to));
        }
        self.direction = Some((to, qpn));
    }

    /// The marker to be sent now, and its destination.
    pub(crate) fn marker(&mut self, now: Nanos) -> Option<(IpAddr, Marker)> {
        let (addr, to) = self.direction?;
        let number = self.qp.poll_marker(now)?;
        Some((addr, Marker { returns: false, to, from: self.qpn, number }))
    }

    /// The peer sent a request.
    pub(crate) fn note_heard(&mut self, now: Nanos) {
        self.heard_at = now;
    }

    /// The application posted a request.
    pub(crate) fn note_posted(&mut self, now: Nanos) {
        let heard = std::mem::take(&mut self.heard_at);
        if heard != 0 {
            let at_once = now.saturating_sub(heard) < ACK_DELAY.at_once;
            self.ping_pongs = if at_once { self.ping_pongs.saturating_add(1) } else { 0 };
        }
    }

    /// A delayed ACK expired without a request to piggyback on.
    pub(crate) fn note_silence(&mut self) {
        self.ping_pongs = 0;
    }

    /// Puts it into the list of queue pairs with a delayed ACK, unless it is in one.
    ///
    /// In a ping-pong pattern the ACK waits briefly for the next request. A peer that polls for the
    /// request gets the ACK with it. Its application may poll memory only, without a call that
    /// would receive a separate ACK.
    pub(crate) fn delay_ack(&mut self, now: Nanos, pending_acks: &mut PendingAcks) {
        if self.has_pending_ack {
            return;
        }
        self.has_pending_ack = true;
        if self.ping_pongs >= PING_PONG {
            // When a long message has arrived, the next ones are already in flight. The sender does
            // not wait for the first ACK, and by UDP an ACK is a system call at both ends.
            let wait =
                if self.heard_long && self.ring.is_none() { ACK_DELAY.wait_if_long } else { ACK_DELAY.wait };
            pending_acks.delayed.push_back((now + wait, self.index()));
        } else {
            pending_acks.soon.push_back(self.index());
        }
    }

    /// Whether it may have requests to send, now or later; if false, it has none.
    #[inline]
    pub(crate) fn may_send(&self) -> bool {
        self.held.is_some() || self.qp.may_send()
    }

    /// Whether it may have responses to send.
    #[inline]
    pub(crate) fn has_unsent_answers(&self) -> bool {
        self.held.is_some() || self.qp.has_replies()
    }

    /// A packet left: records what it acknowledges; returns whether it left for the first time.
    #[inline]
    pub(crate) fn note_sent(&mut self, header: &Header) -> bool {
        if !header.opcode.is_response() {
            return self.requests.note(header.psn, 1) > 0;
        }
        let covers = matches!(header.aeth.syndrome, Syndrome::Ack(_)) || header.opcode != Opcode::Ack;
        self.unanswered = Some(if covers { header.psn.next() } else { header.psn });
        self.answers.note(header.psn, u32::from(covers)) > 0
    }

    /// This many packets left from `first` on, the last with this header; how many of them for the
    /// first time.
    #[inline]
    pub(crate) fn note_repeats(&mut self, last: &Header, first: Psn, packets: u64) -> u64 {
        let Ok(packets) = u32::try_from(packets) else { return 0 }; // at most one turn
        if last.opcode.is_response() {
            self.unanswered = Some(last.psn.next());
            self.answers.note(first, packets).into()
        } else {
            self.requests.note(first, packets).into()
        }
    }

    pub(crate) fn hold(&mut self) -> &mut Held {
        self.held.get_or_insert_default()
    }
}

/// The next packet: first what waited for copies, then what the protocol has.
#[inline]
pub(crate) fn next_packet(
    entry: &mut QueuePair,
    staging: &Staging,
    now: Nanos,
    room: u64,
    flush: bool,
) -> Option<Transmit> {
    while !entry.held.as_ref().is_some_and(|held| held.has_packets()) {
        let transmit = entry.qp.poll_transmit(now, room, flush)?;
        if !transmit.header.opcode.is_response() || staging.is_settled(entry.owner()) {
            return Some(transmit);
        }
        hold_answer(entry, transmit);
    }
    next_held(entry, staging, now, room, flush)
}

/// Holds an ACK for bytes that the GPU does not have yet.
fn hold_answer(entry: &mut QueuePair, transmit: Transmit) {
    let ticket = entry.ticket;
    let held = entry.hold();
    if !transmit.payload.is_empty() {
        held.response = Some((ticket, transmit));
        return;
    }
    let plain =
        |t: &Transmit| t.header.opcode == Opcode::Ack && matches!(t.header.aeth.syndrome, Syndrome::Ack(_));
    // A later ACK covers an earlier one: merging bounds the queue behind a stuck copy.
    if held.answers.len() >= MAX_ANSWERS
        && let Some(last) = held.answers.back_mut()
        && plain(&last.1)
    {
        *last = (ticket, transmit);
    } else {
        held.answers.push_back((ticket, transmit));
    }
}

/// The next packet while some are held. Responses keep their order, and requests theirs; neither
/// blocks the other.
fn next_held(
    entry: &mut QueuePair,
    staging: &Staging,
    now: Nanos,
    room: u64,
    flush: bool,
) -> Option<Transmit> {
    let qp = entry.index();
    let over = |after: u64| staging.is_settled(CopyOwner { qp, after });
    if let Some(held) = entry.held.as_deref_mut() {
        if let Some((ticket, transmit)) = held.answers.front().copied()
            && over(ticket)
        {
            held.answers.pop_front();
            return Some(transmit);
        }
        if held.answers.is_empty()
            && let Some((after, transmit)) = held.response
            && over(after)
        {
            held.response = None;
            return Some(transmit);
        }
    }
    while entry.held.as_ref().is_none_or(|held| held.response.is_none())
        && let Some(transmit) = entry.qp.poll_answer(flush)
    {
        let first = entry.held.as_ref().is_none_or(|held| held.answers.is_empty());
        if first && over(entry.ticket) {
            return Some(transmit);
        }
        hold_answer(entry, transmit);
    }
    next_request(entry, staging, now, room)
}

/// The next request packet, regardless of the responses.
pub(crate) fn next_request(
    entry: &mut QueuePair,
    staging: &Staging,
    now: Nanos,
    room: u64,
) -> Option<Transmit> {
    let qp = entry.index();
    let over = |after: u64| staging.is_settled(CopyOwner { qp, after });
    match entry.held.as_ref().and_then(|held| held.request) {
        // The protocol has moved back or on, and will produce the packet anew.
        Some((_, transmit)) if !entry.qp.is_current(&transmit) => entry.hold().request = None,
        Some((after, transmit)) if over(after) => {
            entry.hold().request = None;
            return Some(transmit);
        }
        Some(_) => return None,
        None => {}
    }
    entry.qp.poll_request(now, room)
}

/// Delivers a completion, or holds it back until the earlier copies are over.
#[inline]
pub(crate) fn complete(entry: &mut QueuePair, staging: &Staging, completion: Completion) -> Option<u32> {
    let waits = entry.held.as_ref().is_some_and(|held| !held.completions.is_empty());
    if !waits && staging.is_settled(entry.owner()) {
        return deliver(entry, completion);
    }
    let ticket = entry.ticket;
    entry.hold().completions.push_back((ticket, completion));
    None
}

/// Puts a completion into its queue; returns the number of the completion queue if that overflowed
/// just now.
pub(crate) fn deliver(entry: &QueuePair, completion: Completion) -> Option<u32> {
    let cq = if completion.is_receive() { &entry.recv_cq } else { &entry.send_cq };
    (!cq.deliver(entry.qpn, completion)).then_some(cq.id)
}

pub(crate) fn flushed(posted: &PostedReceive) -> Completion {
    Completion::flushed(posted.receive.wr_id, WorkKind::Receive)
}

#[cfg(test)]
mod tests {
    use nobounce_protocol::qp::{Mtu, QpConfig};

    use super::*;

    fn entry() -> QueuePair {
        let qpn = Qpn::new(2);
        let (service, port_mtu) = (Service::Rc, Mtu::Mtu1024);
        let config = QpConfig { service, qpn, port_mtu, send_depth: 4, signal_all: false };
        let cq = || Arc::new(CqInner::new(1, 4, None));
        QueuePair::new(qpn, ProtocolQp::new(config), 0, cq(), cq())
    }

    /// The peer's request arrives at `now`; the application posts its own after this delay.
    fn exchange(entry: &mut QueuePair, now: Nanos, after: Nanos) {
        entry.note_heard(now);
        entry.note_posted(now + after);
    }

    /// When the ACK of a packet at `now` is due; `None`: as soon as nothing more urgent is pending.
    fn delay(entry: &mut QueuePair, now: Nanos) -> Option<Nanos> {
        let mut pending_acks = PendingAcks::default();
        entry.has_pending_ack = false;
        entry.delay_ack(now, &mut pending_acks);
        assert_eq!(pending_acks.soon.len() + pending_acks.delayed.len(), 1);
        pending_acks.delayed.front().map(|(due, _)| due - now)
    }

    #[test]
    fn an_acknowledgement_waits_for_the_next_request_of_a_ping_pong() {
        let mut entry = entry();
        assert_eq!(delay(&mut entry, 0), None);
        for round in 1..=u64::from(PING_PONG) {
            assert_eq!(delay(&mut entry, round * 1000), None, "not a ping-pong yet");
            exchange(&mut entry, round * 1000, 500);
        }
        assert_eq!(delay(&mut entry, 9000), Some(ACK_DELAY.wait));
        exchange(&mut entry, 9000, ACK_DELAY.at_once);
        assert_eq!(delay(&mut entry, 200_000), None, "the application takes its time");
    }

    #[test]
    fn an_acknowledgement_that_waited_in_vain_ends_the_delay() {
        let mut entry = entry();
        (0..10).for_each(|round| exchange(&mut entry, round * 1000 + 1, 500));
        assert!(delay(&mut entry, 20_000).is_some());
        entry.note_silence();
        assert_eq!(delay(&mut entry, 30_000), None);
    }
}
