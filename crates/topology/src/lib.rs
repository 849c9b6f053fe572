//! What is plugged where.
//!
//! * [`facts`]: everything that is known of one machine; read by [`sysfs`] and by probes of the
//!   command, saved and replayed as a file.
//! * [`tree`]: the PCI tree and distances. [`analysis`]: facts combined.
//! * [`machines`]: known machines as facts, for tests, examples and experiments.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! tree     PCI tree, distances, methods, analysis
//! facts    facts, sysfs, known machines
//! ```
//!
//! | room | what |
//! |---|---|
//! | [`facts`], [`sysfs`], [`machines`] | what is known of a machine, read from files, or known in advance |
//! | [`tree`], [`adapters`], [`gpudirect`], [`methods`], [`usable`], [`analysis`] | facts put together |
#![forbid(unsafe_code)]

pub mod adapters;
pub mod analysis;
pub mod bandwidth;
mod clean;
pub mod cpu_list;
pub mod facts;
pub mod gpudirect;
pub mod iommu;
pub mod machines;
pub mod mad;
pub mod methods;
pub mod nearest;
pub mod netlink;
pub mod platform;
pub mod sysfs;
pub mod tree;
pub mod usable;

pub use clean::{clean, clean_lines};
