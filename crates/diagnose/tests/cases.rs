//! Machines with one thing wrong, after public threads: each is a healthy machine changed, and all
//! that is found is written down.
//!
//! `cases/*.json` hold lists of cases. `base` names a machine of `nobounce_topology::machines`;
//! `set` and `remove` change its facts by path, where `*` means all, `name=mlx5_0` those with that
//! field, `-` a new one at the end; `finds` is the complete set of findings. What a thread does not
//! tell (versions, models, the rest of the machine) is the base's or ours.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nobounce_diagnose::diagnose;
use nobounce_topology::facts::Facts;
use nobounce_topology::machines;
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// The public thread it is taken from.
    thread: String,
    /// What was wrong there.
    says: String,
    base: String,
    #[serde(default)]
    set: Vec<(String, Value)>,
    #[serde(default)]
    remove: Vec<String>,
    /// `error peermem-not-loaded`, ...: all of them.
    finds: Vec<String>,
    /// The paths of GPUs with their best adapter: all kinds that occur.
    paths: Vec<String>,
    /// What NCCL does with them: all kinds that occur.
    #[serde(default)]
    nccl: Option<Vec<String>>,
    /// What UCX does with them.
    #[serde(default)]
    ucx: Option<Vec<String>>,
    /// Whether exit code 1 follows; where it is left out, it does if there is an error.
    #[serde(default)]
    lost: Option<bool>,
}

fn parts(path: &str) -> Vec<String> {
    path.trim_start_matches('/').split('/').map(|part| part.replace("~1", "/")).collect()
}

/// Calls `change` on every value at the path.
fn each(value: &mut Value, path: &[String], change: &mut dyn FnMut(&mut Value, &str) -> bool) -> bool {
    let Some((part, rest)) = path.split_first() else { return false };
    if rest.is_empty() && !part.contains('*') && !part.contains('=') {
        return change(value, part);
    }
    let mut hit = false;
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                let chosen = match part.split_once('=') {
                    Some((field, wanted)) => item.get(field).and_then(Value::as_str) == Some(wanted),
                    None => part == "*" || *part == index.to_string(),
                };
                if chosen {
                    hit |= each(item, rest, change);
                }
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields.iter_mut() {
                if part == "*" || part == name {
                    hit |= each(field, rest, change);
                }
            }
        }
        _ => {}
    }
    hit
}

fn apply(case: &Case) -> Facts {
    let facts =
        machines::machine(&case.base).unwrap_or_else(|| panic!("{}: no machine {}", case.thread, case.base));
    let mut json: Value = serde_json::from_str(&facts.to_json()).unwrap();
    for path in &case.remove {
        let hit = each(&mut json, &parts(path), &mut |value, last| match value {
            Value::Object(fields) => fields.remove(last).is_some(),
            Value::Array(items) => {
                let before = items.len();
                items.retain(|item| item.as_str() != Some(last));
                items.len() < before
            }
            _ => false,
        }) || remove_elements(&mut json, &parts(path));
        assert!(hit, "{}: nothing at {path}", case.thread);
    }
    for (path, new) in &case.set {
        let hit = each(&mut json, &parts(path), &mut |value, last| match value {
            Value::Object(fields) => {
                fields.insert(last.to_owned(), new.clone());
                true
            }
            Value::Array(items) if last == "-" => {
                items.push(new.clone());
                true
            }
            Value::Array(items) => match last.parse::<usize>().ok().and_then(|index| items.get_mut(index)) {
                Some(item) => {
                    *item = new.clone();
                    true
                }
                None => false,
            },
            _ => false,
        });
        assert!(hit, "{}: nothing at {path}", case.thread);
    }
    Facts::from_json(&json.to_string()).unwrap_or_else(|error| panic!("{}: {error}", case.thread))
}

/// `/devices/path=~1dev~1x`: takes elements of a list away; a `*` at the end of the wanted text
/// stands for any end.
fn remove_elements(json: &mut Value, path: &[String]) -> bool {
    let Some((last, front)) = path.split_last() else { return false };
    let Some((field, wanted)) = last.split_once('=') else { return false };
    let mut hit = false;
    let mut take = |value: &mut Value| {
        if let Value::Array(items) = value {
            let before = items.len();
            items.retain(|item| {
                let text = item.get(field).and_then(Value::as_str).unwrap_or_default();
                !wanted.strip_suffix('*').map_or(text == wanted, |begin| text.starts_with(begin))
            });
            hit |= items.len() < before;
        }
    };
    let mut at = vec![json];
    for part in front {
        at = at
            .into_iter()
            .flat_map(|value| match value {
                Value::Object(fields) => fields
                    .iter_mut()
                    .filter(|(name, _)| part == "*" || part == *name)
                    .map(|(_, v)| v)
                    .collect(),
                Value::Array(items) => items
                    .iter_mut()
                    .enumerate()
                    .filter(|(index, _)| part == "*" || *part == index.to_string())
                    .map(|(_, v)| v)
                    .collect::<Vec<_>>(),
                _ => Vec::new(),
            })
            .collect();
    }
    at.into_iter().for_each(&mut take);
    hit
}

