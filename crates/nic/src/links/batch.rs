//! A batch of outgoing packets.
//!
//! Packets are built one after the other in one slab. Consecutive packets of one size, destination
//! and source port form a *group* that leaves in a single GSO send, without another copy. The
//! kernel numbers the segments of such a send 0, 1, 2, ... in the IPv4 identification field, which
//! the ICRC covers. The group is therefore chosen when a packet is committed, and the ICRC is
//! written at that moment.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::sync::Arc;

use nobounce_memory::Sink;
use nobounce_memory::gpu::copy_engine::PinnedChunk;
use nobounce_protocol::qp::IpOptions;
use nobounce_protocol::wire::icrc::{self, Flow, IcrcWriter, MASKED};
use nobounce_protocol::wire::{BTH_LEN, ICRC_LEN, ROCE_PORT};

use super::Capabilities;
use super::icrc_writers::IcrcWriters;
use super::rings::{Hold, PeerRing};

/// Bytes of the slab: one full GSO send. A larger slab would leave the receiver idle while it is
/// filled.
const SLAB: usize = 66 * 1024;
/// Unused bytes at the start of a packet buffer. Headers and ICRC are 4 modulo 8 bytes long, so
/// this lead aligns the payload of every full packet to 16. Copies then run at 38 GB/s instead of
/// 23.
pub(super) const LEAD: usize = 4;
/// Maximum number of packets in one batch.
const MAX_PACKETS: usize = 1024;
/// Maximum bytes in one GSO send. The kernel's limit over IPv4 is 0xfff0 less the IP and UDP
/// headers.
const MAX_GROUP: usize = 0xfff0 - 20 - 8;
/// The longest packet that can be sent.
pub const MAX_PACKET: usize = MAX_GROUP;
/// The longest packet of the protocol: headers, the largest path MTU, ICRC.
const LARGEST_ROCE_PACKET: usize = 40 + 4096 + ICRC_LEN;
/// Offset of the high byte of the destination QP number in a packet: the slot of the receiver.
pub(super) const SLOT_BYTE: usize = 5;

/// One packet of a [`TxBatch`].
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
struct Group {
    destination: Destination,
    slot: u8,
    segment: usize,
    packets: usize,
    bytes: usize,
}

/// A payload outside the slab: bytes that the GPU's copy engine wrote to a chunk, sent from there.
/// They stay unchanged while the batch holds the chunk.
#[derive(Clone, Debug)]
struct Outside {
    /// Index of the chunk in the batch.
    chunk: usize,
    range: Range<usize>,
    /// Header bytes before it. `None`: the range is the whole packet.
    head: Option<usize>,
}

/// A packet begun and not yet committed.
#[derive(Clone, Copy, Debug)]
struct Open {
    destination: Destination,
    /// Its bytes on the wire.
    len: usize,
    /// Its bytes in the slab.
    slab_len: usize,
    /// Index of the ICRC writer that writes its ICRC; `None` where it needs none.
    icrc_writer: Option<usize>,
}

/// A reusable slab into which packets are built, one after the other.
pub struct TxBatch {
    caps: Capabilities,
    slab: Box<[u8]>,
    used: usize,
    /// Bytes on the wire of all packets in it.
    wire: usize,
    /// Payloads outside the slab; that of an open packet is the last.
    outside: Vec<Outside>,
    /// Their chunks, each once for consecutive payloads.
    chunks: Vec<PinnedChunk>,
    /// How many of them belong to packets of the batch.
    committed_outside: usize,
    open: Option<Open>,
    packets: Vec<TxPacket>,
    group: Option<Group>,
    icrc_writers: IcrcWriters<Destination>,
    /// IP options of the packets begun next.
    ip_options: IpOptions,
    /// Packets that were built in the rings of their receivers.
    near: InRings,
}

/// Packets in rings that were not published yet.
#[derive(Debug, Default)]
struct InRings {
    /// The rings, each once; the one used last is the last.
    rings: Vec<Hold>,
    packets: usize,
    bytes: usize,
    /// Bytes of them in leased chunks.
    leased: usize,
    /// The open packet, in the last ring.
    open: Option<OpenInRing>,
    /// A ring was full and a packet went into the slab instead: later packets must not overtake it.
    spilled: bool,
}

