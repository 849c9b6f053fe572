//! KV-cache transfer: lists of pages between agents, with notifications bound to them.
//!
//! An [`Agent`] registers memory ([`View`]), exports it by name, and connects to other agents
//! ([`Peer`]). One call moves thousands of pages ([`Peer::write_pages`]) and gives one [`Transfer`]
//! to wait for. A tag makes the other agent hear of its end exactly once ([`Notification`]): after
//! all bytes are visible to host and GPU, or with the reason of the failure.
//!
//! ```
//! use std::time::Duration;
//! use nobounce::Device;
//! use nobounce_transfer::{Agent, AgentOptions, Notify, Outcome, Pages};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! const SOON: Duration = Duration::from_secs(10);
//! const PAGE: u64 = 4096;
//! let decode = Agent::listening(&Device::open()?, "decode", "127.0.0.1:0", AgentOptions::default())?;
//! let cache = decode.register(64 * 4096)?;
//! decode.export("kv", &cache)?;
//!
//! let prefill = Agent::new(&Device::open()?, "prefill", AgentOptions::default())?;
//! let computed = prefill.register(64 * 4096)?;
//! computed.region().fill(0..64 * 4096, 7)?;
//! let peer = prefill.connect(decode.local_addr().unwrap(), SOON)?;
//! let remote = peer.region("kv", SOON)?;
//! // Our pages 3, 4 and 9 become pages 0, 7 and 8 over there.
//! let pages = Pages::whole(&[3, 4, 9], &[0, 7, 8], PAGE);
//! let transfer = peer.write_pages(&computed, &remote, &pages, Notify::Tag(b"request 1"))?;
//! assert_eq!(transfer.wait(SOON)?.bytes, 3 * PAGE);
//!
//! let arrived = decode.notification(SOON).unwrap();
//! assert_eq!((&arrived.tag[..], arrived.outcome), (&b"request 1"[..], Outcome::Complete { bytes: 3 * PAGE }));
//! let mut byte = [0];
//! cache.region().read_at(8 * 4096, &mut byte)?;
//! assert_eq!(byte, [7]);
//! # Ok(())
//! # }
//! ```
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! agent   connecting               Agent, the accepting thread
//! handler                          what the agent's thread calls
//! peer                             Peer: submits commands
//! service   link   lanes   endings the agent's thread: posts, polls, frames
//! greet     announcements
//! shared    hook  job   transfer   what both sides know
//! memory    exports   notification  wire   frame_lane
//! pieces    frame   error
//! ```
//!
//! | room | what |
//! |---|---|
//! | `pieces` | page lists, strides, merging |
//! | `frame`, `wire`, `frame_lane` | the protocol, and its ways: the TCP side channel, the first lane |
//! | `link`, `lanes` | one peer in the agent's thread |
//! | `agent`, `peer` | the interface |
#![deny(unsafe_code)]

mod agent;
mod announcements;
mod connecting;
mod endings;
mod error;
mod exports;
mod frame;
mod frame_lane;
#[doc(hidden)]
pub mod fuzzing;
mod greet;
mod handler;
mod hook;
#[cfg(test)]
mod hostile;
mod job;
mod lanes;
mod link;
#[allow(unsafe_code)] // registering memory is a promise about it
mod memory;
mod message;
mod notification;
mod peer;
mod pieces;
mod service;
mod shared;
mod transfer;
mod wire;

pub use agent::{Agent, AgentOptions};
pub use connecting::Attempt;
pub use error::{AgentError, Gone, TransferError};
pub use frame::{MAX_MESSAGE, MAX_NAME, MAX_TAG};
pub use handler::Handler;
pub use job::{Direction, Gate};
pub use memory::{Foreign, Owner, View};
pub use message::MAX_UNREAD;
pub use nobounce_nic::allow::{AllowList, AllowListError};
pub use notification::{Notification, Outcome};
pub use peer::{Announcement, Notify, Part, Peer, Remote, stream_gate};
pub use pieces::{ListError, Pages, Piece, Repeat};
pub use shared::{AgentCounters, Event};
pub use transfer::{Summary, Transfer};
