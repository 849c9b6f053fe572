//! The wire: RoCEv2 on UDP port 4791, without privilege.
//!
//! Sockets are unconnected and send with DF, so the IPv4 identification that the ICRC covers is
//! predictable: 0, or the segment's index in its GSO send.

mod bpf;
mod groups;
mod guard;
mod interface;
mod loopback_filter;
mod receive;
mod senders;
mod socket;
mod steering;
mod transmit;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;
use std::time::Duration;

use nobounce_protocol::seal::SealedHeader;
use nobounce_protocol::wire::{Opcode, ROCE_PORT};

pub(crate) use self::interface::route_path_mtu;

use self::groups::{JoinedGroup, JoinedGroups};
use self::guard::PortGuard;
use self::receive::UdpReceiver;
use self::senders::Senders;
use self::socket::{SockAddr, Socket};
use self::steering::Steering;
use self::transmit::Transmitter;
use super::handover::{GroBurst, Handover};
use super::host_addresses;
use super::outbox::Outbox;
use super::services::Services;
use super::slot::{JoinLock, Slot, SlotOwner};
use super::wire_packets::SLOT_BYTE;
use super::{Arrival, Capabilities, Link, MadOwner, OpenError, RxDatagram, SOURCE_PORTS, TxBatch};

/// Requested bytes of socket buffer; the kernel gives what `rmem_max` and `wmem_max` allow.
const SOCKET_BUFFER: i32 = 4 << 20;
/// Maximum GSO segments per send: the limit of the oldest kernels. Receivers assume identifications
/// below it.
const MAX_SEGMENTS: usize = 64;
/// Empty calls between two polls of the Unix sockets while no handover arrives: saves a system
/// call.
const HANDOVER_EVERY: u32 = 32;
/// Maximum handovers received per call.
const HANDOVERS: usize = 16;

/// Calls with which a closing link drains its socket: more than a full buffer takes.
const LAST_CALLS: u32 = 1024;
/// Attempts of a closing link to hand over the remaining packets.
const LAST_RETRIES: u32 = 10;
/// Pause between these attempts.
const LAST_RETRY_AFTER: Duration = Duration::from_micros(100);

/// How to open a [`UdpLink`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpConfig {
    /// The address to listen on and to send from.
    pub addr: IpAddr,
    /// The interface index of an IPv6 link-local address; 0 otherwise.
    pub scope: u32,
    /// Whether to use segmented sends (UDP_SEGMENT) where the kernel has them.
    pub gso: bool,
    /// Whether to let the kernel merge what arrives (UDP_GRO) where it can.
    pub gro: bool,
    /// Source ports of packets from this host.
    pub local_ports: LocalPorts,
    /// Bytes that other links add to each packet.
    pub added: usize,
}

/// Source ports from which packets of this host are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LocalPorts {
    /// The well-known port, which devices reserve for their user on all addresses of the host.
    #[default]
    Own,
    /// Any: for a RoCE implementation on this host that is not ours, such as rdma_rxe. Other users
    /// of this host can then forge packets.
    Any,
}

impl LocalPorts {
    /// Whether packets come from this host by a port of possibly another user.
    #[inline]
    fn refuse(self, run: &GroBurst<'_>, caps: &Capabilities) -> bool {
        run.src_port != ROCE_PORT && self == Self::Own && caps.is_this_host(&run.src)
    }
}

impl UdpConfig {
    /// The default configuration for `addr`.
    pub fn new(addr: IpAddr) -> Self {
        Self { addr, ..Self::default() }
    }
}

impl Default for UdpConfig {
    fn default() -> Self {
        Self {
            addr: Ipv4Addr::LOCALHOST.into(),
            scope: 0,
            gso: true,
            gro: true,
            local_ports: LocalPorts::default(),
            added: 0,
        }
    }
}

/// A device's place on the network: a slot of one address.
#[derive(Debug)]
pub struct UdpLink {
    socket: Socket,
    listening: bool,
    /// While it listens, unless packets from any port are taken.
    guard: Option<PortGuard>,
    senders: Senders,
    slot: Slot,
    steering: Steering,
    /// Services of the connection manager that this device offers.
    services: Services,
    groups: JoinedGroups,
    outbox: Outbox,
    caps: Capabilities,
    transmitter: Transmitter,
    receiver: UdpReceiver,
    rx: Received,
    /// Empty calls until the next poll of the Unix sockets.
    handover_countdown: u32,
    scope: u32,
    local_ports: LocalPorts,
}

