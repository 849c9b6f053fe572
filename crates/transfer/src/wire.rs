//! A stream of frames in both directions, and its way over the side channel, which never blocks.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use crate::frame::{Frame, Malformed};

/// Bytes per read.
const CHUNK: usize = 4 << 10;
/// Unsent bytes of a peer that does not read. As many exports as there may be, with the longest
/// names, are 20 MiB.
pub(crate) const MAX_UNSENT: usize = 64 << 20;

/// Why the side channel ended.
#[derive(Debug)]
pub(crate) enum WireError {
    Closed,
    Malformed,
    /// So many bytes wait for the peer.
    Unsent(usize),
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
    /// Bytes that were ever pushed.
    pushed: u64,
}

impl Wire {
    /// Bytes that were read already come first.
    pub(crate) fn with_received(incoming: Vec<u8>) -> Self {
        Self { incoming, ..Self::default() }
    }

    pub(crate) fn push(&mut self, frame: &Frame) {
        let before = self.outgoing.len();
        frame.append(&mut self.outgoing);
        self.pushed += (self.outgoing.len() - before) as u64;
    }

    /// Bytes that were ever pushed, and those of them that the socket has taken.
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.pushed, self.pushed - (self.outgoing.len() - self.sent) as u64)
    }

    pub(crate) fn has_unsent(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Bytes that nothing has taken.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.outgoing[self.sent..]
    }

    /// The first so many of them are taken.
    pub(crate) fn note_sent(&mut self, count: usize) {
        self.sent += count;
        // Moves each byte at most once.
        if self.sent > self.outgoing.len() / 2 {
            self.outgoing.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Adds bytes that have arrived.
    pub(crate) fn receive(&mut self, bytes: &[u8]) {
        self.incoming.drain(..self.parsed);
        self.parsed = 0;
        self.incoming.extend_from_slice(bytes);
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
        match self.outgoing.len() {
            unsent if unsent > MAX_UNSENT => Err(WireError::Unsent(unsent)),
            _ => Ok(()),
        }
    }

    /// Receives what has arrived, and returns how many bytes. An end of the stream is an error
    /// after all frames before it are taken.
    pub(crate) fn fill(&mut self, mut stream: &TcpStream) -> Result<usize, WireError> {
        let mut chunk = [0; CHUNK];
        loop {
            match stream.read(&mut chunk) {
                Ok(0) => return Err(WireError::Closed),
                Ok(read) => {
                    self.receive(&chunk[..read]);
                    return Ok(read);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next frame that is complete.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame>, Malformed> {
        let found = Frame::parse(&self.incoming[self.parsed..])?;
        Ok(found.map(|(frame, len)| {
            self.parsed += len;
            frame
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// All exports there may be, with the longest names, for a peer that does not read yet.
    #[test]
    fn a_slow_reader_has_room_and_one_that_never_reads_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        let (_unread, _) = listener.accept().unwrap();
        let mut wire = Wire::default();
        let withdraw = Frame::Withdraw { name: "n".repeat(256), version: u64::MAX };
        (0..crate::frame::MAX_EXPORTS).for_each(|_| wire.push(&withdraw));
        wire.flush(&stream).unwrap();
        let (pushed, sent) = wire.progress();
        assert!(pushed > 16 << 20 && sent > 0 && sent < pushed, "{sent} of {pushed}");
        (0..4 * crate::frame::MAX_EXPORTS).for_each(|_| wire.push(&withdraw));
        assert!(matches!(wire.flush(&stream), Err(WireError::Unsent(bytes)) if bytes > MAX_UNSENT));
    }
}
