//! One packet: headers, one copy of the payload into the batch, and the ICRC, computed during that
//! copy.

use std::net::IpAddr;

use nobounce_memory::Sink;
use nobounce_memory::path::Mechanism;
use nobounce_protocol::qp::{Nak, Payload, Transmit};
use nobounce_protocol::wire::{Header, ICRC_LEN, Marker};

use crate::links::{PacketDestination, PacketShape, PayloadSource, TxBatch};
use crate::soft::crc::extend_crc;
use crate::soft::engine::host::find_send;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::region::{GatherError, Regions};
use crate::soft::gpu::target::GatheredMessage;
use crate::tally::BytePath;

/// The result of building a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Built {
    /// It is in the batch; its payload took this route.
    Done(BytePath),
    /// Its payload is being fetched: retry once the copy `after` is over, repeatedly if needed.
    Pending { after: u64, starved: bool },
}

/// Upper bound of a packet's header bytes.
const MOST_HEADERS: usize = 64;

pub(crate) const BY_CPU: Built = Built::Done(BytePath::Direct(Mechanism::Cpu));

/// Bytes of a packet on the wire.
pub(crate) fn packet_len(transmit: &Transmit) -> usize {
    let Transmit { header, payload } = transmit;
    header.len() + payload.len() as usize + usize::from(header.pad) + ICRC_LEN
}

/// The sizes of one packet.
#[inline(always)]
pub(crate) fn shape_of(transmit: &Transmit) -> PacketShape {
    PacketShape::single(packet_len(transmit), transmit.header.len())
}

/// Spreads queue pairs over the link's source ports.
pub(crate) fn port_hint(entry: &QueuePair) -> u16 {
    entry.index().get()
}

/// The receiver of a queue pair's next packet.
#[inline(always)]
pub(crate) fn receiver(entry: &QueuePair) -> PacketDestination<'_> {
    PacketDestination {
        addr: entry.qp.destination(),
        port_hint: port_hint(entry),
        ecn: entry.qp.service().is_reliable(),
        local: entry.route.local.as_ref(),
    }
}

/// Builds a packet whose bytes the CPU copies; nothing if they must be fetched instead.
pub(crate) fn build_gathered(
    entry: &QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
    message: GatheredMessage,
) -> Result<Option<Built>, Nak> {
    write(entry, tx, transmit, |out, crc| gather(entry, regions, (transmit.payload, message), out, crc))
}

/// Builds a packet of these payload bytes, which took that path.
pub(crate) fn build_copy(
    entry: &QueuePair,
    tx: &mut TxBatch,
    transmit: &Transmit,
    bytes: &[u8],
    path: BytePath,
) -> Built {
    let written = write(entry, tx, transmit, |mut out, crc| {
        out.put(0, bytes);
        Ok((extend_crc(crc, bytes), path))
    });
    written.ok().flatten().unwrap_or(BY_CPU)
}

/// Builds a packet in the batch; `copy` writes the payload and extends the CRC over it. Nothing if
/// the payload must be fetched instead.
// Always inlined: a packet's space on the stack would cause a store-forwarding stall. Meanwhile the
// header stores go to a ring whose cache lines the peer holds (see `Destination` in
// wire_packets.rs).
#[inline(always)]
pub(crate) fn write(
    entry: &QueuePair,
    tx: &mut TxBatch,
    transmit: &Transmit,
    copy: impl FnOnce(Sink<'_>, Option<u32>) -> Result<(Option<u32>, BytePath), GatherError>,
) -> Result<Option<Built>, Nak> {
    let shape = shape_of(transmit);
    let Some(mut space) = tx.begin(&receiver(entry), shape, PayloadSource::Copy) else {
        return Ok(Some(BY_CPU)); // has_room() was checked; a packet lost here is retransmitted
    };
    let crc = emit(&transmit.header, &mut space.bytes, space.crc);
    let end = shape.head + transmit.payload.len() as usize;
    match copy(space.bytes.slice(shape.head..end), crc) {
        Ok((crc, route)) => {
            let crc = put_padding(&mut space.bytes, end, transmit.header.pad, crc);
            tx.commit(crc);
            Ok(Some(Built::Done(route)))
        }
        Err(GatherError::Fault(nak)) => {
            tx.abort();
            Err(nak)
        }
        Err(GatherError::Fetch) => {
            tx.abort();
            Ok(None)
        }
    }
}

/// Writes the padding at that offset, and extends the CRC over it.
#[inline(always)]
pub(crate) fn put_padding(out: &mut Sink<'_>, at: usize, pad: u8, crc: Option<u32>) -> Option<u32> {
    if pad == 0 {
        return crc;
    }
    let pad = &[0; 4][..usize::from(pad)];
    out.put(at, pad);
    extend_crc(crc, pad)
}

/// Copies one payload, or several contiguous ones, to `out`, and extends `crc` over it.
#[inline]
pub(crate) fn gather(
    entry: &QueuePair,
    regions: &mut Regions,
    (payload, message): (Payload, GatheredMessage),
    out: Sink<'_>,
    crc: Option<u32>,
) -> Result<(Option<u32>, BytePath), GatherError> {
    match payload {
        Payload::None => Ok((crc, BytePath::Direct(Mechanism::Cpu))),
        Payload::Request { serial, offset, .. } => match find_send(&entry.posted.sends, serial) {
            Some(send) => send.bytes.gather(regions, entry.pd, (offset, message), out, crc),
            None => Err(GatherError::Fault(Nak::RemoteOperational)),
        },
        Payload::Region { rkey, addr, .. } => {
            regions.load_remote(entry.accessor(), (rkey, addr), out, message, crc)
        }
    }
}

/// What is known of the message that a packet belongs to.
#[inline]
pub(crate) fn message_of(entry: &QueuePair, payload: &Payload) -> GatheredMessage {
    let left = u64::from(payload.len()) + u64::from(payload.rest());
    match payload {
        Payload::Request { serial, offset, .. } => {
            // An atomic behind it, such as the signal of a put, needs no bytes.
            let mut later = entry.posted.sends.iter().rev().take_while(|later| later.serial != *serial);
            let alone = !later.any(|later| later.early);
            GatheredMessage { len: offset + left, alone }
        }
        _ => GatheredMessage { len: left, alone: entry.qp.waiting_reads().next().is_none() },
    }
}

/// Adds a marker to the batch.
pub(crate) fn put_marker(tx: &mut TxBatch, to: IpAddr, port_hint: u16, marker: &Marker) {
    tx.put(to, port_hint, Marker::LEN, |room| {
        marker.emit(room);
    });
}

/// Writes a packet's headers into its space, and extends the CRC over them.
#[inline(always)]
pub(crate) fn emit(header: &Header, room: &mut Sink<'_>, crc: Option<u32>) -> Option<u32> {
    let mut bytes = [0; MOST_HEADERS];
    let len = header.emit(&mut bytes);
    room.put(0, &bytes[..len]);
    extend_crc(crc, &bytes[..len])
}
