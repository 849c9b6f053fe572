//! Addresses and ports of IP over the connection manager: service numbers, and the header that
//! private data begins with.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes that the header takes of the private data of a request.
pub const IP_HEADER_LEN: usize = 36;

/// The service number of a port: the port space in the high bits.
pub fn service_id(port_space: u16, port: u16) -> u64 {
    u64::from(port_space) << 16 | u64::from(port)
}

/// The port of a service number.
pub fn service_port(service: u64) -> u16 {
    u16::try_from(service & 0xffff).unwrap_or(0)
}

/// The IP addresses of a connection request, as the kernel's `rdma_cm` puts them into private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpHeader {
    /// The port of the requesting side.
    pub port: u16,
    /// Its address.
    pub src: IpAddr,
    /// The address that is asked.
    pub dst: IpAddr,
}

impl IpHeader {
    /// The private data that begins with this header.
    pub fn prepend(&self, user: &[u8]) -> Vec<u8> {
        let mut out = vec![0; IP_HEADER_LEN];
        out[1] = if self.src.is_ipv4() { 4 << 4 } else { 6 << 4 };
        out[2..4].copy_from_slice(&self.port.to_be_bytes());
        put(&mut out[4..20], self.src);
        put(&mut out[20..36], self.dst);
        out.extend_from_slice(user);
        out
    }

    /// Reads the header, and what follows it.
    pub fn parse(private: &[u8]) -> Option<(Self, &[u8])> {
        let (header, user) = private.split_first_chunk::<IP_HEADER_LEN>()?;
        let version = header[1] >> 4;
        if header[0] != 0 || !matches!(version, 4 | 6) {
            return None;
        }
        let port = u16::from_be_bytes([header[2], header[3]]);
        let at = |at: usize| address(version, header[at..].first_chunk().copied().unwrap_or_default());
        Some((Self { port, src: at(4), dst: at(20) }, user))
    }
}

fn put(to: &mut [u8], address: IpAddr) {
    match address {
        IpAddr::V4(v4) => to[12..16].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => to.copy_from_slice(&v6.octets()),
    }
}

fn address(version: u8, bytes: [u8; 16]) -> IpAddr {
    match version {
        4 => Ipv4Addr::new(bytes[12], bytes[13], bytes[14], bytes[15]).into(),
        _ => Ipv6Addr::from(bytes).into(),
    }
}

/// The GID of an address: IPv4 is mapped into IPv6.
pub fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address of a GID.
pub fn address_of(gid: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(gid);
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_they_were_written() {
        for (src, dst) in [("10.0.0.1", "10.0.0.2"), ("fe80::1", "::1")] {
            let header = IpHeader { port: 0x1234, src: src.parse().unwrap(), dst: dst.parse().unwrap() };
            let bytes = header.prepend(b"user");
            assert_eq!(IpHeader::parse(&bytes), Some((header, &b"user"[..])));
            assert_eq!(address_of(gid(header.src)), header.src);
            assert_eq!(IpHeader::parse(&bytes[..35]), None);
        }
        assert_eq!(IpHeader::parse(&[1; 36]), None);
        assert_eq!(IpHeader::parse(&[0; 36]), None);
        assert_eq!(service_id(0x0106, 7174), 0x0106_1c06);
    }
}
