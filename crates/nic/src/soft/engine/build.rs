//! Packets are built here: headers, one copy of the payload into the batch, and the ICRC over that copy, taken while it
//! is made. What the copy engine fetched is not copied: the link takes it from where it lies.

use std::net::IpAddr;
use std::sync::Arc;

use nobounce_memory::Sink;
use nobounce_memory::gpu::copy_engine::Rows;
use nobounce_memory::path::Mechanism;
use nobounce_protocol::qp::{Access, Nak, Payload, Service, Transmit};
use nobounce_protocol::wire::{BTH_LEN, Header, ICRC_LEN, Marker, Psn, Reth};

use crate::links::TxBatch;
use crate::links::shm::NearRing;
use crate::soft::crc::extend_crc;
use crate::soft::engine::entry::QpEntry;
use crate::soft::engine::host::find_send;
use crate::soft::engine::mixed::{self, Gathered};
use crate::soft::engine::region::{GatherError, Regions};
use crate::soft::engine::scatter::Piece;
use crate::soft::gpu::prefetch::{self, Fetched, Lies, Origin, Want};
use crate::soft::gpu::target::Message;
use crate::soft::tally::Route;

/// What came of building a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Built {
    /// It is in the batch; its payload came this way.
    Done(Route),
    /// Its payload is being fetched: try again once the copy `after` is over, and as often as it takes.
    Pending { after: u64, starved: bool },
}

/// More bytes than the headers of a packet ever have.
const MOST_HEADERS: usize = 64;

const BY_CPU: Built = Built::Done(Route::Direct(Mechanism::Cpu));

/// Bytes of a packet on the wire.
pub(crate) fn packet_len(transmit: &Transmit) -> usize {
    let Transmit { header, payload } = transmit;
    header.len() + payload.len() as usize + usize::from(header.pad) + ICRC_LEN
}

/// Most bytes that travel as one where the receiver reads them where they lie.
const MOST_LENT: usize = 32 * 1024;

/// Builds `count` more packets after `transmit`, each with the next sequence number and the next piece; `transmit`
/// moves along, so that it is the one that could not be built if one could not.
pub(crate) fn build_repeats(
    entry: &mut QpEntry,
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
    let fetched = origin_of(entry, transmit)
        .is_some_and(|(origin, _)| entry.feeds.as_ref().is_some_and(|feeds| feeds.of(origin).is_of(origin)));
    if fetched {
        return repeat_fetched(entry, tx, regions, transmit, count);
    }
    let Payload::Request { serial, .. } = transmit.payload else {
        // Answers, into a ring that is full.
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
            return Ok(()); // room_for() was asked; a packet lost here is repeated
        };
        let crc = emit(&transmit.header, &mut room, start);
        let payload = room.slice(header_len..header_len + len as usize);
        match send.bytes.gather(regions, entry.pd, (offset, message), payload, crc) {
            Ok((crc, _)) => tx.commit_crc(crc),
            Err(error) => {
                tx.abort();
                return match error {
                    GatherError::Fault(nak) => Err(nak),
                    // See `ready_repeats`; packets that are lost here are repeated.
                    GatherError::Fetch => Ok(()),
                };
            }
        }
    }
    Ok(())
}

/// The next of these packets as one, in the ring of a peer on this machine; how many they are, 0 where that cannot be.
fn build_run(
    entry: &QpEntry,
    (tx, ring): (&mut TxBatch, &Arc<NearRing>),
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
        .feeds
        .as_ref()
        .zip(origin)
        .is_some_and(|(feeds, (origin, at))| feeds.of(origin).covers(origin, at))
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

/// How what is fetched for this queue pair is to lie in its chunk.
fn rows_for(entry: &QpEntry) -> Rows {
    match entry.ring {
        Some(_) => prefetch::IN_A_ROW,
        None => prefetch::rows(entry.qp.attr().path_mtu.bytes() as usize),
    }
}

/// Packets like `first`, as many as `packets` says, whose payloads lie in a row where the copy engine put them: a peer on this machine reads
/// them there. Whether that could be.
fn build_lent(entry: &QpEntry, tx: &mut TxBatch, first: &Transmit, packets: usize, lies: &Lies) -> bool {
    let Some(ring) = &entry.ring else { return false };
    let (head, payload) = (first.header.len(), packets * first.payload.len() as usize);
    let len = head + payload + usize::from(first.header.pad) + ICRC_LEN;
    let number = u16::try_from(packets).unwrap_or(1);
    let Some(mut room) = tx.begin_lent(ring, (len, head, number), &lies.chunk, lies.at) else { return false };
    emit(&first.header, &mut room, None);
    tx.commit_crc(None);
    true
}

/// The same for bytes that the copy engine fetched: all of them are there (see [`ready_repeats`]), in one chunk.
fn repeat_fetched(
    entry: &mut QpEntry,
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
            .feeds
            .as_ref()
            .filter(|feeds| !feeds.copies)
            .and_then(|feeds| feeds.of(origin).here(origin, at));
        // A packet that is lost here is repeated.
        let Some(lies) = here else {
            build(entry, tx, regions, transmit)?;
            continue;
        };
        let piece = (transmit.payload.len() as usize).max(1);
        let in_a_row = lies.row.min(MOST_LENT) / piece;
        let packets = usize::try_from(left + 1).unwrap_or(1).min(in_a_row).max(1);
        if entry.qp.service() == Service::Rc && build_lent(entry, tx, transmit, packets, &lies) {
            for _ in 1..packets {
                transmit.advance();
            }
            left -= packets as u64 - 1;
        } else {
            build_outside(entry, tx, transmit, &lies);
        }
    }
    Ok(())
}

