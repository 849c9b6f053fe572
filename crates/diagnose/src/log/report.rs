//! Logs joined with findings: which connections were direct, which were not, and why.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::rows::{LogRow, count_links, nccl_row, ucx_rows};
use super::{
    AdapterErrors, FabricLog, Fatal, KnownMessages, LogCause, NcclLog, OtherLog, Seen, UcxLog, causes, fatal,
    known,
};
use crate::diagnosis::Diagnosis;
use crate::finding::Severity;
use crate::nccl;
use nobounce_topology::facts::{Facts, Library, Port, Read};

/// What a log comes to.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LogReport {
    /// Whose log: `NCCL`, `UCX`, `libfabric`, or `other`.
    pub program: &'static str,
    /// Lines of that program's.
    pub lines: u64,
    /// Connections by how they go: `direct`, `staged`, `sockets`, `local`; for libfabric,
    /// providers: `selected`, `sockets`.
    pub totals: BTreeMap<&'static str, u64>,
    /// Connections over the network that are not direct, put together by host, GPU and adapter.
    pub not_direct: Vec<LogRow>,
    /// What went wrong, by what it means.
    pub problems: Vec<(String, Seen)>,
    /// Fatal completions, with the findings of this machine that can be the cause.
    pub fatal: Vec<Fatal>,
    /// Adapters with time-outs, other fatal completions or port errors, the most first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterErrors>,
    /// Causes of the problems and of the fatal completions, the likeliest of each first.
    pub causes: Vec<LogCause>,
    /// Findings on this machine that explain it.
    pub findings: Vec<&'static str>,
    /// Settings that the log names and that matter.
    pub settings: Vec<String>,
    /// Whether something that could be direct was not.
    pub direct_is_lost: bool,
    /// Further words.
    pub notes: Vec<String>,
}

/// Settings that NCCL names in its log and that keep it from GPUDirect, with the value that does.
const DEFEATING: [(&str, &str); 6] = [
    ("NCCL_IB_DISABLE", "1"),
    ("NCCL_NET", "Socket"),
    ("NCCL_NET_GDR_LEVEL", "LOC"),
    ("NCCL_NET_GDR_READ", "0"),
    ("NCCL_DMABUF_ENABLE", "0"),
    ("NCCL_P2P_DISABLE", "1"),
];

/// A log of NCCL's with what is known of this machine.
#[must_use]
pub fn join_nccl(log: &NcclLog, facts: &Facts, diagnosis: &Diagnosis) -> LogReport {
    let mut report = LogReport { program: "NCCL", lines: log.lines, ..LogReport::default() };
    let hosts: BTreeSet<&str> = log.links.keys().map(|link| link.host.as_str()).collect();
    // These facts apply to a host of the log if they are its own, or if there is no other.
    let ours = |host: &str| {
        facts
            .host
            .as_deref()
            .is_none_or(|name| name == host || hosts.len() <= 1 || short(name) == short(host))
    };
    // The settings and version of the job apply, not those of the shell that doctor runs in.
    let job = job_of(log, facts, &ours);
    let again = job.as_ref().map(crate::diagnose);
    let diagnosis = again.as_ref().unwrap_or(diagnosis);
    for (key, count) in count_links(log, &mut report.totals) {
        report.not_direct.push(nccl_row(log, key, count, &ours, facts, diagnosis));
    }
    report.settings = defeating_settings(log);
    report.problems =
        log.problems.iter().map(|(meaning, seen)| ((*meaning).to_owned(), seen.clone())).collect();
    report.fatal = fatals(&log.fatal, diagnosis);
    add_causes(&mut report, &log.known, &log.fatal, job.as_ref().unwrap_or(facts));
    report.adapters = log.errors.rows(facts, &ours);
    nccl_notes(&mut report, log, facts, &ours);
    staged_causes(&mut report, diagnosis, job.as_ref().unwrap_or(facts));
    let lost = report.totals.get("staged").copied().unwrap_or(0)
        + report.totals.get("sockets").copied().unwrap_or(0);
    report.direct_is_lost = lost > 0 || !report.fatal.is_empty();
    explain(
        &mut report,
        diagnosis,
        &[
            "nccl", "peermem", "dmabuf", "closed", "driver", "no-dev", "dev", "memlock", "gid", "port",
            "gpu", "nic", "kernel",
        ],
    );
    report
}

