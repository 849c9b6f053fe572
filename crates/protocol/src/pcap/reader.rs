//! Reads the RoCEv2 packets of a capture.

use super::{ETHERNET, FILE_HEADER, MAGIC_MICROS, MAGIC_NANOS, NANOS, RECORD_HEADER, frame};
use crate::wire::icrc::Flow;

/// One RoCEv2 packet of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// When it was captured: nanoseconds since 1970.
    pub time_ns: u64,
    /// Addresses and ports.
    pub flow: Flow,
    /// The IPv4 identification; 0 over IPv6.
    pub ip_id: u16,
    /// The UDP payload: base transport header to ICRC.
    pub packet: &'a [u8],
}

/// Why a capture cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Not a classic pcap file.
    #[error("not a classic pcap file: it begins with {magic:#010x}; convert pcapng with `editcap -F pcap`")]
    Magic {
        /// The first four bytes as a little-endian number (0 if there are fewer).
        magic: u32,
    },
    /// Not a capture of Ethernet frames.
    #[error("the capture has link type {link}, not Ethernet (1): capture on one interface, not on `any`")]
    Link {
        /// The link type of the file.
        link: u32,
    },
    /// The file ends inside a frame.
    #[error("the file ends inside the frame at byte {offset}: the capture was cut short")]
    Cut {
        /// Where the frame's record begins.
        offset: usize,
    },
}

/// The RoCEv2 packets of a capture, in order. Frames that hold anything else, or not all of a
/// packet, are skipped.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    file: &'a [u8],
    offset: usize,
    big_endian: bool,
    /// Nanoseconds in a unit of the sub-second time field.
    unit: u64,
    skipped: usize,
}

impl<'a> Reader<'a> {
    /// Begins to read `file`, the bytes of a whole capture.
    pub fn new(file: &'a [u8]) -> Result<Self, ReadError> {
        let magic = word(file, 0, false).unwrap_or(0);
        let (big_endian, unit) = match (magic, magic.swap_bytes()) {
            (MAGIC_MICROS, _) => (false, 1000),
            (MAGIC_NANOS, _) => (false, 1),
            (_, MAGIC_MICROS) => (true, 1000),
            (_, MAGIC_NANOS) => (true, 1),
            _ => return Err(ReadError::Magic { magic }),
        };
        match word(file, 20, big_endian) {
            None => Err(ReadError::Cut { offset: 0 }),
            // The high half may say how long the frame check sequence is.
            Some(link) if link & 0xffff != ETHERNET => Err(ReadError::Link { link }),
            Some(_) => Ok(Self { file, offset: FILE_HEADER, big_endian, unit, skipped: 0 }),
        }
    }

    /// How many frames have been skipped so far.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// The time and the bytes of the next frame. None if the file ends inside it.
    fn frame(&mut self) -> Option<(u64, &'a [u8])> {
        let field = |index: usize| word(self.file, self.offset + 4 * index, self.big_endian);
        let time = u64::from(field(0)?) * NANOS + u64::from(field(1)?) * self.unit;
        let start = self.offset + RECORD_HEADER;
        let end = start.checked_add(usize::try_from(field(2)?).ok()?)?;
        let bytes = self.file.get(start..end)?;
        self.offset = end;
        Some((time, bytes))
    }
}

impl<'a> Iterator for Reader<'a> {
    type Item = Result<Packet<'a>, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.offset < self.file.len() {
            let offset = self.offset;
            let Some((time_ns, bytes)) = self.frame() else {
                self.offset = self.file.len();
                return Some(Err(ReadError::Cut { offset }));
            };
            match frame::parse(bytes) {
                Some((flow, ip_id, packet)) => return Some(Ok(Packet { time_ns, flow, ip_id, packet })),
                None => self.skipped += 1,
            }
        }
        None
    }
}

fn word(file: &[u8], offset: usize, big_endian: bool) -> Option<u32> {
    let bytes = *file.get(offset..)?.first_chunk()?;
    Some(if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_capture_says_so() {
        let pcapng = [0x0a, 0x0d, 0x0d, 0x0a];
        assert_eq!(Reader::new(&pcapng).unwrap_err(), ReadError::Magic { magic: 0x0a0d_0d0a });
        assert_eq!(Reader::new(&[]).unwrap_err(), ReadError::Magic { magic: 0 });
        let mut cooked = [0; FILE_HEADER];
        cooked[..4].copy_from_slice(&MAGIC_MICROS.to_be_bytes());
        cooked[23] = 113;
        assert_eq!(Reader::new(&cooked).unwrap_err(), ReadError::Link { link: 113 });
    }

    #[test]
    fn a_cut_file_ends_with_one_error() {
        let mut file = vec![0; FILE_HEADER + RECORD_HEADER + 10];
        file[..4].copy_from_slice(&MAGIC_NANOS.to_le_bytes());
        file[20] = 1;
        file[FILE_HEADER + 8] = 11;
        let items = Reader::new(&file).unwrap().collect::<Vec<_>>();
        assert_eq!(items, [Err(ReadError::Cut { offset: FILE_HEADER })]);
    }
}
