//! Ports that went down, by the kernel's log: how often, and why.

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Facts, Nic};

/// So many losses of the link in the kernel's log are no reboot of a switch.
const FLAPS: usize = 3;

/// Words of a port module event, what they mean, and the remedy.
const MODULE: [(&str, &str, &str); 10] = [
    ("high temperature", "the transceiver is too hot", "check fans and airflow"),
    (
        "power budget exceeded",
        "the transceiver needs more power than the cage gives",
        "use a module of the card's power class",
    ),
    ("bad or shorted", "the cable or module is shorted", "replace it"),
    ("bus stuck", "the module's management bus is stuck", "reseat or replace the module"),
    ("no eeprom", "the module does not answer", "reseat or replace the module"),
    ("enforce part number", "the firmware does not admit this module", "use a listed module"),
    (
        "unknown identifier",
        "the firmware does not know this module",
        "use a listed module, or newer firmware",
    ),
    ("long range", "the firmware admits no long-range modules of others", "use a listed module"),
    (
        "insufficient",
        "the PCIe slot gives too little power",
        "connect the card's power cable, or use another slot",
    ),
    ("unplugged", "the cable was unplugged", "plug it in, and check its latch"),
];

/// What the log has about one adapter.
#[derive(Debug, Default)]
struct Events<'a> {
    downs: usize,
    /// The last event of the module, with its line.
    module: Option<(&'static str, &'static str, &'a str)>,
    last: &'a str,
}

fn events<'a>(facts: &'a Facts, nic: &Nic) -> Events<'a> {
    let mut found = Events::default();
    let Some(address) = nic.address.as_deref() else { return found };
    for line in facts.kernel.log.known().into_iter().flatten().filter(|line| line.contains(address)) {
        let lower = line.to_ascii_lowercase();
        if lower.contains("port module event") {
            let event = MODULE.iter().find(|(words, ..)| lower.contains(words));
            // A module that was plugged in again is fine.
            found.module = event.map(|(_, what, fix)| (*what, *fix, line.trim()));
        } else if lower.contains("link down") || lower.contains("link is down") {
            found.downs += 1;
            found.last = line.trim();
        }
    }
    found
}

fn times(count: usize) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

/// The same in short, beside errors of a log.
pub(crate) fn told(facts: &Facts, nic: &Nic) -> Vec<String> {
    let found = events(facts, nic);
    let mut told: Vec<String> = found.module.iter().map(|(what, ..)| (*what).to_owned()).collect();
    if found.downs > 0 {
        told.push(format!("the kernel's log has its link down {}", times(found.downs)));
    }
    told
}

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let facts = analysis.facts;
    let mut found = Vec::new();
    let mut flapping: Vec<(&Nic, Events<'_>)> = Vec::new();
    for nic in facts.nics.iter().filter(|nic| !nic.is_software()) {
        let events = events(facts, nic);
        match events.module {
            Some((what, fix, line)) => found.push(module(nic, what, fix, line, events.downs)),
            None if events.downs >= FLAPS => flapping.push((nic, events)),
            None => {}
        }
    }
    let Some((_, events)) = flapping.first() else { return found };
    let names: Vec<String> = flapping.iter().map(|(nic, _)| nic.name.clone()).collect();
    let addresses = super::port::pci_addresses(flapping.iter().map(|(nic, _)| *nic));
    found.push(
        Finding::new("port-events", Severity::Warning, format!("{}: the link went down {}", list(&names), times(events.downs)))
            .why("The module reported nothing: the cable, the switch port or the other end is at fault. Each loss ends connections with status 12, or stalls them until they retry.")
            .seen("kernel log", events.last)
            .fix(Fix::host().remark("reseat or replace the cable").each(&addresses, "sudo mlxlink -d {} -m -c --show_eye"))
            .root()
            .on(names),
    );
    found
}

fn module(nic: &Nic, what: &str, fix: &str, line: &str, downs: usize) -> Finding {
    let active = nic.ports.iter().any(nobounce_topology::facts::Port::is_active);
    let address = nic.address.as_deref().unwrap_or(&nic.name);
    // A port that works again needs nothing at once.
    let severity = if active && downs < FLAPS { Severity::Info } else { Severity::Warning };
    Finding::new("port-events", severity, format!("{}: {what}", nic.name))
        .why("The firmware switches the port off, or the link fails again and again. The GPUs nearest to it use a more distant adapter meanwhile.")
        .seen("kernel log", line)
        .seen("losses of the link in it", downs.to_string())
        .fix(Fix::host().remark(fix).run(format!("sudo mlxlink -d {address} -m")))
        .root()
        .on([nic.name.clone()])
}
