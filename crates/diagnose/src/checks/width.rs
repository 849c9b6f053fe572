//! The width of InfiniBand links, judged by both of their ends.

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{LinkEnd, Nic, Port};

/// Lanes of a port of an adapter, unless the other end has fewer.
const LANES: u32 = 4;

/// What limits a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// Nothing: it uses all lanes that both ends support.
    Full,
    /// A setting of an end: wider links of this many lanes are supported and not enabled.
    Set { own: bool, wanted: u32 },
    /// Lanes failed: both ends enable this many.
    Lost(u32),
    /// An end could not be read.
    Unknown,
}

fn widest(own: &[u32], other: &[u32]) -> u32 {
    own.iter().filter(|lanes| other.contains(lanes)).copied().max().unwrap_or(0)
}

/// The width of an active InfiniBand port, against what both ends support.
pub(super) fn of(port: &Port) -> Width {
    let own = port.own_end.known();
    let Some(active) = own.and_then(|end| end.active).or(port.lanes) else { return Width::Unknown };
    match (own, port.peer_end.known()) {
        (Some(own), _) if own.supported.iter().all(|lanes| *lanes <= active) => Width::Full,
        (Some(own), Some(peer)) => {
            let wanted = widest(&own.supported, &peer.supported);
            let enabled = widest(&own.enabled, &peer.enabled);
            if active >= wanted {
                Width::Full
            } else if active < enabled {
                Width::Lost(enabled)
            } else {
                Width::Set { own: !own.enabled.contains(&wanted), wanted }
            }
        }
        // Whatever the other end supports, this one enables no more.
        (Some(own), None) if own.enabled.iter().all(|lanes| *lanes <= active) => {
            Width::Set { own: true, wanted: own.supported.iter().copied().max().unwrap_or(active) }
        }
        _ => Width::Unknown,
    }
}

/// Why an end is not known.
fn reason(port: &Port) -> &str {
    port.own_end.why_not().or(port.peer_end.why_not()).unwrap_or("no width is active")
}

type NicPort<'a> = (&'a Nic, &'a Port);

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    let links: Vec<NicPort<'_>> = super::port::hardware(analysis)
        .filter(|(nic, port)| port.is_active() && !port.is_ethernet() && !crate::nccl::is_efa(nic))
        .collect();
    lost(&links, &mut found);
    set(&links, &mut found);
    unread(&links, &mut found);
    found
}

