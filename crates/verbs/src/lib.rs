//! The verbs interface as C lays it out: structures, constants and function tables, and no logic.
//!
//! Shared by the library that is called (our drop-in) and the one that calls (a driver of real
//! NICs). Fields and constants have the names of `infiniband/verbs.h`; types drop the prefix:
//! `struct ibv_qp` is [`Qp`]. C enumerations are plain integers here, since the other side may pass
//! any number. Layouts are those of rdma-core 65, which older programs share. Structures grew at
//! their end (or, for [`VerbsContext`], at their beginning). The tests compare every offset with C.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! layouts    one file for each object of the interface
//! ```
//!
//! | room | what |
//! |---|---|
//! | layouts | structures, constants and tables, without imports of each other |

// Fields and constants are the standard's: its manual pages describe them.
#![allow(missing_docs)]
// Raw layouts, full of pointers and unions: nothing to print.
#![allow(missing_debug_implementations)]
#![allow(clippy::use_self)] // a table reads as C has it

mod address;
mod completion;
mod context;
mod cq_ex;
mod device;
mod domain;
mod event;
mod kernel;
mod memory;
mod port;
mod qp;
mod qp_ex;
mod srq;
mod work;

pub use address::*;
pub use completion::*;
pub use context::*;
pub use cq_ex::*;
pub use device::*;
pub use domain::*;
pub use event::*;
pub use kernel::*;
pub use memory::*;
pub use port::*;
pub use qp::*;
pub use qp_ex::*;
pub use srq::*;
pub use work::*;

/// A function pointer of a table that this crate neither calls nor fills.
pub type Slot = Option<unsafe extern "C" fn()>;

/// A structure that is only pointed to.
#[repr(C)]
pub struct Opaque {
    _private: [u8; 0],
}
