//! A drop-in `libibverbs.so.1`: runs unmodified RDMA programs on the software NIC.
//!
//! Thin: each function finds our object behind a C pointer, calls down, and returns errors as the
//! manual pages specify. The data path (`post.rs`, `poll.rs`) looks nothing up. Loading the library
//! does nothing.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! export  private                               symbols and their versions
//! async_event  import  qp_modify  report        calls on several objects
//! qp  qp_ex  post | cq  cq_ex  poll  channel    queue pairs; completion queues
//! pd  mr  mw  ah  srq  xrc  dm  domain          other objects
//! context  attributes  port  multicast          an open device
//! device_list  live  convert  system            devices, pointers, numbers
//! view  sysfs  kernel  strings  rates           the border to the system
//! ```
//!
//! | room | what |
//! |---|---|
//! | `view`, `sysfs`, `kernel`, `strings`, `rates` | files, structures of the kernel, names and codes |
//! | `unsupported`, `device_log` | functions that return an error; the device's events in our log |
//! | `device_list`, `live`, `convert` | our devices, which pointers are alive, numbers of C |
//! | `system` | the system's libibverbs, for hardware devices beside ours |
//! | `context` to `xrc` | one file for each kind of object; they hold each other by C pointers |
//! | `post`, `poll` | the data path: it looks nothing up |
//! | `export`, `private` | the public symbols, and those that drivers of rdma-core import |

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
