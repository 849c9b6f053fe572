//! `nobounce doctor` and `nobounce topo`: facts are gathered here and analysed in
//! `nobounce-diagnose`.

pub(crate) mod args;
mod cuda;
mod cufile;
pub(crate) mod cufile_child;
mod flow_control;
mod gather;
mod gpu_peers;
mod library;
mod logs;
mod netlink;
mod nvml;
mod program;
mod prove;
mod routes;
mod storage;
mod storage_proof;
mod storage_prove;
mod umad;
mod verbs;

use std::io::{IsTerminal, Read as _, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use nobounce_diagnose::draw::{self, Topology};
use nobounce_diagnose::log::overrule;
use nobounce_diagnose::storage_verdict::StorageDiagnosis;
use nobounce_diagnose::{Diagnosis, Style, diagnose, diagnose_with_peer, explain, report, storage_report};
use nobounce_topology::facts::{Facts, Gpu, MAX_FILE, Storage};
use nobounce_topology::sysfs::Root;
use nobounce_topology::{clean, machines};

use self::args::{DoctorArgs, Source, TopoArgs};
use self::storage_proof::StorageProofs;

/// `nobounce doctor`: arguments in, exit code out. An error is exit code 2.
pub(crate) fn main(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    if let Some(id) = &args.explain {
        return explain(id);
    }
    let mut facts = facts(&args.source)?;
    match &args.storage {
        Some(path) => storage::fill(&mut facts, &args.source, path)?,
        None => facts.storage = None,
    }
    if args.prove && args.save.is_some() && facts.storage.is_some() {
        anyhow::bail!("a facts file has no measured reads: give --storage and --prove without --save");
    }
    // Before names go: proofs open the file and the devices.
    let read = match &facts.storage {
        Some(storage) if args.prove => Some(storage_prove::prove(&facts, storage)?),
        _ => None,
    };
    if let Some(addr) = &args.serve {
        prove::serve(&facts, addr)?;
        return Ok(ExitCode::SUCCESS);
    }
    let proofs = match (&args.peer, args.prove && facts.storage.is_none()) {
        (Some(peer), true) => prove::with_peer(&mut facts, peer)?,
        (None, true) => prove::here(&mut facts)?,
        (_, false) => Vec::new(),
    };
    if args.anonymous {
        facts = facts.redacted();
    }
    if let Some(path) = &args.save {
        write(path, &facts.to_json())?;
        return Ok(ExitCode::from(u8::from(proofs.iter().any(|proof| !proof.kept))));
    }
    if !args.program.is_empty() {
        return of_program(args, &facts);
    }
    let mut diagnosis = diagnosed(args, &facts)?;
    if let (Some(storage), Some(found)) = (&facts.storage, &diagnosis.storage) {
        return of_path(args, &facts, storage, &diagnosis, found, read.as_ref());
    }
    let logs = logs::read(args, &facts, &diagnosis)?;
    overrule(&mut diagnosis, &facts, &logs);
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut all = serde_json::to_value(&diagnosis)?;
        if !logs.is_empty() {
            all["logs"] = serde_json::to_value(&logs)?;
        }
        if args.prove {
            all["proofs"] = serde_json::to_value(&proofs)?;
            all["registrations"] = serde_json::to_value(&facts.registrations)?;
        }
        serde_json::to_writer_pretty(&mut out, &all)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", report(&facts, &diagnosis, style(args.all)))?;
        for log in &logs {
            write!(out, "\n{}", log.text())?;
        }
        if args.prove {
            writeln!(out, "\nproof:")?;
            for proof in &proofs {
                writeln!(out, "{}", clean(&proof.to_string()))?;
            }
            for registration in &facts.registrations {
                let (nic, way) = (&registration.nic, &registration.way);
                let known = facts.gpus.iter().find(|gpu| gpu.address == registration.gpu);
                let gpu = known.map_or_else(|| format!("GPU {}", registration.gpu), Gpu::label);
                let ended = if registration.probe.ok { "registered" } else { &registration.probe.detail };
                let line = clean(&format!("{gpu} with {nic} through {way}: {ended}"));
                writeln!(out, "  {line}")?;
            }
        }
    }
    let lost = diagnosis.direct_is_lost
        || logs.iter().any(|log| log.direct_is_lost)
        || proofs.iter().any(|proof| !proof.kept);
    Ok(ExitCode::from(u8::from(lost)))
}

/// The diagnosis, compared with the machine at the other end if its facts were given.
fn diagnosed(args: &DoctorArgs, facts: &Facts) -> anyhow::Result<Diagnosis> {
    Ok(match &args.peer_facts {
        Some(path) => diagnose_with_peer(facts, &saved(path)?),
        None => diagnose(facts),
    })
}

