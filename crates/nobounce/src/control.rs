//! The TCP side channel: a preamble, then length-prefixed frames, all with a size limit and a
//! deadline.
//!
//! The socket blocks, with timeouts. The liveness check must not block, so it makes the socket
//! nonblocking for a moment. It does so only under the reader's lock, and the writer expects it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nobounce_nic::ParentOnly;

/// The longest application message.
pub(crate) const MAX_MESSAGE: usize = 1 << 20;
/// The longest frame: a message and its kind.
const MAX_FRAME: usize = MAX_MESSAGE + 1;
/// Bytes of frames that may wait for the application; beyond that, TCP flow control stops the peer.
const MAX_WAITING: usize = 4 << 20;
/// Bytes per read.
const CHUNK: usize = 64 << 10;
/// The kernel rounds socket timeouts to its tick, and zero would mean no timeout.
const SHORTEST: Duration = Duration::from_millis(1);

/// Errors of the side channel.
#[derive(Debug)]
pub(crate) enum ControlError {
    Closed,
    Timeout,
    TooLong { len: usize, max: usize },
    Io(io::Error),
}

impl From<io::Error> for ControlError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => Self::Closed,
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Timeout,
            _ => Self::Io(error),
        }
    }
}

/// Received bytes that are not consumed yet. Frames are parsed on demand, because the size limit
/// depends on the caller.
#[derive(Debug, Default)]
struct Inbox {
    bytes: Vec<u8>,
    /// Bytes at the front that are consumed already.
    taken: usize,
}

