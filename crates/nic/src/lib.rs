//! The device: a software RDMA NIC in user space, or a hardware NIC, behind one interface.
//!
//! - [`links`]: how packets leave and arrive: `udp`, and the wrappers `pcap` and `fault`.
//! - [`soft`]: protection domains, memory regions, queues, and the engine that drives them.
//! - [`hard`]: the same objects on the NICs of the system's libibverbs.
//! - [`any`]: either of the two.

pub mod any;
pub mod hard;
pub mod interfaces;
pub mod links;
mod process;
pub mod soft;
mod sync;
pub mod work;
