//! Settings of NCCL (and RCCL) that defeat GPUDirect.

use super::list;
use super::settings::{able, dma_buf_off, left_out, relaxed, set, too_old};
use crate::finding::{Finding, Fix, Severity};
use crate::names::Filter;
use crate::nccl::{self, Level, Network};
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{GpuVendor, NO_FOLDER, Nic, Variable};

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if !analysis.has_hardware_nic() {
        return found;
    }
    network(analysis, &mut found);
    level(analysis, &mut found);
    filter(analysis, &mut found);
    switches(analysis, &mut found);
    bond(analysis, &mut found);
    retries(analysis, &mut found);
    rails(analysis, &mut found);
    rccl(analysis, &mut found);
    let version = analysis.facts.libraries.nccl.known().and_then(|nccl| nccl.as_ref()?.version.as_deref());
    // A plugin registers memory in its own way.
    let own = |nic: &Nic| !nccl::is_efa(nic) && nccl::network(analysis.facts, nic) == Network::Adapters;
    let misses = |pair: &Pair<'_>| nccl::misses(analysis.facts, pair).filter(|_| own(pair.nic));
    found.extend(too_old(analysis, "nccl-too-old", "NCCL", version, misses));
    found
}

fn variable<'a>(analysis: &Analysis<'a>, name: &str) -> Option<Variable<'a>> {
    analysis.facts.variable(name)
}

/// Bonded ports: one queue pair uses one of them.
fn bond(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let names: Vec<_> =
        hardware(analysis).filter(|nic| nic.name.contains("bond")).map(|nic| nic.name.clone()).collect();
    let pairs = variable(analysis, "NCCL_IB_QPS_PER_CONNECTION")
        .and_then(|variable| variable.value.trim().parse::<u32>().ok());
    if names.is_empty() || pairs.is_some_and(|pairs| pairs > 1) || facts.gpus.is_empty() {
        return;
    }
    let severity = if uses_nccl(analysis) { Severity::Warning } else { Severity::Info };
    found.push(
        Finding::new("nccl-bond", severity, format!("{}: NCCL uses one queue pair per connection, and so one port of the bond", list(&names)))
            .why("A bond distributes queue pairs over its ports: with a single queue pair, half of the bandwidth is idle.")
            .seen("NCCL_IB_QPS_PER_CONNECTION", pairs.map_or_else(|| "not set (1)".to_owned(), |pairs| pairs.to_string()))
            .fix(Fix::container().set("NCCL_IB_QPS_PER_CONNECTION=4 NCCL_IB_SPLIT_DATA_ON_QPS=0").remark("or no bond: NCCL uses several ports on its own"))
            .slows(),
    );
}

/// Whether anything shows that NCCL is used: the library, or a variable of it.
fn uses_nccl(analysis: &Analysis<'_>) -> bool {
    let facts = analysis.facts;
    matches!(facts.libraries.nccl.known(), Some(Some(_)))
        || facts.variables().any(|variable| variable.name.starts_with("NCCL_"))
}

/// Waiting times and retries that a short congestion exhausts.
fn retries(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    // 4.096 us times two to the power of the timeout; 20 by default, 18 before 2.23 and 14 before
    // 2.14.
    for (name, least, usual) in [("NCCL_IB_TIMEOUT", 12, 20), ("NCCL_IB_RETRY_CNT", 3, 7)] {
        let Some(variable) = variable(analysis, name) else { continue };
        if variable.value.trim().parse::<u32>().is_ok_and(|value| value < least) {
            let finding = Finding::new("nccl-retry", Severity::Warning, format!("{variable} is too low (default {usual})"))
                .why("A timeout is 4.096 us times two to the power of NCCL_IB_TIMEOUT, and so many retries follow. Congestion lasts longer: connections end with status 12 (retries exceeded).");
            found.push(set(finding, variable).fix(Fix::container().set(format!("{name}={usual}"))));
        }
    }
}

