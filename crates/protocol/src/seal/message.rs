//! Messages that open a session, authenticated by HMAC-SHA256. Nothing in them is secret.

use super::header::{HEADER_LEN, Kind, SealedHeader, TAG_LEN};
use super::keys::{Ends, Master};
use crate::wire::Qpn;

/// Bytes of a nonce.
pub(super) const NONCE_LEN: usize = 16;
pub(super) type SessionNonce = [u8; NONCE_LEN];

/// The content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Asks for a session, at that time in microseconds.
    Hello { ask: SessionNonce, time: u64 },
    /// Answers that.
    Reply { ask: SessionNonce, answer: SessionNonce, session: u64 },
    /// The session is unknown.
    Stale { session: u64 },
}

/// A message to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealMessage {
    /// Where to.
    pub to: std::net::IpAddr,
    /// The UDP payload.
    pub packet: Vec<u8>,
}

/// Writes a message from our slot to a slot of the peer.
pub(super) fn emit(master: &Master, ends: &Ends, slots: (u8, u8), content: &Content) -> Vec<u8> {
    let (kind, flow, counter) = match *content {
        Content::Hello { time, .. } => (Kind::Hello, 0, time),
        Content::Reply { session, .. } => (Kind::Reply, session, 0),
        Content::Stale { session } => (Kind::Stale, session, 0),
    };
    let (slot, to) = (slots.0, Qpn::new(u32::from(slots.1) << 16));
    let header =
        SealedHeader { kind, encrypted: false, ip_id: 0, slot, key_id: master.id, to, flow, counter };
    let mut packet = header.emit().to_vec();
    match content {
        Content::Hello { ask, .. } => packet.extend_from_slice(ask),
        Content::Reply { ask, answer, .. } => packet.extend([*ask, *answer].concat()),
        Content::Stale { .. } => {}
    }
    let tag = master.sign(ends, &packet);
    packet.extend_from_slice(&tag);
    packet
}

/// Reads a message; any bytes may come. `None`: it is none, or not authentic.
pub(super) fn parse(master: &Master, ends: &Ends, header: &SealedHeader, packet: &[u8]) -> Option<Content> {
    let (signed, tag) = packet.split_last_chunk::<TAG_LEN>()?;
    let body = signed.get(HEADER_LEN..)?;
    let session = header.flow;
    let content = match header.kind {
        Kind::Hello => Content::Hello { ask: body.try_into().ok()?, time: header.counter },
        Kind::Reply => {
            let (ask, answer) = body.split_first_chunk()?;
            Content::Reply { ask: *ask, answer: answer.try_into().ok()?, session }
        }
        Kind::Stale if body.is_empty() => Content::Stale { session },
        _ => return None,
    };
    master.verify(ends, signed, tag).then_some(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written_and_every_bit_counts() {
        let (master, other) = (Master::new(&[7; 32]).unwrap(), Master::new(&[8; 32]).unwrap());
        let (a, b) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let ends = Ends::new(a, b);
        let contents = [
            Content::Hello { ask: [1; 16], time: 7 },
            Content::Reply { ask: [1; 16], answer: [2; 16], session: 9 },
            Content::Stale { session: 9 },
        ];
        for content in contents {
            let packet = emit(&master, &ends, (3, 4), &content);
            let header = SealedHeader::parse(&packet).unwrap();
            assert_eq!((header.slot, header.to), (3, Qpn::new(0x4_0000)));
            assert_eq!(parse(&master, &ends, &header, &packet), Some(content));
            assert_eq!(parse(&other, &ends, &header, &packet), None);
            assert_eq!(parse(&master, &Ends::new(b, a), &header, &packet), None, "reflected");
            for bit in 0..packet.len() * 8 {
                let mut changed = packet.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                let header = SealedHeader::parse(&changed);
                assert_eq!(header.and_then(|header| parse(&master, &ends, &header, &changed)), None);
            }
            for len in 0..packet.len() {
                assert_eq!(parse(&master, &ends, &header, &packet[..len]), None);
            }
        }
    }
}
