//! What an engine has moved and counted.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};

use crate::soft::counters::{self, Counters};
use crate::soft::engine::queue_pair::QueuePair;
use crate::tally::PathCounters;

/// Peers with separate byte counters after their queue pairs are destroyed.
const MAX_PEERS: usize = 1024;

/// The counters of an engine.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) counters: Counters,
    /// Bytes moved by destroyed queue pairs, by peer.
    pub(crate) moved: HashMap<IpAddr, PathCounters>,
}

impl Account {
    /// A queue pair is destroyed: keeps what it has counted.
    pub(crate) fn keep(&mut self, entry: &QueuePair) {
        counters::add(&mut self.counters.qps, entry.qp.counters());
        // Bound the map: queue pairs to ever new (invented) peers must not grow it without end.
        let peer =
            if self.moved.len() < MAX_PEERS { entry.qp.attr().remote } else { Ipv4Addr::UNSPECIFIED.into() };
        self.moved.entry(peer).or_default().add(&entry.tally);
    }
}
