//! Packets for the wire, built one after the other in one slab.
//!
//! Consecutive packets of one size, destination and source port form a *group* that leaves in a
//! single GSO send, without another copy. The kernel numbers the segments of such a send 0, 1, 2,
//! ... in the IPv4 identification field, which the ICRC covers. The group is therefore chosen when
//! a packet is committed, and the ICRC is written at that moment.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use nobounce_memory::SharedChunk;
use nobounce_protocol::qp::IpOptions;
use nobounce_protocol::seal::{HEADER_LEN, OVERHEAD, TAG_LEN};
use nobounce_protocol::wire::icrc::{self, Flow, IcrcWriter, MASKED};
use nobounce_protocol::wire::{ICRC_LEN, ROCE_PORT};

use super::icrc_writers::IcrcWriters;
use super::packet_writer::{PacketDestination, PacketShape, PacketWriter, PayloadSource, Reserved};
use super::{Capabilities, SOURCE_PORTS};

/// Bytes of the slab: one full GSO send. A larger slab would leave the receiver idle while it is
/// filled.
pub(super) const SLAB: usize = 66 * 1024;
/// Unused bytes at the start of a packet buffer. Headers and ICRC are 4 modulo 8 bytes long, so
/// this lead aligns the payload of every full packet to 16. Copies then run at 38 GB/s instead of
/// 23.
pub(super) const LEAD: usize = 4;
/// Maximum bytes in one GSO send. The kernel's limit over IPv4 is 0xfff0 less the IP and UDP
/// headers.
pub(super) const MAX_GROUP: usize = 0xfff0 - 20 - 8;
/// Offset of the high byte of the destination QP number in a packet: the slot of the receiver.
pub(super) const SLOT_BYTE: usize = 5;

/// Index of the well-known port among the source ports.
const WELL_KNOWN: u8 = 8;
const _: () = assert!(WELL_KNOWN as usize == SOURCE_PORTS);
/// Index of the first source port for packets that are not ECN-capable.
pub(super) const PLAIN: u8 = WELL_KNOWN + 1;

/// One packet of a [`TxBatch`](super::TxBatch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxPacket {
    /// Offset in the slab.
    pub start: u32,
    /// Its bytes, BTH to ICRC.
    pub len: u32,
    /// Destination address.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// Index of that port among the link's source ports.
    pub(super) port: u8,
    /// Its place in its group, which is also its IPv4 identification. A group begins where this is
    /// 0.
    pub ip_id: u16,
    /// Whether it has an ICRC. Packets without one must not leave this host.
    pub has_icrc: bool,
    /// Index of its payload outside the slab, if any; the slab then holds only the bytes before and
    /// after it.
    pub(super) outside: Option<u16>,
    /// IP options (traffic class, hop limit).
    pub(super) ip_options: IpOptions,
}

impl TxPacket {
    /// Its range in the slab, if its payload is there too.
    pub(super) fn range(&self) -> Range<usize> {
        let start = self.start as usize;
        start..start + self.len as usize
    }

    /// Whether its socket makes it ECN-capable.
    pub(super) fn is_ecn_capable(&self) -> bool {
        self.port < WELL_KNOWN && self.src_port != ROCE_PORT
    }

    /// The addresses and ports its ICRC covers.
    pub(super) fn flow(&self, local: IpAddr) -> Flow {
        Flow { src: local, dst: self.dst, src_port: self.src_port, dst_port: ROCE_PORT }
    }
}

/// A destination and a source port, as machine words. An [`IpAddr`] is 17 unaligned bytes: loading
/// it soon after the store causes a store-forwarding stall. The load then waits for all earlier
/// stores, here those of a whole payload (5 % of a sender's time).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Destination {
    high: u64,
    low: u64,
    v4: bool,
    port: u8,
    ip_options: IpOptions,
}

impl Destination {
    #[inline(always)]
    fn new(dst: &IpAddr, port: u8, ip_options: IpOptions) -> Self {
        match dst {
            IpAddr::V4(a) => Self { high: 0, low: u64::from(a.to_bits()), v4: true, port, ip_options },
            IpAddr::V6(a) => {
                let [high, low] = [0, 8].map(|at| {
                    let octets = a.octets();
                    u64::from_be_bytes(std::array::from_fn(|i| octets[at + i]))
                });
                Self { high, low, v4: false, port, ip_options }
            }
        }
    }

    fn dst(&self) -> IpAddr {
        if self.v4 {
            Ipv4Addr::from_bits(u32::try_from(self.low).unwrap_or(0)).into()
        } else {
            Ipv6Addr::from_bits(u128::from(self.high) << 64 | u128::from(self.low)).into()
        }
    }
}

