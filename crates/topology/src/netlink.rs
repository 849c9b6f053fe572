//! Messages of rtnetlink that ask the kernel for its IPv4 route to an address, and its answers.

use std::io;
use std::net::Ipv4Addr;

const GET_ROUTE: u16 = 26;
const NEW_ROUTE: u16 = 24;
const ERROR: u16 = 2;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
const HEADER: usize = 16;
/// `struct rtmsg`.
const ROUTE: usize = 12;
const AF_INET: u8 = 2;
/// Attributes: destination, source, interface, gateway, gateway of another family.
const DST: u16 = 1;
const SRC: u16 = 2;
const OIF: u16 = 4;
const GATEWAY: u16 = 5;
const VIA: u16 = 18;

/// The kernel's route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRoute {
    /// Index of the interface that packets leave by.
    pub interface: u32,
    /// Whether they go to a router.
    pub gateway: bool,
}

/// Asks for the route of packets from one of the machine's addresses, by an interface if it is
/// named.
#[must_use]
pub fn route_request(to: Ipv4Addr, from: Ipv4Addr, interface: Option<u32>) -> Vec<u8> {
    let mut attributes = vec![(DST, to.octets()), (SRC, from.octets())];
    attributes.extend(interface.map(|index| (OIF, index.to_ne_bytes())));
    let mut message = vec![0_u8; 4];
    message.extend(GET_ROUTE.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    // Family, and the lengths of both prefixes.
    message.extend([AF_INET, 32, 32]);
    message.resize(HEADER + ROUTE, 0);
    for (kind, value) in attributes {
        message.extend(8_u16.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(value);
    }
    // A message has less than 64 bytes.
    let length = u32::try_from(message.len()).unwrap_or(0);
    message.splice(..4, length.to_ne_bytes());
    message
}

/// The route in an answer.
///
/// # Errors
/// The kernel has no route, or the bytes are no answer.
pub fn route_answer(answer: &[u8]) -> io::Result<KernelRoute> {
    let broken = || io::Error::new(io::ErrorKind::InvalidData, "malformed netlink answer from the kernel");
    let word = |at: usize| {
        let bytes = answer.get(at..at + 4)?.try_into().ok()?;
        Some(i32::from_ne_bytes(bytes))
    };
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    match kind {
        Some(ERROR) => {
            let code = word(HEADER).ok_or_else(broken)?;
            return Err(io::Error::from_raw_os_error(code.saturating_neg()));
        }
        Some(NEW_ROUTE) => {}
        _ => return Err(broken()),
    }
    let mut rest = answer.get(HEADER + ROUTE..).ok_or_else(broken)?;
    let (mut interface, mut gateway) = (None, false);
    while let Some((kind, value, after)) = attribute(rest) {
        match kind {
            OIF => interface = value.try_into().ok().map(u32::from_ne_bytes),
            GATEWAY | VIA => gateway = true,
            _ => {}
        }
        rest = after;
    }
    Ok(KernelRoute { interface: interface.ok_or_else(broken)?, gateway })
}

/// Kind and value of the first attribute, and what follows it.
fn attribute(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    /// The highest bits say how the value is written.
    const KIND: u16 = 0x3fff;
    let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
    let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & KIND;
    let value = bytes.get(4..length)?;
    Some((kind, value, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// An address of a subnet (`10.0.0.0/24`) that none of the machine's interfaces has: its first but
/// for those.
#[must_use]
pub fn neighbour(subnet: &str, own: &[Ipv4Addr]) -> Option<Ipv4Addr> {
    let (network, length) = subnet.split_once('/')?;
    let (network, length): (Ipv4Addr, u32) = (network.parse().ok()?, length.parse().ok()?);
    let count = 1_u64.checked_shl(32_u32.checked_sub(length)?)?;
    // Subnets of two addresses have neither a network's nor a broadcast address.
    let range = if count == 2 { 0..2 } else { 1..count.saturating_sub(1) };
    let address = |at: u64| u32::try_from(u64::from(u32::from(network)) + at).ok().map(Ipv4Addr::from);
    range.take(own.len() + 1).filter_map(address).find(|address| !own.contains(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    fn answer(kind: u16, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER + ROUTE];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        for (kind, value) in attributes {
            bytes.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(*value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    #[test]
    fn a_request_names_both_addresses_and_the_interface() {
        let request = route_request(ip("10.0.0.1"), ip("10.0.0.2"), Some(7));
        assert_eq!(request.len(), 16 + 12 + 3 * 8);
        assert_eq!(request[..4], 52_u32.to_ne_bytes());
        assert_eq!(request[16..20], [2, 32, 32, 0]);
        assert_eq!((&request[32..36], &request[40..44]), (&[10, 0, 0, 1][..], &[10, 0, 0, 2][..]));
        assert_eq!(request[48..52], 7_u32.to_ne_bytes());
        assert_eq!(route_request(ip("10.0.0.1"), ip("10.0.0.2"), None).len(), 16 + 12 + 2 * 8);
    }

    #[test]
    fn answers_are_read_and_broken_ones_are_errors() {
        let index = 9_u32.to_ne_bytes();
        let direct = answer(NEW_ROUTE, &[(DST, &[10, 0, 0, 1]), (OIF, &index)]);
        assert_eq!(route_answer(&direct).unwrap(), KernelRoute { interface: 9, gateway: false });
        let routed = answer(NEW_ROUTE, &[(GATEWAY, &[10, 0, 0, 254]), (OIF, &index)]);
        assert_eq!(route_answer(&routed).unwrap(), KernelRoute { interface: 9, gateway: true });
        assert!(route_answer(&answer(NEW_ROUTE, &[])).is_err());
        let mut refused = answer(ERROR, &[]);
        refused[HEADER..HEADER + 4].copy_from_slice(&(-101_i32).to_ne_bytes());
        assert_eq!(route_answer(&refused).unwrap_err().raw_os_error(), Some(101));
        for length in 0..direct.len() {
            assert!(route_answer(&direct[..length]).is_err(), "{length}");
        }
        // An attribute of length 0 must not be read forever.
        assert!(route_answer(&[&direct[..HEADER + ROUTE], &[0; 64]].concat()).is_err());
    }

    #[test]
    fn a_neighbour_is_none_of_the_own_addresses() {
        assert_eq!(neighbour("10.0.0.0/24", &[]), Some(ip("10.0.0.1")));
        assert_eq!(neighbour("10.0.0.0/24", &[ip("10.0.0.2"), ip("10.0.0.1")]), Some(ip("10.0.0.3")));
        assert_eq!(neighbour("10.0.0.4/31", &[ip("10.0.0.4")]), Some(ip("10.0.0.5")));
        assert_eq!(neighbour("10.0.0.4/30", &[ip("10.0.0.5"), ip("10.0.0.6")]), None);
        assert_eq!(neighbour("10.0.0.4/32", &[]), None);
        assert_eq!((neighbour("subnet0/24", &[]), neighbour("10.0.0.0/99", &[])), (None, None));
    }
}
