//! The first frames: who the agents are.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce::Connection;

use crate::error::AgentError;
use crate::frame::{Frame, MAX_NAME, VERSION};
use crate::frame_lane::FrameLane;
use crate::service::wait;
use crate::shared::{Arrival, Origin, PeerShared, Shared, SideChannel};
use crate::wire::{Wire, WireError};

/// Shortest silence limit of a peer that is taken into account.
const MIN_SILENCE: Duration = Duration::from_millis(50);

/// Exchanges hellos with the agent at the other end.
pub(crate) fn greet(
    shared: &Shared,
    connection: Connection,
    deadline: Instant,
) -> Result<Arrival, AgentError> {
    let ip = connection.peer_control_addr();
    let addr = ip.map_or_else(|| "?".to_owned(), |addr| addr.to_string());
    let failed = |what: String| AgentError::NoAgent { addr: addr.clone(), what };
    // The peer sends frames as soon as it has the hello.
    let frames = FrameLane::new(connection.device(), &connection).map_err(failed)?;
    let (stream, received) = connection.side_channel().map_err(|error| failed(error.to_string()))?;
    let stream = SideChannel::new(stream);
    stream.set_nonblocking(true).map_err(|error| failed(error.to_string()))?;
    let mut wire = Wire::with_received(received);
    wire.push(&hello(shared));
    match first_frame(&mut wire, &stream, deadline).map_err(failed)? {
        Frame::Hello { version: VERSION, name, generation, silence_ms, host, listens } => {
            let origin = ip.zip(listens).map(|(addr, listens)| Origin { ip: addr.ip(), host, listens });
            let peer = Arc::new(PeerShared::new(shared.number(), name, generation, addr, origin));
            let silence = Duration::from_millis(silence_ms).max(MIN_SILENCE);
            Ok(Arrival { peer, connection, frames, stream, wire, silence })
        }
        Frame::Hello { version, .. } => {
            Err(failed(format!("it speaks version {version}, this agent {VERSION}: use the same nobounce")))
        }
        _ => Err(failed("it did not begin with a hello".to_owned())),
    }
}

fn hello(shared: &Shared) -> Frame {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    Frame::Hello {
        version: VERSION,
        name: shared.name.clone(),
        generation: shared.generation,
        silence_ms: u64::try_from(shared.silence.as_millis()).unwrap_or(u64::MAX),
        host: host.trim_end().chars().take(MAX_NAME / 4).collect(),
        listens: shared.listens.get().copied(),
    }
}

fn first_frame(wire: &mut Wire, stream: &TcpStream, deadline: Instant) -> Result<Frame, String> {
    let said = |error: WireError| match error {
        WireError::Closed => "it closed the connection".to_owned(),
        WireError::Malformed => "it sent something else".to_owned(),
        WireError::Unsent(_) => "it reads nothing".to_owned(),
        WireError::Io(error) => error.to_string(),
    };
    loop {
        wire.flush(stream).map_err(said)?;
        if let Some(frame) = wire.next_frame().map_err(|error| said(error.into()))? {
            return Ok(frame);
        }
        if wire.fill(stream).map_err(said)? > 0 {
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
