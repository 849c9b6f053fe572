//! When a queue pair may send.

use nobounce_protocol::timing::Nanos;

use crate::soft::engine::path::PathIndex;

/// Packets that a queue pair may send in its round-robin turn: one full segmented send. (Two: 64
/// queue pairs together reach 0.6 of one instead of 0.9.)
pub(super) const TURN: u64 = 15;

/// The same through shared memory, where the route is its own: a whole piece of a READ.
pub(super) const SAME_HOST_TURN: u64 = 32;

/// Its place in the engine's lists, and its share of its path.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) path: Option<PathIndex>,
    /// Bytes that it has charged to its path.
    pub(crate) charged: u64,
    /// It is in the list of queue pairs with received packets.
    pub(crate) touched: bool,
    /// Those packets included a response: it may send more.
    pub(crate) answered: bool,
    /// Packets left in its turn.
    pub(crate) turn_left: u64,
    /// It is in the ready queue.
    pub(crate) ready: bool,
    /// It waits for room on its path.
    pub(crate) waiting: bool,
    /// Its earliest entry in the timer heap.
    pub(crate) armed: Option<Nanos>,
    /// When its peer was heard last.
    pub(crate) heard: Nanos,
    /// Which opening of its peer's device it is connected to, once known.
    pub(crate) peer_generation: Option<u64>,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            path: None,
            charged: 0,
            touched: false,
            answered: false,
            turn_left: TURN,
            ready: false,
            waiting: false,
            armed: None,
            heard: 0,
            peer_generation: None,
        }
    }
}
