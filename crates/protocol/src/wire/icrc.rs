//! The invariant CRC: what ends every packet and proves that it arrived as it was sent, under its
//! addresses.
//!
//! It is CRC-32/IEEE over a pseudo header (eight 0xff, the IP and UDP headers with everything a
//! router may change set to ones) and the packet, and is sent little-endian. Over IPv4 it covers
//! the identification field, which the receiver of a UDP socket never sees; but a CRC is linear, so
//! [`Flow::verify`] can solve for it. A packet whose identification was solved for is checked by 16
//! bits instead of 32: whether to take it is for [`IdPolicy`](super::IdPolicy) to say.

use std::net::{IpAddr, Ipv6Addr};

use super::{BTH_LEN, ICRC_LEN, gf};

/// Eight 0xff, the longest IP header we send, the UDP header and the base transport header.
const MAX_PREFIX: usize = 8 + 40 + UDP_LEN + BTH_LEN;
const UDP_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const UDP_PROTOCOL: u8 = 17;
/// The flags of every IPv4 packet of RoCEv2 senders: do not fragment.
const DONT_FRAGMENT: [u8; 2] = [0x40, 0x00];
/// Bytes of the pseudo header from the IPv4 identification on.
const FROM_ID: usize = 24;
/// Where in the base transport header the byte lies (congestion marks and reserved bits) that
/// counts as ones.
pub const MASKED: usize = 4;

/// The flow: all fields of the IP and UDP headers that the ICRC covers, except the length and the
/// identification.
///
/// IPv4 addresses in IPv6 clothes count as IPv4: that is how their packets look on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The sender's address.
    pub src: IpAddr,
    /// The receiver's address.
    pub dst: IpAddr,
    /// The sender's port.
    pub src_port: u16,
    /// The receiver's port.
    pub dst_port: u16,
}

/// What the check of an ICRC found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IcrcCheck {
    /// The packet is as it was sent.
    Valid {
        /// The IPv4 identification it was sent with, guessed or solved for. None over IPv6, which
        /// has none.
        ip_id: Option<u16>,
    },
    /// No identification makes the ICRC right: the packet was damaged or forged.
    Bad,
}

impl Flow {
    /// Whether packets of this flow are IPv4 packets.
    pub fn is_ipv4(&self) -> bool {
        self.addresses().is_ok()
    }

    /// The ICRC of a packet whose bytes from the base transport header to the padding are `body`.
    /// `ip_id` does not matter over IPv6.
    pub fn icrc(&self, ip_id: u16, body: &[u8]) -> u32 {
        let mut prefix = Prefix::new(self, ip_id, body.len());
        // The transport header goes along on the stack, because one of its bytes counts as ones.
        let (bth, rest) = body.split_at(body.len().min(BTH_LEN));
        let masked = prefix.len + MASKED;
        prefix.push(bth);
        if bth.len() > MASKED {
            prefix.bytes[masked] = 0xff;
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(prefix.bytes());
        hasher.update(rest);
        hasher.finalize()
    }

    /// Writes the ICRC into the last four bytes of `packet`, which runs from the base transport
    /// header to them. What is too short to be a packet stays as it is.
    pub fn close(&self, ip_id: u16, packet: &mut [u8]) {
        if let Some((body, icrc)) = split_mut(packet) {
            *icrc = self.icrc(ip_id, body).to_le_bytes();
        }
    }

    /// Checks the ICRC of `packet`, taking `ip_id_guess` for the identification first.
    pub fn verify(&self, ip_id_guess: u16, packet: &[u8]) -> IcrcCheck {
        let Some((body, sent)) = split(packet) else { return IcrcCheck::Bad };
        let difference = sent ^ self.icrc(ip_id_guess, body);
        judge(self.is_ipv4(), ip_id_guess, difference, || gf::backward(body.len() + FROM_ID))
    }

    /// Source and destination as the IP header has them: both as IPv4, or else both as IPv6.
    pub(crate) fn addresses(&self) -> Result<[[u8; 4]; 2], [[u8; 16]; 2]> {
        match (self.src.to_canonical(), self.dst.to_canonical()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Ok([src.octets(), dst.octets()]),
            (src, dst) => Err([src, dst].map(|address| in_ipv6(address).octets())),
        }
    }
}

/// A flow and a packet length, with all precomputed that they decide: closing or checking a packet
/// costs one pass over it and a few instructions, without copying any of it.
///
/// Making one costs as much as closing a few packets; keep it for as long as packets of that length
/// come.
#[derive(Clone, Copy, Debug)]
pub struct IcrcWriter {
    flow: Flow,
    ipv4: bool,
    packet_len: usize,
    /// CRC of the pseudo header with identification 0.
    start: u32,
    /// What it means for the ICRC that the masked byte is 0 and not 0xff.
    unmasked_zero: u32,
    /// Carries a change of the masked byte, in the top 8 bits, to the end of the packet.
    from_masked: u32,
    /// Carries a change of the identification, in the top 16 bits, to the end of the packet.
    from_id: u32,
    /// Carries a change of the ICRC back to the identification.
    to_id: u32,
}

impl IcrcWriter {
    /// Prepares for packets of `packet_len` bytes, from the base transport header to the ICRC
    /// included.
    pub fn new(flow: Flow, packet_len: usize) -> Self {
        let body_len = packet_len.saturating_sub(ICRC_LEN);
        // A register is changed at its low end, but multiplication is shortest from the top:
        // hence + 3 and + 2 bytes.
        let from_masked = gf::forward(body_len.saturating_sub(MASKED) + 3);
        Self {
            flow,
            ipv4: flow.is_ipv4(),
            packet_len,
            start: crc32fast::hash(Prefix::new(&flow, 0, body_len).bytes()),
            unmasked_zero: gf::mul(0xff << 24, from_masked),
            from_masked,
            from_id: gf::forward(body_len.saturating_add(FROM_ID + 2)),
            to_id: gf::backward(body_len.saturating_add(FROM_ID)),
        }
    }