/// Traffic between rails goes through the GPU of the right rail (PXN) unless that is switched off.
fn rails(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    if nccl::is_on(analysis.facts, "NCCL_PXN_DISABLE") != Some(true)
        || analysis.facts.gpus.len() < 2
        || hardware(analysis).count() < 2
    {
        return;
    }
    let Some(variable) = variable(analysis, "NCCL_PXN_DISABLE") else { return };
    let finding = Finding::new("nccl-pxn", Severity::Warning, "NCCL_PXN_DISABLE=1: every GPU connects to adapters of other rails itself")
        .why("All-to-all traffic then crosses rails in the network, with many more connections. Networks that connect only equal rails cannot carry it: connections fail.");
    found.push(set(finding, variable));
}

/// RCCL looks for peer memory in a folder that newer kernels and OFEDs do not have.
fn rccl(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let amd: Vec<String> =
        facts.gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Amd).map(|gpu| gpu.address.clone()).collect();
    let hidden = facts.kernel.peer_memory_clients.why_not() == Some(NO_FOLDER)
        && facts.kernel.peer_memory_api.get() == Some(true);
    if amd.is_empty() || !hidden || nccl::is_on(facts, "NCCL_DMABUF_ENABLE") == Some(true) {
        return;
    }
    found.push(
        Finding::new("rccl-peermem", Severity::Warning, "RCCL may not detect peer memory: it looks for /sys/kernel/mm/memory_peers, which this kernel does not have")
            .why("ib_core has the interface, and amdgpu may be registered with it. RCCL before ROCm 6.3 then stages everything: no GDRDMA in its log.")
            .seen("/sys/kernel/mm/memory_peers", NO_FOLDER)
            .seen("/proc/kallsyms", "ib_register_peer_memory_client")
            .fix(Fix::container().set("NCCL_DMABUF_ENABLE=1").remark("or use a current RCCL (ROCm 6.3 and newer)"))
            .of_library("NCCL")
            .on(amd),
    );
}

/// Adapters that are hardware.
fn hardware<'a>(analysis: &Analysis<'a>) -> impl Iterator<Item = &'a Nic> {
    analysis.facts.nics.iter().filter(|nic| !nic.is_software())
}

fn network(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let sockets = |nic: &Nic| matches!(nccl::network(facts, nic), Network::Sockets(_));
    if nccl::is_on(facts, "NCCL_IB_DISABLE") == Some(true)
        && hardware(analysis).any(|nic| !nccl::is_efa(nic) && sockets(nic))
        && let Some(variable) = variable(analysis, "NCCL_IB_DISABLE")
    {
        let finding = Finding::new(
            "nccl-ib-disable",
            Severity::Error,
            "NCCL_IB_DISABLE keeps NCCL from using the adapters",
        )
        .why("All traffic between machines goes over TCP sockets.");
        found.push(set(finding, variable));
    }
    if let Some(net) = variable(analysis, "NCCL_NET")
        && net.value.trim().eq_ignore_ascii_case("socket")
    {
        let finding = Finding::new(
            "nccl-net-socket",
            Severity::Error,
            "NCCL_NET=Socket keeps NCCL from using the adapters",
        )
        .why("All traffic between machines goes over TCP sockets.");
        found.push(set(finding, net));
    }
    plugin(analysis, found);
    if nccl::is_on(facts, "NCCL_IB_CUDA_SUPPORT") == Some(false)
        && let Some(variable) = variable(analysis, "NCCL_IB_CUDA_SUPPORT")
    {
        let finding = Finding::new(
            "nccl-gdr-level",
            Severity::Error,
            "NCCL_IB_CUDA_SUPPORT=0 disables GPUDirect (NCCL before 2.4)",
        )
        .why("GPU memory is staged through the host.");
        found.push(set(finding, variable));
    }
}

