//! The InfiniBand connection manager (CM): connection setup by MADs on queue pair 1.
//!
//! [`Agent`] is one side, without IO: it takes messages and the time, and returns messages, events
//! and timers. It retransmits messages until they are answered, answers duplicates again, and keeps
//! an ended connection in TIMEWAIT. [`ip`] is what the kernel's `rdma_cm` adds: IP addresses and
//! ports.

mod agent;
mod communication;
mod event;
pub mod ip;
mod mad;
mod message;
mod route;

pub use agent::{Agent, AgentCounters, CmConfig, CmError};
pub use communication::{Accept, CommId, Connect};
pub use event::Event;
pub use mad::{GSI_QKEY, GSI_QPN, MAD_LEN, Mad, MessageKind};
pub use message::{About, CmMessage, Ids, Mra, Rej, Rep, Req, SidrRep, SidrReq, emit_dreq, private_len};
pub use route::{CmRoute, refusal};

/// Reject reasons; the standard's numbers.
pub mod reason {
    #![allow(missing_docs)]
    pub const NO_RESOURCES: u16 = 3;
    pub const TIMEOUT: u16 = 4;
    pub const UNSUPPORTED: u16 = 5;
    pub const INVALID_COMM_ID: u16 = 6;
    pub const INVALID_SERVICE_ID: u16 = 8;
    pub const INVALID_TRANSPORT_TYPE: u16 = 9;
    pub const STALE_CONNECTION: u16 = 10;
    pub const CONSUMER: u16 = 28;
}

/// SIDR status; the standard's numbers.
pub mod sidr_status {
    #![allow(missing_docs)]
    pub const SUCCESS: u8 = 0;
    pub const UNSUPPORTED: u8 = 1;
    pub const REJECTED: u8 = 2;
}
