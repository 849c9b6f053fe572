//! One queue pair with its queues, and what it cannot say or send yet.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use nobounce_protocol::qp::{Completion, Datagram, Qp as ProtocolQp, QpState, Transmit, WorkKind};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Header, Marker, Opcode, Psn, Qpn, Service, Syndrome};

use crate::links::shm::NearRing;
use crate::process::cpu::has_many_cpus;
use crate::soft::engine::cq_state::CqInner;
use crate::soft::engine::host::{PostedReceive, PostedSend};
use crate::soft::engine::memory_windows::Asker;
use crate::soft::engine::mixed::Mixed;
use crate::soft::engine::once::Once;
use crate::soft::engine::path::PathIndex;
use crate::soft::engine::srqs::SrqIndex;
use crate::soft::engine::submission::Rooms;
use crate::soft::gpu::prefetch::{Feed, Origin};
use crate::soft::gpu::staging::{Owner, Stage};
use crate::soft::local::near::Near;
use crate::soft::local::ways::{Ways, addressee};
use crate::soft::tally::PathCounters;

/// One queue pair with its queues.
#[derive(Debug)]
pub(crate) struct QpEntry {
    pub(crate) qpn: Qpn,
    pub(crate) qp: ProtocolQp,
    pub(crate) pd: u32,
    pub(crate) send_cq: Arc<CqInner>,
    pub(crate) recv_cq: Arc<CqInner>,
    pub(crate) sends: VecDeque<PostedSend>,
    /// Its own receives: none where it takes them from a shared queue.
    pub(crate) receives: VecDeque<PostedReceive>,
    /// The shared queue it takes its receives from.
    pub(crate) srq: Option<SrqIndex>,
    /// The domain that the memory of its receives belongs to.
    pub(crate) receive_pd: u32,
    /// It has said that it takes no more receives from the shared queue.
    pub(crate) said_last: bool,
    pub(crate) current: Option<PostedReceive>,
    pub(crate) path: Option<PathIndex>,
    /// What this queue pair has charged to its path.
    pub(crate) charged: u64,
    /// It is in the list of those that packets came for.
    pub(crate) touched: bool,
    /// Among those packets was an answer: it may send more.
    pub(crate) answered: bool,
    /// Packets it may still send before it is another's turn.
    pub(crate) turn_left: u64,
    /// It is in the ready queue.
    pub(crate) ready: bool,
    /// Where its last packet of an unreliable service went.
    direction: Option<(IpAddr, Qpn)>,
    /// It waits for room on its path.
    pub(crate) waiting: bool,
    /// It is in a list of those with answers that can wait.
    pub(crate) owes_ack: bool,
    /// When its peer last asked for something, until the application posts. 0: not since.
    heard_at: Nanos,
    /// Its peer's last packet was one of a long message.
    pub(crate) heard_long: bool,
    /// How often in a row the application answered its peer at once with a request of its own.
    talks: u8,
    /// The earliest entry of the timer heap that belongs to it.
    pub(crate) armed: Option<Nanos>,
    /// The ring of a peer on this machine, in which its packets are built; they then get no ICRC.
    pub(crate) ring: Option<Arc<NearRing>>,
    /// Its peer's process was killed: when it ends in error for that.
    pub(crate) ends_at: Option<Nanos>,
    /// Fetched bytes of what it sends, where those come from a GPU.
    pub(crate) feeds: Option<Box<Feeds>>,
    /// The copy that its last placed byte waits for.
    pub(crate) ticket: u64,
    /// The first packet of its peer's that no answer of ours has covered yet. `None`: none has left.
    pub(crate) unanswered: Option<Psn>,
    /// Its requests and its answers, as far as their payload has been counted.
    requests: Once,
    answers: Once,
    /// What waits for copies.
    pub(crate) held: Option<Box<Held>>,
    /// Where its datagrams go to, if that is what it sends: `ring` is that of the packet built last then.
    pub(crate) ways: Option<Box<Ways>>,
    pub(crate) tally: PathCounters,
    /// Its work queues as posters see them.
    pub(crate) rooms: Arc<Rooms>,
    /// Send requests that it has room for.
    pub(crate) send_depth: usize,
}