/// The group that the next packet may join.
#[derive(Clone, Copy, Debug)]
struct SegmentGroup {
    destination: Destination,
    slot: u8,
    segment: usize,
    packets: usize,
    bytes: usize,
}

/// A payload outside the slab, or a whole packet: bytes that the GPU's copy engine wrote to a
/// chunk, sent from there. They stay unchanged while the batch holds the chunk.
#[derive(Clone, Debug)]
struct Outside {
    /// Index of the chunk in the batch.
    chunk: usize,
    range: Range<usize>,
    /// Header bytes in the slab before a payload.
    head: usize,
}

impl Outside {
    /// Whether it is the whole packet, which has this length.
    fn is_whole(&self, len: usize) -> bool {
        self.range.len() == len
    }
}

/// A packet begun and not yet committed.
#[derive(Clone, Copy, Debug)]
struct OpenPacket {
    destination: Destination,
    /// Its bytes on the wire.
    len: usize,
    /// Its bytes in the slab.
    slab_len: usize,
    /// Index of the ICRC writer that writes its ICRC; `None` where it needs none.
    icrc_writer: Option<usize>,
}

/// A reusable slab into which packets are built.
pub(super) struct WirePackets {
    caps: Capabilities,
    slab: Box<[u8]>,
    used: usize,
    /// Bytes on the wire of all packets in it.
    pub(super) bytes: usize,
    /// Payloads outside the slab; that of an open packet is the last.
    outside: Vec<Outside>,
    /// Their chunks, each once for consecutive payloads.
    chunks: Vec<SharedChunk>,
    /// How many of them belong to packets of the batch.
    committed_outside: usize,
    open: Option<OpenPacket>,
    packets: Vec<TxPacket>,
    group: Option<SegmentGroup>,
    icrc_writers: IcrcWriters<Destination>,
    /// IP options of the packets begun next.
    ip_options: IpOptions,
}

impl WirePackets {
    pub(super) fn new(caps: Capabilities, slab: usize) -> Self {
        Self {
            caps,
            slab: vec![0; slab].into_boxed_slice(),
            used: LEAD,
            bytes: 0,
            outside: Vec::new(),
            chunks: Vec::new(),
            committed_outside: 0,
            open: None,
            packets: Vec::with_capacity(64),
            group: None,
            icrc_writers: IcrcWriters::new(),
            ip_options: IpOptions::default(),
        }
    }

    /// Sets the IP options of the packets begun from now on. The default hop limit is not
    /// requested: a group with control data of its own costs a system call of its own.
    pub(super) fn set_ip_options(&mut self, ip_options: IpOptions) {
        let usual = ip_options.hop_limit == self.caps.usual_hops;
        self.ip_options = IpOptions { hop_limit: if usual { 0 } else { ip_options.hop_limit }, ..ip_options };
    }

    /// Adds a packet that `fill` writes, but for its ICRC.
    pub(super) fn put(&mut self, to: &PacketDestination<'_>, len: usize, fill: impl FnOnce(&mut [u8])) {
        let destination = Destination::new(to.addr, self.port(to), self.ip_options);
        let Some((room, crc)) = self.open_packet(destination, len, len, true) else { return };
        fill(room);
        let body = &room[..len - ICRC_LEN];
        let crc = crc.map(|crc| {
            let mut crc = crc32fast::Hasher::new_with_initial(crc);
            crc.update(body);
            crc.finalize()
        });
        self.commit(crc);
    }

    /// Adds a packet of `len` bytes in place of another one: for its receiver, by its port, with
    /// its IP options. `fill` writes all of it, or returns false: then it is not added.
    pub(super) fn put_closed(
        &mut self,
        like: &TxPacket,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        let destination = Destination::new(&like.dst, like.port, like.ip_options);
        self.put_whole(destination, len, fill)
    }

    /// Adds a packet that is complete.
    pub(super) fn put_message(&mut self, addr: &IpAddr, packet: &[u8]) -> bool {
        let port = self.port(&PacketDestination { addr, port_hint: 0, ecn: false, local: None });
        let destination = Destination::new(addr, port, IpOptions::default());
        self.put_whole(destination, packet.len(), |room| {
            room.copy_from_slice(packet);
            true
        })
    }

    fn put_whole(
        &mut self,
        destination: Destination,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        let filled = self.open_packet(destination, len, len, false).is_some_and(|(room, _)| fill(room));
        match self.open.take() {
            Some(open) if filled => _ = self.place(&open),
            _ => return false,
        }
        true
    }

