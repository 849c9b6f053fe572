//! Selects the GID table entry of a connection, by an explainable rule.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr};

/// The protocol of a GID table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: Ethernet frames, not routable, not supported by software NICs.
    RoceV1,
    /// RoCE v2, over UDP.
    RoceV2,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

/// One entry of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its index.
    pub index: u32,
    /// The GID; all zero where the entry is empty.
    pub gid: [u8; 16],
    /// Its protocol, if known.
    pub kind: Option<GidKind>,
    /// The interface of this network namespace that has its address.
    pub interface: Option<String>,
}

impl GidEntry {
    /// The address of the GID: IPv4 where it is IPv4-mapped.
    pub fn addr(&self) -> IpAddr {
        Ipv6Addr::from(self.gid).to_canonical()
    }

    fn is_empty(&self) -> bool {
        // An empty entry, or one without interface identifier: a removed interface leaves the
        // prefix.
        self.gid[8..] == [0; 8] && self.gid[..8].iter().skip(2).all(|byte| *byte == 0)
    }
}

/// The caller's selection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GidWish {
    /// This index and no other.
    pub index: Option<u32>,
    /// The entry of this address.
    pub addr: Option<IpAddr>,
    /// An entry of this interface.
    pub interface: Option<String>,
}

/// The selected entry, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidChoice {
    /// The entry.
    pub entry: GidEntry,
    /// One line per table entry: its kind, and why it is used or not.
    pub explanation: Vec<String>,
}

/// No entry can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no entry of the GID table can be used:{}", explanation.iter().map(|line| format!("\n  {line}")).collect::<String>())]
pub struct NoGid {
    /// One line for each entry of the table.
    pub explanation: Vec<String>,
}

/// Rank of an entry: the smallest wins, among equals the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Mapped,
    Global,
    LinkLocal,
    Unknown,
    V1,
}

/// Selects for an Ethernet port: RoCE v2 before v1, IPv4 before IPv6, global before link-local.
/// Never an entry whose address no interface of this network namespace has (in containers the table
/// shows those of other namespaces too).
pub fn choose(table: &[GidEntry], wish: &GidWish) -> Result<GidChoice, NoGid> {
    let judged: Vec<(&GidEntry, Result<Rank, String>)> =
        table.iter().map(|entry| (entry, judge(entry, wish))).collect();
    let best = judged
        .iter()
        .filter_map(|(entry, rank)| Some((rank.as_ref().ok()?, entry.index)))
        .min()
        .map(|(_, index)| index);
    let explanation = judged
        .iter()
        .filter(|(entry, rank)| !(entry.is_empty() && rank.is_err()))
        .map(|(entry, rank)| explain(entry, rank, best == Some(entry.index)))
        .collect::<Vec<_>>();
    match table.iter().find(|entry| Some(entry.index) == best) {
        Some(entry) => Ok(GidChoice { entry: entry.clone(), explanation }),
        None if explanation.is_empty() => {
            let none = format!(
                "all {} entries are empty: the interface has no address, or is in another network namespace",
                table.len()
            );
            Err(NoGid { explanation: vec![none] })
        }
        None => Err(NoGid { explanation }),
    }
}

/// Why the entry may be wrong for a peer that never replied. `source` is the kernel's source
/// address for that peer. Several addresses may reach one peer, so this is called only after a
/// failure.
pub(crate) fn doubt(entry: &GidEntry, peer: IpAddr, source: io::Result<IpAddr>) -> Option<String> {
    let ours = entry.addr();
    let why = match (entry.kind, &entry.interface, source) {
        (Some(GidKind::RoceV1), ..) => {
            "speaks RoCE v1, which no router passes and no software NIC speaks".to_owned()
        }
        (_, None, _) => "is of no interface of this network namespace".to_owned(),
        // Loopback addresses all reach each other, and link-local ones have a route per interface.
        _ if ours.is_loopback() && peer.is_loopback() || is_link_local(peer) => return None,
        (_, _, Ok(source)) if source == ours => return None,
        (_, _, Ok(source)) => {
            format!("is not the address from which this machine sends to {peer}: that is {source}")
        }
        (_, _, Err(error)) => {
            format!("is what it sends from, and this machine has no way to {peer}: {error}")
        }
    };
    let on = entry.interface.as_ref().map_or(String::new(), |name| format!(" on {name}"));
    Some(format!(
        "GID {}, {ours}{on}, {why}; it may be one of another network (NOBOUNCE_GID_INDEX or --addr name another, --explain-device lists them)",
        entry.index
    ))
}

