//! `nobounce predict`: the parts are assembled here, the model is in `nobounce-predict`.

pub(crate) mod args;
mod calibrate;
mod impact;
mod sizes;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use nobounce_predict::calibration::Calibration;
use nobounce_predict::constants;
use nobounce_predict::machine::{Choice, Found, parts_of};
use nobounce_predict::parts::{Parts, SOFT_ASSUMED, Spec};
use nobounce_predict::plot;
use nobounce_predict::report::{Report, figure, report};
use nobounce_predict::soft::{Soft, Via};
use nobounce_predict::validation::validate;
use nobounce_topology::facts::Facts;
use nobounce_topology::machines;

use self::args::PredictArgs;
pub(crate) use self::calibrate::load as load_calibration;
use crate::doctor;

/// The command: arguments in, exit code out. An error is exit code 2.
pub(crate) fn main(args: &PredictArgs) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    if args.constants {
        for one in constants::ALL {
            let kind = if one.fitted { "fitted to" } else { "from" };
            let value = format!("{} {}", one.value, one.unit);
            writeln!(out, "{:<18} {value:>12}  {kind} {}", one.name.to_lowercase(), one.source)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.validation {
        let found = validate();
        if args.json {
            serde_json::to_writer_pretty(&mut out, &found)?;
            writeln!(out)?;
        } else {
            write!(out, "{}", found.score.text())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !args.calibrate.is_empty() {
        return calibrate::main(args, &mut out);
    }
    let calibration = args.calibration.as_deref().map(calibrate::load).transpose()?;
    if let (Some(calibration), Some(second)) = (&calibration, &args.against) {
        return calibrate::against(calibration, second, args, &mut out);
    }
    let machine = machine(args, doctor::this_machine)?;
    let parts = parts(args, &machine, calibration)?;
    if let Some(nodes) = args.cluster.nodes {
        return impact::main(args, nodes, &machine, &parts, &mut out);
    }
    let found = report(&machine.title(args), &parts, &sizes(args));
    print(&found, args, &mut out)?;
    Ok(ExitCode::SUCCESS)
}

/// What `--json` prints, for arguments that name no files. `here` are the facts where none are
/// named.
pub(crate) fn json(args: &PredictArgs, here: &Facts) -> anyhow::Result<serde_json::Value> {
    let machine = machine(args, || Ok(here.clone()))?;
    let parts = parts(args, &machine, None)?;
    match args.cluster.nodes {
        Some(nodes) => impact::json(args, nodes, &machine, &parts),
        None => Ok(serde_json::to_value(report(&machine.title(args), &parts, &sizes(args)))?),
    }
}

/// A machine, and what of it is looked at.
struct PredictedMachine {
    facts: Option<Facts>,
    found: Found,
}

impl PredictedMachine {
    /// What is predicted, with the options that change it.
    fn title(&self, args: &PredictArgs) -> String {
        let title = &self.found.title;
        let changes = args.parts.changes(&self.found.spec);
        if self.facts.is_none() || changes.is_empty() {
            return title.clone();
        }
        let distance = self.found.spec.distance.map(|distance| format!(", {distance}")).unwrap_or_default();
        let title = if args.parts.distance.is_some() { title.trim_end_matches(&distance) } else { title };
        format!("{title}; changed: {}", changes.join(", "))
    }
}

fn machine(
    args: &PredictArgs,
    here: impl FnOnce() -> anyhow::Result<Facts>,
) -> anyhow::Result<PredictedMachine> {
    let choice =
        Choice { gpu: args.gpu, nic: args.nic.clone(), rails: args.parts.rails, gpus: args.parts.gpus };
    let facts = match (&args.machine, &args.facts) {
        (Some(name), _) => machines::machine(name).with_context(|| {
            format!("unknown machine {name:?}: expected one of {}", machines::NAMES.join(", "))
        })?,
        (None, Some(path)) => {
            Facts::from_json(&doctor::read(path)?).with_context(|| path.display().to_string())?
        }
        // A named link describes a machine of its own; nothing of this one applies then.
        (None, None) if args.parts.link.is_some() => {
            return Ok(PredictedMachine {
                facts: None,
                found: Found { spec: Spec::default(), title: "the given parts".to_owned() },
            });
        }
        (None, None) => here()?,
    };
    let found = parts_of(&facts, &choice)?;
    Ok(PredictedMachine { facts: Some(facts), found })
}

fn parts(
    args: &PredictArgs,
    machine: &PredictedMachine,
    calibration: Option<Calibration>,
) -> anyhow::Result<Parts> {
    let mut parts = args.parts.over(machine.found.spec.clone()).resolve()?;
    if calibration.is_some() && !parts.is_software_nic_here() {
        bail!(
            "--calibration applies to the software NIC between two processes of one machine, but this prediction is for {}; omit it, or add --software nobounce --link loopback:1000 --memory host",
            parts.line()
        );
    }
    // Residuals belong to one machine alone; another one may still share its constants.
    let is_another = args.machine.is_some() || args.facts.is_some();
    if let Some(found) = calibration {
        let found = if is_another { found.constants_only() } else { found };
        let via = Via {
            link: args.via.map(|link| link.name().to_owned()),
            busy: args.busy.unwrap_or(0),
            between_machines: args.between_machines,
        };
        parts.soft = Soft::of_calibration(found, via, parts.mtu);
        parts.assumed.retain(|line| line != SOFT_ASSUMED);
    }
    Ok(parts)
}

fn sizes(args: &PredictArgs) -> Vec<u64> {
    let mut sizes: Vec<u64> = args.size.iter().flat_map(|sizes| sizes.0.iter().copied()).collect();
    if sizes.is_empty() {
        // Every second power of two is enough to see the shape.
        sizes = vec![8];
        sizes.extend((10..=30).step_by(2).map(|power| 1_u64 << power));
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn print(found: &Report, args: &PredictArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        write_plot(path, &plot::svg(found))?;
    }
    if args.json {
        serde_json::to_writer_pretty(&mut *out, found)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", found.text())?;
    }
    Ok(())
}

/// A picture is SVG, so that another name would lie.
fn write_plot(path: &Path, text: &str) -> anyhow::Result<()> {
    if path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("svg")) {
        bail!("cannot write {}: --plot writes SVG; name a file that ends in .svg", path.display());
    }
    write(path, text)
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A share as percent, with its sign.
fn percent(share: f64) -> String {
    let value = share * 100.0;
    if value.abs() < 0.05 { "0 %".to_owned() } else { format!("{} %", signed(value)) }
}

/// A figure with its sign.
fn signed(value: f64) -> String {
    format!("{}{}", if value < 0.0 { "-" } else { "+" }, figure(value.abs()))
}
