//! What a queue pair holds back until the GPU's copy engine is done: packets, responses and
//! completions; and the bytes it has prefetched.

use std::collections::VecDeque;

use nobounce_protocol::qp::{Completion, Transmit, WorkKind};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Opcode, Psn, Syndrome};

use super::QueuePair;
use super::sent::SentPackets;
use crate::soft::engine::host::PostedReceive;
use crate::soft::engine::mixed::Mixed;
use crate::soft::gpu::prefetch::{Origin, Prefetch};
use crate::soft::gpu::staging::{CopyOwner, Staging};

/// The state of a queue pair that GPU memory needs.
#[derive(Debug, Default)]
pub(crate) struct GpuState {
    /// Prefetched bytes of its outbound messages.
    pub(crate) prefetches: Option<Box<Prefetches>>,
    /// The ticket of the copy that its last placed byte waits for.
    pub(crate) ticket: u64,
    /// What waits for copies.
    pub(crate) held: Option<Box<Held>>,
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
    /// Drops what waits for copies.
    pub(crate) fn drop_held(&mut self) {
        if let Some(held) = &mut self.gpu.held {
            **held = Held { listed: held.listed, ..Held::default() };
        }
        self.gpu.prefetches = None;
        self.gpu.ticket = 0;
        self.sent = SentPackets::default();
    }

    /// The peer's atomic with this PSN was executed; `before` is the original value.
    pub(crate) fn tell_before(&mut self, psn: Psn, before: u64) {
        self.qp.handle_changed(psn, before);
        if let Some(held) = &mut self.gpu.held {
            held.tell_before(psn, before);
        }
    }

    /// Whether it holds something and is not listed yet; it is from now on.
    pub(crate) fn joins_holding(&mut self) -> bool {
        let joins = self.gpu.held.as_ref().is_some_and(|held| !held.listed && !held.is_empty());
        if joins {
            self.hold().listed = true;
        }
        joins
    }

    /// The identity under which its packets are placed.
    pub(crate) fn owner(&self) -> CopyOwner {
        CopyOwner { qp: self.index(), after: self.gpu.ticket }
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
        let request = self.gpu.held.as_ref().and_then(|held| held.request);
        request.is_some_and(|(_, transmit)| self.qp.is_current(&transmit))
    }

    /// Whether it may have requests to send, now or later; if false, it has none.
    #[inline]
    pub(crate) fn may_send(&self) -> bool {
        self.gpu.held.is_some() || self.qp.may_send()
    }

    /// Whether it may have responses to send.
    #[inline]
    pub(crate) fn has_unsent_answers(&self) -> bool {
        self.gpu.held.is_some() || self.qp.has_replies()
    }

    pub(crate) fn hold(&mut self) -> &mut Held {
        self.gpu.held.get_or_insert_default()
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
    while !entry.gpu.held.as_ref().is_some_and(|held| held.has_packets()) {
        // A receiver of UDP takes an ACK first that arrives behind a request.
        let acks_first = entry.route.local.is_some() && entry.qp.owes_receipt();
        let transmit = match acks_first {
            true => entry.qp.poll_answer(true)?,
            false => entry.qp.poll_transmit(now, room, flush)?,
        };
        if !transmit.header.opcode.is_response() || staging.is_settled(entry.owner()) {
            return Some(transmit);
        }
        hold_answer(entry, transmit);
    }
    next_held(entry, staging, now, room, flush)
}

/// Holds an ACK for bytes that the GPU does not have yet.
fn hold_answer(entry: &mut QueuePair, transmit: Transmit) {
    let ticket = entry.gpu.ticket;
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
    if let Some(held) = entry.gpu.held.as_deref_mut() {
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
    while entry.gpu.held.as_ref().is_none_or(|held| held.response.is_none())
        && let Some(transmit) = entry.qp.poll_answer(flush)
    {
        let first = entry.gpu.held.as_ref().is_none_or(|held| held.answers.is_empty());
        if first && over(entry.gpu.ticket) {
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
    match entry.gpu.held.as_ref().and_then(|held| held.request) {
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
    let waits = entry.gpu.held.as_ref().is_some_and(|held| !held.completions.is_empty());
    if !waits && staging.is_settled(entry.owner()) {
        return deliver(entry, completion);
    }
    let ticket = entry.gpu.ticket;
    entry.hold().completions.push_back((ticket, completion));
    None
}

/// Puts a completion into its queue; returns the number of the completion queue if that overflowed
/// just now.
pub(crate) fn deliver(entry: &mut QueuePair, completion: Completion) -> Option<u32> {
    if completion.is_receive()
        && let Some(cq) = entry.posted.xrc.as_mut().and_then(|xrc| xrc.cqs.pop_front())
    {
        return (!cq.deliver(entry.qpn, completion)).then_some(cq.id);
    }
    let cq = if completion.is_receive() { &entry.recv_cq } else { &entry.send_cq };
    (!cq.deliver(entry.qpn, completion)).then_some(cq.id)
}

pub(crate) fn flushed(posted: &PostedReceive) -> Completion {
    Completion::flushed(posted.receive.wr_id, WorkKind::Receive)
}
