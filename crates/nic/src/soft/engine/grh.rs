//! The 40 bytes before the payload of a received datagram: its IP header (GRH).
//!
//! A UDP socket does not expose the header. The fields that programs read are known: source,
//! destination and length. The other fields (traffic class, hop limit, IPv4 identification and
//! checksum) are filled as this device would send them.

use std::net::{IpAddr, Ipv4Addr};

use nobounce_protocol::qp::GRH_LEN;

use crate::links::RxDatagram;

#[allow(clippy::cast_possible_truncation)] // 40
const LEN: usize = GRH_LEN as usize;
const IPV4_LEN: usize = 20;
const UDP_LEN: usize = 8;
const UDP: u8 = 17;
const TTL: u8 = 64;

/// The header of a datagram to `local`: an IPv6 header, or 20 zeros and an IPv4 header.
pub(crate) fn of(datagram: &RxDatagram<'_>, local: IpAddr) -> [u8; LEN] {
    let mut grh = [0; LEN];
    let body = UDP_LEN + datagram.bytes.len();
    match (datagram.src, datagram.destination(local)) {
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            grh[0] = 0x60;
            grh[4..6].copy_from_slice(&u16::try_from(body).unwrap_or(u16::MAX).to_be_bytes());
            grh[6..8].copy_from_slice(&[UDP, TTL]);
            grh[8..24].copy_from_slice(&src.octets());
            grh[24..].copy_from_slice(&dst.octets());
        }
        (src, dst) => {
            let header = &mut grh[LEN - IPV4_LEN..];
            header[0] = 0x45;
            let total = u16::try_from(IPV4_LEN + body).unwrap_or(u16::MAX);
            header[2..4].copy_from_slice(&total.to_be_bytes());
            header[6] = 0x40; // don't fragment
            header[8..10].copy_from_slice(&[TTL, UDP]);
            header[12..16].copy_from_slice(&octets(src));
            header[16..].copy_from_slice(&octets(dst));
            let sum = checksum(header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
        }
    }
    grh
}

fn octets(address: IpAddr) -> [u8; 4] {
    match address {
        IpAddr::V4(v4) => v4.octets(),
        IpAddr::V6(v6) => v6.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED).octets(),
    }
}

/// The checksum of an IPv4 header: the complement of the sum of its words.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 = header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(src: &str, local: &str, len: usize) -> [u8; LEN] {
        let bytes = vec![0; len];
        let src = src.parse().unwrap();
        of(
            &RxDatagram {
                arrival: crate::links::Arrival::Wire,
                group: None,
                src,
                src_port: 0xc000,
                bytes: &bytes,
                ip_id: 0,
                has_icrc: true,
                whole: None,
                packets: 1,
                marked: false,
            },
            local.parse().unwrap(),
        )
    }

    #[test]
    fn ipv4_stands_in_the_last_20_bytes() {
        let grh = header("10.0.0.1", "10.0.0.2", 100);
        assert_eq!(grh[..20], [0; 20]);
        assert_eq!(grh[20], 0x45);
        assert_eq!(grh[22..24], (20 + 8 + 100_u16).to_be_bytes());
        assert_eq!(grh[32..36], [10, 0, 0, 1]);
        assert_eq!(grh[36..], [10, 0, 0, 2]);
        assert_eq!(checksum(&grh[20..]), 0, "a header with its checksum sums to nothing");
    }

    #[test]
    fn ipv6_fills_them() {
        let grh = header("fd00::1", "fd00::2", 100);
        assert_eq!(grh[0] >> 4, 6);
        assert_eq!(grh[4..6], (8 + 100_u16).to_be_bytes());
        assert_eq!((grh[8], grh[23], grh[24], grh[39]), (0xfd, 1, 0xfd, 2));
    }
}