#[derive(Clone, Copy, Debug, Default)]
struct Received {
    packets: u64,
    bytes: u64,
    handed_over: u64,
    steered_in: u64,
    handover_lost: u64,
    handover_refused: u64,
    no_such_slot: u64,
    /// Packets from this host that did not come from the well-known port.
    foreign_port: u64,
}

impl UdpLink {
    /// Opens a link and listens.
    ///
    /// # Errors
    /// As for [`prepare`](Self::prepare) and [`Link::listen`].
    pub fn open(config: &UdpConfig) -> Result<Self, OpenError> {
        let mut link = Self::prepare(config)?;
        link.listen()?;
        Ok(link)
    }

    /// Opens a link that does not listen yet.
    ///
    /// # Errors
    /// The address is not local, or another program holds its port without sharing it.
    pub fn prepare(config: &UdpConfig) -> Result<Self, OpenError> {
        let addr = config.addr;
        if addr.is_unspecified() {
            return Err(OpenError::Unspecified { addr });
        }
        let os = |call| move |source| OpenError::Os { addr, call, source };
        // Binding any port tells whether the address is local.
        Socket::new(addr)?
            .bind(&SockAddr::new(addr, 0, config.scope))
            .map_err(|e| OpenError::from_bind(addr, e))?;
        OpenError::if_held(addr)?;
        if config.local_ports == LocalPorts::Own {
            OpenError::if_held_elsewhere(addr)?;
        }
        let socket = Socket::new(addr)?;
        enlarge(&socket);
        // Before bind, so that no packet arrives unmerged.
        let receive_offload = config.gro && socket.set(libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        if !addr.is_loopback() {
            socket.read_marks(addr); // no switch is on the way to a loopback address
        }
        let gso = config.gso && socket.knows(libc::SOL_UDP, libc::UDP_SEGMENT);
        let host_addresses = host_addresses::read();
        if addr.is_ipv6() && config.local_ports == LocalPorts::Own {
            loopback_filter::attach(&socket, host_addresses).map_err(os("setsockopt(SO_ATTACH_FILTER)"))?;
        }
        let slot = Slot::new(addr).map_err(os("socket"))?;
        let (senders, source_ports) = if addr.is_loopback() {
            (Senders::default(), [ROCE_PORT; SOURCE_PORTS])
        } else {
            Senders::open(config)?
        };
        // Multicast leaves from the well-known port: receivers may be on this host.
        groups::send_by(&socket, addr, config.scope);
        let caps = Capabilities {
            local: addr,
            source_ports,
            max_segments: if gso { MAX_SEGMENTS } else { 1 },
            receive_offload,
            max_path_mtu: interface::max_path_mtu(addr, config.added),
            usual_hops: socket.hop_limit(addr),
            sealed: false,
            host_addresses,
        };
        Ok(Self {
            socket,
            listening: false,
            guard: None,
            senders,
            slot,
            steering: Steering::default(),
            services: Services::new().map_err(os("epoll_create1"))?,
            groups: JoinedGroups::default(),
            outbox: Outbox::default(),
            caps,
            transmitter: Transmitter::new(config.scope),
            receiver: UdpReceiver::new(receive_offload),
            rx: Received::default(),
            handover_countdown: 0,
            scope: config.scope,
            local_ports: config.local_ports,
        })
    }

    /// Receives from the UDP socket: delivers packets of this slot and hands the others to their
    /// owners.
    #[inline]
    fn receive_from_socket(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let Self { socket, slot, steering, outbox, receiver, rx, caps, local_ports, .. } = self;
        let mut delivered = 0;
        receiver.receive(socket, |run| {
            if local_ports.refuse(&run, caps) {
                rx.foreign_port += run.packets();
                return;
            }
            each_run(run, |owner, part| match owner {
                Some(owner) if owner != slot.number() => each_kind(part, |is_mad, part| {
                    if is_mad {
                        // The engine parses the bytes and finds the owner.
                        delivered += deliver(part, None, rx, sink);
                        return;
                    }
                    let count = match outbox.hand_over(slot, SlotOwner::Slot(owner), &part) {
                        Handover::Done => &mut rx.handed_over,
                        Handover::NoOwner => &mut rx.no_such_slot,
                        Handover::Full | Handover::Lost => &mut rx.handover_lost,
                    };
                    *count += part.packets();
                }),
                None if steering.hear(&part) => {}
                // A packet too short to name an owner counts as malformed here.
                _ => delivered += deliver(part, None, rx, sink),
            });
        });
        delivered
    }

    /// Receives what was sent to multicast groups.
    #[cold]
    fn receive_from_groups(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let Self { groups, rx, caps, local_ports, .. } = self;
        let Some((joined, receiver)) = groups.parts() else { return 0 };
        let mut delivered = 0;
        for JoinedGroup { addr, socket, .. } in joined {
            receiver.receive(socket, |run| {
                if local_ports.refuse(&run, caps) {
                    rx.foreign_port += run.packets();
                } else {
                    delivered += deliver(run, Some(addr), rx, sink);
                }
            });
        }
        delivered
    }

    /// Receives packets that other devices on this address got for us.
    fn take_handovers(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let mut delivered = 0;
        let Self { slot, services, receiver, rx, handover_countdown, steering, .. } = self;
        for _ in 0..HANDOVERS {
            match slot.take(receiver.buffer()) {
                Some(run) => delivered += take_run(run, Some(slot.number()), rx, handover_countdown, sink),
                None => break,
            }
        }
        steering.note_handed(u64::try_from(delivered).unwrap_or(0));
        if slot.take_departure() {
            steering.check_soon();
        }
        for service in services.bound_mut() {
            for _ in 0..HANDOVERS {
                match service.take(receiver.buffer()) {
                    Some(run) => delivered += take_run(run, None, rx, handover_countdown, sink),
                    None => break,
                }
            }
        }
        delivered
    }
}

impl Link for UdpLink {
    fn local(&self) -> IpAddr {
        self.caps.local
    }

