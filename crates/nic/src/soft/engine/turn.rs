//! Round-robin between queue pairs: whose turn it is to send, and what leaves in a turn.

use nobounce_protocol::qp::{IpOptions, Nak, Transmit};
use nobounce_protocol::timing::Nanos;

use crate::links::TxBatch;
use crate::soft::engine::Core;
use crate::soft::engine::build::{build, build_repeats, ready_repeats};
use crate::soft::engine::memory_windows::carry_out_local;
use crate::soft::engine::packet::{Built, packet_len, port_hint, put_marker};
use crate::soft::engine::queue_pair::{QueuePair, next_packet, next_request};
use crate::soft::engine::region::Regions;
use crate::soft::engine::selective::{put_congestion_notification, put_selective_ack};
use crate::soft::local::local_peers::LocalPeers;
use crate::soft::qp_index::QpIndex;
use crate::tally::BytePath;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// It has nothing more to send for now.
    Done,
    /// Its turn is over, but it has more.
    More,
    BatchFull,
}

impl Core {
    /// Fills the batch from the ready queue pairs; returns whether it is full.
    pub(crate) fn fill(&mut self, now: Nanos) -> bool {
        while let Some(index) = self.scheduler.ready.pop_front() {
            let Some(entry) = self.qps.get_mut(index) else { continue };
            entry.schedule.ready = false;
            match self.turn(now, index, false) {
                Turn::Done => {}
                Turn::More => self.make_ready(index),
                Turn::BatchFull => {
                    // Its turn continues in the next batch.
                    if let Some(entry) = self.qps.get_mut(index) {
                        entry.schedule.ready = true;
                        self.scheduler.ready.push_front(index);
                    }
                    return true;
                }
            }
        }
        false
    }

    /// Adds the delayed ACKs; with `all`, also those that still wait to piggyback on a request.
    pub(crate) fn fill_answers(&mut self, now: Nanos, all: bool) {
        // Each once: a queue pair that cannot send all responses, for lack of bytes from a GPU,
        // requeues itself.
        for _ in 0..self.scheduler.pending_acks.soon.len() {
            if let Some(index) = self.scheduler.pending_acks.soon.pop_front() {
                self.answer(now, index);
            }
        }
        for _ in 0..self.scheduler.pending_acks.delayed.len() {
            let Some(&(due, index)) =
                self.scheduler.pending_acks.delayed.front().filter(|(due, _)| all || *due <= now)
            else {
                break;
            };
            self.scheduler.pending_acks.delayed.pop_front();
            let Some(entry) = self.qps.get_mut(index) else { continue };
            if due <= now && entry.has_unsent_answers() {
                entry.ack.note_silence();
            }
            self.answer(now, index);
        }
    }

    fn answer(&mut self, now: Nanos, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        entry.ack.pending = false;
        if !entry.has_unsent_answers() {
            return; // it piggybacked on a request
        }
        match self.turn(now, index, true) {
            Turn::Done => {}
            Turn::More | Turn::BatchFull => self.make_ready(index),
        }
    }

