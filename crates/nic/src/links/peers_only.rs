//! A link that takes packets of listed peers only.

use super::{Link, LocalRoute, PeerName, RxDatagram, TxBatch};
use crate::allow::AllowList;

/// Wraps a link.
#[derive(Debug)]
pub(super) struct PeersOnlyLink<L> {
    inner: L,
    peers: AllowList,
    refused: u64,
}

impl<L: Link> PeersOnlyLink<L> {
    /// Wraps `inner`.
    pub(super) fn new(inner: L, peers: AllowList) -> Self {
        Self { inner, peers, refused: 0 }
    }
}

impl<L: Link> Link for PeersOnlyLink<L> {
    forward!(self => self.inner; identity, opening, same_host, services, waiting);

    fn local_route(&mut self, to: PeerName) -> Option<LocalRoute> {
        self.inner.local_route(to)
    }

    fn send(&mut self, batch: &mut TxBatch) {
        self.inner.send(batch);
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let Self { inner, peers, refused } = self;
        let mut delivered = 0;
        inner.receive(&mut |datagram| {
            if peers.admits(datagram.src) {
                delivered += 1;
                sink(datagram);
            } else {
                *refused += 1;
            }
        });
        delivered
    }

    fn next_deadline(&self) -> Option<u64> {
        self.inner.next_deadline()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut all = self.inner.counters();
        all.push(("unlisted_peer", self.refused));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::stub::{StubLink, THERE};
    use super::*;

    #[test]
    fn packets_of_other_peers_are_counted_and_dropped() {
        for (list, taken) in [("127.0.0.2", 2), ("127.0.0.0/8", 2), ("10.0.0.0/8, fd00::/8", 0)] {
            let (mut stub, _) = StubLink::new();
            stub.inbox = vec![vec![1; 60], vec![2; 60]];
            let mut link = PeersOnlyLink::new(stub, list.parse().unwrap());
            let mut seen = 0;
            let delivered = link.receive(&mut |datagram| seen += usize::from(datagram.src == THERE));
            assert_eq!((delivered, seen), (taken, taken), "{list}");
            assert_eq!(link.counters(), [("unlisted_peer", 2 - taken as u64)]);
        }
    }
}
