//! Probes whether a RoCE device listens at an address: sends a packet to an unused queue pair and
//! reads the host's ICMP error. On this host the socket tables tell.
//!
//! The packet is complete and has an ICRC. Every device drops a shorter one, or one without an
//! ICRC, but some read beyond its end first. An empty datagram over IPv6 crashed a Linux 7.2 with
//! the kernel's own RoCE.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use nobounce_protocol::wire::icrc::Flow;
use nobounce_protocol::wire::{BTH_LEN, Deth, Header, ICRC_LEN, Opcode, Psn, Qpn, ROCE_PORT};

use crate::interfaces;
use crate::links::port_table::PortHolder;

/// The packet: a datagram without payload.
const LEN: usize = BTH_LEN + 8 + ICRC_LEN;

/// How to probe an address.
#[derive(Debug)]
pub(crate) enum Probe {
    /// The guard of our own device takes the port of all addresses, so there is no ICMP error.
    ThisHost(IpAddr),
    Network(ProbeSocket),
}

impl Probe {
    pub(crate) fn new(local: IpAddr, peer: IpAddr) -> io::Result<Self> {
        // Not by a bind: the kernel may permit that for any address (ip_nonlocal_bind).
        if peer.is_loopback() || interfaces::addresses().iter().any(|here| here.addr == peer) {
            return Ok(Self::ThisHost(peer));
        }
        ProbeSocket::new(local, peer).map(Self::Network)
    }

    /// Probes once more; returns whether no socket listens.
    pub(crate) fn is_refused(&self) -> bool {
        match self {
            Self::ThisHost(peer) => !PortHolder::may_listen(*peer),
            Self::Network(socket) => socket.is_refused(),
        }
    }
}

/// A socket to probe with.
#[derive(Debug)]
pub(crate) struct ProbeSocket {
    socket: UdpSocket,
    to: SocketAddr,
    packet: [u8; LEN],
}

impl ProbeSocket {
    fn new(local: IpAddr, peer: IpAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind((local, 0))?;
        socket.set_nonblocking(true)?;
        // `IP_RECVERR` reports errors on the unconnected socket. A connected socket sets the IP
        // identification, which the ICRC covers. So does a socket that allows fragmentation.
        match peer {
            IpAddr::V4(_) => {
                set(&socket, libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
                set(&socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
            }
            IpAddr::V6(_) => set(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?,
        }
        let mut packet = [0; LEN];
        // Queue pair 0 is InfiniBand's subnet management, which Ethernet does not have.
        let mut header = Header::new(Opcode::UdSendOnly, Qpn::new(0), Psn::new(0));
        header.deth = Deth { qkey: 0, source: Qpn::new(0) };
        header.emit(&mut packet);
        let src_port = socket.local_addr()?.port();
        Flow { src: local, dst: peer, src_port, dst_port: ROCE_PORT }.close(0, &mut packet);
        Ok(Self { socket, to: (peer, ROCE_PORT).into(), packet })
    }

    /// Sends once more; returns whether the host reported that no socket listens.
    fn is_refused(&self) -> bool {
        let refused = |e: io::Error| e.kind() == io::ErrorKind::ConnectionRefused;
        self.socket.send_to(&self.packet, self.to).is_err_and(refused)
            || self.socket.take_error().is_ok_and(|e| e.is_some_and(refused))
    }
}

fn set(socket: &UdpSocket, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the pointer and length describe one live number.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), 4) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nobounce_protocol::wire::icrc::IcrcCheck;

    use super::*;

    /// The ICRC covers the IP identification that the kernel sets: 0, as long as the packet must
    /// not be fragmented. (`make interop` captures the packets and checks their ICRC.)
    #[test]
    fn the_kernel_does_not_number_it() {
        let probe = ProbeSocket::new("127.66.9.1".parse().unwrap(), "127.66.9.2".parse().unwrap()).unwrap();
        let (mut value, mut len): (libc::c_int, libc::socklen_t) = (0, 4);
        let (level, name) = (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER);
        let to = (&raw mut value).cast();
        // SAFETY: the pointers describe one live number and its length.
        let got = unsafe { libc::getsockopt(probe.socket.as_raw_fd(), level, name, to, &raw mut len) };
        assert_eq!((got, value), (0, libc::IP_PMTUDISC_DO));
        assert!(probe.socket.peer_addr().is_err(), "nor is it connected");
    }

    /// A network without devices of other tests, which take what arrives at the port.
    fn own_network() -> bool {
        // SAFETY: unshare moves this thread alone to a new network namespace.
        let is_own = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
        is_own && Command::new("ip").args(["link", "set", "lo", "up"]).status().is_ok_and(|s| s.success())
    }

    /// A host without such a socket reports an error; a host with one gets a valid packet.
    #[test]
    fn a_missing_socket_is_reported_and_a_listener_gets_a_valid_packet() {
        if !own_network() {
            println!("waived (no network namespace)");
            return;
        }
        for (local, peer) in [("127.66.9.1", "127.66.9.2"), ("::1", "::1")] {
            let (local, peer): (IpAddr, IpAddr) = (local.parse().unwrap(), peer.parse().unwrap());
            let probe = ProbeSocket::new(local, peer).unwrap();
            let there = UdpSocket::bind((peer, ROCE_PORT)).unwrap();
            assert!(!probe.is_refused());
            let mut bytes = [0; 100];
            let (len, from) = there.recv_from(&mut bytes).unwrap();
            assert_eq!(len, LEN);
            let flow = Flow { src: local, dst: peer, src_port: from.port(), dst_port: ROCE_PORT };
            assert!(matches!(flow.verify(0, &bytes[..len]), IcrcCheck::Valid { ip_id: Some(0) | None }));
            drop(there);
            let begin = std::time::Instant::now();
            while !probe.is_refused() {
                assert!(begin.elapsed().as_secs() < 10, "{peer}: no answer of the kernel");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }

    /// A guard takes what arrives for all addresses; the tables tell who listens.
    #[test]
    fn on_this_host_the_tables_tell_who_listens() {
        if !own_network() {
            println!("waived (no network namespace)");
            return;
        }
        let _listener = UdpSocket::bind(("127.66.9.3", ROCE_PORT)).unwrap();
        for (peer, refused) in [("127.66.9.3", false), ("127.66.9.4", true)] {
            let probe = Probe::new("127.66.9.1".parse().unwrap(), peer.parse().unwrap()).unwrap();
            assert!(matches!(probe, Probe::ThisHost(_)));
            assert_eq!(probe.is_refused(), refused, "{peer}");
        }
    }
}
