//! The headers of one packet, as bytes and as meaning.

use std::ops::Range;

use super::{BTH_LEN, DEFAULT_PKEY, ICRC_LEN, Malformed, Opcode, Psn, Qpn, Service};

/// Bytes of the extended header that names a shared receive queue.
const XRCETH_LEN: usize = 4;

/// Datagram extended header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Deth {
    /// Queue key: the receiver takes only datagrams with its own.
    pub qkey: u32,
    /// The queue pair it comes from. On XRC: the number of the receiver's shared receive queue.
    pub source: Qpn,
}

/// Flush extended header: how far bytes must have come, and which ones. (One byte: the size of a
/// [`Header`] counts in every packet.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Feth(u8);

impl Feth {
    /// Placement type: visible to all who can access the memory.
    pub const GLOBAL: u8 = 1;
    /// Placement type: kept when the power fails.
    pub const PERSISTENT: u8 = 2;
    /// All placement types.
    pub const ALL: u8 = Self::GLOBAL | Self::PERSISTENT;
    /// Selectivity level: the range alone.
    pub const RANGE: u8 = 0;
    /// Selectivity level: the whole region.
    pub const REGION: u8 = 1;

    /// Of a placement type (4 bits) and a selectivity level (2 bits).
    pub const fn new(placement: u8, selectivity: u8) -> Self {
        Self((selectivity & 3) << 4 | placement & 0xf)
    }

    /// Placement type: bit 0 global visibility, bit 1 persistence.
    pub const fn placement(self) -> u8 {
        self.0 & 0xf
    }

    /// Selectivity level: 0 the range of the RETH, 1 the whole region.
    pub const fn selectivity(self) -> u8 {
        self.0 >> 4
    }
}

/// RDMA extended header: the remote memory of a WRITE or READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Reth {
    /// Remote virtual address.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub len: u32,
}

/// Atomic extended header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AtomicEth {
    /// Remote virtual address, a multiple of 8.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// The value to store (compare-and-swap) or to add (fetch-and-add).
    pub swap_or_add: u64,
    /// The value to compare with.
    pub compare: u64,
}

/// What an acknowledgement says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// Positive, with the 5-bit credit count (31: credits are not used).
    Ack(u8),
    /// The receiver was not ready: the 5-bit timer code.
    RnrNak(u8),
    /// Negative, with the 5-bit code as the wire has it (0 PSN sequence error, 1 invalid request, 2
    /// remote access error, 3 remote operational error, 4 invalid RD request).
    Nak(u8),
    /// Reserved by the standard: the raw syndrome byte.
    Reserved(u8),
}

/// Acknowledge extended header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// The syndrome: ACK, RNR NAK or NAK.
    pub syndrome: Syndrome,
    /// Message sequence number, 24 bits.
    pub msn: u32,
}

/// The headers of a packet. Which of the optional ones are present is decided by the opcode alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the packet is.
    pub opcode: Opcode,
    /// Solicited event bit.
    pub solicited: bool,
    /// The sender asks for an acknowledgement.
    pub ack_req: bool,
    /// Bytes of padding after the payload, 0..=3.
    pub pad: u8,
    /// Partition key.
    pub pkey: u16,
    /// The queue pair it is for.
    pub dest_qpn: Qpn,
    /// Packet sequence number.
    pub psn: Psn,
    /// With [`Opcode::has_deth`].
    pub deth: Deth,
    /// A packet of an extended reliable connection (XRC), whose opcodes are those of the reliable
    /// connection.
    pub xrc: bool,
    /// With [`Opcode::has_feth`].
    pub feth: Feth,
    /// With [`Opcode::has_reth`].
    pub reth: Reth,
    /// With [`Opcode::has_atomic`].
    pub atomic: AtomicEth,
    /// With [`Opcode::has_aeth`].
    pub aeth: Aeth,
    /// With [`Opcode::has_immediate`]: immediate data as a number (big-endian on the wire).
    pub immediate: u32,
    /// With [`Opcode::has_invalidate`]: the key to invalidate.
    pub invalidate: u32,
    /// With [`Opcode::has_atomic_ack`]: the value before the operation.
    pub original: u64,
}

/// A parsed packet: its headers, and where in the datagram its payload lies (padding and ICRC left
/// out).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// The headers.
    pub header: Header,
    /// The payload's place in the datagram.
    pub payload: Range<usize>,
}

impl Syndrome {
    /// Reads the syndrome byte of an AETH.
    pub const fn from_byte(byte: u8) -> Self {
        let value = byte & 0x1f;
        match byte >> 5 {
            0b000 => Self::Ack(value),
            0b001 => Self::RnrNak(value),
            0b011 => Self::Nak(value),
            _ => Self::Reserved(byte),
        }
    }

