//! The named parts of an engine's state.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use nobounce_protocol::timing::{MILLISECOND, Nanos};
use nobounce_protocol::wire::Marker;

use crate::soft::counters::Counters;
use crate::soft::engine::overflows::Overflows;
use crate::soft::engine::peers::Peers;
use crate::soft::engine::queue_pair::PendingAcks;
use crate::soft::engine::timer::Timer;
use crate::soft::local::local_peers::LocalPeers;
use crate::soft::local::routes::Routes;
use crate::soft::qp_index::QpIndex;
use crate::tally::PathCounters;

/// Between two snapshots, while packets arrive or leave.
const SNAPSHOT_INTERVAL: Nanos = 250 * MILLISECOND;

/// Whose turn it is, and when.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    /// Queue pairs with packets to send, in round-robin order.
    pub(crate) ready: VecDeque<QpIndex>,
    pub(crate) pending_acks: PendingAcks,
    /// Queue pairs with received packets.
    pub(crate) touched: Vec<QpIndex>,
    /// The last batch had no room for the delayed ACKs.
    pub(crate) answers_are_next: bool,
    pub(crate) timers: BinaryHeap<Reverse<(Nanos, Timer)>>,
    /// Consecutive calls that received nothing.
    pub(crate) idle_calls: u32,
    /// When packets last arrived or left.
    pub(crate) active_at: Nanos,
    pub(crate) snapshot: SnapshotTimer,
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
    /// A packet arrived or leaves.
    #[inline]
    pub(crate) fn note_active(&mut self, now: Nanos) {
        self.active_at = now;
        if self.snapshot == SnapshotTimer::Idle {
            let due = now + SNAPSHOT_INTERVAL;
            self.snapshot = SnapshotTimer::Due(due);
            self.timers.push(Reverse((due, Timer::Snapshot)));
        }
    }
}

/// Markers of unreliable services, which measure what a same-host receiver has taken.
#[derive(Debug, Default)]
pub(crate) struct Markers {
    /// Those to be returned, and their destinations.
    pub(crate) returns: Vec<(IpAddr, Marker)>,
    /// Their senders: a marker returns on the route that other packets would take.
    pub(crate) senders: Routes,
}

/// Same-host peers of datagrams.
#[derive(Debug, Default)]
pub(crate) struct SameHost {
    pub(crate) peers: LocalPeers,
    /// Queue pairs with datagrams to unresolved peers.
    pub(crate) unresolved: Vec<QpIndex>,
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

/// What the engine has moved and counted.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) counters: Counters,
    /// Bytes moved by destroyed queue pairs, by peer.
    pub(crate) moved: HashMap<IpAddr, PathCounters>,
    pub(crate) peers: Peers,
}

/// Completion-queue overflows of the device, and how many this engine has handled.
#[derive(Debug)]
pub(crate) struct OverflowCursor {
    pub(crate) shared: Arc<Overflows>,
    pub(crate) known: usize,
}
