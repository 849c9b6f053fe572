//! What is plugged where, and why GPUDirect is off.
//!
//! * [`facts`]: everything that is known of one machine; read by [`sysfs`] and by probes of the command, saved and replayed as a file.
//! * [`diagnose`]: facts in, findings and verdicts out. Pure: the same facts give the same answer anywhere.
//! * [`tree`]: the PCI tree and distances. [`draw`]: the tree on a terminal and as SVG.
//! * [`log`]: logs of NCCL and UCX, which tell what was done and not what could be.
//! * [`machines`]: known machines as facts, for tests, examples and trying things out.
#![forbid(unsafe_code)]

mod analysis;
pub mod bandwidth;
mod checks;
mod clean;
pub mod cpu_list;
mod diagnosis;
pub mod draw;
pub mod explain;
pub mod facts;
pub mod finding;
pub mod fuzzing;
mod ladder;
pub mod log;
mod lost;
pub mod machines;

mod names;
mod nccl;
pub mod nearest;
pub mod platform;
pub mod predict;
mod report;
pub mod sysfs;
pub mod tree;
mod ucx;
mod usable;
pub mod verdict;

pub use clean::clean;
pub use diagnosis::{Diagnosis, diagnose};
pub use report::{Style, report};
