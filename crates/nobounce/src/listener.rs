//! The listening side.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use nobounce_nic::ParentOnly;

use crate::connect::{ConnectOptions, Lanes, deadline, open_control};
use crate::connection::Connection;
use crate::device::Device;
use crate::handshake::{self, HandshakeError, Hello};

/// Poll interval of a waiting listener.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Why listening failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen: {0}; expected host:port with an address of this machine and a free port")]
pub struct ListenError(#[from] io::Error);

/// Why no connection was accepted. The listener stays usable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    /// No peer connected in time.
    #[error("no peer connected within {0:?}")]
    Timeout(Duration),
    /// A peer connected, but the handshake failed.
    #[error("handshake with {peer} failed: {source}")]
    Handshake {
        /// The peer's address.
        peer: SocketAddr,
        /// The cause.
        source: HandshakeError,
    },
    /// The kernel refused.
    #[error("cannot accept connections: {0} (too many open files? see ulimit -n)")]
    Io(#[from] io::Error),
}

/// Listens for peers.
#[derive(Debug)]
pub struct Listener {
    device: Device,
    /// A forked child must not keep the port. Dropped first.
    _mark: ParentOnly,
    socket: TcpListener,
    local: SocketAddr,
    options: ConnectOptions,
}

impl Device {
    /// Listens for peers at a TCP address such as `"127.0.0.1:0"` (port 0: any; see
    /// [`Listener::local_addr`]).
    ///
    /// # Errors
    /// The address is not local, or in use.
    pub fn listen(&self, addr: impl ToSocketAddrs) -> Result<Listener, ListenError> {
        self.listen_with(addr, &ConnectOptions::default())
    }

    /// The same with options; the connecting side chooses the number of queue pairs.
    ///
    /// # Errors
    /// As for [`listen`](Self::listen).
    pub fn listen_with(
        &self,
        addr: impl ToSocketAddrs,
        options: &ConnectOptions,
    ) -> Result<Listener, ListenError> {
        Listener::bind(self, addr, options)
    }
}

impl AsRawFd for Listener {
    /// Readable when a peer has connected.
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Listener {
    fn bind(
        device: &Device,
        addr: impl ToSocketAddrs,
        options: &ConnectOptions,
    ) -> Result<Self, ListenError> {
        let socket = TcpListener::bind(addr)?;
        socket.set_nonblocking(true)?;
        let local = socket.local_addr()?;
        let mark = ParentOnly::mark(&socket);
        Ok(Self { device: device.clone(), _mark: mark, socket, local, options: options.clone() })
    }

    /// The address it listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Accepts the next peer. Waits at most `timeout` for a TCP connection, then at most
    /// [`ConnectOptions::timeout`] for its handshake. Handshakes are sequential. With untrusted
    /// clients, shorten the handshake timeout or accept in several threads.
    ///
    /// # Errors
    /// No peer connected, or its handshake failed. Call again to continue.
    pub fn accept(&self, timeout: Duration) -> Result<Connection, AcceptError> {
        let deadline = deadline(timeout);
        loop {
            if let Some((stream, peer)) = self.accept_pending()? {
                return self.handshake(stream, peer);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(AcceptError::Timeout(timeout));
            }
            std::thread::sleep(left.min(LOOK_EVERY));
        }
    }

    /// A client whose handshake has not begun, if one has connected. Does not wait.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn accept_pending(&self) -> io::Result<Option<(TcpStream, SocketAddr)>> {
        match self.socket.accept() {
            Ok(client) => Ok(Some(client)),
            // None is waiting, or the client closed before it was accepted.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted | io::ErrorKind::WouldBlock
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The handshake with such a client: at most [`ConnectOptions::timeout`].
    ///
    /// # Errors
    /// It failed.
    pub fn handshake(&self, stream: TcpStream, peer: SocketAddr) -> Result<Connection, AcceptError> {
        self.shake_hands(stream).map_err(|source| AcceptError::Handshake { peer, source })
    }

    fn shake_hands(&self, stream: TcpStream) -> Result<Connection, HandshakeError> {
        let deadline = deadline(self.options.timeout);
        let control = open_control(stream)?;
        let theirs = handshake::receive_hello(&control, deadline)?;
        let prepared = theirs.check_reachable(self.device.nic(), &control).and_then(|()| {
            let mut lanes = Lanes::make(&self.device, &self.options, theirs.qps.len())?;
            let ours = lanes.hello(&self.device, &self.options);
            let agreed = ours.mtu.min(theirs.mtu).min(self.device.nic().max_mtu_to(theirs.addr).bytes());
            let theirs = Hello { mtu: agreed, ..theirs };
            lanes.raise(&self.options, &theirs)?;
            Ok((lanes, Hello { mtu: agreed, ..ours }, theirs))
        });
        let (mut lanes, ours, mut theirs) =
            prepared.inspect_err(|why| handshake::refuse(&control, why, deadline))?;
        if let Some(mtu) = handshake::accept(&control, ours, deadline)? {
            theirs.mtu = mtu.bytes();
            lanes.lower(&self.options, &theirs)?;
            handshake::send_lowered(&control, deadline)?;
        }
        Ok(Connection::new(&self.device, lanes, control, &theirs))
    }
}
