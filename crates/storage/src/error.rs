//! Errors of both ends.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use nobounce_transfer::{AgentError, TransferError};

use crate::request::{MAX_PATH, MAX_RANGES};

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The directory cannot be used.
    #[error("cannot serve files below {root}: {source}")]
    Root {
        /// The directory.
        root: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The address is reachable from other machines, and there is no list of peers.
    #[error("{0} is reachable from other machines: name the peers that may connect (--allow 10.0.0.0/24)")]
    NoAllowList(SocketAddr),
    /// The address is reachable from other machines, and the device has no key.
    #[error(
        "{0} is reachable from other machines: give the server and its clients a key (openssl rand -hex 32 > FILE; chmod 600 FILE; NOBOUNCE_KEY=FILE)"
    )]
    NoKey(SocketAddr),
    /// Files may be written, and there is no list of peers.
    #[error("files are writable only for named peers: give a list (--allow 10.0.0.7, --allow 127.0.0.1)")]
    WritableToAll,
    /// The agent did not start.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// A thread did not start.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

/// Why a client's request failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No connection.
    #[error("cannot use the file server at {addr}: {reason}")]
    Connect {
        /// The address.
        addr: String,
        /// The reason.
        reason: String,
    },
    /// The server refused the request, or could not carry it out.
    #[error("the file server: {0}")]
    Refused(String),
    /// A path is too long.
    #[error("a path of {0} bytes: the limit is {MAX_PATH}")]
    Path(usize),
    /// There are too many ranges.
    #[error("{0} ranges in one request: the limit is {MAX_RANGES}; make several requests")]
    TooMany(usize),
    /// A range does not fit into the memory; nothing was requested.
    #[error("{len} bytes at offset {memory} are not inside of {size} bytes of memory; nothing was requested")]
    OutOfBounds {
        /// Offset in the memory.
        memory: u64,
        /// Length of the range.
        len: u64,
        /// Length of the memory.
        size: u64,
    },
    /// The connection, or an export, failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The memory cannot be exported.
    #[error("cannot let the server write to the memory: {0}")]
    Export(String),
    /// No result yet.
    #[error("no result within {0:?}; the request goes on: wait again")]
    Timeout(Duration),
}
