//! A drop-in `librdmacm.so.1`: connections of unmodified RDMA programs on the software NIC.
//!
//! Thin: a C identifier stands for a communication of the NIC's connection manager
//! (`nobounce_nic::soft::Cm`), which speaks the standard's messages. Queue pairs are those of our
//! libibverbs, which the program has loaded. Loading the library does nothing.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! connect  resolve  endpoint          exported functions
//! id  event  qp  multicast            identifiers and what they hold
//! device  channel                     devices, event channels
//! address  calls  layout              C addresses, libibverbs, rdma_cma.h
//! ```
//!
//! | room | what |
//! |---|---|
//! | `layout`, `address` | structures of `rdma/rdma_cma.h`, addresses of C |
//! | `calls` | the libibverbs that the program has loaded |
//! | `device`, `channel` | a connection manager for each device; queues of events |
//! | `id`, `event`, `qp`, `multicast` | identifiers, their events, queue pairs and groups |
//! | `resolve`, `connect`, `endpoint` | addresses to devices, connections, names to endpoints |

mod address;
mod calls;
mod channel;
mod connect;
mod device;
mod endpoint;
mod event;
mod id;
mod layout;
mod multicast;
mod qp;
mod resolve;
#[cfg(test)]
mod tests;

use nobounce_dropin::{endings, entry, log};

use channel::{rdma_create_event_channel, rdma_destroy_event_channel};
use connect::{
    rdma_accept, rdma_connect, rdma_disconnect, rdma_establish, rdma_listen, rdma_notify, rdma_reject,
};
use device::{rdma_free_devices, rdma_get_devices};
use endpoint::{rdma_create_ep, rdma_destroy_ep, rdma_freeaddrinfo, rdma_getaddrinfo};
use event::{rdma_ack_cm_event, rdma_event_str, rdma_get_cm_event, rdma_get_request};
use id::{
    rdma_create_id, rdma_destroy_id, rdma_destroy_qp, rdma_get_dst_port, rdma_get_src_port, rdma_migrate_id,
};
use multicast::{rdma_join_multicast, rdma_join_multicast_ex, rdma_leave_multicast};
use qp::{
    rdma_create_qp, rdma_create_qp_ex, rdma_create_srq, rdma_create_srq_ex, rdma_destroy_srq,
    rdma_init_qp_attr,
};
use resolve::{rdma_bind_addr, rdma_resolve_addr, rdma_resolve_route, rdma_set_option};

// Not offered: ECE, sockets over RDMA.
include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// A program that has run out of memory gets an error from us, not an abort.
#[global_allocator]
static ALLOCATOR: nobounce_dropin::reserve::WithReserve = nobounce_dropin::reserve::WithReserve;
