//! The software NIC.
//!
//! One [`Device`] has one engine, or several: each with a link, a lock and a thread of its own. Either that thread drives the engine, or
//! the threads of the application that post and poll do ([`Progress`]). Objects are made from the device ([`Pd`], [`Mr`], [`Cq`],
//! [`Channel`], [`Qp`], [`Srq`], [`Mw`]) and keep it alive.

mod build;
mod channel;
mod cm;
mod cm_channel;
mod completions;
mod config;
mod copier;
mod copiers;
mod counters;
mod cq;
mod deaths;
mod device;
mod engine;
mod entry;
mod event;
pub(crate) mod eventfd;
mod exit;
mod feed;
pub(crate) mod fork;
mod grh;
mod gsi;
mod host;
mod limits;
mod mixed;
mod mw;
mod near;
mod notices;
#[cfg(test)]
mod notices_tests;
mod numbers;
mod once;
mod overflows;
mod path;
mod peer;
mod probe;
mod progress;
mod qp;
mod region;
mod register;
mod release;
mod report;
mod ring;
mod scatter;
mod snapshot;
mod srq;
mod stage;
mod standstill;
mod step;
mod sync;
mod tally;
mod target;
mod ways;

pub use channel::Channel;
pub use cm::{BindError, Cm};
pub use cm_channel::{CmChannel, CmNotice, Told};
pub use config::{Config, ConfigError, LinkChoice};
pub use counters::Counters;
pub use cq::{Cq, CqError, ResizeError, WorkCompletion};
pub use device::{Device, OpenError, Pd};
pub use event::AsyncEvent;
pub use limits::{CreateError, DeviceLimits};
pub use mw::{Mw, MwKind};
pub use nobounce_protocol::qp::{
    Access, AttrMask, Datagram, GRH_LEN, LocalWork, Mtu, PostError, QpAttr, QpCounters, QpEvent, QpState,
    Remote, Service, Source, Status, TransitionError, Treatment, WorkKind,
};
pub use nobounce_protocol::wire::{Psn, Qpn};
pub use progress::Progress;
pub use qp::{CreateQpError, ModifyError, Operation, Qp, QpInit, QpLimits, RecvRequest, SendRequest};
pub use region::{Mr, RegisterError};
pub use register::{NewMemory, Rereg};
pub use scatter::Sge;
pub use snapshot::last_snapshot;
pub use srq::{CreateSrqError, Srq, SrqLimitError, SrqLimits};
pub use tally::{PathCounters, PathTotals, Tally};
