//! Links carry packets: `udp` is the wire; `peers_only`, `sealed`, `shm`, `pcap` and `fault` wrap
//! any link and are links themselves.

#[macro_use]
mod forward;

mod batch;
mod choice;
pub mod fault;
#[doc(hidden)]
pub mod fuzzing;
mod handover;
mod host_addresses;
mod icrc_writers;
mod inbox;
mod open_error;
mod outbox;
mod packet_writer;
pub mod pcap;
mod peers_only;
pub(crate) mod port_table;
mod ring_packets;
mod rings;
pub mod sealed;
mod services;
pub mod shm;
mod slot;
#[cfg(test)]
mod stub;
pub mod udp;
mod unix;
mod wire_packets;

pub use batch::{MAX_PACKET, TxBatch};
pub(crate) use choice::Guards;
pub use choice::{LinkChoice, UnknownLink};
pub(crate) use icrc_writers::IcrcWriters;
pub use open_error::{Holder, OpenError};
pub use packet_writer::{LocalRoute, PacketDestination, PacketShape, PacketSpace, PayloadSource};
pub use slot::PeerName;
pub(crate) use slot::{peer_name, slot_of};
pub use wire_packets::TxPacket;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use nobounce_memory::Source;
use nobounce_protocol::wire::ROCE_PORT;

/// Source ports of one link: enough for ECMP to spread over the usual 2 to 8 parallel paths.
pub const SOURCE_PORTS: usize = 8;

/// What a link can do, probed once when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The address packets leave from; the ICRC covers it.
    pub local: IpAddr,
    /// UDP source ports, which the ICRC covers too: a hint picks one of them. All are equal on
    /// loopback, where ECMP has no paths to spread over.
    pub source_ports: [u16; SOURCE_PORTS],
    /// Maximum number of GSO segments in one system call (1: the kernel lacks UDP GSO).
    pub max_segments: usize,
    /// Whether GRO may merge several packets into one buffer.
    pub receive_offload: bool,
    /// The largest path MTU (256..4096) whose packets fit the interface.
    pub max_path_mtu: u32,
    /// Default hop limit of packets that request none; 0 where unknown.
    pub usual_hops: u8,
    /// Whether packets are sealed in place: batches leave room around each.
    pub sealed: bool,
    /// The addresses of this host besides loopback.
    pub host_addresses: &'static [IpAddr],
}

impl Capabilities {
    /// Whether an address belongs to this host.
    #[inline]
    pub(crate) fn is_this_host(&self, addr: &IpAddr) -> bool {
        addr.is_loopback() || self.host_addresses.contains(addr)
    }

    /// The UDP source port with that index; the well-known port past the last.
    #[inline]
    pub(crate) fn source_port(&self, index: u8) -> u16 {
        let index = index.checked_sub(wire_packets::PLAIN).unwrap_or(index);
        self.source_ports.get(usize::from(index)).copied().unwrap_or(ROCE_PORT)
    }
}

/// The route of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The wire.
    Wire,
    /// The wire, although a same-host peer with that address has a route to this device.
    BesideLocal,
    /// The route of a same-host peer.
    Local,
}

/// One packet as it arrived.
#[derive(Debug)]
pub struct RxDatagram<'a> {
    /// Source address.
    pub src: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// The route it came by.
    pub arrival: Arrival,
    /// The multicast group it was sent to; `None`: this device.
    pub group: Option<&'a IpAddr>,
    /// The UDP payload: BTH to ICRC.
    pub bytes: &'a [u8],
    /// The packet in place, if `bytes` holds only its headers (followed by stale bytes). The sender
    /// may change it at any time: use it for one copy of the payload.
    pub whole: Option<Source<'a>>,
    /// The likeliest IPv4 identification (its position in the GRO batch).
    pub ip_id: u16,
    /// Whether it has an ICRC. Only packets that never left this host may lack one.
    pub has_icrc: bool,
    /// Number of packets coalesced into this one: always 1 with an ICRC; untrusted, any value,
    /// without.
    pub packets: u16,
    /// It has a congestion mark (ECN CE).
    pub marked: bool,
}

impl RxDatagram<'_> {
    /// The address that it was sent to, where `local` is the device's.
    #[inline]
    pub(crate) fn destination(&self, local: IpAddr) -> IpAddr {
        self.group.copied().unwrap_or(local)
    }
}

/// Which device on this address a management datagram is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MadOwner {
    /// The device with this slot.
    Slot(u8),
    /// The device that offers this service.
    Service(u64),
}

/// A same-host peer whose route has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departed {
    /// Its address and slot.
    pub peer: PeerName,
    /// Its process exited without a goodbye.
    pub died: bool,
}

/// Descriptors that an engine watches for one link. A link that has more offers an epoll.
pub const MAX_DESCRIPTORS: usize = 4;

/// Wakes a thread for packets that make no descriptor readable.
pub trait Doorbells: Send + Sync + fmt::Debug {
    /// Asks peers to ring from now on; returns whether packets are there already.
    fn arm(&self) -> bool;

    /// Peers need not ring any more.
    fn disarm(&self);
}

