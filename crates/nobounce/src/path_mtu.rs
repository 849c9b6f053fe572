//! Whether the path to a peer carries the path MTU of a connection.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use nobounce_nic::PathMtu;
use nobounce_nic::work::Mtu;

use crate::connect::Lanes;
use crate::handshake::HandshakeError;

/// How often the device is driven meanwhile.
const POLL_EVERY: Duration = Duration::from_micros(50);

/// Probes the path with the first queue pair, which both ends have connected. Returns a smaller MTU
/// if the path does not carry that of the queue pair.
///
/// A peer whose device answers no probes is not one of nobounce's: its path stays unknown.
pub(crate) fn probe(lanes: &Lanes, peer: IpAddr, deadline: Instant) -> Result<Option<Mtu>, HandshakeError> {
    let Some(qp) = lanes.qps.first() else { return Ok(None) };
    qp.probe_path();
    let mut completions = Vec::new();
    loop {
        match qp.path_mtu() {
            PathMtu::Probing if Instant::now() < deadline => {}
            PathMtu::Narrow { carries: Some(mtu), .. } => return Ok(Some(mtu)),
            PathMtu::Narrow { carries: None, sent, answered, .. } => {
                let bytes = Mtu::Mtu256.bytes();
                return Err(HandshakeError::PathMtu { peer, bytes, sent, answered });
            }
            _ => return Ok(None),
        }
        // Nothing was posted: this drives the device, if its engine has no thread.
        let _ = lanes.cq.poll(&mut completions, 1);
        std::thread::sleep(POLL_EVERY);
    }
}