/// Variables of the log that keep NCCL from GPUDirect become settings of the report.
fn defeating_settings(log: &NcclLog) -> Vec<String> {
    let mut settings = Vec::new();
    for ((host, name), value) in &log.variables {
        if DEFEATING.iter().any(|(known, bad)| {
            known == name
                && (value.eq_ignore_ascii_case(bad) || (*known == "NCCL_NET_GDR_LEVEL" && value == "0"))
        }) {
            settings.push(format!("{name}={value}{}", of_host(host)));
        }
    }
    settings.dedup();
    settings
}

/// Notes tell what the log lacks, and which hosts these findings do not cover.
fn nccl_notes(report: &mut LogReport, log: &NcclLog, facts: &Facts, ours: &dyn Fn(&str) -> bool) {
    if log.links.is_empty() {
        report.notes.push(if log.lines == 0 {
            "no line of NCCL's was recognised: the log may be another program's, in another file (NCCL_DEBUG_FILE), or without NCCL_DEBUG=INFO".to_owned()
        } else {
            "the log has no connection of NCCL's that is recognised here: NCCL_DEBUG=INFO writes them, unless NCCL_DEBUG_SUBSYS leaves out INIT, NET or GRAPH".to_owned()
        });
    }
    let present: Vec<&str> = facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software() && nic.ports.iter().any(Port::may_be_active))
        .map(|nic| nic.name.as_str())
        .collect();
    for (host, chosen) in log.adapters.iter().filter(|(host, _)| ours(host)) {
        let chosen: Vec<&str> = chosen.iter().flat_map(|names| names.split('+')).collect();
        let unused: Vec<&str> = present.iter().filter(|name| !chosen.contains(name)).copied().collect();
        // The names of another machine say nothing about this one.
        if !unused.is_empty() && chosen.iter().any(|name| present.contains(name)) {
            let (chosen, unused) = (crate::checks::list(&chosen), crate::checks::list(&unused));
            report.notes.push(format!("NCCL uses {chosen}{}, and not {unused}", of_host(host)));
        }
    }
    let mut elsewhere: Vec<&str> = report
        .not_direct
        .iter()
        .map(|row| row.host.as_str())
        .filter(|host| !host.is_empty() && !ours(host))
        .collect();
    elsewhere.dedup();
    if !elsewhere.is_empty() {
        report.notes.push(format!(
            "the findings apply to {}; for {} run doctor there",
            facts.host.as_deref().unwrap_or("this machine"),
            crate::checks::list(&elsewhere)
        ));
    }
    if log.forgotten > 0 {
        report.notes.push(format!("{} entries were dropped: too many to keep", log.forgotten));
    }
}

/// The facts as the job saw them: its NCCL version, and the variables that NCCL logged. `None` if
/// the log has neither.
fn job_of(log: &NcclLog, facts: &Facts, ours: &dyn Fn(&str) -> bool) -> Option<Facts> {
    let version = log.versions.keys().next().filter(|_| log.versions.len() == 1);
    let told: Vec<_> = log
        .variables
        .iter()
        .filter(|((host, name), _)| ours(host) && nobounce_topology::sysfs::matters(name))
        .map(|((_, name), value)| (name.clone(), value.clone()))
        .collect();
    if version.is_none() && told.is_empty() {
        return None;
    }
    let mut job = facts.clone();
    job.environment.extend(told);
    if let Some(version) = version {
        let version = version.split('+').next().map(str::to_owned);
        job.libraries.nccl = Read::Yes(Some(Library { version, ..Library::default() }));
    }
    Some(job)
}