/// Sends and receives packets. Every call is non-blocking.
pub trait Link: Send + fmt::Debug {
    /// The address packets are sent from and received at.
    fn local(&self) -> IpAddr;

    /// Starts to receive. Before this call no peer can reach the device, and its slot is unknown. A
    /// listening device must call [`Link::receive`] when a descriptor becomes readable: packets for
    /// other devices may arrive there, too.
    ///
    /// # Errors
    /// All slots are taken, or another program holds the port.
    fn listen(&mut self) -> Result<(), OpenError> {
        Ok(())
    }

    /// The high byte of every queue pair number of this device.
    fn slot(&self) -> u8;

    /// The probed capabilities.
    fn capabilities(&self) -> Capabilities;

    /// Size of the socket receive buffer in bytes, kernel overhead included. Other devices on this
    /// host have the same: the limit is system-wide. 0: unknown.
    fn receive_room(&self) -> u64 {
        0
    }

    /// A queue pair is going to send to that peer: a link with routes to same-host peers connects
    /// to it now. Returns the route that packets to it take until [`Link::departed`] names that
    /// peer.
    fn local_route(&mut self, _to: PeerName) -> Option<LocalRoute> {
        None
    }

    /// The next same-host peer whose ring has ended.
    fn departed(&mut self) -> Option<Departed> {
        None
    }

    /// Why same-host peers are reached by UDP instead of shared memory, one sentence per reason.
    fn fallbacks(&self) -> Vec<String> {
        Vec::new()
    }

    /// Announces an orderly shutdown to same-host peers; without a goodbye they report us as
    /// killed.
    fn shut_down(&mut self) {}

    /// Handles rare events: new and closed connections. Call it when [`Link::control_fd`] is
    /// readable.
    fn poll_control(&mut self) {}

    /// A descriptor that becomes readable when [`Link::poll_control`] has work; a sleeping thread
    /// must always watch it.
    fn control_fd(&self) -> Option<RawFd> {
        None
    }

    /// Doorbells for packets that make no descriptor readable.
    fn doorbells(&self) -> Option<Arc<dyn Doorbells>> {
        None
    }

    /// Sends the batch and empties it. Packets that the kernel refuses are counted and dropped: the
    /// protocol retransmits them.
    ///
    /// When the send buffer is full, the link keeps one batch and [`Link::send_blocked`] is true
    /// until that batch has left. Every [`Link::receive`], and a `send` of an empty batch, retries.
    fn send(&mut self, batch: &mut TxBatch);

    /// Ends a burst of sends: wakes sleeping peers once. A wake-up per batch would let a peer on
    /// the same CPU preempt us before the next batch is written.
    fn wake_peers(&mut self) {}

    /// Receives available packets, up to a bound, and returns how many were passed to `sink`.
    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize;

    /// Descriptors that become readable when [`Link::receive`] has work: with
    /// [`Link::control_fd`] at most [`MAX_DESCRIPTORS`]. They are read once, before
    /// [`Link::listen`], and stay the same.
    fn wake_fds(&self) -> Vec<RawFd>;

    /// Deadline (nanoseconds of [`now_ns`]) for the next [`Link::receive`] or [`Link::send`] even
    /// if no descriptor becomes readable. Set while packets are delayed by fault injection or wait
    /// for room in the send buffer.
    fn next_deadline(&self) -> Option<u64> {
        None
    }

    /// Counters by name, in a fixed order.
    fn counters(&self) -> Vec<(&'static str, u64)>;

    /// Whether packets of an earlier batch still wait for room. The engine then waits instead of
    /// building packets (a further batch would be counted and dropped).
    fn send_blocked(&self) -> bool {
        false
    }

    /// Claims the service ID: its management datagrams go to this device. False if another device
    /// has it.
    ///
    /// # Errors
    /// The system refuses.
    fn bind_service(&mut self, _service: u64) -> io::Result<bool> {
        Ok(true)
    }

    /// Releases the service ID.
    fn unbind_service(&mut self, _service: u64) {}

    /// Whether this device has bound the service.
    fn has_service(&self, _service: u64) -> bool {
        false
    }

    /// Receives the packets of a multicast group, too, until [`Link::leave_group`].
    ///
    /// # Errors
    /// The address is no group of this device's network, or the system refuses.
    fn join_group(&mut self, _group: IpAddr) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives no more packets of the group.
    fn leave_group(&mut self, _group: IpAddr) {}

    /// Passes a management datagram to its owner; false where there is none.
    fn hand_over_mad(&mut self, _owner: MadOwner, _datagram: &RxDatagram<'_>) -> bool {
        false
    }
}

impl<L: Link + ?Sized> Link for Box<L> {
    forward!(self => **self; identity, opening, same_host, services, waiting);

    fn local_route(&mut self, to: PeerName) -> Option<LocalRoute> {
        (**self).local_route(to)
    }

    fn send(&mut self, batch: &mut TxBatch) {
        (**self).send(batch);
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        (**self).receive(sink)
    }

    fn next_deadline(&self) -> Option<u64> {
        (**self).next_deadline()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        (**self).counters()
    }
}

/// Nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec for the call to fill; CLOCK_MONOTONIC cannot fail on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}