    /// Bytes around a packet that is sealed in place.
    #[inline(always)]
    pub(super) fn added(&self) -> usize {
        if self.caps.sealed { OVERHEAD } else { 0 }
    }

    /// Where the next packet begins.
    #[inline(always)]
    fn next(&self) -> usize {
        self.used + if self.caps.sealed { HEADER_LEN } else { 0 }
    }

    /// Whether its packets can be sealed in place: all of them are in the slab, with room around.
    pub(super) fn is_sealable(&self) -> bool {
        self.caps.sealed && self.outside.is_empty()
    }

    /// Seals a packet in place. `seal` gets it with the room around it; if it refuses, nothing of
    /// the packet leaves.
    pub(super) fn seal(&mut self, index: usize, seal: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let Some(packet) = self.packets.get_mut(index) else { return false };
        let plain = packet.range();
        let Some(room) = self.slab.get_mut(plain.start - HEADER_LEN..plain.end + TAG_LEN) else {
            return false;
        };
        let sealed = seal(room);
        if !sealed {
            room.fill(0);
        }
        packet.start = u32::try_from(plain.start - HEADER_LEN).unwrap_or(u32::MAX);
        packet.len = u32::try_from(plain.len() + OVERHEAD).unwrap_or(u32::MAX);
        packet.has_icrc = false;
        sealed
    }

    fn push_outside(&mut self, chunk: &SharedChunk, range: Range<usize>, head: usize) {
        if self.chunks.last().is_none_or(|last| last.as_ptr() != chunk.as_ptr()) {
            self.chunks.push(chunk.clone());
        }
        self.outside.truncate(self.committed_outside);
        self.outside.push(Outside { chunk: self.chunks.len() - 1, range, head });
    }

    /// Index of the source port for that receiver.
    fn port(&self, to: &PacketDestination<'_>) -> u8 {
        let ports = &self.caps.source_ports;
        // Hints that map to one port must not split a group.
        if ports[0] == ROCE_PORT {
            return 0;
        }
        // A receiver on this host takes packets of the well-known port only: the kernel gives it to
        // one user. Receivers of multicast may be on this host.
        if self.caps.is_this_host(to.addr) || to.addr.is_multicast() {
            return WELL_KNOWN;
        }
        let port = usize::from(to.port_hint) % ports.len();
        let port = if ports[port] == ports[0] { 0 } else { u8::try_from(port).unwrap_or(0) };
        if to.ecn { port } else { port + PLAIN }
    }

    // Inlined, so that the `Destination` stays in registers: on the stack it would cause
    // store-forwarding stalls.
    #[inline(always)]
    fn open_packet(
        &mut self,
        destination: Destination,
        len: usize,
        slab_len: usize,
        has_icrc: bool,
    ) -> Option<(&mut [u8], Option<u32>)> {
        let caps = &self.caps;
        let flow = move || Flow {
            src: caps.local,
            dst: destination.dst(),
            src_port: caps.source_port(destination.port),
            dst_port: ROCE_PORT,
        };
        let icrc_writer = if has_icrc { Some(self.icrc_writers.find(destination, len, flow)) } else { None };
        let start =
            icrc_writer.map(|icrc_writer| self.icrc_writers.get(icrc_writer).map_or(0, IcrcWriter::start));
        self.open = Some(OpenPacket { destination, len, slab_len, icrc_writer });
        let at = self.next();
        self.slab.get_mut(at..at + slab_len).map(|room| (room, start))
    }

    /// A byte of the headers of the packet begun last.
    fn open_byte(&self, open: &OpenPacket, at: usize) -> u8 {
        if open.slab_len > 0 {
            return self.slab[self.next() + at];
        }
        let outside = self.outside.last();
        outside.and_then(|outside| self.payload(outside).get(at).copied()).unwrap_or(0)
    }

    /// Writes the ICRC of a packet that is entirely in a chunk.
    fn write_icrc(&self, outside: &Outside, icrc: [u8; ICRC_LEN]) {
        if let Some(chunk) = self.chunks.get(outside.chunk) {
            // SAFETY: references into chunks are made for the time of a call only, and this is
            // another.
            unsafe { chunk.write_between(outside.range.end - ICRC_LEN, &icrc) };
        }
    }

    /// Copies a packet of another batch whose ICRC is already written. The ICRC is adapted to the
    /// new place and stays as valid (or invalid) as it was.
    pub(super) fn push(&mut self, from: &TxPacket, bytes: &[u8]) {
        let destination = Destination::new(&from.dst, from.port, from.ip_options);
        let Some((room, _)) = self.open_packet(destination, bytes.len(), bytes.len(), true) else { return };
        room.copy_from_slice(bytes);
        if let Some(open) = self.open.take() {
            let at = self.next();
            let ip_id = self.place(&open);
            self.move_id(at + open.len, open.len, from.dst, from.ip_id, ip_id);
        }
    }