    /// Lets one queue pair send.
    fn turn(&mut self, now: Nanos, index: QpIndex, flush: bool) -> Turn {
        let Self { qps, tx, regions, scheduler, same_host, .. } = self;
        let paths = &scheduler.paths;
        let Some(entry) = qps.get_mut(index) else { return Turn::Done };
        let path = entry.schedule.path;
        let room = path.map_or(0, |path| paths.room(path));
        let shared = path.is_some_and(|path| paths.is_shared(path));
        entry.qp.ask_rarely(path.is_some_and(|path| paths.has_dear_answers(path)));
        entry.qp.split_short_writes(entry.route.local.is_none());
        tx.set_ip_options(entry.qp.attr().ip_options);
        let mut sending = Sending {
            now,
            room,
            shared,
            charged: entry.schedule.charged,
            unreliable: !entry.qp.service().is_reliable(),
            response_waits: false,
            flush,
            rest: 0,
            entry,
            tx,
            regions,
            local_peers: &mut same_host.peers,
            starved: &mut scheduler.copies.starved,
        };
        let (turn, faulted) = match sending.run() {
            Ok(turn) => (turn, None),
            Err(fault) => (Turn::More, Some(fault)),
        };
        let turn = self.end_turn(now, index, turn, shared);
        let Some(entry) = self.qps.get_mut(index) else { return turn };
        if let Some(fault) = faulted {
            entry.qp.handle_gather_fault(&fault.transmit, fault.nak);
            self.settle(index);
        } else if entry.qp.has_completions() {
            // Unreliable service: a sent packet is complete.
            self.settle(index);
        } else {
            self.recharge(index);
        }
        if let Some(path) = path {
            self.scheduler.wake_waiting(&mut self.qps, path);
        }
        if let Some(entry) = self.qps.get_mut(index) {
            self.scheduler.arm(entry);
        }
        turn
    }

    /// The packets of a turn are built: markers, delayed ACKs, and the wait for room of the path.
    fn end_turn(&mut self, now: Nanos, index: QpIndex, turn: Turn, shared: bool) -> Turn {
        let Self { qps, tx, regions, scheduler, account, .. } = self;
        let Some(entry) = qps.get_mut(index) else { return turn };
        let mut turn = turn;
        if scheduler.ready.is_empty() {
            tx.show();
        }
        tx.set_ip_options(IpOptions::default());
        if !entry.qp.service().is_reliable() && turn != Turn::BatchFull {
            if !tx.has_room() {
                turn = Turn::BatchFull;
            } else if let Some((to, marker)) = entry.marker(now) {
                put_marker(tx, to, port_hint(entry), &marker);
                account.counters.sent_markers += 1;
            }
        }
        if turn != Turn::BatchFull && entry.route.local.is_none() && entry.qp.has_selective_ack() {
            if tx.has_room() {
                put_selective_ack(entry, tx, regions);
            } else {
                turn = Turn::BatchFull;
            }
        }
        if entry.qp.has_congestion_notification() {
            if tx.has_room() {
                put_congestion_notification(entry, tx);
            } else {
                turn = Turn::BatchFull;
            }
        }
        scheduler.note_held(entry);
        if turn != Turn::BatchFull {
            entry.schedule.turn_left = entry.whole_turn(shared);
        }
        if turn == Turn::Done {
            scheduler.wait_for_room(entry);
            if entry.qp.has_replies() {
                entry.delay_ack(now, &mut scheduler.pending_acks);
            }
        }
        turn
    }
}

/// A packet whose payload could not be gathered.
struct GatherFault {
    transmit: Transmit,
    nak: Nak,
}

/// One queue pair's packets in one turn.
struct Sending<'a> {
    entry: &'a mut QueuePair,
    tx: &'a mut TxBatch,
    regions: &'a mut Regions,
    local_peers: &'a mut LocalPeers,
    starved: &'a mut bool,
    now: Nanos,
    /// Bytes that the path has room for, and how many of this queue pair it counts already.
    room: u64,
    charged: u64,
    /// Other queue pairs use the path.
    shared: bool,
    unreliable: bool,
    /// The next response, to a READ, has no payload yet: it must not block requests.
    response_waits: bool,
    /// Delayed ACKs leave: they piggyback on the first request.
    flush: bool,
    /// Bytes left of the last packet's message.
    rest: u32,
}

