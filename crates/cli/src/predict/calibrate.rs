//! Fits the constants of this machine to a bench run, and compares another run with them.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use nobounce_predict::calibration::{
    Bench, Calibration, Fit, FitResidual, LISTED_BELOW, ONE_LINE, Series, Split,
};
use nobounce_predict::report::{bytes, figure};

use super::args::{Parted, PredictArgs};
use super::{percent, signed, write};
use crate::doctor;

/// How far a second run may be off unless told otherwise.
const TOLERANCE: f64 = 0.15;

pub(super) fn main(args: &PredictArgs, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let mut runs = args.calibrate.iter().map(|path| bench(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let second = match (args.split, &args.against) {
        (Some(how), _) => Some(part(&mut runs, how)?),
        (None, Some(path)) => Some(bench(path)?),
        (None, None) => None,
    };
    let calibration = Calibration::of(&runs)?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &calibration)?;
        writeln!(out)?;
    } else {
        text(&calibration, out)?;
    }
    if let Some(path) = &args.save_calibration {
        write(path, &(serde_json::to_string_pretty(&calibration)? + "\n"))?;
    }
    second.map_or(Ok(ExitCode::SUCCESS), |second| compare(&calibration, &second, args, out))
}

/// Keeps one half of each run's passes; the other halves form the second run.
fn part(runs: &mut [Bench], how: Parted) -> anyhow::Result<Bench> {
    let [run] = runs else { bail!("--split needs exactly one run after --calibrate") };
    let how = match how {
        Parted::Turns => Split::Turns,
        Parted::Halves => Split::Halves,
    };
    let (first, second) = run.split(how)?;
    *run = first;
    Ok(second)
}

/// Constants that were kept.
pub(crate) fn load(path: &Path) -> anyhow::Result<Calibration> {
    Calibration::from_json(&doctor::read(path)?).with_context(|| path.display().to_string())
}

fn bench(path: &Path) -> anyhow::Result<Bench> {
    Bench::from_json(&doctor::read(path)?).with_context(|| path.display().to_string())
}

fn text(calibration: &Calibration, out: &mut dyn Write) -> anyhow::Result<()> {
    for fit in &calibration.fits {
        writeln!(
            out,
            "{}: {} us + {} ns/byte in the first packet{}; {} us + {} ns/byte beyond it, + {} ns/byte beyond {}; worst residual {}{}",
            fit.series,
            figure(fit.base_us),
            figure(fit.first_byte_ns),
            more(fit),
            figure(fit.step_us),
            figure(fit.byte_ns),
            figure(fit.far_byte_ns),
            bytes(fit.cache_bytes),
            percent(fit.worst()),
            if has_seen(fit) {
                format!(", {} with the residual correction", percent(fit.worst_left()))
            } else {
                String::new()
            }
        )?;
        for one in &fit.residuals {
            writeln!(
                out,
                "  {:>9}  measured {:>9} us, fitted {:>9} us, {:>8}{}{}",
                bytes(one.size),
                figure(one.measured_us),
                figure(one.fitted_us),
                percent(one.error()),
                seen(one),
                passes(one)
            )?;
        }
    }
    Ok(())
}

/// Whether anything was seen beyond the constants.
fn has_seen(fit: &Fit) -> bool {
    fit.residuals.iter().any(|one| one.seen_us != 0.0)
}

/// What is kept beyond the constants, and what is left then.
fn seen(one: &FitResidual) -> String {
    if one.seen_us == 0.0 {
        return String::new();
    }
    format!("; correction {} us, remaining error {}", signed(one.seen_us), percent(one.left()))
}

/// What begins at some size of the first packet.
fn more(fit: &Fit) -> String {
    let (time, from) = if fit.series.is_stream() {
        (fit.lone_us, format!("from {} on", bytes(LISTED_BELOW)))
    } else {
        (fit.lines_us, format!("above {}", bytes(ONE_LINE)))
    };
    if time > 0.0 { format!(", + {} us {from}", figure(time)) } else { String::new() }
}

/// What the passes of the run found, where there were several.
fn passes(one: &FitResidual) -> String {
    one.passes_us.map_or(String::new(), |(quickest, slowest)| {
        format!("  (passes {} to {})", figure(quickest), figure(slowest))
    })
}

/// The run of a file against the constants.
pub(super) fn against(
    calibration: &Calibration,
    second: &Path,
    args: &PredictArgs,
    out: &mut dyn Write,
) -> anyhow::Result<ExitCode> {
    compare(calibration, &bench(second)?, args, out)
}

/// Compares another run with the constants: exit code 1 if a size is further off than allowed.
fn compare(
    calibration: &Calibration,
    second: &Bench,
    args: &PredictArgs,
    out: &mut dyn Write,
) -> anyhow::Result<ExitCode> {
    let tolerance = args.tolerance.unwrap_or(TOLERANCE);
    let found = calibration.against(second);
    anyhow::ensure!(!found.is_empty(), "the two runs have no case in common");
    let is_off = |one: &FitResidual| one.left().abs() > tolerance;
    // The run-to-run difference, independent of the fit.
    let apart = |series: &Series, one: &FitResidual| {
        calibration.measured_before(series, one.size).map(|before| one.measured_us / before - 1.0)
    };
    for (series, one) in &found {
        let runs = apart(series, one)
            .map_or(String::new(), |share| format!(" (difference between the runs: {})", percent(share)));
        writeln!(
            out,
            "{:<28} {:>9}  measured {:>9} us, expected {:>9} us, {:>8}{}{}{}",
            series.to_string(),
            bytes(one.size),
            figure(one.measured_us),
            figure(one.expected_us()),
            percent(one.left()),
            if one.seen_us == 0.0 {
                String::new()
            } else {
                format!("  (includes a correction of {} us)", signed(one.seen_us))
            },
            passes(one),
            if is_off(one) { format!("  off{runs}") } else { String::new() }
        )?;
    }
    let off: Vec<&FitResidual> = found.iter().map(|(_, one)| one).filter(|one| is_off(one)).collect();
    writeln!(out, "{} of {} within {:.0} %", found.len() - off.len(), found.len(), tolerance * 100.0)?;
    if found.iter().any(|(_, one)| one.seen_us != 0.0) {
        let near = found.iter().filter(|(_, one)| one.error().abs() <= tolerance).count();
        writeln!(out, "without the residual correction: {near} of {}", found.len())?;
    }
    let agree: Vec<f64> = found.iter().filter_map(|(series, one)| apart(series, one)).collect();
    if !agree.is_empty() {
        let near = agree.iter().filter(|share| share.abs() <= tolerance).count();
        writeln!(out, "the two runs agree within the same tolerance in {near} of {}", agree.len())?;
    }
    let known = off.iter().filter(|one| one.is_within_passes()).count();
    if known > 0 {
        writeln!(
            out,
            "{known} of the {} others lie within the range of that run's own passes: the machine itself varies that much",
            off.len()
        )?;
    }
    Ok(ExitCode::from(u8::from(!off.is_empty())))
}