fn is_link_local(addr: IpAddr) -> bool {
    matches!(addr, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

fn judge(entry: &GidEntry, wish: &GidWish) -> Result<Rank, String> {
    if let Some(index) = wish.index
        && index != entry.index
    {
        return Err(format!("index {index} was asked for"));
    }
    if entry.is_empty() {
        return Err("empty".to_owned());
    }
    if entry.index > u8::MAX.into() {
        return Err("a queue pair can name the first 256 entries only".to_owned());
    }
    if let Some(addr) = wish.addr
        && addr != entry.addr()
    {
        return Err(format!("address {addr} was asked for"));
    }
    if let Some(wanted) = &wish.interface
        && entry.interface.as_deref() != Some(wanted)
    {
        return Err(format!("interface {wanted} was asked for"));
    }
    // An explicit index overrides the rule.
    if entry.interface.is_none() && wish.index.is_none() {
        return Err("no interface of this network namespace has the address".to_owned());
    }
    Ok(match (entry.kind, entry.addr()) {
        (Some(GidKind::RoceV1 | GidKind::InfiniBand), _) => Rank::V1,
        // It may be RoCE v1: an entry known to be v2 comes first.
        (None, _) => Rank::Unknown,
        (_, IpAddr::V4(_)) => Rank::Mapped,
        (_, addr) if is_link_local(addr) => Rank::LinkLocal,
        (_, IpAddr::V6(_)) => Rank::Global,
    })
}

fn explain(entry: &GidEntry, rank: &Result<Rank, String>, is_best: bool) -> String {
    let kind = entry.kind.map_or("of unknown kind".to_owned(), |kind| kind.to_string());
    let on = entry.interface.as_ref().map_or(String::new(), |name| format!(" on {name}"));
    let why = match rank {
        Err(why) => format!("not usable: {why}"),
        Ok(rank) => {
            let what = match rank {
                Rank::Mapped => "an IPv4 address",
                Rank::Global => "an IPv6 address",
                Rank::LinkLocal => "a link-local address, which no router passes",
                Rank::Unknown => "RoCE version unknown",
                Rank::V1 => "RoCE v1, which no router passes and no software NIC speaks",
            };
            format!("{}: {what}", if is_best { "used" } else { "usable, but another comes before it" })
        }
    };
    format!("GID {}: {} ({kind}{on}): {why}", entry.index, entry.addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, addr: &str, kind: GidKind, interface: Option<&str>) -> GidEntry {
        let gid = match addr.parse().unwrap() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        GidEntry { index, gid, kind: Some(kind), interface: interface.map(str::to_owned) }
    }

    fn usual() -> Vec<GidEntry> {
        vec![
            entry(0, "fe80::1", GidKind::RoceV1, Some("eth0")),
            entry(1, "fe80::1", GidKind::RoceV2, Some("eth0")),
            entry(2, "10.0.0.7", GidKind::RoceV1, Some("eth0")),
            entry(3, "10.0.0.7", GidKind::RoceV2, Some("eth0")),
            entry(4, "::", GidKind::RoceV2, None),
            entry(5, "2001:db8::7", GidKind::RoceV2, Some("eth0")),
        ]
    }

    #[test]
    fn the_usual_table_gives_the_mapped_address() {
        let choice = choose(&usual(), &GidWish::default()).unwrap();
        assert_eq!(choice.entry.index, 3);
        assert_eq!(choice.entry.addr(), "10.0.0.7".parse::<IpAddr>().unwrap());
        assert_eq!(choice.explanation.len(), 5, "the hole is not worth a line: {:?}", choice.explanation);
        assert!(choice.explanation[3].contains("used: an IPv4 address"), "{:?}", choice.explanation);
        assert!(choice.explanation[0].contains("another comes before"), "{:?}", choice.explanation);
    }

    #[test]
    fn one_of_unknown_kind_and_one_out_of_reach_give_way() {
        let mut table = usual();
        table[2].kind = None;
        assert_eq!(
            choose(&table, &GidWish::default()).unwrap().entry.index,
            3,
            "the mapped one of version 2"
        );
        table[3].index = 256;
        let choice = choose(&table, &GidWish::default()).unwrap();
        assert_eq!(choice.entry.index, 5);
        assert!(
            choice.explanation.iter().any(|line| line.contains("first 256 entries")),
            "{:?}",
            choice.explanation
        );
        table.retain(|entry| entry.index == 2);
        assert_eq!(choose(&table, &GidWish::default()).unwrap().entry.index, 2, "better than none");
    }

    #[test]
    fn what_is_not_there_gives_way_to_the_next() {
        let mut table = usual();
        table.retain(|entry| entry.index != 3);
        assert_eq!(choose(&table, &GidWish::default()).unwrap().entry.index, 5);
        table.retain(|entry| entry.index != 5);
        assert_eq!(choose(&table, &GidWish::default()).unwrap().entry.index, 1);
        table.retain(|entry| entry.index != 1);
        assert_eq!(choose(&table, &GidWish::default()).unwrap().entry.index, 0);
    }

    #[test]
    fn in_a_container_the_host_s_entries_are_passed_over() {
        let table = vec![
            entry(0, "fe80::1", GidKind::RoceV2, None),
            entry(1, "10.0.0.7", GidKind::RoceV2, None),
            entry(2, "::", GidKind::RoceV2, None),
            entry(3, "10.5.0.9", GidKind::RoceV2, Some("net1")),
        ];
        let choice = choose(&table, &GidWish::default()).unwrap();
        assert_eq!(choice.entry.index, 3);
        assert!(choice.explanation[1].contains("no interface of this network namespace"));
        let none = choose(&table[..3], &GidWish::default()).unwrap_err().to_string();
        assert!(none.contains("GID 1: 10.0.0.7") && none.contains("network namespace"), "{none}");
        let empty = choose(&table[2..3], &GidWish::default()).unwrap_err().to_string();
        assert!(empty.contains("all 1 entries are empty"), "{empty}");
    }

    #[test]
    fn one_of_another_network_is_doubted_when_nothing_came_back() {
        let addr = |text: &str| text.parse::<IpAddr>().unwrap();
        let [v2, v1] = [GidKind::RoceV2, GidKind::RoceV1];
        let by = |kind, interface, source: &str| {
            doubt(&entry(3, "10.0.0.7", kind, interface), addr("10.0.0.9"), Ok(addr(source)))
        };
        assert_eq!(by(v2, Some("eth0"), "10.0.0.7"), None, "this is how it is sent");
        let other = by(v2, Some("eth1"), "10.55.0.1").unwrap();
        assert!(other.starts_with("GID 3, 10.0.0.7 on eth1, is not the address from which"), "{other}");
        assert!(other.contains("that is 10.55.0.1") && other.contains("NOBOUNCE_GID_INDEX"), "{other}");
        assert!(by(v1, Some("eth0"), "10.0.0.7").unwrap().contains("RoCE v1"));
        assert!(by(v2, None, "10.0.0.7").unwrap().contains("no interface of this network namespace"));
        let here = entry(3, "10.0.0.7", v2, Some("eth0"));
        let lost = doubt(&here, addr("10.0.0.9"), Err(io::Error::from_raw_os_error(libc::ENETUNREACH)));
        assert!(lost.unwrap().contains("this machine has no way to 10.0.0.9"));
        // Of these nothing can be said.
        let loopback = entry(0, "127.4.4.4", v2, Some("lo"));
        assert_eq!(doubt(&loopback, addr("127.5.5.5"), Ok(addr("127.0.0.1"))), None);
        let local = entry(1, "fe80::1", v2, Some("eth0"));
        assert_eq!(doubt(&local, addr("fe80::2"), Err(io::Error::from_raw_os_error(libc::EINVAL))), None);
    }

    #[test]
    fn wishes_are_followed_or_refused() {
        let by = |wish: GidWish| choose(&usual(), &wish).map(|choice| choice.entry.index);
        assert_eq!(by(GidWish { index: Some(0), ..GidWish::default() }), Ok(0));
        assert_eq!(by(GidWish { addr: Some("fe80::1".parse().unwrap()), ..GidWish::default() }), Ok(1));
        assert_eq!(by(GidWish { interface: Some("eth0".to_owned()), ..GidWish::default() }), Ok(3));
        let wrong = by(GidWish { interface: Some("eth1".to_owned()), ..GidWish::default() }).unwrap_err();
        assert!(wrong.to_string().contains("interface eth1 was asked for"), "{wrong}");
        let hole = by(GidWish { index: Some(4), ..GidWish::default() }).unwrap_err();
        assert!(!hole.explanation.is_empty());
        assert!(by(GidWish { index: Some(77), ..GidWish::default() }).is_err());
    }
}
