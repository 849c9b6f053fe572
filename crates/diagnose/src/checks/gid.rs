//! RoCE addresses: the entries of the GID table, and the one that programs will use.

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Gid, Nic, Port};

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    tables(analysis, &mut found);
    for (name, program) in [
        ("NCCL_IB_GID_INDEX", "NCCL"),
        ("UCX_IB_GID_INDEX", "UCX"),
        ("NVSHMEM_IB_GID_INDEX", "NVSHMEM"),
        ("MC_GID_INDEX", "Mooncake"),
    ] {
        if let Some(variable) = analysis.facts.variable(name)
            && let Ok(wanted) = variable.value.trim().parse::<i64>()
        {
            let set = GidSetting {
                who: variable.to_string(),
                source: variable.source,
                name,
                program,
                chosen: true,
            };
            index(analysis, wanted, &set, &mut found);
        } else if name == "NCCL_IB_GID_INDEX" && crate::nccl::is_before(analysis.facts, (2, 21)) {
            // Newer ones look for RoCE v2 themselves.
            let version = crate::nccl::version(analysis.facts)
                .map_or_else(String::new, |(major, minor)| format!(" {major}.{minor}"));
            let who = format!("the default of NCCL{version} (entry 0)");
            let set = GidSetting { who, source: "NCCL's version", name, program, chosen: false };
            index(analysis, 0, &set, &mut found);
        }
    }
    found
}

/// Where an index comes from.
#[derive(Debug)]
struct GidSetting<'a> {
    who: String,
    source: &'a str,
    name: &'a str,
    program: &'static str,
    /// Set explicitly, not a default.
    chosen: bool,
}

/// A RoCE port of an adapter that is not known to be down, with its table.
type Table<'a> = (&'a Nic, &'a Port, &'a [Gid]);

/// RoCE ports of hardware adapters that carry traffic, as far as is known, with their tables.
fn tables_of<'a>(analysis: &Analysis<'a>) -> Vec<Table<'a>> {
    analysis
        .facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software())
        .flat_map(|nic| nic.ports.iter().map(move |port| (nic, port)))
        .filter(|(_, port)| port.is_ethernet() && port.may_be_active())
        .filter_map(|(nic, port)| Some((nic, port, port.gids.known()?.as_slice())))
        .collect()
}

fn tables(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let all = tables_of(analysis);
    empty_tables(&all, found);
    v1_only(&all, found);
    link_local_only(analysis, &all, found);
    ipv6_only(analysis, &all, found);
    tables_with_holes(&all, found);
    unread_tables(analysis, found);
}

