//! Files of another machine, written into registered memory by RDMA.
//!
//! A [`FileServer`] exports the files below a directory. A [`FileClient`] names ranges of them and
//! places in its memory, of the host or a GPU; the server writes the bytes there by RDMA WRITE.
//! There is no file system client, and the receiver copies nothing.
//!
//! ```
//! use std::time::Duration;
//! use nobounce::Device;
//! use nobounce_storage::{FileClient, FileRange, FileServer, ServerOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! const SOON: Duration = Duration::from_secs(10);
//! let folder = std::env::temp_dir().join(format!("nobounce-storage-{}", std::process::id()));
//! std::fs::create_dir_all(&folder)?;
//! std::fs::write(folder.join("model.bin"), b"weights")?;
//!
//! let options = ServerOptions { listen: "127.0.0.1:0".parse()?, ..ServerOptions::default() };
//! let server = FileServer::start(&Device::open()?, &folder, options)?;
//!
//! let client = FileClient::connect(&Device::open()?, server.local_addr(), SOON)?;
//! assert_eq!(client.stat("model.bin", SOON)?, 7);
//! let memory = client.register(4096)?;
//! let range = FileRange { offset: 3, len: 4, memory: 100 };
//! let read = client.read(&memory, &[("model.bin", &[range])])?;
//! assert_eq!(read.wait(SOON)?, 4);
//! let mut bytes = [0; 4];
//! memory.view().region().read_at(100, &mut bytes)?;
//! assert_eq!(&bytes, b"ghts");
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok(())
//! # }
//! ```
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! client    server   reader    the two ends
//! queue     short               requests in turn, and those that need none
//! jobs      cache               one request; open files
//! request   root   error       messages; a directory
//! ```
//!
//! | room | what |
//! |---|---|
//! | `request` | the messages, and their limits |
//! | `root` | files below a directory, and no others |
//! | `cache`, `jobs`, `short` | mapped files; a request as a thread of the server carries it out |
//! | `client`, `server` | the interface |
//! | `reader` | requests, in the thread of the agent |
#![deny(unsafe_code)]

mod cache;
mod client;
mod error;
#[doc(hidden)]
pub mod fuzzing;
#[cfg(test)]
mod hostile;
mod jobs;
mod queue;
mod reader;
mod request;
#[allow(unsafe_code)] // one system call
mod root;
mod server;
mod short;

pub use client::{FileClient, FileMemory, FileTicket};
pub use error::{ClientError, ServerError};
pub use request::{FileRange, MAX_PATH, MAX_RANGES};
pub use server::{FileServer, ServerOptions};
