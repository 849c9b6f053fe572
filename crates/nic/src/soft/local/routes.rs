//! Routes of datagrams: each datagram names its receiver, and same-host receivers may have a ring.

use std::collections::HashMap;

use crate::links::{Link, LocalRoute, PeerName};
use crate::soft::local::local_peers::LocalPeers;

/// Receivers remembered. Beyond that all are dropped and resolved again: the link still knows its
/// peers.
const MOST: usize = 1024;

/// The receivers of datagrams, and the local route to each, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    known: HashMap<PeerName, Option<LocalRoute>>,
    /// The receiver of the last packet.
    last: Option<PeerName>,
    /// Unresolved peers: resolved before the first packet to them is built.
    unresolved_peers: Vec<PeerName>,
}

impl Routes {
    /// A packet will be sent there.
    pub(crate) fn expect(&mut self, to: PeerName) {
        if self.last != Some(to) && !self.known.contains_key(&to) && !self.unresolved_peers.contains(&to) {
            self.unresolved_peers.push(to);
        }
    }

    pub(crate) fn has_unresolved(&self) -> bool {
        !self.unresolved_peers.is_empty()
    }

    /// Resolves all local peers among them.
    #[cold]
    pub(crate) fn resolve_local_peers(&mut self, link: &mut dyn Link, local_peers: &mut LocalPeers) {
        while let Some(to) = self.unresolved_peers.pop() {
            let route = if local_peers.contains(to.0) { link.local_route(to) } else { None };
            self.learn(to, route);
        }
    }

    /// Records the route; `None`: the link's default.
    fn learn(&mut self, to: PeerName, route: Option<LocalRoute>) {
        if self.known.len() >= MOST {
            self.known.clear();
            self.last = None;
        }
        self.known.insert(to, route);
    }

    /// The next packet goes there: returns its route, unless the last packet had the same receiver.
    pub(crate) fn turn_to(&mut self, to: PeerName) -> Option<Option<LocalRoute>> {
        if self.last == Some(to) {
            return None;
        }
        self.last = Some(to);
        Some(self.known.get(&to).cloned().flatten())
    }

    /// Its route has ended; returns whether it was known. The next datagram resolves the receiver
    /// again.
    pub(crate) fn forget(&mut self, gone: PeerName) -> bool {
        if self.last == Some(gone) {
            self.last = None;
        }
        self.known.remove(&gone).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use nobounce_protocol::wire::Qpn;

    use super::*;
    use crate::links::peer_name;

    #[test]
    fn each_receiver_is_asked_for_once_and_again_when_it_went() {
        let mut routes = Routes::default();
        let [one, other] =
            [0x01_0001, 0x02_0001].map(|qpn| peer_name(IpAddr::from([127, 0, 0, 1]), Qpn::new(qpn)));
        assert_eq!((one.1, other.1), (1, 2));
        for to in [one, other, one] {
            routes.expect(to);
        }
        let mut unresolved_peers = Vec::new();
        while let Some(to) = routes.unresolved_peers.pop() {
            unresolved_peers.push(to);
            routes.learn(to, None);
        }
        assert_eq!(unresolved_peers, [other, one]);
        assert!(
            routes.turn_to(one).is_some() && routes.turn_to(one).is_none() && routes.turn_to(other).is_some()
        );
        routes.expect(one);
        routes.expect(other);
        assert!(!routes.has_unresolved());
        assert!(routes.forget(other) && !routes.forget(other));
        routes.expect(other);
        assert!(routes.has_unresolved() && routes.turn_to(other).is_some(), "whatever it was is not kept");
    }

    #[test]
    fn remembered_receivers_are_bounded() {
        let mut routes = Routes::default();
        for number in 0..3 * u32::try_from(MOST).unwrap() {
            routes.learn((IpAddr::from(number.to_be_bytes()), 0), None);
            assert!(routes.known.len() <= MOST);
        }
    }
}
