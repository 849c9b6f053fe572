//! Move memory between machines by RDMA, with or without an RDMA NIC.
//!
//! Open a [`Device`], register memory ([`Region`]), and connect to a peer ([`Connection`]). Then
//! write to, read from or operate atomically on the peer's memory while its program does something
//! else. The device is a NIC of the system's libibverbs, or else a software NIC that speaks RoCEv2,
//! where the CPU moves the bytes. GPU memory is registered and used in the same way
//! ([`Device::register_gpu`]). The path of its bytes is known ([`Region::paths`]) and counted
//! ([`PathCounters`]).
//!
//! Both ends of a connection in one program:
//!
//! ```
//! use std::time::Duration;
//! use nobounce::{ConnectOptions, Device};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! const SOON: Duration = Duration::from_secs(10);
//! let listener = Device::open()?.listen("127.0.0.1:0")?;
//! let addr = listener.local_addr();
//!
//! // The passive end only offers memory. Its counter starts at 40.
//! let passive = std::thread::spawn(move || -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
//!     let conn = listener.accept(SOON)?;
//!     let region = conn.device().register(4096)?;
//!     region.write_u64(64, 40)?;
//!     conn.send_region(&region)?;
//!     conn.recv_message(SOON)?; // "done"
//!     let mut greeting = vec![0; 5];
//!     region.read_at(0, &mut greeting)?;
//!     Ok(greeting)
//! });
//!
//! // The active end does all the work.
//! let device = Device::open()?;
//! let conn = device.connect(addr, &ConnectOptions::default())?;
//! let remote = conn.recv_region(SOON)?;
//! let local = device.register(4096)?;
//! local.write_at(0, b"hello")?;
//! let write = conn.write(&local, 0..5, &remote, 0)?; // our bytes 0..5 to its offset 0
//! let read = conn.read(&local, 1000..1005, &remote, 0)?; // and back, to our bytes 1000..1005
//! let add = conn.fetch_add(&local, 2000, &remote, 64, 2)?; // the old value comes to our offset 2000
//! for ticket in [write, read, add] {
//!     conn.wait(ticket, SOON)?;
//! }
//! let mut echo = [0; 5];
//! local.read_at(1000, &mut echo)?;
//! assert_eq!((&echo, local.read_u64(2000)?), (b"hello", 40));
//! conn.send_message(b"done")?;
//! assert_eq!(passive.join().unwrap()?, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! listener               Listener
//! message  rails         messages; several adapters
//! connection             Connection, its lanes
//! handshake  wait        agreeing; waiting
//! device                 Device
//! file                   files into regions, and back
//! region                 Region
//! ```
//!
//! | room | what |
//! |---|---|
//! | `region` | registered memory of the host or a GPU |
//! | [`file`](mod@file) | files into regions, and back |
//! | `connection` | operations on the peer's memory, tickets |
//! | `rails` | several adapters as one |
#![deny(unsafe_code)]

mod access;
mod choose;
mod connect;
mod connection;
mod control;
#[allow(unsafe_code)] // `register_raw` hands on what its caller promises
mod device;
pub mod file;
#[doc(hidden)]
pub mod fuzzing;
mod gpu_access;
mod handshake;
mod health;
mod lane;
mod listener;
mod message;
mod path_mtu;
mod peer_gone;
#[allow(unsafe_code)] // the same memory is registered with several devices
mod rails;
#[allow(unsafe_code)] // registering memory is a promise about it
mod region;
mod shares;
mod tickets;
mod wait;

pub use access::AccessError;
pub use choose::{AUTO, DeviceChoice};
pub use connect::{ConnectError, ConnectOptions};
pub use connection::Connection;
pub use device::Device;
pub use handshake::{HANDSHAKE_VERSION, HandshakeError, Hello, MAX_QPS, QpHalf};
pub use lane::{Lane, PostError};
pub use listener::{AcceptError, ListenError, Listener};
pub use message::MessageError;
pub use nobounce_memory as memory;
pub use nobounce_memory::gpu::GpuOptions;
pub use nobounce_memory::path::{Mechanism, Path, Paths, Reason, Require};
pub use nobounce_nic as nic;
pub use nobounce_nic::Config;
pub use nobounce_nic::any::OpenError;
pub use nobounce_nic::hard;
pub use nobounce_nic::tally::{PathCounters, PathTotals, Tally};
pub use nobounce_nic::work::{Access, Mtu, Status, WorkKind};
pub use rails::{RailError, RailRegion, Rails, RemoteRailRegion};
pub use region::{Region, RegisterError, RemoteRegion};
pub use tickets::{Completion, Ticket};
pub use wait::WaitError;
