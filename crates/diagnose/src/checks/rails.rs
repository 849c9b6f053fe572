//! Rails among each other: subnets, ARP and routes of the adapters' interfaces.

use std::collections::{BTreeMap, BTreeSet};

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Netdev, Nic};

/// First of the routing tables that a fix makes.
const TABLE: u32 = 101;

/// A RoCE port that may carry traffic.
#[derive(Clone, Copy, Debug)]
struct Rail<'a> {
    nic: &'a Nic,
    netdev: &'a Netdev,
}

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    let rails: Vec<Rail<'_>> = super::port::hardware(analysis)
        .filter(|(_, port)| port.is_ethernet() && port.may_be_active())
        .filter_map(|(nic, port)| Some(Rail { nic, netdev: port.netdev.as_ref()? }))
        // Ports of a bond have one interface.
        .filter(|rail| seen.insert(&rail.netdev.name))
        .collect();
    one_subnet(&rails, &mut found);
    no_route(&rails, &mut found);
    found
}

fn nics(rails: &[Rail<'_>]) -> Vec<String> {
    rails.iter().map(|rail| rail.nic.name.clone()).collect()
}

fn interfaces(rails: &[Rail<'_>]) -> Vec<String> {
    rails.iter().map(|rail| rail.netdev.name.clone()).collect()
}

/// A table for each rail, so that packets from its address leave by it.
fn tables(subnet: &str, rails: &[Rail<'_>]) -> String {
    format!(
        "t={TABLE}; for d in {}; do a=$(ip -4 -o addr show dev $d scope global | awk '{{print $4; exit}}'); sudo ip route replace {subnet} dev $d table $t; sudo ip rule add from ${{a%/*}} table $t; t=$((t+1)); done",
        interfaces(rails).join(" ")
    )
}

/// How the interfaces of one subnet share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// Interfaces answer ARP for each other.
    Arp,
    /// The reverse-path filter drops what another interface would answer.
    Filter,
    /// Packets of all addresses leave by one of them.
    Route,
    /// A setting or a route could not be read.
    Unknown,
    /// Each answers and sends for itself.
    Apart,
}

fn sharing(rails: &[Rail<'_>]) -> Sharing {
    let known: Vec<_> = rails.iter().filter_map(|rail| rail.netdev.ip.known()).collect();
    let away = |rail: &Rail<'_>| rail.netdev.sends_by.known().is_some_and(|name| *name != rail.netdev.name);
    if known.iter().any(|ip| ip.answers_for_others()) {
        Sharing::Arp
    } else if rails.iter().any(|rail| away(rail) && rail.netdev.ip.known().is_some_and(|ip| ip.is_strict())) {
        Sharing::Filter
    } else if known.len() < rails.len() || rails.iter().any(|rail| rail.netdev.sends_by.known().is_none()) {
        Sharing::Unknown
    } else if rails.iter().any(away) {
        Sharing::Route
    } else {
        Sharing::Apart
    }
}

/// Several rails in one subnet: without settings the kernel answers and routes for all of them
/// through one.
fn one_subnet(rails: &[Rail<'_>], found: &mut Vec<Finding>) {
    let mut by_subnet: BTreeMap<&str, Vec<Rail<'_>>> = BTreeMap::new();
    for rail in rails {
        for subnet in rail.netdev.subnets.known().into_iter().flatten() {
            by_subnet.entry(subnet).or_default().push(*rail);
        }
    }
    let shared = by_subnet.into_iter().filter(|(_, rails)| rails.len() > 1);
    let Some((subnet, rails, sharing)) = shared
        .map(|(subnet, rails)| (subnet, sharing(&rails), rails))
        .find(|(_, sharing, _)| *sharing != Sharing::Apart)
        .map(|(subnet, sharing, rails)| (subnet, rails, sharing))
    else {
        return;
    };
    let names = nics(&rails);
    let (severity, what, why) = match sharing {
        Sharing::Arp => (
            Severity::Warning,
            "and their interfaces answer ARP for each other",
            "A peer learns the address of one rail with the MAC address of another: connections use the wrong rail, or time out in ibv_modify_qp or with status 12.",
        ),
        Sharing::Filter => (
            Severity::Warning,
            "and the reverse-path filter drops packets of all but one",
            "The route back leaves by another interface, so the kernel ignores ARP requests and packets that arrive here: the rail cannot be reached.",
        ),
        Sharing::Route => (
            Severity::Info,
            "and packets of all their addresses leave by one",
            "Queue pairs are bound to their interface and are not concerned. TCP is: bootstrap, sockets of NCCL and TCP lanes of UCX use one rail.",
        ),
        Sharing::Unknown | Sharing::Apart => (
            Severity::Unknown,
            "and their ARP settings or routes are unknown",
            "By default Linux answers ARP for every address on every interface, and sends by the first route: connections of one rail use another, or time out in ibv_modify_qp.",
        ),
    };
    let mut finding =
        Finding::new("rails-one-subnet", severity, format!("{} are in one subnet, {what}", list(&names)))
            .why(why)
            .seen("/proc/net/route", format!("{subnet} on {}", list(&interfaces(&rails))));
    for rail in &rails {
        let name = &rail.netdev.name;
        finding = match rail.netdev.ip.known() {
            Some(ip) => finding.seen(
                format!("/proc/sys/net/ipv4/conf/{name}"),
                format!(
                    "arp_ignore {}, arp_announce {}, arp_filter {}, rp_filter {}",
                    ip.arp_ignore,
                    ip.arp_announce,
                    u8::from(ip.arp_filter),
                    ip.rp_filter
                ),
            ),
            None => finding.seen(
                format!("/proc/sys/net/ipv4/conf/{name}"),
                rail.netdev.ip.why_not().unwrap_or_default(),
            ),
        };
        if let Some(other) = rail.netdev.sends_by.known().filter(|other| *other != name) {
            finding = finding.seen(format!("route from the address of {name}"), format!("leaves by {other}"));
        }
    }
    let interfaces = interfaces(&rails);
    let own = "net.ipv4.conf.{}";
    let settings = format!("sudo sysctl -w {own}.arp_ignore=1 {own}.arp_announce=2 {own}.rp_filter=2");
    let finding = match sharing {
        Sharing::Route => finding,
        Sharing::Unknown | Sharing::Apart => finding.fix(Fix::both().each(
            &interfaces,
            "sysctl net.ipv4.conf.{}.arp_ignore net.ipv4.conf.{}.arp_announce net.ipv4.conf.{}.rp_filter",
        )),
        Sharing::Arp | Sharing::Filter => {
            finding.fix(Fix::both().each(&interfaces, &settings).remark("the same on every machine"))
        }
    };
    found.push(
        finding
            .fix(Fix::both().run(tables(subnet, &rails)).remark("or give each rail a subnet of its own"))
            .root()
            .on(names),
    );
}

/// Whether a subnet holds a router and nothing else.
fn is_point_to_point(netdev: &Netdev) -> bool {
    let narrow = |subnet: &String| {
        subnet
            .rsplit_once('/')
            .and_then(|(_, length)| length.parse::<u32>().ok())
            .is_some_and(|length| length >= 30)
    };
    netdev.subnets.known().is_some_and(|subnets| !subnets.is_empty() && subnets.iter().all(narrow))
}

/// Some rails reach other subnets and others do not.
fn no_route(rails: &[Rail<'_>], found: &mut Vec<Finding>) {
    let with = |wanted: Option<bool>| -> Vec<Rail<'_>> {
        let is =
            |rail: &&Rail<'_>| !rail.netdev.gateway.is_not_recorded() && rail.netdev.gateway.get() == wanted;
        rails.iter().filter(is).copied().collect()
    };
    let (routed, without, unknown) = (with(Some(true)), with(Some(false)), with(None));
    let Some(good) = routed.first() else { return };
    let (hit, severity) = match (without.is_empty(), unknown.is_empty()) {
        (true, true) => return,
        (true, false) => (unknown, Severity::Unknown),
        // Neighbours of a larger subnet are reached without a router.
        (false, _) if without.iter().any(|rail| is_point_to_point(rail.netdev)) => {
            (without, Severity::Warning)
        }
        (false, _) => (without, Severity::Info),
    };
    let what = if severity == Severity::Unknown {
        "whether a route leads to other subnets is unknown"
    } else {
        "no route leads to other subnets"
    };
    let mut compared = vec![good.netdev.name.clone()];
    compared.extend(interfaces(&hit));
    found.push(
        Finding::new("rails-no-route", severity, format!("{}: {what}, and {} has one", list(&nics(&hit)), good.nic.name))
            .why("Queue pairs are bound to the interface of their rail. Without a route by it the kernel sends ARP requests for distant peers, which no router answers: ibv_modify_qp times out, or all traffic uses the rail with the route.")
            .seen(format!("routes by {}", good.netdev.name), "with a gateway")
            .seen(
                format!("routes by {}", hit[0].netdev.name),
                hit[0].netdev.gateway.why_not().unwrap_or("none with a gateway"),
            )
            .fix(Fix::both().each(&compared, "ip route show table all dev {}").remark("give the rail the same destinations by its own gateway, in a routing table of its own"))
            .root()
            .on(nics(&hit)),
    );
}
