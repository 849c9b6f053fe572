//! The device: a software RDMA NIC in user space.
//!
//! - [`links`]: how packets leave and arrive: `udp`, and the wrappers `pcap` and `fault`.
//! - [`soft`]: protection domains, memory regions, queues, and the engine that drives them.

pub mod links;
pub mod soft;
