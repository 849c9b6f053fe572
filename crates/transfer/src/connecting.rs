//! Connecting to another agent, which another thread may give up.

use std::io;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nobounce::{ConnectError, ConnectOptions, Device};

use crate::error::AgentError;
use crate::greet::greet;
use crate::shared::{Arrival, Command, PeerShared, Shared};
use crate::transfer::deadline;

/// An attempt to connect ([`Agent::connect_with`](crate::Agent::connect_with)) that any thread may
/// give up.
#[derive(Debug, Default)]
pub struct Attempt(Mutex<AttemptState>);

#[derive(Debug, Default)]
struct AttemptState {
    is_aborted: bool,
    /// During the handshake.
    stream: Option<TcpStream>,
    connected: Option<(Arc<Shared>, Arc<PeerShared>)>,
}

impl Attempt {
    /// Gives it up: it fails soon, or the connection that it made is closed. An attempt that only
    /// waits for an answer of the network ends later, without effect.
    pub fn abort(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_aborted = true;
        if let Some(stream) = &state.stream {
            let _ = stream.shutdown(Shutdown::Both); // it may have ended already
        }
        if let Some((shared, peer)) = state.connected.take() {
            shared.push([Command::Close { peer: peer.key }]);
        }
    }

    /// Fails if it was given up.
    fn change(&self, change: impl FnOnce(&mut AttemptState)) -> Result<(), AgentError> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        if state.is_aborted { Err(AgentError::Aborted) } else { Ok(()) }
    }
}

/// Connects, and hands the peer to the agent's thread.
pub(crate) fn connect(
    (device, shared): (&Device, &Arc<Shared>),
    addr: impl ToSocketAddrs,
    options: &ConnectOptions,
    attempt: &Attempt,
) -> Result<Arc<PeerShared>, AgentError> {
    let deadline = deadline(options.timeout);
    let stream = dial(addr, deadline, attempt)?;
    let held = stream.try_clone()?;
    attempt.change(|state| state.stream = Some(held))?;
    let arrival = welcome((device, shared), stream, options, deadline);
    // It may have failed because it was given up.
    attempt.change(|state| state.stream = None)?;
    let arrival = arrival?;
    let peer = arrival.peer.clone();
    shared.push([Command::Add(Box::new(arrival))]);
    let connected = Some((shared.clone(), peer.clone()));
    attempt.change(|state| state.connected = connected).inspect_err(|_| attempt.abort())?;
    Ok(peer)
}

fn welcome(
    (device, shared): (&Device, &Arc<Shared>),
    stream: TcpStream,
    options: &ConnectOptions,
    deadline: Instant,
) -> Result<Arrival, AgentError> {
    let timeout = deadline.saturating_duration_since(Instant::now());
    let connection = device.connect_over(stream, &ConnectOptions { timeout, ..options.clone() })?;
    greet(shared, connection, deadline)
}

fn dial(addr: impl ToSocketAddrs, deadline: Instant, attempt: &Attempt) -> Result<TcpStream, AgentError> {
    let nothing = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let mut failed = ConnectError::Resolve(nothing);
    for addr in addr.to_socket_addrs().map_err(ConnectError::Resolve)? {
        attempt.change(|_| ())?;
        // The kernel's interface refuses zero.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&addr, left) {
            Ok(stream) => return Ok(stream),
            Err(source) => failed = ConnectError::Tcp { addr, source },
        }
    }
    attempt.change(|_| ())?;
    Err(failed.into())
}