/// Runs a program, and explains what its libraries logged.
fn of_program(args: &DoctorArgs, facts: &Facts) -> anyhow::Result<ExitCode> {
    // Files that cannot be read are an error before the program runs.
    let mut diagnosis = diagnosed(args, facts)?;
    let given = logs::read(args, facts, &diagnosis)?;
    let ran = program::run(&args.program)?;
    let mut logs = logs::of_program(&ran.logs, facts, &diagnosis);
    logs.extend(given);
    overrule(&mut diagnosis, facts, &logs);
    let mut out = std::io::stdout().lock();
    write!(out, "\n{}", report(facts, &diagnosis, style(args.all)))?;
    for log in &logs {
        write!(out, "\n{}", log.text())?;
    }
    for note in &ran.notes {
        writeln!(out, "\nnote: {}", clean(note))?;
    }
    if logs.is_empty() {
        writeln!(
            out,
            "\nnone of the {} lines of the program's output is a log of NCCL, UCX or libfabric that is recognised",
            ran.logs.lines
        )?;
    }
    let lost = diagnosis.direct_is_lost || logs.iter().any(|log| log.direct_is_lost);
    Ok(ExitCode::from(if ran.code == 0 { u8::from(lost) } else { ran.code }))
}

/// The answer to `--storage`.
fn of_path(
    args: &DoctorArgs,
    facts: &Facts,
    storage: &Storage,
    diagnosis: &Diagnosis,
    found: &StorageDiagnosis,
    read: Option<&StorageProofs>,
) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut all = serde_json::to_value(diagnosis)?;
        if let Some(read) = read {
            all["storage"]["proof"] = serde_json::to_value(read)?;
        }
        serde_json::to_writer_pretty(&mut out, &all)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", storage_report(facts, storage, found, style(args.all)))?;
        if let Some(read) = read {
            writeln!(out, "\nproof: {}", clean(&read.file))?;
            for proof in &read.reads {
                writeln!(out, "{}", clean(&proof.to_string()))?;
            }
            if let Some(library) = &read.cufile {
                writeln!(out, "  {}", clean(&library.to_string()))?;
            }
            for reason in &read.not_tried {
                writeln!(out, "  not tried: {}", clean(reason))?;
            }
        }
    }
    let failed = read.is_some_and(|read| read.reads.iter().any(|proof| !proof.ok));
    Ok(ExitCode::from(u8::from(found.direct_is_lost || failed)))
}

/// `nobounce topo`.
pub(crate) fn topo(args: &TopoArgs) -> anyhow::Result<ExitCode> {
    let facts = facts(&Source { no_probe: true, ..args.source.clone() })?;
    let topology = Topology::of(&facts);
    if let Some(path) = &args.svg {
        write(path, &draw::svg(&topology))?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &topology)?;
        writeln!(out)?;
    } else if args.svg.is_none() {
        write!(out, "{}", draw::text(&topology, style(false)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Findings, facts and topology as JSON.
pub(crate) fn json(facts: &Facts) -> anyhow::Result<serde_json::Value> {
    Ok(serde_json::json!({
        "doctor": diagnose(facts), "facts": facts, "topo": Topology::of(facts),
    }))
}

/// The facts that the arguments name.
pub(crate) fn facts(source: &Source) -> anyhow::Result<Facts> {
    if let Some(name) = &source.example {
        return machines::machine(name).with_context(|| {
            format!("unknown example {name:?}: expected one of {}", machines::NAMES.join(", "))
        });
    }
    match (&source.facts, &source.root) {
        (Some(path), _) => saved(path),
        (None, Some(root)) => gather::gather(&Root::new(root), false),
        (None, None) => gather::gather(&Root::new("/"), !source.no_probe),
    }
}

/// Facts of a file.
fn saved(path: &Path) -> anyhow::Result<Facts> {
    Facts::from_json(&read(path)?).with_context(|| path.display().to_string())
}

/// The facts of this machine without experiments: what files, NVML and CUDA tell.
pub(crate) fn this_machine() -> anyhow::Result<Facts> {
    gather::gather(&Root::new("/"), false)
}

/// The text of a file ('-': standard input), if it is not too long.
pub(crate) fn read(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let told = || format!("cannot read {}", path.display());
    if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_FILE + 1).read_to_string(&mut text).with_context(told)?;
    } else {
        std::fs::File::open(path)
            .with_context(told)?
            .take(MAX_FILE + 1)
            .read_to_string(&mut text)
            .with_context(told)?;
    }
    Ok(text)
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if path == Path::new("-") {
        return Ok(std::io::stdout().lock().write_all(text.as_bytes())?);
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn style(all: bool) -> Style {
    let terminal = std::io::stdout().is_terminal();
    let color = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let width = std::env::var("COLUMNS")
        .ok()
        .and_then(|columns| columns.parse().ok())
        .filter(|width| *width >= 60)
        .unwrap_or(120);
    Style { color, width: width.min(140), all }
}

fn explain(id: &str) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    if id == "all" {
        for explanation in explain::ALL {
            writeln!(out, "{:<24} {}", explanation.id, explanation.summary)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let Some(explanation) = explain::text(id) else {
        anyhow::bail!("unknown check {id:?}; `nobounce doctor --explain all` lists the checks");
    };
    writeln!(out, "{}: {}\n\n{}", explanation.id, explanation.summary, explanation.text)?;
    Ok(ExitCode::SUCCESS)
}
