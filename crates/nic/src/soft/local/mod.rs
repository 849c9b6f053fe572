//! Peers on this host, reached through shared memory.

pub(crate) mod near;
pub(crate) mod probe;
pub(crate) mod ways;