/// Networks of plugins, and adapters that need one.
fn plugin(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let efa = hardware(analysis).any(nccl::is_efa);
    let without = [("NCCL_NET_PLUGIN", "none"), ("NCCL_NET", "ib")].into_iter().find_map(|(name, off)| {
        variable(analysis, name).filter(|variable| variable.value.trim().eq_ignore_ascii_case(off))
    });
    if let Some(variable) = without.filter(|_| efa) {
        let finding = Finding::new(
            "nccl-efa-plugin",
            Severity::Error,
            format!("{}={}: NCCL cannot use EFA without its plugin", variable.name, variable.value),
        )
        .why("NCCL falls back to TCP sockets; EFA needs aws-ofi-nccl.");
        found.push(set(finding, variable));
    }
    match nccl::missing_plugin(facts).filter(|_| efa) {
        Some(None) => found.push(
            Finding::new("nccl-efa-plugin", Severity::Error, "NCCL has no plugin for EFA: aws-ofi-nccl is not installed here")
                .why("NCCL reaches EFA only through this plugin (libnccl-net.so), and silently uses TCP sockets without it.")
                .seen("libnccl-net*.so", "not found")
                .fix(Fix::container().remark("install aws-ofi-nccl by the EFA installer (in the image, with libfabric)")),
        ),
        Some(Some(_)) => found.push(
            Finding::new("nccl-efa-plugin", Severity::Error, "NCCL does not find its plugin for EFA: its folder is not in LD_LIBRARY_PATH")
                .why("NCCL reaches EFA only through this plugin (libnccl-net.so), and silently uses TCP sockets without it.")
                .seen("libnccl-net*.so", "below /opt, where the loader does not look")
                .fix(Fix::container().set("LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:$LD_LIBRARY_PATH")),
        ),
        None => {}
    }
    let other = hardware(analysis).find_map(|nic| match nccl::network(facts, nic) {
        Network::Ucx(variable) => Some((variable, "NCCL then follows UCX's use of GPU memory, and its own distance rule as well.")),
        Network::Plugin(variable) => Some((variable, "Use of these adapters and of GPUDirect by the plugin is unknown: look for GDRDMA in NCCL's log (doctor --nccl-log).")),
        Network::Adapters | Network::Sockets(_) => None,
    });
    if let Some((variable, why)) = other {
        found.push(
            Finding::new("nccl-plugin", Severity::Info, format!("NCCL uses a network plugin: {variable}"))
                .why(why)
                .seen("variable", variable)
                .fix(Fix::container().set("NCCL_NET=IB").remark("for NCCL's built-in transport")),
        );
    }
}

fn level(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    for name in ["NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL"] {
        let Some(variable) = variable(analysis, name) else { continue };
        let Some(level) = Level::parse(variable.value) else {
            found.push(
                set(
                    Finding::new("nccl-level-ignored", Severity::Warning, format!("{variable} is not a valid value; NCCL ignores it"))
                        .why("The default (PXB) applies. Valid names are LOC, PIX, PXB, PHB and SYS, in upper case; NODE is not valid."),
                    variable,
                )
                .fix(Fix::container().set("NCCL_NET_GDR_LEVEL=PHB").remark("or SYS")),
            );
            continue;
        };
        let stopped: Vec<_> =
            able(analysis).into_iter().filter(|pair| nccl::distance(facts, pair) > level).collect();
        if stopped.is_empty() {
            continue;
        }
        let names: Vec<_> = stopped.iter().map(|pair| pair.gpu.address.clone()).collect();
        let need = stopped.iter().map(|pair| nccl::distance(facts, pair)).max().unwrap_or(Level::Sys);
        // Where the default would not have allowed it either, the setting is no change for the
        // worse.
        let unplaced = |pair: &&&Pair<'_>| facts.pci_device(&pair.gpu.address).is_none();
        let default_allows = stopped.iter().any(|pair| nccl::distance(facts, pair) <= Level::P2c)
            // No distance is as short as LOC.
            || (level == Level::Loc && stopped.iter().any(|pair| unplaced(&pair)));
        let severity = if default_allows { Severity::Error } else { Severity::Info };
        let finding = Finding::new("nccl-gdr-level", severity, format!("{variable} keeps NCCL from GPUDirect on {}", list(&names)))
            .why(format!("The setting allows distances up to {}, but the nearest adapter is at {}: GPU memory is staged through the host.", level.name(), need.name()));
        found.push(
            set(finding, variable)
                .fix(Fix::container().set(format!("{name}={}", need.name())))
                .stages()
                .on(names),
        );
    }
}

