//! Whose turn it is, and when: the lists of queue pairs that have something to do or wait for
//! something, and the timers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use nobounce_protocol::timing::{MILLISECOND, Nanos};

use crate::soft::engine::path::{NetworkPaths, PathIndex};
use crate::soft::engine::qp_table::QpTable;
use crate::soft::engine::queue_pair::{PendingAcks, QueuePair};
use crate::soft::engine::timer::Timer;
use crate::soft::qp_index::QpIndex;

/// Between two snapshots, while packets arrive or leave.
const SNAPSHOT_INTERVAL: Nanos = 250 * MILLISECOND;

/// The scheduler of an engine.
#[derive(Debug)]
pub(crate) struct Scheduler {
    /// Queue pairs with packets to send, in round-robin order.
    pub(crate) ready: VecDeque<QpIndex>,
    /// Queue pairs with received packets.
    pub(crate) touched: Vec<QpIndex>,
    pub(crate) pending_acks: PendingAcks,
    pub(crate) copies: CopyWaits,
    /// Those that wait for room of a path, and the paths' budgets.
    pub(crate) paths: NetworkPaths,
    /// The last batch had no room for the delayed ACKs.
    pub(crate) answers_are_next: bool,
    timers: BinaryHeap<Reverse<(Nanos, Timer)>>,
    /// Consecutive calls that received nothing.
    pub(crate) idle_calls: u32,
    /// When packets last arrived or left.
    pub(crate) active_at: Nanos,
    pub(crate) snapshot: SnapshotTimer,
}

/// Queue pairs that wait for the GPU's copy engine.
#[derive(Debug, Default)]
pub(crate) struct CopyWaits {
    pub(crate) holding: Vec<QpIndex>,
    /// One of them found no free fetch chunk.
    pub(crate) starved: bool,
    /// Reclaim cursor: the queue pair that chunks were taken from last.
    pub(crate) reclaim_cursor: QpIndex,
}

/// When the next snapshot of the totals is taken. An idle device needs none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SnapshotTimer {
    /// No snapshots are taken.
    #[default]
    Off,
    /// With the next packet.
    Idle,
    Due(Nanos),
}

impl Scheduler {
    pub(crate) fn new(paths: NetworkPaths) -> Self {
        Self {
            ready: VecDeque::new(),
            touched: Vec::new(),
            pending_acks: PendingAcks::default(),
            copies: CopyWaits::default(),
            paths,
            answers_are_next: false,
            timers: BinaryHeap::new(),
            idle_calls: 0,
            active_at: 0,
            snapshot: SnapshotTimer::default(),
        }
    }

    /// A packet arrived or leaves.
    #[inline]
    pub(crate) fn note_active(&mut self, now: Nanos) {
        self.active_at = now;
        if self.snapshot == SnapshotTimer::Idle {
            let due = now + SNAPSHOT_INTERVAL;
            self.snapshot = SnapshotTimer::Due(due);
            self.set_timer(due, Timer::Snapshot);
        }
    }

    pub(crate) fn set_timer(&mut self, at: Nanos, timer: Timer) {
        self.timers.push(Reverse((at, timer)));
    }

    /// When the next timer is due.
    pub(crate) fn next_timer(&self) -> Option<Nanos> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// The next timer, if it is due.
    #[inline]
    pub(crate) fn take_timer(&mut self, now: Nanos) -> Option<(Nanos, Timer)> {
        let &Reverse((at, timer)) = self.timers.peek()?;
        if at > now {
            return None;
        }
        self.timers.pop();
        Some((at, timer))
    }

    /// Puts the queue pair's next timeout on the heap, unless an earlier entry exists.
    #[inline]
    pub(crate) fn arm(&mut self, entry: &mut QueuePair) {
        let Some(at) = entry.qp.poll_timeout() else { return };
        if entry.schedule.armed.is_none_or(|armed| at < armed) {
            entry.schedule.armed = Some(at);
            self.set_timer(at, Timer::QueuePair(entry.index()));
        }
    }

    /// The queue pair may send.
    #[inline]
    pub(crate) fn make_ready(&mut self, entry: &mut QueuePair) {
        if !entry.schedule.ready {
            entry.schedule.ready = true;
            self.ready.push_back(entry.index());
        }
    }

    /// The queue pair received a packet.
    #[inline]
    pub(crate) fn touch(&mut self, entry: &mut QueuePair) {
        if !entry.schedule.touched {
            entry.schedule.touched = true;
            self.touched.push(entry.index());
        }
    }

    /// If the queue pair holds something back until copies are over, it is looked at when some are.
    #[inline]
    pub(crate) fn note_held(&mut self, entry: &mut QueuePair) {
        if entry.joins_holding() {
            self.copies.holding.push(entry.index());
        }
    }

    /// The queue pair found no room on its path.
    pub(crate) fn wait_for_room(&mut self, entry: &mut QueuePair) {
        if let Some(path) = entry.schedule.path
            && entry.qp.is_path_limited()
            && !entry.schedule.waiting
        {
            entry.schedule.waiting = true;
            self.paths.wait(path, entry.index());
        }
    }

    /// Updates the charge of the queue pair's path; returns the path if that freed room.
    #[inline]
    pub(crate) fn recharge(&mut self, entry: &mut QueuePair) -> Option<PathIndex> {
        let outstanding = entry.qp.outstanding();
        let path = entry.schedule.path?;
        let freed = outstanding < entry.schedule.charged;
        self.paths.charge(path, entry.schedule.charged, outstanding);
        entry.schedule.charged = outstanding;
        freed.then_some(path)
    }

    /// The queue pair has a new peer: its packets are charged to another path from now on. Returns
    /// the old one, which has room.
    pub(crate) fn change_path(&mut self, entry: &mut QueuePair) -> Option<PathIndex> {
        let (remote, slot) = entry.peer();
        let reliable = entry.qp.service().is_reliable();
        let new = self.paths.join(remote, slot, reliable);
        let old = entry.schedule.path.replace(new)?;
        self.leave_path(entry, old);
        Some(old)
    }

    /// The queue pair does not use that path any more.
    pub(crate) fn leave_path(&mut self, entry: &mut QueuePair, path: PathIndex) {
        let charged = std::mem::take(&mut entry.schedule.charged);
        // It no longer waits there; otherwise it would never join the queue of another path.
        entry.schedule.waiting = false;
        self.paths.charge(path, charged, 0);
        self.paths.leave(path, entry.qp.service().is_reliable());
    }

    /// Lets the next queue pair that waits for room retry, if there is room. One is enough: when
    /// its turn is over and room is left, the next one follows.
    #[inline]
    pub(crate) fn wake_waiting(&mut self, qps: &mut QpTable, path: PathIndex) {
        while let Some(index) = self.paths.wake(path) {
            if let Some(entry) = qps.get_mut(index) {
                entry.schedule.waiting = false;
                self.make_ready(entry);
                return;
            }
        }
    }
}
