//! `nobounce sim`: fabrics on a virtual clock; the simulation is in `nobounce-fabric`.

pub(crate) mod args;
mod plot;
mod text;

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use nobounce_fabric::units::{MICROSECOND, Picos};
use nobounce_fabric::{Algorithm, Config, Fabric, Failure, Report, Switch, Workload};

use self::args::{Control, SimArgs, Traffic};

/// Time that all-to-all and ring have to end, in microseconds.
const LONGEST: f64 = 10e6;
/// Samples in the report of a run.
const SAMPLES: u64 = 500;

/// The command: arguments in, exit code out. An error is exit code 2.
pub(crate) fn main(args: &SimArgs) -> anyhow::Result<ExitCode> {
    let (config, workload) = (config(args)?, workload(args));
    let began = Instant::now();
    let report = nobounce_fabric::run(config, &workload)?;
    let took = began.elapsed().as_secs_f64();
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{}", text::of(&report))?;
        writeln!(
            out,
            "\nsimulated in {took:.1} s, {:.1} million events/s",
            text::float(report.events) / took / 1e6
        )?;
    }
    if let Some(path) = &args.plot {
        std::fs::write(path, plot::svg(&report)?).with_context(|| path.display().to_string())?;
    }
    Ok(verdict(&report))
}

fn verdict(report: &Report) -> ExitCode {
    ExitCode::from(u8::from(report.packets.failed > 0 || report.complete == Some(false)))
}

fn config(args: &SimArgs) -> anyhow::Result<Config> {
    let fabric = fabric(args)?;
    let ends = matches!(args.traffic, Traffic::AllToAll | Traffic::Ring);
    let until = micros("--time", args.time.unwrap_or(if ends { LONGEST } else { 1_000.0 }))?;
    let mut config = Config::new(fabric, until);
    // Traffic that ends by itself is over long before its limit.
    config.sample_every =
        if args.time.is_none() && ends { 10 * MICROSECOND } else { (until / SAMPLES).max(1) };
    config.seed = args.seed;
    config.transport.mtu = args.transport.mtu;
    config.transport.ports = args.transport.ports.max(1);
    config.transport.control = match args.transport.control {
        Control::Swift => Algorithm::Swift,
        Control::Dcqcn => Algorithm::Dcqcn,
        Control::Aimd => Algorithm::Aimd,
    };
    Ok(config)
}

fn fabric(args: &SimArgs) -> anyhow::Result<Fabric> {
    let given = &args.fabric;
    let is_incast = args.traffic == Traffic::Incast;
    let nodes = given.nodes.unwrap_or(if is_incast { args.load.senders + 1 } else { 64 });
    let per_leaf = given.per_leaf.unwrap_or(if is_incast { nodes } else { 32 }).max(1);
    let mut fabric = if per_leaf >= nodes {
        Fabric::single_switch(nodes, given.rate)
    } else {
        Fabric::leaf_spine(nodes, per_leaf, given.rate)
    };
    if let Some(spines) = given.spines {
        fabric.spines = spines;
    }
    if let Some(rate) = given.fabric_rate {
        fabric.fabric_gbits = rate;
    }
    if let Some(delay) = given.delay {
        fabric.link_delay = micros("--delay", delay)?;
    }
    fabric.loss_ppm = u32::try_from(scaled("--loss", given.loss, 1e4)?).unwrap_or(u32::MAX);
    if let Some(at) = given.fail_link {
        let detected_after = micros("--fail-detect", given.fail_detect)?;
        fabric.failure = Some(Failure { at: micros("--fail-link", at)?, detected_after });
    }
    fabric.switch = switch(args)?;
    Ok(fabric)
}

fn switch(args: &SimArgs) -> anyhow::Result<Switch> {
    let given = &args.switch;
    let mut switch = Switch::for_rate(args.fabric.rate);
    switch.buffer = scaled("--buffer", given.buffer, 1e6)?;
    switch.alpha = given.alpha;
    switch.ecn = !given.no_ecn;
    switch.ecn_probability = given.ecn_share / 100.0;
    if let Some(min) = given.ecn_min {
        switch.ecn_min = scaled("--ecn-min", min, 1e3)?;
    }
    if let Some(max) = given.ecn_max {
        switch.ecn_max = scaled("--ecn-max", max, 1e3)?;
    }
    if switch.ecn_min > switch.ecn_max {
        bail!("--ecn-min is {} bytes, above --ecn-max with {}: lower it", switch.ecn_min, switch.ecn_max);
    }
    Ok(switch)
}

