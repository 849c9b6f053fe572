//! The software NIC.
//!
//! One [`Device`] has one or more engines, each with its own link, lock and thread. Either that
//! thread drives the engine, or the application threads that post and poll do ([`Progress`]).
//! Objects are created from the device ([`Pd`], [`Mr`], [`Cq`], [`Channel`], [`Qp`], [`Srq`],
//! [`Mw`]) and keep it alive.

mod cm;
mod config;
mod counters;
mod crc;
mod engine;
mod error;
mod events;
mod gpu;
mod lifecycle;
mod limits;
mod local;
mod objects;
mod port_speed;
mod progress;
mod qp_index;

pub use crate::links::udp::LocalPorts;
pub use crate::links::{LinkChoice, UnknownLink};
pub use cm::{BindError, Cm};
pub use config::{Config, ConfigError, Progress, Retransmit};
pub use counters::Counters;
pub use engine::memory_windows::MwKind;
pub use engine::multicast::GroupError;
pub use engine::path_probe::PathMtu;
pub use engine::snapshot::last_snapshot;
pub use error::{CreateQpError, OpenError, RegisterError};
pub use events::cm_channel::{CmChannel, CmNotice, Told};
pub use events::event::AsyncEvent;
pub use lifecycle::live_folder;
pub use limits::{CreateError, DeviceLimits};
pub use objects::channel::{Blocked, Channel};
pub use objects::cq::{Cq, CqError, ResizeError};
pub use objects::device::{Device, Pd};
pub use objects::mr::Mr;
pub use objects::mw::Mw;
pub use objects::qp::{ModifyError, Qp, QpInit};
pub use objects::register::{NewMemory, Rereg};
pub use objects::srq::{CreateSrqError, Srq, SrqLimitError, SrqLimits, SrqResizeError};
pub use objects::xrc::XrcDomain;
pub use port_speed::PortSpeed;
