//! Hardware NICs, by the system's libibverbs.
//!
//! The same objects as the software NIC's ([`Device`], [`Pd`], [`Mr`], [`Cq`], [`Channel`], [`Qp`])
//! with the same requests and completions. Each holds its parents, so that objects are destroyed in
//! the right order. Datagrams, shared receive queues and memory windows are not offered here.

mod context;
mod cq;
mod device;
mod error;
mod gid;
mod gid_table;
mod gpu;
mod library;
mod list;
mod memory;
mod proof;
mod qp;
mod refusal;
mod stage;
#[cfg(test)]
mod standin;

pub use cq::{Channel, Cq};
pub use device::{Device, Health, LinkLayer, Options, Port};
pub use error::{CqError, CreateError, ModifyError, OpenError, PostError, RegisterError};
pub use gid::{GidChoice, GidEntry, GidKind, GidWish, NoGid, choose as choose_gid};
pub use library::{Library, LibraryError, loader_error};
pub use list::{Listed, ListedPort, list, names};
pub use memory::{Mr, Pd};
pub use qp::{Qp, state_code};
pub use refusal::Refusal;
