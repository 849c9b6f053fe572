//! One queue pair with its queues, and what it cannot say or send yet.

use std::collections::VecDeque;
use std::sync::Arc;

use nobounce_protocol::qp::{Completion, Payload, Qp as ProtocolQp, QpState, Status, Transmit, WorkKind};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::Qpn;

use super::cq::CqInner;
use super::engine::TURN;
use super::feed::Feed;
use super::host::{PostedReceive, PostedSend};
use super::path::PathIndex;
use super::stage::Stage;
use super::tally::PathCounters;

/// One queue pair with its queues.
#[derive(Debug)]
pub(crate) struct QpEntry {
    pub(crate) qpn: Qpn,
    pub(crate) qp: ProtocolQp,
    pub(crate) pd: u32,
    pub(crate) send_cq: Arc<CqInner>,
    pub(crate) recv_cq: Arc<CqInner>,
    pub(crate) sends: VecDeque<PostedSend>,
    pub(crate) receives: VecDeque<PostedReceive>,
    pub(crate) current: Option<PostedReceive>,
    pub(crate) path: Option<PathIndex>,
    /// What this queue pair has charged to its path.
    pub(super) charged: u64,
    /// It is in the list of those that packets came for.
    pub(super) touched: bool,
    /// Among those packets was an answer: it may send more.
    pub(super) answered: bool,
    /// Packets it may still send before it is another's turn.
    pub(super) turn_left: u64,
    /// It is in the ready queue.
    pub(super) ready: bool,
    /// It waits for room on its path.
    pub(super) waiting: bool,
    /// It is in the list of those with answers that can wait.
    pub(super) owes_ack: bool,
    /// The earliest entry of the timer heap that belongs to it.
    pub(super) armed: Option<Nanos>,
    /// Fetched bytes of the message that it sends, where those come from a GPU.
    pub(crate) feed: Option<Box<Feed>>,
    /// The copy that its last placed byte waits for.
    pub(super) ticket: u64,
    /// What waits for copies.
    pub(super) held: Option<Box<Held>>,
    pub(super) tally: PathCounters,
}

/// What a queue pair cannot say or send yet, because the GPU's copy engine is not done with it.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// A packet whose payload is being fetched, or that must not overtake a copy.
    pub(super) packet: Option<Transmit>,
    /// Answers without payload, and the copy each waits for.
    pub(super) answers: VecDeque<(u64, Transmit)>,
    /// Completions, and the copy each waits for.
    pub(super) completions: VecDeque<(u64, Completion)>,
    /// It is in the list of those that hold something.
    pub(super) listed: bool,
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.packet.is_none() && self.answers.is_empty() && self.completions.is_empty()
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
        Self {
            qpn,
            qp,
            pd,
            send_cq,
            recv_cq,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            current: None,
            path: None,
            charged: 0,
            touched: false,
            answered: false,
            turn_left: TURN,
            ready: false,
            waiting: false,
            owes_ack: false,
            armed: None,
            feed: None,
            ticket: 0,
            held: None,
            tally: PathCounters::default(),
        }
    }

    /// Forgets what waits for copies.
    pub(crate) fn drop_held(&mut self) {
        if let Some(held) = &mut self.held {
            **held = Held { listed: held.listed, ..Held::default() };
        }
        self.feed = None;
        self.ticket = 0;
    }

    pub(super) fn hold(&mut self) -> &mut Held {
        self.held.get_or_insert_default()
    }
}

/// What a queue pair has to send next.
pub(super) enum Next {
    Packet(Transmit),
    /// It must wait for a copy.
    Held,
    None,
}

/// The next packet: first what waited for copies, then what the protocol has.
#[inline]
pub(super) fn next_packet(entry: &mut QpEntry, stage: &Stage, now: Nanos, room: u64, flush: bool) -> Next {
    if entry.held.is_some()
        && let Some(next) = next_held(entry, stage)
    {
        return next;
    }
    loop {
        let Some(transmit) = entry.qp.poll_transmit(now, room, flush) else { return Next::None };
        if !transmit.header.opcode.is_response() || stage.is_over(entry.ticket) {
            return Next::Packet(transmit);
        }
        // It says that bytes have arrived which the GPU does not have yet.
        let ticket = entry.ticket;
        let held = entry.hold();
        if !transmit.payload.is_empty() {
            held.packet = Some(transmit);
            return Next::Held;
        }
        held.answers.push_back((ticket, transmit));
    }
}

/// The next of the packets that wait for copies, or that nothing may leave before them.
fn next_held(entry: &mut QpEntry, stage: &Stage) -> Option<Next> {
    let oldest = entry.qp.oldest_serial();
    let over = stage.is_over(entry.ticket);
    let live = matches!(entry.qp.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
    let held = entry.held.as_deref_mut()?;
    if !live {
        // What failed has nothing more to say but its refusals, which the protocol gives anew.
        held.packet = None;
        held.answers.clear();
        return None;
    }
    if let Some((ticket, transmit)) = held.answers.front().copied()
        && stage.is_over(ticket)
    {
        held.answers.pop_front();
        return Some(Next::Packet(transmit));
    }
    let transmit = held.packet?;
    if transmit.header.opcode.is_response() && (!over || !held.answers.is_empty()) {
        return Some(Next::Held);
    }
    held.packet = None;
    // A request that is over meanwhile (it was sent twice) needs no packet any more.
    if matches!(transmit.payload, Payload::Request { serial, .. } if serial < oldest) {
        return None;
    }
    Some(Next::Packet(transmit))
}

/// Delivers a completion, or holds it back until the copies before it are over.
#[inline]
pub(super) fn complete(entry: &mut QpEntry, stage: &Stage, completion: Completion) -> Option<u32> {
    let waits = entry.held.as_ref().is_some_and(|held| !held.completions.is_empty());
    if !waits && stage.is_over(entry.ticket) {
        return deliver(entry, completion);
    }
    let ticket = entry.ticket;
    entry.hold().completions.push_back((ticket, completion));
    None
}

/// Puts a completion where it belongs; the number of the completion queue if that overflowed just now.
pub(super) fn deliver(entry: &QpEntry, completion: Completion) -> Option<u32> {
    let cq = if completion.is_receive() { &entry.recv_cq } else { &entry.send_cq };
    (!cq.push(entry.qpn, completion)).then_some(cq.id)
}

pub(super) fn flushed(posted: &PostedReceive) -> Completion {
    Completion {
        wr_id: posted.receive.wr_id,
        status: Status::Flushed,
        kind: WorkKind::Receive,
        byte_len: 0,
        immediate: None,
        invalidated: None,
        solicited: false,
    }
}