    fn slot(&self) -> u8 {
        self.slot.number()
    }

    fn capabilities(&self) -> Capabilities {
        self.caps
    }

    fn listen(&mut self) -> Result<(), OpenError> {
        if self.listening {
            return Ok(());
        }
        let addr = self.caps.local;
        let os = |call| move |source| OpenError::Os { addr, call, source };
        let _turn = JoinLock::wait(addr).map_err(os("waiting for a turn to join"))?;
        if !self.slot.claim().map_err(os("claiming a slot"))? {
            return Err(OpenError::NoFreeSlot { addr });
        }
        if self.local_ports == LocalPorts::Own {
            self.guard = Some(PortGuard::take(addr)?);
        }
        let name = SockAddr::new(addr, ROCE_PORT, self.scope);
        self.socket.bind(&name).map_err(|e| OpenError::from_bind(addr, e))?;
        // Steering is an optimisation: without it packets are handed over.
        if let Err(error) = self.steering.join(&self.socket, &self.slot) {
            tracing::debug!(%error, "the kernel does not steer packets by slot; they are handed over instead");
        }
        self.listening = true;
        Ok(())
    }

    fn send(&mut self, batch: &mut TxBatch) {
        let Self { socket, senders, transmitter, .. } = self;
        transmitter.send(batch, |port| senders.get(port).unwrap_or(socket));
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let Self { socket, senders, transmitter, .. } = self;
        if transmitter.is_waiting() {
            transmitter.retry(&|port| senders.get(port).unwrap_or(socket));
        }
        if !self.outbox.is_empty() {
            self.outbox.retry(&mut self.slot);
        }
        if self.steering.has_changed() {
            let handed = self.take_handovers(sink);
            if self.steering.is_settling(handed == 0) {
                return handed;
            }
        }
        let mut delivered = if self.groups.joined.is_empty() { 0 } else { self.receive_from_groups(sink) };
        delivered += self.receive_from_socket(sink);
        if self.handover_countdown > 0 {
            self.handover_countdown -= 1;
        } else {
            self.handover_countdown = HANDOVER_EVERY;
            delivered += self.take_handovers(sink);
        }
        if !self.steering.is_idle() {
            let to = SockAddr::new(self.caps.local, ROCE_PORT, self.scope);
            self.steering.advance(&self.socket, &self.slot, &to, self.receiver.is_empty);
        }
        delivered
    }

