//! Which addresses belong to this host: a RoCE sender there is a same-host peer, and can be probed
//! with a marker.

use std::collections::HashMap;
use std::net::{IpAddr, UdpSocket};

/// Addresses remembered: a bound against spoofed source addresses.
const MOST: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct LocalPeers {
    known: HashMap<IpAddr, bool>,
}

impl LocalPeers {
    /// Whether the address is of this host. Asks the kernel once for each address.
    pub(crate) fn contains(&mut self, addr: IpAddr) -> bool {
        if let Some(known) = self.known.get(&addr) {
            return *known;
        }
        if self.known.len() >= MOST || addr.is_unspecified() || addr.is_multicast() {
            return false;
        }
        // Only local addresses can be bound.
        let local_peers = UdpSocket::bind((addr, 0)).is_ok();
        self.known.insert(addr, local_peers);
        local_peers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_are_near() {
        let mut local_peers = LocalPeers::default();
        for (addr, is_near) in
            [("127.88.0.1", true), ("192.0.2.1", false), ("0.0.0.0", false), ("224.0.0.1", false)]
        {
            let addr: IpAddr = addr.parse().unwrap();
            assert_eq!([local_peers.contains(addr), local_peers.contains(addr)], [is_near; 2], "{addr}");
        }
    }
}
