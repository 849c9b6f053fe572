//! Ports: state, rate, packet size, losses.

use std::collections::BTreeMap;

use super::list;
use super::width::{self, Width};
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Nic, Port};

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    states(analysis, &mut found);
    managers(analysis, &mut found);
    rates(analysis, &mut found);
    sizes(analysis, &mut found);
    losses(analysis, &mut found);
    layers(analysis, &mut found);
    errors(analysis, &mut found);
    found
}

/// InfiniBand and Ethernet side by side: two networks, and libraries that take all adapters.
fn layers(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let of = |ethernet: bool| -> Vec<String> {
        hardware(analysis)
            .filter(|(nic, port)| {
                // Amazon's are neither.
                port.is_active()
                    && port.is_ethernet() == ethernet
                    && !port.link_layer.is_empty()
                    && !crate::nccl::is_efa(nic)
            })
            .map(|(nic, port)| name(nic, port))
            .collect()
    };
    let (infiniband, ethernet) = (of(false), of(true));
    let chosen =
        ["NCCL_IB_HCA", "UCX_NET_DEVICES"].iter().any(|name| analysis.facts.variable(name).is_some());
    if infiniband.is_empty() || ethernet.is_empty() || chosen || analysis.facts.gpus.is_empty() {
        return;
    }
    found.push(
        Finding::new("link-layers", Severity::Info, format!("{}: InfiniBand; {}: Ethernet", list(&infiniband), list(&ethernet)))
            .why("They belong to two networks. NCCL uses all active adapters, including those for storage and management: connections between the two kinds fail or use the slower one.")
            .seen("link_layer", format!("{} InfiniBand, {} Ethernet", infiniband.len(), ethernet.len()))
            .fix(Fix::container().set(format!("NCCL_IB_HCA={}", if infiniband.len() >= ethernet.len() { infiniband.join(",") } else { ethernet.join(",") })).remark("UCX_NET_DEVICES with the same, each with its port"))
            .on(infiniband.into_iter().chain(ethernet)),
    );
}

pub(super) fn hardware<'a>(analysis: &Analysis<'a>) -> impl Iterator<Item = (&'a Nic, &'a Port)> {
    analysis
        .facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software())
        .flat_map(|nic| nic.ports.iter().map(move |port| (nic, port)))
}

pub(super) fn name(nic: &Nic, port: &Port) -> String {
    if nic.ports.len() > 1 { format!("{}:{}", nic.name, port.number) } else { nic.name.clone() }
}

fn states(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    // InfiniBand links that are up but have no addresses yet.
    let waiting: Vec<_> = hardware(analysis)
        .filter(|(_, port)| matches!(port.state.to_ascii_uppercase().as_str(), "INIT" | "ARMED"))
        .collect();
    if let Some((_, first)) = waiting.first() {
        let names: Vec<_> = waiting.iter().map(|(nic, port)| name(nic, port)).collect();
        found.push(
            Finding::new(
                "port-init",
                Severity::Error,
                format!(
                    "{}: the link is up, but no subnet manager has configured it ({})",
                    list(&names),
                    first.state
                ),
            )
            .why("The port is unusable until a subnet manager gives it an address: NCCL and UCX skip it.")
            .seen("state", first.state.clone())
            .fix(
                Fix::host()
                    .remark("start a subnet manager")
                    .run("sudo systemctl start opensm")
                    .remark("on one node, or in the switch"),
            )
            .root()
            .blocks()
            .on(waiting.iter().map(|(nic, _)| nic.name.clone())),
        );
    }
    let down: Vec<_> = analysis
        .facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software() && !nic.ports.is_empty())
        // An unreadable state does not count as a link that is down.
        .filter(|nic| nic.ports.iter().any(|port| !port.state.is_empty()))
        .filter(|nic| {
            nic.ports.iter().all(|port| {
                !port.is_active() && !matches!(port.state.to_ascii_uppercase().as_str(), "INIT" | "ARMED")
            })
        })
        .collect();
    if down.is_empty() {
        return;
    }
    let names: Vec<_> = down.iter().map(|nic| nic.name.clone()).collect();
    let none_left =
        analysis.facts.nics.iter().filter(|nic| !nic.is_software()).count() == down.len() + waiting.len();
    // An unused port is normal, unless a GPU has no nearer one.
    let missed = analysis.facts.gpus.iter().any(|gpu| {
        let nearest = |up: bool| {
            analysis
                .pairs
                .iter()
                .filter(|pair| pair.gpu.address == gpu.address && !pair.nic.is_software())
                .filter(|pair| up != names.contains(&pair.nic.name))
                .filter_map(|pair| pair.distance)
                .min()
        };
        matches!((nearest(false), nearest(true)), (Some(down), up) if up.is_none_or(|up| down < up))
    });
    let severity = if none_left {
        Severity::Error
    } else if missed || is_rail(analysis, &down) {
        Severity::Warning
    } else {
        Severity::Info
    };
    let port = down[0].ports.first();
    let of_down = pci_addresses(down.iter().copied());
    found.push(
        Finding::new("port-down", severity, format!("{}: no link", list(&names)))
            .why(if severity == Severity::Info {
                "No GPU depends on it; unused ports look like this."
            } else {
                "The GPUs nearest to it use a more distant adapter, or TCP if there is none."
            })
            .seen(
                format!("/sys/class/infiniband/{}/ports/1/state", names[0]),
                port.map_or_else(String::new, |port| format!("{}, {}", port.state, port.physical_state)),
            )
            .fix(Fix::host().remark("check cable and switch port").each(&of_down, "mlxlink -d {}"))
            .root()
            .blocks()
            .on(names),
    );
}