    /// The syndrome byte of an AETH; of a value wider than its field the low bits are taken.
    pub const fn to_byte(self) -> u8 {
        match self {
            Self::Ack(credits) => credits & 0x1f,
            Self::RnrNak(timer) => 0x20 | (timer & 0x1f),
            Self::Nak(code) => 0x60 | (code & 0x1f),
            Self::Reserved(byte) => byte,
        }
    }
}

impl Default for Aeth {
    /// An acknowledgement that gives no credits away and counts no message.
    fn default() -> Self {
        Self { syndrome: Syndrome::Ack(31), msn: 0 }
    }
}

impl Header {
    /// Whether more of the same WRITE follows, although this packet is a WRITE of its own. Says so
    /// by the solicited event bit, which has no meaning there and which other adapters ignore.
    pub fn is_split(&self) -> bool {
        self.solicited && self.opcode == Opcode::WriteOnly
    }

    /// A header with nothing set but these three and the default partition key.
    pub fn new(opcode: Opcode, dest_qpn: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            ack_req: false,
            pad: 0,
            pkey: DEFAULT_PKEY,
            dest_qpn,
            psn,
            deth: Deth::default(),
            xrc: false,
            feth: Feth::default(),
            reth: Reth::default(),
            atomic: AtomicEth::default(),
            aeth: Aeth::default(),
            immediate: 0,
            invalidate: 0,
            original: 0,
        }
    }

    /// Reads a packet: a UDP payload from the base transport header to the ICRC, which is not
    /// checked here (see [`icrc`](super::icrc)).
    ///
    /// Reserved bits, the migration bit and the congestion marks are ignored, as the standard asks
    /// of a receiver.
    pub fn parse(datagram: &[u8]) -> Result<Parsed, Malformed> {
        let Some(body_len) = datagram.len().checked_sub(ICRC_LEN) else { return Err(Malformed::TooShort) };
        let Some((bth, mut rest)) = datagram[..body_len].split_first_chunk::<BTH_LEN>() else {
            return Err(Malformed::TooShort);
        };
        // What the packet *is* comes before what is wrong inside it: the cause counted is then the
        // useful one.
        if bth[1] & 0x0f != 0 {
            return Err(Malformed::TransportVersion);
        }
        let xrc = bth[0] & 0xe0 == Service::XRC_BITS;
        let number = if xrc { bth[0] & 0x1f } else { bth[0] };
        let Some(opcode) = Opcode::from_byte(number) else { return Err(Malformed::UnknownOpcode) };
        let pkey = u16::from_be_bytes([bth[2], bth[3]]);
        if pkey & 0x7fff != DEFAULT_PKEY & 0x7fff {
            return Err(Malformed::PartitionKey);
        }
        let pad = (bth[1] >> 4) & 3;
        let mut header = Self {
            solicited: bth[1] & 0x80 != 0,
            ack_req: bth[8] & 0x80 != 0,
            pad,
            pkey,
            xrc,
            ..Self::new(opcode, Qpn::new(be24(&bth[5..8])), Psn::new(be24(&bth[9..12])))
        };
        header.parse_extensions(&mut rest).ok_or(Malformed::TruncatedHeaders)?;
        let Some(payload_len) = rest.len().checked_sub(usize::from(pad)) else {
            return Err(Malformed::Padding);
        };
        if !opcode.has_payload() && !rest.is_empty() {
            return Err(Malformed::UnexpectedPayload);
        }
        let start = body_len - rest.len();
        Ok(Parsed { header, payload: start..start + payload_len })
    }

    /// Bytes of the base transport header and the extension headers together.
    #[allow(clippy::len_without_is_empty)] // a header is never empty
    #[inline]
    pub fn len(&self) -> usize {
        self.opcode.header_len() + if self.has_xrceth() { XRCETH_LEN } else { 0 }
    }

    /// Whether the packet names a shared receive queue.
    #[inline]
    pub fn has_xrceth(&self) -> bool {
        self.xrc && self.opcode.names_srq()
    }

    /// With [`Header::has_xrceth`]: the number of the receiver's shared receive queue. (It has the
    /// place of what only datagrams carry.)
    pub fn xrc_srq(&self) -> u32 {
        self.deth.source.get() & 0xff_ffff
    }

    /// Whether a queue pair of this service takes such packets.
    #[inline]
    pub fn is_for(&self, service: Service) -> bool {
        match service {
            Service::XrcInitiator => self.xrc && self.opcode.is_response(),
            Service::XrcTarget => self.xrc && !self.opcode.is_response(),
            _ => !self.xrc && self.opcode.service() == service,
        }
    }

    /// Writes the headers to the front of `out` and says how many bytes they took: [`Header::len`],
    /// or 0 (and nothing is written) if `out` is too short. Numbers wider than their field lose
    /// their high bits.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let len = self.len();
        let Some(out) = out.get_mut(..len) else { return 0 };
        let Some((bth, extensions)) = out.split_first_chunk_mut::<BTH_LEN>() else { return 0 };
        // Store whole words: the CRC reads words next. Reading a word back after single-byte stores
        // would cause a store-forwarding stall.
        let flags = (u32::from(self.solicited) << 7) | (u32::from(self.pad & 3) << 4);
        let words = [
            u32::from(self.opcode.to_byte() | if self.xrc { Service::XRC_BITS } else { 0 }) << 24
                | flags << 16
                | u32::from(self.pkey),
            self.dest_qpn.get() & 0xff_ffff,
            u32::from(self.ack_req) << 31 | self.psn.get() & 0xff_ffff,
        ];
        for (place, word) in bth.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        self.emit_extensions(extensions);
        len
    }

    /// Reads the extension headers of `self.opcode`, taking them off `rest`. None if they do not
    /// fit.
    fn parse_extensions(&mut self, rest: &mut &[u8]) -> Option<()> {
        let opcode = self.opcode;
        if opcode.has_deth() {
            self.deth = Deth { qkey: take_u32(rest)?, source: Qpn::new(take_u32(rest)?) };
        }
        if self.has_xrceth() {
            self.deth.source = Qpn::new(take_u32(rest)? & 0xff_ffff);
        }
        if opcode.has_feth() {
            let [.., low] = take_u32(rest)?.to_be_bytes();
            self.feth = Feth(low & 0x3f);
        }
        if opcode.has_reth() {
            self.reth = Reth { addr: take_u64(rest)?, rkey: take_u32(rest)?, len: take_u32(rest)? };
        }
        if opcode.has_atomic() {
            self.atomic = AtomicEth {
                addr: take_u64(rest)?,
                rkey: take_u32(rest)?,
                swap_or_add: take_u64(rest)?,
                compare: take_u64(rest)?,
            };
        }
        if opcode.has_aeth() {
            let [syndrome, msn @ ..] = take_u32(rest)?.to_be_bytes();
            self.aeth = Aeth { syndrome: Syndrome::from_byte(syndrome), msn: be24(&msn) };
        }
        if opcode.has_atomic_ack() {
            self.original = take_u64(rest)?;
        }
        if opcode.has_immediate() {
            self.immediate = take_u32(rest)?;
        }
        if opcode.has_invalidate() {
            self.invalidate = take_u32(rest)?;
        }
        Some(())
    }

    /// Writes the extension headers of `self.opcode` to `out`, in the order they are parsed in.
    fn emit_extensions(&self, mut out: &mut [u8]) {
        let opcode = self.opcode;
        if opcode.has_deth() {
            put(&mut out, self.deth.qkey.to_be_bytes());
            put(&mut out, self.deth.source.get().to_be_bytes());
        }
        if self.has_xrceth() {
            put(&mut out, self.xrc_srq().to_be_bytes());
        }
        if opcode.has_feth() {
            put(&mut out, u32::from(self.feth.0).to_be_bytes());
        }
        if opcode.has_reth() {
            put(&mut out, self.reth.addr.to_be_bytes());
            put(&mut out, self.reth.rkey.to_be_bytes());
            put(&mut out, self.reth.len.to_be_bytes());
        }
        if opcode.has_atomic() {
            put(&mut out, self.atomic.addr.to_be_bytes());
            put(&mut out, self.atomic.rkey.to_be_bytes());
            put(&mut out, self.atomic.swap_or_add.to_be_bytes());
            put(&mut out, self.atomic.compare.to_be_bytes());
        }
        if opcode.has_aeth() {
            let [_, high, mid, low] = self.aeth.msn.to_be_bytes();
            put(&mut out, [self.aeth.syndrome.to_byte(), high, mid, low]);
        }
        if opcode.has_atomic_ack() {
            put(&mut out, self.original.to_be_bytes());
        }
        if opcode.has_immediate() {
            put(&mut out, self.immediate.to_be_bytes());
        }
        if opcode.has_invalidate() {
            put(&mut out, self.invalidate.to_be_bytes());
        }
    }
}

