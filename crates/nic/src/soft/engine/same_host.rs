//! Datagrams to and from this host: which of their receivers are local, and the markers that
//! measure what those have taken.

use std::net::IpAddr;

use nobounce_protocol::wire::Marker;

use crate::links::{Link, TxBatch, peer_name};
use crate::soft::engine::packet::put_marker;
use crate::soft::engine::qp_table::QpTable;
use crate::soft::local::local_peers::LocalPeers;
use crate::soft::local::routes::Routes;
use crate::soft::qp_index::QpIndex;

/// Markers kept until they are sent; further ones are dropped, and their senders retransmit.
const MAX_RETURNS: usize = 64;

/// Same-host peers of datagrams.
#[derive(Debug, Default)]
pub(crate) struct SameHost {
    pub(crate) peers: LocalPeers,
    /// Queue pairs with datagrams to unresolved peers.
    pub(crate) unresolved: Vec<QpIndex>,
    /// Markers to be returned, and their destinations.
    pub(crate) returns: Vec<(IpAddr, Marker)>,
    /// Their senders: a marker returns on the route that other packets would take.
    pub(crate) senders: Routes,
}

impl SameHost {
    /// Resolves the local peers among datagram destinations before the first datagram is built.
    /// Later ones must not overtake it.
    #[cold]
    pub(crate) fn resolve_local_peers(&mut self, link: &mut dyn Link, qps: &mut QpTable) {
        while let Some(index) = self.unresolved.pop() {
            let Some(entry) = qps.get_mut(index) else { continue };
            if let Some(routes) = &mut entry.route.routes {
                routes.resolve_local_peers(link, &mut self.peers);
            }
        }
    }

    /// The same for the senders of markers.
    #[inline]
    pub(crate) fn resolve_senders(&mut self, link: &mut dyn Link) {
        if self.senders.has_unresolved() {
            self.senders.resolve_local_peers(link, &mut self.peers);
        }
    }

    /// A same-host peer's marker: it is to be returned.
    pub(crate) fn take_marker(&mut self, src: IpAddr, marker: &Marker) {
        if self.returns.len() < MAX_RETURNS {
            self.senders.expect(peer_name(src, marker.from));
            self.returns.push((src, marker.returned()));
        }
    }

    /// Returns markers, and counts them in `sent`; whether the batch is full.
    pub(crate) fn fill(&mut self, tx: &mut TxBatch, sent: &mut u64) -> bool {
        while let Some((to, marker)) = self.returns.pop() {
            if !tx.has_room() {
                self.returns.push((to, marker));
                return true;
            }
            put_marker(tx, to, 0, &marker);
            *sent += 1;
        }
        false
    }
}
