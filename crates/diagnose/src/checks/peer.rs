//! Two machines side by side: what must agree between the ends of a connection.

use std::collections::BTreeSet;
use std::fmt::Display;

use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::facts::{Facts, Gid, Port};

/// What differs between this machine and its peer, and keeps them from connecting or slows them.
pub(crate) fn compare(own: &Facts, peer: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let layers =
        (set(own, |port| Some(port.link_layer.clone())), set(peer, |port| Some(port.link_layer.clone())));
    if differ(&layers) && layers.0.is_disjoint(&layers.1) {
        found.push(
            finding("peer-link-layer", Severity::Error, "the machines have no kind of network in common", &layers)
                .why("InfiniBand and RoCE do not connect: NCCL and UCX fail or use TCP.")
                .fix(Fix::both().remark("use adapters of one kind on both machines (NCCL_IB_HCA, UCX_NET_DEVICES), or set LINK_TYPE with mlxconfig")),
        );
        return found;
    }
    let mtus = (set(own, |port| port.active_mtu.get()), set(peer, |port| port.active_mtu.get()));
    if differ(&mtus) {
        found.push(
            finding("peer-mtu", Severity::Warning, "the machines have different MTUs", &mtus)
                .why("The ends agree on the smaller one; switches with a smaller MTU than either drop packets (status 12).")
                .fix(Fix::both().remark("set the same MTU on all interfaces and switches of the path")),
        );
    }
    let kinds = (gids(own), gids(peer));
    if differ(&kinds) && kinds.0.is_disjoint(&kinds.1) {
        found.push(
            finding(
                "peer-gid",
                Severity::Error,
                "the machines have no kind of RoCE address in common",
                &kinds,
            )
            .why("RoCE v1 and v2, and IPv4 and IPv6 addresses, do not connect: retries exceeded (status 12).")
            .fix(
                Fix::both()
                    .run("unset NCCL_IB_GID_INDEX")
                    .remark("and give both machines RoCE v2 addresses of one family"),
            ),
        );
    }
    let rates = (set(own, rate), set(peer, rate));
    if differ(&rates) {
        found.push(
            finding(
                "peer-rate",
                Severity::Warning,
                "the links of the machines have different speeds",
                &rates,
            )
            .why("The slower end limits both; without flow control the faster one overruns the switch.")
            .fix(
                Fix::both()
                    .run("nobounce topo")
                    .remark("on both machines: compare adapters and their speeds"),
            ),
        );
    }
    for (name, versions) in [("NCCL", (nccl(own), nccl(peer))), ("UCX", (ucx(own), ucx(peer)))] {
        if let (Some(one), Some(other)) = &versions
            && one != other
        {
            found.push(
                Finding::new("peer-version", Severity::Warning, format!("the machines have different versions of {name}: {one} and {other}"))
                    .why("NCCL requires one version on all ranks; UCX allows different ones, but chooses protocols by each end's own rules.")
                    .seen("this machine", one.clone())
                    .seen("the peer", other.clone())
                    .fix(Fix::both().remark(format!("install one version of {name} on both (in the images, too)"))),
            );
        }
    }
    found
}

fn active(facts: &Facts) -> impl Iterator<Item = &Port> {
    let hardware = facts.nics.iter().filter(|nic| !nic.is_software());
    hardware.flat_map(|nic| &nic.ports).filter(|port| port.is_active())
}

fn set<T: Ord>(facts: &Facts, of: impl Fn(&Port) -> Option<T>) -> BTreeSet<T> {
    active(facts).filter_map(of).collect()
}

/// Gb/s, without fractions.
fn rate(port: &Port) -> Option<String> {
    port.rate_gbps.get().map(|rate| format!("{rate:.0}"))
}

/// Kinds of routable RoCE addresses.
fn gids(facts: &Facts) -> BTreeSet<&'static str> {
    let kind = |gid: &Gid| match (gid.is_v2(), gid.is_ipv4()) {
        (true, true) => "RoCE v2, IPv4",
        (true, false) => "RoCE v2, IPv6",
        (false, _) => "RoCE v1",
    };
    active(facts)
        .filter(|port| port.is_ethernet())
        .flat_map(|port| port.gids.known().into_iter().flatten())
        .filter(|gid| !gid.is_link_local())
        .map(kind)
        .collect()
}

fn nccl(facts: &Facts) -> Option<String> {
    facts.libraries.nccl.known()?.as_ref()?.version.clone()
}

fn ucx(facts: &Facts) -> Option<String> {
    facts.libraries.ucx.known()?.as_ref()?.version.clone()
}

fn differ<T: Ord>((own, peer): &(BTreeSet<T>, BTreeSet<T>)) -> bool {
    !own.is_empty() && !peer.is_empty() && own != peer
}

fn finding<T: Display>(
    id: &'static str,
    severity: Severity,
    title: &str,
    (own, peer): &(BTreeSet<T>, BTreeSet<T>),
) -> Finding {
    let told = |set: &BTreeSet<T>| set.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    Finding::new(id, severity, title).seen("this machine", told(own)).seen("the peer", told(peer))
}
