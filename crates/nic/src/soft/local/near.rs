//! Which addresses are of this machine: whoever sends RoCE packets from there is one of ours, and can be asked how far it is.

use std::collections::HashMap;
use std::net::{IpAddr, UdpSocket};

/// Addresses remembered. Somebody who invents senders must not make us remember them all.
const MOST: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Near {
    known: HashMap<IpAddr, bool>,
}

impl Near {
    /// Whether the address is of this machine. Once for each, the kernel is asked.
    pub(crate) fn contains(&mut self, addr: IpAddr) -> bool {
        if let Some(known) = self.known.get(&addr) {
            return *known;
        }
        if self.known.len() >= MOST || addr.is_unspecified() || addr.is_multicast() {
            return false;
        }
        // Only addresses of our own can be bound.
        let near = UdpSocket::bind((addr, 0)).is_ok();
        self.known.insert(addr, near);
        near
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_are_near() {
        let mut near = Near::default();
        for (addr, is_near) in
            [("127.88.0.1", true), ("192.0.2.1", false), ("0.0.0.0", false), ("224.0.0.1", false)]
        {
            let addr: IpAddr = addr.parse().unwrap();
            assert_eq!([near.contains(addr), near.contains(addr)], [is_near; 2], "{addr}");
        }
    }
}
