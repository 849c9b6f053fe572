//! Packet construction: headers, one copy of the payload into the batch, and the ICRC, computed
//! during that copy. Payload that the copy engine fetched is not copied: the link takes it from its
//! chunk.

use std::net::IpAddr;
use std::sync::Arc;

use nobounce_memory::Sink;
use nobounce_memory::gpu::copy_engine::Rows;
use nobounce_memory::path::Mechanism;
use nobounce_protocol::qp::{Access, Nak, Payload, Service, Transmit};
use nobounce_protocol::wire::{BTH_LEN, Header, ICRC_LEN, Marker, Psn, Reth};

use crate::links::TxBatch;
use crate::links::rings::PeerRing;
use crate::soft::crc::extend_crc;
use crate::soft::engine::host::find_send;
use crate::soft::engine::mixed::{self, Gathered};
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::region::{GatherError, Regions};
use crate::soft::engine::scatter::Piece;
use crate::soft::gpu::prefetch::{self, ChunkSlice, Fetched, Origin, Want};
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

const BY_CPU: Built = Built::Done(BytePath::Direct(Mechanism::Cpu));

/// Bytes of a packet on the wire.
pub(crate) fn packet_len(transmit: &Transmit) -> usize {
    let Transmit { header, payload } = transmit;
    header.len() + payload.len() as usize + usize::from(header.pad) + ICRC_LEN
}

/// Most bytes exported as one packet, which the receiver reads in place.
const MOST_LEASED: usize = 32 * 1024;

/// Builds `count` more packets after `transmit`, each with the next PSN and the next piece.
/// `transmit` advances, so that after a failure it is the packet that could not be built.
pub(crate) fn build_repeats(
    entry: &mut QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &mut Transmit,
    count: u64,
) -> Result<(), Nak> {
    let mut count = count;
    if let Some(ring) = entry.ring.as_ref().filter(|_| entry.qp.service() == Service::Rc) {
        while count > 0 {
            match build_run(entry, (tx, ring), regions, transmit, count)? {
                0 => break,
                built => count -= built,
            }
        }
    }
    let fetched = origin_of(entry, transmit).is_some_and(|(origin, _)| {
        entry.prefetches.as_ref().is_some_and(|prefetches| prefetches.of(origin).is_of(origin))
    });
    if fetched {
        return repeat_fetched(entry, tx, regions, transmit, count);
    }
    let Payload::Request { serial, .. } = transmit.payload else {
        // Responses, into a full ring.
        for _ in 0..count {
            transmit.advance();
            build(entry, tx, regions, transmit)?;
        }
        return Ok(());
    };
    let total = packet_len(transmit);
    let header_len = transmit.header.len();
    let remote = entry.qp.destination();
    let hint = port_hint(entry);
    let message = message_of(entry, &transmit.payload);
    let Some(send) = find_send(&entry.sends, serial) else { return Err(Nak::RemoteOperational) };
    for _ in 0..count {
        transmit.advance();
        let Payload::Request { offset, len, .. } = transmit.payload else { return Ok(()) };
        let Some((mut room, start)) = tx.begin_crc((remote, hint), total, entry.ring.as_ref()) else {
            return Ok(()); // room_for() was checked; a packet lost here is retransmitted
        };
        let crc = emit(&transmit.header, &mut room, start);
        let payload = room.slice(header_len..header_len + len as usize);
        match send.bytes.gather(regions, entry.pd, (offset, message), payload, crc) {
            Ok((crc, _)) => tx.commit_crc(crc),
            Err(error) => {
                tx.abort();
                return match error {
                    GatherError::Fault(nak) => Err(nak),
                    // See `ready_repeats`; packets lost here are retransmitted.
                    GatherError::Fetch => Ok(()),
                };
            }
        }
    }
    Ok(())
}

