//! What follows from received packets, timeouts and turns: completions, events, room, ACKs, and the
//! end of a queue pair.

use nobounce_protocol::qp::{QpEvent, QpState, Status};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::Qpn;

use crate::links::now_ns;
use crate::soft::engine::Core;
use crate::soft::engine::queue_pair::{complete, flushed};
use crate::soft::engine::timer::Timer;
use crate::soft::events::event::AsyncEvent;
use crate::soft::qp_index::QpIndex;

impl Core {
    pub(crate) fn remove(&mut self, qpn: Qpn) {
        let index = QpIndex::of(qpn);
        let Some(mut entry) = self.qps.remove(index) else { return };
        if let Some((srq, receive)) = entry.take_open_shared() {
            self.srqs.give_back(srq, receive);
        }
        if let Some(srq) = entry.posted.srq {
            self.srqs.leave(srq);
        }
        self.reports.events.forget(|event| matches!(event, AsyncEvent::Qp { qpn: of, .. } if *of == qpn));
        self.regions.staging.forget_owner(index);
        self.regions.unbind_qp(index);
        self.account.keep(&entry);
        if let Some(path) = entry.schedule.path {
            self.scheduler.leave_path(&mut entry, path);
            self.scheduler.wake_waiting(&mut self.qps, path);
        }
        entry.send_cq.forget_qp(qpn);
        entry.recv_cq.forget_qp(qpn);
    }

    /// Processes the effects of received packets, once for each queue pair.
    pub(super) fn settle_touched(&mut self, now: Nanos) {
        while let Some(index) = self.scheduler.touched.pop() {
            let Some(entry) = self.qps.get_mut(index) else { continue };
            if let Some(srq) = entry.posted.shared() {
                self.srqs.check_limit(srq, &self.reports.events);
            }
            self.settle(index);
            let Some(entry) = self.qps.get_mut(index) else { continue };
            entry.schedule.touched = false;
            let replies = entry.qp.has_replies();
            if replies {
                entry.ack.note_heard(now);
            }
            let sends = std::mem::take(&mut entry.schedule.answered) && entry.may_send();
            if sends || entry.qp.has_urgent_replies() || entry.qp.has_congestion_notification() {
                self.make_ready(index);
            } else if replies {
                entry.delay_ack(now, &mut self.scheduler.pending_acks);
            }
        }
    }

    /// Collects the results of the last protocol call: completions, events, freed requests and
    /// room.
    pub(crate) fn settle(&mut self, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        let mut overflowed = None;
        let staging = &self.regions.staging;
        // Before the completions: an application that has one may post again.
        entry.publish_room();
        if let Some(srq) = entry.posted.shared() {
            self.srqs.publish_room(srq);
        }
        while let Some(completion) = entry.qp.poll_completion() {
            if completion.status != Status::Success {
                self.account.counters.count_failed(completion.status);
                // It may come long after the last packet.
                self.scheduler.note_active(now_ns());
            }
            overflowed = complete(entry, staging, completion).or(overflowed);
        }
        while let Some(event) = entry.qp.poll_event() {
            self.reports.events.push(AsyncEvent::Qp { qpn: entry.qpn, event });
        }
        if entry.qp.state() == QpState::Error {
            while let Some(posted) = entry.posted.receives.pop_front() {
                entry.publish_room();
                self.account.counters.count_failed(Status::Flushed);
                overflowed = complete(entry, staging, flushed(&posted)).or(overflowed);
            }
            entry.posted.current = None;
            entry.gpu.prefetches = None;
            if entry.ends_sharing() {
                self.reports.events.push(AsyncEvent::Qp { qpn: entry.qpn, event: QpEvent::LastWqeReached });
            }
        }
        self.scheduler.note_held(entry);
        let oldest = entry.qp.oldest_serial();
        while entry.posted.sends.front().is_some_and(|send| send.serial < oldest) {
            entry.posted.sends.pop_front();
        }
        self.recharge(index);
        if let Some(cq) = overflowed {
            self.stop_users_of(cq);
        }
    }

    /// Updates the path's charge, and wakes other queue pairs for the freed room.
    pub(crate) fn recharge(&mut self, index: QpIndex) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        if let Some(path) = self.scheduler.recharge(entry) {
            self.scheduler.wake_waiting(&mut self.qps, path);
        }
    }

    pub(super) fn fire_timers(&mut self, now: Nanos) {
        while let Some((at, timer)) = self.scheduler.take_timer(now) {
            match timer {
                Timer::QueuePair(index) => self.fire_timer_of(index, at, now),
                // Snapshots are taken when queue pair 1 is served.
                Timer::ConnectionManager | Timer::Snapshot => self.gsi.wanted = true,
                Timer::PeerDeath => self.expire_dead_peers(now),
                Timer::KeepAlive => self.ask_for_presence(now),
                Timer::PathProbe => self.advance_path_probes(now),
            }
        }
    }

    fn fire_timer_of(&mut self, index: QpIndex, at: Nanos, now: Nanos) {
        let Some(entry) = self.qps.get_mut(index) else { return };
        if entry.schedule.armed == Some(at) {
            entry.schedule.armed = None;
        }
        if entry.qp.poll_timeout().is_some_and(|due| due <= now) {
            if entry.holds_request() {
                entry.qp.put_off(now);
            } else {
                let before = entry.qp.counters().local_ack_timeout_err;
                entry.qp.handle_timeout(now);
                if entry.qp.counters().local_ack_timeout_err > before {
                    self.suspect_path(now, index);
                }
            }
            self.settle(index);
            self.make_ready(index);
        } else {
            self.scheduler.arm(entry);
        }
    }
}
