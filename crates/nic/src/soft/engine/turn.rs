//! Round-robin between queue pairs: whose turn it is to send, and what leaves in a turn.

use nobounce_protocol::qp::IpOptions;
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::Service;

use crate::soft::engine::Core;
use crate::soft::engine::build::{
    Built, build, build_repeats, packet_len, port_hint, put_marker, ready_repeats,
};
use crate::soft::engine::memory_windows::carry_out_local;
use crate::soft::engine::queue_pair::{next_packet, next_request};

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
        while let Some(index) = self.ready.pop_front() {
            let Some(entry) = self.qps[index as usize].as_deref_mut() else { continue };
            entry.ready = false;
            match self.turn(now, index, false) {
                Turn::Done => {}
                Turn::More => self.make_ready(index),
                Turn::BatchFull => {
                    // Its turn continues in the next batch.
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

    /// Adds the delayed ACKs; with `all`, also those that still wait to piggyback on a request.
    pub(crate) fn fill_answers(&mut self, now: Nanos, all: bool) {
        // Each once: a queue pair that cannot send all responses, for lack of bytes from a GPU,
        // requeues itself.
        for _ in 0..self.pending_acks.soon.len() {
            if let Some(index) = self.pending_acks.soon.pop_front() {
                self.answer(now, index);
            }
        }
        for _ in 0..self.pending_acks.delayed.len() {
            let Some(&(due, index)) = self.pending_acks.delayed.front().filter(|(due, _)| all || *due <= now)
            else {
                break;
            };
            self.pending_acks.delayed.pop_front();
            let Some(entry) = self.qps[index as usize].as_deref_mut() else { continue };
            if due <= now && entry.owes_something() {
                entry.note_silence();
            }
            self.answer(now, index);
        }
    }

    fn answer(&mut self, now: Nanos, index: u32) {
        let Some(entry) = self.qps[index as usize].as_deref_mut() else { return };
        entry.has_pending_ack = false;
        if !entry.owes_something() {
            return; // it piggybacked on a request
        }
        match self.turn(now, index, true) {
            Turn::Done => {}
            Turn::More | Turn::BatchFull => self.make_ready(index),
        }
    }

    /// Lets one queue pair send.
    fn turn(&mut self, now: Nanos, index: u32, flush: bool) -> Turn {
        let Self {
            qps,
            tx,
            regions,
            paths,
            pending_acks,
            holding,
            starved,
            local_peers,
            counters,
            ready,
            ..
        } = self;
        let Some(entry) = qps[index as usize].as_deref_mut() else { return Turn::Done };
        let room = entry.path.map_or(0, |path| paths.room(path));
        let path = entry.path;
        let shared = path.is_some_and(|path| paths.is_shared(path));
        entry.qp.ask_rarely(path.is_some_and(|path| paths.has_dear_answers(path)));
        let charged = entry.charged;
        let unreliable = entry.qp.service() != Service::Rc;
        let mut turn = Turn::More;
        let mut faulted = None;
        // The next response, to a READ, has no payload yet: it must not block requests.
        let mut answer_waits = false;
        // Delayed ACKs piggyback on the first request that leaves.
        let mut flush = flush;
        tx.treat(entry.qp.attr().ip_options);
        // Bytes left of the last packet's message.
        let mut rest = 0;
        let mtu = entry.qp.attr().path_mtu.bytes();
        while entry.turn_left > 0 {
            // In the next batch, a message's last packet would need a send of its own, too.
            let ends_next = (1..=mtu).contains(&rest);
            // Responses leave with it all the same: they have waited to piggyback on a request.
            let is_full = tx.ends_with_full_send() && !ends_next && !entry.qp.has_replies();
            if !tx.has_room() || is_full {
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
                next_request(entry, &regions.staging, now, left)
            } else {
                next_packet(entry, &regions.staging, now, left, flush)
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
                // The turn ends here: request an ACK now. Unacknowledged bytes would otherwise hold
                // shared room until this queue pair's next turn.
                transmit.header.ack_req = true;
            }
            if unreliable {
                tx.treat(entry.qp.ip_options());
                entry.choose_way(&transmit.header);
            }
            match build(entry, tx, regions, &transmit) {
                Ok(Built::Done(route)) => {
                    flush = true;
                    if unreliable {
                        entry.note_direction(&transmit.header, local_peers);
                    }
                    let is_new = entry.note_sent(&transmit.header);
                    let len = u64::from(transmit.payload.len());
                    if len > 0 && is_new {
                        entry.tally.outbound.count(route, len, transmit.payload.rest() == 0);
                    }
                    rest = transmit.payload.rest();
                    if rest == 0 {
                        continue; // the last of its message
                    }
                    let used = entry.qp.outstanding().saturating_sub(charged);
                    // One less than the turn's rest if the last one is examined (see above).
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
        tx.treat(IpOptions::default());
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
                entry.owe(now, pending_acks);
            }
        }
        if let Some((transmit, nak)) = faulted {
            entry.qp.handle_gather_fault(&transmit, nak);
            self.settle(index);
        } else if entry.qp.has_completions() {
            // Unreliable service: a sent packet is complete.
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
