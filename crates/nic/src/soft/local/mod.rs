//! Which addresses are of this host, the routes of datagrams, and probes whether a RoCE device
//! listens at an address.

pub(crate) mod local_peers;
pub(crate) mod probe;
pub(crate) mod routes;
