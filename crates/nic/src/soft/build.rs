//! Packets are built here: headers, one copy of the payload into the batch, and the ICRC over that copy, taken while it
//! is made.

use nobounce_protocol::qp::{LocalFault, Nak, Payload, Transmit};
use nobounce_protocol::wire::ICRC_LEN;

use super::engine::QpEntry;
use super::host::find_send;
use super::region::Regions;
use crate::links::TxBatch;

/// Bytes of a packet on the wire.
pub(crate) fn packet_len(transmit: &Transmit) -> usize {
    let Transmit { header, payload } = transmit;
    header.len() + payload.len() as usize + usize::from(header.pad) + ICRC_LEN
}

/// Builds `count` more packets after `transmit`, each with the next sequence number and the next piece; `transmit`
/// moves along, so that it is the one that could not be built if one could not.
pub(crate) fn build_repeats(
    entry: &QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &mut Transmit,
    count: u64,
) -> Result<(), Nak> {
    let total = packet_len(transmit);
    let header_len = transmit.header.len();
    let remote = entry.qp.attr().remote;
    let Payload::Request { serial, offset, len } = &mut transmit.payload else { return Ok(()) };
    let Some(send) = find_send(&entry.sends, *serial) else { return Err(Nak::RemoteOperational) };
    for _ in 0..count {
        *offset += u64::from(*len);
        transmit.header.psn = transmit.header.psn.next();
        let Some((room, start)) = tx.begin_crc(remote, port_hint(entry), total) else {
            return Ok(()); // room_for() was asked; a packet lost here is repeated
        };
        transmit.header.emit(room);
        let (head, payload) = room[..header_len + *len as usize].split_at_mut(header_len);
        let Ok(crc) = send.bytes.gather(regions, entry.pd, *offset, payload, crc_on(start, head)) else {
            tx.abort();
            return Err(Nak::RemoteOperational);
        };
        tx.commit_crc(crc);
    }
    Ok(())
}

/// Spreads queue pairs over the link's source ports.
fn port_hint(entry: &QpEntry) -> u16 {
    u16::try_from(entry.qpn.get() & 0xffff).unwrap_or(0)
}

/// Builds one packet in the batch: headers, one copy of the payload, and the ICRC over that copy.
pub(crate) fn build(
    entry: &QpEntry,
    tx: &mut TxBatch,
    regions: &mut Regions,
    transmit: &Transmit,
) -> Result<(), Nak> {
    let header_len = transmit.header.len();
    let payload_len = transmit.payload.len() as usize;
    let Some((room, start)) = tx.begin_crc(entry.qp.attr().remote, port_hint(entry), packet_len(transmit))
    else {
        return Ok(()); // has_room() was asked; a packet lost here is repeated
    };
    transmit.header.emit(room);
    let (head, rest) = room.split_at_mut(header_len);
    let (payload, rest) = rest.split_at_mut(payload_len);
    let pad = &mut rest[..usize::from(transmit.header.pad)];
    pad.fill(0);
    let crc = crc_on(start, head);
    let gathered = match transmit.payload {
        Payload::None => Ok(crc),
        Payload::Request { serial, offset, .. } => find_send(&entry.sends, serial)
            .ok_or(LocalFault)
            .and_then(|send| send.bytes.gather(regions, entry.pd, offset, payload, crc))
            .map_err(|LocalFault| Nak::RemoteOperational),
        Payload::Region { rkey, addr, .. } => regions.load_remote(entry.pd, rkey, addr, payload, crc),
    };
    match gathered {
        Ok(crc) => {
            let crc = if pad.is_empty() { crc } else { crc_on(crc, pad) };
            tx.commit_crc(crc);
            Ok(())
        }
        Err(nak) => {
            tx.abort();
            Err(nak)
        }
    }
}

/// Carries a CRC on over more bytes.
pub(crate) fn crc_on(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}