    /// The flow it was made for.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// The packet length it was made for.
    pub fn packet_len(&self) -> usize {
        self.packet_len
    }

    /// As [`Flow::icrc`]. A body of another length than prepared for is served too, only slower.
    pub fn icrc(&self, ip_id: u16, body: &[u8]) -> u32 {
        if body.len() + ICRC_LEN != self.packet_len || body.len() < BTH_LEN {
            return self.flow.icrc(ip_id, body);
        }
        let mut hasher = crc32fast::Hasher::new_with_initial(self.start);
        hasher.update(body);
        self.finish(hasher.finalize(), body[MASKED], ip_id)
    }

    /// The CRC before the body's first byte, for callers that compute it while they build the body.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// The ICRC of a packet of the prepared length, from the plain CRC of its body (begun at
    /// [`Self::start`]) and the body's fifth byte, which counts as ones.
    pub fn finish(&self, crc: u32, masked: u8, ip_id: u16) -> u32 {
        let unmasked = match masked {
            0 => self.unmasked_zero,
            byte => gf::mul(u32::from(!byte) << 24, self.from_masked),
        };
        crc ^ unmasked ^ self.id_change(0, ip_id)
    }

    /// As [`Flow::close`].
    pub fn close(&self, ip_id: u16, packet: &mut [u8]) {
        if let Some((body, icrc)) = split_mut(packet) {
            *icrc = self.icrc(ip_id, body).to_le_bytes();
        }
    }

    /// As [`Flow::verify`].
    pub fn verify(&self, ip_id_guess: u16, packet: &[u8]) -> IcrcCheck {
        if packet.len() != self.packet_len {
            return self.flow.verify(ip_id_guess, packet);
        }
        let Some((body, sent)) = split(packet) else { return IcrcCheck::Bad };
        judge(self.ipv4, ip_id_guess, sent ^ self.icrc(ip_id_guess, body), || self.to_id)
    }

    /// As [`change_id`], for a packet of the prepared length; over IPv6 nothing changes.
    pub fn change_id(&self, crc: u32, from: u16, to: u16) -> u32 {
        crc ^ self.id_change(from, to)
    }

