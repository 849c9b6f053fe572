//! The connection manager on a virtual clock: one sentence each.

mod bad_network;
mod ends;
mod kernel;
mod requests;
mod world;
