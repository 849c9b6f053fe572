//! Checks of ICRCs, with the IP identification policy of each peer.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};

use nobounce_protocol::wire::icrc::{Flow, IcrcCheck};
use nobounce_protocol::wire::{IdPolicy, IdVerdict, ROCE_PORT};

use crate::links::{IcrcWriters, RxDatagram};

/// Peers remembered. Source addresses can be spoofed: when there are too many, all are dropped and
/// learnt anew.
const MAX_PEERS: usize = 1024;

/// The policy of every peer, with the latest one cached.
#[derive(Debug)]
struct IdPolicies {
    last: (IpAddr, IdPolicy),
    others: HashMap<IpAddr, IdPolicy>,
}

impl Default for IdPolicies {
    fn default() -> Self {
        Self { last: (Ipv4Addr::UNSPECIFIED.into(), IdPolicy::default()), others: HashMap::new() }
    }
}

impl IdPolicies {
    /// The policy of this peer.
    fn of(&mut self, peer: IpAddr) -> &mut IdPolicy {
        if self.last.0 != peer {
            if self.others.len() >= MAX_PEERS {
                self.others.clear();
            }
            let known = self.others.remove(&peer).unwrap_or_default();
            let (old, policy) = std::mem::replace(&mut self.last, (peer, known));
            self.others.insert(old, policy);
        }
        &mut self.last.1
    }
}

/// Checks the ICRCs of what an engine receives.
#[derive(Debug)]
pub(crate) struct IcrcChecker {
    /// Precomputed ICRCs of recent flows and packet lengths.
    writers: IcrcWriters<(u16, IpAddr)>,
    policies: IdPolicies,
    /// Packets whose IP identification was found.
    pub(crate) solved: u64,
}

impl IcrcChecker {
    pub(crate) fn new() -> Self {
        Self { writers: IcrcWriters::new(), policies: IdPolicies::default(), solved: 0 }
    }

    /// Whether the ICRC of a packet to this address is correct.
    pub(crate) fn is_valid(&mut self, local: IpAddr, datagram: &RxDatagram<'_>) -> bool {
        let policy = self.policies.of(datagram.src);
        let RxDatagram { src, src_port, bytes, ip_id, group, .. } = *datagram;
        let flow = |dst| Flow { src, dst, src_port, dst_port: ROCE_PORT };
        let checked = if let Some(&group) = group {
            flow(group).verify(policy.guess(ip_id), bytes)
        } else {
            let place = self.writers.find((src_port, src), bytes.len(), || flow(local));
            let Some(icrc_writer) = self.writers.get(place) else { return false };
            icrc_writer.verify(policy.guess(ip_id), bytes)
        };
        match checked {
            IcrcCheck::Bad => false,
            IcrcCheck::Valid { ip_id: None } => true,
            IcrcCheck::Valid { ip_id: Some(id) } => {
                let verdict = policy.accept(id);
                self.solved += u64::from(verdict == IdVerdict::Solved);
                verdict.is_accepted()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_keeps_its_own_and_their_number_is_bounded() {
        let mut peers = IdPolicies::default();
        let solving: IpAddr = [10, 0, 0, 1].into();
        for id in [5000, 5001, 5002] {
            peers.of(solving).accept(id);
        }
        assert!(peers.of(solving).is_solving());
        assert!(!peers.of([10, 0, 0, 2].into()).is_solving());
        assert!(peers.of(solving).is_solving(), "remembered while another was heard");
        for n in 0..5000_u32 {
            peers.of(Ipv4Addr::from(n).into());
        }
        assert!(peers.others.len() <= MAX_PEERS);
    }
}
