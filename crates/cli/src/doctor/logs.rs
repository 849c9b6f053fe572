//! Logs given to `doctor`: streamed, with a progress bar on a terminal.

use std::fs::File;
use std::io::{BufRead, BufReader, Stdin};
use std::path::Path;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nobounce_diagnose::Diagnosis;
use nobounce_diagnose::log::{self, LogReport, Logs};
use nobounce_topology::facts::Facts;

use super::args::DoctorArgs;

/// Bytes read at a time.
const BUFFER: usize = 1 << 20;
/// Shorter logs are read before a progress bar would be noticed.
const LONG: u64 = 64 << 20;

/// The logs that were named, joined with what was found.
pub(super) fn read(
    args: &DoctorArgs,
    facts: &Facts,
    diagnosis: &Diagnosis,
) -> anyhow::Result<Vec<LogReport>> {
    let mut reports = Vec::new();
    if let Some(path) = &args.nccl_log {
        let (file, bar) = open(path)?;
        let found = log::read_nccl(file, |bytes| bar.set_position(bytes))
            .with_context(|| path.display().to_string())?;
        bar.finish_and_clear();
        reports.push(log::join_nccl(&found, facts, diagnosis));
    }
    if let Some(path) = &args.ucx_log {
        let (file, bar) = open(path)?;
        let found = log::read_ucx(file, |bytes| bar.set_position(bytes))
            .with_context(|| path.display().to_string())?;
        bar.finish_and_clear();
        reports.push(log::join_ucx(&found, facts, diagnosis));
    }
    if let Some(path) = &args.libfabric_log {
        let (file, bar) = open(path)?;
        let found = log::read_fabric(file, |bytes| bar.set_position(bytes))
            .with_context(|| path.display().to_string())?;
        bar.finish_and_clear();
        reports.push(log::join_fabric(&found, facts, diagnosis));
    }
    if let Some(path) = &args.log {
        let (file, bar) = open(path)?;
        let found = log::read_any(file, |bytes| bar.set_position(bytes))
            .with_context(|| path.display().to_string())?;
        bar.finish_and_clear();
        reports.extend(of_program(&found, facts, diagnosis));
        if reports.is_empty() {
            // Without any known line the report says so.
            reports.push(log::join_other(&found.other, facts, diagnosis));
        }
    }
    Ok(reports)
}

/// Reports of the libraries that logged in a program's output.
pub(super) fn of_program(logs: &Logs, facts: &Facts, diagnosis: &Diagnosis) -> Vec<LogReport> {
    let mut reports = Vec::new();
    if logs.nccl.lines > 0 {
        reports.push(log::join_nccl(&logs.nccl, facts, diagnosis));
    }
    if logs.ucx.lines > 0 {
        reports.push(log::join_ucx(&logs.ucx, facts, diagnosis));
    }
    if logs.fabric.lines > 0 {
        reports.push(log::join_fabric(&logs.fabric, facts, diagnosis));
    }
    if !logs.other.is_empty() {
        reports.push(log::join_other(&logs.other, facts, diagnosis));
    }
    reports
}

fn open(path: &Path) -> anyhow::Result<(Box<dyn BufRead>, ProgressBar)> {
    if path == Path::new("-") {
        let input: BufReader<Stdin> = BufReader::with_capacity(BUFFER, std::io::stdin());
        return Ok((Box::new(input), ProgressBar::hidden()));
    }
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let length = file.metadata().map(|data| data.len()).unwrap_or(0);
    let bar = if length < LONG {
        ProgressBar::hidden()
    } else {
        // Indicatif hides it where stderr is no terminal.
        let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
        if let Ok(style) =
            ProgressStyle::with_template("{wide_bar:.cyan/dim} {bytes:>10} of {total_bytes} {eta:>4}")
        {
            bar.set_style(style);
        }
        bar
    };
    Ok((Box::new(BufReader::with_capacity(BUFFER, file)), bar))
}