/// Packets a queue pair may send before the next one has its turn: one full segmented send. (Two: 64 queue pairs
/// together reach 0.6 of one instead of 0.9.)
const TURN: u64 = 15;

/// The same through shared memory, where it has the way for itself: a piece of a READ, whole.
const NEAR_TURN: u64 = 32;

/// So many requests in a row that answer the peer's make a conversation.
const TALKING: u8 = 4;

/// How long an acknowledgement waits for a request to travel with.
#[derive(Debug)]
struct AckDelay {
    /// A request that is posted so soon after the peer's is an answer to it.
    at_once: Nanos,
    /// How long the acknowledgement waits for the one that will probably follow.
    wait: Nanos,
    /// The same where its peer sends long messages by UDP.
    wait_if_long: Nanos,
}

/// Where everybody has a CPU, who answers at once does so in a few microseconds; and a peer may have to hear that its message has arrived before it goes
/// on to the next (NCCL's send and receive of 8 bytes: 22 us with 25 us, 19 with 6). On a small machine the other has to be scheduled first.
static ACK_DELAY: LazyLock<AckDelay> = LazyLock::new(|| {
    if has_many_cpus() {
        AckDelay { at_once: 50_000, wait: 6_000, wait_if_long: 25_000 }
    } else {
        AckDelay { at_once: 50_000, wait: 25_000, wait_if_long: 25_000 }
    }
});

/// Queue pairs with answers that can wait.
#[derive(Debug, Default)]
pub(crate) struct Owing {
    /// Until nothing more urgent is to be done.
    pub(crate) soon: VecDeque<u32>,
    /// Until the time given, the earliest first.
    pub(crate) patient: VecDeque<(Nanos, u32)>,
}

/// Fetched bytes of a queue pair: of its own requests, and of its peer's READs.
#[derive(Debug, Default)]
pub(crate) struct Feeds {
    requests: Feed,
    reads: Feed,
    /// The message of the packet built last, if it is one to be fetched and this packet was not: its fetch was late, or it came from several places.
    pub(crate) loaded: Option<Origin>,
    /// What was fetched for the packet built last was copied once more.
    pub(crate) copies: bool,
    /// What was gathered of a packet whose payload comes from several places.
    pub(crate) mixed: Option<Mixed>,
    /// The message that waits for a copy before it is read, and that copy: the last one when it was first to be sent.
    fence: Option<(Origin, u64)>,
}

impl Feeds {
    /// The copy that the message must not be read before.
    pub(crate) fn fence(&mut self, origin: Origin, ticket: u64) -> u64 {
        match self.fence {
            Some((waits, after)) if waits == origin => after,
            _ => {
                self.fence = Some((origin, ticket));
                ticket
            }
        }
    }

    pub(crate) fn of(&self, origin: Origin) -> &Feed {
        if matches!(origin, Origin::Request(_)) { &self.requests } else { &self.reads }
    }

    pub(crate) fn of_mut(&mut self, origin: Origin) -> &mut Feed {
        if matches!(origin, Origin::Request(_)) { &mut self.requests } else { &mut self.reads }
    }

    /// How many fetches there are.
    pub(crate) fn len(&self) -> usize {
        self.requests.len() + self.reads.len()
    }

    /// Gives up the bytes that would be sent last.
    pub(crate) fn give_up_last(&mut self) {
        let feed = if self.requests.len() >= self.reads.len() { &mut self.requests } else { &mut self.reads };
        feed.give_up_last();
    }
}

/// Answers held apart; further ones are joined.
const MAX_ANSWERS: usize = 16;

/// What a queue pair cannot say or send yet, because the GPU's copy engine is not done with it.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// A request packet whose payload is being fetched, and the copy it waits for.
    request: Option<(u64, Transmit)>,
    /// The same for the answer to a READ; other answers wait behind it.
    response: Option<(u64, Transmit)>,
    /// Answers without payload, and the copy each waits for.
    answers: VecDeque<(u64, Transmit)>,
    /// Completions, and the copy each waits for.
    pub(crate) completions: VecDeque<(u64, Completion)>,
    /// It is in the list of those that hold something.
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

    /// An atomic was carried out: its answer says what it found.
    fn tell_before(&mut self, psn: Psn, before: u64) {
        let answers = self.answers.iter_mut().map(|(_, transmit)| &mut transmit.header);
        for header in answers.filter(|header| header.opcode == Opcode::AtomicAck && header.psn == psn) {
            header.original = before;
        }
    }

    /// Forgets the answers: they say what is not so.
    pub(crate) fn forget_answers(&mut self) {
        self.answers.clear();
        self.response = None;
    }
}

