//! Packet construction: the next packet of a queue pair, and those that repeat it with the next
//! piece of payload: runs in a ring, repeats on the wire, and payload that was fetched.

use nobounce_memory::path::Mechanism;
use nobounce_protocol::qp::{Nak, Payload, Transmit};
use nobounce_protocol::wire::ICRC_LEN;

use crate::links::{LocalRoute, PacketShape, PayloadSource, TxBatch};
use crate::soft::engine::fetched::{build_fetched, build_in_place, build_leased, origin_of};
use crate::soft::engine::host::find_send;
use crate::soft::engine::packet::{
    BY_CPU, Built, build_gathered, emit, gather, message_of, receiver, shape_of, write,
};
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::region::{GatherError, Regions};
use crate::tally::BytePath;

/// Most bytes exported as one packet, which the receiver reads in place.
const MOST_LEASED: usize = 32 * 1024;

/// Builds one packet in the batch.
pub(crate) fn build(
    entry: &mut QueuePair,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
) -> Result<Built, Nak> {
    if transmit.payload == Payload::None {
        write(entry, tx, transmit, |_, crc| Ok((crc, BytePath::Direct(Mechanism::Cpu))))?;
        return Ok(BY_CPU);
    }
    if let Some(prefetches) = &entry.gpu.prefetches
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
    if let Some(route) = entry.route.local.as_ref().filter(|_| entry.qp.service().is_reliable()) {
        while count > 0 {
            match build_run(entry, (tx, route), regions, transmit, count)? {
                0 => break,
                built => count -= built,
            }
        }
    }
    let fetched = origin_of(entry, transmit).is_some_and(|(origin, _)| {
        entry.gpu.prefetches.as_ref().is_some_and(|prefetches| prefetches.of(origin).is_of(origin))
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
    let shape = shape_of(transmit);
    let to = receiver(entry);
    let message = message_of(entry, &transmit.payload);
    let Some(send) = find_send(&entry.posted.sends, serial) else { return Err(Nak::RemoteOperational) };
    for _ in 0..count {
        transmit.advance();
        let Payload::Request { offset, len, .. } = transmit.payload else { return Ok(()) };
        let Some(mut space) = tx.begin(&to, shape, PayloadSource::Copy) else {
            return Ok(()); // room_for() was checked; a packet lost here is retransmitted
        };
        let crc = emit(&transmit.header, &mut space.bytes, space.crc);
        let payload = space.bytes.slice(shape.head..shape.head + len as usize);
        match send.bytes.gather(regions, entry.pd, (offset, message), payload, crc) {
            Ok((crc, _)) => tx.commit(crc),
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
    (tx, route): (&mut TxBatch, &LocalRoute),
    regions: &mut Regions,
    transmit: &mut Transmit,
    count: u64,
) -> Result<u64, Nak> {
    let (head, piece) = (transmit.header.len(), transmit.payload.len() as usize);
    let packets = usize::try_from(count).unwrap_or(1).min(tx.longest_run(route) / piece.max(1)).max(1);
    let mut next = *transmit;
    next.advance();
    let (origin, message) = (origin_of(entry, &next), message_of(entry, &next.payload));
    if entry
        .gpu
        .prefetches
        .as_ref()
        .zip(origin)
        .is_some_and(|(prefetches, (origin, at))| prefetches.of(origin).covers(origin, at))
    {
        return Ok(0);
    }
    let number = u16::try_from(packets).unwrap_or(1);
    let shape = PacketShape { len: head + packets * piece + ICRC_LEN, head, packets: number };
    let Some(mut space) = tx.begin(&receiver(entry), shape, PayloadSource::Copy) else { return Ok(0) };
    emit(&next.header, &mut space.bytes, None);
    let payload = space.bytes.slice(head..head + packets * piece);
    match gather(entry, regions, (next.payload, message), payload, None) {
        Ok(_) => tx.commit(None),
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
            .gpu
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
        if entry.qp.service().is_reliable() && build_leased(entry, tx, transmit, packets, &slice) {
            for _ in 1..packets {
                transmit.advance();
            }
            left -= packets as u64 - 1;
        } else {
            build_in_place(entry, tx, transmit, &slice);
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
    if entry.gpu.prefetches.as_ref().is_some_and(|prefetches| prefetches.loaded == Some(origin)) {
        return 0;
    }
    let len = u64::from(transmit.payload.len());
    let prefetch = entry
        .gpu
        .prefetches
        .as_ref()
        .map(|prefetches| prefetches.of(origin))
        .filter(|prefetch| prefetch.is_of(origin));
    let bytes = match (prefetch, transmit.payload) {
        (Some(prefetch), _) => prefetch.ready_from(origin, at.wrapping_add(len)),
        (None, Payload::Request { serial, .. }) => match find_send(&entry.posted.sends, serial) {
            Some(send) => send.bytes.contiguous_from(at + len),
            None => 0,
        },
        // Responses that are not fetched repeat if they merge into one: in rings, and from memory
        // that needs no fetch.
        (None, _) if entry.route.local.is_some() && route == BytePath::Direct(Mechanism::Cpu) => {
            return u64::MAX;
        }
        (None, _) => 0,
    };
    bytes / len.max(1)
}