fn filter(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let Some(variable) = variable(analysis, "NCCL_IB_HCA") else { return };
    let filter = Filter::nccl(variable.value);
    let nics: Vec<_> = hardware(analysis).filter(|nic| !nccl::is_efa(nic)).collect();
    if nics.is_empty() {
        return;
    }
    if !nics.iter().any(|nic| filter.takes(nic)) {
        found.push(set(
            Finding::new("nccl-hca-none", Severity::Error, format!("{variable} matches no adapter"))
                .why("NCCL finds no RDMA device and uses TCP sockets.")
                .seen("adapters", nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>().join(" ")),
            variable,
        ));
        return;
    }
    found.extend(left_out(analysis, variable, &filter, "nccl-hca-far", "NCCL"));
    let blanks = filter.with_blanks();
    if !blanks.is_empty() {
        found.push(
            Finding::new("nccl-hca-blank", Severity::Warning, format!("{variable} has spaces between its names"))
                .why("NCCL treats a space as part of the name: adapters after one are not matched, and their rails stay idle.")
                .seen(variable.source, format!("NCCL_IB_HCA={}", variable.value))
                .fix(Fix::container().set(format!("NCCL_IB_HCA={}", variable.value.replace(' ', "")))),
        );
    }
    let unknown = filter.unknown(|name| {
        // Those are reported above.
        let name = name.trim();
        facts
            .nics
            .iter()
            .any(|nic| if filter.is_exact() { nic.name == name } else { nic.name.starts_with(name) })
    });
    if !unknown.is_empty() {
        found.push(
            Finding::new(
                "nccl-hca-unknown",
                Severity::Info,
                format!("NCCL_IB_HCA names {}, which does not exist on this machine", list(&unknown)),
            )
            .why("Names differ between machines; an adapter may be missing, or a rail left out.")
            .seen(variable.source, format!("NCCL_IB_HCA={}", variable.value)),
        );
    }
}

fn switches(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if nccl::is_on(facts, "NCCL_DMABUF_ENABLE") == Some(false)
        && let Some(variable) = variable(analysis, "NCCL_DMABUF_ENABLE")
    {
        found.push(dma_buf_off("nccl-dmabuf", "NCCL", variable, analysis, &able(analysis)));
    }
    if nccl::is_on(facts, "NCCL_NET_GDR_READ") == Some(false)
        && let Some(variable) = variable(analysis, "NCCL_NET_GDR_READ")
    {
        let finding = Finding::new(
            "nccl-gdr-read",
            Severity::Warning,
            "NCCL_NET_GDR_READ=0: GPU memory is received directly, but sent through the host",
        )
        .why(
            "On Ampere and newer, reading GPU memory is as fast as writing it; sends are copied for nothing.",
        );
        found.push(set(finding, variable));
    }
    if nccl::is_on(facts, "NCCL_NET_GDR_C2C") == Some(false)
        && facts.gpus.iter().any(|gpu| gpu.coherent_link.get() == Some(true))
        && let Some(variable) = variable(analysis, "NCCL_NET_GDR_C2C")
    {
        let finding =
            Finding::new("nccl-c2c", Severity::Warning, "NCCL_NET_GDR_C2C=0 disables GPUDirect on Grace")
                .why("Packets of adapters at the processor then go through host memory.");
        found.push(set(finding, variable));
    }
    if let Some(variable) = variable(analysis, "NCCL_IB_PCI_RELAXED_ORDERING")
        && variable.value.trim() == "0"
    {
        found.push(relaxed(analysis, variable));
    }
}
