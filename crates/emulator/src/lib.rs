//! A network path in user space, between two network namespaces. See the README for the rooms.

mod config;
mod emulator;
mod model;
mod namespace;
mod packet;
mod tun;

pub use config::{DEFAULT_MTU, DEFAULT_QUEUE, ParsePathError, PathConfig};
pub use emulator::{DirectionReport, Emulator, EmulatorError, End};
pub use model::{PathCounts, PathModel};
