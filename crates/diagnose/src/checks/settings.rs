//! Shared code of the checks of NCCL's and UCX's settings.

use super::list;
use crate::finding::{Finding, Fix, Severity};
use crate::names::Filter;
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{Port, Variable};
use nobounce_topology::methods;

/// A finding about a variable: where it is set, and how to undo it.
pub(super) fn set(finding: Finding, variable: Variable<'_>) -> Finding {
    let place = if variable.source == "environment" {
        Fix::container().run(format!("unset {}", variable.name))
    } else {
        Fix::container().remark(format!("remove {} from {}", variable.name, variable.source))
    };
    finding.seen(variable.source, format!("{}={}", variable.name, variable.value)).fix(place)
}

/// Best pairs that could be direct if the library allowed it.
pub(super) fn able<'a, 'b>(analysis: &'b Analysis<'a>) -> Vec<&'b Pair<'a>> {
    analysis
        .best()
        .into_iter()
        .flatten()
        .filter(|pair| !(pair.nic.is_software() || pair.no_dma_buf() && pair.peermem.is_no()))
        .collect()
}

/// A library too old to find the way that is open.
pub(super) fn too_old(
    analysis: &Analysis<'_>,
    id: &'static str,
    library: &str,
    version: Option<&str>,
    misses: impl Fn(&Pair<'_>) -> Option<&'static str>,
) -> Option<Finding> {
    let hit: Vec<_> = able(analysis).into_iter().filter_map(|pair| Some((pair, misses(pair)?))).collect();
    let (_, why) = hit.first()?;
    let version = version.unwrap_or_default();
    let mut names: Vec<_> = hit.iter().map(|(pair, _)| pair.gpu.address.clone()).collect();
    names.dedup();
    Some(
        Finding::new(id, Severity::Error, format!("{library} {version} {why}"))
            .why("GPU memory can be registered here, but this version does not detect that, and silently stages it through the host.")
            .seen(format!("{library}'s version"), version)
            .seen(
                "/sys/kernel/mm/memory_peers",
                match analysis.facts.kernel.peer_memory_clients.known() {
                    Some(clients) if clients.is_empty() => "no client".to_owned(),
                    Some(clients) => clients.join(" "),
                    None => analysis.facts.kernel.peer_memory_clients.why_not().unwrap_or_default().to_owned(),
                },
            )
            .fix(Fix::both().remark(format!("use a current {library} (in the image or the Python environment, too)")))
            .stages()
            .on(names),
    )
}

/// dma-buf switched off by a variable: harmless where peer memory works.
pub(super) fn dma_buf_off(
    id: &'static str,
    library: &str,
    variable: Variable<'_>,
    analysis: &Analysis<'_>,
    pairs: &[&Pair<'_>],
) -> Finding {
    let works = |pair: &Pair<'_>| pair.peermem.is_yes();
    let likely = |pair: &Pair<'_>| methods::peermem_is_likely(analysis.facts, pair.nic, &pair.peermem);
    let (severity, why) = if pairs.iter().all(|pair| works(pair)) {
        (Severity::Info, "nvidia_peermem works here.")
    } else if pairs.iter().all(|pair| works(pair) || likely(pair)) {
        (Severity::Info, "Peer memory is probably available: its module is loaded.")
    } else {
        (Severity::Error, "Peer memory is not available either: GPU memory is staged through the host.")
    };
    let title = format!("{variable} keeps {library} from registering by dma-buf");
    set(Finding::new(id, severity, title).why(why).stages(), variable)
}

/// GPUs whose nearest adapters a list of names leaves out.
pub(super) fn left_out(
    analysis: &Analysis<'_>,
    variable: Variable<'_>,
    filter: &Filter,
    id: &'static str,
    program: &str,
) -> Option<Finding> {
    let missed: Vec<_> = analysis
        .facts
        .gpus
        .iter()
        .filter_map(|gpu| {
            let pairs = analysis.pairs_of(&gpu.address);
            let active = |pair: &&&Pair<'_>| {
                !pair.nic.is_software() && !pair.closed && pair.nic.ports.iter().any(Port::is_active)
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
    let (gpu, nic, allowed) = missed.first()?;
    let names: Vec<_> = missed.iter().map(|(gpu, ..)| gpu.address.clone()).collect();
    let instead = allowed.map_or_else(|| "none".to_owned(), |distance| distance.to_string());
    let finding = Finding::new(
        id,
        Severity::Warning,
        format!("{} excludes the adapters nearest to {}", variable.name, list(&names)),
    )
    .why(format!(
        "{program} uses more distant ones ({instead}): these GPUs cross the processor, or share adapters with others."
    ))
    .seen("nearest", format!("{} to {}", gpu.address, nic.name));
    Some(set(finding, variable).slows().on(names))
}

/// Relaxed ordering switched off by a variable.
pub(super) fn relaxed(analysis: &Analysis<'_>, variable: Variable<'_>) -> Finding {
    let names: Vec<_> =
        analysis.facts.nics.iter().filter(|nic| !nic.is_software()).map(|nic| nic.name.clone()).collect();
    let title = format!("{variable} disables relaxed ordering");
    let finding = Finding::new("relaxed-ordering-env", Severity::Warning, title)
        .why("Writes in strict order wait for each other, whatever the link could carry.");
    set(finding, variable).slows().on(names)
}
