//! IP identification policy of each peer, and ICRC checks.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};

use nobounce_protocol::wire::icrc::{Flow, IcrcCheck};
use nobounce_protocol::wire::{IdPolicy, IdVerdict, ROCE_PORT};

use crate::links::RxDatagram;
use crate::soft::engine::Core;

/// Peers remembered. Source addresses can be spoofed: when there are too many, all are dropped and
/// learnt anew.
const MAX_PEERS: usize = 1024;

/// The policy of every peer, with the latest one cached.
#[derive(Debug)]
pub(crate) struct Peers {
    last: (IpAddr, IdPolicy),
    others: HashMap<IpAddr, IdPolicy>,
}

impl Default for Peers {
    fn default() -> Self {
        Self { last: (Ipv4Addr::UNSPECIFIED.into(), IdPolicy::default()), others: HashMap::new() }
    }
}

impl Peers {
    /// The policy of this peer.
    pub(crate) fn policy(&mut self, peer: IpAddr) -> &mut IdPolicy {
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

impl Core {
    /// Whether the ICRC is correct.
    pub(crate) fn check_icrc(&mut self, datagram: &RxDatagram<'_>) -> bool {
        let policy = self.account.peers.policy(datagram.src);
        let RxDatagram { src, src_port, bytes, ip_id, group, .. } = *datagram;
        let flow = |dst| Flow { src, dst, src_port, dst_port: ROCE_PORT };
        let checked = if let Some(&group) = group {
            flow(group).verify(policy.guess(ip_id), bytes)
        } else {
            let place = self.icrc_writers.find((src_port, src), bytes.len(), || flow(self.local));
            let Some(icrc_writer) = self.icrc_writers.get(place) else { return false };
            icrc_writer.verify(policy.guess(ip_id), bytes)
        };
        match checked {
            IcrcCheck::Bad => false,
            IcrcCheck::Valid { ip_id: None } => true,
            IcrcCheck::Valid { ip_id: Some(id) } => {
                let verdict = policy.accept(id);
                self.account.counters.icrc_solved += u64::from(verdict == IdVerdict::Solved);
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
        let mut peers = Peers::default();
        let solving: IpAddr = [10, 0, 0, 1].into();
        for id in [5000, 5001, 5002] {
            peers.policy(solving).accept(id);
        }
        assert!(peers.policy(solving).is_solving());
        assert!(!peers.policy([10, 0, 0, 2].into()).is_solving());
        assert!(peers.policy(solving).is_solving(), "remembered while another was heard");
        for n in 0..5000_u32 {
            peers.policy(Ipv4Addr::from(n).into());
        }
        assert!(peers.others.len() <= MAX_PEERS);
    }
}