    fn id_change(&self, from: u16, to: u16) -> u32 {
        if self.ipv4 { gf::mul(u32::from((from ^ to).swap_bytes()) << 16, self.from_id) } else { 0 }
    }
}

/// The ICRC of an IPv4 packet with a body of `body_len` bytes after its identification went from
/// `from` to `to`.
pub fn change_id(crc: u32, body_len: usize, from: u16, to: u16) -> u32 {
    let change = u32::from((from ^ to).swap_bytes()) << 16;
    crc ^ gf::mul(change, gf::forward(body_len.saturating_add(FROM_ID + 2)))
}

/// Checks a packet by the `difference` between its ICRC and the one for the guessed identification.
fn judge(ipv4: bool, guess: u16, difference: u32, to_id: impl FnOnce() -> u32) -> IcrcCheck {
    match (ipv4, difference) {
        (false, 0) => IcrcCheck::Valid { ip_id: None },
        (false, _) => IcrcCheck::Bad,
        (true, 0) => IcrcCheck::Valid { ip_id: Some(guess) },
        // Carried back to where the identification enters the register, a difference that comes
        // from a wrong guess alone is the guess's error, in the 16 bits that enter next; any other
        // is anything.
        (true, _) => match u16::try_from(gf::mul(difference, to_id())) {
            Ok(error) => IcrcCheck::Valid { ip_id: Some(guess ^ error.swap_bytes()) },
            Err(_) => IcrcCheck::Bad,
        },
    }
}

/// A packet's body and its ICRC.
fn split(packet: &[u8]) -> Option<(&[u8], u32)> {
    let (body, icrc) = packet.split_last_chunk::<ICRC_LEN>()?;
    (body.len() >= BTH_LEN).then_some((body, u32::from_le_bytes(*icrc)))
}

fn split_mut(packet: &mut [u8]) -> Option<(&[u8], &mut [u8; ICRC_LEN])> {
    let (body, icrc) = packet.split_last_chunk_mut::<ICRC_LEN>()?;
    (body.len() >= BTH_LEN).then_some((&*body, icrc))
}

fn in_ipv6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// The pseudo header, built on the stack.
struct Prefix {
    bytes: [u8; MAX_PREFIX],
    len: usize,
}

impl Prefix {
    fn new(flow: &Flow, ip_id: u16, body_len: usize) -> Self {
        // No IP packet is longer than the largest number; such a body cannot be sent, and its ICRC
        // means nothing.
        let be = |len: usize| u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes();
        let udp_len = body_len.saturating_add(UDP_LEN + ICRC_LEN);
        let mut prefix = Self { bytes: [0xff; MAX_PREFIX], len: 8 };
        match flow.addresses() {
            Ok([src, dst]) => {
                prefix.push(&[0x45, 0xff]);
                prefix.push(&be(udp_len.saturating_add(IPV4_LEN)));
                prefix.push(&ip_id.to_be_bytes());
                prefix.push(&DONT_FRAGMENT);
                prefix.push(&[0xff, UDP_PROTOCOL, 0xff, 0xff]);
                prefix.push(&src);
                prefix.push(&dst);
            }
            Err([src, dst]) => {
                prefix.push(&[0x6f, 0xff, 0xff, 0xff]);
                prefix.push(&be(udp_len));
                prefix.push(&[UDP_PROTOCOL, 0xff]);
                prefix.push(&src);
                prefix.push(&dst);
            }
        }
        prefix.push(&flow.src_port.to_be_bytes());
        prefix.push(&flow.dst_port.to_be_bytes());
        prefix.push(&be(udp_len));
        prefix.push(&[0xff, 0xff]);
        prefix
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOW: Flow = Flow {
        src: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)),
        dst: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)),
        src_port: 0xc123,
        dst_port: 4791,
    };

    #[test]
    fn every_identification_is_solved_for() {
        let mut packet = [0x5a; 60];
        let icrc_writer = IcrcWriter::new(FLOW, packet.len());
        for id in 0..=u16::MAX {
            icrc_writer.close(id, &mut packet);
            assert_eq!(icrc_writer.verify(0x1234, &packet), IcrcCheck::Valid { ip_id: Some(id) });
        }
        assert_eq!(FLOW.verify(7, &packet), IcrcCheck::Valid { ip_id: Some(u16::MAX) });
    }

    #[test]
    fn congestion_marks_do_not_count() {
        let mut packet = [0; 48];
        FLOW.close(3, &mut packet);
        packet[MASKED] = 0xc0;
        assert_eq!(FLOW.verify(3, &packet), IcrcCheck::Valid { ip_id: Some(3) });
        assert_eq!(IcrcWriter::new(FLOW, 48).verify(3, &packet), IcrcCheck::Valid { ip_id: Some(3) });
    }

    #[test]
    fn ipv4_addresses_in_ipv6_clothes_are_ipv4() {
        let IpAddr::V4(src) = FLOW.src else { unreachable!() };
        let clothed = Flow { src: IpAddr::V6(src.to_ipv6_mapped()), ..FLOW };
        assert_eq!(clothed.icrc(9, &[1; 40]), FLOW.icrc(9, &[1; 40]));
    }

    #[test]
    fn what_is_too_short_is_bad_and_stays_as_it_is() {
        for len in 0..BTH_LEN + ICRC_LEN {
            let mut packet = vec![0; len];
            FLOW.close(0, &mut packet);
            IcrcWriter::new(FLOW, len).close(0, &mut packet);
            assert_eq!(packet, vec![0; len]);
            assert_eq!(FLOW.verify(0, &packet), IcrcCheck::Bad);
            assert_eq!(IcrcWriter::new(FLOW, len).verify(0, &packet), IcrcCheck::Bad);
        }
    }

    #[test]
    fn a_packet_too_long_for_ip_does_not_panic() {
        let mut packet = vec![0; 70_000];
        IcrcWriter::new(FLOW, packet.len()).close(1, &mut packet);
        assert_eq!(FLOW.verify(1, &packet), IcrcCheck::Valid { ip_id: Some(1) });
    }
}
