//! The sockets that packets to other hosts leave from, one for each source port, so that ECMP has
//! several flows to spread.

use std::io;

use super::socket::{SockAddr, Socket};
use super::{SOCKET_BUFFER, UdpConfig};
use crate::links::wire_packets::PLAIN;
use crate::links::{OpenError, SOURCE_PORTS};

/// Ports that RoCEv2 senders use.
const FIRST_SOURCE_PORT: u16 = 0xc000;
/// Distance between our source ports.
const PORT_STEP: u16 = 0x800;
/// How many of them are tried.
const PORT_TRIES: u16 = 64;
/// ECN-capable transport, ECT(0): switches may mark a packet where they would drop it.
pub(super) const ECT: u8 = 2;
/// The ECN field of the traffic class.
pub(super) const ECN: u8 = 3;

/// Sockets for each source port; none on loopback, where everything leaves from the well-known
/// port.
#[derive(Debug, Default)]
pub(super) struct Senders {
    /// For connections, which obey congestion notifications.
    capable: Vec<Socket>,
    /// For packets that no one answers with a notification.
    plain: Vec<Socket>,
}

impl Senders {
    /// The sockets of an address, and their ports.
    pub(super) fn open(config: &UdpConfig) -> Result<(Self, [u16; SOURCE_PORTS]), OpenError> {
        let mut senders = Self::default();
        let mut ports = [0; SOURCE_PORTS];
        for (base, port) in (FIRST_SOURCE_PORT..=u16::MAX).step_by(usize::from(PORT_STEP)).zip(&mut ports) {
            // Other programs may have some of these ports; we share ours with our own devices only.
            let bound = (base..base + PORT_TRIES)
                .find_map(|port| Some((port, open(config, port).ok()?, open(config, port).ok()?)));
            let Some((bound, capable, plain)) = bound else {
                let source = io::Error::from_raw_os_error(libc::EADDRINUSE);
                let addr = config.addr;
                return Err(OpenError::Os { addr, call: "bind of 64 source ports in a row", source });
            };
            // Where the kernel refuses, packets are dropped instead of marked.
            let _ = capable.set_class(config.addr, ECT);
            *port = bound;
            senders.capable.push(capable);
            senders.plain.push(plain);
        }
        Ok((senders, ports))
    }

    /// The socket for packets with that index of a port; `None`: that of the well-known port.
    pub(super) fn get(&self, port: u8) -> Option<&Socket> {
        match port.checked_sub(PLAIN) {
            None => self.capable.get(usize::from(port)),
            Some(port) => self.plain.get(usize::from(port)),
        }
    }
}

fn open(config: &UdpConfig, port: u16) -> io::Result<Socket> {
    let socket = Socket::new(config.addr).map_err(io::Error::other)?;
    // the kernel's minimum: it receives nothing
    let _ = socket.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 0);
    let _ = socket.set(libc::SOL_SOCKET, libc::SO_SNDBUF, SOCKET_BUFFER);
    socket.bind(&SockAddr::new(config.addr, port, config.scope))?;
    Ok(socket)
}
