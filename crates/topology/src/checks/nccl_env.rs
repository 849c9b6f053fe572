//! Settings of NCCL (and RCCL) that defeat GPUDirect.

use super::list;
use crate::analysis::{Analysis, Pair};
use crate::facts::Variable;
use crate::finding::{Finding, Severity};
use crate::names::Filter;
use crate::nccl::{self, Level};
use crate::platform::Platform;

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if !analysis.has_hardware_nic() {
        return found;
    }
    network(analysis, &mut found);
    level(analysis, &mut found);
    filter(analysis, &mut found);
    switches(analysis, &mut found);
    found
}

fn variable<'a>(analysis: &Analysis<'a>, name: &str) -> Option<Variable<'a>> {
    analysis.facts.variable(name)
}

fn set(finding: Finding, variable: Variable<'_>) -> Finding {
    let place = if variable.source == "environment" {
        format!("unset {}", variable.name)
    } else {
        format!("remove {} from {}", variable.name, variable.source)
    };
    finding.seen(variable.source, format!("{}={}", variable.name, variable.value)).fix(place)
}

fn network(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    if nccl::is_on(analysis.facts, "NCCL_IB_DISABLE") == Some(true)
        && let Some(variable) = variable(analysis, "NCCL_IB_DISABLE")
    {
        let finding = Finding::new(
            "nccl-ib-disable",
            Severity::Error,
            "NCCL_IB_DISABLE keeps NCCL from using the adapters",
        )
        .why("All traffic between machines goes over TCP sockets: a tenth of the bandwidth.");
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
    if nccl::is_on(analysis.facts, "NCCL_IB_CUDA_SUPPORT") == Some(false)
        && let Some(variable) = variable(analysis, "NCCL_IB_CUDA_SUPPORT")
    {
        let finding = Finding::new(
            "nccl-gdr-level",
            Severity::Error,
            "NCCL_IB_CUDA_SUPPORT=0 switches GPUDirect off (NCCL before 2.4)",
        )
        .why("GPU memory is staged through the host.");
        found.push(set(finding, variable));
    }
}

/// Pairs that could be direct, if only NCCL let them.
fn able<'a, 'b>(analysis: &'b Analysis<'a>) -> Vec<&'b Pair<'a>> {
    analysis
        .best()
        .into_iter()
        .flatten()
        .filter(|pair| !(pair.nic.is_software() || pair.no_dma_buf() && pair.peermem.is_no()))
        .collect()
}

fn level(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    for name in ["NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL"] {
        let Some(variable) = variable(analysis, name) else { continue };
        let Some(level) = Level::parse(variable.value) else {
            found.push(
                set(
                    Finding::new("nccl-level-ignored", Severity::Warning, format!("{variable} is not understood by NCCL, and ignored"))
                        .why("The default (PXB) holds. Names are upper case: LOC, PIX, PXB, PHB, SYS; NODE is not one of them."),
                    variable,
                )
                .fix("NCCL_NET_GDR_LEVEL=PHB   (or SYS)"),
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
        // Where the default would not have allowed it either, the setting is no change for the worse.
        let default_allows = stopped.iter().any(|pair| nccl::distance(facts, pair) <= Level::P2c);
        let severity = if default_allows { Severity::Error } else { Severity::Info };
        let finding = Finding::new("nccl-gdr-level", severity, format!("{variable} keeps NCCL from GPUDirect on {}", list(&names)))
            .why(format!("The setting allows distances up to {}, and the nearest adapter is at {}: GPU memory is staged through the host.", level.name(), need.name()));
        found.push(set(finding, variable).fix(format!("{name}={}", need.name())).on(names));
    }
}

fn filter(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let Some(variable) = variable(analysis, "NCCL_IB_HCA") else { return };
    let filter = Filter::nccl(variable.value);
    let nics: Vec<_> = facts.nics.iter().filter(|nic| !nic.is_software()).collect();
    if !nics.iter().any(|nic| filter.takes(nic)) {
        found.push(set(
            Finding::new("nccl-hca-none", Severity::Error, format!("{variable} leaves no adapter"))
                .why("NCCL finds no RDMA device and uses TCP sockets.")
                .seen("adapters", nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>().join(" ")),
            variable,
        ));
        return;
    }
    left_out(analysis, variable, &filter, "NCCL", found);
    let blanks = filter.with_blanks();
    if !blanks.is_empty() {
        found.push(
            Finding::new("nccl-hca-blank", Severity::Warning, format!("{variable} has blanks between its names"))
                .why("NCCL takes a blank for a part of the name: adapters behind one are not matched, and their rails stay idle.")
                .seen(variable.source, format!("NCCL_IB_HCA={}", variable.value))
                .fix(format!("NCCL_IB_HCA={}", variable.value.replace(' ', ""))),
        );
    }
    let unknown = filter.unknown(|name| {
        // Those are told above.
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
                format!("NCCL_IB_HCA names {}, which this machine does not have", list(&unknown)),
            )
            .why("Names differ between machines; an adapter may be missing, or a rail left out.")
            .seen(variable.source, format!("NCCL_IB_HCA={}", variable.value)),
        );
    }
}

/// GPUs whose nearest adapters a list of names leaves out.
pub(super) fn left_out(
    analysis: &Analysis<'_>,
    variable: Variable<'_>,
    filter: &Filter,
    program: &str,
    found: &mut Vec<Finding>,
) {
    let missed: Vec<_> = analysis
        .facts
        .gpus
        .iter()
        .filter_map(|gpu| {
            let pairs = analysis.pairs_of(&gpu.address);
            let active = |pair: &&&Pair<'_>| {
                !pair.nic.is_software()
                    && !pair.closed
                    && pair.nic.ports.iter().any(crate::facts::Port::is_active)
            };
            let nearest = pairs.iter().filter(active).filter_map(|pair| pair.distance).min()?;
            let allowed = pairs
                .iter()
                .filter(active)
                .filter(|pair| filter.takes(pair.nic))
                .filter_map(|pair| pair.distance)
                .min();
            let best = pairs.iter().filter(active).find(|pair| pair.distance == Some(nearest))?;
            allowed.is_none_or(|allowed| allowed > nearest).then_some((gpu, best.nic, allowed))
        })
        .collect();
    let Some((gpu, nic, allowed)) = missed.first() else { return };
    let names: Vec<_> = missed.iter().map(|(gpu, ..)| gpu.address.clone()).collect();
    let instead = allowed.map_or_else(|| "none".to_owned(), |distance| distance.to_string());
    found.push(
        set(
            Finding::new(
                if program == "NCCL" { "nccl-hca-far" } else { "ucx-devices-far" },
                Severity::Warning,
                format!("{} leaves out the adapters nearest to {}", variable.name, list(&names)),
            )
            .why(format!("{program} uses farther ones ({instead}): these GPUs cross the processor, or share adapters with others."))
            .seen("nearest", format!("{} to {}", gpu.address, nic.name)),
            variable,
        )
        .slows()
        .on(names),
    );
}

fn switches(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if nccl::is_on(facts, "NCCL_DMABUF_ENABLE") == Some(false)
        && let Some(variable) = variable(analysis, "NCCL_DMABUF_ENABLE")
    {
        let others = able(analysis).iter().all(|pair| pair.peermem.is_yes());
        let severity = if others { Severity::Info } else { Severity::Error };
        let finding = Finding::new(
            "nccl-dmabuf",
            severity,
            "NCCL_DMABUF_ENABLE=0 keeps NCCL from registering by dma-buf",
        )
        .why(if others {
            "nvidia_peermem does it here."
        } else {
            "There is no peer memory either: GPU memory is staged through the host."
        });
        found.push(set(finding, variable));
    }
    if nccl::is_on(facts, "NCCL_NET_GDR_READ") == Some(false)
        && let Some(variable) = variable(analysis, "NCCL_NET_GDR_READ")
    {
        let finding = Finding::new(
            "nccl-gdr-read",
            Severity::Warning,
            "NCCL_NET_GDR_READ=0: GPU memory is received directly, but sent through the host",
        )
        .why("On Ampere and newer reading GPU memory is as good as writing it; sends lose up to a half.");
        found.push(set(finding, variable));
    }
    if nccl::is_on(facts, "NCCL_NET_GDR_C2C") == Some(false)
        && facts.gpus.iter().any(|gpu| gpu.coherent_link.get() == Some(true))
        && let Some(variable) = variable(analysis, "NCCL_NET_GDR_C2C")
    {
        let finding =
            Finding::new("nccl-c2c", Severity::Warning, "NCCL_NET_GDR_C2C=0 switches GPUDirect off on Grace")
                .why("About 20 % of all-reduce bandwidth on GH200.");
        found.push(set(finding, variable));
    }
    if let Some(variable) = variable(analysis, "NCCL_IB_PCI_RELAXED_ORDERING")
        && variable.value.trim() == "0"
    {
        relaxed(analysis, variable, found);
    }
    if let Some(variable) = variable(analysis, "NCCL_NET_PLUGIN")
        && variable.value.trim() == "none"
        && facts.nics.iter().any(|nic| nic.driver.as_deref() == Some("efa"))
    {
        let finding = Finding::new(
            "nccl-efa-plugin",
            Severity::Error,
            "NCCL_NET_PLUGIN=none: NCCL cannot use EFA without its plugin",
        )
        .why("NCCL falls back to TCP sockets; EFA needs aws-ofi-nccl.");
        found.push(set(finding, variable));
    }
}

/// Relaxed ordering switched off by a variable.
pub(super) fn relaxed(analysis: &Analysis<'_>, variable: Variable<'_>, found: &mut Vec<Finding>) {
    let platform = Platform::of(&analysis.facts.machine.cpu);
    let loss = platform.strict_order().map_or_else(
        || "Writes in strict order wait for each other: up to half of the bandwidth.".to_owned(),
        |limit| {
            format!(
                "On {} writes in strict order reach about {limit:.0} GB/s, whatever the link could.",
                platform.name()
            )
        },
    );
    let names: Vec<_> =
        analysis.facts.nics.iter().filter(|nic| !nic.is_software()).map(|nic| nic.name.clone()).collect();
    let finding = Finding::new(
        "relaxed-ordering-env",
        Severity::Warning,
        format!("{variable} switches relaxed ordering off"),
    )
    .why(loss);
    found.push(set(finding, variable).slows().on(names));
}