/// Whether the adapters that are down belong to a set with one adapter for each GPU.
fn is_rail(analysis: &Analysis<'_>, down: &[&Nic]) -> bool {
    let gpus = analysis.facts.gpus.len();
    let like = |nic: &Nic| {
        let all = analysis.facts.nics.iter().filter(|other| !other.is_software());
        all.filter(|other| other.driver == nic.driver).count()
    };
    gpus > 1 && down.iter().any(|nic| nic.driver.is_some() && like(nic) == gpus)
}

/// Active InfiniBand ports that no subnet manager looks after.
fn managers(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let lost: Vec<_> = hardware(analysis)
        .filter(|(_, port)| port.is_active() && !port.is_ethernet())
        .filter(|(_, port)| port.sm_lid.get() == Some(0) || matches!(port.lid.get(), Some(0 | 0xffff)))
        .collect();
    if let Some((nic, port)) = lost.first() {
        let names: Vec<_> = lost.iter().map(|(nic, port)| name(nic, port)).collect();
        found.push(
            Finding::new(
                "port-no-sm",
                Severity::Warning,
                format!("{}: active, but without an address or a subnet manager", list(&names)),
            )
            .why(
                "Connections over the port fail or are not routed until a subnet manager sweeps the network.",
            )
            .seen(
                format!("/sys/class/infiniband/{}/ports/{}", nic.name, port.number),
                format!(
                    "lid {:#x}, sm_lid {:#x}",
                    port.lid.get().unwrap_or(0),
                    port.sm_lid.get().unwrap_or(0)
                ),
            )
            .fix(
                Fix::host()
                    .remark("start a subnet manager on one node, or in the switch")
                    .run("sudo systemctl start opensm"),
            )
            .root()
            .slows()
            .on(lost.iter().map(|(nic, _)| nic.name.clone())),
        );
    }
}

