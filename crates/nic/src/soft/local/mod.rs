//! Peers on this host, reached through shared memory.

pub(crate) mod local_peers;
pub(crate) mod probe;
pub(crate) mod routes;
