//! Packets are built here: headers, one copy of the payload into the batch, and the ICRC over that copy, taken while it
//! is made. What the copy engine fetched is not copied: the link takes it from where it lies.

use nobounce_memory::gpu::copy_engine::PinnedChunk;
use nobounce_memory::path::Mechanism;
use nobounce_protocol::qp::{Access, Nak, Payload, Transmit};
use nobounce_protocol::wire::ICRC_LEN;

use super::entry::QpEntry;
use super::feed::{Fetched, Origin, Want};
use super::host::find_send;
use super::region::{GatherError, Regions};
use super::scatter::Piece;
use super::tally::Route;
use crate::links::{Outside, TxBatch};

/// What came of building a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Built {
    /// It is in the batch; its payload came this way.
    Done(Route),
    /// Its payload is being fetched: try again.
    Pending,
}

const BY_CPU: Built = Built::Done(Route::Direct(Mechanism::Cpu));

/// Bytes of a packet on the wire.
pub(crate) fn packet_len(transmit: &Transmit) -> usize {
    let Transmit { header, payload } = transmit;
    header.len() + payload.len() as usize + usize::from(header.pad) + ICRC_LEN
}

/// Builds `count` more packets after `transmit`, each with the next sequence number and the next piece; `transmit`
/// moves along, so that it is the one that could not be built if one could not.
pub(crate) fn build_repeats(
    entry: &mut QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &mut Transmit,
    count: u64,
) -> Result<(), Nak> {
    let total = packet_len(transmit);
    let header_len = transmit.header.len();
    let remote = entry.qp.attr().remote;
    let Payload::Request { serial, .. } = transmit.payload else { return Ok(()) };
    if entry.feed.as_ref().is_some_and(|feed| feed.is_of(Origin::Request(serial))) {
        for _ in 0..count {
            transmit.payload.advance();
            transmit.header.psn = transmit.header.psn.next();
            // All of them are there (see `ready_repeats`); a packet lost here would be repeated.
            build(entry, tx, regions, transmit)?;
        }
        return Ok(());
    }
    let hint = port_hint(entry);
    let Some(send) = find_send(&entry.sends, serial) else { return Err(Nak::RemoteOperational) };
    for _ in 0..count {
        transmit.payload.advance();
        transmit.header.psn = transmit.header.psn.next();
        let Payload::Request { offset, len, rest, .. } = transmit.payload else { return Ok(()) };
        let Some((room, start)) = tx.begin_crc(remote, hint, total) else {
            return Ok(()); // room_for() was asked; a packet lost here is repeated
        };
        transmit.header.emit(room);
        let (head, payload) = room[..header_len + len as usize].split_at_mut(header_len);
        match send.bytes.gather(regions, entry.pd, (offset, rest), payload, crc_on(start, head)) {
            Ok((crc, _)) => tx.commit_crc(crc),
            Err(error) => {
                tx.abort();
                return Err(match error {
                    GatherError::Fault(nak) => nak,
                    GatherError::Fetch => Nak::RemoteOperational,
                });
            }
        }
    }
    Ok(())
}

/// How many packets like this one can be built right behind it without waiting.
pub(crate) fn ready_repeats(entry: &QpEntry, transmit: &Transmit) -> u64 {
    let Payload::Request { serial, offset, len, .. } = transmit.payload else { return u64::MAX };
    let origin = Origin::Request(serial);
    match entry.feed.as_ref().filter(|feed| feed.is_of(origin)) {
        Some(feed) => feed.ready_from(origin, offset + u64::from(len)) / u64::from(len.max(1)),
        None => u64::MAX,
    }
}

/// Spreads queue pairs over the link's source ports.
fn port_hint(entry: &QpEntry) -> u16 {
    u16::try_from(entry.qpn.get() & 0xffff).unwrap_or(0)
}