    fn receive_room(&self) -> u64 {
        let room = self.socket.option(libc::SOL_SOCKET, libc::SO_RCVBUF);
        room.ok().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0)
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.socket.fd(), self.slot.fd(), self.services.fd()]
    }

    fn bind_service(&mut self, service: u64) -> io::Result<bool> {
        self.services.bind(self.caps.local, service)
    }

    fn unbind_service(&mut self, service: u64) {
        self.services.unbind(service);
    }

    fn has_service(&self, service: u64) -> bool {
        self.services.bound().iter().any(|bound| bound.service == service)
    }

    fn join_group(&mut self, group: IpAddr) -> io::Result<()> {
        let joined = self.groups.join(group, self.caps.local, self.scope)?;
        enlarge(&joined.socket);
        self.services.watch(joined.socket.fd()).inspect_err(|_| _ = self.groups.leave(group))
    }

    fn leave_group(&mut self, group: IpAddr) {
        if let Some(left) = self.groups.leave(group) {
            // A forked child may have a copy of the socket.
            self.services.unwatch(left.socket.fd());
            left.end();
        }
    }

    fn hand_over_mad(&mut self, owner: MadOwner, datagram: &RxDatagram<'_>) -> bool {
        let owner = match owner {
            MadOwner::Slot(slot) => SlotOwner::Slot(slot),
            MadOwner::Service(service) => SlotOwner::Service(service),
        };
        let RxDatagram { src, src_port, ip_id, bytes, .. } = *datagram;
        let run = GroBurst { src, src_port, ip_id, segment: bytes.len(), marked: false, bytes };
        match self.outbox.hand_over(&mut self.slot, owner, &run) {
            Handover::NoOwner => return false,
            Handover::Done => self.rx.handed_over += 1,
            Handover::Full | Handover::Lost => self.rx.handover_lost += 1,
        }
        true
    }

    fn next_deadline(&self) -> Option<u64> {
        let steering = self.steering.next_deadline();
        [self.transmitter.next_retry(), self.outbox.next_retry(), steering].into_iter().flatten().min()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let (tx, rx) = (&self.transmitter.sent, &self.rx);
        vec![
            ("udp_tx_packets", tx.packets),
            ("udp_tx_bytes", tx.bytes),
            ("udp_tx_calls", tx.calls),
            ("udp_tx_lost_buffer_full", tx.blocked),
            ("udp_tx_lost_no_memory", tx.no_buffers),
            ("udp_tx_lost_too_long", tx.too_long),
            ("udp_tx_lost_unreachable", tx.unreachable),
            ("udp_tx_lost_not_permitted", tx.not_permitted),
            ("udp_tx_lost_other", tx.other),
            ("udp_tx_unsegmented", tx.unsegmented),
            ("udp_rx_packets", rx.packets),
            ("udp_rx_bytes", rx.bytes),
            ("udp_rx_calls", self.receiver.calls),
            ("udp_rx_lost_queue_full", self.socket.drops() + self.groups.drops()),
            ("udp_rx_too_long", self.receiver.too_long),
            ("handed_over", rx.handed_over),
            ("steered_in", rx.steered_in),
            ("handover_lost", rx.handover_lost + self.outbox.lost),
            ("handover_refused", rx.handover_refused),
            ("no_such_slot", rx.no_such_slot),
            ("foreign_port", rx.foreign_port),
        ]
    }

    fn send_blocked(&self) -> bool {
        self.transmitter.is_waiting()
    }
}

impl Drop for UdpLink {
    /// Packets that were steered here by mistake still go to their owner.
    fn drop(&mut self) {
        let mut calls = 0;
        while self.listening && calls < LAST_CALLS {
            self.receive_from_socket(&mut |_| {});
            if self.receiver.is_empty {
                break;
            }
            calls += 1;
        }
        for _ in 0..LAST_RETRIES {
            if self.outbox.is_empty() {
                return;
            }
            std::thread::sleep(LAST_RETRY_AFTER);
            self.outbox.retry(&mut self.slot);
        }
    }
}

/// The opcode of an acknowledgement, the first byte of its packet.
const ACKNOWLEDGE: u8 = Opcode::Ack as u8;

