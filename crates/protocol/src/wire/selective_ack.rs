//! Selective acknowledgement: which packets behind a gap have arrived.
//!
//! The packet uses an opcode of the manufacturer-specific range of the standard, and is sent only
//! to a device that announced [`SELECTIVE`](super::Capabilities::SELECTIVE). Its first 12 bytes are
//! those of a BTH, whose PSN is the first one that has not arrived. A bitmap of whole words
//! follows: its bit `n`, counted from the lowest bit of the first word, stands for the `n`th PSN
//! after that.

use super::{DEFAULT_PKEY, ICRC_LEN, Psn, Qpn};

const OPCODE: u8 = 0xf5;
/// Bytes before the bitmap.
const FIXED: usize = 16;
const WORDS: usize = 32;

/// A selective acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectiveAck {
    /// The queue pair it goes to.
    pub to: Qpn,
    /// All packets before this one have arrived, and this one has not.
    pub missing: Psn,
    arrived: [u32; WORDS],
}

impl SelectiveAck {
    /// PSNs that the bitmap can name.
    pub const SPAN: u64 = 32 * WORDS as u64;
    /// The longest packet.
    pub const MAX_LEN: usize = FIXED + 4 * WORDS + ICRC_LEN;

    /// Nothing has arrived behind `missing`.
    pub const fn new(to: Qpn, missing: Psn) -> Self {
        Self { to, missing, arrived: [0; WORDS] }
    }

    /// Notes that the packet `ahead` PSNs after the missing one has arrived. Ignores what is out of
    /// reach.
    pub fn note(&mut self, ahead: u64) {
        if let Some((word, bit)) = place_of(ahead) {
            self.arrived[word] |= bit;
        }
    }

    /// Whether the packet `ahead` PSNs after the missing one has arrived.
    pub fn has(&self, ahead: u64) -> bool {
        place_of(ahead).is_some_and(|(word, bit)| self.arrived[word] & bit != 0)
    }

    /// The packets that have arrived, as distances from the missing one, in order.
    pub fn arrived(&self) -> impl Iterator<Item = u64> + '_ {
        let reach = 32 * self.words() as u64;
        (1..=reach).filter(|ahead| self.has(*ahead))
    }

    fn words(&self) -> usize {
        self.arrived.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1)
    }

    /// Bytes of the packet.
    #[allow(clippy::len_without_is_empty)] // a packet has a length
    pub fn len(&self) -> usize {
        FIXED + 4 * self.words() + ICRC_LEN
    }

    /// Writes all but the ICRC, if there is room for the packet.
    pub fn emit(&self, packet: &mut [u8]) {
        if packet.len() < self.len() {
            return;
        }
        let words = self.words();
        let (fixed, bitmap) = packet.split_at_mut(FIXED);
        fixed.fill(0);
        fixed[0] = OPCODE;
        fixed[2..4].copy_from_slice(&DEFAULT_PKEY.to_be_bytes());
        fixed[4..8].copy_from_slice(&self.to.get().to_be_bytes());
        fixed[8..12].copy_from_slice(&self.missing.get().to_be_bytes());
        fixed[12] = u8::try_from(words).unwrap_or(0);
        for (place, word) in bitmap.chunks_exact_mut(4).zip(&self.arrived[..words]) {
            place.copy_from_slice(&word.to_be_bytes());
        }
    }

    /// Reads a packet; any bytes may come, and the ICRC is not looked at.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        let word = |at: usize| packet.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let (to, missing) = (word(4)?, word(8)?);
        let words = usize::from(*packet.get(12)?);
        let fits = words <= WORDS && packet.len() == FIXED + 4 * words + ICRC_LEN;
        if *packet.first()? != OPCODE || to >> 24 != 0 || missing >> 24 != 0 || !fits {
            return None;
        }
        let mut ack = Self::new(Qpn::new(to), Psn::new(missing));
        for (index, into) in ack.arrived.iter_mut().enumerate().take(words) {
            *into = word(FIXED + 4 * index)?;
        }
        Some(ack)
    }
}

fn place_of(ahead: u64) -> Option<(usize, u32)> {
    let bit = ahead.checked_sub(1).filter(|bit| *bit < SelectiveAck::SPAN)?;
    Some((usize::try_from(bit / 32).ok()?, 1 << (bit % 32)))
}

#[cfg(test)]
mod tests {
    use super::super::{Header, Malformed, Marker, Presence};
    use super::*;

    fn ack(ahead: &[u64]) -> SelectiveAck {
        let mut ack = SelectiveAck::new(Qpn::new(0x2_0003), Psn::new(0xff_fffe));
        ahead.iter().for_each(|ahead| ack.note(*ahead));
        ack
    }

    #[test]
    fn it_is_read_as_it_was_written_and_is_nothing_else() {
        for ahead in [&[][..], &[1], &[1, 2, 33], &[32], &[1024], &[5, 900]] {
            let ack = ack(ahead);
            let mut packet = vec![0xee; ack.len()];
            ack.emit(&mut packet);
            assert_eq!(SelectiveAck::parse(&packet), Some(ack));
            assert_eq!(ack.arrived().collect::<Vec<_>>(), ahead);
            assert_eq!(Header::parse(&packet).map(|p| p.header), Err(Malformed::UnknownOpcode));
            assert_eq!((Marker::parse(&packet), Presence::parse(&packet)), (None, None));
            assert_eq!(u32::from(packet[5]), ack.to.get() >> 16, "it is steered as others are");
            for len in 0..packet.len() {
                assert_eq!(SelectiveAck::parse(&packet[..len]), None);
                ack.emit(&mut vec![0; len]);
            }
            packet[8] = 1;
            assert_eq!(SelectiveAck::parse(&packet), None, "a PSN has 24 bits");
        }
    }

    #[test]
    fn what_is_out_of_reach_is_not_noted() {
        assert_eq!(ack(&[0, 1025, u64::MAX]), ack(&[]));
        assert!(!ack(&[1]).has(0) && !ack(&[1]).has(u64::MAX));
        let mut packet = [0; SelectiveAck::MAX_LEN];
        packet[0] = OPCODE;
        packet[12] = 33;
        assert_eq!(SelectiveAck::parse(&packet), None, "longer than any");
    }
}
