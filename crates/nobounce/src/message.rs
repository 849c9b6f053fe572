//! Small messages and region descriptors on the side channel.

use std::io;
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::control::{ControlError, MAX_MESSAGE};
use crate::region::{Region, RemoteRegion};

/// Send timeout for a peer that does not read.
const SEND_WITHIN: Duration = Duration::from_secs(10);

/// The first byte of a frame.
const MESSAGE: u8 = 0;
const REGION: u8 = 1;

/// Why a message was not sent or received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The peer closed the connection, or its process ended.
    #[error("the peer is gone: it closed the connection or its process ended")]
    PeerGone,
    /// No message arrived, or the peer did not read.
    #[error("the peer neither sent nor received a message within {0:?}")]
    Timeout(Duration),
    /// The message is too long.
    #[error(
        "a message of {len} bytes exceeds the {max} bytes of the side channel: send it as an operation instead"
    )]
    TooLong {
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The next frame is of the other kind, and stays queued.
    #[error("the peer sent {came} where {wanted} was expected: both ends must agree on the order")]
    Order {
        /// The kind that arrived.
        came: &'static str,
        /// The expected kind.
        wanted: &'static str,
    },
    /// An invalid region descriptor.
    #[error("malformed region descriptor from the peer")]
    Malformed,
    /// The side channel failed.
    #[error("the TCP side channel failed: {0}")]
    Io(io::Error),
}

impl MessageError {
    fn of(error: ControlError, timeout: Duration) -> Self {
        match error {
            ControlError::Closed => Self::PeerGone,
            ControlError::Timeout => Self::Timeout(timeout),
            ControlError::TooLong { len, max } => Self::TooLong { len, max },
            ControlError::Io(error) => Self::Io(error),
        }
    }
}

impl Connection {
    /// The longest message.
    pub const MAX_MESSAGE: usize = MAX_MESSAGE;

    /// Sends a message of at most 1 MiB on the side channel. Messages are ordered with each other,
    /// but not with operations.
    ///
    /// # Errors
    /// It is too long, or the peer is gone or has not read for 10 s (the side channel is then
    /// closed).
    pub fn send_message(&self, message: &[u8]) -> Result<(), MessageError> {
        self.send_frame(MESSAGE, message)
    }

    /// The peer's next message.
    ///
    /// # Errors
    /// None came in time (call again), the peer is gone, or a region descriptor comes first.
    pub fn recv_message(&self, timeout: Duration) -> Result<Vec<u8>, MessageError> {
        self.recv_frame(MESSAGE, timeout)
    }

    /// Sends the peer the address and key of a region.
    ///
    /// # Errors
    /// As for [`send_message`](Self::send_message).
    pub fn send_region(&self, region: &Region) -> Result<(), MessageError> {
        let bytes = postcard::to_stdvec(&region.remote()).map_err(|_| MessageError::Malformed)?;
        self.send_frame(REGION, &bytes)
    }

    /// The next region descriptor from the peer.
    ///
    /// # Errors
    /// None came in time (call again), the peer is gone, or a message comes first.
    pub fn recv_region(&self, timeout: Duration) -> Result<RemoteRegion, MessageError> {
        let frame = self.recv_frame(REGION, timeout)?;
        postcard::from_bytes(&frame).map_err(|_| MessageError::Malformed)
    }

    /// Sends our region descriptor and receives the peer's.
    ///
    /// # Errors
    /// As for [`send_region`](Self::send_region) and [`recv_region`](Self::recv_region).
    pub fn exchange_region(&self, region: &Region, timeout: Duration) -> Result<RemoteRegion, MessageError> {
        self.send_region(region)?;
        self.recv_region(timeout)
    }

    fn send_frame(&self, kind: u8, body: &[u8]) -> Result<(), MessageError> {
        let sent = self.control.send(&[kind], body, Instant::now() + SEND_WITHIN);
        sent.map_err(|error| MessageError::of(error, SEND_WITHIN))
    }

    fn recv_frame(&self, kind: u8, timeout: Duration) -> Result<Vec<u8>, MessageError> {
        let received =
            self.control.receive_message(Instant::now() + timeout, |frame| frame.first() == Some(&kind));
        match received.map_err(|error| MessageError::of(error, timeout))? {
            Some(mut frame) => {
                frame.remove(0);
                Ok(frame)
            }
            None if kind == MESSAGE => Err(MessageError::Order { came: "a region", wanted: "a message" }),
            None => Err(MessageError::Order { came: "a message", wanted: "a region" }),
        }
    }
}