/// How many packets like this one can be built right behind it without waiting, and from the same piece of memory.
pub(crate) fn ready_repeats(entry: &QpEntry, transmit: &Transmit, route: Route) -> u64 {
    let Some((origin, at)) = origin_of(entry, transmit) else { return 0 };
    // What could not be taken from a fetch was built for one packet only: the next one may be fetched.
    if entry.feeds.as_ref().is_some_and(|feeds| feeds.loaded == Some(origin)) {
        return 0;
    }
    let len = u64::from(transmit.payload.len());
    let feed = entry.feeds.as_ref().map(|feeds| feeds.of(origin)).filter(|feed| feed.is_of(origin));
    let bytes = match (feed, transmit.payload) {
        (Some(feed), _) => feed.ready_from(origin, at.wrapping_add(len)),
        (None, Payload::Request { serial, .. }) => match find_send(&entry.sends, serial) {
            Some(send) => send.bytes.contiguous_from(at + len),
            None => 0,
        },
        // Answers that are not fetched repeat where that makes them one: in rings, and from memory that needs no fetching.
        (None, _) if entry.ring.is_some() && route == Route::Direct(Mechanism::Cpu) => return u64::MAX,
        (None, _) => 0,
    };
    bytes / len.max(1)
}

/// Spreads queue pairs over the link's source ports.
pub(crate) fn port_hint(entry: &QpEntry) -> u16 {
    u16::try_from(entry.qpn.get() & 0xffff).unwrap_or(0)
}

/// Builds one packet in the batch.
pub(crate) fn build(
    entry: &mut QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
) -> Result<Built, Nak> {
    if transmit.payload == Payload::None {
        build_bare(entry, tx, &transmit.header);
        return Ok(BY_CPU);
    }
    if let Some(feeds) = &entry.feeds
        && let Some((origin, at)) = origin_of(entry, transmit)
        && feeds.of(origin).covers(origin, at)
    {
        return build_fetched(entry, tx, regions, transmit);
    }
    match build_gathered(entry, tx, regions, transmit, message_of(entry, &transmit.payload))? {
        Some(built) => Ok(built),
        None => build_fetched(entry, tx, regions, transmit),
    }
}

/// Builds a packet without payload.
fn build_bare(entry: &QpEntry, tx: &mut TxBatch, header: &Header) {
    let way = (entry.qp.destination(), port_hint(entry));
    // has_room() was asked; a packet lost here is repeated
    let len = header.len() + ICRC_LEN;
    let Some((mut room, start)) = tx.begin_crc(way, len, entry.ring.as_ref()) else { return };
    let crc = emit(header, &mut room, start);
    tx.commit_crc(crc);
}

