//! Errors of transfers and peers.

use std::time::Duration;

use nobounce::{ConnectError, ListenError, OpenError, RegisterError, Status};

use crate::pieces::ListError;

/// Why a peer is gone. A peer never returns: an agent that connects again is another peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Gone {
    /// This end closed it.
    #[error("this end closed the connection")]
    ClosedHere,
    /// The peer closed the connection.
    #[error("it closed the connection")]
    Closed,
    /// The peer's process ended.
    #[error("its process ended, or its machine reset the connection")]
    Ended,
    /// Nothing came from it for the silence limit.
    #[error("nothing came from it for {0:?}: its process is stopped, or the network is down")]
    Silent(Duration),
    /// An agent with the same name, host and listening address, and another generation, has
    /// connected.
    #[error("an agent of the same name was started anew at the same address")]
    Replaced,
    /// A request failed, which stops its queue pair.
    #[error("a request failed and stopped the connection: {0}")]
    Broken(String),
    /// It does not read the side channel.
    #[error("it reads nothing: {0} bytes wait for it on the side channel")]
    NotReading(usize),
    /// It sent frames that are malformed or in a wrong order.
    #[error("it sent frames that are against the protocol: {0}")]
    Protocol(&'static str),
}

/// Why a transfer was not started, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The peer is gone.
    #[error("peer {peer} is gone: {reason}; connect again")]
    PeerGone {
        /// Its name.
        peer: String,
        /// The reason.
        reason: Gone,
    },
    /// No result yet.
    #[error("no result within {0:?}; the transfer goes on: wait again, or cancel it")]
    Timeout(Duration),
    /// The peer's device refused access to its memory.
    #[error(
        "peer {peer} refused access to its memory: the region was dropped there, or does not allow it; \
         export it again and connect again"
    )]
    RemoteAccess {
        /// The peer's name.
        peer: String,
    },
    /// A request failed for another reason.
    #[error("the transfer with peer {peer} failed: {status:?}; connect again")]
    Failed {
        /// The peer's name.
        peer: String,
        /// Status of the completion.
        status: Status,
    },
    /// The device did not accept a request.
    #[error("the device refused a request: {0}")]
    Post(String),
    /// What the transfer was to wait for has failed; nothing was posted.
    #[error("the work that the transfer waits for failed: {0}")]
    Gate(String),
    /// The transfer was cancelled.
    #[error("the transfer was cancelled; parts of it may have arrived")]
    Cancelled,
    /// The list is invalid; nothing was posted.
    #[error(transparent)]
    List(#[from] ListError),
    /// The local memory is of another agent.
    #[error("the local memory was registered by another agent: register it with this one")]
    OtherAgent,
    /// The local memory is read-only.
    #[error("the local memory is read-only: a transfer cannot read into it")]
    ReadOnly,
    /// The tag is too long.
    #[error("a tag of {0} bytes: the limit is {max}", max = crate::frame::MAX_TAG)]
    Tag(usize),
    /// The message is too long.
    #[error("a message of {0} bytes: the limit is {max}", max = crate::frame::MAX_MESSAGE)]
    Message(usize),
    /// The peer's hardware NIC cannot reach the memory.
    #[error(
        "region {0:?} of the peer is staged GPU memory that its NIC cannot reach: let the peer write or read, or \
         export host memory there"
    )]
    RemoteClosed(String),
    /// The region is of another generation of the peer.
    #[error("region {region:?} is of an earlier start of peer {peer}: ask for its metadata again")]
    Stale {
        /// The peer's name.
        peer: String,
        /// The region's name.
        region: String,
    },
    /// The region is not exported any more.
    #[error("peer {peer} has withdrawn region {region:?}")]
    Withdrawn {
        /// The peer's name.
        peer: String,
        /// The region's name.
        region: String,
    },
    /// The peer has not exported such a region.
    #[error("peer {peer} exports no region {region:?} within {timeout:?}; it exports: {exported}")]
    NoRegion {
        /// The peer's name.
        peer: String,
        /// The region's name.
        region: String,
        /// How long it was waited for.
        timeout: Duration,
        /// What it exports.
        exported: String,
    },
    /// The announcement has ended already.
    #[error("the announcement of this transfer has ended: announce again")]
    AnnouncementEnded,
}

/// Why there is no agent, or no peer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The device could not be opened.
    #[error(transparent)]
    Device(#[from] OpenError),
    /// The agent cannot listen there.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No connection to the peer.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The name is too long.
    #[error("a name of {0} bytes: the limit is {max}", max = crate::frame::MAX_NAME)]
    Name(usize),
    /// There is no time to answer in.
    #[error("a silence limit of 0 would end every peer at once")]
    Silence,
    /// Too many regions are exported.
    #[error("more than {max} exports: withdraw some", max = crate::frame::MAX_EXPORTS)]
    TooManyExports,
    /// The memory cannot be exported.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The peer answered with something else.
    #[error("no agent answered at {addr}: {what}")]
    NoAgent {
        /// Its address.
        addr: String,
        /// What came instead.
        what: String,
    },
    /// Another thread gave up the attempt.
    #[error("the attempt to connect was given up")]
    Aborted,
    /// No peer came in time.
    #[error("no peer connected within {0:?}")]
    NoPeer(Duration),
    /// The agent does not listen.
    #[error("this agent does not listen: give it an address to listen at")]
    NotListening,
    /// The metadata are malformed or of another version.
    #[error("malformed metadata, or metadata of another version of nobounce")]
    Metadata,
    /// The metadata are of an agent that was started anew meanwhile.
    #[error("the metadata are of an earlier start of agent {name}: ask for them again")]
    Stale {
        /// Its name.
        name: String,
    },
    /// The system refused.
    #[error("cannot start the agent's thread: {0}")]
    Thread(#[from] std::io::Error),
}