impl Inbox {
    fn waiting(&self) -> usize {
        self.bytes.len() - self.taken
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The first frame, if it is complete.
    fn first(&self, max: usize) -> Result<Option<&[u8]>, ControlError> {
        let Some((prefix, rest)) = self.bytes[self.taken..].split_first_chunk::<4>() else { return Ok(None) };
        let len = usize::try_from(u32::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
        if len > max {
            return Err(ControlError::TooLong { len, max });
        }
        Ok(rest.get(..len))
    }

    /// Removes the first frame, which is `len` bytes long.
    fn take(&mut self, len: usize) -> Vec<u8> {
        let start = self.taken + 4;
        self.taken = start + len;
        self.bytes[start..self.taken].to_vec()
    }
}

/// Gives the frames of these bytes to `each`, as they arrive in pieces, for the fuzz target.
pub(crate) fn fuzz_frames(bytes: &[u8], piece: usize, mut each: impl FnMut(&[u8])) {
    let mut inbox = Inbox::default();
    for piece in bytes.chunks(piece) {
        inbox.push(piece);
        while let Ok(Some(frame)) = inbox.first(MAX_FRAME) {
            let len = frame.len();
            each(&inbox.take(len));
        }
        assert!(inbox.waiting() <= bytes.len());
    }
}

#[derive(Debug)]
pub(crate) struct ControlChannel {
    /// A forked child must not keep the connection open when this process dies. Dropped first.
    _mark: ParentOnly,
    stream: TcpStream,
    inbox: Mutex<Inbox>,
    outbox: Mutex<()>,
    closed: AtomicBool,
}

impl ControlChannel {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let (inbox, outbox, closed) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        Ok(Self { _mark: ParentOnly::mark(&stream), stream, inbox, outbox, closed })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that were received and not consumed.
    pub(crate) fn take_received(&self) -> Vec<u8> {
        let inbox = std::mem::take(&mut *self.inbox());
        inbox.bytes[inbox.taken..].to_vec()
    }

    /// Reads exactly `bytes.len()` bytes: the preamble, before any frame.
    pub(crate) fn read_raw(&self, bytes: &mut [u8], deadline: Instant) -> Result<(), ControlError> {
        let mut at = 0;
        while at < bytes.len() {
            self.stream.set_read_timeout(Some(left(deadline)?))?;
            match (&self.stream).read(&mut bytes[at..]) {
                Ok(0) => return Err(ControlError::Closed),
                Ok(read) => at += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Writes all bytes.
    pub(crate) fn write_raw(&self, mut bytes: &[u8], deadline: Instant) -> Result<(), ControlError> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline)?))?;
            match (&self.stream).write(bytes) {
                Ok(0) => return Err(ControlError::Closed),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Timed out, or a concurrent liveness check made the socket nonblocking.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(SHORTEST),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends one frame made of `head` and `body`. Giving up in the middle of a frame closes the
    /// channel: the peer could not parse the bytes that follow.
    pub(crate) fn send(&self, head: &[u8], body: &[u8], deadline: Instant) -> Result<(), ControlError> {
        let len = head.len() + body.len();
        let prefix = u32::try_from(len).ok().filter(|_| len <= MAX_FRAME);
        let prefix = prefix.ok_or(ControlError::TooLong { len: body.len(), max: MAX_MESSAGE })?;
        let frame = [&prefix.to_le_bytes(), head, body].concat();
        let _turn = self.outbox.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_raw(&frame, deadline).inspect_err(|_| self.close())
    }

    /// The next frame of at most `max` bytes.
    pub(crate) fn receive(&self, max: usize, deadline: Instant) -> Result<Vec<u8>, ControlError> {
        self.receive_if(max, deadline, |_| true).map(|frame| frame.unwrap_or_default())
    }

    /// The next frame if `wanted` accepts it; `None` leaves it in the buffer.
    pub(crate) fn receive_if(
        &self,
        max: usize,
        deadline: Instant,
        wanted: impl Fn(&[u8]) -> bool,
    ) -> Result<Option<Vec<u8>>, ControlError> {
        let mut inbox = self.inbox();
        loop {
            if let Some(first) = inbox.first(max)? {
                let len = first.len();
                return Ok(if wanted(first) { Some(inbox.take(len)) } else { None });
            }
            if self.closed.load(Ordering::Relaxed) {
                return Err(ControlError::Closed);
            }
            self.stream.set_read_timeout(Some(left(deadline)?))?;
            match self.read_some(&mut inbox) {
                // A kernel timeout may end a little early: the deadline decides.
                Ok(()) | Err(ControlError::Timeout) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The next application frame.
    pub(crate) fn receive_message(
        &self,
        deadline: Instant,
        wanted: impl Fn(&[u8]) -> bool,
    ) -> Result<Option<Vec<u8>>, ControlError> {
        self.receive_if(MAX_FRAME, deadline, wanted)
    }

    /// One read, however many bytes it returns.
    fn read_some(&self, inbox: &mut Inbox) -> Result<(), ControlError> {
        let mut chunk = [0; CHUNK];
        match (&self.stream).read(&mut chunk) {
            Ok(0) => {
                self.closed.store(true, Ordering::Relaxed);
                Ok(())
            }
            Ok(read) => {
                inbox.push(&chunk[..read]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => {
                let error = ControlError::from(error);
                if !matches!(error, ControlError::Timeout) {
                    self.closed.store(true, Ordering::Relaxed);
                }
                Err(error)
            }
        }
    }

    /// Whether the peer has closed or died. Never blocks. Buffers what has arrived, so that an end
    /// behind unread messages is seen too.
    pub(crate) fn look_closed(&self) -> bool {
        if self.closed.load(Ordering::Relaxed) {
            return true;
        }
        // Another thread is reading and will see the end of the stream.
        let Ok(mut inbox) = self.inbox.try_lock() else { return false };
        if self.stream.set_nonblocking(true).is_err() {
            return false;
        }
        while !self.closed.load(Ordering::Relaxed) && inbox.waiting() < MAX_WAITING {
            if self.read_some(&mut inbox).is_err() {
                break;
            }
        }
        if self.stream.set_nonblocking(false).is_err() {
            self.close();
        }
        self.closed.load(Ordering::Relaxed)
    }

    /// Closes the channel; the peer sees it.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let _ = self.stream.shutdown(Shutdown::Both); // not connected any more: the same
    }
}

fn left(deadline: Instant) -> Result<Duration, ControlError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ControlError::Timeout) } else { Ok(left.max(SHORTEST)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_cut_wherever_the_bytes_break() {
        let bytes = [3, 0, 0, 0, b'a', b'b', b'c', 0, 0, 0, 0, 1, 0, 0, 0, b'z'];
        for split in 0..=bytes.len() {
            let (mut inbox, mut frames) = (Inbox::default(), Vec::new());
            for part in [&bytes[..split], &bytes[split..]] {
                inbox.push(part);
                while let Some(len) = inbox.first(3).unwrap().map(<[u8]>::len) {
                    frames.push(inbox.take(len));
                }
            }
            assert_eq!(frames, [b"abc".to_vec(), Vec::new(), b"z".to_vec()], "split at {split}");
            assert_eq!(inbox.waiting(), 0);
        }
    }

    #[test]
    fn a_long_frame_is_refused_by_its_prefix() {
        let mut inbox = Inbox::default();
        inbox.push(&[4, 0, 0, 0]);
        assert!(matches!(inbox.first(3), Err(ControlError::TooLong { len: 4, max: 3 })));
    }
}
