//! Placement: distance, sockets, virtual machines, CPUs with poor peer-to-peer forwarding.

use super::list;
use crate::finding::{Finding, Fix, Severity};
use crate::nccl;
use crate::verdict::UseKind;
use nobounce_topology::analysis::Analysis;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::Distance;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if analysis.pairs.is_empty() || !analysis.has_hardware_nic() {
        return found;
    }
    far(analysis, &mut found);
    shared(analysis, &mut found);
    flat(analysis, &mut found);
    nodes(analysis, &mut found);
    processor(analysis, &mut found);
    distance_rule(analysis, &mut found);
    found
}

/// GPUs whose nearest adapter is on the other socket.
fn far(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let best = analysis.best();
    let far: Vec<_> = best
        .iter()
        .flatten()
        .filter(|pair| pair.distance == Some(Distance::Sys) && !pair.nic.is_software())
        // Memory nodes of one socket are another finding.
        .filter(|pair| !pair.one_socket)
        .filter(|pair| {
            pair.nic
                .address
                .as_deref()
                .is_some_and(|nic| analysis.tree.distance_is_sure(&pair.gpu.address, nic))
        })
        .collect();
    let Some(first) = far.first() else { return };
    let names: Vec<_> = far.iter().map(|pair| pair.gpu.address.clone()).collect();
    found.push(
        Finding::new("far-nic", Severity::Warning, format!("{}: the nearest adapter ({}) is on another socket", list(&names), first.nic.name))
            .why("The link between sockets is shared by all traffic. By default NCCL does not use GPUDirect at this distance.")
            .seen("distance", format!("{} to {}: SYS", first.gpu.address, first.nic.name))
            .fix(Fix::both().remark("move an adapter to a slot of this socket, or use GPUs of the adapter's socket (CUDA_VISIBLE_DEVICES)"))
            .slows()
            .on(names),
    );
}

