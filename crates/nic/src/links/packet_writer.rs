//! What builds outgoing packets: the wire's slab and the rings of same-host peers alike.

use std::net::IpAddr;
use std::sync::Arc;

use nobounce_memory::{SharedChunk, Sink};

use super::rings::PeerRing;

/// The route to a same-host peer on which packets are built in place, in memory that it reads; they
/// have no ICRC. Rings are the one kind there is.
#[derive(Clone, Debug)]
pub struct LocalRoute(Arc<PeerRing>);

impl LocalRoute {
    pub(in crate::links) fn through(ring: Arc<PeerRing>) -> Self {
        Self(ring)
    }

    pub(in crate::links) fn ring(&self) -> &Arc<PeerRing> {
        &self.0
    }

    /// A packet will be built soon: prefetches the memory that it will take.
    #[inline]
    pub(crate) fn expect(&self) {
        self.0.expect();
    }
}

/// The receiver of a packet.
#[derive(Clone, Copy, Debug)]
pub struct PacketDestination<'a> {
    /// Its address.
    pub addr: &'a IpAddr,
    /// Picks one of the link's source ports.
    pub port_hint: u16,
    /// Its sender obeys congestion notifications: switches may mark it (ECN).
    pub ecn: bool,
    /// The route to it, if it is a same-host peer.
    pub local: Option<&'a LocalRoute>,
}

/// The sizes of a packet, or of a run of packets that a ring carries as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketShape {
    /// Its bytes, BTH to ICRC.
    pub len: usize,
    /// Those before the payload.
    pub head: usize,
    /// Number of packets in the run.
    pub packets: u16,
}

impl PacketShape {
    /// One packet.
    pub const fn single(len: usize, head: usize) -> Self {
        Self { len, head, packets: 1 }
    }
}

/// Where the payload of a packet comes from.
#[derive(Clone, Copy, Debug)]
pub enum PayloadSource<'a> {
    /// The caller copies it into the packet's space.
    Copy,
    /// It is taken from a chunk, in place. On the wire the packet's space is for the headers, the
    /// padding and the ICRC; in a ring for the headers only.
    ///
    /// On the wire the chunk may hold the whole packet, all but the ICRC written: then the space is
    /// empty.
    Chunk {
        /// The chunk.
        chunk: &'a SharedChunk,
        /// Offset of the payload in it.
        at: usize,
        /// Bytes of the payload.
        len: usize,
    },
}

/// The space of a packet, to be filled but for the ICRC. It has stale contents.
#[derive(Debug)]
pub struct PacketSpace<'a> {
    /// Its bytes.
    pub bytes: Sink<'a>,
    /// The initial CRC; `None` for a packet that needs no ICRC. The caller extends it over the
    /// packet and passes it to [`TxBatch::commit`](super::TxBatch::commit).
    pub crc: Option<u32>,
}

/// Space that a writer has reserved: valid until its next call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserved {
    pub(super) start: *mut u8,
    pub(super) len: usize,
    pub(super) crc: Option<u32>,
}

/// Builds packets one after the other. At most one is open: begun, and neither committed nor
/// aborted.
pub(super) trait PacketWriter {
    /// Reserves space for a packet. `None`: this writer cannot take it now.
    fn begin(
        &mut self,
        to: &PacketDestination<'_>,
        shape: PacketShape,
        payload: PayloadSource<'_>,
    ) -> Option<Reserved>;

    /// Adds the open packet, whose bytes before the ICRC have this CRC. Without one it does
    /// nothing.
    fn commit(&mut self, crc: Option<u32>);

    /// Discards the open packet.
    fn abort(&mut self);
}
