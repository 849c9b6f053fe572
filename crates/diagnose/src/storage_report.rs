//! The routes of a path for people: one line for each GPU, the chain link by link, the findings.

use std::fmt::Write as _;

use crate::finding::Severity;
use crate::report::{Style, full, headline, wrapped};
use crate::storage_verdict::{ChainLink, Route, State, StorageDiagnosis, StorageVerdict};
use nobounce_topology::clean;
use nobounce_topology::facts::{Facts, Storage};

/// The report.
#[must_use]
pub fn storage_report(facts: &Facts, storage: &Storage, found: &StorageDiagnosis, style: Style) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}", headline(facts));
    place(&mut out, storage, style);
    routes(&mut out, facts, found, style);
    chain(&mut out, facts, found, style);
    for finding in found.findings.iter().filter(|finding| finding.severity > Severity::Info) {
        full(&mut out, finding, style);
    }
    let notes: Vec<_> = found.findings.iter().filter(|finding| finding.severity == Severity::Info).collect();
    if !notes.is_empty() {
        out.push('\n');
        for finding in notes {
            if style.all {
                full(&mut out, finding, style);
            } else {
                let head = format!("{}  {}: ", style.paint("2", "info"), finding.id);
                wrapped(&mut out, &head, &finding.title, finding.id.len() + 8, 6, style);
            }
        }
        if !style.all {
            let _ = writeln!(out, "{}", style.paint("2", "      --all prints cause and fix of these"));
        }
    }
    let _ = writeln!(out, "\n{}", last_line(found, style));
    out
}

fn place(out: &mut String, storage: &Storage, style: Style) {
    let mut text = format!("{}: ", storage.path);
    match storage.mount.known() {
        Some(mount) => {
            let _ = write!(text, "{} on {}", mount.kind, mount.point);
            let names: Vec<&str> =
                storage.devices.known().into_iter().flatten().map(|device| device.name.as_str()).collect();
            if names.is_empty() {
                let _ = write!(text, ", from {}", mount.source);
            } else {
                let shown = names.iter().take(6).copied().collect::<Vec<_>>().join(" > ");
                let more =
                    if names.len() > 6 { format!(" and {} more", names.len() - 6) } else { String::new() };
                let _ = write!(text, ", {shown}{more}");
            }
        }
        None => text.push_str("filesystem unknown"),
    }
    out.push('\n');
    wrapped(out, &style.paint("1", "file  "), &text, 6, 6, style);
}

fn label(facts: &Facts, verdict: &StorageVerdict) -> String {
    let gpu = facts.gpus.iter().find(|gpu| gpu.address == verdict.gpu);
    gpu.map_or_else(|| clean(&verdict.gpu), |gpu| clean(&gpu.label()))
}

/// One line for each GPU, and the reasons once for all that share them.
fn routes(out: &mut String, facts: &Facts, found: &StorageDiagnosis, style: Style) {
    if found.verdicts.is_empty() {
        let _ = writeln!(out, "\nno GPU found; the chain below holds for any GPU");
        return;
    }
    let widest = |cells: Vec<usize>, least: usize| cells.into_iter().max().unwrap_or(0).max(least);
    let gpu = widest(found.verdicts.iter().map(|verdict| label(facts, verdict).chars().count()).collect(), 3);
    let route = widest(found.verdicts.iter().map(|verdict| verdict.route.words().len()).collect(), 10);
    let title = format!("{:<gpu$}  dist  {:<route$}  nobounce's own", "GPU", "read by cuFile");
    let _ = writeln!(out, "\n{}", style.paint("2", &title));
    for verdict in &found.verdicts {
        let code = match verdict.route {
            Route::P2pdma | Route::NvidiaFs => "32",
            Route::Compat => "33",
            Route::Fails => "31",
            Route::Unknown => "35",
        };
        let _ = writeln!(
            out,
            "{:<gpu$}  {:<4}  {}  {}",
            label(facts, verdict),
            verdict.distance.map_or("-", nobounce_topology::tree::Distance::name),
            style.paint(code, &format!("{:<route$}", verdict.route.words())),
            verdict.own.words(),
        );
    }
    shared(out, facts, found, style, |verdict| {
        verdict.reasons.iter().cloned().chain([format!("nobounce: {}", verdict.own_reason)]).collect()
    });
}

