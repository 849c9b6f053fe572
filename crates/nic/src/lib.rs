//! The device: a software RDMA NIC in user space, or a hardware NIC, behind one interface.
//!
//! - [`links`]: how packets leave and arrive: `udp`, `shm`, and the wrappers `pcap` and `fault`.
//! - [`soft`]: protection domains, memory regions, queues, and the engine that drives them.
//! - [`hard`]: the same objects on the NICs of the system's libibverbs.
//! - [`any`]: either of the two.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! any                              either NIC behind the same objects
//! hard | soft: cm                  connections by address
//!      |       objects             Device Pd Mr Mw Cq Srq Qp
//!      |       lifecycle           exit of the process, report
//!      |       progress            which thread drives an engine, how it waits
//!      |       engine              packets in, packets out, queue pairs, timers
//!      |       local gpu events    same-host peers; GPU memory; notifications
//!      |       counters  settings  what is counted; limits, options, QpIndex
//! links                            UDP, shared memory, faults, capture
//! interfaces  allow                addresses of the namespace; who may connect
//! work  tally  sync  process       requests and completions; bytes by path; rings, forks
//! ```
//!
//! | room | what |
//! |---|---|
//! | [`interfaces`], [`allow`] | addresses and interfaces of this namespace; networks that peers may be in |
//! | `process`, `sync` | forks, CPUs, eventfd; lock-free ring and waker |
//! | [`work`], [`tally`] | requests and completions, and bytes by path, of either NIC |
//! | [`links`] | the `Link` trait, `udp`, `shm`, `rings`, the wrappers `sealed`, `pcap` and `fault` |
//! | [`soft`] | the software NIC |
//! | [`hard`], [`any`] | NICs of the system's libibverbs; either of the two |

pub mod allow;
pub mod any;
pub mod hard;
pub mod interfaces;
pub mod links;
mod process;
pub mod soft;
mod sync;
pub mod tally;
pub mod work;

pub use process::cpu::ask_for_short_slices;
pub use process::eventfd::EventFd;
pub use process::fork::ParentOnly;
pub use soft::{Config, ConfigError, PathMtu, Progress};
