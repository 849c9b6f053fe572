//! IPv4 of an interface: its subnets, gateways and settings, from procfs.

use super::Root;
use crate::facts::{IpSettings, Read};

/// `RTF_GATEWAY`.
const GATEWAY: u32 = 2;

/// Routes of the main table, one for each line.
struct RouteEntry<'a> {
    interface: &'a str,
    to: u32,
    mask: u32,
    flags: u32,
}

/// The kernel's table of IPv4 routes. Numbers are hexadecimal, in the order of bytes of a
/// little-endian machine.
fn routes(table: &str) -> impl Iterator<Item = RouteEntry<'_>> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    table.lines().skip(1).filter_map(move |line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let address = |at: usize| words.get(at).and_then(|word| number(word)).map(u32::swap_bytes);
        Some(RouteEntry {
            interface: words.first()?,
            to: address(1)?,
            mask: address(7)?,
            flags: number(words.get(3)?)?,
        })
    })
}

/// Subnets of an interface: its routes without a gateway.
pub(super) fn subnets(table: &str, name: &str) -> Vec<String> {
    let mut found: Vec<String> = routes(table)
        .filter(|route| route.interface == name && route.flags & GATEWAY == 0 && route.to != 0)
        .map(|route| format!("{}/{}", std::net::Ipv4Addr::from(route.to), route.mask.leading_ones()))
        .collect();
    found.sort();
    found.dedup();
    found
}

/// Whether a route with a gateway leaves by an interface. The main table cannot deny it: rules may
/// name other tables.
pub(super) fn gateway(table: &str, name: &str) -> Read<bool> {
    if routes(table).any(|route| route.interface == name && route.flags & GATEWAY != 0) {
        return Read::Yes(true);
    }
    Read::no("the main table has none, and other tables are not in /proc")
}

/// Interfaces of the main table's routes with a gateway, each with an address that the route leads
/// to.
#[must_use]
pub fn destinations(root: &Root) -> Vec<(String, std::net::Ipv4Addr)> {
    /// For the default route: an address for documentation, outside of all subnets.
    const ANY: std::net::Ipv4Addr = std::net::Ipv4Addr::new(198, 51, 100, 1);
    let table = root.text("/proc/net/route").unwrap_or_default();
    routes(&table)
        .filter(|route| route.flags & GATEWAY != 0)
        .map(|route| {
            let inside = if route.to == 0 { ANY } else { route.to.saturating_add(1).into() };
            (route.interface.to_owned(), inside)
        })
        .collect()
}

/// Settings in effect for an interface.
pub(super) fn settings(root: &Root, name: &str) -> Read<IpSettings> {
    const CONF: &str = "/proc/sys/net/ipv4/conf";
    if !root.exists(CONF) {
        return Read::default();
    }
    let read = |setting: &str| -> std::io::Result<u32> {
        let all: u32 = root.number(&format!("{CONF}/all/{setting}"))?;
        let own: u32 = root.number(&format!("{CONF}/{name}/{setting}"))?;
        Ok(all.max(own))
    };
    let all = || {
        Ok(IpSettings {
            arp_ignore: read("arp_ignore")?,
            arp_announce: read("arp_announce")?,
            arp_filter: read("arp_filter")? != 0,
            rp_filter: read("rp_filter")?,
        })
    };
    match all() {
        Ok(settings) => Read::Yes(settings),
        Err::<_, std::io::Error>(error) => Read::no(format!("{CONF}/{name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                     eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
                     eth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n\
                     eth1\t0010A8C0\t00000000\t0001\t0\t0\t100\t00F0FFFF\t0\t0\t0\n";

    #[test]
    fn subnets_are_routes_without_a_gateway() {
        assert_eq!(subnets(TABLE, "eth0"), ["10.0.0.0/24"]);
        assert_eq!(subnets(TABLE, "eth1"), ["192.168.16.0/20"]);
        assert_eq!(subnets("", "eth0"), Vec::<String>::new());
    }

    #[test]
    fn the_main_table_does_not_deny_a_gateway() {
        assert_eq!(gateway(TABLE, "eth0"), Read::Yes(true));
        assert_eq!(gateway(TABLE, "eth1").known(), None);
    }

    #[test]
    fn destinations_are_inside_of_routes_with_a_gateway() {
        let folder = std::env::temp_dir().join(format!("nobounce-routes-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("proc/net")).unwrap();
        let more = "eth1\t0000100A\t0110A8C0\t0003\t0\t0\t0\t0000F0FF\t0\t0\t0\n";
        std::fs::write(folder.join("proc/net/route"), format!("{TABLE}{more}")).unwrap();
        let found: Vec<String> = destinations(&Root::new(&folder))
            .into_iter()
            .map(|(interface, to)| format!("{interface} {to}"))
            .collect();
        assert_eq!(found, ["eth0 198.51.100.1", "eth1 10.16.0.1"]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_greater_setting_is_in_effect() {
        let folder = std::env::temp_dir().join(format!("nobounce-conf-{}", std::process::id()));
        let root = Root::new(&folder);
        assert!(settings(&root, "eth2").is_not_recorded());
        for (interface, values) in [("all", [0, 2, 0, 2]), ("eth2", [1, 0, 1, 1])] {
            let conf = folder.join("proc/sys/net/ipv4/conf").join(interface);
            std::fs::create_dir_all(&conf).unwrap();
            for (name, value) in
                ["arp_ignore", "arp_announce", "arp_filter", "rp_filter"].into_iter().zip(values)
            {
                std::fs::write(conf.join(name), format!("{value}\n")).unwrap();
            }
        }
        let wanted = IpSettings { arp_ignore: 1, arp_announce: 2, arp_filter: true, rp_filter: 2 };
        assert_eq!(settings(&root, "eth2"), Read::Yes(wanted));
        // An interface that is not there tells nothing.
        assert!(settings(&root, "eth9").why_not().unwrap().contains("eth9"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
