//! Packets whose payload the GPU's copy engine fetches: prefetch, and construction in place.

use nobounce_memory::gpu::copy_engine::Rows;
use nobounce_memory::path::Mechanism;
use nobounce_protocol::qp::{Access, Nak, Payload, Transmit};
use nobounce_protocol::wire::{BTH_LEN, ICRC_LEN, Psn, Reth};

use crate::links::{PacketShape, PayloadSource, TxBatch};
use crate::soft::crc::extend_crc;
use crate::soft::engine::host::find_send;
use crate::soft::engine::mixed::{self, Gathered};
use crate::soft::engine::packet::{
    BY_CPU, Built, build_copy, build_gathered, emit, put_padding, receiver, shape_of,
};
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::region::Regions;
use crate::soft::engine::scatter::Piece;
use crate::soft::gpu::prefetch::{self, Batch, ChunkSlice, Fetched, Origin, Want};
use crate::soft::gpu::target::GatheredMessage;
use crate::tally::BytePath;

/// The chunk layout of payload fetched for this queue pair.
fn rows_for(entry: &QueuePair) -> Rows {
    match entry.route.local {
        Some(_) => prefetch::IN_A_ROW,
        None => prefetch::rows(entry.qp.attr().path_mtu.bytes() as usize),
    }
}

