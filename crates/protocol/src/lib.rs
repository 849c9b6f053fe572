//! RoCEv2 without IO: the wire format and the protocol state machines.
//!
//! This crate opens no socket, reads no clock and holds no payload. It says *where* bytes come from
//! or go to (a work request and an offset, or a remote key and an address); the caller moves them.
//!
//! - [`cm`]: how two sides agree on a connection.
//! - [`congestion`]: window and pacing of a sender.
//! - [`qp`]: one queue pair: states, requester, responder.
//! - [`seal`]: packets between devices that share a secret.
//! - [`sim`]: endpoints and a bad network on a virtual clock.
//! - [`timing`]: times as the standard encodes them.
//! - [`wire`]: packets as bytes and as meaning; the invariant CRC.
//!
//! `#![forbid(unsafe_code)]` holds for the whole crate.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! sim  pcap        a virtual network; capture files
//! cm   qp  seal    connections; queue pairs; sealed packets
//! wire congestion  packets; congestion control
//! timing  rng      time encodings; seeded random numbers
//! ```
//!
//! | room | what |
//! |---|---|
//! | [`wire`] | headers, opcodes, ICRC: a new opcode starts in `wire/opcode.rs` |
//! | [`qp`] | requester, responder, retransmission, completions |
//! | [`cm`] | REQ, REP, RTU and the rest |
//! | [`seal`] | authentication, encryption, replay windows (feature `seal`) |
//! | [`sim`] | endpoints, loss and reordering on a virtual clock |
#![forbid(unsafe_code)]

pub mod cm;
pub mod congestion;
pub mod pcap;
pub mod qp;
pub mod rng;
#[cfg(feature = "seal")]
pub mod seal;
pub mod sim;
pub mod timing;
pub mod wire;