/// Gives each packet of the run to the sink; returns how many.
fn deliver(
    run: GroBurst<'_>,
    group: Option<&IpAddr>,
    rx: &mut Received,
    sink: &mut dyn FnMut(&RxDatagram<'_>),
) -> usize {
    // One value for all packets of the run. Written anew for each, its address would cause a
    // store-forwarding stall behind the payload stores of the packet before.
    let mut datagram = RxDatagram {
        src: run.src,
        src_port: run.src_port,
        bytes: run.bytes,
        ip_id: run.ip_id,
        has_icrc: true,
        arrival: Arrival::Wire,
        group,
        whole: None,
        packets: 1,
        marked: run.marked,
    };
    let mut n = 0;
    if run.bytes.is_empty() {
        sink(&datagram); // an empty datagram is malformed, and the engine counts it
        n += 1;
    }
    let segment = run.segment.max(1);
    let mut rest = run.bytes;
    // An ACK behind a request in the same run is older than the request. Applications that sleep on
    // completions expect their own request to complete before the peer's reply arrives.
    let last = run.bytes.len().saturating_sub(1) / segment;
    if last > 0
        && let (before, bytes) = rest.split_at(last * segment)
        && (bytes.first() == Some(&ACKNOWLEDGE) || SealedHeader::is_acknowledge(bytes))
    {
        datagram.bytes = bytes;
        datagram.ip_id = run.ip_id.wrapping_add(u16::try_from(last).unwrap_or(u16::MAX));
        sink(&datagram);
        datagram.ip_id = run.ip_id;
        n += 1;
        rest = before;
    }
    for bytes in rest.chunks(segment) {
        datagram.bytes = bytes;
        sink(&datagram);
        datagram.ip_id = datagram.ip_id.wrapping_add(1);
        n += 1;
    }
    rx.packets += u64::try_from(n).unwrap_or(0);
    rx.bytes += u64::try_from(run.bytes.len()).unwrap_or(0);
    n
}

/// Splits a run into runs of one owner each. Our own senders do not mix owners, others may.
fn each_run<'a>(run: GroBurst<'a>, mut each: impl FnMut(Option<u8>, GroBurst<'a>)) {
    let segment = run.segment.max(1);
    let owner = |at: usize| {
        let end = run.bytes.len().min(at + segment);
        run.bytes.get(at..end).and_then(|p| p.get(SLOT_BYTE)).copied()
    };
    let (mut start, mut at) = (0, segment);
    while at < run.bytes.len() {
        if owner(at) != owner(start) {
            each(owner(start), part(&run, start, at));
            start = at;
        }
        at += segment;
    }
    each(owner(start), part(&run, start, run.bytes.len()));
}

/// Splits a run into management datagrams and other packets.
fn each_kind<'a>(run: GroBurst<'a>, mut each: impl FnMut(bool, GroBurst<'a>)) {
    let segment = run.segment.max(1);
    let is_mad = |at: usize| run.bytes.get(at + SLOT_BYTE..at + SLOT_BYTE + 3) == Some(&[0, 0, 1]);
    let (mut start, mut at) = (0, segment);
    while at < run.bytes.len() {
        if is_mad(at) != is_mad(start) {
            each(is_mad(start), part(&run, start, at));
            start = at;
        }
        at += segment;
    }
    each(is_mad(start), part(&run, start, run.bytes.len()));
}

/// Delivers a handover: packets of this slot, and management datagrams. Packets of other slots are
/// dropped, never forwarded again: this prevents loops.
fn take_run(
    run: Option<GroBurst<'_>>,
    slot: Option<u8>,
    rx: &mut Received,
    handover_countdown: &mut u32,
    sink: &mut dyn FnMut(&RxDatagram<'_>),
) -> usize {
    let Some(run) = run else {
        rx.handover_refused += 1;
        return 0;
    };
    let mut delivered = 0;
    each_run(run, |of, part| {
        if slot.is_some() && of == slot {
            delivered += deliver(part, None, rx, sink);
            return;
        }
        each_kind(part, |is_mad, part| {
            if is_mad {
                delivered += deliver(part, None, rx, sink);
            } else {
                rx.handover_refused += part.packets();
            }
        });
    });
    rx.steered_in += u64::try_from(delivered).unwrap_or(0);
    // One handover announces more: poll on every call for a while.
    *handover_countdown = 0;
    delivered
}

/// Splits a run by owner and kind, for the fuzz target.
pub(super) fn fuzz_split<'a>(run: GroBurst<'a>, each: &mut dyn FnMut(GroBurst<'a>)) {
    each_run(run, |_, part| each_kind(part, |_, part| each(part)));
}

/// Looks for probes of ours in a run, for the fuzz target.
pub(super) fn fuzz_probe(run: &GroBurst<'_>) {
    Steering::default().hear(run);
}

fn part<'a>(run: &GroBurst<'a>, start: usize, end: usize) -> GroBurst<'a> {
    let skipped = u16::try_from(start / run.segment.max(1)).unwrap_or(u16::MAX);
    GroBurst {
        ip_id: run.ip_id.wrapping_add(skipped),
        bytes: run.bytes.get(start..end).unwrap_or(&[]),
        ..*run
    }
}

/// The largest socket buffers that this user may have. Smaller ones only drop more.
fn enlarge(socket: &Socket) {
    let _ = socket.set(libc::SOL_SOCKET, libc::SO_RCVBUF, SOCKET_BUFFER);
    let _ = socket.set(libc::SOL_SOCKET, libc::SO_SNDBUF, SOCKET_BUFFER);
}