fn all() -> Vec<(String, Case)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
        .iter()
        .flat_map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            let cases: Vec<Case> =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            cases.into_iter().map(move |case| (name.clone(), case))
        })
        .collect()
}

fn kind<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
}

#[test]
fn each_case_gives_its_findings_and_no_others() {
    let mut wrong = Vec::new();
    for (file, case) in all() {
        let facts = apply(&case);
        let diagnosis = diagnose(&facts);
        let found: Vec<String> =
            diagnosis.ids().into_iter().map(|(id, severity)| format!("{severity} {id}")).collect();
        let mut wanted = case.finds.clone();
        wanted.sort();
        let mut sorted = found.clone();
        sorted.sort();
        let best: Vec<_> = diagnosis.verdicts.iter().filter(|verdict| verdict.best).collect();
        let paths: BTreeSet<String> = best.iter().map(|verdict| kind(&verdict.path)).collect();
        let nccl: BTreeSet<String> = best.iter().map(|verdict| kind(&verdict.nccl.kind)).collect();
        let ucx: BTreeSet<String> = best.iter().map(|verdict| kind(&verdict.ucx.kind)).collect();
        let set = |list: &[String]| list.iter().cloned().collect::<BTreeSet<_>>();
        let fine = sorted == wanted
            && paths == set(&case.paths)
            && case.nccl.as_deref().is_none_or(|wanted| nccl == set(wanted))
            && case.ucx.as_deref().is_none_or(|wanted| ucx == set(wanted));
        if !fine {
            wrong.push(format!(
                "{file} {} ({}):\n  wanted {wanted:?} {:?} {:?} {:?}\n  found  {sorted:?} {paths:?} {nccl:?} {ucx:?}",
                case.thread, case.says, case.paths, case.nccl, case.ucx
            ));
        }
        let errors = found.iter().any(|text| text.starts_with("error")) && !facts.gpus.is_empty();
        if diagnosis.direct_is_lost != case.lost.unwrap_or(errors) {
            wrong.push(format!(
                "{file} {} ({}): lost {}, {found:?} {paths:?} {nccl:?} {ucx:?}",
                case.thread, case.says, diagnosis.direct_is_lost
            ));
        }
        let anonymous = diagnose(&facts.clone().redacted());
        if anonymous.ids() != diagnosis.ids() || anonymous.direct_is_lost != diagnosis.direct_is_lost {
            wrong.push(format!(
                "{file} {} ({}): without names {:?}",
                case.thread,
                case.says,
                anonymous.ids()
            ));
        }
        // Every finding has all of its parts.
        for finding in &diagnosis.findings {
            assert!(!finding.why.is_empty() && !finding.evidence.is_empty(), "{}: {finding:?}", case.thread);
        }
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn there_are_enough_cases_each_with_its_thread() {
    // A case that no thread stands behind says "none".
    let cases: Vec<_> = all().into_iter().filter(|(_, case)| case.thread != "none").collect();
    assert!(cases.len() >= 60, "{}", cases.len());
    let mut threads: BTreeMap<String, u32> = BTreeMap::new();
    for (_, case) in &cases {
        assert!(case.thread.contains('#') && case.says.len() > 10, "{case:?}");
        *threads.entry(case.thread.clone()).or_default() += 1;
    }
    assert!(threads.len() >= 60, "only {} threads", threads.len());
}

#[test]
fn facts_that_are_missing_never_become_fine() {
    // Remove each readable fact of a healthy machine: the verdict may become unknown, but no new
    // claim may appear.
    for name in machines::NAMES {
        let facts = machines::machine(name).unwrap();
        let before: BTreeSet<_> = diagnose(&facts).ids().into_iter().collect();
        let mut blind = facts.clone();
        blind.devices = nobounce_topology::facts::Read::no("Permission denied");
        for device in &mut blind.pci {
            device.config = nobounce_topology::facts::Read::no("only the first 64 bytes");
            device.iommu = nobounce_topology::facts::Read::no("Permission denied");
        }
        for gpu in &mut blind.gpus {
            gpu.dma_buf = nobounce_topology::facts::Read::default();
            gpu.export_probe = nobounce_topology::facts::Read::default();
            gpu.gpudirect_rdma = nobounce_topology::facts::Read::default();
        }
        for nic in &mut blind.nics {
            nic.dma_buf_probe = nobounce_topology::facts::Read::default();
            nic.open_probe = nobounce_topology::facts::Read::default();
        }
        blind.kernel.modules = nobounce_topology::facts::Read::no("Permission denied");
        blind.kernel.peer_memory_clients = nobounce_topology::facts::Read::no("Permission denied");
        let diagnosis = diagnose(&blind);
        let after: BTreeSet<_> = diagnosis.ids().into_iter().collect();
        let new: Vec<_> = after.difference(&before).collect();
        assert!(
            new.iter().any(|(_, severity)| *severity == nobounce_diagnose::finding::Severity::Unknown),
            "{name}: nothing is said to be unknown: {after:?}"
        );
        assert!(
            !diagnosis.verdicts.iter().any(|v| v.path == nobounce_diagnose::verdict::PathKind::Direct),
            "{name}: a path is called direct although nothing shows it"
        );
    }
}