fn rates(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let mut slow = Vec::new();
    let mut below = Vec::new();
    let device = |nic: &Nic| nic.address.as_deref().and_then(|address| analysis.facts.pci_device(address));
    // Adapters of one model should run alike.
    let mut best: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    let model = |nic: &Nic| device(nic).map(|device| (device.vendor, device.device));
    for (nic, port) in hardware(analysis).filter(|(_, port)| port.is_active()) {
        if let (Some(model), Some(rate)) = (model(nic), port.rate_gbps.known()) {
            let best = best.entry(model).or_insert(0.0);
            *best = best.max(*rate);
        }
    }
    for (nic, port) in hardware(analysis).filter(|(_, port)| port.is_active()) {
        let Some(&rate) = port.rate_gbps.known() else { continue };
        let sibling = model(nic).and_then(|model| best.get(&model).copied()).unwrap_or(rate);
        let made_for = model(nic).and_then(|(vendor, device)| made_for(vendor, device));
        // Slower models of one chip exist: cards that fit an older slot may be such models.
        let fast_slot = device(nic).and_then(|device| device.link).is_some_and(|link| link.max_speed >= 32.0);
        if let Some(most) = made_for
            && rate < most / 2.0 - 1.0
            && rate >= sibling * 0.99
        {
            below.push((nic, port, rate, most, fast_slot));
        }
        let width = width::of(port);
        // Findings of their own, which name the cause.
        if matches!(width, Width::Lost(_) | Width::Set { .. }) && !port.is_ethernet() {
            continue;
        }
        if rate < sibling * 0.99 || (width == Width::Unknown && has_lost_lanes(port)) {
            slow.push((nic, port, rate, sibling));
        }
    }
    if let Some((nic, port, rate, sibling)) = slow.first() {
        let names: Vec<_> = slow.iter().map(|(nic, port, ..)| name(nic, port)).collect();
        let against = if sibling > rate {
            format!("while others of its model run at {sibling} Gb/s")
        } else {
            format!("with {} of its lanes", port.lanes.unwrap_or(0))
        };
        found.push(
            Finding::new(
                "port-rate",
                Severity::Warning,
                format!("{}: the network link runs at {rate} Gb/s {against}", list(&names)),
            )
            .why("Collectives over several rails run at the speed of the slowest one.")
            .seen(
                format!("/sys/class/infiniband/{}/ports/{}/rate", nic.name, port.number),
                format!(
                    "{rate} Gb/s, {} lanes",
                    port.lanes.map_or_else(|| "unknown".to_owned(), |lanes| lanes.to_string())
                ),
            )
            .fix(
                Fix::host()
                    .each(&pci_addresses(slow.iter().map(|(nic, ..)| *nic)), "mlxlink -d {} -m")
                    .remark("reseat or replace the cable; compare the speed set in the switch"),
            )
            .root()
            .slows()
            .on(slow.iter().map(|(nic, ..)| nic.name.clone())),
        );
    }
    if let Some((nic, port, rate, most, _)) = below.first() {
        let names: Vec<_> = below.iter().map(|(nic, port, ..)| name(nic, port)).collect();
        let severity = if below.iter().any(|(.., fast)| *fast) { Severity::Warning } else { Severity::Info };
        let finding = Finding::new(
            "port-rate",
            severity,
            format!("{}: the network link runs at {rate} Gb/s, this model supports up to {most}", list(&names)),
        )
        .why("The switch, its port or the cable may be older or set to a lower speed; some cards of this model have a lower rated speed.")
        .seen(format!("/sys/class/infiniband/{}/ports/{}/rate", nic.name, port.number), format!("{rate} Gb/s"))
        .fix(Fix::host().each(&pci_addresses(below.iter().map(|(nic, ..)| *nic)), "mlxlink -d {} -m").remark("what the card supports, what the cable allows, what the switch offers"))
        .root();
        let finding = if severity == Severity::Warning { finding.slows() } else { finding };
        found.push(finding.on(below.iter().map(|(nic, ..)| nic.name.clone())));
    }
    unread(analysis, found);
}

/// Ports without a state or a rate.
fn unread(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let unread: Vec<_> = hardware(analysis)
        .filter(|(_, port)| port.state.is_empty() || (port.is_active() && port.rate_gbps.known().is_none()))
        .collect();
    if let Some((nic, port)) = unread.first() {
        let names: Vec<_> = unread.iter().map(|(nic, port)| name(nic, port)).collect();
        found.push(
            Finding::new(
                "port-unread",
                Severity::Unknown,
                format!("{}: state or rate of the port could not be read", list(&names)),
            )
            .why("State and speed of the port are unknown.")
            .seen(
                format!("/sys/class/infiniband/{}/ports/{}", nic.name, port.number),
                port.rate_gbps.why_not().unwrap_or("no state"),
            )
            .fix(Fix::both().run(format!("ibv_devinfo -d {}; rdma link show", nic.name)))
            .on(unread.iter().map(|(nic, _)| nic.name.clone())),
        );
    }
}

/// Priority 3 without loss, by DSCP.
const PFC: &str = "mlnx_qos -i {} --trust dscp --pfc 0,0,0,1,0,0,0,0";

/// Names of the interfaces of ports; where one is not known, what finds it.
fn netdevs<'a>(ports: impl Iterator<Item = (&'a Nic, &'a Port)>) -> Vec<String> {
    let unknown = |nic: &Nic| format!("$(ls /sys/class/infiniband/{}/device/net)", nic.name);
    ports
        .map(|(nic, port)| port.netdev.as_ref().map_or_else(|| unknown(nic), |netdev| netdev.name.clone()))
        .collect()
}

