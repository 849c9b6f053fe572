//! Presence: a request of our own to another nobounce device, and its answer. Each tells the
//! version and the capabilities of its sender, and which opening of the device it is.
//!
//! The packets use opcodes of the manufacturer-specific range of the standard. Other RoCE devices
//! drop them, so that a device without an answer is one of theirs. Later versions append fields:
//! what follows the known ones is ignored. Both ends use the lower version and the capabilities
//! that both have.

use super::{DEFAULT_PKEY, ICRC_LEN, Qpn};

const REQUEST: u8 = 0xf3;
const ANSWER: u8 = 0xf4;
/// Bytes before the ICRC, in version 1.
const BODY: usize = 40;

/// A request or its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Presence {
    /// Whether it answers a request.
    pub is_answer: bool,
    /// The queue pair it goes to.
    pub to: Qpn,
    /// The queue pair it comes from.
    pub from: Qpn,
    /// Of its sender.
    pub version: u8,
    /// Chosen by the sender of the request: an answer without it is forged.
    pub nonce: u32,
    /// Another number means that the process or its device was started anew.
    pub generation: u64,
    /// Bits of [`Capabilities`].
    pub capabilities: u64,
    /// KiB of the sender's socket buffer, kernel overhead included; 0: unknown.
    pub receive_room: u16,
}

/// What a device can do besides the standard.
#[derive(Debug)]
pub struct Capabilities;

impl Capabilities {
    /// It answers requests: the asking device knows that it lives.
    pub const KEEP_ALIVE: u64 = 1;
    /// Its generation numbers are unique.
    pub const GENERATIONS: u64 = 1 << 1;
    /// Its queue pairs answer 16 READs and atomics at a time, also where their attributes say less.
    pub const RESPONDER_RESOURCES: u64 = 1 << 2;
    /// Its reliable queue pairs keep packets that arrive behind a gap, and send and obey
    /// [`SelectiveAck`](super::SelectiveAck)s.
    pub const SELECTIVE: u64 = 1 << 3;
    /// All that this version has.
    pub const OURS: u64 = Self::KEEP_ALIVE | Self::GENERATIONS | Self::RESPONDER_RESOURCES | Self::SELECTIVE;
}

impl Presence {
    /// The version of this implementation.
    pub const VERSION: u8 = 1;
    /// Bytes of the packet.
    pub const LEN: usize = BODY + ICRC_LEN;

    /// The answer to a request, from a device of that generation, capabilities and receive room.
    #[must_use]
    pub fn answer(&self, generation: u64, capabilities: u64, receive_room: u16) -> Self {
        Self {
            is_answer: true,
            to: self.from,
            from: self.to,
            version: Self::VERSION,
            nonce: self.nonce,
            generation,
            capabilities,
            receive_room,
        }
    }

    /// Writes all but the ICRC.
    pub fn emit(&self, packet: &mut [u8]) {
        let Some((body, _)) = packet.split_first_chunk_mut::<BODY>() else { return };
        body.fill(0);
        body[0] = if self.is_answer { ANSWER } else { REQUEST };
        body[2..4].copy_from_slice(&DEFAULT_PKEY.to_be_bytes());
        body[4..8].copy_from_slice(&self.to.get().to_be_bytes());
        body[12..16].copy_from_slice(&self.from.get().to_be_bytes());
        body[16] = self.version;
        body[18..20].copy_from_slice(&self.receive_room.to_be_bytes());
        body[20..24].copy_from_slice(&self.nonce.to_be_bytes());
        body[24..32].copy_from_slice(&self.generation.to_be_bytes());
        body[32..40].copy_from_slice(&self.capabilities.to_be_bytes());
    }

    /// Reads a packet; any bytes may come, and the ICRC is not looked at.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        let is_answer = match *packet.first()? {
            REQUEST => false,
            ANSWER => true,
            _ => return None,
        };
        if packet.len() < Self::LEN {
            return None;
        }
        let body = packet.first_chunk::<BODY>()?;
        let word = |at: usize| u32::from_be_bytes([body[at], body[at + 1], body[at + 2], body[at + 3]]);
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
        let (to, from, version) = (word(4), word(12), body[16]);
        let is_one = to >> 24 == 0 && from >> 24 == 0 && version > 0;
        is_one.then(|| Self {
            is_answer,
            to: Qpn::new(to),
            from: Qpn::new(from),
            version,
            nonce: word(20),
            generation: long(24),
            capabilities: long(32),
            receive_room: u16::from_be_bytes([body[18], body[19]]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Header, Malformed, Marker};
    use super::*;

    fn request() -> Presence {
        Presence {
            is_answer: false,
            to: Qpn::new(0x2_0003),
            from: Qpn::new(0x5_0007),
            version: 1,
            nonce: 0x89ab_cdef,
            generation: 0x0123_4567_89ab_cdef,
            capabilities: Capabilities::OURS,
            receive_room: 4096,
        }
    }

    #[test]
    fn it_is_read_as_it_was_written_and_is_nothing_else() {
        for presence in [request(), request().answer(77, Capabilities::KEEP_ALIVE, 416)] {
            let mut packet = [0xee; Presence::LEN];
            presence.emit(&mut packet);
            assert_eq!(Presence::parse(&packet), Some(presence));
            assert_eq!(Header::parse(&packet).map(|p| p.header), Err(Malformed::UnknownOpcode));
            assert_eq!(Marker::parse(&packet), None);
            assert_eq!(u32::from(packet[5]), presence.to.get() >> 16, "it is steered as others are");
            for len in 0..Presence::LEN {
                assert_eq!(Presence::parse(&packet[..len]), None);
            }
            packet[4] = 1;
            assert_eq!(Presence::parse(&packet), None);
        }
        let answer = request().answer(77, Capabilities::KEEP_ALIVE, 416);
        assert_eq!((answer.to, answer.from, answer.nonce), (request().from, request().to, request().nonce));
    }

    /// A later version has more fields, and is understood as far as this one goes.
    #[test]
    fn a_longer_packet_of_a_later_version_is_read() {
        let mut packet = [0xee; Presence::LEN + 24];
        let later = Presence { version: 9, capabilities: u64::MAX, ..request() };
        later.emit(&mut packet);
        assert_eq!(Presence::parse(&packet), Some(later));
        packet[16] = 0;
        assert_eq!(Presence::parse(&packet), None, "there is no version 0");
    }
}
