//! Properties of every diagnosis: over known machines, all recorded cases and the threads of the
//! corpus.

#[expect(dead_code, reason = "scores and sources are another test's")]
#[path = "common/corpus.rs"]
mod corpus;
#[path = "common/edit.rs"]
mod edit;

use std::collections::BTreeSet;
use std::path::Path;

use nobounce_diagnose::verdict::{PathKind, Verdict};
use nobounce_diagnose::{Diagnosis, diagnose};
use nobounce_topology::facts::{DeviceNode, Facts, Module, PciDevice, Probe, Read};
use nobounce_topology::machines;
use serde_json::Value;

/// Known machines as they are and after each recorded case, and those of the corpus.
fn all() -> Vec<(String, Facts)> {
    let mut all: Vec<(String, Facts)> =
        machines::NAMES.iter().map(|name| ((*name).to_owned(), machines::machine(name).unwrap())).collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files {
        let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        for case in cases {
            let name = format!("{} ({})", case["thread"], case["says"]);
            let Some(base) = case["base"].as_str() else { continue };
            let list = |field: &str| case.get(field).cloned().unwrap_or_else(|| Value::Array(Vec::new()));
            let remove: Vec<String> = serde_json::from_value(list("remove")).unwrap();
            let set: Vec<(String, Value)> = serde_json::from_value(list("set")).unwrap();
            all.push((name.clone(), edit::edit(&machines::machine(base).unwrap(), &remove, &set, &name)));
        }
    }
    let threads = corpus::cases("threads");
    assert!(threads.len() >= 130, "{} threads", threads.len());
    all.extend(threads.iter().map(|case| (case.name.clone(), case.facts())));
    all
}

/// Every place of a fact, with the elements of lists taken together.
fn places(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let place = format!("{at}/{}", name.replace('/', "~1"));
                places(field, &place, found);
                found.insert(place);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| places(item, &format!("{at}/*"), found)),
        _ => {}
    }
}

/// Removes the fact of a place, everywhere or from the first element only.
fn remove(value: &mut Value, place: &[&str], first_only: bool) {
    let Some((part, rest)) = place.split_first() else { return };
    match value {
        Value::Object(fields) => {
            let name = part.replace("~1", "/");
            if rest.is_empty() {
                fields.remove(&name);
            } else if let Some(field) = fields.get_mut(&name) {
                remove(field, rest, first_only);
            }
        }
        Value::Array(items) => {
            let count = if first_only { 1 } else { items.len() };
            items.iter_mut().take(count).for_each(|item| remove(item, rest, first_only));
        }
        _ => {}
    }
}

fn unknown(diagnosis: &Diagnosis) -> BTreeSet<(String, String)> {
    let unknown = diagnosis.verdicts.iter().filter(|verdict| verdict.path == PathKind::Unknown);
    unknown.map(|verdict| (verdict.gpu.clone(), verdict.nic.clone())).collect()
}

/// The machine without any probe, and without what CUDA tells: its verdicts are unknown.
fn blind(name: &str) -> Facts {
    let mut facts = machines::machine(name).unwrap();
    for gpu in &mut facts.gpus {
        (gpu.gpudirect_rdma, gpu.dma_buf) = (Read::no("no libcuda"), Read::no("no libcuda"));
        (gpu.export_probe, gpu.window_probe) = (Read::default(), Read::default());
    }
    for nic in &mut facts.nics {
        (nic.dma_buf_probe, nic.open_probe) = (Read::default(), Read::default());
    }
    facts.registrations.clear();
    facts
}

#[test]
fn a_removed_fact_never_turns_unknown_into_direct() {
    let mut machines: Vec<(String, Facts)> = all();
    let blind = ["dgx-h100", "hgx-h100-roce", "vm-flat", "workstation", "mi300x", "p5-efa"]
        .map(|name| (format!("{name}, blind"), blind(name)));
    machines.extend(blind);
    let (mut tried, mut wrong) = (0, Vec::new());
    for (name, facts) in machines {
        let unknown = unknown(&diagnose(&facts));
        if unknown.is_empty() {
            continue;
        }
        let json = serde_json::to_value(&facts).unwrap();
        let mut found = BTreeSet::new();
        places(&json, "", &mut found);
        for place in &found {
            let parts: Vec<&str> = place.trim_start_matches('/').split('/').collect();
            for first_only in [false, true].into_iter().take(1 + usize::from(place.contains('*'))) {
                let mut less = json.clone();
                remove(&mut less, &parts, first_only);
                let Ok(less) = serde_json::from_value::<Facts>(less) else { continue };
                tried += 1;
                let after = diagnose(&less);
                let turned = after.verdicts.iter().find(|verdict| {
                    matches!(verdict.path, PathKind::Direct | PathKind::Slow)
                        && unknown.contains(&(verdict.gpu.clone(), verdict.nic.clone()))
                });
                if let Some(verdict) = turned {
                    wrong.push(format!("{name}: without {place}: {} with {}", verdict.gpu, verdict.nic));
                    break;
                }
            }
        }
    }
    assert!(tried > 1000, "only {tried} facts were removed");
    assert!(wrong.is_empty(), "{} of {tried}:\n{}", wrong.len(), wrong.join("\n"));
}

/// Cards that the driver excludes although it would export their memory, by its word.
fn excluded(name: &str) -> (String, Facts) {
    let mut facts = machines::machine("workstation").unwrap();
    for gpu in &mut facts.gpus {
        gpu.name = Read::Yes(name.to_owned());
        (gpu.gpudirect_rdma, gpu.dma_buf) = (Read::Yes(false), Read::Yes(true));
        gpu.export_probe = Read::default();
    }
    facts.registrations.clear();
    (name.to_owned(), facts)
}