/// Builds the next of these packets as one, in the ring of a same-host peer. Returns how many they
/// are, 0 if that is not possible.
fn build_run(
    entry: &QueuePair,
    (tx, ring): (&mut TxBatch, &Arc<PeerRing>),
    regions: &mut Regions,
    transmit: &mut Transmit,
    count: u64,
) -> Result<u64, Nak> {
    let (head, piece) = (transmit.header.len(), transmit.payload.len() as usize);
    let packets = usize::try_from(count).unwrap_or(1).min(tx.longest_run(ring) / piece.max(1)).max(1);
    let mut next = *transmit;
    next.advance();
    let (origin, message) = (origin_of(entry, &next), message_of(entry, &next.payload));
    if entry
        .prefetches
        .as_ref()
        .zip(origin)
        .is_some_and(|(prefetches, (origin, at))| prefetches.of(origin).covers(origin, at))
    {
        return Ok(0);
    }
    let number = u16::try_from(packets).unwrap_or(1);
    let Some(mut room) = tx.begin_run(ring, head + packets * piece + ICRC_LEN, number) else { return Ok(0) };
    emit(&next.header, &mut room, None);
    let payload = room.slice(head..head + packets * piece);
    match gather(entry, regions, (next.payload, message), payload, None) {
        Ok(_) => tx.commit_crc(None),
        Err(error) => {
            tx.abort();
            return match error {
                GatherError::Fault(nak) => {
                    *transmit = next;
                    Err(nak)
                }
                GatherError::Fetch => Ok(0),
            };
        }
    }
    for _ in 0..packets {
        transmit.advance();
    }
    Ok(packets as u64)
}

/// The chunk layout of payload fetched for this queue pair.
fn rows_for(entry: &QueuePair) -> Rows {
    match entry.ring {
        Some(_) => prefetch::IN_A_ROW,
        None => prefetch::rows(entry.qp.attr().path_mtu.bytes() as usize),
    }
}

/// Exports `packets` packets like `first`, whose payloads are contiguous in a fetch chunk. A
/// same-host peer reads them in place. Returns whether that was possible.
fn build_leased(
    entry: &QueuePair,
    tx: &mut TxBatch,
    first: &Transmit,
    packets: usize,
    slice: &ChunkSlice,
) -> bool {
    let Some(ring) = &entry.ring else { return false };
    let (head, payload) = (first.header.len(), packets * first.payload.len() as usize);
    let len = head + payload + usize::from(first.header.pad) + ICRC_LEN;
    let number = u16::try_from(packets).unwrap_or(1);
    let Some(mut room) = tx.begin_leased(ring, (len, head, number), &slice.chunk, slice.at) else {
        return false;
    };
    emit(&first.header, &mut room, None);
    tx.commit_crc(None);
    true
}

/// The same for fetched bytes: all of them are ready (see [`ready_repeats`]), in one chunk.
fn repeat_fetched(
    entry: &mut QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &mut Transmit,
    count: u64,
) -> Result<(), Nak> {
    let mut left = count;
    while left > 0 {
        transmit.advance();
        left -= 1;
        let Some((origin, at)) = origin_of(entry, transmit) else { return Ok(()) };
        let here = entry
            .prefetches
            .as_ref()
            .filter(|prefetches| !prefetches.copies)
            .and_then(|prefetches| prefetches.of(origin).here(origin, at));
        // A packet lost here is retransmitted.
        let Some(slice) = here else {
            build(entry, tx, regions, transmit)?;
            continue;
        };
        let piece = (transmit.payload.len() as usize).max(1);
        let in_a_row = slice.row.min(MOST_LEASED) / piece;
        let packets = usize::try_from(left + 1).unwrap_or(1).min(in_a_row).max(1);
        if entry.qp.service() == Service::Rc && build_leased(entry, tx, transmit, packets, &slice) {
            for _ in 1..packets {
                transmit.advance();
            }
            left -= packets as u64 - 1;
        } else {
            build_outside(entry, tx, transmit, &slice);
        }
    }
    Ok(())
}

