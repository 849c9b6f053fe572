//! The side channel of one peer: frames in both directions, never blocking.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use crate::frame::{Frame, Malformed};

/// Bytes per read.
const CHUNK: usize = 64 << 10;
/// Unsent bytes of a peer that does not read. It is silent long before.
const MAX_UNSENT: usize = 16 << 20;

/// Why the side channel ended.
#[derive(Debug)]
pub(crate) enum WireError {
    Closed,
    Malformed,
    Io(io::Error),
}

impl From<Malformed> for WireError {
    fn from(Malformed: Malformed) -> Self {
        Self::Malformed
    }
}

impl From<io::Error> for WireError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
                Self::Closed
            }
            _ => Self::Io(error),
        }
    }
}

/// Buffers of a nonblocking stream, which is passed to each call.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    incoming: Vec<u8>,
    /// Bytes of `incoming` that are parsed already.
    parsed: usize,
    outgoing: Vec<u8>,
    /// Bytes of `outgoing` that are sent already.
    sent: usize,
}

impl Wire {
    /// Bytes that were read already come first.
    pub(crate) fn with_received(incoming: Vec<u8>) -> Self {
        Self { incoming, ..Self::default() }
    }

    pub(crate) fn push(&mut self, frame: &Frame) {
        frame.append(&mut self.outgoing);
    }

    pub(crate) fn has_unsent(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Sends what the socket takes.
    pub(crate) fn flush(&mut self, mut stream: &TcpStream) -> Result<(), WireError> {
        while self.has_unsent() {
            match stream.write(&self.outgoing[self.sent..]) {
                Ok(0) => return Err(WireError::Closed),
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        self.outgoing.drain(..self.sent);
        self.sent = 0;
        if self.outgoing.len() > MAX_UNSENT { Err(WireError::Closed) } else { Ok(()) }
    }

    /// Receives what has arrived. An end of the stream is an error after all frames before it are
    /// taken.
    pub(crate) fn fill(&mut self, mut stream: &TcpStream) -> Result<bool, WireError> {
        self.incoming.drain(..self.parsed);
        self.parsed = 0;
        let mut chunk = [0; CHUNK];
        loop {
            match stream.read(&mut chunk) {
                Ok(0) => return Err(WireError::Closed),
                Ok(read) => {
                    self.incoming.extend_from_slice(&chunk[..read]);
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next frame that is complete.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, WireError> {
        let found = Frame::parse(&self.incoming[self.parsed..])?;
        Ok(found.map(|(frame, len)| {
            self.parsed += len;
            frame
        }))
    }
}
