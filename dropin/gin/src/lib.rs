//! A plugin for GPU-initiated networking (GIN) of NCCL 2.30.5 and later, type GPI,
//! in `libnobounce.so.1`, which `libnccl-gin.so` is a link to.
//!
//! Kernels of NCCL's device API write descriptors into a ring in host memory, the layout of which
//! is that of [`nobounce_initiated::descriptor`]. The proxy of [`nobounce_initiated`] carries them
//! out. No thread of NCCL takes part.
//!
//! A module imports its own room and lower ones.
//!
//! ```text
//! plugin                           functions that NCCL calls
//! context                          rings of kernels and their proxy
//! group                            ranks and their windows
//! abi  layout  error  log  nccl    NCCL's interface
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`abi`] | NCCL's plugin interface |
//! | [`plugin`] | the functions that NCCL calls |
//! | [`group`] | the ranks of a communicator, and their windows |
//! | [`context`] | the rings of kernels, and their proxy |
//! | `layout` | the GPU memory of a context |
//! | [`error`], [`log`], [`nccl`] | why a call fails, NCCL's log and its version |

pub mod abi;
pub mod context;
pub mod error;
pub mod group;
mod layout;
pub mod log;
pub mod nccl;
pub mod plugin;