#[test]
fn without_the_attribute_of_the_class_nothing_staged_becomes_direct() {
    let mut tried = 0;
    let cards = ["NVIDIA GeForce RTX 4090", "NVIDIA TITAN RTX"].map(excluded);
    for (name, facts) in all().into_iter().chain(cards) {
        // An export or a registration that worked outweighs the attribute.
        let shown = |gpu: &str| {
            facts.registrations.iter().any(|registration| registration.gpu == gpu && registration.probe.ok)
                || facts.gpus.iter().any(|fact| {
                    fact.address == gpu && fact.export_probe.known().is_some_and(|probe| probe.ok)
                })
        };
        let before = diagnose(&facts);
        let mut less = facts.clone();
        for gpu in &mut less.gpus {
            gpu.gpudirect_rdma = Read::default();
        }
        let after = diagnose(&less);
        for staged in before.verdicts.iter().filter(|verdict| verdict.path == PathKind::Staged) {
            let same = |verdict: &&Verdict| verdict.gpu == staged.gpu && verdict.nic == staged.nic;
            let Some(now) = after.verdicts.iter().find(same) else { continue };
            tried += 1;
            let turned = matches!(now.path, PathKind::Direct | PathKind::Slow);
            assert!(!turned || shown(&staged.gpu), "{name}: {} with {}", now.gpu, now.nic);
        }
    }
    assert!(tried > 100, "only {tried} pairs are staged");
}

/// A change of facts, with its name.
type Change = (&'static str, fn(&mut Facts));

/// Facts that no check is about.
fn irrelevant() -> Vec<Change> {
    vec![
        ("host", |facts| facts.host = Some("another-host".to_owned())),
        ("program", |facts| facts.written_by = "another program".to_owned()),
        ("variable", |facts| {
            // An empty environment may be one that is not known.
            if !facts.environment.is_empty() {
                facts.environment.insert("NCCL_DEBUG".to_owned(), "INFO".to_owned());
            }
        }),
        ("module", |facts| {
            if let Read::Yes(modules) = &mut facts.kernel.modules {
                modules.insert("ext4".to_owned(), Module::default());
            }
        }),
        ("device file", |facts| {
            if let Read::Yes(nodes) = &mut facts.devices {
                nodes.push(DeviceNode { path: "/dev/null".to_owned(), open: Probe::worked("") });
            }
        }),
        ("word of the command line", |facts| {
            if let Read::Yes(line) = &mut facts.kernel.command_line {
                line.push_str(" quiet splash");
            }
        }),
        ("line of the log", |facts| {
            if let Read::Yes(lines) = &mut facts.kernel.log {
                lines.insert(0, "EXT4-fs (nvme0n1p2): mounted filesystem".to_owned());
            }
        }),
        ("PCI device", |facts| {
            facts.pci.push(PciDevice {
                address: "0000:ff:1f.3".to_owned(),
                class: 0x0c_0330,
                ..PciDevice::default()
            });
        }),
    ]
}

/// What is shown first: the gravest finding.
fn first(diagnosis: &Diagnosis) -> Option<(&'static str, &str)> {
    diagnosis.findings.first().map(|finding| (finding.id, finding.title.as_str()))
}

#[test]
fn an_irrelevant_fact_never_changes_the_first_finding() {
    for (name, facts) in all() {
        let before = diagnose(&facts);
        for (what, add) in irrelevant() {
            let mut more = facts.clone();
            add(&mut more);
            let after = diagnose(&more);
            assert_eq!(first(&before), first(&after), "{name}: another {what}");
            assert_eq!(before.ids(), after.ids(), "{name}: another {what}");
        }
    }
}

/// The lists whose order has no meaning, turned around or rotated.
fn shuffled(facts: &Facts, by: usize) -> Facts {
    fn turn<T>(list: &mut [T], by: usize) {
        list.reverse();
        let length = list.len().max(1);
        list.rotate_left(by % length);
    }
    let mut facts = facts.clone();
    turn(&mut facts.pci, by);
    turn(&mut facts.gpus, by);
    turn(&mut facts.nics, by);
    turn(&mut facts.registrations, by);
    turn(&mut facts.transfers, by);
    if let Read::Yes(pairs) = &mut facts.gpu_peers {
        turn(pairs, by);
        // A pair has no first GPU either.
        pairs.iter_mut().for_each(|pair| std::mem::swap(&mut pair.one, &mut pair.other));
    }
    for nic in &mut facts.nics {
        turn(&mut nic.ports, by);
        for port in &mut nic.ports {
            if let Read::Yes(gids) = &mut port.gids {
                turn(gids, by);
            }
            if let Some(Read::Yes(subnets)) = port.netdev.as_mut().map(|netdev| &mut netdev.subnets) {
                turn(subnets, by);
            }
        }
    }
    if let Read::Yes(nodes) = &mut facts.devices {
        turn(nodes, by);
    }
    facts
}

#[test]
fn the_same_facts_in_another_order_give_the_same_answer() {
    for (name, facts) in all() {
        let wanted = serde_json::to_value(diagnose(&facts)).unwrap();
        for by in [0, 1, 5] {
            let found = serde_json::to_value(diagnose(&shuffled(&facts, by))).unwrap();
            assert_eq!(wanted, found, "{name}: rotated by {by}");
        }
    }
}