impl QpEntry {
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
            owes_ack: false,
            heard_at: 0,
            heard_long: false,
            talks: 0,
            armed: None,
            feeds: None,
            ticket: 0,
            unanswered: None,
            requests: Once::default(),
            answers: Once::default(),
            held: None,
            ways: (service == Service::Ud).then(Box::default),
            tally: PathCounters::default(),
            rooms: Arc::default(),
            send_depth: 0,
        }
    }

    /// It takes its receives from a shared queue, whose memory belongs to domain `pd`.
    pub(crate) fn share_receives(&mut self, srq: SrqIndex, pd: u32) {
        self.srq = Some(srq);
        self.receive_pd = pd;
    }

    /// Whether it has just taken its last receive from a shared queue, and said all about it.
    pub(crate) fn ends_sharing(&mut self) -> bool {
        let ends = self.srq.is_some()
            && !self.said_last
            && self.qp.state() == QpState::Error
            && self.held.as_ref().is_none_or(|held| held.completions.is_empty());
        self.said_last |= ends;
        ends
    }

    /// The receive that a message is coming in for, and who shares it.
    pub(crate) fn take_open_shared(&mut self) -> Option<(SrqIndex, PostedReceive)> {
        let srq = self.srq.filter(|_| self.qp.has_open_receive())?;
        Some((srq, self.current.take()?))
    }

    /// Forgets what waits for copies.
    pub(crate) fn drop_held(&mut self) {
        if let Some(held) = &mut self.held {
            **held = Held { listed: held.listed, ..Held::default() };
        }
        self.feeds = None;
        self.ticket = 0;
        self.unanswered = None;
        self.requests = Once::default();
        self.answers = Once::default();
    }

    /// The atomic that its peer asked for with this number was carried out: the value before.
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

    /// Whether it holds something and is not in the list of those that do; it is from now on.
    pub(crate) fn joins_holding(&mut self) -> bool {
        let joins = self.held.as_ref().is_some_and(|held| !held.listed && !held.is_empty());
        if joins {
            self.hold().listed = true;
        }
        joins
    }

    /// Where its packets go: the high byte of the 24-bit number is the slot of the process that has it.
    pub(crate) fn peer(&self) -> (IpAddr, u8) {
        let attr = self.qp.attr();
        let [_, slot, ..] = attr.dest_qpn.get().to_be_bytes();
        (attr.remote, slot)
    }

    /// Packets of its turn, on a way that others use, too, or not.
    pub(crate) fn whole_turn(&self, shared: bool) -> u64 {
        if self.ring.is_some() && !shared { NEAR_TURN } else { TURN }
    }

    /// On whose behalf its peer asks for memory.
    pub(crate) fn asker(&self) -> Asker {
        Asker { pd: self.pd, qp: self.index() }
    }

    /// On whose behalf its packets are placed.
    pub(crate) fn owner(&self) -> Owner {
        Owner { qp: self.index(), after: self.ticket }
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

    /// Whether the request packet that comes next waits for its payload.
    pub(crate) fn holds_request(&self) -> bool {
        let request = self.held.as_ref().and_then(|held| held.request);
        request.is_some_and(|(_, transmit)| self.qp.is_current(&transmit))
    }

    /// A datagram was posted.
    #[inline]
    pub(crate) fn note_addressee(&mut self, to: &Datagram) {
        if let Some(ways) = &mut self.ways {
            ways.expect(addressee(to.remote, to.dest_qpn));
        }
    }

    /// Whether a datagram goes to somebody whom nobody has tried to meet.
    #[inline]
    pub(crate) fn has_strangers(&self) -> bool {
        self.ways.as_ref().is_some_and(|ways| ways.has_strangers())
    }

    /// A packet of an unreliable service is about to be built: a datagram takes the way to its receiver.
    pub(crate) fn choose_way(&mut self, header: &Header) {
        let to = addressee(*self.qp.destination(), header.dest_qpn);
        if let Some(way) = self.ways.as_mut().and_then(|ways| ways.turn_to(to)) {
            self.ring = way;
        }
    }

    /// A peer whose ring is given up: packets to it need an ICRC again.
    pub(crate) fn part_with(&mut self, gone: (IpAddr, u8)) {
        let was_ours = match &mut self.ways {
            Some(ways) => ways.forget(gone),
            None => self.peer() == gone,
        };
        if was_ours {
            self.ring = None;
        }
    }

    /// A packet of an unreliable service leaves.
    pub(crate) fn note_direction(&mut self, header: &Header, near: &mut Near) {
        let (to, qpn) = (*self.qp.destination(), header.dest_qpn);
        if self.direction.is_none_or(|(before, _)| before != to) {
            self.qp.set_near(near.contains(to));
        }
        self.direction = Some((to, qpn));
    }

    /// The marker to be sent now, and where to.
    pub(crate) fn marker(&mut self, now: Nanos) -> Option<(IpAddr, Marker)> {
        let (addr, to) = self.direction?;
        let number = self.qp.poll_marker(now)?;
        Some((addr, Marker { returns: false, to, from: self.qpn, number }))
    }

    /// The peer asked for something.
    pub(crate) fn note_heard(&mut self, now: Nanos) {
        self.heard_at = now;
    }

    /// The application posted something.
    pub(crate) fn note_posted(&mut self, now: Nanos) {
        let heard = std::mem::take(&mut self.heard_at);
        if heard != 0 {
            let at_once = now.saturating_sub(heard) < ACK_DELAY.at_once;
            self.talks = if at_once { self.talks.saturating_add(1) } else { 0 };
        }
    }

    /// An answer that waited for a request to travel with waited in vain.
    pub(crate) fn note_silence(&mut self) {
        self.talks = 0;
    }

    /// Puts it into the list of those with answers that can wait, unless it is in one.
    ///
    /// Where two applications take turns, as in a ping-pong, the answer waits a little for the next request: the peer that polls for the
    /// one finds the other with it, although its application may look for that in memory only, without calling us.
    pub(crate) fn owe(&mut self, now: Nanos, owing: &mut Owing) {
        if self.owes_ack {
            return;
        }
        self.owes_ack = true;
        if self.talks >= TALKING {
            // By the time that a long message has arrived the next ones are under way: nobody waits for the answer to the first, and by UDP it is a
            // system call at both ends.
            let wait =
                if self.heard_long && self.ring.is_none() { ACK_DELAY.wait_if_long } else { ACK_DELAY.wait };
            owing.patient.push_back((now + wait, self.index()));
        } else {
            owing.soon.push_back(self.index());
        }
    }

    /// Whether it may have requests to send, now or later; it has none where this is false.
    #[inline]
    pub(crate) fn may_send(&self) -> bool {
        self.held.is_some() || self.qp.may_send()
    }

    /// Whether it may have answers to send.
    #[inline]
    pub(crate) fn owes_something(&self) -> bool {
        self.held.is_some() || self.qp.has_replies()
    }

    /// A packet left: what it tells the peer, and whether it did for the first time.
    #[inline]
    pub(crate) fn note_sent(&mut self, header: &Header) -> bool {
        if !header.opcode.is_response() {
            return self.requests.note(header.psn, 1) > 0;
        }
        let covers = matches!(header.aeth.syndrome, Syndrome::Ack(_)) || header.opcode != Opcode::Ack;
        self.unanswered = Some(if covers { header.psn.next() } else { header.psn });
        self.answers.note(header.psn, u32::from(covers)) > 0
    }

    /// So many packets left from `first` on, the last with this header; how many of them for the first time.
    #[inline]
    pub(crate) fn note_repeats(&mut self, last: &Header, first: Psn, packets: u64) -> u64 {
        let Ok(packets) = u32::try_from(packets) else { return 0 }; // at most a turn's worth
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
    entry: &mut QpEntry,
    stage: &Stage,
    now: Nanos,
    room: u64,
    flush: bool,
) -> Option<Transmit> {
    while !entry.held.as_ref().is_some_and(|held| held.has_packets()) {
        let transmit = entry.qp.poll_transmit(now, room, flush)?;
        if !transmit.header.opcode.is_response() || stage.is_settled(entry.owner()) {
            return Some(transmit);
        }
        hold_answer(entry, transmit);
    }
    next_held(entry, stage, now, room, flush)
}

/// It says that bytes have arrived which the GPU does not have yet.
fn hold_answer(entry: &mut QpEntry, transmit: Transmit) {
    let ticket = entry.ticket;
    let held = entry.hold();
    if !transmit.payload.is_empty() {
        held.response = Some((ticket, transmit));
        return;
    }
    let plain =
        |t: &Transmit| t.header.opcode == Opcode::Ack && matches!(t.header.aeth.syndrome, Syndrome::Ack(_));
    // A later acknowledgement says all that an earlier one does: a copy that is stuck must not make us collect them.
    if held.answers.len() >= MAX_ANSWERS
        && let Some(last) = held.answers.back_mut()
        && plain(&last.1)
    {
        *last = (ticket, transmit);
    } else {
        held.answers.push_back((ticket, transmit));
    }
}

/// The next packet where some are held: answers in their order, and requests in theirs; neither waits for the other.
fn next_held(entry: &mut QpEntry, stage: &Stage, now: Nanos, room: u64, flush: bool) -> Option<Transmit> {
    let qp = entry.index();
    let over = |after: u64| stage.is_settled(Owner { qp, after });
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
    next_request(entry, stage, now, room)
}

/// The next request packet, whatever becomes of the answers.
pub(crate) fn next_request(entry: &mut QpEntry, stage: &Stage, now: Nanos, room: u64) -> Option<Transmit> {
    let qp = entry.index();
    let over = |after: u64| stage.is_settled(Owner { qp, after });
    match entry.held.as_ref().and_then(|held| held.request) {
        // The protocol has gone back, or on: it will say anew what is to be sent.
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

/// Delivers a completion, or holds it back until the copies before it are over.
#[inline]
pub(crate) fn complete(entry: &mut QpEntry, stage: &Stage, completion: Completion) -> Option<u32> {
    let waits = entry.held.as_ref().is_some_and(|held| !held.completions.is_empty());
    if !waits && stage.is_settled(entry.owner()) {
        return deliver(entry, completion);
    }
    let ticket = entry.ticket;
    entry.hold().completions.push_back((ticket, completion));
    None
}

/// Puts a completion where it belongs; the number of the completion queue if that overflowed just now.
pub(crate) fn deliver(entry: &QpEntry, completion: Completion) -> Option<u32> {
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

    fn entry() -> QpEntry {
        let qpn = Qpn::new(2);
        let (service, port_mtu) = (Service::Rc, Mtu::Mtu1024);
        let config = QpConfig { service, qpn, port_mtu, send_depth: 4, signal_all: false };
        let cq = || Arc::new(CqInner::new(1, 4, None));
        QpEntry::new(qpn, ProtocolQp::new(config), 0, cq(), cq())
    }

    /// The peer asks at `now`; the application answers with a request of its own after so long.
    fn exchange(entry: &mut QpEntry, now: Nanos, after: Nanos) {
        entry.note_heard(now);
        entry.note_posted(now + after);
    }

    /// When the acknowledgement of what comes at `now` is due; `None`: as soon as there is nothing more urgent.
    fn delay(entry: &mut QpEntry, now: Nanos) -> Option<Nanos> {
        let mut owing = Owing::default();
        entry.owes_ack = false;
        entry.owe(now, &mut owing);
        assert_eq!(owing.soon.len() + owing.patient.len(), 1);
        owing.patient.front().map(|(due, _)| due - now)
    }

    #[test]
    fn an_acknowledgement_waits_for_the_next_request_of_a_ping_pong() {
        let mut entry = entry();
        assert_eq!(delay(&mut entry, 0), None);
        for round in 1..=u64::from(TALKING) {
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