/// Builds one packet in the batch.
pub(crate) fn build(
    entry: &mut QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
) -> Result<Built, Nak> {
    if let Some(feed) = &entry.feed
        && let Some((origin, at)) = origin_of(entry, transmit)
        && feed.covers(origin, at)
    {
        return build_fetched(entry, tx, regions, transmit);
    }
    let Some(mut room) = Room::begin(entry, tx, transmit) else {
        return Ok(BY_CPU); // has_room() was asked; a packet lost here is repeated
    };
    let crc = room.crc;
    let gathered = match transmit.payload {
        Payload::None => Ok((crc, Route::Direct(Mechanism::Cpu))),
        Payload::Request { serial, offset, rest, .. } => match find_send(&entry.sends, serial) {
            Some(send) => send.bytes.gather(regions, entry.pd, (offset, rest), room.payload(), crc),
            None => Err(GatherError::Fault(Nak::RemoteOperational)),
        },
        Payload::Region { rkey, addr, len, rest } => {
            let message = u64::from(len) + u64::from(rest);
            regions.load_remote(entry.pd, (rkey, addr), room.payload(), message, crc)
        }
    };
    match gathered {
        Ok((crc, route)) => {
            let crc = room.pad(crc);
            tx.commit_crc(crc);
            Ok(Built::Done(route))
        }
        Err(GatherError::Fault(nak)) => {
            tx.abort();
            Err(nak)
        }
        Err(GatherError::Fetch) => {
            tx.abort();
            build_fetched(entry, tx, regions, transmit)
        }
    }
}

/// The room of a packet in the batch, its headers written.
struct Room<'a> {
    bytes: &'a mut [u8],
    head: usize,
    len: usize,
    pad: usize,
    /// The CRC of everything before the payload.
    crc: u32,
}

impl<'a> Room<'a> {
    #[inline]
    fn begin(entry: &QpEntry, tx: &'a mut TxBatch, transmit: &Transmit) -> Option<Self> {
        let remote = entry.qp.attr().remote;
        let (bytes, start) = tx.begin_crc(remote, port_hint(entry), packet_len(transmit))?;
        transmit.header.emit(bytes);
        let head = transmit.header.len();
        let crc = crc_on(start, &bytes[..head]);
        Some(Self {
            head,
            len: transmit.payload.len() as usize,
            pad: usize::from(transmit.header.pad),
            crc,
            bytes,
        })
    }

    fn payload(&mut self) -> &mut [u8] {
        &mut self.bytes[self.head..self.head + self.len]
    }

    /// Writes the padding and carries the CRC on over it.
    #[inline]
    fn pad(&mut self, crc: u32) -> u32 {
        if self.pad == 0 {
            return crc;
        }
        let pad = &mut self.bytes[self.head + self.len..][..self.pad];
        pad.fill(0);
        crc_on(crc, pad)
    }
}

/// The message that a packet is part of, and where in it its payload begins.
fn origin_of(entry: &QpEntry, transmit: &Transmit) -> Option<(Origin, u64)> {
    match transmit.payload {
        Payload::None => None,
        Payload::Request { serial, offset, .. } => Some((Origin::Request(serial), offset)),
        Payload::Region { rkey, addr, .. } => {
            // READs of the same memory differ by the sequence number that goes with an address.
            let before = u64::from(transmit.header.psn.get()) * u64::from(entry.qp.attr().path_mtu.bytes());
            Some((Origin::Read(rkey, addr.wrapping_sub(before)), addr))
        }
    }
}

/// Builds a packet whose payload the copy engine fetches.
fn build_fetched(
    entry: &mut QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
) -> Result<Built, Nak> {
    let Some((origin, packet)) = origin_of(entry, transmit) else { return Err(Nak::RemoteOperational) };
    let (pieces, access) = match transmit.payload {
        Payload::Request { serial, offset, len, .. } => {
            let send = find_send(&entry.sends, serial).ok_or(Nak::RemoteOperational)?;
            (send.bytes.pieces(offset, len as usize), Access::empty())
        }
        Payload::Region { rkey, addr, len, rest } => {
            let piece = Piece { key: rkey, addr, at: addr, len: len as usize, behind: u64::from(rest) };
            (vec![piece], Access::REMOTE_READ)
        }
        Payload::None => return Err(Nak::RemoteOperational),
    };
    // All pieces must be there before any of them is used.
    let mut fetched = Vec::with_capacity(pieces.len());
    for piece in &pieces {
        let Some(bytes) = regions.gpu_bytes(entry.pd, (piece.key, piece.addr), piece.len, access)? else {
            fetched.push(None); // host memory
            continue;
        };
        let want = Want {
            origin,
            packet,
            at: piece.at,
            len: piece.len,
            behind: piece.behind,
            memory: &bytes.gpu.memory,
            copier: bytes.gpu.copier,
            offset: bytes.offset,
        };
        match entry.feed.get_or_insert_default().get(&regions.stage, &want) {
            Fetched::Ready(chunk, range) => fetched.push(Some((chunk, range, bytes.gpu.staged_out))),
            Fetched::Pending => return Ok(Built::Pending),
            Fetched::Failed(error) => {
                tracing::warn!(%error, "GPU memory could not be read by the copy engine");
                regions.faults += 1;
                return Err(Nak::RemoteOperational);
            }
        }
    }
    if let Payload::Request { serial, offset, len, rest } = transmit.payload {
        prefetch_next(entry, regions, serial, offset + u64::from(len) + u64::from(rest));
    }
    match &fetched[..] {
        [Some((chunk, range, false))] => Ok(build_outside(entry, tx, transmit, chunk, range.clone())),
        _ => build_staged(entry, tx, regions, transmit, (&pieces, &fetched)),
    }
}