/// A log of UCX's with what is known of this machine.
#[must_use]
pub fn join_ucx(log: &UcxLog, facts: &Facts, diagnosis: &Diagnosis) -> LogReport {
    let mut job = facts.clone();
    job.environment.extend(
        log.variables.clone().into_iter().filter(|(name, _)| nobounce_topology::sysfs::matters(name)),
    );
    let again = (!log.variables.is_empty()).then(|| crate::diagnose(&job));
    let diagnosis = again.as_ref().unwrap_or(diagnosis);
    let mut report = LogReport { program: "UCX", lines: log.lines, ..LogReport::default() };
    report.not_direct = ucx_rows(log, &mut report.totals, diagnosis);
    const MATTER: [&str; 6] = [
        "UCX_TLS",
        "UCX_NET_DEVICES",
        "UCX_IB_GPU_DIRECT_RDMA",
        "UCX_CUDA_COPY_DMABUF",
        "UCX_RNDV_SCHEME",
        "UCX_IB_PCI_RELAXED_ORDERING",
    ];
    report.settings =
        MATTER.iter().filter_map(|name| Some(format!("{name}={}", log.variables.get(*name)?))).collect();
    let tcp: u64 =
        log.lanes.iter().filter(|(lane, _)| lane.starts_with("tcp/")).map(|(_, count)| count).sum();
    let rdma: u64 =
        log.lanes.iter().filter(|(lane, _)| !lane.starts_with("tcp/")).map(|(_, count)| count).sum();
    if tcp > 0 && rdma == 0 {
        report.notes.push(format!("all {tcp} connections between machines use TCP"));
        if report.not_direct.is_empty() {
            let way = "tcp".to_owned();
            report.not_direct.push(LogRow {
                way,
                count: tcp,
                outweighs: log.hosts.len() <= 1,
                sockets: true,
                ..LogRow::default()
            });
        }
    }
    for ((device, what), found) in &log.detected {
        if !found {
            report.notes.push(format!("{device}: UCX did not find {what}"));
        }
    }
    report.notes.truncate(32);
    if log.hosts.len() > 1 && !report.not_direct.is_empty() {
        report.notes.push(format!(
            "{} hosts logged, and lines of protocols belong to any of them: the plans in the table stay",
            log.hosts.len()
        ));
    }
    let emulated = log.uses.keys().filter(|used| used.is_emulated()).count();
    if emulated > 0 {
        report.notes.push(format!(
            "{} by software emulation: the lane has no RDMA for the operation, so UCX sends messages that the other CPU carries out; this outweighs a verdict of direct",
            times(emulated as u64)
        ));
    }
    if log.uses.is_empty() {
        report.notes.push(if log.lines == 0 {
            "no line of UCX's was recognised: the log may be another program's, or in another file (UCX_LOG_FILE)".to_owned()
        } else {
            "the log has no protocol for GPU memory: UCX_PROTO_INFO=y UCX_LOG_LEVEL=info writes them".to_owned()
        });
    }
    if log.forgotten > 0 {
        report.notes.push(format!("{} entries were dropped: too many to keep", log.forgotten));
    }
    report.problems = log.problems.values().map(|seen| (seen.example.clone(), seen.clone())).collect();
    report.fatal = fatals(&log.fatal, diagnosis);
    add_causes(&mut report, &log.known, &log.fatal, &job);
    report.adapters = log.errors.rows(facts, &|_| true);
    report.direct_is_lost =
        !report.not_direct.is_empty() || (tcp > 0 && rdma == 0) || !report.fatal.is_empty();
    explain(
        &mut report,
        diagnosis,
        &[
            "ucx", "peermem", "dmabuf", "closed", "driver", "no-dev", "dev", "memlock", "gid", "port", "gpu",
            "nic", "kernel",
        ],
    );
    report
}

/// What other programs said, with what is known of this machine.
#[must_use]
pub fn join_other(log: &OtherLog, facts: &Facts, diagnosis: &Diagnosis) -> LogReport {
    let mut report = LogReport { program: "other", lines: log.lines, ..LogReport::default() };
    report.fatal = fatals(&log.fatal, diagnosis);
    add_causes(&mut report, &log.known, &log.fatal, facts);
    report.adapters = log.errors.rows(facts, &|_| true);
    report.direct_is_lost = !report.fatal.is_empty();
    if log.is_empty() {
        report.notes.push(
            "no line of NCCL, UCX or libfabric was recognised, and no known message of another program"
                .to_owned(),
        );
    }
    report
}

/// What staged connections come from, unless a finding of this machine explains them.
fn staged_causes(report: &mut LogReport, diagnosis: &Diagnosis, facts: &Facts) {
    let of = |kind: &str| report.totals.get(kind).copied().unwrap_or(0);
    let explained = diagnosis.findings.iter().any(|finding| {
        finding.severity >= Severity::Warning && finding.library.is_none_or(|library| library == "NCCL")
    });
    if of("staged") == 0 || of("direct") > 0 || explained {
        return;
    }
    let problem = "no connection over the adapters uses GPUDirect (GDRDMA)";
    report.causes.extend(known::causes(problem, causes::STAGED, facts, ""));
}

