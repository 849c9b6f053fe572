//! Who may connect.

use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

/// Addresses and networks that may connect: `10.0.0.7, 192.168.0.0/16, fd00::/8`. The default
/// admits all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList(Option<Vec<Network>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    /// IPv4 addresses as IPv6 ones.
    first: u128,
    mask: u128,
}

/// Text that is no list of networks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither an address nor a network: expected, for example, 10.0.0.7 or 192.168.0.0/16")]
pub struct AllowListError(String);

impl AllowList {
    /// Whether an address may connect.
    pub fn admits(&self, addr: IpAddr) -> bool {
        let bits = bits_of(addr);
        self.0.as_ref().is_none_or(|all| all.iter().any(|network| bits & network.mask == network.first))
    }

    /// Whether all addresses may connect, for lack of a list.
    pub fn is_open(&self) -> bool {
        self.0.is_none()
    }
}

impl FromStr for AllowList {
    type Err = AllowListError;

    fn from_str(text: &str) -> Result<Self, AllowListError> {
        text.split(',').map(|one| one.trim().parse()).collect::<Result<_, _>>().map(|all| Self(Some(all)))
    }
}

impl FromStr for Network {
    type Err = AllowListError;

    fn from_str(text: &str) -> Result<Self, AllowListError> {
        let wrong = || AllowListError(text.to_owned());
        let (addr, len) = text.split_once('/').map_or((text, None), |(addr, len)| (addr, Some(len)));
        let addr: IpAddr = addr.parse().map_err(|_| wrong())?;
        let most = if addr.is_ipv4() { 32 } else { 128 };
        let len: u32 = len.map_or(Ok(most), str::parse).map_err(|_| wrong())?;
        if len > most {
            return Err(wrong());
        }
        let mask = u128::MAX.checked_shl(most - len).unwrap_or(0);
        Ok(Self { first: bits_of(addr) & mask, mask })
    }
}

fn bits_of(addr: IpAddr) -> u128 {
    let addr: Ipv6Addr = match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped(),
        IpAddr::V6(addr) => addr,
    };
    addr.to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_admit_their_addresses() {
        let list: AllowList = "10.0.0.7, 192.168.0.0/16,fd00::/8, 0.0.0.0/32".parse().unwrap();
        for (addr, is_in) in [
            ("10.0.0.7", true),
            ("::ffff:10.0.0.7", true),
            ("10.0.0.8", false),
            ("192.168.255.1", true),
            ("192.169.0.1", false),
            ("fd12::1", true),
            ("fe80::1", false),
            ("0.0.0.0", true),
            ("0.0.0.1", false),
        ] {
            assert_eq!(list.admits(addr.parse().unwrap()), is_in, "{addr}");
        }
        assert!("0.0.0.0/0".parse::<AllowList>().unwrap().admits("1.2.3.4".parse().unwrap()));
        assert!(!"0.0.0.0/0".parse::<AllowList>().unwrap().admits("fd00::1".parse().unwrap()));
        assert!("::/0".parse::<AllowList>().unwrap().admits("1.2.3.4".parse().unwrap()));
        assert!(AllowList::default().admits("1.2.3.4".parse().unwrap()));
        for wrong in ["", "10.0.0.0/33", "host", "10.0.0.1/", "fd00::/129", "10.0.0.1,,"] {
            assert!(wrong.parse::<AllowList>().is_err(), "{wrong:?}");
        }
    }
}