/// Fetches the beginning of the next request too, once all of this one, which ends at `end`, is fetched.
fn prefetch_next(entry: &mut QpEntry, regions: &mut Regions, serial: u64, end: u64) {
    let QpEntry { feed: Some(feed), sends, pd, .. } = entry else { return };
    if !feed.has_room_behind(Origin::Request(serial), end) {
        return;
    }
    let Some(next) = find_send(sends, serial + 1).filter(|next| next.early) else { return };
    let [piece] = next.bytes.pieces(0, 1)[..] else { return };
    let Ok(Some(bytes)) = regions.gpu_bytes(*pd, (piece.key, piece.addr), 1, Access::empty()) else { return };
    // What is short enough to be loaded is not fetched.
    if bytes.gpu.loads(next.bytes.len()) {
        return;
    }
    let want = Want {
        origin: Origin::Request(serial + 1),
        packet: 0,
        at: 0,
        len: 1,
        behind: piece.behind,
        memory: &bytes.gpu.memory,
        copier: bytes.gpu.copier,
        offset: bytes.offset,
    };
    feed.prefetch(&regions.stage, &want);
}

/// The link takes the payload from where the copy engine put it.
fn build_outside(
    entry: &QpEntry,
    tx: &mut TxBatch,
    transmit: &Transmit,
    chunk: &PinnedChunk,
    range: std::ops::Range<usize>,
) -> Built {
    let head = transmit.header.len();
    let payload = Outside::new(chunk.clone(), range.clone(), head);
    let remote = entry.qp.attr().remote;
    let begun = tx.begin_outside(remote, port_hint(entry), packet_len(transmit), payload);
    let Some((room, start)) = begun else { return BY_CPU };
    transmit.header.emit(room);
    let (head, tail) = room.split_at_mut(head);
    let pad = &mut tail[..usize::from(transmit.header.pad)];
    pad.fill(0);
    let crc = crc_on(crc_on(crc_on(start, head), &chunk[range]), pad);
    tx.commit_crc(crc);
    Built::Done(Route::Direct(Mechanism::CopyEngine))
}

type FetchedPiece = Option<(PinnedChunk, std::ops::Range<usize>, bool)>;

/// One more copy: staging was asked for, or the payload comes from several places.
fn build_staged(
    entry: &QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
    (pieces, fetched): (&[Piece], &[FetchedPiece]),
) -> Result<Built, Nak> {
    let Some(mut room) = Room::begin(entry, tx, transmit) else { return Ok(BY_CPU) };
    let (mut crc, mut done) = (room.crc, 0);
    for (piece, fetched) in pieces.iter().zip(fetched) {
        let out = &mut room.payload()[done..done + piece.len];
        done += piece.len;
        if let Some((chunk, range, _)) = fetched {
            out.copy_from_slice(&chunk[range.clone()]);
            crc = crc_on(crc, out);
            continue;
        }
        match regions.load_local(entry.pd, (piece.key, piece.addr), out, u64::MAX, crc) {
            Ok((on, _)) => crc = on,
            Err(error) => {
                tx.abort();
                return Err(match error {
                    GatherError::Fault(nak) => nak,
                    GatherError::Fetch => Nak::RemoteOperational,
                });
            }
        }
    }
    let crc = room.pad(crc);
    tx.commit_crc(crc);
    Ok(Built::Done(Route::Staged))
}

/// Carries a CRC on over more bytes.
pub(crate) fn crc_on(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}
