//! Packets built in the rings of same-host peers.

use std::sync::Arc;

use nobounce_memory::{SharedChunk, Sink};
use nobounce_protocol::wire::ICRC_LEN;

use super::packet_writer::{PacketDestination, PacketShape, PacketWriter, PayloadSource, Reserved};
use super::rings::{Hold, PeerRing};

/// Packets in rings that were not published yet.
#[derive(Debug, Default)]
pub(super) struct RingPackets {
    /// The rings, each once; the one used last is the last.
    rings: Vec<Hold>,
    pub(super) packets: usize,
    pub(super) bytes: usize,
    /// Bytes of them in leased chunks.
    pub(super) leased: usize,
    /// The open packet, in the last ring.
    open: Option<OpenInRing>,
}

/// A packet or run in a ring, begun and not yet committed.
#[derive(Debug)]
struct OpenInRing {
    shape: PacketShape,
    /// Its payload outside the ring, if any: file and offset of its first byte, and the chunk.
    leased: Option<(u8, u32, SharedChunk)>,
}

impl RingPackets {
    /// Selects that ring for the next packet, unless another writer holds it.
    #[inline]
    pub(super) fn turn_to(&mut self, ring: &Arc<PeerRing>) -> Option<&mut Hold> {
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

    /// Whether a packet is open.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Makes the packets of the last ring visible to a polling reader.
    #[inline]
    pub(super) fn show(&mut self) {
        if let Some(ring) = self.rings.last_mut() {
            ring.show();
        }
    }

    /// The rings that packets were built in.
    pub(super) fn rings(&mut self) -> &mut [Hold] {
        &mut self.rings
    }

    /// Releases the rings to other writers.
    pub(super) fn release(&mut self) {
        self.rings.clear();
    }

    /// Forgets all packets.
    pub(super) fn clear(&mut self) {
        self.rings.clear();
        *self = Self { rings: std::mem::take(&mut self.rings), ..Self::default() };
    }
}

impl PacketWriter for RingPackets {
    #[inline(always)]
    fn begin(
        &mut self,
        to: &PacketDestination<'_>,
        shape: PacketShape,
        payload: PayloadSource<'_>,
    ) -> Option<Reserved> {
        let ring = self.turn_to(to.local?.ring())?;
        let (len, leased) = match payload {
            PayloadSource::Copy => (shape.len, None),
            PayloadSource::Chunk { chunk, at, len } => {
                let is_whole = len == shape.len;
                if is_whole || at + (shape.len - shape.head) > chunk.len() {
                    return None;
                }
                let (file, offset) = ring.lease(chunk, at)?;
                (shape.head, Some((file, offset, chunk.clone())))
            }
        };
        let start = ring.reserve(len)?;
        if leased.is_none() {
            // Zero the ICRC so that stale bytes are not sent.
            // SAFETY: the space just reserved, which is ours until it is published.
            unsafe { Sink::new(start, len) }.put(len - ICRC_LEN, &[0; ICRC_LEN]);
        }
        self.open = Some(OpenInRing { shape, leased });
        Some(Reserved { start, len, crc: None })
    }

    #[inline]
    fn commit(&mut self, _crc: Option<u32>) {
        let Some(OpenInRing { shape: PacketShape { len, head, packets }, leased }) = self.open.take() else {
            return;
        };
        if let Some(ring) = self.rings.last_mut() {
            match leased {
                None => ring.commit(len, packets),
                Some((file, offset, chunk)) => {
                    let behind = u32::try_from(len - head).unwrap_or(0);
                    self.leased += len - head;
                    ring.commit_leased((head, packets), (file, offset), behind, chunk);
                }
            }
        }
        self.packets += usize::from(packets);
        self.bytes += len;
    }

    fn abort(&mut self) {
        self.open = None;
        if self.packets == 0 {
            self.release(); // possibly no send follows that would release them
        }
    }
}
