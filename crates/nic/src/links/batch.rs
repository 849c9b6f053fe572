//! A batch of outgoing packets: those for the wire in a slab, those for same-host peers in their
//! rings.

use std::borrow::Cow;
use std::net::IpAddr;

use nobounce_memory::Sink;
use nobounce_protocol::qp::IpOptions;
use nobounce_protocol::wire::{BTH_LEN, ICRC_LEN};

use super::Capabilities;
use super::packet_writer::{
    LocalRoute, PacketDestination, PacketShape, PacketSpace, PacketWriter, PayloadSource, Reserved,
};
use super::ring_packets::RingPackets;
use super::rings::Hold;
use super::wire_packets::{LEAD, MAX_GROUP, SLAB, TxPacket, WirePackets};

/// Maximum number of packets in one batch.
const MAX_PACKETS: usize = 1024;
/// The longest packet that can be sent.
pub const MAX_PACKET: usize = MAX_GROUP;
/// The longest packet of the protocol: headers, the largest path MTU, ICRC.
const LARGEST_ROCE_PACKET: usize = 40 + 4096 + ICRC_LEN;

/// A reusable batch of packets.
#[derive(Debug)]
pub struct TxBatch {
    wire: WirePackets,
    rings: RingPackets,
    /// A ring was full and a packet went into the slab instead: later packets must not overtake it.
    spilled: bool,
}

impl TxBatch {
    /// An empty batch for a link with these capabilities.
    pub fn new(caps: Capabilities) -> Self {
        Self::with_slab(caps, SLAB)
    }

    /// An empty batch whose packets for the wire take so many bytes.
    pub(super) fn with_slab(caps: Capabilities, slab: usize) -> Self {
        Self { wire: WirePackets::new(caps, slab), rings: RingPackets::default(), spilled: false }
    }

    /// An empty batch of the same size.
    pub(super) fn empty_like(&self) -> Self {
        Self::with_slab(self.capabilities(), self.wire.slab().len())
    }

    /// Sets the IP options of the packets begun from now on.
    pub fn set_ip_options(&mut self, ip_options: IpOptions) {
        self.wire.set_ip_options(ip_options);
    }