/// Lines that several GPUs have in common, with their labels.
fn shared(
    out: &mut String,
    facts: &Facts,
    found: &StorageDiagnosis,
    style: Style,
    lines: impl Fn(&StorageVerdict) -> Vec<String>,
) {
    let mut known: Vec<(String, Vec<String>)> = Vec::new();
    for verdict in &found.verdicts {
        for line in lines(verdict) {
            match known.iter_mut().find(|(text, _)| *text == line) {
                Some((_, labels)) => labels.push(label(facts, verdict)),
                None => known.push((line, vec![label(facts, verdict)])),
            }
        }
    }
    for (text, labels) in known {
        let who = if labels.len() == found.verdicts.len() {
            String::new()
        } else {
            format!("{}: ", crate::checks::list(&labels))
        };
        wrapped(out, "  ", &format!("{who}{text}"), 2, 4, style);
    }
}

/// The links: those of all GPUs, then those of each, once where they are the same.
fn chain(out: &mut String, facts: &Facts, found: &StorageDiagnosis, style: Style) {
    let title = format!("{:<17}{:<9}{:<11}seen", "chain", "P2PDMA", "nvidia-fs");
    let _ = writeln!(out, "\n{}", style.paint("2", &title));
    for link in &found.chain {
        row(out, link, "", style);
    }
    let mut known: Vec<(&ChainLink, Vec<String>)> = Vec::new();
    for verdict in &found.verdicts {
        for link in &verdict.links {
            match known.iter_mut().find(|(other, _)| *other == link) {
                Some((_, labels)) => labels.push(label(facts, verdict)),
                None => known.push((link, vec![label(facts, verdict)])),
            }
        }
    }
    // The order of the links, not that of the GPUs.
    let mut names: Vec<&str> = Vec::new();
    for (link, _) in &known {
        if !names.contains(&link.name) {
            names.push(link.name);
        }
    }
    for name in names {
        for (link, labels) in known.iter().filter(|(link, _)| link.name == name) {
            let who = if labels.len() == found.verdicts.len() {
                String::new()
            } else {
                format!("{}: ", crate::checks::list(labels))
            };
            row(out, link, &who, style);
        }
    }
}

fn row(out: &mut String, link: &ChainLink, who: &str, style: Style) {
    let cell = |state: State, width: usize| {
        let code = match state {
            State::NotNeeded => "2",
            State::Ok => "32",
            State::Unknown => "35",
            State::Blocks => "31",
        };
        style.paint(code, &format!("{:<width$}", state.words()))
    };
    let head = format!("{:<17}{}{}", link.name, cell(link.p2pdma, 9), cell(link.nvidia_fs, 11));
    wrapped(out, &head, &format!("{who}{}", link.text), 37, 37, style);
}

fn last_line(found: &StorageDiagnosis, style: Style) -> String {
    let count = |severity: Severity| found.findings.iter().filter(|f| f.severity == severity).count();
    let many = |number: usize, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
    let (errors, warnings, unknown) =
        (count(Severity::Error), count(Severity::Warning), count(Severity::Unknown));
    let of =
        |wanted: fn(Route) -> bool| found.verdicts.iter().filter(|verdict| wanted(verdict.route)).count();
    let routes: Vec<String> = [
        (of(Route::is_direct), "direct"),
        (of(|route| route == Route::Compat), "through host memory"),
        (of(|route| route == Route::Fails), "with an error"),
        (of(|route| route == Route::Unknown), "unknown"),
    ]
    .into_iter()
    .filter(|(count, _)| *count > 0)
    .map(|(count, words)| format!("{count} {words}"))
    .collect();
    let who = if routes.is_empty() {
        "no GPU".to_owned()
    } else {
        format!("GPUs by cuFile's route: {}", routes.join(", "))
    };
    let text = format!("{who}; {}, {}, {unknown} unknown", many(errors, "error"), many(warnings, "warning"));
    let code = if errors > 0 {
        "1;31"
    } else if warnings + unknown > 0 {
        "1;33"
    } else {
        "1;32"
    };
    style.paint(code, &text)
}
