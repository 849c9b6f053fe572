//! Captures: classic pcap files with RoCEv2 packets in Ethernet frames.
//!
//! A [`Writer`] synthesises frames around packets that went through a socket, so that Wireshark and
//! tshark show them. A [`Reader`] returns the packets of such a file, or of one that tcpdump wrote.

mod frame;
mod reader;
mod writer;

pub use reader::{Packet, ReadError, Reader};
pub use writer::Writer;

/// First word of a file whose times are in microseconds.
const MAGIC_MICROS: u32 = 0xa1b2_c3d4;
/// First word of a file whose times are in nanoseconds.
const MAGIC_NANOS: u32 = 0xa1b2_3c4d;
/// The link type of Ethernet.
const ETHERNET: u32 = 1;
/// Bytes of the header of the file.
const FILE_HEADER: usize = 24;
/// Bytes of the header of each frame.
const RECORD_HEADER: usize = 16;
const NANOS: u64 = 1_000_000_000;