impl Sending<'_> {
    /// Builds packets until the turn, the batch or the work ends.
    #[inline]
    fn run(&mut self) -> Result<Turn, Box<GatherFault>> {
        while self.entry.schedule.turn_left > 0 {
            if self.is_batch_full() {
                return Ok(Turn::BatchFull);
            }
            if self.flush && !self.entry.may_send() && !self.entry.qp.has_replies() {
                return Ok(Turn::Done);
            }
            let Some(mut transmit) = self.next() else {
                if carry_out_local(self.entry, self.regions) {
                    continue;
                }
                return Ok(Turn::Done);
            };
            self.prepare(&mut transmit);
            match build(self.entry, self.tx, self.regions, &transmit) {
                Ok(Built::Done(path)) => self.note_built(transmit, path)?,
                Ok(Built::Pending { after, starved }) => {
                    self.entry.hold_packet(after, transmit);
                    *self.starved |= starved;
                    if !transmit.header.opcode.is_response() {
                        return Ok(Turn::Done);
                    }
                    self.response_waits = true;
                }
                Err(nak) => return Err(Box::new(GatherFault { transmit, nak })),
            }
        }
        Ok(Turn::More)
    }

    #[inline]
    fn is_batch_full(&self) -> bool {
        // In the next batch, a message's last packet would need a send of its own, too.
        let ends_next = (1..=self.entry.qp.attr().path_mtu.bytes()).contains(&self.rest);
        // Responses leave with it all the same: they have waited to piggyback on a request.
        let is_full = self.tx.ends_with_full_send() && !ends_next && !self.entry.qp.has_replies();
        !self.tx.has_room() || is_full
    }

    /// Bytes that may be sent before the path's room is used up.
    #[inline]
    fn room_left(&self) -> u64 {
        let used = self.entry.qp.outstanding().saturating_sub(self.charged);
        self.room.saturating_sub(used)
    }

    #[inline]
    fn next(&mut self) -> Option<Transmit> {
        let left = self.room_left();
        if self.response_waits {
            next_request(self.entry, &self.regions.staging, self.now, left)
        } else {
            next_packet(self.entry, &self.regions.staging, self.now, left, self.flush)
        }
    }

    #[inline]
    fn prepare(&mut self, transmit: &mut Transmit) {
        let Self { entry, tx, .. } = self;
        entry.schedule.turn_left -= 1;
        if self.shared && entry.schedule.turn_left == 0 && transmit.header.opcode.is_acknowledged() {
            // The turn ends here: request an ACK now. Unacknowledged bytes would otherwise hold
            // shared room until this queue pair's next turn.
            transmit.header.ack_req = true;
        }
        if self.unreliable {
            tx.set_ip_options(entry.qp.ip_options());
            entry.choose_route(&transmit.header);
        }
    }

    /// A packet is in the batch: counts it, and builds those of its message that differ only in
    /// number and payload.
    #[inline]
    fn note_built(&mut self, mut transmit: Transmit, path: BytePath) -> Result<(), Box<GatherFault>> {
        self.flush = true;
        let entry = &mut *self.entry;
        if self.unreliable {
            entry.note_direction(&transmit.header, self.local_peers);
        }
        let is_new = entry.sent.note_sent(&transmit.header);
        let len = u64::from(transmit.payload.len());
        if len > 0 && is_new {
            entry.tally.outbound.count(path, len, transmit.payload.rest() == 0);
        }
        self.rest = transmit.payload.rest();
        if self.rest == 0 {
            return Ok(()); // the last of its message
        }
        // One less than the turn's rest if the last one is examined (see `prepare`).
        let most = (self.tx.room_for(packet_len(&transmit)) as u64)
            .min(self.entry.schedule.turn_left.saturating_sub(u64::from(self.shared)))
            .min(ready_repeats(self.entry, &transmit, path));
        let left = self.room_left();
        let repeats = self.entry.qp.poll_repeat(self.now, &transmit, left, most);
        if repeats > 0 {
            self.entry.schedule.turn_left -= repeats;
            let first = transmit.header.psn.next();
            if let Err(nak) = build_repeats(self.entry, self.tx, self.regions, &mut transmit, repeats) {
                return Err(Box::new(GatherFault { transmit, nak }));
            }
            let new = self.entry.sent.note_repeats(&transmit.header, first, repeats);
            self.entry.tally.outbound.count(path, new * len, false);
        }
        self.rest = transmit.payload.rest();
        Ok(())
    }
}