/// The big-endian number in the first three bytes; bytes that are not there count as 0.
fn be24(bytes: &[u8]) -> u32 {
    bytes.iter().take(3).fold(0, |number, byte| (number << 8) | u32::from(*byte))
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    let (bytes, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u32::from_be_bytes(*bytes))
}

fn take_u64(rest: &mut &[u8]) -> Option<u64> {
    let (bytes, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u64::from_be_bytes(*bytes))
}

/// Writes `bytes` to the front of `out` and moves `out` past them; nothing happens if they do not
/// fit, which the length check in [`Header::emit`] rules out.
fn put<const N: usize>(out: &mut &mut [u8], bytes: [u8; N]) {
    if let Some((front, after)) = std::mem::take(out).split_first_chunk_mut() {
        *front = bytes;
        *out = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A WRITE ONLY of three bytes, byte by byte.
    const WRITE: [u8; 36] = [
        0x0a, 0x90, 0xff, 0xff, 0x00, 0x01, 0x02, 0x03, 0x80, 0xaa, 0xbb,
        0xcc, // BTH: solicited, pad 1, AckReq
        0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24, 0x00, 0x00, 0x00,
        0x03, // RETH
        b'a', b'b', b'c', 0x00, // payload and pad
        0xde, 0xad, 0xbe, 0xef, // ICRC
    ];

    #[test]
    fn a_write_is_read_field_by_field() {
        let parsed = Header::parse(&WRITE).unwrap();
        assert_eq!(parsed.payload, 28..31);
        let want = Header {
            solicited: true,
            ack_req: true,
            pad: 1,
            reth: Reth { addr: 0x1112_1314_1516_1718, rkey: 0x2122_2324, len: 3 },
            ..Header::new(Opcode::WriteOnly, Qpn::new(0x0001_0203), Psn::new(0x00aa_bbcc))
        };
        assert_eq!(parsed.header, want);
        let mut out = [0; 28];
        assert_eq!(want.emit(&mut out), 28);
        assert_eq!(out, WRITE[..28]);
    }

    #[test]
    fn every_cause_is_found() {
        let with = |at: usize, byte: u8| {
            let mut packet = WRITE;
            packet[at] = byte;
            Header::parse(&packet).unwrap_err()
        };
        assert_eq!(Header::parse(&WRITE[..15]).unwrap_err(), Malformed::TooShort);
        assert_eq!(Header::parse(&[]).unwrap_err(), Malformed::TooShort);
        assert_eq!(with(1, 0x91), Malformed::TransportVersion);
        assert_eq!(with(0, 0x15), Malformed::UnknownOpcode);
        assert_eq!(with(0, 0x2c), Malformed::UnknownOpcode);
        assert_eq!(with(0, 0x66), Malformed::UnknownOpcode);
        assert_eq!(with(3, 0xfe), Malformed::PartitionKey);
        assert_eq!(Header::parse(&WRITE[..31]).unwrap_err(), Malformed::TruncatedHeaders);
        assert_eq!(Header::parse(&WRITE[..32]).unwrap_err(), Malformed::Padding);
        assert_eq!(with(0, 0x0c), Malformed::UnexpectedPayload);
    }

    #[test]
    fn a_datagram_is_read_field_by_field() {
        let packet = [
            0x65, 0x30, 0xff, 0xff, 0x00, 0x01, 0x02, 0x03, 0x00, 0xaa, 0xbb, 0xcc, // BTH: pad 3
            0x11, 0x11, 0x22, 0x22, 0xee, 0x0a, 0x0b,
            0x0c, // DETH: the high byte of the source is reserved
            0x00, 0x00, 0x00, 0x07, // immediate data
            b'a', 0x00, 0x00, 0x00, // payload and pad
            0xde, 0xad, 0xbe, 0xef, // ICRC
        ];
        let parsed = Header::parse(&packet).unwrap();
        assert_eq!(parsed.payload, 24..25);
        let want = Header {
            pad: 3,
            deth: Deth { qkey: 0x1111_2222, source: Qpn::new(0x000a_0b0c) },
            immediate: 7,
            ..Header::new(Opcode::UdSendOnlyImm, Qpn::new(0x0001_0203), Psn::new(0x00aa_bbcc))
        };
        assert_eq!(parsed.header, want);
        assert_eq!(Header::parse(&packet[..27]).unwrap_err(), Malformed::TruncatedHeaders);
    }

    #[test]
    fn a_limited_member_of_the_default_partition_is_heard() {
        let mut packet = WRITE;
        packet[2] = 0x7f;
        assert_eq!(Header::parse(&packet).unwrap().header.pkey, 0x7fff);
    }

    #[test]
    fn every_syndrome_byte_survives() {
        for byte in 0..=u8::MAX {
            assert_eq!(Syndrome::from_byte(byte).to_byte(), byte);
        }
    }

    #[test]
    fn emit_leaves_a_short_buffer_alone() {
        let header = Header::new(Opcode::FetchAdd, Qpn::new(1), Psn::new(2));
        let mut out = [7; 39];
        assert_eq!(header.emit(&mut out), 0);
        assert_eq!(out, [7; 39]);
    }
}
