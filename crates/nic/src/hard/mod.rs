//! Hardware NICs, by the system's libibverbs.
//!
//! The same objects as the software NIC's ([`Device`], [`Pd`], [`Mr`], [`Cq`], [`Channel`], [`Qp`]) with the same requests and
//! completions; each holds what it was made from, so that everything goes in the right order. What has no meaning here (datagrams,
//! shared receive queues, memory windows) is not offered.

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