/// Tables name their adapters, in the same order.
fn names(hit: &[&Table<'_>]) -> Vec<String> {
    hit.iter().map(|(nic, ..)| nic.name.clone()).collect()
}

/// Amazon's adapters have one address of their own kind: the checks skip them.
fn is_checked(nic: &Nic) -> bool {
    nic.driver.as_deref() != Some("efa")
}

/// Empty tables have no usable address.
fn empty_tables(all: &[Table<'_>], found: &mut Vec<Finding>) {
    let empty: Vec<_> = all.iter().filter(|(nic, _, gids)| is_checked(nic) && gids.is_empty()).collect();
    if !empty.is_empty() {
        let hit = names(&empty);
        found.push(
            Finding::new("gid-none", Severity::Error, format!("{}: no usable RoCE address", list(&hit)))
                .why("The table is empty, or all its entries belong to other namespaces: connections fail ('failed to query GID', 'Invalid argument').")
                .seen(format!("/sys/class/infiniband/{}/ports/1/gids", hit[0]), entries(empty[0].1))
                .fix(Fix::container().remark("give the interface of this namespace an IP address, or use the host's network").option("--network host"))
                .blocks()
                .on(hit),
        );
    }
}

/// Some tables hold RoCE v1 entries only.
fn v1_only(all: &[Table<'_>], found: &mut Vec<Finding>) {
    let old: Vec<_> = all
        .iter()
        .filter(|(nic, _, gids)| is_checked(nic) && !gids.is_empty() && !gids.iter().any(Gid::is_v2))
        .collect();
    if !old.is_empty() {
        let hit = names(&old);
        found.push(
            Finding::new("gid-v1-only", Severity::Error, format!("{}: only RoCE v1 addresses", list(&hit)))
                .why(
                    "RoCE v1 is not routed, and peers that use v2 do not answer: error 12, retries exceeded.",
                )
                .seen(
                    format!("/sys/class/infiniband/{}/ports/1/gid_attrs/types", hit[0]),
                    old[0].2.iter().map(|gid| gid.kind.as_str()).collect::<Vec<_>>().join(", "),
                )
                .fix(
                    Fix::both()
                        .remark("give the interface an IP address")
                        .each(&hit, "sudo cma_roce_mode -d {} -p 1 -m 2"),
                )
                .root()
                .blocks()
                .on(hit),
        );
    }
}

/// Some tables hold RoCE v2 entries that are all link-local.
fn link_local_only(analysis: &Analysis<'_>, all: &[Table<'_>], found: &mut Vec<Finding>) {
    let local: Vec<_> = all
        .iter()
        .filter(|(nic, _, gids)| is_checked(nic) && gids.iter().any(Gid::is_v2))
        .filter(|(_, _, gids)| gids.iter().filter(|gid| gid.is_v2()).all(Gid::is_link_local))
        .collect();
    if !local.is_empty() {
        let hit = names(&local);
        let many = local.len() < all.len() || analysis.facts.is_container();
        found.push(
            Finding::new("gid-no-ip", if many { Severity::Error } else { Severity::Warning }, format!("{}: only link-local RoCE addresses", list(&hit)))
                .why("The interface has no IP address here. Link-local ones work within one switch at best; NCCL chooses them and ends with error 12 between subnets.")
                .seen(format!("/sys/class/infiniband/{}/ports/1/gids", hit[0]), entries(local[0].1))
                .fix(Fix::both().remark("give the interface an IP address of the RDMA network; in a container").option("--network host").remark("or give the pod this network"))
                .fix(match best(local[0].2) {
                    Some(gid) => Fix::container().remark("within one switch, for programs that search for an IPv4 address only (Mooncake)").set(format!("MC_GID_INDEX={}", gid.index)),
                    None => Fix::container().remark("within one switch only: name the entry (MC_GID_INDEX, NCCL_IB_GID_INDEX)"),
                })
                .root()
                .blocks()
                .on(hit),
        );
    }
}

/// Some tables hold routed RoCE v2 entries of IPv6 only.
fn ipv6_only(analysis: &Analysis<'_>, all: &[Table<'_>], found: &mut Vec<Finding>) {
    let six: Vec<_> = all
        .iter()
        .filter(|(nic, _, gids)| {
            let routed = |gid: &&Gid| gid.is_v2() && !gid.is_link_local();
            is_checked(nic)
                && gids.iter().any(|gid| routed(&gid))
                && !gids.iter().any(|gid| routed(&gid) && gid.is_ipv4())
        })
        .collect();
    if !six.is_empty() && analysis.facts.variable("NCCL_IB_ADDR_FAMILY").is_none() {
        let hit = names(&six);
        found.push(
            Finding::new(
                "gid-no-ipv4",
                Severity::Warning,
                format!("{}: RoCE v2 has IPv6 addresses only", list(&hit)),
            )
            .why("Programs that search for an IPv4 address (NCCL, UCCL, Mooncake) find none and fall back to entry 0, which is link-local: between subnets every operation ends with status 12.")
            .seen(format!("/sys/class/infiniband/{}/ports/1/gids", hit[0]), entries(six[0].1))
            .fix(Fix::container().set("NCCL_IB_ADDR_FAMILY=AF_INET6").remark("or give the interface an IPv4 address"))
            .fix(match best(six[0].2) {
                Some(gid) => Fix::container().remark("other programs: name the entry").set(format!("MC_GID_INDEX={0} UCCL_IB_GID_INDEX={0} NVSHMEM_IB_GID_INDEX={0}", gid.index)),
                None => Fix::container().remark("other programs: name the entry"),
            })
            .on(hit),
        );
    }
}

/// Some tables hold entries that this namespace cannot read.
fn tables_with_holes(all: &[Table<'_>], found: &mut Vec<Finding>) {
    let holes: Vec<_> =
        all.iter().filter(|(_, port, gids)| !port.unreadable_gids.is_empty() && !gids.is_empty()).collect();
    if !holes.is_empty() {
        let hit = names(&holes);
        found.push(
            Finding::new("gid-holes", Severity::Info, format!("{}: some entries of the GID table cannot be read here", list(&hit)))
                .why("They belong to other namespaces. NCCL before 2.24 aborts or crashes on them when it selects an entry ('read failed ... Invalid argument', NCCL_IB_ROCE_VERSION_NUM).")
                .seen(format!("{} gid_attrs/types", hit[0]), format!("entries {}", holes[0].1.unreadable_gids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")))
                .fix(match best(holes[0].2) {
                    Some(gid) => Fix::container().set(format!("NCCL_IB_GID_INDEX={}", gid.index)).remark("or use a current NCCL"),
                    None => Fix::container().remark("use a current NCCL"),
                })
                .on(hit),
        );
    }
}

/// Some adapters hide their whole table.
fn unread_tables(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let unread: Vec<_> = analysis
        .facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software())
        .filter(|nic| {
            nic.ports.iter().any(|port| port.is_ethernet() && port.is_active() && port.gids.known().is_none())
        })
        .collect();
    if let Some(first) = unread.first() {
        found.push(
            Finding::new(
                "gid-unread",
                Severity::Unknown,
                format!(
                    "{}: the GID table could not be read",
                    list(&unread.iter().map(|nic| &nic.name).collect::<Vec<_>>())
                ),
            )
            .why("The RoCE address that programs will use is unknown.")
            .seen(
                format!("/sys/class/infiniband/{}/ports/1/gids", first.name),
                first.ports[0].gids.why_not().unwrap_or_default(),
            )
            .fix(Fix::both().run(format!("show_gids {}", first.name)))
            .on(unread.iter().map(|nic| nic.name.clone())),
        );
    }
}

/// The recommended entry: RoCE v2 with an IPv4 address, else any routable v2.
fn best(gids: &[Gid]) -> Option<&Gid> {
    let v2 = || gids.iter().filter(|gid| gid.is_v2());
    v2().find(|gid| gid.is_ipv4()).or_else(|| v2().find(|gid| !gid.is_link_local())).or_else(|| v2().next())
}

fn entries(port: &Port) -> String {
    let known = port.gids.known().map_or(&[][..], Vec::as_slice);
    let mut told: Vec<String> =
        known.iter().take(8).map(|gid| format!("{}: {} {}", gid.index, gid.value, gid.kind)).collect();
    if !port.unreadable_gids.is_empty() {
        told.push(format!("unreadable: {:?}", port.unreadable_gids));
    }
    if told.is_empty() { "empty".to_owned() } else { told.join(", ") }
}

/// An index that does not depend on the table, against the tables of all adapters.
fn index(analysis: &Analysis<'_>, wanted: i64, set: &GidSetting<'_>, found: &mut Vec<Finding>) {
    if wanted < 0 {
        return;
    }
    let mut wrong = Vec::new();
    for (nic, _, gids) in tables_of(analysis) {
        let entry = gids.iter().find(|gid| i64::from(gid.index) == wanted);
        let better = best(gids).filter(|best| best.is_ipv4() || !best.is_link_local());
        let why = match entry {
            None => Some("no such entry here".to_owned()),
            Some(gid) if !gid.is_v2() && gids.iter().any(Gid::is_v2) => Some("RoCE v1".to_owned()),
            Some(gid) if gid.is_link_local() && better.is_some() => Some("a link-local address".to_owned()),
            Some(_) => None,
        };
        if let Some(why) = why {
            wrong.push((nic, why, best(gids).map(|gid| gid.index)));
        }
    }
    let Some((nic, why, better)) = wrong.first() else { return };
    let names: Vec<_> = wrong.iter().map(|(nic, ..)| nic.name.clone()).collect();
    let mut indexes: Vec<u32> = wrong.iter().filter_map(|(.., best)| *best).collect();
    indexes.sort_unstable();
    indexes.dedup();
    let fix = match (indexes.as_slice(), better) {
        ([one], _) if names.len() == tables_of(analysis).len() => {
            Fix::container().set(format!("{}={one}", set.name))
        }
        _ => Fix::container().run(format!("unset {}", set.name)).remark(format!(
            "current {} selects the entry; a fixed index cannot fit adapters or pods with different tables",
            set.program
        )),
    };
    // A default RoCE v1 GID still reaches the neighbours of a flat network. An index that was set
    // explicitly was meant for another GID table.
    let stops = set.chosen || wrong.iter().any(|(_, why, _)| why.starts_with("no such"));
    let finding = Finding::new(
        "gid-index",
        if stops { Severity::Error } else { Severity::Warning },
        format!("{} is wrong for {}: {why}", set.who, list(&names)),
    )
    .why("Connections fail with error 12 (retries exceeded), or run as RoCE v1 within one subnet only.")
    .seen(set.source, format!("entry {wanted}"))
    .seen(format!("{} entry {wanted}", nic.name), why.clone())
    .fix(fix)
    .of_library(set.program);
    found.push(if stops { finding.blocks() } else { finding }.on(names));
}