fn names(links: &[NicPort<'_>]) -> Vec<String> {
    links.iter().map(|(nic, port)| super::port::name(nic, port)).collect()
}

fn devices<'a>(links: &'a [NicPort<'_>]) -> impl Iterator<Item = String> + 'a {
    links.iter().map(|(nic, _)| nic.name.clone())
}

fn told(end: &LinkEnd) -> String {
    let list = |widths: &[u32]| widths.iter().map(|lanes| format!("{lanes}X")).collect::<Vec<_>>().join(" ");
    let active = end.active.map_or_else(|| "none".to_owned(), |lanes| format!("{lanes}X"));
    format!("supported {}, enabled {}, active {active}", list(&end.supported), list(&end.enabled))
}

/// Both ends as evidence.
fn seen(finding: Finding, nic: &Nic, port: &Port) -> Finding {
    let own = format!("PortInfo of {} port {}", nic.name, port.number);
    let finding = match port.own_end.known() {
        Some(end) => finding.seen(own, told(end)),
        None => finding.seen(own, port.own_end.why_not().unwrap_or_default()),
    };
    match port.peer_end.known() {
        Some(end) => {
            let kind = if end.switch { "switch" } else { "adapter" };
            finding.seen(format!("PortInfo of the {kind}'s port {}", end.port), told(end))
        }
        None => finding.seen("PortInfo of the other end", port.peer_end.why_not().unwrap_or_default()),
    }
}

/// Lanes that both ends enable and that do not run.
fn lost(links: &[NicPort<'_>], found: &mut Vec<Finding>) {
    let hit: Vec<NicPort<'_>> =
        links.iter().filter(|(_, port)| matches!(of(port), Width::Lost(_))).copied().collect();
    let Some((nic, port)) = hit.first() else { return };
    let Width::Lost(wanted) = of(port) else { return };
    let active = port.own_end.known().and_then(|end| end.active).or(port.lanes).unwrap_or(0);
    let finding = Finding::new(
        "port-width",
        Severity::Warning,
        format!("{}: the link runs with {active} lanes, and both ends enable {wanted}", list(&names(&hit))),
    )
    .why(
        "Lanes failed in training: the cable, a transceiver or a port is bad. The rate falls with the lanes.",
    );
    found.push(
        seen(finding, nic, port)
            .fix(Fix::host().remark("reseat or replace the cable").each(
                &super::port::pci_addresses(hit.iter().map(|(nic, _)| *nic)),
                "sudo mlxlink -d {} -m -c",
            ))
            .root()
            .slows()
            .on(devices(&hit)),
    );
}

/// Widths that an end supports and does not enable.
fn set(links: &[NicPort<'_>], found: &mut Vec<Finding>) {
    let hit: Vec<NicPort<'_>> =
        links.iter().filter(|(_, port)| matches!(of(port), Width::Set { .. })).copied().collect();
    let Some((nic, port)) = hit.first() else { return };
    let Width::Set { own, wanted } = of(port) else { return };
    let end = if own { "the adapter's port" } else { "the other end" };
    let finding = Finding::new(
        "port-width",
        Severity::Warning,
        format!("{}: a setting of {end} keeps the link from {wanted} lanes", list(&names(&hit))),
    )
    .why("The port supports the width, and LinkWidthEnabled leaves it out. The rate falls with the lanes.");
    let finding = hit.iter().fold(seen(finding, nic, port), |finding, (nic, port)| {
        finding.fix(Fix::both().run(enable(nic, port)))
    });
    found.push(finding.root().slows().on(devices(&hit)));
}

/// The command that enables all widths of the end that leaves some out. Links train again only
/// after a reset, which ports of switches take.
fn enable(nic: &Nic, port: &Port) -> String {
    let tool = format!("sudo ibportstate -C {} -P {} -D", nic.name, port.number);
    let away = format!("0,{}", port.number);
    let peer = port.peer_end.known();
    let reset = peer
        .filter(|end| end.switch)
        .map_or_else(String::new, |end| format!(" && {tool} {away} {} reset", end.port));
    match (of(port), port.own_end.known(), peer) {
        (Width::Set { own: false, .. }, _, Some(end)) => {
            format!("{tool} {away} {} width {}{reset}", end.port, LinkEnd::mask(&end.supported))
        }
        (_, Some(end), _) => {
            format!("{tool} 0 {} width {}{reset}", port.number, LinkEnd::mask(&end.supported))
        }
        _ => format!("{tool} 0 {} query", port.number),
    }
}

/// Links with fewer lanes than ports of adapters have, where an end is not known: a split port of a
/// switch and a bad cable look alike.
fn unread(links: &[NicPort<'_>], found: &mut Vec<Finding>) {
    let hit: Vec<NicPort<'_>> = links
        .iter()
        .filter(|(_, port)| of(port) == Width::Unknown && port.lanes.is_some_and(|lanes| lanes < LANES))
        // Where neither end was queried, two lanes of HDR count as a split port.
        .filter(|(_, port)| !(port.own_end.is_not_recorded() && port.peer_end.is_not_recorded()))
        .filter(|(_, port)| !super::port::has_lost_lanes(port))
        .copied()
        .collect();
    let Some((nic, port)) = hit.first() else { return };
    let lanes = port.lanes.unwrap_or(0);
    let query = format!("sudo ibportstate -C {} -P {} -D 0 {} query", nic.name, port.number, port.number);
    found.push(
        Finding::new(
            "port-width",
            Severity::Unknown,
            format!("{}: {lanes} of {LANES} lanes; whether the other end has more is unknown", list(&names(&hit))),
        )
        .why("A split port of a switch has two lanes. Without both ends it is not told from a link that lost half of its lanes.")
        .seen(format!("/sys/class/infiniband/{}/ports/{}/rate", nic.name, port.number), format!("{lanes}X"))
        .seen("PortInfo of both ends", reason(port))
        .fix(Fix::host().run("sudo nobounce doctor").remark("it reads both ends by /dev/infiniband/umad*; or").run(query))
        .root()
        .on(devices(&hit)),
    );
}
