//! What GPUDirect is worth in a cluster, for people.

use std::io::Write;
use std::process::ExitCode;

use nobounce_predict::cluster::{ASSUMPTIONS, Cluster, Impact, impact};
use nobounce_predict::parts::Parts;
use nobounce_predict::report::{bytes, figure};
use nobounce_predict::{plot_cluster, window};
use nobounce_topology::facts::{Facts, GpuVendor};

use super::Machine;
use super::args::PredictArgs;

pub(super) fn main(
    args: &PredictArgs,
    nodes: u32,
    machine: &Machine,
    parts: &Parts,
    out: &mut dyn Write,
) -> anyhow::Result<ExitCode> {
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &json(args, nodes, machine, parts)?)?;
        writeln!(out)?;
    } else {
        let cluster = cluster(args, nodes, machine);
        write!(out, "{}", text(&machine.title(args), parts, &cluster, &impact(parts, &cluster)?))?;
    }
    if let Some(path) = &args.plot {
        let cluster = cluster(args, nodes, machine);
        let title = format!("{nodes} nodes, {} a GPU; {}", bytes(cluster.bytes), machine.title(args));
        super::write_plot(path, &plot_cluster::svg(&title, &impact(parts, &cluster)?))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The same as JSON.
pub(super) fn json(
    args: &PredictArgs,
    nodes: u32,
    machine: &Machine,
    parts: &Parts,
) -> anyhow::Result<serde_json::Value> {
    let cluster = cluster(args, nodes, machine);
    let found = impact(parts, &cluster)?;
    Ok(serde_json::json!({
        "schema": "nobounce-impact/1", "title": machine.title(args), "parts": parts, "cluster": cluster,
        "impact": found, "assumptions": ASSUMPTIONS,
    }))
}

fn cluster(args: &PredictArgs, nodes: u32, machine: &Machine) -> Cluster {
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
        // Seven links to the other GPUs of a node, as on MI300X.
        return gpu.title().contains("MI3").then(|| 7.0 * window::xgmi(64.0));
    }
    let links = gpu.nvlinks.get().filter(|links| *links > 0)?;
    let each = match gpu.compute_capability.get()? {
        60..=69 => 20.0,
        70..=99 => 25.0,
        _ => 50.0,
    };
    Some(window::nvlink(links, each))
}

fn text(title: &str, parts: &Parts, cluster: &Cluster, found: &[Impact]) -> String {
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
    let _ = writeln!(
        text,
        "{:<18} {:>10} {:>9} {:>9} {:>10}  {:>10} {:>10} {:>7}  {:>12} {:>12}  {:<36} staged is limited by",
        "exchange",
        "direct ms",
        "alg GB/s",
        "bus GB/s",
        "staged ms",
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
            "{:<18} {:>10} {:>9} {:>9} {:>10}  {:>10} {:>10} {:>7}  {:>12.0} {:>12.0}  {:<36} {}",
            one.pattern.words(),
            figure(one.direct.exchange_ms),
            figure(one.direct.algorithm_gbytes_per_s),
            figure(one.direct.bus_gbytes_per_s),
            figure(one.staged.exchange_ms),
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
    text
}