/// What mlxlink takes: PCI addresses.
pub(super) fn pci_addresses<'a>(nics: impl Iterator<Item = &'a Nic>) -> Vec<String> {
    nics.map(|nic| nic.address.clone().unwrap_or_else(|| nic.name.clone())).collect()
}

/// Whether an InfiniBand link runs with fewer lanes than ports of its speed have: four, or two
/// since HDR, where switches split a port (HDR100, NDR200).
pub(super) fn has_lost_lanes(port: &Port) -> bool {
    /// Gb/s of one lane of HDR.
    const HDR: f64 = 50.0;
    let Some(lanes) = port.lanes.filter(|_| !port.is_ethernet()) else { return false };
    let Some(rate) = port.rate_gbps.get() else { return false };
    let split = rate / f64::from(lanes.max(1)) >= HDR * 0.99;
    lanes < if split { 2 } else { 4 }
}

/// Gb/s of the fastest card of a model, where all of them are one generation.
fn made_for(vendor: u32, device: u32) -> Option<f64> {
    match (vendor, device) {
        // ConnectX-6, 7, 8 and BlueField-3.
        (0x15b3, 0x101b) => Some(200.0),
        (0x15b3, 0x1021 | 0xa2dc) => Some(400.0),
        (0x15b3, 0x1023) => Some(800.0),
        // Thor 2.
        (0x14e4, 0x1760) => Some(400.0),
        _ => None,
    }
}

fn sizes(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let small: Vec<_> = hardware(analysis)
        .filter(|(_, port)| port.may_be_active() && port.active_mtu.get().is_some_and(|mtu| mtu < 2048))
        .collect();
    if let Some((nic, port)) = small.first() {
        let names: Vec<_> = small.iter().map(|(nic, port)| name(nic, port)).collect();
        let mtu = port.active_mtu.get().unwrap_or(0);
        let finding = Finding::new(
            "mtu-small",
            Severity::Warning,
            format!("{}: RDMA packets carry only {mtu} bytes", list(&names)),
        )
        .why("Headers take a larger part of the link, and a message takes several times as many packets.");
        let finding =
            match &port.netdev {
                Some(netdev) if port.is_ethernet() => finding
                    .seen(
                        format!("/sys/class/net/{}/mtu", netdev.name),
                        netdev.mtu.get().map_or_else(|| "unread".to_owned(), |mtu| mtu.to_string()),
                    )
                    .fix(
                        Fix::both()
                            .each(&netdevs(small.iter().copied()), "sudo ip link set {} mtu 9000")
                            .remark("and on every switch on the path"),
                    ),
                _ => finding
                    .seen(format!("ibv_devinfo -d {}", nic.name), format!("active_mtu {mtu}"))
                    .fix(Fix::both().remark(
                    "set the MTU of the partition to 4096 in the subnet manager (mtu=5 in partitions.conf)",
                )),
            };
        found.push(finding.root().slows().on(small.iter().map(|(nic, _)| nic.name.clone())));
    }
    let mut sizes: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for (nic, port) in hardware(analysis).filter(|(_, port)| port.is_active() && port.is_ethernet()) {
        if let Some(mtu) = port.active_mtu.get().filter(|mtu| *mtu >= 2048) {
            sizes.entry(mtu).or_default().push(nic.name.clone());
        }
    }
    if sizes.len() > 1 {
        let told: Vec<_> = sizes.iter().map(|(mtu, nics)| format!("{mtu}: {}", list(nics))).collect();
        found.push(
            Finding::new("mtu-differs", Severity::Info, "the adapters have different MTUs")
                .why("Two ends agree on the smaller one; if a switch on the path has a smaller MTU, connections hang with status 12.")
                .seen("active MTU", told.join("; "))
                .fix(Fix::both().remark("set the same MTU on all interfaces and switches"))
                .root(),
        );
    }
}

