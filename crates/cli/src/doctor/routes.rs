//! Routes of rails, by the kernel's own answer: no packet is sent.

use std::io;
use std::net::Ipv4Addr;

use nobounce_topology::facts::{Facts, Netdev, Port, Read};
use nobounce_topology::netlink::{KernelRoute, neighbour, route_answer, route_request};
use nobounce_topology::sysfs::{self, Root};

use super::netlink;

/// Fills in where packets of each interface of a RoCE port leave, and whether a gateway is reached
/// by it.
pub(super) fn fill(facts: &mut Facts, root: &Root) {
    let own: Vec<Ipv4Addr> = facts
        .nics
        .iter()
        .flat_map(|nic| &nic.ports)
        .flat_map(|port| port.gids.known().into_iter().flatten())
        .filter_map(nobounce_topology::facts::Gid::ipv4)
        .collect();
    let destinations = sysfs::destinations(root);
    let rails: Vec<String> =
        ports(facts).filter_map(|port| Some(port.netdev.as_ref()?.name.clone())).collect();
    let distant = destinations.iter().find(|(interface, _)| rails.contains(interface)).map(|(_, to)| *to);
    for port in facts.nics.iter_mut().flat_map(|nic| &mut nic.ports).filter(|port| port.is_ethernet()) {
        let address = address(port);
        let (Some(netdev), Some(address)) = (&mut port.netdev, address) else { continue };
        netdev.sends_by = sends_by(netdev, address, &own, root);
        if netdev.gateway.known().is_none()
            && let Some(distant) = distant
        {
            netdev.gateway = gateway(netdev, address, distant, root);
        }
    }
}

fn ports(facts: &Facts) -> impl Iterator<Item = &Port> {
    facts.nics.iter().flat_map(|nic| &nic.ports).filter(|port| port.is_ethernet())
}

/// The IPv4 address of a port's interface, as its GID table has it.
fn address(port: &Port) -> Option<Ipv4Addr> {
    let name = &port.netdev.as_ref()?.name;
    let own = |gid: &&nobounce_topology::facts::Gid| gid.netdev.as_ref().is_none_or(|netdev| netdev == name);
    port.gids.known()?.iter().filter(own).find_map(nobounce_topology::facts::Gid::ipv4)
}

fn ask(to: Ipv4Addr, from: Ipv4Addr, interface: Option<u32>) -> io::Result<KernelRoute> {
    route_answer(&netlink::exchange(&route_request(to, from, interface))?)
}

fn index(root: &Root, name: &str) -> io::Result<u32> {
    root.number(&format!("/sys/class/net/{name}/ifindex"))
}

/// The name of the interface that packets to the own subnet leave by.
fn sends_by(netdev: &Netdev, from: Ipv4Addr, own: &[Ipv4Addr], root: &Root) -> Read<String> {
    let subnets = netdev.subnets.known().map_or(&[][..], Vec::as_slice);
    let Some(to) = subnets.iter().find_map(|subnet| neighbour(subnet, own)) else {
        return Read::no("the interface has no subnet with another address");
    };
    let route = match ask(to, from, None) {
        Ok(route) => route,
        Err(error) => return Read::no(error.to_string()),
    };
    let names = root.names("/sys/class/net").unwrap_or_default();
    let named = names.into_iter().find(|name| index(root, name).is_ok_and(|index| index == route.interface));
    named.map_or_else(|| Read::no(format!("interface {} has no name here", route.interface)), Read::Yes)
}

/// Whether a distant address is reached by a gateway of this interface.
fn gateway(netdev: &Netdev, from: Ipv4Addr, to: Ipv4Addr, root: &Root) -> Read<bool> {
    match index(root, &netdev.name).and_then(|index| ask(to, from, Some(index))) {
        Ok(route) => Read::Yes(route.gateway),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EHOSTUNREACH)) => {
            Read::Yes(false)
        }
        Err(error) => Read::no(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_the_route_to_loopback() {
        let route = ask(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST, None).unwrap();
        assert_eq!(route, KernelRoute { interface: index(&Root::new("/"), "lo").unwrap(), gateway: false });
        // An address that is none of this machine's.
        assert!(ask(Ipv4Addr::LOCALHOST, Ipv4Addr::new(198, 51, 100, 7), None).is_err());
    }
}
