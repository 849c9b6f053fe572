//! GPU-initiated operations: kernels write descriptors into rings, a proxy carries them out.
//!
//! ```text
//! kernel ──descriptor──▶ ring (host memory) ──▶ proxy ──work request──▶ queue pair ──▶ peer
//!    ▲                                            │                                     │
//!    └── consumer index, counters, status (GPU memory) ◀┘        signals (GPU memory) ◀─┘
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`descriptor`] | the 64 bytes of an operation |
//! | [`device`] | the channel as a kernel sees it; the device code is `include/nobounce.cuh` |
//! | [`ring`] | the ring that a kernel fills, and the one end that reads it |
//! | [`words`] | counters, consumer index and status, as kernels read them |
//! | [`table`] | memory and ranks that descriptors name, and the check of a descriptor |
//! | [`parts`] | what a proxy is made of |
//! | `peer` | a rank: its queue pair and requests |
//! | [`proxy`] | carries descriptors out |
//! | [`thread`] | the thread of a proxy |
//! | [`mesh`] | the queue pairs of a rank |
//! | [`rendezvous`] | how ranks find each other |
//! | [`options`], [`join_error`] | what a rank is to be, and why it could not |
//! | [`world`] | a rank: symmetric heap, channels, proxy |
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones: `formats` (descriptor, device, words), `ring`,
//! `table`, `proxy` (parts, peer, proxy, thread), `world` (rendezvous, options,
//! mesh, join_error, control_memory, world).

mod control_memory;
pub mod descriptor;
pub mod device;
pub mod join_error;
pub mod mesh;
pub mod options;
pub mod parts;
mod peer;
pub mod proxy;
pub mod rendezvous;
pub mod ring;
pub mod table;
pub mod thread;
pub mod words;
pub mod world;