/// The message that a packet belongs to, and the offset of its payload in it.
pub(crate) fn origin_of(entry: &QueuePair, transmit: &Transmit) -> Option<(Origin, u64)> {
    match transmit.payload {
        Payload::None => None,
        Payload::Request { serial, offset, .. } => Some((Origin::Request(serial), offset)),
        Payload::Region { rkey, addr, .. } => {
            let mtu = entry.qp.attr().path_mtu.bytes();
            Some((read_origin(rkey, addr, transmit.header.psn, mtu), addr))
        }
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
pub(crate) fn build_fetched(
    entry: &mut QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
) -> Result<Built, Nak> {
    let Some((origin, _)) = origin_of(entry, transmit) else { return Err(Nak::RemoteOperational) };
    let (piece, access) = match transmit.payload {
        Payload::Request { serial, offset, len, .. } => {
            let send = find_send(&entry.posted.sends, serial).ok_or(Nak::RemoteOperational)?;
            let two = {
                let mut pieces = send.bytes.pieces(offset, len as usize);
                (pieces.next(), pieces.next())
            };
            match two {
                (Some(piece), None) => (piece, Access::empty()),
                _ => {
                    entry.gpu.prefetches.get_or_insert_default().loaded = Some(origin);
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
    let end = piece.at + piece.len as u64 + u64::from(transmit.payload.rest());
    let (mut owner, accessor) = (entry.owner(), entry.accessor());
    let prefetches = entry.gpu.prefetches.get_or_insert_default();
    owner.after = prefetches.fence(origin, owner.after);
    let prefetch = prefetches.of_mut(origin);
    let got =
        regions.with_gpu(accessor, (piece.key, piece.addr), piece.len, access, |gpu, offset, staging| {
            // A new message must not be read before this queue pair's earlier placements are over.
            // On another route they would be, and a fence requires it.
            if !prefetch.is_of(origin) && !staging.is_settled(owner) {
                return (Fetched::Pending, false);
            }
            let Piece { at, len, behind, .. } = piece;
            let Some(copier) = staging.copiers.get(gpu.copier) else { return (Fetched::Gone, false) };
            let (memory, can_load) = (&gpu.memory, gpu.can_load());
            let want = Want { origin, at, len, behind, end, memory, copier, offset, can_load, rows };
            (prefetch.get(&want), gpu.staged_out)
        });
    // The memory is gone: drop its prefetched bytes.
    let got = got.inspect_err(|_| prefetch.clear())?;
    let (slice, staged) = match got {
        Some((Fetched::Ready(slice), staged)) => (slice, staged),
        Some((Fetched::Pending, _)) => {
            // Overlap the fetch of the next messages, which has the same latency, with this one.
            prefetch_behind(entry, regions, origin);
            return Ok(Built::Pending { after: owner.after, starved: false });
        }
        Some((Fetched::Late, _)) => {
            // Loads need no copy engine. They are slow for long messages, but the copy engine may
            // wait for a kernel that waits for this device.
            prefetches.loaded = Some(origin);
            if transmit.payload.rest() == 0 {
                prefetches.of_mut(origin).finish(origin, end);
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
    prefetch_behind(entry, regions, origin);
    let built = if staged {
        let bytes = &slice.chunk[slice.at..slice.at + piece.len];
        build_copy(entry, tx, transmit, bytes, BytePath::Staged)
    } else {
        build_in_place(entry, tx, transmit, &slice)
    };
    if transmit.payload.rest() == 0
        && let Some(prefetches) = &mut entry.gpu.prefetches
    {
        // Other queue pairs may need its chunks.
        prefetches.of_mut(origin).finish(origin, end);
    }
    Ok(built)
}

/// Prefetches the messages behind the last one of this kind that was fetched.
fn prefetch_behind(entry: &mut QueuePair, regions: &mut Regions, origin: Origin) {
    let last = entry.gpu.prefetches.as_ref().and_then(|prefetches| prefetches.of(origin).room_behind());
    match last {
        Some((Origin::Request(serial), _)) => prefetch_requests(entry, regions, serial),
        Some((origin, end)) => prefetch_reads(entry, regions, origin, end),
        None => {}
    }
}

/// Prefetches the requests behind this one.
fn prefetch_requests(entry: &mut QueuePair, regions: &mut Regions, serial: u64) {
    let (owner, rows) = (entry.owner(), rows_for(entry));
    let accessor = entry.accessor();
    let QueuePair { gpu, posted, .. } = entry;
    let Some(prefetches) = &mut gpu.prefetches else { return };
    let prefetch = prefetches.of_mut(Origin::Request(serial));
    let mut batch = Batch::default();
    for serial in serial + 1.. {
        let Some(next) = find_send(&posted.sends, serial).filter(|next| next.early) else { break };
        // Inline or empty: nothing to fetch.
        let Some(piece) = next.bytes.pieces(0, 1).next() else { continue };
        let (len, behind) = (next.bytes.len(), piece.behind);
        let whole = usize::try_from(1 + behind).unwrap_or(usize::MAX);
        let name = (piece.key, piece.addr);
        let more = regions.with_gpu(accessor, name, whole, Access::empty(), |gpu, offset, staging| {
            // A message short enough for loads is not fetched.
            if gpu.loads(GatheredMessage { len, alone: false }) {
                return true;
            }
            if !staging.is_settled(owner) {
                return false;
            }
            let Some(copier) = staging.copiers.get(gpu.copier) else { return false };
            let (memory, can_load, origin) = (&gpu.memory, gpu.can_load(), Origin::Request(serial));
            let want =
                Want { origin, at: 0, len: 1, behind, end: len, memory, copier, offset, can_load, rows };
            prefetch.prefetch(&mut batch, &want)
        });
        // Host memory is not fetched. An error is reported when the request is sent.
        if !matches!(more, Ok(None | Some(true))) {
            break;
        }
    }
    prefetch.fetch_batch(batch);
}

/// Prefetches the peer's READs behind the one that ends at `end`. Long READs arrive in pieces.
fn prefetch_reads(entry: &mut QueuePair, regions: &mut Regions, origin: Origin, end: u64) {
    let (owner, rows, accessor) = (entry.owner(), rows_for(entry), entry.accessor());
    let mtu = entry.qp.attr().path_mtu.bytes();
    let QueuePair { gpu, qp, .. } = entry;
    let Some(prefetches) = &mut gpu.prefetches else { return };
    let prefetch = prefetches.of_mut(origin);
    let name = |psn, Reth { rkey, addr, len }: Reth| {
        (read_origin(rkey, addr, psn, mtu), addr.wrapping_add(u64::from(len)))
    };
    let fetched = qp.waiting_reads().position(|(psn, read)| name(psn, read) == (origin, end));
    let mut batch = Batch::default();
    for (psn, read) in qp.waiting_reads().skip(fetched.map_or(0, |at| at + 1)) {
        let Reth { rkey, addr, len } = read;
        let (origin, end) = name(psn, read);
        let place = (rkey, addr);
        let more =
            regions.with_gpu(accessor, place, len as usize, Access::REMOTE_READ, |gpu, offset, staging| {
                // As for the response: short messages are loaded, and this queue pair's earlier
                // placements must be over.
                if len == 0 || gpu.loads(GatheredMessage { len: u64::from(len), alone: false }) {
                    return true;
                }
                if !staging.is_settled(owner) {
                    return false;
                }
                let Some(copier) = staging.copiers.get(gpu.copier) else { return false };
                let (memory, can_load, behind) = (&gpu.memory, gpu.can_load(), u64::from(len) - 1);
                let want =
                    Want { origin, at: addr, len: 1, behind, end, memory, copier, offset, can_load, rows };
                prefetch.prefetch(&mut batch, &want)
            });
        // An error is reported when the READ is executed.
        if !matches!(more, Ok(None | Some(true))) {
            break;
        }
    }
    prefetch.fetch_batch(batch);
}

/// Exports `packets` packets like `first`, whose payloads are contiguous in a fetch chunk. A
/// same-host peer reads them in place. Returns whether that was possible.
pub(crate) fn build_leased(
    entry: &QueuePair,
    tx: &mut TxBatch,
    first: &Transmit,
    packets: usize,
    slice: &ChunkSlice,
) -> bool {
    if entry.route.local.is_none() {
        return false;
    }
    let (head, payload) = (first.header.len(), packets * first.payload.len() as usize);
    let len = head + payload + usize::from(first.header.pad) + ICRC_LEN;
    let shape = PacketShape { len, head, packets: u16::try_from(packets).unwrap_or(1) };
    let payload = PayloadSource::Chunk { chunk: &slice.chunk, at: slice.at, len: payload };
    let Some(mut space) = tx.begin(&receiver(entry), shape, payload) else { return false };
    emit(&first.header, &mut space.bytes, None);
    tx.commit(None);
    true
}

/// The link takes the payload from its chunk. The packet is built there if its header is the
/// shortest and the gap fits it.
pub(crate) fn build_in_place(
    entry: &QueuePair,
    tx: &mut TxBatch,
    transmit: &Transmit,
    slice: &ChunkSlice,
) -> Built {
    let ChunkSlice { chunk, at, has_gaps, .. } = slice;
    let (at, shape) = (*at, shape_of(transmit));
    let len = transmit.payload.len() as usize;
    let payload = &chunk[at..at + len];
    let path = BytePath::Direct(Mechanism::CopyEngine);
    let done = Built::Done(path);
    if entry.route.local.is_some() {
        if build_leased(entry, tx, transmit, 1, slice) {
            return done;
        }
        // Copy into the peer's ring, as the kernel would copy into a socket buffer.
        return build_copy(entry, tx, transmit, payload, path);
    }
    let full = len == entry.qp.attr().path_mtu.bytes() as usize;
    if shape.head == BTH_LEN && full && *has_gaps {
        let start = at - BTH_LEN;
        let mut header = [0; BTH_LEN];
        transmit.header.emit(&mut header);
        // SAFETY: references into chunks live for the time of a call only. A batch that still waits
        // to be sent may hold the same packet: it then leaves with a wrong ICRC, is dropped, and is
        // retransmitted.
        unsafe { chunk.write_between(start, &header) };
        let whole = PayloadSource::Chunk { chunk, at: start, len: shape.len };
        let Some(space) = tx.begin(&receiver(entry), shape, whole) else { return BY_CPU };
        let crc = extend_crc(space.crc, &chunk[start..at + len]);
        tx.commit(crc);
        return done;
    }
    let source = PayloadSource::Chunk { chunk, at, len };
    let Some(mut space) = tx.begin(&receiver(entry), shape, source) else { return BY_CPU };
    let crc = emit(&transmit.header, &mut space.bytes, space.crc);
    let crc = extend_crc(crc, payload);
    let crc = put_padding(&mut space.bytes, shape.head, transmit.header.pad, crc);
    tx.commit(crc);
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
        Ok(Gathered::All(bytes)) => Ok(build_copy(entry, tx, transmit, &bytes, BytePath::Staged)),
        Ok(Gathered::Pending) => Ok(Built::Pending { after, starved: false }),
        Ok(Gathered::Starved) => Ok(Built::Pending { after, starved: true }),
        Err(nak) => {
            regions.faults += 1;
            Err(nak)
        }
    }
}