/// A packet or run in a ring, begun and not yet committed.
#[derive(Debug)]
struct OpenInRing {
    len: usize,
    packets: u16,
    /// Its payload outside the ring, if any: file and offset of its first byte, and the chunk.
    leased: Option<(u8, u32, PinnedChunk)>,
    /// Bytes in the ring.
    room: usize,
}

impl InRings {
    /// Selects that ring for the next packet, unless another writer holds it.
    #[inline]
    fn turn_to(&mut self, ring: &Arc<PeerRing>) -> Option<&mut Hold> {
        let rings = &mut self.rings;
        if rings.last().is_none_or(|last| !last.is_of(ring)) {
            match rings.iter().position(|known| known.is_of(ring)) {
                Some(known) => {
                    let last = rings.len() - 1;
                    rings.swap(known, last);
                }
                None => rings.push(ring.hold()?),
            }
        }
        rings.last_mut()
    }
}

impl TxBatch {
    /// An empty batch for a link with these capabilities.
    pub fn new(caps: Capabilities) -> Self {
        Self {
            caps,
            slab: vec![0; SLAB].into_boxed_slice(),
            used: LEAD,
            wire: LEAD,
            outside: Vec::new(),
            chunks: Vec::new(),
            committed_outside: 0,
            open: None,
            packets: Vec::with_capacity(64),
            group: None,
            icrc_writers: IcrcWriters::new(),
            ip_options: IpOptions::default(),
            near: InRings::default(),
        }
    }

    /// Sets the IP options of the packets begun from now on. The default hop limit is not
    /// requested: a group with control data of its own costs a system call of its own.
    pub fn set_ip_options(&mut self, ip_options: IpOptions) {
        let usual = ip_options.hop_limit == self.caps.usual_hops;
        self.ip_options = IpOptions { hop_limit: if usual { 0 } else { ip_options.hop_limit }, ..ip_options };
    }

    /// Room for one packet of `len` bytes, ICRC included; the caller fills all but the last four.
    ///
    /// The room has stale contents. `None`: the batch is full, send it first. An empty batch takes
    /// any length from a bare BTH to [`MAX_PACKET`].
    pub fn begin(&mut self, dst: IpAddr, src_port_hint: u16, len: usize) -> Option<&mut [u8]> {
        let port = self.port(src_port_hint);
        self.begin_on(Destination::new(&dst, port, self.ip_options), len, len, true).map(|(room, _)| room)
    }

    /// As [`begin`](Self::begin); also returns the initial CRC of the packet. The caller computes
    /// the CRC while it fills the body and passes it to [`commit_crc`](Self::commit_crc). `None`
    /// for a same-host peer (`near`): the packet needs no ICRC, and the room is in the ring unless
    /// that is full.
    #[inline]
    pub fn begin_crc(
        &mut self,
        (dst, src_port_hint): (&IpAddr, u16),
        len: usize,
        near: Option<&Arc<PeerRing>>,
    ) -> Option<(Sink<'_>, Option<u32>)> {
        if let Some(near) = near
            && self.fits(len)
            && !self.near.spilled
            && let Some(room) = self.near.turn_to(near).and_then(|ring| ring.reserve(len))
        {
            return Some((self.begin_in_ring(room, len, 1), None));
        }
        self.near.spilled |= near.is_some();
        let port = self.port(src_port_hint);
        let (room, crc) =
            self.begin_on(Destination::new(dst, port, self.ip_options), len, len, near.is_none())?;
        Some((room.into(), crc))
    }