    /// Whether its last GSO send is full: one more packet would cost a send of its own.
    pub(super) fn ends_with_full_send(&self) -> bool {
        let added = self.added();
        self.group.is_some_and(|group| group.packets > 1 && group.bytes + group.segment + added > MAX_GROUP)
    }

    /// How many packets of `len` bytes its last GSO send still takes, if they match its group.
    pub(super) fn room_in_group(&self, len: usize) -> usize {
        let group = self.group.filter(|group| group.segment == len && self.caps.max_segments > 1);
        group.map_or(usize::MAX, |group| (MAX_GROUP - group.bytes) / (len + self.added()))
    }

    /// The bytes of one of its packets.
    pub(super) fn bytes_of(&self, packet: &TxPacket) -> Cow<'_, [u8]> {
        match self.parts(packet) {
            [whole, [], []] => Cow::Borrowed(whole),
            parts => Cow::Owned(parts.concat()),
        }
    }

    /// The bytes of one of its packets, in place: all of it, or the headers, the payload and the
    /// trailer.
    pub(super) fn parts(&self, packet: &TxPacket) -> [&[u8]; 3] {
        let outside = packet.outside.and_then(|index| self.outside.get(usize::from(index)));
        let Some(outside) = outside else { return [&self.slab[packet.range()], &[], &[]] };
        if outside.is_whole(packet.len as usize) {
            return [self.payload(outside), &[], &[]];
        }
        let start = packet.start as usize;
        let end = start + packet.len as usize - outside.range.len();
        let (head, tail) = self.slab[start..end].split_at(outside.head);
        [head, self.payload(outside), tail]
    }

    fn payload(&self, outside: &Outside) -> &[u8] {
        self.chunks.get(outside.chunk).and_then(|chunk| chunk.get(outside.range.clone())).unwrap_or(&[])
    }

    /// Whether one of these packets has its payload outside the slab.
    pub(super) fn is_scattered(&self, first: usize, end: usize) -> bool {
        !self.outside.is_empty() && self.packets[first..end].iter().any(|packet| packet.outside.is_some())
    }

    /// Whether the group from packet `first` on leaves by itself: it is scattered, or has IP
    /// options.
    pub(super) fn leaves_alone(&self, first: usize, end: usize) -> bool {
        self.packets[first].ip_options != IpOptions::default() || self.is_scattered(first, end)
    }

    /// The packets in it, in order.
    pub(super) fn packets(&self) -> &[TxPacket] {
        &self.packets
    }

    /// The capabilities it groups by.
    pub(super) fn capabilities(&self) -> Capabilities {
        self.caps
    }

    /// Forgets all packets.
    pub(super) fn clear(&mut self) {
        self.used = LEAD;
        self.bytes = 0;
        self.outside.clear();
        self.chunks.clear();
        self.committed_outside = 0;
        self.open = None;
        self.packets.clear();
        self.group = None;
    }

    pub(super) fn slab(&self) -> &[u8] {
        &self.slab
    }

    /// Index one past the last packet of the group that begins at packet `first`.
    pub(super) fn group_end(&self, first: usize) -> usize {
        let rest = self.packets.get(first + 1..).unwrap_or(&[]);
        first + 1 + rest.iter().position(|p| p.ip_id == 0).unwrap_or(rest.len())
    }

    /// Splits the packets from `first` to `end` into groups of one, for a path that refuses GSO.
    pub(super) fn ungroup(&mut self, first: usize, end: usize) {
        for index in first..end {
            let packet = self.packets[index];
            let len = packet.len as usize;
            if !packet.has_icrc {
                self.packets[index].ip_id = 0;
                continue;
            }
            let away = packet.outside.and_then(|at| self.outside.get(usize::from(at)));
            if let Some(outside) = away.filter(|outside| outside.is_whole(len)) {
                if let Some(icrc) = self.payload(outside).last_chunk().filter(|_| packet.dst.is_ipv4()) {
                    let crc = icrc::change_id(u32::from_le_bytes(*icrc), len - ICRC_LEN, packet.ip_id, 0);
                    self.write_icrc(outside, crc.to_le_bytes());
                }
                self.packets[index].ip_id = 0;
                continue;
            }
            let in_slab = len - away.map_or(0, |outside| outside.range.len());
            self.move_id(packet.start as usize + in_slab, len, packet.dst, packet.ip_id, 0);
            self.packets[index].ip_id = 0;
        }
    }

    /// Adapts the ICRC that ends at `end` of the slab, of a packet of `len` bytes, to another IPv4
    /// identification. IPv6 has no such field.
    fn move_id(&mut self, end: usize, len: usize, dst: IpAddr, from: u16, to: u16) {
        if from == to || dst.is_ipv6() {
            return;
        }
        let Some(tail) = self.slab[..end].last_chunk_mut::<ICRC_LEN>() else { return };
        *tail = icrc::change_id(u32::from_le_bytes(*tail), len - ICRC_LEN, from, to).to_le_bytes();
    }

    /// Assigns a packet to a group; returns its index there.
    fn place(&mut self, open: &OpenPacket) -> u16 {
        let OpenPacket { destination, len, slab_len, icrc_writer } = *open;
        let outside = (slab_len < len).then(|| u16::try_from(self.committed_outside).unwrap_or(u16::MAX));
        self.committed_outside += usize::from(outside.is_some());
        let slot = self.open_byte(open, SLOT_BYTE);
        let (start, added) = (self.next(), self.added());
        let joined = self.group.as_mut().filter(|g| {
            // The receiver's kernel steers a GSO send as a whole, so it must hold packets of one
            // slot only.
            (g.destination, g.slot) == (destination, slot)
                // A shorter packet is the last. (A request with an answer piggybacked behind it:
                // the peer gets both at once.)
                && len <= g.segment
                && g.packets < self.caps.max_segments
                && g.bytes + len + added <= MAX_GROUP
        });
        let ip_id = match joined {
            Some(g) => {
                let place = g.packets;
                g.packets += 1;
                g.bytes += len + added;
                if len < g.segment {
                    // Only the last segment may be shorter.
                    self.group = None;
                }
                place
            }
            None => {
                self.group =
                    Some(SegmentGroup { destination, slot, segment: len, packets: 1, bytes: len + added });
                0
            }
        };
        let ip_id = u16::try_from(ip_id).unwrap_or(u16::MAX);
        self.packets.push(TxPacket {
            start: u32::try_from(start).unwrap_or(u32::MAX),
            len: u32::try_from(len).unwrap_or(u32::MAX),
            dst: destination.dst(),
            src_port: self.caps.source_port(destination.port),
            port: destination.port,
            ip_id,
            has_icrc: icrc_writer.is_some(),
            outside,
            ip_options: destination.ip_options,
        });
        self.used += slab_len + added;
        self.bytes += len + added;
        ip_id
    }
}

