//! Writes packets into a capture, with synthetic frames around them.

use std::io::{self, Write};

use super::{ETHERNET, FILE_HEADER, MAGIC_NANOS, NANOS, RECORD_HEADER, frame};
use crate::wire::icrc::Flow;

/// No frame is longer; tells readers that none was cut.
const SNAP_LEN: u32 = 0x0004_0000;
/// The longest headers in front of a packet: the record's, Ethernet, IPv6, UDP.
const MAX_HEADERS: usize = RECORD_HEADER + 14 + 40 + 8;

/// Writes a capture with times in nanoseconds.
///
/// Each packet is two writes: put a buffered writer underneath, and flush it where that matters.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: W,
    /// Record, Ethernet, IP and UDP headers; kept so that a packet costs no allocation.
    headers: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins a capture: writes the header of the file.
    pub fn new(mut out: W) -> io::Result<Self> {
        let mut header = Vec::with_capacity(FILE_HEADER);
        header.extend_from_slice(&MAGIC_NANOS.to_le_bytes());
        header.extend_from_slice(&2_u16.to_le_bytes()); // version 2.4
        header.extend_from_slice(&4_u16.to_le_bytes());
        header.extend_from_slice(&[0; 8]); // time zone and accuracy: unused
        header.extend_from_slice(&SNAP_LEN.to_le_bytes());
        header.extend_from_slice(&ETHERNET.to_le_bytes());
        out.write_all(&header)?;
        Ok(Self { out, headers: Vec::with_capacity(MAX_HEADERS) })
    }

    /// Writes one packet (base transport header to ICRC) that was sent or received `time_ns`
    /// nanoseconds after 1970.
    ///
    /// `ip_id` is the identification that its ICRC covers; it is ignored over IPv6. A packet longer
    /// than an IP packet can be is refused with [`io::ErrorKind::InvalidInput`].
    pub fn write_packet(&mut self, time_ns: u64, flow: &Flow, ip_id: u16, packet: &[u8]) -> io::Result<()> {
        self.headers.clear();
        self.headers.extend_from_slice(&[0; RECORD_HEADER]);
        let too_long = || {
            let text = format!("a packet of {} bytes does not fit into an IP packet", packet.len());
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        frame::emit(&mut self.headers, flow, ip_id, packet).ok_or_else(too_long)?;
        let len = u32::try_from(self.headers.len() - RECORD_HEADER + packet.len()).map_err(|_| too_long())?;
        // The format's seconds are 32 bits wide: they wrap in 2106.
        let seconds = u32::try_from((time_ns / NANOS) & u64::from(u32::MAX)).unwrap_or(0);
        let nanos = u32::try_from(time_ns % NANOS).unwrap_or(0);
        for (place, field) in self.headers.chunks_exact_mut(4).zip([seconds, nanos, len, len]) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        self.out.write_all(&self.headers)?;
        self.out.write_all(packet)
    }

    /// Flushes the underlying writer.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Ends the capture and gives the underlying writer back.
    pub fn into_inner(self) -> W {
        self.out
    }
}
