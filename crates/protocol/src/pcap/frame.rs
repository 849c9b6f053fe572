//! One Ethernet frame around a RoCEv2 packet.

use std::net::IpAddr;

use crate::wire::ROCE_PORT;
use crate::wire::icrc::Flow;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const UDP: u8 = 17;
const UDP_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const HOP_LIMIT: u8 = 64;
/// Made-up addresses, marked as locally administered: a socket shows none.
const MACS: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

/// The flow, the IPv4 identification (0 over IPv6) and the UDP payload of a frame, if it holds a
/// whole RoCEv2 packet.
pub(super) fn parse(frame: &[u8]) -> Option<(Flow, u16, &[u8])> {
    let mut rest = frame.get(12..)?;
    let mut ethertype = take_u16(&mut rest)?;
    if ethertype == ETHERTYPE_VLAN {
        take_u16(&mut rest)?;
        ethertype = take_u16(&mut rest)?;
    }
    match ethertype {
        ETHERTYPE_IPV4 => parse_ipv4(rest),
        ETHERTYPE_IPV6 => parse_ipv6(rest),
        _ => None,
    }
}

fn parse_ipv4(ip: &[u8]) -> Option<(Flow, u16, &[u8])> {
    let (header, _) = ip.split_first_chunk::<IPV4_LEN>()?;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    // RoCEv2 senders use no options and never fragment (the ICRC would not survive either).
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
    if header[0] != 0x45 || header[9] != UDP || fragment != 0 {
        return None;
    }
    let address = |at: usize| IpAddr::from([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let id = u16::from_be_bytes([header[4], header[5]]);
    let (flow, packet) = parse_udp(address(12), address(16), ip.get(IPV4_LEN..total)?)?;
    Some((flow, id, packet))
}

fn parse_ipv6(ip: &[u8]) -> Option<(Flow, u16, &[u8])> {
    let (fixed, rest) = ip.split_first_chunk::<8>()?;
    let (src, rest) = rest.split_first_chunk::<16>()?;
    let (dst, rest) = rest.split_first_chunk::<16>()?;
    if fixed[0] >> 4 != 6 || fixed[6] != UDP {
        return None;
    }
    let len = usize::from(u16::from_be_bytes([fixed[4], fixed[5]]));
    let (flow, packet) = parse_udp(IpAddr::from(*src), IpAddr::from(*dst), rest.get(..len)?)?;
    Some((flow, 0, packet))
}

fn parse_udp(src: IpAddr, dst: IpAddr, mut udp: &[u8]) -> Option<(Flow, &[u8])> {
    let whole = udp.len();
    let (src_port, dst_port) = (take_u16(&mut udp)?, take_u16(&mut udp)?);
    let (len, _checksum) = (usize::from(take_u16(&mut udp)?), take_u16(&mut udp)?);
    (dst_port == ROCE_PORT && len == whole).then_some((Flow { src, dst, src_port, dst_port }, udp))
}

/// Writes the Ethernet, IP and UDP headers for `packet` to the end of `out`. None if no IP packet
/// is that long.
pub(super) fn emit(out: &mut Vec<u8>, flow: &Flow, ip_id: u16, packet: &[u8]) -> Option<()> {
    let udp_len = u16::try_from(packet.len().checked_add(UDP_LEN)?).ok()?;
    let mut udp = [0; UDP_LEN];
    udp[0..2].copy_from_slice(&flow.src_port.to_be_bytes());
    udp[2..4].copy_from_slice(&flow.dst_port.to_be_bytes());
    udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
    out.extend_from_slice(&MACS);
    match flow.addresses() {
        // Over IPv4 a UDP checksum of 0 says that there is none.
        Ok(addresses) => {
            out.extend_from_slice(&ETHERTYPE_IPV4.to_be_bytes());
            out.extend_from_slice(&ipv4(addresses.as_flattened(), ip_id, udp_len.checked_add(20)?));
        }
        // Over IPv6 that is not allowed: one that comes to 0 is sent as ones.
        Err(addresses) => {
            let addresses = addresses.as_flattened();
            out.extend_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
            out.extend_from_slice(&[0x60, 0, 0, 0]);
            out.extend_from_slice(&udp_len.to_be_bytes());
            out.extend_from_slice(&[UDP, HOP_LIMIT]);
            out.extend_from_slice(addresses);
            let pseudo = sum(addresses) + u64::from(udp_len) + u64::from(UDP);
            let checksum = fold(pseudo + sum(&udp) + sum(packet));
            udp[6..8].copy_from_slice(&if checksum == 0 { u16::MAX } else { checksum }.to_be_bytes());
        }
    }
    out.extend_from_slice(&udp);
    Some(())
}

fn ipv4(addresses: &[u8], ip_id: u16, total: u16) -> [u8; IPV4_LEN] {
    let mut header = [0; IPV4_LEN];
    header[0] = 0x45;
    header[2..4].copy_from_slice(&total.to_be_bytes());
    header[4..6].copy_from_slice(&ip_id.to_be_bytes());
    header[6] = 0x40; // do not fragment
    header[8] = HOP_LIMIT;
    header[9] = UDP;
    header[12..20].copy_from_slice(addresses);
    let checksum = fold(sum(&header));
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    header
}

/// The sum of the big-endian 16-bit words, an odd last byte being the high half of one.
fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks(2).map(|word| (u64::from(word[0]) << 8) | word.get(1).map_or(0, |low| u64::from(*low))).sum()
}

/// The Internet checksum of what was summed.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !u16::try_from(sum).unwrap_or(0)
}

fn take_u16(rest: &mut &[u8]) -> Option<u16> {
    let (bytes, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u16::from_be_bytes(*bytes))
}