/// More GPUs than adapters near them.
fn shared(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let best = analysis.best();
    let mut count: Vec<(&str, usize)> = Vec::new();
    for pair in best.iter().flatten().filter(|pair| !pair.nic.is_software()) {
        match count.iter_mut().find(|(name, _)| *name == pair.nic.name) {
            Some((_, users)) => *users += 1,
            None => count.push((&pair.nic.name, 1)),
        }
    }
    let crowded: Vec<_> = count.iter().filter(|(_, users)| *users > 1).collect();
    let Some((name, users)) = crowded.first() else { return };
    found.push(
        Finding::new("shared-nic", Severity::Info, format!("{name} is the nearest adapter of {users} GPUs"))
            .why("The GPUs share the bandwidth of one port.")
            .seen(
                "nearest adapter",
                crowded
                    .iter()
                    .map(|(name, users)| format!("{name}: {users} GPUs"))
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
    );
}

/// A virtual machine whose PCI tree shows no switches.
fn flat(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if !facts.is_virtual()
        || analysis.pairs.iter().any(|pair| pair.distance.is_some_and(Distance::is_below_switch))
    {
        return;
    }
    let told = facts.variable("NCCL_TOPO_FILE").is_some();
    let finding = Finding::new("vm-flat", Severity::Info, "the virtual machine's PCI tree is flat: it does not show the topology")
        .why("All adapters look equally distant, so programs choose at random and NCCL sees the processor between GPU and adapter. ACS and ATS are set on the host and not visible here: wrong settings cost half of the bandwidth.")
        .seen("hypervisor", facts.machine.hypervisor.known().cloned().flatten().unwrap_or_default())
        .seen("GPU and adapter", "no common switch");
    found.push(if told {
        finding.seen("NCCL_TOPO_FILE", "set")
    } else {
        finding
            .fix(
                Fix::container()
                    .set("NCCL_NET_GDR_LEVEL=SYS")
                    .remark("or name a file with the host's tree in NCCL_TOPO_FILE (clouds provide one)"),
            )
            .fix(Fix::both().remark(
                "operators: give the guest PCIe switches with pxb-pcie and the memory nodes of the host",
            ))
    });
}

fn nodes(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let lost: Vec<String> = facts
        .gpus
        .iter()
        .map(|gpu| gpu.address.as_str())
        .chain(facts.nics.iter().filter_map(|nic| nic.address.as_deref()))
        .filter(|address| facts.pci_device(address).is_none())
        .map(str::to_owned)
        .collect();
    if !lost.is_empty() {
        found.push(
            Finding::new(
                "not-in-tree",
                Severity::Unknown,
                format!("the PCI tree does not show {}", list(&lost)),
            )
            .why("The distance between GPU and adapter, and the devices between them, are unknown.")
            .seen("/sys/bus/pci/devices", format!("no {}", lost[0]))
            .fix(Fix::both().run("nobounce topo").remark("where all of /sys is mounted"))
            .on(lost),
        );
    }
    let blind: Vec<String> = facts
        .gpus
        .iter()
        .map(|gpu| gpu.address.as_str())
        .chain(facts.nics.iter().filter_map(|nic| nic.address.as_deref()))
        .filter(|address| {
            facts.pci_device(address).is_some_and(|device| device.numa_node.get().is_none_or(|node| node < 0))
        })
        .map(str::to_owned)
        .collect();
    let many = facts.machine.numa.len() > 1 || facts.machine.sockets.get().is_some_and(|sockets| sockets > 1);
    if blind.is_empty() || !many {
        return;
    }
    found.push(
        Finding::new("numa-unknown", Severity::Unknown, format!("the firmware does not report the memory node of {}", list(&blind)))
            .why("Distances across the processor are guesses; programs may bind to the wrong socket.")
            .seen(format!("/sys/bus/pci/devices/{}/numa_node", blind[0]), "-1")
            .fix(Fix::host().remark("update the firmware (BIOS); hypervisors: place devices below pxb-pcie bridges with a memory node"))
            .root()
            .on(blind),
    );
}

/// CPUs that forward packets between devices poorly or not at all.
fn processor(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if facts.is_virtual() {
        return;
    }
    let through: Vec<String> = analysis
        .best()
        .iter()
        .flatten()
        .filter(|pair| {
            matches!(pair.distance, Some(Distance::Phb | Distance::Node))
                && !pair.nic.is_software()
                && pair.gpu.coherent_link.get() != Some(true)
        })
        .map(|pair| pair.gpu.address.clone())
        .collect();
    if through.is_empty() {
        return;
    }
    let platform = Platform::of(&facts.machine.cpu);
    let (severity, what) = match platform {
        Platform::IntelClient => (
            Severity::Warning,
            "Peer-to-peer reads across its root ports often do not work at all, and writes are slow.",
        ),
        Platform::XeonOld => (
            Severity::Warning,
            "Peer-to-peer reads across its root ports are slow, writes about twice as fast.",
        ),
        Platform::XeonSkylake => (
            Severity::Info,
            "Peer-to-peer reads across its root ports reach about half of a switch's rate; writes are faster.",
        ),
        Platform::SapphireRapids | Platform::EmeraldRapids => {
            (Severity::Info, "Full bandwidth needs relaxed ordering.")
        }
        Platform::Zen => (
            Severity::Info,
            "Peer-to-peer traffic across its root ports is fast with relaxed ordering: 150 Gb/s without, 200 with it on a 200G adapter.",
        ),
        Platform::Grace | Platform::Other => return,
    };
    let finding = Finding::new(
        "through-cpu",
        severity,
        format!("GPU and adapter are connected through {}, not through a PCIe switch", platform.name()),
    )
    .why(what)
    .seen("processor", facts.machine.cpu.name.clone())
    .seen("distance", format!("{} to its nearest adapter: PHB or NODE", through[0]));
    let finding = match severity {
        Severity::Info => finding,
        _ => finding
            .fix(
                Fix::container()
                    .remark("use slots below one PCIe switch, if the board has one; otherwise stage")
                    .set("NCCL_NET_GDR_LEVEL=LOC UCX_IB_GPU_DIRECT_RDMA=n"),
            )
            .slows(),
    };
    found.push(finding.on(through));
}

/// Pairs that could be direct and that NCCL leaves staged by its own default.
fn distance_rule(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if nccl::level(facts).is_some() {
        return;
    }
    let left: Vec<_> = analysis
        .best()
        .into_iter()
        .flatten()
        .filter(|pair| pair.dma_buf() || pair.peermem.is_yes())
        .filter(|pair| {
            let plan = nccl::plan(analysis, pair);
            plan.kind == UseKind::Staged && plan.text.starts_with("distance")
        })
        .collect();
    let Some(first) = left.first() else { return };
    let level = nccl::distance(facts, first);
    let names: Vec<_> = left.iter().map(|pair| pair.gpu.address.clone()).collect();
    found.push(
        Finding::new("nccl-distance", Severity::Info, format!("NCCL will stage for {}: its default limit is PXB, and it counts this distance as {}", list(&names), level.name()))
            .why("NCCL assumes slow peer-to-peer traffic through the processor. On AMD Zen, Grace and recent Xeons direct is often faster: measure both.")
            .seen("distance", format!("{} to {}: {}", first.gpu.address, first.nic.name, level.name()))
            .fix(Fix::container().set(format!("NCCL_NET_GDR_LEVEL={}", level.name())))
            .stages()
            .on(names),
    );
}
