//! What GPUDirect is worth in a cluster, for people.

use std::io::Write;
use std::process::ExitCode;

use nobounce_predict::cluster::{ASSUMPTIONS, Cluster, ClusterError, Impact, Step, impact};
use nobounce_predict::parts::Parts;
use nobounce_predict::report::{bytes, figure};
use nobounce_predict::{plot_cluster, window};
use nobounce_topology::facts::{Facts, GpuVendor};

use super::PredictedMachine;
use super::args::PredictArgs;

pub(super) fn main(
    args: &PredictArgs,
    nodes: u32,
    machine: &PredictedMachine,
    parts: &Parts,
    out: &mut dyn Write,
) -> anyhow::Result<ExitCode> {
    let cluster = cluster(args, nodes, machine);
    let (found, refusal) = predicted(parts, &cluster)?;
    let parts = &limited(parts, &found);
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &json(args, nodes, machine, parts)?)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", text(&machine.title(args), parts, &cluster, &found, refusal.as_ref()))?;
    }
    if let Some(path) = &args.plot {
        let title = format!("{nodes} nodes, {} a GPU; {}", bytes(cluster.bytes), machine.title(args));
        let why = refusal.map(|why| why.to_string());
        super::write_plot(path, &plot_cluster::svg(&title, &found, why.as_deref()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The same as JSON.
pub(super) fn json(
    args: &PredictArgs,
    nodes: u32,
    machine: &PredictedMachine,
    parts: &Parts,
) -> anyhow::Result<serde_json::Value> {
    let cluster = cluster(args, nodes, machine);
    let (found, refusal) = predicted(parts, &cluster)?;
    let (not_direct, not_predicted) = match refusal {
        Some(ClusterError::NotDirect(why)) => (Some(why.to_string()), None),
        Some(ClusterError::NoBasis(why)) => (None, Some(why.to_string())),
        _ => (None, None),
    };
    Ok(serde_json::json!({
        "schema": "nobounce-impact/1", "title": machine.title(args), "parts": limited(parts, &found), "cluster": cluster,
        "impact": found, "not_direct": not_direct, "not_predicted": not_predicted,
        "assumptions": ASSUMPTIONS, "unvalidated": parts.unvalidated(cluster.bytes),
    }))
}

/// Every exchange, or why none is predicted. A cluster that does not exist is an error.
fn predicted(parts: &Parts, cluster: &Cluster) -> anyhow::Result<(Vec<Impact>, Option<ClusterError>)> {
    match impact(parts, cluster) {
        Ok(found) => Ok((found, None)),
        Err(why @ (ClusterError::NotDirect(_) | ClusterError::NoBasis(_))) => Ok((Vec::new(), Some(why))),
        Err(wrong) => Err(wrong.into()),
    }
}

/// The parts with what is assumed of host memory, where that limits an exchange.
fn limited(parts: &Parts, found: &[Impact]) -> Parts {
    parts.clone().with_limits(found.iter().flat_map(|one| [one.direct.binds, one.staged.binds]))
}

fn cluster(args: &PredictArgs, nodes: u32, machine: &PredictedMachine) -> Cluster {
    let facts = machine.facts.as_ref();
    let count = |found: usize| u32::try_from(found).ok().filter(|found| *found > 0);
    let gpus = facts.and_then(|facts| count(facts.gpus.len()));
    let nics = facts.and_then(|facts| count(facts.nics.iter().filter(|nic| !nic.is_software()).count()));
    Cluster {
        nodes,
        gpus_per_node: args.cluster.gpus_per_node.or(gpus).unwrap_or(8),
        nics_per_node: args.cluster.nics_per_node.or(nics).unwrap_or(8),
        bytes: args.cluster.bytes.map_or(0, |amount| amount.0),
        compute_ms: args.cluster.compute.unwrap_or(0.0),
        overlap: args.cluster.overlap.unwrap_or(0.0),
        price: args.cluster.price.unwrap_or(0.0),
        nvlink: facts.and_then(nvlink),
    }
}

/// GB/s between GPUs of a machine, by their NVLinks.
fn nvlink(facts: &Facts) -> Option<f64> {
    let gpu = facts.gpus.first()?;
    if gpu.vendor == GpuVendor::Amd {
        // Seven links of 64 GB/s to the other GPUs of a node. MI355X has faster ones, MI300A fewer.
        let known = ["MI300X", "MI308X", "MI325X"].iter().any(|name| gpu.title().contains(name));
        return known.then(|| 7.0 * window::xgmi(64.0));
    }
    let links = gpu.nvlinks.get().filter(|links| *links > 0)?;
    let each = match gpu.compute_capability.get()? {
        60..=69 => 20.0,
        70..=99 => 25.0,
        _ => 50.0,
    };
    Some(window::nvlink(links, each))
}

fn text(
    title: &str,
    parts: &Parts,
    cluster: &Cluster,
    found: &[Impact],
    refusal: Option<&ClusterError>,
) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    let Cluster { nodes, gpus_per_node, nics_per_node, .. } = cluster;
    let _ =
        writeln!(text, "{nodes} nodes with {gpus_per_node} GPUs and {nics_per_node} adapters each; {title}");
    let _ = writeln!(text, "{}", parts.line());
    let _ = writeln!(
        text,
        "{} per GPU and step, {} ms of compute, {:.0} % of it overlapping, {} per GPU-hour\n",
        bytes(cluster.bytes),
        figure(cluster.compute_ms),
        cluster.overlap * 100.0,
        cluster.price
    );
    if let Some(why) = refusal {
        let _ = writeln!(text, "{why}");
        return text;
    }
    let _ = writeln!(
        text,
        "{:<18} {:>10} {:>15} {:>9} {:>9} {:>10} {:>15}  {:>10} {:>10} {:>7}  {:>12} {:>12}  {:<36} staged is limited by",
        "exchange",
        "direct ms",
        "band",
        "alg GB/s",
        "bus GB/s",
        "staged ms",
        "band",
        "step ms",
        "staged ms",
        "longer",
        "GPU-h/month",
        "money/month",
        "direct is limited by"
    );
    for one in found {
        let longer =
            if one.direct.step_ms > 0.0 { one.staged.step_ms / one.direct.step_ms - 1.0 } else { 0.0 };
        let _ = writeln!(
            text,
            "{:<18} {:>10} {:>15} {:>9} {:>9} {:>10} {:>15}  {:>10} {:>10} {:>7}  {:>12.0} {:>12.0}  {:<36} {}",
            one.pattern.words(),
            figure(one.direct.exchange_ms),
            band(&one.direct),
            figure(one.direct.algorithm_gbytes_per_s),
            figure(one.direct.bus_gbytes_per_s),
            figure(one.staged.exchange_ms),
            band(&one.staged),
            figure(one.direct.step_ms),
            figure(one.staged.step_ms),
            super::percent(longer),
            one.gpu_hours,
            one.money,
            one.direct.binds.words(),
            one.staged.binds.words()
        );
    }
    let _ = writeln!(text, "\nassumptions:");
    for line in ASSUMPTIONS {
        let _ = writeln!(text, "- {line}");
    }
    if !parts.assumed.is_empty() {
        let _ = writeln!(text, "- assumed: {}", parts.assumed.join("; "));
    }
    let unvalidated = parts.unvalidated(cluster.bytes);
    if !unvalidated.is_empty() {
        let _ = writeln!(text, "- widest band: no published figure validates {}", unvalidated.join("; "));
    }
    text
}

/// The interval of an exchange, in milliseconds.
fn band(step: &Step) -> String {
    format!("{} - {}", figure(step.exchange_low_ms), figure(step.exchange_high_ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nobounce_topology::facts::Read;
    use nobounce_topology::machines;

    #[test]
    fn only_known_gpus_have_links_between_them() {
        let links = |name: &str| {
            let mut facts = machines::machine("mi300x").unwrap();
            for gpu in &mut facts.gpus {
                gpu.name = Read::Yes(name.to_owned());
            }
            nvlink(&facts)
        };
        assert_eq!(links("AMD Instinct MI300X"), Some(7.0 * 48.0));
        assert_eq!(links("AMD Instinct MI355X"), None);
        assert_eq!(links("AMD Instinct MI300A"), None);
    }
}
