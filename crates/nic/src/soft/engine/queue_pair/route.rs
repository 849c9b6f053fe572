//! Where the packets of a queue pair go.

use std::net::IpAddr;

use nobounce_protocol::qp::Datagram;
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{Header, Marker, Qpn, Service};

use super::QueuePair;
use crate::links::{LocalRoute, PeerName, peer_name};
use crate::soft::local::local_peers::LocalPeers;
use crate::soft::local::routes::Routes;

/// The route of its next packet, and for UD the routes of its datagrams.
#[derive(Debug)]
pub(crate) struct QpRoute {
    /// The route to a same-host peer, on which its packets have no ICRC.
    pub(crate) local: Option<LocalRoute>,
    /// The peer sends through a ring of its own: packets by UDP are not the peer's.
    pub(crate) heard_locally: bool,
    /// The routes of its datagrams, for UD; `local` is then that of the last packet.
    pub(crate) routes: Option<Box<Routes>>,
    /// The destination of its last packet of an unreliable service.
    direction: Option<(IpAddr, Qpn)>,
}

impl QpRoute {
    pub(super) fn new(service: Service) -> Self {
        Self {
            local: None,
            heard_locally: false,
            routes: (service == Service::Ud).then(Box::default),
            direction: None,
        }
    }
}

impl QueuePair {
    /// A datagram was posted.
    #[inline]
    pub(crate) fn note_addressee(&mut self, to: &Datagram) {
        if let Some(routes) = &mut self.route.routes {
            routes.expect(peer_name(to.remote, to.dest_qpn));
        }
    }

    /// Whether it has a datagram to an unresolved peer.
    #[inline]
    pub(crate) fn has_unresolved(&self) -> bool {
        self.route.routes.as_ref().is_some_and(|routes| routes.has_unresolved())
    }

    /// A packet of an unreliable service is about to be built: a datagram takes the route to its
    /// receiver.
    pub(crate) fn choose_route(&mut self, header: &Header) {
        let to = peer_name(*self.qp.destination(), header.dest_qpn);
        if let Some(route) = self.route.routes.as_mut().and_then(|routes| routes.turn_to(to)) {
            self.route.local = route;
        }
    }

    /// The route to the peer has ended: packets to it need an ICRC again.
    pub(crate) fn part_with(&mut self, gone: PeerName) {
        let was_ours = match &mut self.route.routes {
            Some(routes) => routes.forget(gone),
            None => self.peer() == gone,
        };
        if was_ours {
            self.route.local = None;
            self.route.heard_locally = false;
        }
    }

    /// A packet of an unreliable service leaves.
    pub(crate) fn note_direction(&mut self, header: &Header, local_peers: &mut LocalPeers) {
        let (to, qpn) = (*self.qp.destination(), header.dest_qpn);
        if self.route.direction.is_none_or(|(before, _)| before != to) {
            self.qp.set_same_host(local_peers.contains(to));
        }
        self.route.direction = Some((to, qpn));
    }

    /// The marker to be sent now, and its destination.
    pub(crate) fn marker(&mut self, now: Nanos) -> Option<(IpAddr, Marker)> {
        let (addr, to) = self.route.direction?;
        let number = self.qp.poll_marker(now)?;
        Some((addr, Marker { returns: false, to, from: self.qpn, number }))
    }
}