/// Builds a packet of bytes that the processor copies; nothing where they are to be fetched instead.
fn build_gathered(
    entry: &QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
    message: Message,
) -> Result<Option<Built>, Nak> {
    let Some(mut room) = Room::begin(entry, tx, transmit) else {
        return Ok(Some(BY_CPU)); // has_room() was asked; a packet lost here is repeated
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

/// Copies a payload, or several in a row, to `out`, and carries `crc` on over it.
#[inline]
fn gather(
    entry: &QpEntry,
    regions: &mut Regions,
    (payload, message): (Payload, Message),
    out: Sink<'_>,
    crc: Option<u32>,
) -> Result<(Option<u32>, Route), GatherError> {
    match payload {
        Payload::None => Ok((crc, Route::Direct(Mechanism::Cpu))),
        Payload::Request { serial, offset, .. } => match find_send(&entry.sends, serial) {
            Some(send) => send.bytes.gather(regions, entry.pd, (offset, message), out, crc),
            None => Err(GatherError::Fault(Nak::RemoteOperational)),
        },
        Payload::Region { rkey, addr, .. } => {
            regions.load_remote(entry.asker(), (rkey, addr), out, message, crc)
        }
    }
}

/// What is known of the message that a packet is part of.
#[inline]
fn message_of(entry: &QpEntry, payload: &Payload) -> Message {
    let left = u64::from(payload.len()) + u64::from(payload.rest());
    match payload {
        Payload::Request { serial, offset, .. } => {
            let alone = entry.sends.back().is_none_or(|last| last.serial == *serial);
            Message { len: offset + left, alone }
        }
        _ => Message { len: left, alone: true },
    }
}

/// The room of a packet in the batch, its headers written.
struct Room<'a> {
    bytes: Sink<'a>,
    head: usize,
    len: usize,
    pad: usize,
    /// The CRC of everything before the payload, where it is to have one.
    crc: Option<u32>,
}

impl<'a> Room<'a> {
    // Always inlined: on the stack it would be read back in other pieces than it was written in, while the headers are on their way to a ring
    // whose lines the peer has (see `Way` in batch.rs).
    #[inline(always)]
    fn begin(entry: &QpEntry, tx: &'a mut TxBatch, transmit: &Transmit) -> Option<Self> {
        let way = (entry.qp.destination(), port_hint(entry));
        let (mut bytes, start) = tx.begin_crc(way, packet_len(transmit), entry.ring.as_ref())?;
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

    /// Writes the padding and carries the CRC on over it.
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

/// The message that a packet is part of, and where in it its payload begins.
fn origin_of(entry: &QpEntry, transmit: &Transmit) -> Option<(Origin, u64)> {
    match transmit.payload {
        Payload::None => None,
        Payload::Request { serial, offset, .. } => Some((Origin::Request(serial), offset)),
        Payload::Region { rkey, addr, .. } => {
            let mtu = entry.qp.attr().path_mtu.bytes();
            Some((read_origin(rkey, addr, transmit.header.psn, mtu), addr))
        }
    }
}

/// Adds a marker to what leaves.
pub(crate) fn put_marker(tx: &mut TxBatch, to: IpAddr, port_hint: u16, marker: &Marker) {
    if let Some(room) = tx.begin(to, port_hint, Marker::LEN) {
        marker.emit(room);
        tx.commit();
    }
}

/// READs of the same memory differ by the sequence number that goes with an address.
fn read_origin(rkey: u32, addr: u64, psn: Psn, mtu: u32) -> Origin {
    Origin::Read(rkey, addr.wrapping_sub(u64::from(psn.get()) * u64::from(mtu)))
}

/// Builds a packet whose payload the copy engine fetches.
fn build_fetched(
    entry: &mut QpEntry,
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
                    entry.feeds.get_or_insert_default().loaded = Some(origin);
                    let loaded = build_gathered(entry, tx, regions, transmit, Message::LOADED)?;
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
    let (mut owner, asker) = (entry.owner(), entry.asker());
    let feeds = entry.feeds.get_or_insert_default();
    owner.after = feeds.fence(origin, owner.after);
    let feed = feeds.of_mut(origin);
    let got = regions.with_gpu(asker, (piece.key, piece.addr), piece.len, access, |gpu, offset, stage| {
        // A message that begins must not be read before what was placed for this queue pair is there: by another way it would
        // have been, and a fence asks for it.
        if !gpu.stores && !feed.is_of(origin) && !stage.is_settled(owner) {
            return (Fetched::Pending, false);
        }
        let Piece { at, len, behind, .. } = piece;
        let Some(copier) = stage.copiers.get(gpu.copier) else { return (Fetched::Gone, false) };
        let (memory, can_load) = (&gpu.memory, gpu.can_load());
        let want = Want { origin, at, len, behind, memory, copier, offset, can_load, rows };
        (feed.get(&want), gpu.staged_out)
    });
    // Memory that is gone: nobody will ask for what was fetched of it.
    let got = got.inspect_err(|_| feed.clear())?;
    let (lies, staged) = match got {
        Some((Fetched::Ready(lies), staged)) => (lies, staged),
        Some((Fetched::Pending, _)) => {
            // The next one's bytes are as far away: they come while this one's are awaited.
            if let Origin::Request(serial) = origin {
                let end = piece.at + piece.len as u64 + u64::from(transmit.payload.rest());
                prefetch_next(entry, regions, serial, end);
            }
            return Ok(Built::Pending { after: owner.after, starved: false });
        }
        Some((Fetched::Late, _)) => {
            // Loads need no copy engine. They are slow for long messages, but the copy engine may wait for a kernel that waits for us.
            feeds.loaded = Some(origin);
            if transmit.payload.rest() == 0 {
                feeds.of_mut(origin).finish(origin, piece.at + piece.len as u64);
            }
            let loaded = build_gathered(entry, tx, regions, transmit, Message::LOADED)?;
            return Ok(loaded.unwrap_or(Built::Pending { after: owner.after, starved: false }));
        }
        Some((Fetched::Gone, _)) => {
            tracing::warn!("GPU memory cannot be read: its context was destroyed (cudaDeviceReset?)");
            regions.faults += 1;
            return Err(Nak::RemoteOperational);
        }
        Some((Fetched::Stuck(why), _)) => {
            tracing::warn!("bytes to be sent were not fetched from the GPU in 10 s: {why}");
            regions.faults += 1;
            return Err(Nak::RemoteOperational);
        }
        Some((Fetched::Starved, _)) => return Ok(Built::Pending { after: owner.after, starved: true }),
        Some((Fetched::Failed(error), _)) => {
            tracing::warn!(%error, "GPU memory could not be read by the copy engine");
            regions.faults += 1;
            return Err(Nak::RemoteOperational);
        }
        None => return Err(Nak::RemoteOperational), // host memory was never asked to be fetched
    };
    (feeds.copies, feeds.loaded) = (staged, None);
    let end = piece.at + piece.len as u64 + u64::from(transmit.payload.rest());
    match origin {
        Origin::Request(serial) => prefetch_next(entry, regions, serial, end),
        Origin::Read(..) => prefetch_reads(entry, regions, origin, end),
    }
    let built = if staged {
        let bytes = &lies.chunk[lies.at..lies.at + piece.len];
        build_copy(entry, tx, transmit, bytes, Built::Done(Route::Staged))
    } else {
        build_outside(entry, tx, transmit, &lies)
    };
    if transmit.payload.rest() == 0
        && let Some(feeds) = &mut entry.feeds
    {
        // Others may need its chunks.
        feeds.of_mut(origin).finish(origin, end);
    }
    Ok(built)
}

/// Fetches the beginning of the next request too, once all of this one, which ends at `end`, is fetched or on its way.
fn prefetch_next(entry: &mut QpEntry, regions: &mut Regions, serial: u64, end: u64) {
    let (owner, rows) = (entry.owner(), rows_for(entry));
    let asker = entry.asker();
    let QpEntry { feeds: Some(feeds), sends, .. } = entry else { return };
    let (origin, next_origin) = (Origin::Request(serial), Origin::Request(serial + 1));
    let feed = feeds.of_mut(origin);
    if !feed.has_room_behind(origin, end) {
        return;
    }
    let Some(next) = find_send(sends, serial + 1).filter(|next| next.early) else { return };
    let Some(piece) = next.bytes.pieces(0, 1).next() else { return };
    let (len, whole) = (next.bytes.len(), usize::try_from(1 + piece.behind).unwrap_or(usize::MAX));
    // What cannot be had is told when it is asked for.
    let _ = regions.with_gpu(asker, (piece.key, piece.addr), whole, Access::empty(), |gpu, offset, stage| {
        // What is short enough to be loaded is not fetched.
        let early = gpu.stores || stage.is_settled(owner);
        if early
            && !gpu.loads(Message { len, alone: false })
            && let Some(copier) = stage.copiers.get(gpu.copier)
        {
            let memory = &gpu.memory;
            let (origin, behind) = (next_origin, piece.behind);
            let can_load = gpu.can_load();
            let want = Want { origin, at: 0, len: 1, behind, memory, copier, offset, can_load, rows };
            feed.prefetch(&want);
        }
    });
}

/// Fetches what the peer's next READs ask for, once all of this one's bytes, which end at `end`, are fetched: long READs come in pieces.
fn prefetch_reads(entry: &mut QpEntry, regions: &mut Regions, origin: Origin, end: u64) {
    let (owner, rows, asker) = (entry.owner(), rows_for(entry), entry.asker());
    let mtu = entry.qp.attr().path_mtu.bytes();
    let QpEntry { feeds: Some(feeds), qp, .. } = entry else { return };
    let feed = feeds.of_mut(origin);
    for (psn, Reth { rkey, addr, len }) in qp.waiting_reads() {
        if !feed.has_room_after(origin, end) {
            return;
        }
        let name = (rkey, addr);
        // What cannot be had is told when it is asked for.
        let _ = regions.with_gpu(asker, name, len as usize, Access::REMOTE_READ, |gpu, offset, stage| {
            // As when it is answered: what is short is loaded, and what was placed for this queue pair must be there.
            let message = Message { len: u64::from(len), alone: true };
            if len > 0
                && !gpu.loads(message)
                && (gpu.stores || stage.is_settled(owner))
                && let Some(copier) = stage.copiers.get(gpu.copier)
            {
                let (memory, can_load) = (&gpu.memory, gpu.can_load());
                let (origin, behind) = (read_origin(rkey, addr, psn, mtu), u64::from(len) - 1);
                let want = Want { origin, at: addr, len: 1, behind, memory, copier, offset, can_load, rows };
                feed.prefetch(&want);
            }
        });
    }
}

/// The link takes the payload from where the copy engine put it; the packet is built there if its header is the shortest and has room.
fn build_outside(entry: &QpEntry, tx: &mut TxBatch, transmit: &Transmit, lies: &Lies) -> Built {
    let Lies { chunk, at, has_gaps, .. } = lies;
    let payload = *at..at + transmit.payload.len() as usize;
    let done = Built::Done(Route::Direct(Mechanism::CopyEngine));
    if entry.ring.is_some() {
        if build_lent(entry, tx, transmit, 1, lies) {
            return done;
        }
        // Into the ring of the peer, as the kernel would copy it into a socket buffer.
        return build_copy(entry, tx, transmit, &chunk[payload], done);
    }
    let (head, len) = (transmit.header.len(), packet_len(transmit));
    let way = (entry.qp.destination(), port_hint(entry));
    let full = payload.len() == entry.qp.attr().path_mtu.bytes() as usize;
    if head == BTH_LEN && full && *has_gaps {
        let start = at - BTH_LEN;
        let mut header = [0; BTH_LEN];
        transmit.header.emit(&mut header);
        // SAFETY: references into chunks are made for the time of a call only. A batch that still waits to be sent may hold the same
        // packet: it then goes out with an ICRC that does not fit, and is dropped and repeated.
        unsafe { chunk.write_between(start, &header) };
        let Some(crc) = tx.begin_inside(way, len, chunk, start) else { return BY_CPU };
        tx.commit_crc(extend_crc(crc, &chunk[start..payload.end]));
        return done;
    }
    let Some((room, crc)) = tx.begin_outside(way, len, head, chunk, payload.clone()) else { return BY_CPU };
    transmit.header.emit(room);
    let (head, tail) = room.split_at_mut(head);
    let pad = &mut tail[..usize::from(transmit.header.pad)];
    pad.fill(0);
    let crc = extend_crc(extend_crc(extend_crc(crc, head), &chunk[payload]), pad);
    tx.commit_crc(crc);
    done
}

/// One more copy of what was fetched.
fn build_copy(entry: &QpEntry, tx: &mut TxBatch, transmit: &Transmit, bytes: &[u8], done: Built) -> Built {
    let Some(mut room) = Room::begin(entry, tx, transmit) else { return BY_CPU };
    room.payload().put(0, bytes);
    let crc = extend_crc(room.crc, bytes);
    let crc = room.pad(crc);
    tx.commit_crc(crc);
    done
}

/// The rare packet whose payload comes from several places, some of them on a GPU and without a window.
fn build_mixed(
    entry: &mut QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
    (serial, offset): (u64, u64),
) -> Result<Built, Nak> {
    let after = entry.owner().after;
    match mixed::gather(entry, regions, (serial, offset), transmit.payload.len() as usize) {
        Ok(Gathered::All(bytes)) => Ok(build_copy(entry, tx, transmit, &bytes, Built::Done(Route::Staged))),
        Ok(Gathered::Pending) => Ok(Built::Pending { after, starved: false }),
        Ok(Gathered::Starved) => Ok(Built::Pending { after, starved: true }),
        Err(nak) => {
            regions.faults += 1;
            Err(nak)
        }
    }
}

/// Writes the headers of a packet into its room, and carries the CRC on over them.
#[inline(always)]
fn emit(header: &Header, room: &mut Sink<'_>, crc: Option<u32>) -> Option<u32> {
    let mut bytes = [0; MOST_HEADERS];
    let len = header.emit(&mut bytes);
    room.put(0, &bytes[..len]);
    extend_crc(crc, &bytes[..len])
}