/// How many packets like this one can be built right behind it without waiting, and from the same
/// piece of memory.
pub(crate) fn ready_repeats(entry: &QueuePair, transmit: &Transmit, route: BytePath) -> u64 {
    let Some((origin, at)) = origin_of(entry, transmit) else { return 0 };
    // This packet bypassed the fetch (it was late, or the payload has several pieces): the next
    // one may be fetched.
    if entry.prefetches.as_ref().is_some_and(|prefetches| prefetches.loaded == Some(origin)) {
        return 0;
    }
    let len = u64::from(transmit.payload.len());
    let prefetch = entry
        .prefetches
        .as_ref()
        .map(|prefetches| prefetches.of(origin))
        .filter(|prefetch| prefetch.is_of(origin));
    let bytes = match (prefetch, transmit.payload) {
        (Some(prefetch), _) => prefetch.ready_from(origin, at.wrapping_add(len)),
        (None, Payload::Request { serial, .. }) => match find_send(&entry.sends, serial) {
            Some(send) => send.bytes.contiguous_from(at + len),
            None => 0,
        },
        // Responses that are not fetched repeat if they merge into one: in rings, and from memory
        // that needs no fetch.
        (None, _) if entry.ring.is_some() && route == BytePath::Direct(Mechanism::Cpu) => return u64::MAX,
        (None, _) => 0,
    };
    bytes / len.max(1)
}

/// Spreads queue pairs over the link's source ports.
pub(crate) fn port_hint(entry: &QueuePair) -> u16 {
    u16::try_from(entry.qpn.get() & 0xffff).unwrap_or(0)
}

/// Builds one packet in the batch.
pub(crate) fn build(
    entry: &mut QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
) -> Result<Built, Nak> {
    if transmit.payload == Payload::None {
        build_bare(entry, tx, &transmit.header);
        return Ok(BY_CPU);
    }
    if let Some(prefetches) = &entry.prefetches
        && let Some((origin, at)) = origin_of(entry, transmit)
        && prefetches.of(origin).covers(origin, at)
    {
        return build_fetched(entry, tx, regions, transmit);
    }
    match build_gathered(entry, tx, regions, transmit, message_of(entry, &transmit.payload))? {
        Some(built) => Ok(built),
        None => build_fetched(entry, tx, regions, transmit),
    }
}

/// Builds a packet without payload.
fn build_bare(entry: &QueuePair, tx: &mut TxBatch, header: &Header) {
    let destination = (entry.qp.destination(), port_hint(entry));
    // has_room() was checked; a packet lost here is retransmitted
    let len = header.len() + ICRC_LEN;
    let Some((mut room, start)) = tx.begin_crc(destination, len, entry.ring.as_ref()) else { return };
    let crc = emit(header, &mut room, start);
    tx.commit_crc(crc);
}

