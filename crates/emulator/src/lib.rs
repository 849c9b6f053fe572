//! A network path in user space, between two network namespaces.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! emulator            two namespaces, a thread for each direction
//! namespace  tun      network namespaces, TUN devices
//! model               queue, delay, loss of one direction
//! packet              the fields of IP packets that a path reads
//! config              what a path does, as a program writes it
//! ```
//!
//! | room | what |
//! |---|---|
//! | `config` | [`PathConfig`]: rate, delay, jitter, loss, queue, MTU, from text or code |
//! | `packet` | sizes, ECN bits and checksums of IP packets |
//! | `model` | when a packet leaves one direction, or that it is dropped |
//! | `namespace`, `tun` | what the kernel provides for a path |
//! | `emulator` | [`Emulator`]: both directions, from its start to its drop |

mod config;
mod emulator;
mod model;
mod namespace;
mod packet;
mod tun;

pub use config::{DEFAULT_MTU, DEFAULT_QUEUE, ParsePathError, PathConfig};
pub use emulator::{DirectionReport, Emulator, EmulatorError, End};
pub use model::{PathCounts, PathModel};
