//! Packets in rings of shared memory: built in place by the sender, read in place by a peer on
//! this host.

pub(in crate::links) mod exports;
pub(in crate::links) mod leases;
pub(in crate::links) mod mapping;
pub(in crate::links) mod peer_ring;
pub(in crate::links) mod rendezvous;
pub(in crate::links) mod ring;

pub(in crate::links) use peer_ring::Hold;
pub(in crate::links) use peer_ring::PeerRing;