impl PacketWriter for WirePackets {
    #[inline(always)]
    fn begin(
        &mut self,
        to: &PacketDestination<'_>,
        shape: PacketShape,
        payload: PayloadSource<'_>,
    ) -> Option<Reserved> {
        let len = shape.len;
        let slab_len = match payload {
            PayloadSource::Copy => len,
            PayloadSource::Chunk { chunk, at, len: payload } => {
                debug_assert!(at + payload <= chunk.len());
                self.push_outside(chunk, at..at + payload, shape.head);
                len.checked_sub(payload)?
            }
        };
        let destination = Destination::new(to.addr, self.port(to), self.ip_options);
        let (room, crc) = self.open_packet(destination, len, slab_len, to.local.is_none())?;
        Some(Reserved { start: room.as_mut_ptr(), len: slab_len, crc })
    }

    fn commit(&mut self, crc: Option<u32>) {
        let Some(open) = self.open.take() else { return };
        let at = self.next();
        let masked = self.open_byte(&open, MASKED);
        let ip_id = self.place(&open);
        let icrc_writer = open.icrc_writer.and_then(|icrc_writer| self.icrc_writers.get(icrc_writer));
        // Zero the ICRC so that stale bytes are not sent.
        let icrc = icrc_writer
            .zip(crc)
            .map_or(0, |(icrc_writer, crc)| icrc_writer.finish(crc, masked, ip_id))
            .to_le_bytes();
        if open.slab_len == 0 {
            if let Some(outside) = self.outside.last() {
                self.write_icrc(outside, icrc);
            }
            return;
        }
        let end = at + open.slab_len;
        self.slab[end - ICRC_LEN..end].copy_from_slice(&icrc);
    }

    fn abort(&mut self) {
        self.outside.truncate(self.committed_outside);
        self.open = None;
    }
}

impl fmt::Debug for WirePackets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WirePackets")
            .field("used", &self.used)
            .field("open", &self.open)
            .field("packets", &self.packets)
            .finish_non_exhaustive()
    }
}
