//! Markers: packets of our own between devices on one machine, where nothing is acknowledged.
//!
//! A marker follows other packets; the receiver echoes it at once. Its return proves that the
//! receiver has processed the marker and all packets before it. Markers use opcodes of the
//! manufacturer-specific range of the standard.

use super::{DEFAULT_PKEY, ICRC_LEN, Qpn};

/// A marker on its way there or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marker {
    /// Whether it is on its way back.
    pub returns: bool,
    /// The queue pair it goes to.
    pub to: Qpn,
    /// The queue pair it comes from.
    pub from: Qpn,
    /// Its number.
    pub number: u32,
}

const THERE: u8 = 0xf0;
const BACK: u8 = 0xf1;
/// Bytes before the ICRC.
const BODY: usize = 20;

impl Marker {
    /// Bytes of the packet.
    pub const LEN: usize = BODY + ICRC_LEN;

    /// The same marker on its way back.
    #[must_use]
    pub fn returned(self) -> Self {
        Self { returns: true, to: self.from, from: self.to, ..self }
    }

    /// Writes all but the ICRC.
    pub fn emit(&self, packet: &mut [u8]) {
        let Some((body, _)) = packet.split_first_chunk_mut::<BODY>() else { return };
        body.fill(0);
        body[0] = if self.returns { BACK } else { THERE };
        body[2..4].copy_from_slice(&DEFAULT_PKEY.to_be_bytes());
        body[4..8].copy_from_slice(&self.to.get().to_be_bytes());
        body[12..16].copy_from_slice(&self.from.get().to_be_bytes());
        body[16..20].copy_from_slice(&self.number.to_be_bytes());
    }

    /// Reads a packet; any bytes may come, and the ICRC is not looked at.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        let word = |at: usize| packet.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let returns = match *packet.first()? {
            THERE => false,
            BACK => true,
            _ => return None,
        };
        let (to, from, number) = (word(4)?, word(12)?, word(16)?);
        let is_one = packet.len() == Self::LEN && to >> 24 == 0 && from >> 24 == 0;
        is_one.then(|| Self { returns, to: Qpn::new(to), from: Qpn::new(from), number })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Header, Malformed};
    use super::*;

    #[test]
    fn a_marker_is_read_as_it_was_written_and_is_nothing_else() {
        let there =
            Marker { returns: false, to: Qpn::new(0x2_0003), from: Qpn::new(0x5_0007), number: 0x89ab_cdef };
        for marker in [there, there.returned()] {
            let mut packet = [0xee; Marker::LEN];
            marker.emit(&mut packet);
            assert_eq!(Marker::parse(&packet), Some(marker));
            assert_eq!(Header::parse(&packet).map(|p| p.header), Err(Malformed::UnknownOpcode));
            assert_eq!(
                packet[5],
                u8::try_from(marker.to.get() >> 16).unwrap(),
                "it is steered as others are"
            );
            for len in 0..Marker::LEN {
                assert_eq!(Marker::parse(&packet[..len]), None);
            }
            packet[4] = 1;
            assert_eq!(Marker::parse(&packet), None);
        }
        assert_eq!((there.returned().to, there.returned().from), (there.from, there.to));
    }
}
