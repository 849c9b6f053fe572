//! A stand-in for libcuda that serves memory from memfd: for tests only.
//!
//! It exports CUDA's driver functions with their C signatures and is loaded as libcuda would be. It
//! has no GPU: kernel launches are refused. It models above all what a real driver *forbids*, so
//! that a test fails where code breaks a rule:
//!
//! * a device address is not mapped: dereferencing one faults;
//! * calls that need a current context are refused without one, and after a device reset;
//! * during a stream capture, calls of threads that are not in RELAXED mode fail and invalidate the
//!   capture;
//! * while a kernel spins (see the knobs), freeing and synchronous copies block, as does work on
//!   the default stream;
//! * copies are asynchronous: they are not over when the call returns.
//!
//! Tests control it by the `fake_cuda_*` functions of `knobs.rs`, which [`client`] finds by
//! `dlsym`. The symbol `nobounce_stand_in` marks it.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! host  ipc  kernel  pointer    further calls
//! driver                        contexts, streams, memory, copies: one state
//! abi  status  backing          words
//! ```
//!
//! | room | what |
//! |---|---|
//! | driver | `world` is the state; each call of CUDA's is in the file of its subject |

#![allow(non_snake_case, reason = "the names are CUDA's")]

mod abi;
mod backing;
mod call;
mod capture;
pub mod client;
mod context;
mod copy;
mod device;
mod event;
mod export;
mod host;
mod ipc;
mod kernel;
mod knobs;
mod lane;
mod malloc;
mod memory;
mod pointer;
mod space;
mod spoil;
mod status;
mod stream;
mod vmm;
mod world;

/// Marks the library as a stand-in: a process that loads it must not report its memory as a GPU's.
#[unsafe(no_mangle)]
static nobounce_stand_in: i32 = 1;