fn workload(args: &SimArgs) -> Workload {
    let given = &args.load;
    match args.traffic {
        Traffic::Incast => Workload::Incast {
            senders: given.senders,
            message: given.size.unwrap_or(1 << 20),
            short: given.short,
            short_load: given.load.unwrap_or(0.02),
        },
        Traffic::Permutation => Workload::Permutation { message: given.size.unwrap_or(1 << 20) },
        Traffic::AllToAll => {
            Workload::AllToAll { bytes: given.size.unwrap_or(64 << 10), concurrent: given.concurrent }
        }
        Traffic::Ring => Workload::RingAllReduce {
            bytes: u64::from(given.size.unwrap_or(64 << 20)),
            shuffled: given.shuffle,
        },
        Traffic::Kv => Workload::Kv { load: given.load.unwrap_or(0.5) },
    }
}

#[allow(clippy::cast_precision_loss, reason = "a microsecond is exact")]
fn micros(option: &str, value: f64) -> anyhow::Result<Picos> {
    scaled(option, value, MICROSECOND as f64)
}

/// A value in a smaller unit.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
fn scaled(option: &str, value: f64, unit: f64) -> anyhow::Result<u64> {
    let scaled = (value * unit).round();
    if !(0.0..1e18).contains(&scaled) {
        bail!("invalid {option} {value}: expected a number from 0 on");
    }
    Ok(scaled as u64)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: SimArgs,
    }

    fn parse(line: &str) -> SimArgs {
        Line::parse_from(std::iter::once("sim").chain(line.split_whitespace())).args
    }

    fn report(line: &str) -> Report {
        let args = parse(line);
        nobounce_fabric::run(config(&args).unwrap(), &workload(&args)).unwrap()
    }

    #[test]
    fn options_become_a_fabric() {
        let incast = config(&parse("incast --senders 8")).unwrap();
        assert_eq!((incast.fabric.hosts, incast.fabric.spines), (9, 0));
        assert_eq!(incast.fabric.round_trip(1), 10 * MICROSECOND);
        let args =
            parse("all-to-all --nodes 64 --per-leaf 16 --spines 4 --rate 400 --loss 0.5 --fail-link 20");
        let large = config(&args).unwrap();
        assert_eq!((large.fabric.leaves(), large.fabric.spines), (4, 4));
        assert_eq!(large.fabric.loss_ppm, 5_000);
        assert_eq!(large.fabric.switch.ecn_min, 200_000);
        assert_eq!(large.fabric.failure.map(|failure| failure.at), Some(20 * MICROSECOND));
        let wrong = config(&parse("kv --ecn-min 300")).unwrap_err();
        assert!(wrong.to_string().contains("above --ecn-max"), "{wrong}");
        assert!(config(&parse("kv --delay=-1")).is_err());
    }

    #[test]
    fn a_report_reads_well_and_is_plotted() {
        let report = report("incast --senders 4 --time 300");
        let text = text::of(&report);
        for wanted in ["5 nodes at 100 Gb/s, one switch", "goodput", "Jain", "short", "0 dropped"] {
            assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
        }
        let drawn = plot::svg(&report).unwrap();
        for wanted in ["<svg", "Goodput", "Deepest queue", "Latency", "short"] {
            assert!(drawn.contains(wanted), "{wanted} is missing");
        }
        assert!(!drawn.contains("NaN"));
    }

    #[test]
    fn traffic_that_does_not_end_fails() {
        let cut = report("ring --nodes 8 --per-leaf 4 --size 1M --time 20");
        assert_eq!(cut.complete, Some(false));
        assert!(text::of(&cut).contains("did not end"));
        let ended = report("ring --nodes 8 --per-leaf 4 --size 1M");
        assert_eq!(ended.complete, Some(true));
    }
}
