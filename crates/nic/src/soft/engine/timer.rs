//! Timers of an engine.

use crate::soft::qp_index::QpIndex;

/// What a timer of an engine is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// Retransmission, and other timeouts of the queue pair with this index.
    QueuePair(QpIndex),
    /// Timeouts of the connection manager.
    ConnectionManager,
    /// The next snapshot of the totals.
    Snapshot,
    /// Queue pairs whose peer died end in error.
    PeerDeath,
    /// Peers are asked whether they live.
    KeepAlive,
    /// Paths to peers are probed.
    PathProbe,
}