/// Meaning and causes of known messages, before those of completions, which are more general.
fn add_causes(
    report: &mut LogReport,
    known: &KnownMessages,
    fatal: &BTreeMap<u32, (fatal::Status, Seen)>,
    facts: &Facts,
) {
    let (problems, causes) = known.judge(facts);
    // A meaning replaces the plain one of the same lines.
    report
        .problems
        .retain(|(_, seen)| !problems.iter().any(|(_, known)| known.example.contains(&seen.example)));
    report.problems.splice(0..0, problems);
    report.causes = causes;
    report.causes.extend(fatal.values().flat_map(|(status, seen)| status.causes(facts, seen)));
}

/// Fatal completions with their possible causes here.
fn fatals(found: &BTreeMap<u32, (fatal::Status, Seen)>, diagnosis: &Diagnosis) -> Vec<Fatal> {
    let causes = || {
        let grave = diagnosis.findings.iter().filter(|finding| finding.severity > Severity::Info);
        grave.map(|finding| finding.id)
    };
    found.values().map(|(status, seen)| Fatal::of(*status, seen.clone(), causes())).collect()
}

/// A log of libfabric's with what is known of this machine.
#[must_use]
pub fn join_fabric(log: &FabricLog, facts: &Facts, diagnosis: &Diagnosis) -> LogReport {
    let mut report = LogReport { program: "libfabric", lines: log.lines, ..LogReport::default() };
    report.fatal = fatals(&log.fatal, diagnosis);
    report.problems =
        log.problems.iter().map(|(meaning, seen)| ((*meaning).to_owned(), seen.clone())).collect();
    add_causes(&mut report, &log.known, &log.fatal, facts);
    report.adapters = log.errors.rows(facts, &|_| true);
    for (provider, count) in &log.providers {
        let tcp =
            ["tcp", "sockets", "udp", "net"].iter().any(|name| provider.split(';').any(|part| part == *name));
        let kind = if tcp { "sockets" } else { "selected" };
        *report.totals.entry(kind).or_default() += count;
        report.notes.push(format!("provider {provider} was selected {}", times(*count)));
        if tcp {
            let way = format!("libfabric's provider {provider}");
            let row = LogRow { way, count: *count, outweighs: true, sockets: true, ..LogRow::default() };
            report.not_direct.push(row);
        }
    }
    if log.lines == 0 {
        report
            .notes
            .push("no line of libfabric's was recognised: FI_LOG_LEVEL=warn or more writes them".to_owned());
    }
    let off = |meaning: &str| meaning.contains("GPUDirect off") || meaning.contains("emulates");
    let mut gdr_off = false;
    for (meaning, seen) in log.problems.iter().filter(|(meaning, _)| off(meaning)) {
        gdr_off = true;
        let way = (*meaning).to_owned();
        report.not_direct.push(LogRow { way, count: seen.count, outweighs: true, ..LogRow::default() });
    }
    // Another user of libfabric may have sockets.
    let selected = report.totals.contains_key("selected");
    report.not_direct.iter_mut().filter(|row| row.sockets).for_each(|row| row.mixed = selected);
    if !report.not_direct.is_empty() && !facts.nics.iter().any(nccl::needs_fabric) {
        report.notes.push(
            "NCCL and UCX use no adapter here through libfabric: the plans in the table stay".to_owned(),
        );
    }
    report.direct_is_lost = gdr_off || report.totals.contains_key("sockets") || !report.fatal.is_empty();
    explain(
        &mut report,
        diagnosis,
        &[
            "env-off",
            "efa",
            "nccl-efa",
            "no-dev",
            "dev",
            "verbs-provider",
            "memlock",
            "dmabuf",
            "peermem",
            "closed",
        ],
    );
    report
}

/// Findings above information that can be a cause.
fn explain(report: &mut LogReport, diagnosis: &Diagnosis, causes: &[&str]) {
    if report.direct_is_lost {
        report.findings = diagnosis
            .findings
            .iter()
            .filter(|finding| finding.severity >= Severity::Unknown)
            .filter(|finding| causes.iter().any(|begin| finding.id.starts_with(begin)))
            .map(|finding| finding.id)
            .collect();
    }
}

pub(super) fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

fn short(host: &str) -> &str {
    host.split('.').next().unwrap_or(host)
}

fn of_host(host: &str) -> String {
    if host.is_empty() { String::new() } else { format!(" on {host}") }
}
