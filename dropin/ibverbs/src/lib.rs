//! A drop-in `libibverbs.so.1`: runs unmodified RDMA programs on the software NIC.
//!
//! Thin: each function finds our object behind a C pointer, calls down, and returns errors as the
//! manual pages specify. The data path (`post.rs`, `poll.rs`) looks nothing up. Loading the library
//! does nothing.

mod ah;
mod async_event;
mod attributes;
mod channel;
mod context;
mod convert;
mod cq;
mod cq_ex;
mod device_list;
mod device_log;
mod dm;
mod domain;
mod export;
mod import;
mod kernel;
mod live;
mod mr;
mod multicast;
mod mw;
mod pd;
mod poll;
mod port;
mod post;
mod private;
mod qp;
mod qp_ex;
mod qp_modify;
mod rates;
mod report;
mod srq;
mod strings;
mod sysfs;
mod system;
mod unsupported;
mod view;
mod xrc;

use nobounce_dropin::{entry, log};

/// A program that has run out of memory gets an error from us, not an abort.
#[global_allocator]
static ALLOCATOR: nobounce_dropin::reserve::WithReserve = nobounce_dropin::reserve::WithReserve;
