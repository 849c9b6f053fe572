//! The first frames: who the agents are.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use nobounce::Connection;

use crate::error::AgentError;
use crate::frame::{Frame, VERSION};
use crate::service::wait;
use crate::shared::{Arrival, PeerShared, Shared};
use crate::wire::{Wire, WireError};

/// Exchanges hellos with the agent at the other end.
pub(crate) fn greet(
    shared: &Shared,
    connection: Connection,
    deadline: Instant,
) -> Result<Arrival, AgentError> {
    let addr = connection.peer_control_addr().map_or_else(|| "?".to_owned(), |addr| addr.to_string());
    let failed = |what: String| AgentError::NoAgent { addr: addr.clone(), what };
    let (stream, received) = connection.side_channel().map_err(|error| failed(error.to_string()))?;
    stream.set_nonblocking(true).map_err(|error| failed(error.to_string()))?;
    let mut wire = Wire::with_received(received);
    let (name, generation) = (shared.name.clone(), shared.generation);
    wire.push(&Frame::Hello { version: VERSION, name, generation });
    match first_frame(&mut wire, &stream, deadline).map_err(failed)? {
        Frame::Hello { version: VERSION, name, generation } => {
            let peer = Arc::new(PeerShared::new(shared.number(), name, generation, addr));
            Ok(Arrival { peer, connection, stream, wire })
        }
        Frame::Hello { version, .. } => {
            Err(failed(format!("it speaks version {version}, this agent {VERSION}: use the same nobounce")))
        }
        _ => Err(failed("it did not begin with a hello".to_owned())),
    }
}

fn first_frame(wire: &mut Wire, stream: &TcpStream, deadline: Instant) -> Result<Frame, String> {
    let said = |error: WireError| match error {
        WireError::Closed => "it closed the connection".to_owned(),
        WireError::Malformed => "it sent something else".to_owned(),
        WireError::Io(error) => error.to_string(),
    };
    loop {
        wire.flush(stream).map_err(said)?;
        if let Some(frame) = wire.next().map_err(said)? {
            return Ok(frame);
        }
        if wire.fill(stream).map_err(said)? {
            continue;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("it did not answer in time".to_owned());
        }
        let mut fds = [libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        wait(&mut fds, Some(left));
    }
}