/// Counters that grow where the network drops packets.
fn losses(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    const LOST: [&str; 3] = ["out_of_sequence", "packet_seq_err", "local_ack_timeout_err"];
    /// Single losses happen everywhere.
    const MANY: u64 = 1000;
    let lossy: Vec<_> = hardware(analysis)
        .filter(|(_, port)| port.is_ethernet())
        .filter_map(|(nic, port)| {
            let (name, count) = LOST
                .iter()
                .filter_map(|name| Some((*name, *port.counters.get(*name)?)))
                .max_by_key(|(_, count)| *count)?;
            (count > MANY).then_some((nic, port, name, count))
        })
        .collect();
    let open: Vec<_> = hardware(analysis)
        .filter(|(_, port)| port.is_ethernet() && port.is_active())
        .filter(|(nic, _)| !lossy.iter().any(|(lossy, ..)| lossy.name == nic.name))
        .filter(|(_, port)| {
            port.netdev
                .as_ref()
                .is_some_and(|netdev| netdev.pfc.get() == Some(false) && netdev.ecn.get() != Some(true))
        })
        .collect();
    if !open.is_empty() {
        let ecn_off = open
            .iter()
            .all(|(_, port)| port.netdev.as_ref().is_some_and(|netdev| netdev.ecn.get() == Some(false)));
        let names: Vec<_> = open.iter().map(|(nic, _)| nic.name.clone()).collect();
        found.push(
            Finding::new("roce-flow-control", Severity::Info, format!("{}: {}", list(&names), if ecn_off { "neither PFC nor ECN is on" } else { "PFC is off, and ECN could not be read" }))
                .why("No losses so far. With several senders, switches will drop packets, and each loss is expensive for RoCE.")
                .seen("PFC, ECN", if ecn_off { "off, off" } else { "off, unread" })
                .fix(Fix::host().each(&netdevs(open.iter().copied()), PFC).remark("and the same priority in every switch"))
                .root()
                .on(names),
        );
    }
    if let Some((nic, port, counter, count)) = lossy.first() {
        let names: Vec<_> = lossy.iter().map(|(nic, ..)| nic.name.clone()).collect();
        let mut finding = Finding::new("roce-loss", Severity::Warning, format!("{}: the network loses RoCE packets", list(&names)))
            .why("RoCE retransmits everything after a lost packet: one loss in a thousand costs half of the bandwidth. It needs a lossless network (PFC) or congestion control (ECN).")
            .seen(format!("/sys/class/infiniband/{}/ports/{}/hw_counters/{counter}", nic.name, port.number), count.to_string());
        if let Some(netdev) = &port.netdev {
            if let Some(pfc) = netdev.pfc.get() {
                finding = finding.seen(format!("PFC on {}", netdev.name), if pfc { "on" } else { "off" });
            }
            if let Some(ecn) = netdev.ecn.get() {
                finding =
                    finding.seen(format!("ECN for RoCE on {}", netdev.name), if ecn { "on" } else { "off" });
            }
        }
        found.push(
            finding
                .fix(
                    Fix::host()
                        .each(&netdevs(lossy.iter().map(|(nic, port, ..)| (*nic, *port))), PFC)
                        .remark("and the same priority in every switch"),
                )
                .fix(
                    Fix::container()
                        .set("NCCL_IB_TC=106 UCX_IB_TRAFFIC_CLASS=106")
                        .remark("the traffic class of this priority"),
                )
                .root()
                .slows()
                .on(names),
        );
    }
}

/// Links that fail far more often than those of the other adapters.
fn errors(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    /// Fewer happen when machines and switches start.
    const LEAST: [(&str, u64); 2] = [("link_downed", 20), ("symbol_error", 1000)];
    let of = |port: &Port, name: &str| port.counters.get(name).copied().unwrap_or(0);
    for (name, least) in LEAST {
        let others = |nic: &Nic| {
            hardware(analysis).any(|(other, port)| other.name != nic.name && of(port, name) < least / 10)
        };
        let bad: Vec<_> =
            hardware(analysis).filter(|(nic, port)| of(port, name) >= least && others(nic)).collect();
        let Some((nic, port)) = bad.first() else { continue };
        let names: Vec<_> = bad.iter().map(|(nic, _)| nic.name.clone()).collect();
        found.push(
            Finding::new("link-errors", Severity::Warning, format!("{}: the network link is faulty", list(&names)))
                .why("Links of the other adapters of this machine have no such errors: a cable, a transceiver or a port is bad. Operations stall, or end with status 12.")
                .seen(format!("/sys/class/infiniband/{}/ports/{}/counters/{name}", nic.name, port.number), of(port, name).to_string())
                .fix(Fix::host().remark("reseat or replace the cable").each(&pci_addresses(bad.iter().map(|(nic, _)| *nic)), "mlxlink -d {} -m -c"))
                .root()
                .slows()
                .on(names),
        );
        return;
    }
}