    /// Space for one packet, or for a run of packets to a same-host peer.
    ///
    /// `None`: the batch is full, send it first; for a run, and for a payload in a chunk to a
    /// same-host peer, also if its ring cannot take it. An empty batch takes any packet from a bare
    /// BTH to [`MAX_PACKET`] whose payload is copied.
    #[inline(always)]
    pub fn begin(
        &mut self,
        to: &PacketDestination<'_>,
        shape: PacketShape,
        payload: PayloadSource<'_>,
    ) -> Option<PacketSpace<'_>> {
        if !self.fits(shape.len) {
            return None;
        }
        if to.local.is_some() {
            if !self.spilled
                && let Some(reserved) = self.rings.begin(to, shape, payload)
            {
                return Some(self.space(reserved));
            }
            if shape.packets > 1 || !matches!(payload, PayloadSource::Copy) {
                return None;
            }
            self.spilled = true;
        }
        let reserved = self.wire.begin(to, shape, payload)?;
        Some(self.space(reserved))
    }

    #[inline(always)]
    fn space(&mut self, reserved: Reserved) -> PacketSpace<'_> {
        // SAFETY: the writer reserved these bytes until its next call, which needs the batch that
        // the space borrows.
        PacketSpace { bytes: unsafe { Sink::new(reserved.start, reserved.len) }, crc: reserved.crc }
    }

    /// Adds the packet begun last; `crc` covers all of it but the ICRC.
    #[inline]
    pub fn commit(&mut self, crc: Option<u32>) {
        if self.rings.is_open() {
            self.rings.commit(None);
        } else {
            self.wire.commit(crc);
        }
    }

    /// Discards the packet begun last.
    pub fn abort(&mut self) {
        self.wire.abort();
        self.rings.abort();
    }

    /// Adds a packet of `len` bytes for the wire, which `fill` writes but for the ICRC. Returns
    /// whether there was room.
    pub fn put(&mut self, dst: IpAddr, port_hint: u16, len: usize, fill: impl FnOnce(&mut [u8])) -> bool {
        let fits = self.fits(len);
        if fits {
            self.wire.put(&PacketDestination { addr: &dst, port_hint, ecn: false, local: None }, len, fill);
        }
        fits
    }

    /// Copies a packet of another batch whose ICRC is already written. The ICRC is adapted to the
    /// new place and stays as valid (or invalid) as it was. Returns whether there was room.
    pub(super) fn push(&mut self, from: &TxPacket, bytes: &[u8]) -> bool {
        let fits = self.fits(bytes.len());
        if fits {
            self.wire.push(from, bytes);
        }
        fits
    }

    /// Adds a packet that `fill` writes completely, in place of another one. Returns whether it was
    /// added: there was room, and `fill` agreed.
    pub(super) fn put_closed(
        &mut self,
        like: &TxPacket,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        self.has_room_for(len) && self.wire.put_closed(like, len, fill)
    }

    /// Adds a packet that is complete. Returns whether there was room.
    pub(super) fn put_message(&mut self, to: IpAddr, packet: &[u8]) -> bool {
        self.has_room_for(packet.len()) && self.wire.put_message(&to, packet)
    }

    /// Whether it takes one more packet of that length.
    pub(super) fn has_room_for(&self, len: usize) -> bool {
        len <= MAX_PACKET.min(self.room()) && self.count() < MAX_PACKETS
    }

    /// Whether that packet length is valid and fits.
    #[inline(always)]
    fn fits(&self, len: usize) -> bool {
        debug_assert!((BTH_LEN + ICRC_LEN..=MAX_PACKET).contains(&len), "a packet of {len} bytes");
        (BTH_LEN + ICRC_LEN..=MAX_PACKET.min(self.room())).contains(&len) && self.count() < MAX_PACKETS
    }

    /// Bytes of further packets that it takes.
    #[inline(always)]
    fn room(&self) -> usize {
        let taken = LEAD + self.wire.added() + self.wire.bytes + self.rings.bytes;
        self.wire.slab().len().saturating_sub(taken)
    }

    /// Current maximum payload of one run on that route.
    pub fn longest_run(&mut self, route: &LocalRoute) -> usize {
        self.rings.turn_to(route.ring()).map_or(0, Hold::longest_run)
    }

    /// Makes packets in rings visible to polling readers before [`Link::send`](super::Link::send):
    /// the reader works while the sender does its bookkeeping.
    #[inline]
    pub fn show(&mut self) {
        self.rings.show();
    }

    /// Whether it has room for one more packet of the largest path MTU.
    pub fn has_room(&self) -> bool {
        self.room() >= LARGEST_ROCE_PACKET && self.count() < MAX_PACKETS
    }

    /// Whether its last GSO send is full: one more packet would cost a send of its own.
    pub fn ends_with_full_send(&self) -> bool {
        self.wire.ends_with_full_send()
    }

    /// How many packets of `len` bytes fit, in the last GSO send where they match its group.
    pub fn room_for(&self, len: usize) -> usize {
        let len = len.max(1);
        (self.room() / (len + self.wire.added()))
            .min(MAX_PACKETS - self.count())
            .min(self.wire.room_in_group(len))
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// How many packets are in it, those in rings included.
    pub fn count(&self) -> usize {
        self.wire.packets().len() + self.rings.packets
    }

    /// The rings that packets were built in.
    pub(super) fn rings(&mut self) -> &mut [Hold] {
        self.rings.rings()
    }

    /// Releases those rings to other writers.
    pub fn let_go(&mut self) {
        self.rings.release();
    }

    /// Packets and bytes in rings, and how many of the bytes are in leased chunks.
    pub(super) fn in_rings(&self) -> (usize, usize, usize) {
        (self.rings.packets, self.rings.bytes, self.rings.leased)
    }

    /// The packets in it, in order, but for those in rings.
    pub fn packets(&self) -> &[TxPacket] {
        self.wire.packets()
    }

    /// The bytes of one of its packets.
    pub fn bytes(&self, packet: &TxPacket) -> Cow<'_, [u8]> {
        self.wire.bytes_of(packet)
    }

    /// The capabilities it groups by.
    pub fn capabilities(&self) -> Capabilities {
        self.wire.capabilities()
    }

    /// The packets for the wire.
    pub(super) fn wire(&self) -> &WirePackets {
        &self.wire
    }

    /// The same, to be changed.
    pub(super) fn wire_mut(&mut self) -> &mut WirePackets {
        &mut self.wire
    }

    /// Forgets all packets.
    pub fn clear(&mut self) {
        self.wire.clear();
        self.rings.clear();
        self.spilled = false;
    }
}

#[cfg(test)]
mod tests;