    /// Room for a run of packets, `len` bytes with one header and one ICRC; only in a ring with
    /// room.
    pub fn begin_run(&mut self, ring: &Arc<PeerRing>, len: usize, packets: u16) -> Option<Sink<'_>> {
        if self.near.spilled || !self.fits(len) {
            return None;
        }
        let room = self.near.turn_to(ring)?.reserve(len)?;
        Some(self.begin_in_ring(room, len, packets))
    }

    /// Current maximum payload of one run in that ring.
    pub fn longest_run(&mut self, ring: &Arc<PeerRing>) -> usize {
        self.near.turn_to(ring).map_or(0, Hold::longest_run)
    }

    /// As [`begin_run`](Self::begin_run), for packets whose payloads are contiguous in a chunk,
    /// from `at` on. The room is for the headers, `head` bytes; the receiver reads the payload in
    /// place.
    pub fn begin_leased(
        &mut self,
        ring: &Arc<PeerRing>,
        (len, head, packets): (usize, usize, u16),
        chunk: &PinnedChunk,
        at: usize,
    ) -> Option<Sink<'_>> {
        if self.near.spilled || !self.fits(len) || at + (len - head) > chunk.len() {
            return None;
        }
        let ring = self.near.turn_to(ring)?;
        let (file, offset) = ring.lease(chunk, at)?;
        let room = ring.reserve(head)?;
        let leased = Some((file, offset, chunk.clone()));
        Some(self.open_in_ring(room, OpenInRing { len, packets, leased, room: head }))
    }

    #[inline]
    fn begin_in_ring(&mut self, room: *mut u8, len: usize, packets: u16) -> Sink<'_> {
        let mut room = self.open_in_ring(room, OpenInRing { len, packets, leased: None, room: len });
        // Zero the ICRC so that stale bytes are not sent.
        room.put(len - ICRC_LEN, &[0; ICRC_LEN]);
        room
    }

    #[inline]
    fn open_in_ring(&mut self, room: *mut u8, open: OpenInRing) -> Sink<'_> {
        let len = open.room;
        self.near.open = Some(open);
        // SAFETY: these bytes of the ring are ours until they are published, and the ring lives as
        // long as the batch refers to it.
        unsafe { Sink::new(room, len) }
    }

    /// Whether that packet length is valid and fits.
    #[inline(always)]
    fn fits(&self, len: usize) -> bool {
        debug_assert!((BTH_LEN + ICRC_LEN..=MAX_PACKET).contains(&len), "a packet of {len} bytes");
        (BTH_LEN + ICRC_LEN..=MAX_PACKET.min(SLAB - self.wire)).contains(&len) && self.count() < MAX_PACKETS
    }

    /// As [`begin_crc`](Self::begin_crc), for a packet of `len` bytes whose payload is that `range`
    /// of the chunk. The room is for the headers (`head` bytes), the padding and the ICRC. The CRC
    /// of the body includes the payload.
    pub fn begin_outside(
        &mut self,
        (dst, src_port_hint): (&IpAddr, u16),
        len: usize,
        head: usize,
        chunk: &PinnedChunk,
        range: Range<usize>,
    ) -> Option<(&mut [u8], Option<u32>)> {
        debug_assert!(range.end <= chunk.len());
        let port = self.port(src_port_hint);
        let slab_len = len.checked_sub(range.len())?;
        self.push_outside(chunk, range, Some(head));
        self.begin_on(Destination::new(dst, port, self.ip_options), len, slab_len, true)
    }

    /// Begins a packet of `len` bytes that is entirely in a chunk, from `start` on; its ICRC is
    /// written there. Returns the initial CRC. The caller has written all but the ICRC.
    pub fn begin_inside(
        &mut self,
        (dst, src_port_hint): (&IpAddr, u16),
        len: usize,
        chunk: &PinnedChunk,
        start: usize,
    ) -> Option<Option<u32>> {
        debug_assert!(start + len <= chunk.len());
        let port = self.port(src_port_hint);
        self.push_outside(chunk, start..start + len, None);
        self.begin_on(Destination::new(dst, port, self.ip_options), len, 0, true).map(|(_, crc)| crc)
    }

    fn push_outside(&mut self, chunk: &PinnedChunk, range: Range<usize>, head: Option<usize>) {
        if self.chunks.last().is_none_or(|last| last.as_ptr() != chunk.as_ptr()) {
            self.chunks.push(chunk.clone());
        }
        self.outside.truncate(self.committed_outside);
        self.outside.push(Outside { chunk: self.chunks.len() - 1, range, head });
    }

    fn port(&self, hint: u16) -> u8 {
        let ports = self.caps.source_ports.len();
        let port = u8::try_from(usize::from(hint) % ports).unwrap_or(0);
        // Hints that map to one port must not split a group.
        if self.caps.source_ports[usize::from(port)] == self.caps.source_ports[0] { 0 } else { port }
    }

    // Inlined, so that the `Destination` stays in registers: on the stack it would cause
    // store-forwarding stalls.
    #[inline(always)]
    fn begin_on(
        &mut self,
        destination: Destination,
        len: usize,
        slab_len: usize,
        has_icrc: bool,
    ) -> Option<(&mut [u8], Option<u32>)> {
        if !self.fits(len) {
            self.open = None;
            return None;
        }
        let caps = &self.caps;
        let flow = move || Flow {
            src: caps.local,
            dst: destination.dst(),
            src_port: caps.source_ports[usize::from(destination.port)],
            dst_port: ROCE_PORT,
        };
        let icrc_writer = if has_icrc { Some(self.icrc_writers.find(destination, len, flow)) } else { None };
        let start =
            icrc_writer.map(|icrc_writer| self.icrc_writers.get(icrc_writer).map_or(0, IcrcWriter::start));
        self.open = Some(Open { destination, len, slab_len, icrc_writer });
        self.slab.get_mut(self.used..self.used + slab_len).map(|room| (room, start))
    }

    /// Commits the packet begun last: chooses its group and writes its ICRC.
    pub fn commit(&mut self) {
        let Some(open) = self.open else { return self.commit_crc(None) };
        debug_assert_eq!(open.len, open.slab_len, "whose payload lies elsewhere is committed with its CRC");
        let crc =
            open.icrc_writer.and_then(|icrc_writer| self.icrc_writers.get(icrc_writer)).map(|icrc_writer| {
                let mut crc = crc32fast::Hasher::new_with_initial(icrc_writer.start());
                crc.update(&self.slab[self.used..self.used + open.len - ICRC_LEN]);
                crc.finalize()
            });
        self.commit_crc(crc);
    }

    /// As [`commit`](Self::commit), of a packet whose body has this CRC.
    pub fn commit_crc(&mut self, crc: Option<u32>) {
        if let Some(OpenInRing { len, packets, leased, room }) = self.near.open.take() {
            if let Some(ring) = self.near.rings.last_mut() {
                match leased {
                    None => ring.commit(len, packets),
                    Some((file, offset, chunk)) => {
                        let behind = u32::try_from(len - room).unwrap_or(0);
                        self.near.leased += len - room;
                        ring.commit_leased((room, packets), (file, offset), behind, chunk);
                    }
                }
            }
            self.near.packets += usize::from(packets);
            self.near.bytes += len;
            self.wire += len;
            return;
        }
        let Some(open) = self.open.take() else { return };
        let at = self.used;
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

    /// A byte of the headers of the packet begun last.
    fn open_byte(&self, open: &Open, at: usize) -> u8 {
        if open.slab_len > 0 {
            return self.slab[self.used + at];
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

    /// Makes packets in rings visible to polling readers before [`Link::send`](super::Link::send):
    /// the reader works while the sender does its bookkeeping.
    #[inline]
    pub fn show(&mut self) {
        if let Some(ring) = self.near.rings.last_mut() {
            ring.show();
        }
    }

    /// Discards the packet begun last.
    pub fn abort(&mut self) {
        self.outside.truncate(self.committed_outside);
        self.open = None;
        self.near.open = None;
        if self.near.packets == 0 {
            self.let_go(); // possibly no send follows that would release them
        }
    }

    /// Copies a packet of another batch whose ICRC is already written. The ICRC is adapted to the
    /// new place and stays as valid (or invalid) as it was. Returns whether there was room.
    pub(super) fn push(&mut self, from: &TxPacket, bytes: &[u8]) -> bool {
        let destination = Destination::new(&from.dst, from.port, from.ip_options);
        let Some((room, _)) = self.begin_on(destination, bytes.len(), bytes.len(), true) else {
            return false;
        };
        room.copy_from_slice(bytes);
        if let Some(open) = self.open.take() {
            let at = self.used;
            let ip_id = self.place(&open);
            self.move_id(at + open.len, open.len, from.dst, from.ip_id, ip_id);
        }
        true
    }

    /// Whether it has room for one more packet of the largest path MTU.
    pub fn has_room(&self) -> bool {
        SLAB - self.wire >= LARGEST_ROCE_PACKET && self.count() < MAX_PACKETS
    }

    /// Whether its last GSO send is full: one more packet would cost a send of its own.
    pub fn ends_with_full_send(&self) -> bool {
        self.group.is_some_and(|group| group.packets > 1 && group.bytes + group.segment > MAX_GROUP)
    }

    /// How many packets of `len` bytes fit, in the last GSO send where they match its group.
    pub fn room_for(&self, len: usize) -> usize {
        let len = len.max(1);
        let in_group = self.group.filter(|group| group.segment == len && self.caps.max_segments > 1);
        let in_group = in_group.map_or(usize::MAX, |group| (MAX_GROUP - group.bytes) / len);
        ((SLAB - self.wire) / len).min(MAX_PACKETS - self.count()).min(in_group)
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// How many packets are in it, those in rings included.
    pub fn count(&self) -> usize {
        self.packets.len() + self.near.packets
    }

    /// The rings that packets were built in.
    pub(super) fn rings(&mut self) -> &mut [Hold] {
        &mut self.near.rings
    }

    /// Releases those rings to other writers.
    pub fn let_go(&mut self) {
        self.near.rings.clear();
    }

    /// Packets and bytes in rings, and how many of the bytes are in leased chunks.
    pub(super) fn in_rings(&self) -> (usize, usize, usize) {
        (self.near.packets, self.near.bytes, self.near.leased)
    }

    /// The packets in it, in order, but for those in rings.
    pub fn packets(&self) -> &[TxPacket] {
        &self.packets
    }

    /// The bytes of one of its packets.
    pub fn bytes(&self, packet: &TxPacket) -> Cow<'_, [u8]> {
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
        let Some(head) = outside.head else { return [self.payload(outside), &[], &[]] };
        let start = packet.start as usize;
        let end = start + packet.len as usize - outside.range.len();
        let (head, tail) = self.slab[start..end].split_at(head);
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

    /// The capabilities it groups by.
    pub fn capabilities(&self) -> Capabilities {
        self.caps
    }

    /// Forgets all packets.
    pub fn clear(&mut self) {
        self.used = LEAD;
        self.wire = LEAD;
        self.outside.clear();
        self.chunks.clear();
        self.committed_outside = 0;
        self.open = None;
        self.packets.clear();
        self.group = None;
        self.near.rings.clear();
        self.near = InRings { rings: std::mem::take(&mut self.near.rings), ..InRings::default() };
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
            let away = packet.outside.and_then(|at| self.outside.get(usize::from(at)));
            if let Some(outside) = away.filter(|outside| outside.head.is_none()) {
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
    fn place(&mut self, open: &Open) -> u16 {
        let Open { destination, len, slab_len, icrc_writer } = *open;
        let outside = (slab_len < len).then(|| u16::try_from(self.committed_outside).unwrap_or(u16::MAX));
        self.committed_outside += usize::from(outside.is_some());
        let slot = self.open_byte(open, SLOT_BYTE);
        let joined = self.group.as_mut().filter(|g| {
            // The receiver's kernel steers a GSO send as a whole, so it must hold packets of one
            // slot only.
            (g.destination, g.slot) == (destination, slot)
                // A shorter packet is the last. (A request with an answer piggybacked behind it:
                // the peer gets both at once.)
                && len <= g.segment
                && g.packets < self.caps.max_segments
                && g.bytes + len <= MAX_GROUP
        });
        let ip_id = match joined {
            Some(g) => {
                let place = g.packets;
                g.packets += 1;
                g.bytes += len;
                if len < g.segment {
                    // Only the last segment may be shorter.
                    self.group = None;
                }
                place
            }
            None => {
                self.group = Some(Group { destination, slot, segment: len, packets: 1, bytes: len });
                0
            }
        };
        let ip_id = u16::try_from(ip_id).unwrap_or(u16::MAX);
        self.packets.push(TxPacket {
            start: u32::try_from(self.used).unwrap_or(u32::MAX),
            len: u32::try_from(len).unwrap_or(u32::MAX),
            dst: destination.dst(),
            src_port: self.caps.source_ports[usize::from(destination.port)],
            port: destination.port,
            ip_id,
            has_icrc: icrc_writer.is_some(),
            outside,
            ip_options: destination.ip_options,
        });
        self.used += slab_len;
        self.wire += len;
        ip_id
    }
}

impl fmt::Debug for TxBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxBatch")
            .field("used", &self.used)
            .field("open", &self.open)
            .field("packets", &self.packets)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