/// Builds a packet whose bytes the CPU copies; nothing if they must be fetched instead.
fn build_gathered(
    entry: &QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
    message: GatheredMessage,
) -> Result<Option<Built>, Nak> {
    let Some(mut room) = PacketSpace::begin(entry, tx, transmit) else {
        return Ok(Some(BY_CPU)); // has_room() was checked; a packet lost here is retransmitted
    };
    let crc = room.crc;
    match gather(entry, regions, (transmit.payload, message), room.payload(), crc) {
        Ok((crc, route)) => {
            let crc = room.pad(crc);
            tx.commit_crc(crc);
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

/// Copies one payload, or several contiguous ones, to `out`, and extends `crc` over it.
#[inline]
fn gather(
    entry: &QueuePair,
    regions: &mut Regions,
    (payload, message): (Payload, GatheredMessage),
    out: Sink<'_>,
    crc: Option<u32>,
) -> Result<(Option<u32>, BytePath), GatherError> {
    match payload {
        Payload::None => Ok((crc, BytePath::Direct(Mechanism::Cpu))),
        Payload::Request { serial, offset, .. } => match find_send(&entry.sends, serial) {
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
fn message_of(entry: &QueuePair, payload: &Payload) -> GatheredMessage {
    let left = u64::from(payload.len()) + u64::from(payload.rest());
    match payload {
        Payload::Request { serial, offset, .. } => {
            let alone = entry.sends.back().is_none_or(|last| last.serial == *serial);
            GatheredMessage { len: offset + left, alone }
        }
        _ => GatheredMessage { len: left, alone: true },
    }
}

/// A packet's space in the batch, with its headers written.
struct PacketSpace<'a> {
    bytes: Sink<'a>,
    head: usize,
    len: usize,
    pad: usize,
    /// The CRC of everything before the payload, if the packet has an ICRC.
    crc: Option<u32>,
}

impl<'a> PacketSpace<'a> {
    // Always inlined: a copy on the stack would cause a store-forwarding stall. Meanwhile the
    // header stores go to a ring whose cache lines the peer holds (see `Destination` in batch.rs).
    #[inline(always)]
    fn begin(entry: &QueuePair, tx: &'a mut TxBatch, transmit: &Transmit) -> Option<Self> {
        let destination = (entry.qp.destination(), port_hint(entry));
        let (mut bytes, start) = tx.begin_crc(destination, packet_len(transmit), entry.ring.as_ref())?;
        let head = transmit.header.len();
        let crc = emit(&transmit.header, &mut bytes, start);
        Some(Self {
            head,
            len: transmit.payload.len() as usize,
            pad: usize::from(transmit.header.pad),
            crc,
            bytes,
        })
    }

    #[inline(always)]
    fn payload(&mut self) -> Sink<'_> {
        self.bytes.slice(self.head..self.head + self.len)
    }

    /// Writes the padding and extends the CRC over it.
    #[inline(always)]
    fn pad(&mut self, crc: Option<u32>) -> Option<u32> {
        if self.pad == 0 {
            return crc;
        }
        let pad = &[0; 4][..self.pad];
        self.bytes.put(self.head + self.len, pad);
        extend_crc(crc, pad)
    }
}

/// The message that a packet belongs to, and the offset of its payload in it.
fn origin_of(entry: &QueuePair, transmit: &Transmit) -> Option<(Origin, u64)> {
    match transmit.payload {
        Payload::None => None,
        Payload::Request { serial, offset, .. } => Some((Origin::Request(serial), offset)),
        Payload::Region { rkey, addr, .. } => {
            let mtu = entry.qp.attr().path_mtu.bytes();
            Some((read_origin(rkey, addr, transmit.header.psn, mtu), addr))
        }
    }
}

/// Adds a marker to the batch.
pub(crate) fn put_marker(tx: &mut TxBatch, to: IpAddr, port_hint: u16, marker: &Marker) {
    if let Some(room) = tx.begin(to, port_hint, Marker::LEN) {
        marker.emit(room);
        tx.commit();
    }
}

/// READs of the same memory differ by the PSN that corresponds to an address.
fn read_origin(rkey: u32, addr: u64, psn: Psn, mtu: u32) -> Origin {
    Origin::Read(rkey, addr.wrapping_sub(u64::from(psn.get()) * u64::from(mtu)))
}

/// Logs why bytes could not be fetched.
#[cold]
fn report_failed_fetch(failed: &Fetched) {
    match failed {
        Fetched::Gone => {
            tracing::warn!("GPU memory cannot be read: its context was destroyed (cudaDeviceReset?)");
        }
        Fetched::Stuck(why) => {
            tracing::warn!("bytes to be sent were not fetched from the GPU in 10 s: {why}");
        }
        Fetched::Failed(error) => {
            tracing::warn!(%error, "GPU memory could not be read by the copy engine");
        }
        Fetched::Ready(_) | Fetched::Pending | Fetched::Late | Fetched::Starved => {}
    }
}

/// Builds a packet whose payload the copy engine fetches.
fn build_fetched(
    entry: &mut QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
) -> Result<Built, Nak> {
    let Some((origin, _)) = origin_of(entry, transmit) else { return Err(Nak::RemoteOperational) };
    let (piece, access) = match transmit.payload {
        Payload::Request { serial, offset, len, .. } => {
            let send = find_send(&entry.sends, serial).ok_or(Nak::RemoteOperational)?;
            let two = {
                let mut pieces = send.bytes.pieces(offset, len as usize);
                (pieces.next(), pieces.next())
            };
            match two {
                (Some(piece), None) => (piece, Access::empty()),
                _ => {
                    entry.prefetches.get_or_insert_default().loaded = Some(origin);
                    let loaded = build_gathered(entry, tx, regions, transmit, GatheredMessage::LOADED)?;
                    return loaded
                        .map_or_else(|| build_mixed(entry, tx, regions, transmit, (serial, offset)), Ok);
                }
            }
        }
        Payload::Region { rkey, addr, len, rest, .. } => {
            let piece = Piece { key: rkey, addr, at: addr, len: len as usize, behind: u64::from(rest) };
            (piece, Access::REMOTE_READ)
        }
        Payload::None => return Err(Nak::RemoteOperational),
    };
    let rows = rows_for(entry);
    let (mut owner, accessor) = (entry.owner(), entry.accessor());
    let prefetches = entry.prefetches.get_or_insert_default();
    owner.after = prefetches.fence(origin, owner.after);
    let prefetch = prefetches.of_mut(origin);
    let got =
        regions.with_gpu(accessor, (piece.key, piece.addr), piece.len, access, |gpu, offset, staging| {
            // A new message must not be read before this queue pair's earlier placements are over. On
            // another route they would be, and a fence requires it.
            if !gpu.stores && !prefetch.is_of(origin) && !staging.is_settled(owner) {
                return (Fetched::Pending, false);
            }
            let Piece { at, len, behind, .. } = piece;
            let Some(copier) = staging.copiers.get(gpu.copier) else { return (Fetched::Gone, false) };
            let (memory, can_load) = (&gpu.memory, gpu.can_load());
            let want = Want { origin, at, len, behind, memory, copier, offset, can_load, rows };
            (prefetch.get(&want), gpu.staged_out)
        });
    // The memory is gone: drop its prefetched bytes.
    let got = got.inspect_err(|_| prefetch.clear())?;
    let (slice, staged) = match got {
        Some((Fetched::Ready(slice), staged)) => (slice, staged),
        Some((Fetched::Pending, _)) => {
            // Overlap the next request's fetch, which has the same latency, with this one.
            if let Origin::Request(serial) = origin {
                let end = piece.at + piece.len as u64 + u64::from(transmit.payload.rest());
                prefetch_next(entry, regions, serial, end);
            }
            return Ok(Built::Pending { after: owner.after, starved: false });
        }
        Some((Fetched::Late, _)) => {
            // Loads need no copy engine. They are slow for long messages, but the copy engine may
            // wait for a kernel that waits for this device.
            prefetches.loaded = Some(origin);
            if transmit.payload.rest() == 0 {
                prefetches.of_mut(origin).finish(origin, piece.at + piece.len as u64);
            }
            let loaded = build_gathered(entry, tx, regions, transmit, GatheredMessage::LOADED)?;
            return Ok(loaded.unwrap_or(Built::Pending { after: owner.after, starved: false }));
        }
        Some((Fetched::Starved, _)) => return Ok(Built::Pending { after: owner.after, starved: true }),
        Some((failed, _)) => {
            report_failed_fetch(&failed);
            regions.faults += 1;
            return Err(Nak::RemoteOperational);
        }
        None => return Err(Nak::RemoteOperational), // host memory is never fetched
    };
    (prefetches.copies, prefetches.loaded) = (staged, None);
    let end = piece.at + piece.len as u64 + u64::from(transmit.payload.rest());
    match origin {
        Origin::Request(serial) => prefetch_next(entry, regions, serial, end),
        Origin::Read(..) => prefetch_reads(entry, regions, origin, end),
    }
    let built = if staged {
        let bytes = &slice.chunk[slice.at..slice.at + piece.len];
        build_copy(entry, tx, transmit, bytes, Built::Done(BytePath::Staged))
    } else {
        build_outside(entry, tx, transmit, &slice)
    };
    if transmit.payload.rest() == 0
        && let Some(prefetches) = &mut entry.prefetches
    {
        // Other queue pairs may need its chunks.
        prefetches.of_mut(origin).finish(origin, end);
    }
    Ok(built)
}

/// Prefetches the beginning of the next request, once all of this one, which ends at `end`, is
/// fetched or in flight.
fn prefetch_next(entry: &mut QueuePair, regions: &mut Regions, serial: u64, end: u64) {
    let (owner, rows) = (entry.owner(), rows_for(entry));
    let accessor = entry.accessor();
    let QueuePair { prefetches: Some(prefetches), sends, .. } = entry else { return };
    let (origin, next_origin) = (Origin::Request(serial), Origin::Request(serial + 1));
    let prefetch = prefetches.of_mut(origin);
    if !prefetch.has_room_behind(origin, end) {
        return;
    }
    let Some(next) = find_send(sends, serial + 1).filter(|next| next.early) else { return };
    let Some(piece) = next.bytes.pieces(0, 1).next() else { return };
    let (len, whole) = (next.bytes.len(), usize::try_from(1 + piece.behind).unwrap_or(usize::MAX));
    // An error is reported when the request is sent.
    let _ = regions.with_gpu(
        accessor,
        (piece.key, piece.addr),
        whole,
        Access::empty(),
        |gpu, offset, staging| {
            // A message short enough for loads is not fetched.
            let early = gpu.stores || staging.is_settled(owner);
            if early
                && !gpu.loads(GatheredMessage { len, alone: false })
                && let Some(copier) = staging.copiers.get(gpu.copier)
            {
                let memory = &gpu.memory;
                let (origin, behind) = (next_origin, piece.behind);
                let can_load = gpu.can_load();
                let want = Want { origin, at: 0, len: 1, behind, memory, copier, offset, can_load, rows };
                prefetch.prefetch(&want);
            }
        },
    );
}

/// Prefetches the peer's next READs, once all bytes of this one, which end at `end`, are fetched.
/// Long READs arrive in pieces.
fn prefetch_reads(entry: &mut QueuePair, regions: &mut Regions, origin: Origin, end: u64) {
    let (owner, rows, accessor) = (entry.owner(), rows_for(entry), entry.accessor());
    let mtu = entry.qp.attr().path_mtu.bytes();
    let QueuePair { prefetches: Some(prefetches), qp, .. } = entry else { return };
    let prefetch = prefetches.of_mut(origin);
    for (psn, Reth { rkey, addr, len }) in qp.waiting_reads() {
        if !prefetch.has_room_after(origin, end) {
            return;
        }
        let name = (rkey, addr);
        // An error is reported when the READ is executed.
        let _ =
            regions.with_gpu(accessor, name, len as usize, Access::REMOTE_READ, |gpu, offset, staging| {
                // As for the response: short messages are loaded, and this queue pair's earlier
                // placements must be over.
                let message = GatheredMessage { len: u64::from(len), alone: true };
                if len > 0
                    && !gpu.loads(message)
                    && (gpu.stores || staging.is_settled(owner))
                    && let Some(copier) = staging.copiers.get(gpu.copier)
                {
                    let (memory, can_load) = (&gpu.memory, gpu.can_load());
                    let (origin, behind) = (read_origin(rkey, addr, psn, mtu), u64::from(len) - 1);
                    let want =
                        Want { origin, at: addr, len: 1, behind, memory, copier, offset, can_load, rows };
                    prefetch.prefetch(&want);
                }
            });
    }
}

/// The link takes the payload from its chunk. The packet is built there if its header is the
/// shortest and the gap fits it.
fn build_outside(entry: &QueuePair, tx: &mut TxBatch, transmit: &Transmit, slice: &ChunkSlice) -> Built {
    let ChunkSlice { chunk, at, has_gaps, .. } = slice;
    let payload = *at..at + transmit.payload.len() as usize;
    let done = Built::Done(BytePath::Direct(Mechanism::CopyEngine));
    if entry.ring.is_some() {
        if build_leased(entry, tx, transmit, 1, slice) {
            return done;
        }
        // Copy into the peer's ring, as the kernel would copy into a socket buffer.
        return build_copy(entry, tx, transmit, &chunk[payload], done);
    }
    let (head, len) = (transmit.header.len(), packet_len(transmit));
    let destination = (entry.qp.destination(), port_hint(entry));
    let full = payload.len() == entry.qp.attr().path_mtu.bytes() as usize;
    if head == BTH_LEN && full && *has_gaps {
        let start = at - BTH_LEN;
        let mut header = [0; BTH_LEN];
        transmit.header.emit(&mut header);
        // SAFETY: references into chunks live for the time of a call only. A batch that still waits
        // to be sent may hold the same packet: it then leaves with a wrong ICRC, is dropped, and is
        // retransmitted.
        unsafe { chunk.write_between(start, &header) };
        let Some(crc) = tx.begin_inside(destination, len, chunk, start) else { return BY_CPU };
        tx.commit_crc(extend_crc(crc, &chunk[start..payload.end]));
        return done;
    }
    let Some((room, crc)) = tx.begin_outside(destination, len, head, chunk, payload.clone()) else {
        return BY_CPU;
    };
    transmit.header.emit(room);
    let (head, tail) = room.split_at_mut(head);
    let pad = &mut tail[..usize::from(transmit.header.pad)];
    pad.fill(0);
    let crc = extend_crc(extend_crc(extend_crc(crc, head), &chunk[payload]), pad);
    tx.commit_crc(crc);
    done
}

/// One more copy of the fetched payload.
fn build_copy(entry: &QueuePair, tx: &mut TxBatch, transmit: &Transmit, bytes: &[u8], done: Built) -> Built {
    let Some(mut room) = PacketSpace::begin(entry, tx, transmit) else { return BY_CPU };
    room.payload().put(0, bytes);
    let crc = extend_crc(room.crc, bytes);
    let crc = room.pad(crc);
    tx.commit_crc(crc);
    done
}

/// The rare packet whose payload has several pieces, some of them in GPU memory without a window.
fn build_mixed(
    entry: &mut QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
    (serial, offset): (u64, u64),
) -> Result<Built, Nak> {
    let after = entry.owner().after;
    match mixed::gather(entry, regions, (serial, offset), transmit.payload.len() as usize) {
        Ok(Gathered::All(bytes)) => {
            Ok(build_copy(entry, tx, transmit, &bytes, Built::Done(BytePath::Staged)))
        }
        Ok(Gathered::Pending) => Ok(Built::Pending { after, starved: false }),
        Ok(Gathered::Starved) => Ok(Built::Pending { after, starved: true }),
        Err(nak) => {
            regions.faults += 1;
            Err(nak)
        }
    }
}

/// Writes a packet's headers into its space, and extends the CRC over them.
#[inline(always)]
fn emit(header: &Header, room: &mut Sink<'_>, crc: Option<u32>) -> Option<u32> {
    let mut bytes = [0; MOST_HEADERS];
    let len = header.emit(&mut bytes);
    room.put(0, &bytes[..len]);
    extend_crc(crc, &bytes[..len])
}
